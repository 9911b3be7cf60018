"""What a rank keeps besides the models: nested plain values and arrays, each rank's in a safetensors file.

Arrays are named by their content. One that the main rank holds too, such as the suffix window, which is equal on
all ranks, is in the main rank's file alone: a window of gigabytes is not written once for every GPU.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

_STATE = "state"
"""The JSON text, as bytes: what safetensors keeps as metadata is limited."""


class Snapshot(NamedTuple):
    """A state whose plain values are written down; `tensors` are the state's own, not copies."""

    tree: dict[str, Any]
    """Nested {"dict": ...}, {"list": ...}, {"value": ...} and {"tensor": index}."""
    tensors: list[Tensor]

    def digests(self) -> list[str]:
        """SHA-256 of each tensor's type, shape and content."""
        return [_digest(x) for x in self.tensors]


def snapshot(state: Mapping[str, Any]) -> Snapshot:
    """Take down a state. Its arrays must stay as they are until they are written.

    Raises:
        TypeError: a key is not a string.
    """
    tensors: list[Tensor] = []

    def plain(value: Any) -> dict[str, Any]:
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value)
        if isinstance(value, Tensor):
            tensors.append(value.detach().cpu().contiguous())
            return {"tensor": len(tensors) - 1}
        if isinstance(value, Mapping):
            if any(not isinstance(key, str) for key in value):
                raise TypeError(f"keys of a component's state must be strings, got {list(value)[:3]}")
            return {"dict": {key: plain(item) for key, item in value.items()}}
        if isinstance(value, Sequence) and not isinstance(value, str):
            return {"list": [plain(item) for item in value]}
        return {"value": value}

    return Snapshot(plain(state), tensors)


def write_state(path: Path, taken: Snapshot, digests: Sequence[str], elsewhere: Collection[str] = ()) -> None:
    """Write a snapshot without the tensors of which the digest is `elsewhere`: in the main rank's file."""
    text = json.dumps({"tree": taken.tree, "tensors": digests}).encode()
    files = {name: x for name, x in zip(digests, taken.tensors, strict=True) if name not in elsewhere}
    save_file({**files, _STATE: torch.frombuffer(bytearray(text), dtype=torch.uint8)}, path)


def read_state(path: Path, main: Path) -> dict[str, Any]:
    """The state that was written to `path`; `main` is the main rank's file of the same checkpoint."""
    with safe_open(path, "pt") as own, safe_open(main, "pt") as common:
        text = json.loads(own.get_tensor(_STATE).numpy().tobytes())
        here = set(own.keys())

        def restored(node: dict[str, Any]) -> Any:
            ((kind, value),) = node.items()
            if kind == "tensor":
                digest = text["tensors"][value]
                return (own if digest in here else common).get_tensor(digest)
            if kind == "dict":
                return {key: restored(item) for key, item in value.items()}
            return [restored(item) for item in value] if kind == "list" else value

        return restored(text["tree"])


def _digest(x: Tensor) -> str:
    digest = hashlib.sha256(f"{x.dtype} {list(x.shape)} ".encode())
    digest.update(x.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
