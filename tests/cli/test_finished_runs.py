"""A run that its trainer finished stays as it is, unless somebody asks for more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.cli.calling import Cli
from tests.cli.test_option_matrix import SMALL, words_of
from tests.pipeline.planting import events_of
from trinity_buffer import open_store

RUN = {
    **SMALL,
    "max_steps": "null",
    "max_staleness": "null",
    "groups_per_batch": 8,
    "evaluation.every_steps": 2,
    "evaluation.target_accuracy": 0.0,
}
"""Four steps are ready, and the target is reached with the second one."""


@pytest.fixture
def url(cli: Cli, tmp_path: Path) -> str:
    """Return a store with what is trained, annotated."""
    found = f"sqlite:///{tmp_path / 'run.db'}"
    words = ["--store", found, "--experiment", "run"]
    assert cli("explore", *words, "--actor", "e0", "--batches", 1, *words_of(RUN)).code == 0
    assert cli("annotate", *words).code == 0
    return found


def trained(url: str) -> list[int]:
    """Return the steps that are committed."""

    async def look() -> list[int]:
        commits = await events_of(url, "StepsCommitted")
        return [step for commit in commits for step in commit.body["steps"]]

    return anyio.run(look)


def number_of(url: str, kind: str) -> int:
    return len(anyio.run(events_of, url, kind))


def train(cli: Cli, url: str, *words: Any) -> str:
    ended = cli("train", "--store", url, "--checkpoints", f"{url[10:]}.checkpoints", *words)
    assert ended.code == 0, ended
    return ended.out


@pytest.mark.long
def test_a_run_that_reached_its_target_is_not_trained_further(cli: Cli, url: str) -> None:
    train(cli, url, "--follow")
    assert trained(url) == [1, 2]
    for _ in range(2):
        said = train(cli, url, "--follow")
        assert "trainer has finished this run and trains it no further" in said
        assert said.endswith("run is finished: accuracy 0.000 at step 2\n")
    assert (trained(url), number_of(url, "ExperimentFinished")) == ([1, 2], 1)

    train(cli, url, "--follow", "--resume-from", 1)  # somebody asks
    assert trained(url) == [1, 2, 2]
    train(cli, url, "--set", "evaluation.target_accuracy=2.0")  # and again
    assert trained(url) == [1, 2, 2, 3, 4]


@pytest.mark.long
def test_a_trainer_that_died_before_it_finished_its_run_finishes_it(cli: Cli, url: str) -> None:
    train(cli, url, "--set", "commit_every_steps=8")  # what does not follow finishes nothing
    assert (trained(url), number_of(url, "ExperimentFinished")) == ([1, 2], 0)
    assert "nothing is trained further: accuracy 0.000 at step 2" in train(cli, url, "--follow")
    assert (trained(url), number_of(url, "ExperimentFinished")) == ([1, 2], 1)


@pytest.mark.long
def test_a_run_that_somebody_else_finished_is_trained_to_its_end(cli: Cli, url: str) -> None:
    words = ("--experiment", "run", "--set", "evaluation={every_steps=3,target_accuracy=2.0}")
    assert cli("explore", "--store", url, "--actor", "e0", "--batches", 1, *words).code == 0

    async def finish() -> None:
        async with open_store(url) as store:
            await (await store.experiment("run")).finish("no more rollouts")

    anyio.run(finish)
    for _ in range(2):
        said = train(cli, url, "--follow")
        assert said.endswith("run is finished: step 4, accuracy 0.000 at step 3\n")
        assert (trained(url), number_of(url, "ExperimentFinished")) == ([1, 2, 3, 4], 2)
