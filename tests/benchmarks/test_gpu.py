"""The script for a GPU runs on a CPU too, on tiny sizes; its figures mean nothing there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, loss_path
from benchmarks.gpu_parts import figure, held_up, lengths_between, steps_beside
from benchmarks.provenance import provenance


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


@pytest.mark.long
def test_a_part_that_fails_is_no_success(capfd: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--device", "cpu", "--tiny", "--only", "losses", "--minutes", "0"]) == 1
    assert "losses: no time was left" in capfd.readouterr().err


def test_figures_of_a_cpu_are_not_recorded(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--device", "cpu", "--record"])
    assert "figures of a GPU" in capfd.readouterr().err


@pytest.mark.long
def test_where_figures_come_from_is_known_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert provenance("python -m benchmarks.gpu --record")["commit"] == ""


@pytest.mark.long
def test_a_wheel_that_is_no_wheel_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "nothing-1-py3-none-any.whl").write_text("no zip")
    with pytest.raises(SystemExit, match="pip"):
        gpu.main(["--device", "cpu", "--tiny", "--only", "losses", "--wheels", str(tmp_path)])


def test_a_goal_is_judged_by_the_figure_itself() -> None:
    line = figure("x", 1.15001, "x", ("<=", 1.15))
    assert (line["figure"], line["holds"]) == (1.15, False)
    assert figure("x", 1.5, "GB/s", (">=", 1.5))["holds"] is True
    assert json.loads(json.dumps(figure("x", 2.0, "s")))["holds"] is None


def test_the_function_of_trl_is_loaded_once_and_without_the_rest_of_trl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "trl" / "kernels" / "chunked_logprob.py"
    file.parent.mkdir(parents=True)
    (tmp_path / "trl" / "__init__.py").write_text("raise ImportError")  # it needs more than is here
    file.write_text(
        "class ChunkedLogProbFunction:\n"
        "    @classmethod\n"
        "    def apply(cls, hidden, weight, bias, *_):\n"
        "        from ..trainer.utils import maybe_gather_lm_head_ctx\n"
        "        with maybe_gather_lm_head_ctx(weight, bias):\n"
        "            return cls, hidden, None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    loss_path._trl_function.cache_clear()
    given = torch.ones(2, 3)
    first, second = (loss_path.WAYS["trl"](given, given, given, None) for _ in range(2))
    loss_path._trl_function.cache_clear()
    assert first[0] is second[0]
    assert first[1] is given


def test_the_longest_row_of_a_micro_batch_is_the_width() -> None:
    assert max(lengths_between(9, 24, 5)) == 24


def test_commits_beside_the_training_are_so_far_apart_that_none_waits_for_the_one_before() -> None:
    # 3.6 GB at 1.5 GB/s take 2.4 s: with a commit every two steps of a second the next would wait.
    assert steps_beside(2.4, 1.0) == 4
    assert [steps_beside(0.1, 1.0), steps_beside(1.6, 1.0), steps_beside(60, 1.0)] == [2, 3, 4]


def test_what_a_commit_holds_training_up_by_is_counted_whole() -> None:
    # 20 ms when the copies begin, and 10 ms in each of three steps beside the writing.
    seconds = [9.0, 1.0, 2.5, 1.01, 1.01, 1.03]
    assert held_up(seconds, 3, 1.0) == pytest.approx(0.05)
