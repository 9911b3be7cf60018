"""Hugging Face checkpoints: find, read into (sharded) parameters, write."""

from __future__ import annotations

import json
import shutil
from collections.abc import Container, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from torchspec.errors import ConfigError
from torchspec.models.policy import Policy
from torchspec.models.spec import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
# What belongs to a checkpoint besides weights: config, generation config, tokenizer, chat template.
ASSETS = ("*.json", "*.jinja", "*.txt", "*.model")


def resolve_source(source: str) -> Path:
    """The local folder of a checkpoint: `source` itself, or the download of a hub id.

    Raises:
        ConfigError: neither a folder nor a hub id that can be had.
    """
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=[*ASSETS, "*.safetensors"]))
    except Exception as error:  # network, permissions, misspelt ids: huggingface_hub has many types for them
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"model.source = {source!r} is no local folder, and it cannot be had from the Hugging Face hub "
            f"({reason}); give a checkpoint folder, or download it where there is a network"
        ) from None


def fill(policy: Policy, folder: Path, device: torch.device) -> Policy:
    """Give a policy on the meta device, sharded or not, its memory and the weights of `folder`."""
    policy.to_empty(device=device)
    load_hf(policy, folder)
    return policy


def load_hf(policy: Policy, folder: Path) -> None:
    """Copy the safetensors of `folder` into `policy`, sharded or not, one tensor at a time.

    Raises:
        ConfigError: no weights, or a missing, unknown or mis-shaped tensor; nothing has been loaded then.
    """
    own = dict(policy.decoder.named_parameters())
    meta = {name: torch.empty(shape, device="meta") for name, shape in policy.parameter_shapes().items()}
    held = policy.adapter.to_hf({name: meta[name] for name in own}).keys()
    shapes = {name: tensor.shape for name, tensor in policy.adapter.to_hf(meta).items()}
    # Like transformers: a tied head that was stored all the same is not read.
    ignored = ("lm_head.weight", "rotary_emb.inv_freq") if policy.spec.tied else ("rotary_emb.inv_freq",)
    for hf_name, tensor in read_tensors(folder, shapes, ignored, held):
        for name, value in policy.adapter.from_hf({hf_name: tensor}).items():
            copy_full(own[name], value)


@torch.no_grad()
def copy_full(target: Tensor, value: Tensor) -> None:
    """Copy a full tensor into `target`; each rank takes its own part of a sharded one, without traffic."""
    if isinstance(target, DTensor):
        value = value.to(target.device, target.dtype)
        value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(value)


def read_tensors(
    folder: Path,
    shapes: Mapping[str, torch.Size],
    ignored: tuple[str, ...] = (),
    wanted: Container[str] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a safetensors checkpoint, one at a time, once all names and shapes were checked.

    Args:
        shapes: name to shape of everything that must be there.
        ignored: endings of names that may be there besides, and are skipped.
        wanted: names of the tensors to read; None: all.

    Raises:
        ConfigError: no or unreadable weights; a missing, unknown or mis-shaped tensor.
    """
    paths = _weight_files(folder)
    with ExitStack() as stack:
        try:
            files = [stack.enter_context(safe_open(path, "pt")) for path in paths]
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"{folder}: unreadable safetensors ({error}); copy the checkpoint again"
            ) from None
        stored = {name: file for file in files for name in file.offset_keys() if not name.endswith(ignored)}
        _same_names(folder, stored, shapes)
        for name, file in stored.items():
            if (shape := torch.Size(file.get_slice(name).get_shape())) != shapes[name]:
                raise ConfigError(
                    f"{folder}: {name} has shape {list(shape)}, but {list(shapes[name])} is expected; "
                    f"config.json and weights do not belong together"
                )
        for name, file in stored.items():
            if wanted is None or name in wanted:
                yield name, file.get_tensor(name)


def read_tensor(folder: Path, name: str) -> Tensor | None:
    """One tensor of a safetensors checkpoint; None where it has none of that name."""
    for path in _weight_files(folder):
        with safe_open(path, "pt") as file:
            if name in file.offset_keys():
                return file.get_tensor(name)
    return None


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        return [folder / name for name in sorted(set(read_json(folder / INDEX)["weight_map"].values()))]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    raise ConfigError(f"{folder}: neither {SINGLE} nor {INDEX}; only safetensors checkpoints are supported")


def _same_names(folder: Path, stored: Iterable[str], expected: Iterable[str]) -> None:
    missing, unknown = sorted(set(expected) - set(stored)), sorted(set(stored) - set(expected))
    for kind, names in (("lack", missing), ("have unknown", unknown)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ConfigError(
                f"{folder}: the weights {kind} {', '.join(names[:3])}{more}; "
                f"config.json and weights do not belong together"
            )


def write_tensors(
    folder: Path, weights: Iterable[tuple[str, Tensor]], shard_bytes: int = SHARD_BYTES
) -> None:
    """Write named tensors as safetensors: one file, or files of at most `shard_bytes` and an index.

    A single tensor larger than `shard_bytes` gets a file of its own.
    """
    parts: list[list[str]] = []
    pending: dict[str, Tensor] = {}

    def flush() -> None:
        save_file(pending, folder / f"part-{len(parts)}", metadata={"format": "pt"})
        parts.append(list(pending))
        pending.clear()

    total = size = 0
    for name, tensor in weights:
        if pending and size + tensor.nbytes > shard_bytes:
            flush()
            size = 0
        pending[name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
    flush()
    if len(parts) == 1:
        (folder / "part-0").rename(folder / SINGLE)
        return
    weight_map = {}
    for i, names in enumerate(parts):
        file = f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        (folder / f"part-{i}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / INDEX, index)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


def copy_assets(source: Path, folder: Path) -> None:
    """Copy config, tokenizer and chat template of a checkpoint, not its weights."""
    for pattern in ASSETS:
        for path in source.glob(pattern):
            if path.name != INDEX:
                shutil.copy(path, folder / path.name)


def refuse_existing(folder: Path) -> None:
    """Raise a ConfigError where `folder` exists."""
    if folder.exists():
        raise ConfigError(f"{folder} exists already; remove it or choose another folder")


@contextmanager
def new_folder(folder: Path) -> Generator[Path]:
    """A temporary folder that becomes `folder` when the block ends, and vanishes when it raises.

    Raises:
        ConfigError: `folder` exists.
    """
    refuse_existing(folder)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
