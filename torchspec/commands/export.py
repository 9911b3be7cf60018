"""`train.py CONFIG --export DIR`: policy and draft of a run's newest checkpoint, for serving."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from torchspec.build import base_folder, build_policy
from torchspec.checkpoint.checkpoint import load_weights, newest
from torchspec.checkpoint.export import export_draft, export_policy
from torchspec.config.load import load_recorded
from torchspec.config.schema import Config, Parallel
from torchspec.distributed.fsdp import compute_dtype
from torchspec.distributed.mesh import Mesh
from torchspec.drafts import registry
from torchspec.drafts.base import Verifier
from torchspec.drafts.build import build_draft, draft_spec
from torchspec.errors import ConfigError
from torchspec.models.hf import read_tensor, refuse_existing
from torchspec.models.spec import PolicySpec, read_json


def export_run(config: Config, out: Path, layout: str) -> str:
    """Write `out`/policy and `out`/draft from the newest checkpoint of the run; returns what to say.

    Only run.dir and run.name of `config` count: the rest is the run's own. One process does it.

    Raises:
        ConfigError: no such run or checkpoint, an unknown layout, or `out` exists.
    """
    refuse_existing(out)
    folder = Path(config.run.dir) / config.run.name
    if not (folder / "config.toml").is_file():
        raise ConfigError(f"--export: {folder} holds no run; give its run.dir and run.name")
    config = load_recorded(folder / "config.toml")
    layouts = registry.get(config.draft.arch).layouts
    if layout not in layouts:
        raise ConfigError(f"--export.format {layout!r} is not allowed; one of: {', '.join(layouts)}")
    saved = newest(folder / "checkpoints")
    if saved is None:
        raise ConfigError(f"--export: {folder} has no checkpoint; set checkpoint.every above 0")
    mesh = Mesh(Parallel())  # one process, whatever the run's layout was
    base = base_folder(config, mesh)
    spec = PolicySpec.from_hf(base, config.model.max_len)
    policy, draft = build_policy(config, mesh, base, spec), None
    if config.draft.enabled:
        # Which tokens a reduced vocabulary has is in the checkpoint.
        draft = build_draft(config, mesh, draft_spec(config, spec), Counter(), [])
    load_weights(saved, {"policy": policy, **({"draft": draft} if draft else {})})
    export_policy(policy, out / "policy", base, mesh, compute_dtype(config))
    said = [f"step {saved.step} of {folder}", f"policy  {out / 'policy'}"]
    if draft:
        architecture = read_json(base / "config.json")["architectures"][0]
        embeddings = read_tensor(out / "policy", "model.embed_tokens.weight")
        assert embeddings is not None  # it has just been written
        verifier = Verifier(str(out / "policy"), architecture, config.rollout.num_draft_tokens, embeddings)
        export_draft(draft, out / "draft", mesh, layout, verifier)
        said.append(f"draft   {out / 'draft'} ({layout} layout)")
    mesh.close()
    return "\n".join(said)
