"""Train a policy with RL while its draft learns along.

On two CPU processes:    torchrun --standalone --nproc_per_node=2 train.py configs/demo_cpu.toml
On one GPU:              python train.py configs/qwen3_0.6b_1gpu.toml --model.source ./Qwen3-0.6B
On eight GPUs:           torchrun --standalone --nproc_per_node=8 train.py configs/qwen3_8b_8gpu.toml
Every key:               python train.py --help

A run that was stopped, by Ctrl-C, SIGTERM or a crash, goes on with the same command.
Its newest checkpoint, for serving:  python train.py CONFIG.toml --export DIR [--export.format speculators|eagle3]
What it would need, without weights: python train.py CONFIG.toml --dry-run [--dry-run.world 64]
"""

from __future__ import annotations

import sys
from pathlib import Path

from torchspec.checkpoint.writable import check_writable, writing
from torchspec.commands.main import main, take
from torchspec.errors import ConfigError


def train(argv: list[str]) -> None:
    from torchspec.config.load import load

    layout, rest = take(argv[1:], "--export.format")
    out, rest = take(rest, "--export")
    world, rest = take(rest, "--dry-run.world")
    dry, rest = "--dry-run" in rest, [argument for argument in rest if argument != "--dry-run"]
    config = load(argv[0], rest)
    # What follows imports torch: after the config is known to be good.
    if layout and not out:
        raise ConfigError("--export.format needs --export DIR")
    if out:
        from torchspec.commands.export import export_run

        check_writable(Path(out), "--export")
        with writing(Path(out)):
            print(export_run(config, Path(out), layout or "speculators"))
        return
    if dry or world:
        from torchspec.commands.dry_run import report

        print(report(config, world))
        return
    from torchspec.trainer import Trainer

    trainer = Trainer(config)
    with writing(trainer.folder, trainer.folder):
        trainer.fit()
        trainer.close()


if __name__ == "__main__":
    sys.exit(main(train, sys.argv[1:], __doc__))
