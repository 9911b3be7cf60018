"""Train a policy with RL while its draft learns along.

On two CPU processes:    torchrun --standalone --nproc_per_node=2 train.py configs/demo_cpu.toml
On one GPU:              python train.py configs/qwen3_0.6b_1gpu.toml --model.source ./Qwen3-0.6B
On eight GPUs:           torchrun --standalone --nproc_per_node=8 train.py configs/qwen3_8b_8gpu.toml
Every key:               python train.py --help
"""

from __future__ import annotations

import sys

from torchspec.cli import main


def train(argv: list[str]) -> None:
    from torchspec.config_load import load

    config = load(argv[0], argv[1:])
    from torchspec.trainer import Trainer  # after the config is known to be good: this imports torch

    trainer = Trainer(config)
    trainer.fit()
    trainer.close()


if __name__ == "__main__":
    sys.exit(main(train, sys.argv[1:], __doc__))
