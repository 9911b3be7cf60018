"""The end of a finished run: exported models, plots, and the text that names them."""

from __future__ import annotations

import time
from pathlib import Path

from torchspec.checkpoint.cache import remove_folder
from torchspec.checkpoint.export import export_draft, export_policy
from torchspec.checkpoint.run_folder import note
from torchspec.config.schema import Config
from torchspec.distributed.fsdp import compute_dtype
from torchspec.distributed.mesh import Mesh
from torchspec.drafts import registry
from torchspec.metrics.console import farewell
from torchspec.metrics.plots import draw_plots
from torchspec.training.learner import Learner


def finish(config: Config, mesh: Mesh, learner: Learner, base: Path, folder: Path) -> str:
    """Export the models into the run's folder and draw its plots; return the text to print. Collective.

    Args:
        base: the checkpoint that the policy came from, for its tokenizer and config.
        folder: the run's. Exports of a session that was stopped here, or of fewer steps, are replaced.
    """
    remove_folder(folder / "policy", mesh)
    remove_folder(folder / "draft", mesh)
    export_policy(learner.policy, folder / "policy", base, mesh, compute_dtype(config))
    if learner.draft:
        export_draft(learner.draft.model, folder / "draft", mesh)
    if not mesh.is_main:
        return ""
    note(folder, finished=time.strftime("%Y-%m-%d %H:%M:%S %z"))
    draft_tokens = config.rollout.num_draft_tokens if learner.draft else 0
    method = registry.get(config.draft.arch).method
    return farewell(folder, draw_plots(folder), draft_tokens, method)
