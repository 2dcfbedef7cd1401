"""The package computes what the reference computes, bar the bugs that README.md lists."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.golden.check_golden import check_all, main
from trinity_buffer.algorithm import functional

HERE = Path(__file__).parent
FAMILIES = sorted(path.name.removesuffix(".json.gz") for path in HERE.glob("*.json.gz"))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_case_of_a_family_passes(family: str) -> None:
    rows, used = check_all(HERE, family, "*")
    failures = [failure for row in rows.values() for failure in row["failures"]]
    assert failures == []
    assert used.total() > 0


def test_a_planted_defect_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """PPO's upper limit off by 0.01: a checker that lets this pass checks nothing."""
    clipped = functional.clipped_objective
    monkeypatch.setattr(
        functional, "clipped_objective", lambda r, a, low, high: clipped(r, a, low, high + 0.01)
    )
    rows, _ = check_all(HERE, "policy_loss_ppo", "*")
    assert sum(row["failed"] for row in rows.values()) > 10


def test_the_checker_tells_success_from_nothing_to_check(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--family", "step_wise_methods"]) == 0
    assert main(["--family", "no_such_family"]) == 2
    assert "no cases found" in capsys.readouterr().err


@pytest.mark.long
def test_the_checker_runs_as_a_file(tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "check_golden.py"), "--family", "policy_loss_units"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "total" in result.stdout
