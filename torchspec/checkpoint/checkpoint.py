"""Checkpoints: all that a run needs to go on as if it had never stopped.

`checkpoints/step-000120/` holds
    shard-*.safetensors   weights and AdamW's moments by name, written by torch.distributed.checkpoint, which
                          reads them back into any layout
    rank-*.safetensors    what else each rank holds: data order, guards, drafting statistics
    manifest.json         step, versions, scores, and the size and SHA-256 of every file; written last
It is written under a name that starts with a dot and renamed once the manifest is on disk, so a folder of this
name is complete. Nothing in it is a pickle.

No random state is stored: every generator is reseeded from (run.seed, step, rank) before it is used
(`reseed`), so that the step alone says where all of them stand.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from torchspec.checkpoint.state_files import Snapshot, read_state, snapshot, write_state
from torchspec.checkpoint.writable import writing
from torchspec.config.schema import Checkpoint
from torchspec.distributed.mesh import Mesh
from torchspec.errors import ConfigError, GuardStop

log = logging.getLogger(__name__)


class Optimizer(Protocol):
    """What a checkpoint holds of a model and its optimizer; training.optim.ModelOptimizer is one."""

    model: nn.Module

    @property
    def updates(self) -> int:
        """Steps taken so far."""
        ...

    def moments(self) -> dict[str, Tensor]:
        """Return AdamW's running means by parameter name, in place."""
        ...

    def resume_at(self, updates: int) -> None:
        """Be as after so many updates, with moments of zero that a checkpoint then fills."""
        ...


MANIFEST = "manifest.json"
FORMAT = 2


class Component(Protocol):
    """Part of a run with a state of nested dicts and lists, plain values, and arrays that are not written to again."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any) -> None: ...


class Saved(NamedTuple):
    """A complete checkpoint."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        return self.manifest["step"]


