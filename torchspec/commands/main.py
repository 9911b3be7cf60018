"""What the entry scripts share: help, and errors of the user's as one line with exit status 2."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from torchspec.config.schema import Config
from torchspec.errors import ConfigError, GuardStop


def main(command: Callable[[list[str]], None], argv: list[str], usage: str) -> int:
    """Run `command` on the arguments; returns the process's exit status.

    0: done, or stopped as it was told to. 2: the user's input cannot be used. 3: a guard stopped the run. The
    reason is the one line on stderr. Anything else that goes wrong is a defect, and raises.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(usage.strip() + "\n")
        if argv:
            print_keys()
        return 0 if argv else 2
    try:
        command(argv)
    except GuardStop as error:  # on all ranks, for the same reason
        print(f"stopped: {error}", file=sys.stderr, flush=True)
        return 3
    except ConfigError as error:
        rank = os.environ.get("RANK", "0")
        if rank != "0":
            # Nearly always rank 0 meets the same error, says it, and torchrun ends us while we wait.
            time.sleep(10)
        print(f"error: {error}" + (f" [rank {rank}]" if rank != "0" else ""), file=sys.stderr, flush=True)
        return 2
    return 0


def take(argv: list[str], flag: str) -> tuple[str, list[str]]:
    """The value of an option that is no config key, as `flag VALUE` or `flag=VALUE`, and the other arguments.

    Raises:
        ConfigError: the value is missing.
    """
    for i, argument in enumerate(argv):
        name, has_equals, value = argument.partition("=")
        if name == flag:
            if not has_equals:
                if i + 1 == len(argv) or argv[i + 1].startswith("--"):
                    raise ConfigError(f"command line: {flag} needs a value")
                value = argv[i + 1]
            return value, argv[:i] + argv[i + (1 if has_equals else 2) :]
    return "", argv


def print_keys() -> None:
    """Every `--section.key` with its type, default and meaning."""
    import tyro

    # Without flag conversion the help shows what `load` takes: --run.overwrite true
    tyro.cli(tyro.conf.FlagConversionOff[Config], args=["--help"], prog="CONFIG.toml")
