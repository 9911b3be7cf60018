"""Policy and draft as Hugging Face folders, written and read back; nothing is ever left half-written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchspec.distributed.mesh import Mesh
from torchspec.drafts import registry
from torchspec.drafts.base import DraftModel, Verifier
from torchspec.models.hf import (
    copy_assets,
    new_folder,
    refuse_existing,
    write_json,
    write_tensors,
)
from torchspec.models.spec import read_json

if TYPE_CHECKING:
    from torchspec.models.policy import Policy


def export_policy(
    policy: Policy, folder: Path, source_folder: Path, mesh: Mesh, dtype: torch.dtype | None = None
) -> None:
    """Write `policy` with the config, tokenizer and chat template of the checkpoint it came from. Collective.

    Args:
        folder: must not exist.
        source_folder: the checkpoint the policy was loaded from.
        dtype: of the weights in the files; None: as stored, fp32.

    Raises:
        ConfigError: `folder` exists.
    """

    def assets(partial: Path) -> None:
        copy_assets(source_folder, partial)
        config = read_json(partial / "config.json")
        config.pop("torch_dtype", None)  # the key's name before transformers 5
        written = dtype or next(policy.parameters()).dtype
        config["dtype"] = str(written).removeprefix("torch.")
        write_json(partial / "config.json", config)

    _export(folder, policy.hf_weights(dtype), assets, mesh)


def export_draft(
    draft: DraftModel, folder: Path, mesh: Mesh, layout: str = "", verifier: Verifier | None = None
) -> None:
    """Write `draft` as vLLM loads it, in one of its architecture's layouts. Collective.

    The draft has no embedding: engines take the policy's. Layouts whose readers do not, get a copy of it.
    Vocabulary maps are written where the vocabulary is reduced.

    Args:
        layout: "" stands for the architecture's first.
        verifier: what the speculators layout says of the policy.

    Raises:
        ConfigError: `folder` exists.
        RuntimeError: the draft's tensors are not those that loaders require.
    """
    arch = registry.get(draft.spec.arch)
    layout = layout or arch.layouts[0]

    def assets(partial: Path) -> None:
        write_json(partial / "config.json", arch.config_json(draft.spec, layout, verifier))

    checked = _checked(arch.required_names(draft.spec), draft.hf_weights())
    weights = ((arch.renamed(name, layout), x) for name, x in checked)
    if layout in arch.layouts_with_embeddings:
        assert verifier is not None
        weights = chain([("embed_tokens.weight", verifier.embeddings)], weights)
    _export(folder, weights, assets, mesh)


def _checked(required: set[str], weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Pass `weights` on; raise a RuntimeError at the end unless just the required ones came."""
    missing = set(required)
    for name, tensor in weights:
        if name not in missing:
            raise RuntimeError(f"draft export: {name} is not a tensor that loaders know, or it came twice")
        missing.remove(name)
        yield name, tensor
    if missing:
        raise RuntimeError(f"draft export: the loaders need {', '.join(sorted(missing))}")


def _export(
    folder: Path, weights: Iterator[tuple[str, Tensor]], assets: Callable[[Path], None], mesh: Mesh
) -> None:
    refuse_existing(folder)  # on all ranks, before one of them makes it
    mesh.barrier()
    if mesh.is_main:
        with new_folder(folder) as partial:
            assets(partial)
            write_tensors(partial, weights)
    else:
        for _ in weights:  # takes part in the gathering
            pass
    mesh.barrier()
