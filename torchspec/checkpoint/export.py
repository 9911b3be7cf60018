"""Policy and draft as Hugging Face folders, written and read back; nothing is ever left half-written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchspec.distributed.mesh import Mesh
from torchspec.drafts.eagle3.checkpoint import Layout, Verifier, checked, config_json, layout_of, renamed
from torchspec.drafts.vocab import build_t2d
from torchspec.models.hf import (
    copy_assets,
    copy_full,
    new_folder,
    read_tensors,
    refuse_existing,
    write_json,
    write_tensors,
)
from torchspec.models.spec import read_json

if TYPE_CHECKING:
    from torchspec.drafts.eagle3.model import Eagle3
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
    draft: Eagle3, folder: Path, mesh: Mesh, layout: Layout = "eagle3", verifier: Verifier | None = None
) -> None:
    """Write `draft` as vLLM's `eagle3` method loads it, in either layout. Collective.

    The draft has no embedding: loaders take the policy's. Vocabulary maps are written where it is reduced.

    Args:
        verifier: what the speculators layout says of the policy.

    Raises:
        ConfigError: `folder` exists.
        RuntimeError: the draft's tensors are not those that loaders require.
    """

    def assets(partial: Path) -> None:
        write_json(partial / "config.json", config_json(draft.spec, layout, verifier))

    weights = ((renamed(n, layout), x) for n, x in checked(draft.spec, draft.hf_weights()))
    _export(folder, weights, assets, mesh)


def load_draft(draft: Eagle3, folder: Path) -> None:
    """Copy the weights and the vocabulary map of an EAGLE-3 checkpoint into `draft`, sharded or not.

    Either layout. Embeddings in it are not read: `assemble.check_draft` has compared them with the policy's.

    Raises:
        ConfigError: no weights, or a missing, unknown or mis-shaped tensor; nothing has been loaded then.
    """
    own = {**dict(draft.named_parameters()), **dict(draft.named_buffers())}
    # t2d is d2t's inverse; checkpoints need not have it, and vLLM ignores it.
    t2d = own.pop("t2d", None)
    layout = layout_of(read_json(folder / "config.json", "draft"))
    own = {renamed(name, layout): x for name, x in own.items()}
    shapes = {name: x.shape for name, x in own.items()}
    for name, tensor in read_tensors(folder, shapes, ignored=("t2d", "embed_tokens.weight")):
        copy_full(own[name], tensor)
    if t2d is not None:
        t2d.copy_(build_t2d(own["d2t"], draft.spec.vocab_size))


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