class Checkpoints:
    """Writes the checkpoints of one run. Every method is collective.

    Args:
        folder: the run's `checkpoints` folder.
    """

    def __init__(self, folder: Path, mesh: Mesh, config: Checkpoint) -> None:
        self.folder = folder
        self.config = config
        self._mesh = mesh
        self._group = mesh.new_cpu_group()  # of our own: it is used beside the training's collectives
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        if mesh.is_main:  # what was being written or removed when an earlier session was killed
            for path in folder.glob(".step-*"):
                shutil.rmtree(path)

    def save(
        self,
        facts: dict[str, Any],
        optimizers: Mapping[str, Optimizer],
        states: Mapping[str, Any],
    ) -> None:
        """Write a checkpoint; with `background` only the models' copy to host memory is waited for.

        Args:
            facts: for the manifest: `step`, the `scores` that keep_best looks at, and whatever else.
            optimizers: "policy" and "draft", with their models.
            states: everything else on this rank: what `state_dict` of the components gave.

        Raises:
            GuardStop: the disk had no room for this or the previous checkpoint, or the like; those before it are
                untouched.
        """
        self.wait()
        partial = self.folder / f".{_name(facts['step'])}.partial"
        if self._mesh.is_main:
            with self._writing(facts["step"]):
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
        self._mesh.barrier()
        written = dcp.async_save(
            tensors_of(optimizers),
            storage_writer=dcp.HuggingFaceStorageWriter(str(partial), save_distributed=True),
            process_group=self._group,
        )
        assert isinstance(written, Future)  # another type only for staging in the background
        facts = {
            "format": FORMAT,
            "ranks": self._mesh.world_size,
            "updates": {name: optimizer.updates for name, optimizer in optimizers.items()},
            **facts,
        }
        self._pending = self._worker.submit(self._finish, written, partial, facts, snapshot(states))
        if not self.config.background:
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint being written is complete. Raise what its writing raised."""
        if self._pending:
            pending, self._pending = self._pending, None
            pending.result()

    def close(self) -> None:
        self.wait()
        self._worker.shutdown()

    def _finish(self, written: Future[Any], partial: Path, facts: dict[str, Any], states: Snapshot) -> None:
        """Complete a checkpoint, in the background, on all ranks. All raise if one of them could not write."""
        reason, sums = "", {}
        try:
            with self._writing(facts["step"]):
                written.result()  # first: until it ends, torch's thread uses the group
        except GuardStop as error:
            reason = str(error)
        digests = states.digests()
        of_main = set(self._mesh.from_main(digests, self._group))
        elsewhere = () if self._mesh.is_main else of_main
        try:
            with self._writing(facts["step"]):
                own = _rank_file(partial, self._mesh.rank)
                write_state(own, states, digests, elsewhere)
                mine = [*partial.glob(f"shard-{self._mesh.rank + 1:05d}-*"), own]
                sums = {path.name: _sums(path) for path in mine}
        except GuardStop as error:
            reason = reason or str(error)
        parts = self._mesh.gather_on_main((reason, sums), self._group)
        if self._mesh.is_main:
            reason = next((text for text, _ in parts if text), "")
            reason = reason or self._seal(
                partial, facts, {k: x for _, part in parts for k, x in part.items()}
            )
            if reason:  # what is incomplete must not take the room that is left
                shutil.rmtree(partial, ignore_errors=True)
        if reason := self._mesh.from_main(reason, self._group):
            raise GuardStop(reason)

    def _seal(self, partial: Path, facts: dict[str, Any], files: dict[str, Any]) -> str:
        """Write the manifest, rename the folder and remove old checkpoints, on the main rank.

        Returns why the disk could not take the manifest; "" if it did.
        """
        try:
            with self._writing(facts["step"]):
                with (partial / MANIFEST).open("w", encoding="utf-8") as out:
                    json.dump({**facts, "files": files}, out, indent=1)
                    out.flush()
                    os.fsync(out.fileno())
                _sync(partial)
                final = self.folder / _name(facts["step"])
                _remove(final)  # a damaged one: a run goes on from its newest good checkpoint
                partial.rename(final)
                _sync(self.folder)
                self._prune(final)
        except GuardStop as error:
            return str(error)
        return ""

    def _writing(self, step: int) -> AbstractContextManager[None]:
        return writing(self.folder / _name(step), self.folder.parent)

    def _prune(self, latest: Path) -> None:
        # Later ones are damaged, or the run would have gone on from them: none takes the place of a good one.
        steps = sorted(path for path in self.folder.glob("step-*") if path <= latest)
        kept = set(steps[-self.config.keep_last :])
        if self.config.keep_best:
            # Checkpoints of an earlier session are read too, so what is best is best of the whole run.
            scores = {path: _scores(path).get(self.config.best) for path in steps}
            ranked = sorted((s, path) for path, s in scores.items() if s is not None)
            kept |= {path for _, path in ranked[-self.config.keep_best :]}
        for path in steps:
            if path not in kept:
                _remove(path)


def newest(folder: Path) -> Saved | None:
    """The newest checkpoint in `folder` whose every file is as its manifest says; None if there is none at all.

    Those that are not are passed over with a warning.

    Raises:
        ConfigError: there are checkpoints, and all are damaged; or one that would be taken has another format.
    """
    for path in sorted(folder.glob(".step-*.partial")):
        log.warning("%s: a checkpoint that was never completed; it is not used", path)
    reasons = []
    for path in sorted(folder.glob("step-*"), reverse=True):
        _check_format(path)
        if (reason := damage(path)) is None:
            return Saved(path, _manifest(path))
        log.warning("%s is damaged and not used: %s", path, reason)
        reasons.append(f"{path.name}: {reason}")
    if reasons:
        raise ConfigError(
            f"{folder}: no checkpoint is intact ({'; '.join(reasons)}); restore one from a copy, or start anew "
            f"under another run.name"
        )
    return None


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint's files; None if nothing is."""
    try:
        manifest = _manifest(path)
        files = manifest["files"]
    except (OSError, ValueError, KeyError) as error:
        return f"no usable {MANIFEST} ({type(error).__name__}: {error})"
    for name, sums in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if (size := file.stat().st_size) != sums["size"]:
            return f"{name} has {size} bytes, {sums['size']} were written"
    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter's lock
        for name, found in zip(files, pool.map(lambda name: _sums(path / name), files)):
            if found != files[name]:
                return f"{name} has another checksum than was written"
    return None


