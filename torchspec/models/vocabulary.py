"""Token ids against the rows of a model: one check for every path on which ids reach one."""

from __future__ import annotations

from collections.abc import Collection

from torchspec.errors import ConfigError


def check_ids(ids: Collection[int], rows: int, what: str, remedy: str) -> None:
    """Refuse ids that a model has no row for.

    Args:
        rows: of the model's embedding, its vocab_size.
        what: where the ids come from.
        remedy: what to do about them.

    Raises:
        ConfigError: the worst of the ids, and what is allowed.
    """
    wrong = [i for i in ids if not 0 <= i < rows]
    if wrong:
        worst = max(wrong, key=lambda i: max(i, -i))
        raise ConfigError(
            f"{what} leads to token {worst}, but the model has tokens 0 to {rows - 1}; {remedy}"
        )
