"""What rollout.py bench refuses before it loads anything, and the line it prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchspec.bench import Row, bench
from torchspec.config import Config, ConfigError


@pytest.mark.parametrize(
    ("modes", "epochs", "out", "message"),
    [
        (["off", "sufix"], 1, "b", "--modes: 'sufix' is unknown; did you mean 'suffix'"),
        (["hybrid"], 1, "b", "--modes: hybrid needs --draft"),
        (["off", "off"], 1, "b", "each only once"),
        (["off"], 0, "b", "--epochs must be at least 1"),
        (["off"], 1, "no/where", "its parent folder does not exist"),
    ],
)
def test_bad_input_is_refused_before_anything_is_loaded(tmp_path: Path, modes, epochs, out, message) -> None:
    with pytest.raises(ConfigError, match=message):
        bench(Config(), None, modes, epochs, 0, False, tmp_path / out)
    assert not (tmp_path / out).exists()


def test_a_row_is_a_line() -> None:
    row = Row(
        epoch=2,
        mode="suffix",
        tokens=100,
        tokens_per_s=50.0,
        ratio=1.5,
        tokens_per_cpu_s=60.0,
        cpu_ratio=1.75,
        tau=2.5,
        drafted=[10, 5, 0],
        accepted=[9, 1, 0],
        length_p50=10,
        length_p99=12,
        makespan_s=2.0,
    )
    assert " ".join(row.line().split()) == "2 suffix 50.0 1.50x 1.75x 2.50 15 10 10 12 2.00 0.90 0.20"
