"""A replay with other settings than the run's: what it can use, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import anyio.to_thread
import pytest

from tests.cli.calling import Cli
from trinity_buffer import open_store

SMALL = {
    "algorithm": "rloo",
    "task": {"digits": 1},
    "model": {"width": 8, "layers": 1, "heads": 1},
    "groups_per_batch": 2,
    "groups_per_step": 2,
    "max_staleness": None,
    "evaluation": {"every_steps": 1000, "num_eval_samples": 1},
}


@pytest.fixture
def store(cli: Cli, tmp_path: Path) -> Path:
    """A run of two steps whose trainer computes the advantages: none are stored."""
    file, store = tmp_path / "run.yaml", tmp_path / "run.db"
    file.write_text(json.dumps(SMALL))
    for words in (("explore", "--actor", "e0", "--batches", 2), ("train",)):
        ended = cli(*words, "--store", store, "--config", file)
        assert ended.code == 0, ended.err
    return store


def test_an_algorithm_that_reads_advantages_is_not_fed_zeros(cli: Cli, store: Path) -> None:
    ended = cli("replay", "--store", store, "--algorithm", "grpo")
    said = "step 1 was trained on the set 'recorded', which has no advantages: replay it with"
    assert (ended.code, said in ended.err) == (2, True), ended.err


@pytest.mark.parametrize("algorithm", ["grpo_verl", "sft"])
def test_an_algorithm_that_needs_none_of_them_is_tried(
    cli: Cli, store: Path, algorithm: str
) -> None:
    ended = cli("replay", "--store", store, "--algorithm", algorithm)
    assert (ended.code, "step 2: loss" in ended.out) == (0, True), ended.err


@pytest.mark.parametrize(
    "key",
    [
        *("groups_per_step=1", "layout=packed", "strategy=grpo", "strategy_args.epsilon=1"),
        *("evaluation.every_steps=1", "algorithm_args.add_strategy_args.epsilon=1"),
        *("max_skipped_steps=1", "tokenizer=x"),
    ],
)
def test_a_key_that_would_change_nothing_is_refused(cli: Cli, store: Path, key: str) -> None:
    ended = cli("replay", "--store", store, "--set", key)
    said = f"error: --set {key.partition('=')[0]}: a replay takes its steps, their micro-batches"
    assert (ended.code, ended.err.startswith(said)) == (2, True), ended.err


async def test_what_had_no_effect_is_no_obstacle(cli: Cli, store: Path) -> None:
    """Earlier versions trained with what is refused of a new run."""
    async with open_store(store) as opened:
        (name,) = await opened.experiments()
        config = (await opened.experiment(name)).config
        idle = {"algorithm_args": {"kl_penalty_fn_args": {"kl_coef": 0.5}}, "teacher": "gone"}
        await opened.experiment(name, config={**config, **idle})
    ended = await anyio.to_thread.run_sync(cli, "replay", "--store", store)
    assert (ended.code, "weights bit-identical" in ended.out) == (0, True), ended.err


def test_what_was_changed_is_said_where_weights_are_not_compared(cli: Cli, store: Path) -> None:
    ended = cli("replay", "--store", store, "--loss", "sft", "--set", "optimizer.learning_rate=0.1")
    assert "weights not compared, with optimizer.learning_rate=0.1, loss.name=sft\n" in ended.out
