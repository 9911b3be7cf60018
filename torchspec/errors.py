"""The exceptions that cross a boundary. Imports nothing."""

from __future__ import annotations


class ConfigError(ValueError):
    """Something the user wrote cannot be used; the entry scripts print it and exit with status 2."""


class GuardStop(Exception):
    """The run must not go on; the message says why and what to look at. The entry scripts end with status 3."""


class NonFinite(FloatingPointError):
    """A model's loss or gradient is not finite, on this rank or another; no model made a step of this update.

    Earlier updates of the step have been made: go on from a checkpoint.
    """


class EngineDied(Exception):
    """The engine raised while it generated. Answers that were complete are kept; see `Engine.restart`."""


class RewardFailed(ConfigError):
    """A user's reward function raised, took too long, ended its process or returned no finite number.

    The message names the function, the problem and the sample. In a run it becomes a `GuardStop`.
    """


class TapError(RuntimeError):
    """Taps did not arrive, or are not those of the microbatch they are taken for."""


class Stopped(Exception):
    """The run is to stop; the step that was being made is dropped."""


def one_line(error: BaseException) -> str:
    """Return the text of `error` without line breaks; its type's name if it has none."""
    return " ".join(str(error).split()) or type(error).__name__