def restore(
    saved: Saved,
    mesh: Mesh,
    optimizers: Mapping[str, Optimizer],
    components: Mapping[str, Component],
) -> None:
    """Load weights, moments, schedules and components, in place. Collective.

    The number and layout of ranks may differ from when it was saved. Then rank r takes the components' state of
    rank r modulo the earlier number of ranks.

    Raises:
        ConfigError: the checkpoint is of other models.
    """
    manifest = saved.manifest
    if manifest["updates"].keys() != optimizers.keys():
        raise ConfigError(
            f"{saved.folder} holds {' and '.join(manifest['updates'])}, this run trains {' and '.join(optimizers)}; "
            f"restore draft.enabled"
        )
    for name, optimizer in optimizers.items():
        optimizer.resume_at(manifest["updates"][name])
    _load(saved, tensors_of(optimizers))
    own, main = (_rank_file(saved.folder, rank) for rank in (mesh.rank % manifest["ranks"], 0))
    states = read_state(own, main)
    for name, component in components.items():
        if name not in states:
            raise ConfigError(f"{saved.folder} has no state of {name}; it was saved without it")
        component.load_state_dict(states[name])


def load_weights(saved: Saved, models: Mapping[str, nn.Module]) -> None:
    """Load the weights alone, in place, for models that are not to be trained on. Collective.

    Raises:
        ConfigError: the checkpoint is of other models.
    """
    _load(saved, {k: x for name, model in models.items() for k, x in _weights(name, model).items()})


def _load(saved: Saved, tensors: dict[str, Tensor]) -> None:
    _check_shapes(saved.folder, tensors)
    dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(saved.folder)))


def tensors_of(optimizers: Mapping[str, Optimizer]) -> dict[str, Tensor]:
    """Weights, persistent buffers and moments of all models, under names that no layout changes.

    They share the models' storage, without the gradients.
    """
    tensors: dict[str, Tensor] = {}
    for name, optimizer in optimizers.items():
        tensors |= _weights(name, optimizer.model)
        tensors |= {f"{name}.adam.{k}": x for k, x in optimizer.moments().items()}
    return tensors


def _weights(name: str, model: nn.Module) -> dict[str, Tensor]:
    saved = model.state_dict()
    buffers = {k: x for k, x in model.named_buffers() if k in saved}
    tensors = {**dict(model.named_parameters()), **buffers}  # a shared tensor once
    return {f"{name}.model.{k}": x.detach() for k, x in tensors.items()}


def _check_shapes(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """A ConfigError where a tensor of this rank is missing in the checkpoint, or has another shape there."""
    stored = dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    for name, tensor in tensors.items():
        if name not in stored:
            raise ConfigError(
                f"{folder} has no {name}: it was saved from another model; restore [model], [draft]"
            )
        shape = stored[name].size  # pyrefly: ignore[missing-attribute]
        if shape != tensor.shape:
            raise ConfigError(
                f"{folder}: {name} has shape {list(shape)}, this run's model {list(tensor.shape)}; restore "
                f"[model] and [draft]"
            )


# Files


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.safetensors"


def _manifest(path: Path) -> dict[str, Any]:
    return json.loads((path / MANIFEST).read_text(encoding="utf-8"))


def _check_format(path: Path) -> None:
    """Nothing is wrong with a checkpoint of another version, and no older one should take its place."""
    try:
        form = _manifest(path)["format"]
    except (OSError, ValueError, KeyError):  # damaged, as `damage` says
        return
    if form != FORMAT:
        raise ConfigError(
            f"{path} has format {form}, this version of torchspec reads format {FORMAT}; go on with the version "
            f"that wrote it (run.json names it), or start anew under another run.name"
        )


def _scores(path: Path) -> dict[str, Any]:
    try:
        return _manifest(path).get("scores", {})
    except (OSError, ValueError):  # a damaged one, which `newest` warns of
        return {}


def _sums(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"size": file.tell(), "sha256": digest}


def _sync(folder: Path) -> None:
    """Make renames in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def _remove(path: Path) -> None:
    """Remove a checkpoint so that no moment shows half of it under its name."""
    if path.exists():
        doomed = path.with_name(f".{path.name}.removed")
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed)
