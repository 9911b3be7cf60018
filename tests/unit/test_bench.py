"""What rollout.py bench refuses before it loads anything, and the line it prints."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from torchspec.commands.bench import Row, bench, later_ratios
from torchspec.commands.generate import generate_file
from torchspec.config.schema import Config
from torchspec.errors import ConfigError


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


def run(command: str, out: Path) -> None:
    if command == "bench":
        bench(Config(), None, ["off"], 1, 0, False, out)
    else:
        generate_file(Config(), None, "train", 0, out)


@pytest.mark.parametrize("command", ["bench", "generate"])
def test_outputs_that_cannot_be_written_are_refused_before_anything_is_loaded(
    tmp_path: Path, command
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    taken = tmp_path / ("file" if command == "bench" else "folder")
    for out in (tmp_path / "file" / "out", taken):
        with pytest.raises(ConfigError, match="--out"):
            run(command, out)


@pytest.mark.parametrize("command", ["bench", "generate"])
def test_a_read_only_place_is_refused_before_anything_is_loaded(tmp_path: Path, monkeypatch, command) -> None:
    def refuse(**_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(ConfigError, match=r"--out .*: nothing can be written in .* .Read-only file system"):
        run(command, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def made(epoch: int, mode: str, **fields) -> Row:
    plain = dict(tokens=100, tokens_per_s=50.0, ratio=1.5, tokens_per_cpu_s=60.0, cpu_ratio=1.75, tau=2.5)
    plain |= dict(drafted=[10, 5, 0], accepted=[9, 1, 0], length_p50=10, length_p99=12, makespan_s=2.0)
    return Row(epoch=epoch, mode=mode, **(plain | fields))


def test_a_row_is_a_line() -> None:
    line = made(2, "suffix").line()
    assert " ".join(line.split()) == "2 suffix 50.0 1.50x 1.75x 2.50 15 10 10 12 2.00 0.90 0.20"


def test_later_epochs_are_judged_by_all_tokens_over_all_time() -> None:
    rows = [made(1, "off", tokens_per_s=9.0), made(1, "suffix", tokens_per_s=1.0)]
    rows += [made(2, "off", tokens=10, tokens_per_s=10.0), made(3, "off", tokens=30, tokens_per_s=10.0)]
    # 5 tokens in 1 s, then 95 in 3 s: 25 a second
    rows += [made(2, "suffix", tokens=5, tokens_per_s=5.0), made(3, "suffix", tokens=95, tokens_per_s=95 / 3)]
    found = later_ratios(rows)
    assert found["off"] == pytest.approx((1.0, 1.0))
    assert found["suffix"] == pytest.approx((2.5, 1.0))
    assert later_ratios(rows[:2]) == {}
    assert later_ratios([row for row in rows if row.mode != "off"]) == {}
