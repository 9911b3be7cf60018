"""What the entry scripts share: help, errors of the user's as one line, exit statuses, Ctrl-C."""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from torchspec.checkpoint.writable import no_room
from torchspec.config.schema import Config
from torchspec.distributed.deadline import INTERRUPTED, end_later
from torchspec.errors import ConfigError, GuardStop


def main(command: Callable[[list[str]], None], argv: list[str], usage: str) -> int:
    """Run `command` on the arguments and return the process's exit status.

    0: done, or stopped as it was told to. 2: the user's input cannot be used. 3: a guard stopped the run, or the disk
    is full; the run can go on. 130: Ctrl-C outside a training step. The reason is the one line on stderr, with the
    rank if that is not 0. Anything else that goes wrong is a defect, and raises.
    """
    rank = os.environ.get("RANK", "0")
    _name_rank(rank)
    before = signal.signal(signal.SIGINT, _interrupted)
    try:
        return _run(command, argv, usage, f" [rank {rank}]" if rank != "0" else "")
    except BrokenPipeError:
        if not _reader_left():
            raise
        if not argv or argv[0] in ("-h", "--help"):
            return 0 if argv else 2
        print("stopped: nobody reads what this prints any more", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGINT, before)


def _run(command: Callable[[list[str]], None], argv: list[str], usage: str, where: str) -> int:
    def say(text: str) -> None:
        print(text + where, file=sys.stderr, flush=True)

    if not argv or argv[0] in ("-h", "--help"):
        print(usage.strip() + "\n")
        if argv:
            print_keys()
        sys.stdout.flush()
        return 0 if argv else 2
    try:
        command(argv)
        sys.stdout.flush()
    except GuardStop as error:
        say(f"stopped: {error}")
        return 3
    except ConfigError as error:
        if where:
            # Nearly always rank 0 meets the same error, says it, and torchrun ends us while we wait.
            time.sleep(10)
        say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        say("stopped: interrupted")
        return INTERRUPTED
    except BaseException as error:  # torch's CheckpointException is no Exception
        if (reason := no_room(error)) is None:
            raise
        say(f"stopped: {reason}; the same command goes on once the disk takes files again")
        return 3
    return 0


def _interrupted(_number: int, _frame: object) -> None:
    """Raise KeyboardInterrupt, and end the process after 5 s if something catches or delays it."""
    end_later()
    raise KeyboardInterrupt


def _name_rank(rank: str) -> None:
    """Let the warnings of ranks other than 0 name the rank."""
    log = logging.getLogger("torchspec")
    if rank != "0" and not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"%(message)s [rank {rank}]"))
        log.addHandler(handler)


def _reader_left() -> bool:
    """Return whether stdout is a pipe that nobody reads, as after `| head`; it leads nowhere from then on."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    has_left = any(event & select.POLLERR for _, event in poll.poll(0))
    if has_left:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return has_left


def take(argv: list[str], flag: str) -> tuple[str, list[str]]:
    """Return the value of an option that is no config key, as `flag VALUE` or `flag=VALUE`, and the other arguments.

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
    """Print every `--section.key` with its type, default and meaning."""
    import tyro

    with suppress(
        SystemExit
    ):  # tyro would end the process before it is noticed that a pipe's reader has left
        # Without flag conversion the help shows what `load` takes: --run.overwrite true
        tyro.cli(tyro.conf.FlagConversionOff[Config], args=["--help"], prog="CONFIG.toml")
