"""The script for a GPU runs on a CPU too, on tiny sizes; its figures mean nothing there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu_parts import figure, lengths_between


@pytest.mark.long
@pytest.mark.parametrize("part", gpu.PARTS)
def test_every_part_runs_and_its_bits_are_the_same(
    part: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main(["--device", "cpu", "--tiny", "--only", part, "--minutes", "3"]) == 0
    said = capfd.readouterr()
    assert f"{part}: done after" in said.err
    assert "goal" in said.out
    assert "MISSED" not in said.out


def test_a_part_that_fails_is_no_success(capfd: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--device", "cpu", "--tiny", "--only", "losses", "--minutes", "0"]) == 1
    assert "losses: no time was left" in capfd.readouterr().err


def test_figures_of_a_cpu_are_not_recorded(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--device", "cpu", "--record"])
    assert "figures of a GPU" in capfd.readouterr().err


def test_a_wheel_that_is_no_wheel_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "nothing-1-py3-none-any.whl").write_text("no zip")
    with pytest.raises(SystemExit, match="pip"):
        gpu.main(["--device", "cpu", "--tiny", "--only", "losses", "--wheels", str(tmp_path)])


def test_a_goal_is_judged_by_the_figure_itself() -> None:
    line = figure("x", 1.15001, "x", ("<=", 1.15))
    assert (line["figure"], line["holds"]) == (1.15, False)
    assert figure("x", 1.5, "GB/s", (">=", 1.5))["holds"] is True
    assert json.loads(json.dumps(figure("x", 2.0, "s")))["holds"] is None


def test_the_longest_row_of_a_micro_batch_is_the_width() -> None:
    assert max(lengths_between(9, 24, 5)) == 24
