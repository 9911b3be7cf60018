"""Rollouts without training.

Write scored rollouts of any checkpoint as JSONL:
    python rollout.py generate configs/demo_cpu.toml --policy runs/demo/policy --draft runs/demo/draft --out r.jsonl

The TOML gives problems, rewards and sampling; --policy defaults to its model.source, and without --draft the draft
model is not used. --split train|eval (default eval) and --limit N choose the problems. Every other option is a
config override, --section.key value.

Measure the drafters against each other and against none, several epochs over the same training problems:
    python rollout.py bench configs/hybrid_cpu.toml --policy DIR --draft DIR --out bench --epochs 3
    python rollout.py bench CONFIG.toml --policy DIR --out bench --modes off,suffix --greedy-check

Ask what a suffix drafter and a budget would have made of recorded rollouts (docs/speculation.md):
    python rollout.py replay r.jsonl --budget off,fixed,price --batch 1,8,32
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from torchspec.checkpoint.writable import writing
from torchspec.commands.main import main
from torchspec.errors import ConfigError


def rollout(argv: list[str]) -> None:
    command, *rest = argv
    if command == "generate":
        generate(rest)
    elif command == "bench":
        bench(rest)
    elif command == "replay":
        from torchspec.commands.replay import replay_command

        replay_command(rest)
    else:
        raise ConfigError(
            f"rollout.py: unknown command {command!r}; the commands are: generate, bench, replay"
        )


def generate(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="rollout.py generate", allow_abbrev=False)
    parser.add_argument("config")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--policy", default="")
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--split", choices=("train", "eval"), default="eval")
    parser.add_argument("--limit", type=int, default=0)
    options, overrides = parser.parse_known_args(argv)
    if options.policy:
        overrides += ["--model.source", options.policy]

    from torchspec.config.load import load

    config = load(options.config, overrides)
    from torchspec.commands.generate import (
        generate_file,  # after the config is known to be good: this imports torch
    )

    with writing(options.out):
        print(generate_file(config, options.draft, options.split, options.limit, options.out))


def bench(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="rollout.py bench", allow_abbrev=False)
    parser.add_argument("config")
    parser.add_argument("--out", type=Path, required=True, help="folder for bench.json and bench.png")
    parser.add_argument("--policy", default="")
    parser.add_argument("--draft", type=Path)
    parser.add_argument(
        "--modes", default="", help="default: off,suffix, with --draft off,model,suffix,hybrid"
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--greedy-check", action="store_true")
    options, overrides = parser.parse_known_args(argv)
    if options.policy:
        overrides += ["--model.source", options.policy]

    from torchspec.config.load import load

    config = load(options.config, overrides)
    from torchspec.commands.bench import bench as run

    modes: str = options.modes or ("off,model,suffix,hybrid" if options.draft else "off,suffix")
    run(
        config,
        options.draft,
        modes.split(","),
        options.epochs,
        options.limit,
        options.greedy_check,
        options.out,
    )


if __name__ == "__main__":
    sys.exit(main(rollout, sys.argv[1:], __doc__))
