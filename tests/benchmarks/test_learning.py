"""Learning runs are demos, whose results are read from their logs; none is made twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import learning, learning_report, learning_run
from benchmarks.learning_run import LearningError, Outcome
from trinity_buffer.demo.recipes import RECIPES


@pytest.mark.long
def test_a_run_is_read_from_its_log(tmp_path: Path) -> None:
    said: list[str] = []
    outcome = learning_run.run("sft", 7, tmp_path, learning.SMALL, said.append)
    assert [step for step, _ in outcome.curve] == [1, 2]
    assert (outcome.lost, outcome.duplicated, outcome.identical) == (0, 0, True)
    assert outcome.reached(2.0) is None
    assert said[-1] == "lost 0, duplicated 0"


@pytest.mark.long
def test_a_run_that_fails_is_no_result(tmp_path: Path) -> None:
    with pytest.raises(LearningError, match=r"^demo --algorithm sft .* ended with 2"):
        learning_run.run("sft", 7, tmp_path, ("max_step=2",), lambda _: None)


@pytest.mark.long
def test_the_page_says_how_many_steps_were_needed_and_what_went_wrong(tmp_path: Path) -> None:
    curve = [(10, 0.5), (20, 0.91), (30, 0.89)]
    good = learning.result_of("jsd", 1, Outcome(curve, 0, 0, identical=True))
    bad = learning.result_of("jsd", 2, Outcome(curve[:1], 3, 0, identical=False))
    learning_report.write_report([good, bad], tmp_path)
    page = (tmp_path / "learning.md").read_text()
    row = (
        "| rollouts + teacher | 0.9 | 240 | 20, not reached (0.50) (lost 3, duplicated 0) | 1 of 2"
    )
    assert row in page
    assert page.count("| not run |") == 23


@pytest.mark.long
def test_the_page_names_every_commit_that_its_runs_were_made_at(tmp_path: Path) -> None:
    result = learning.result_of("jsd", 1, Outcome([(10, 0.95)], 0, 0, identical=True))
    made = [(3, "ccccccc"), (1, "aaaaaaa"), (2, "bbbbbbb"), (4, "aaaaaaa")]
    lines = [result | {"seed": seed, "commit": commit} for seed, commit in made]
    learning_report.write_report(lines, tmp_path)
    page = (tmp_path / "learning.md").read_text()
    assert "| 4 of 4 | aaaaaaa, bbbbbbb, ccccccc |" in page


def test_the_page_begins_as_the_next_report_will() -> None:
    page = Path(__file__).parents[2] / "docs" / "proofs" / "learning.md"
    assert page.read_text().startswith(learning_report.HEAD)


def test_what_is_recorded_is_named_and_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results.jsonl"
    line = {
        "algorithm": "sft",
        "seed": 5,
        "setup": learning_report.digest_of(RECIPES["sft"]),
        "threshold": 0.9,
        "reached": 40,
        "commit": "1234567",
    }
    results.write_text(json.dumps(line) + "\n")
    learning.main(["--algorithm", "sft", "--seeds", "5", "--results", str(results)])
    said = capsys.readouterr()
    assert said.out == ""
    assert "sft, seed 5: recorded at 1234567 (reached 0.9 at step 40); skipped" in said.err
    assert "--again runs them again" in said.err
    assert len(results.read_text().splitlines()) == 1


@pytest.mark.long
def test_what_comes_to_no_result_does_not_end_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, seeds = tmp_path / "results.jsonl", f"{1 << 70},{1 << 71}"
    with pytest.raises(SystemExit) as ended:
        learning.main(["--algorithm", "sft", "--seeds", seeds, "--results", str(results)])
    said = capsys.readouterr().err
    assert ended.value.code == 1
    assert said.count("no result: demo --algorithm sft") == 2
    assert "2 runs came to no result; the same command tries them again" in said
    assert not results.exists()


def test_a_command_without_an_algorithm_says_what_it_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        learning.main([])
    assert "name --algorithm NAME, or --all, or --report" in capsys.readouterr().err
