"""Learning runs take every kind of data, say what they do, and do not wait in silence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from benchmarks import learning, learning_progress, learning_run
from benchmarks.learning_progress import Progress, StuckError
from benchmarks.learning_setups import SETUPS, Setup


def tiny(name: str) -> Setup:
    return replace(
        SETUPS[name],
        groups_per_step=3,
        rollouts_per_group=2,
        max_steps=2,
        evaluate_every=1,
        threshold=2.0,
    )


@pytest.mark.parametrize("name", ["topr", "sft", "dpo", "mix", "multi_step_grpo"])
def test_an_algorithm_takes_every_step_of_its_setup(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning_run, "PROBLEMS", 4)
    said: list[str] = []
    outcome = learning_run.run(name, tiny(name), 7, tmp_path, say=said.append)
    assert [step for step, _ in outcome.curve] == [1, 2]
    assert outcome.reached is None
    assert [line.split(" of ")[0] for line in said if "accuracy" in line] == [
        f"{name}, seed 7: step 1",
        f"{name}, seed 7: step 2",
    ]


def test_a_run_whose_strategy_keeps_nothing_ends_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning_run, "BATCHES_PER_STEP", 1)
    # Random weights solve next to nothing, and dapo passes over groups whose rewards are all 0.
    setup = replace(tiny("dapo"), groups_per_step=30)
    with pytest.raises(
        StuckError, match=r"^dapo-7: . of the 30 groups that step 1 needs were kept, after 1 b"
    ):
        learning_run.run("dapo", setup, 7, tmp_path, say=lambda _: None)


async def test_a_wait_is_told_and_then_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning_progress, "SILENT_S", 0.0)
    monkeypatch.setattr(learning_progress, "STUCK_S", 0.0)
    said: list[str] = []
    reasons: list[str] = []

    async def give_up(reason: str) -> None:
        reasons.append(reason)

    progress = Progress("grpo, seed 0", said.append)
    progress.enter("waits for step 3 of the stream", waits=True)
    with anyio.fail_after(5):
        await progress.watch(give_up)
    assert said == ["grpo, seed 0: waits for step 3 of the stream, for 0 s now"]
    assert reasons == [progress.stuck]
    assert progress.stuck is not None
    assert progress.stuck.endswith("waits for step 3 of the stream for 0 s: given up")


def test_what_is_recorded_is_named_and_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results.jsonl"
    line = {
        "algorithm": "sft",
        "seed": 5,
        "setup": SETUPS["sft"].digest,
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


def test_a_command_without_an_algorithm_says_what_it_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        learning.main([])
    assert "name --algorithm NAME, or --all, or --report" in capsys.readouterr().err
