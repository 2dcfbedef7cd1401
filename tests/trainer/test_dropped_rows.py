"""Rows that a trainer is told to drop, and rows too long for it: they come back in no step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

import trinity_buffer as tb
from tests.contract import making
from tests.pipeline.planting import events_of
from tests.planted_faults.scenes import RUNS, nothing_is_wrong, opened
from tests.trainer.data import RUNS as RUNS_OF_DATA
from tests.trainer.data import TASKS, pairs, policy, prepared, recorded, rollouts, solutions
from tests.trainer.qwen import qwen2
from tests.trainer.test_damaged_steps import OPTIONS, filled, left, replays, trained
from tests.trainer.test_elastic_ranks import life
from tests.trainer.test_failing_rows import train, with_a_long_row
from tests.trainer.test_mixing import MIXED
from tests.whole_stores import diff_projections
from trinity_buffer import inspector, open_store, open_train_stream, run_strategy, verify
from trinity_buffer.algorithm import build
from trinity_buffer.errors import InvalidArgumentError, TrainingError, UnknownNameError
from trinity_buffer.events import StepDealt
from trinity_buffer.inspector.source import now
from trinity_buffer.integrations.torch_data import StepDataset

LATER = "b0/2/1/0/"
"""A row of the second step."""

LONG_ROW = "b/1/1/0/"
"""What `with_a_long_row` makes longer than the others."""


async def test_a_row_that_is_dropped_leaves_its_leased_step_and_the_rest_is_trained(
    store_url: str, tmp_path: Path
) -> None:
    await filled(store_url, tmp_path / "e0.ack")
    before = await left(store_url, 2)
    async with opened(store_url) as experiment:
        dropped = {"drop": ["b0/0/1/0/"], "damaged_rows": "refuse"}
        served, last = await trained(experiment, tmp_path / "weights", **dropped)
        assert [step.rows for step in served] == [2 * RUNS - 1, 2 * RUNS]
        kept = [row for step in served for row in step.manifest.annotations]
        assert kept == [
            row for step in before for row in step.manifest.annotations if row in set(kept)
        ]
        await replays(experiment, served)
        report = await verify(experiment, tmp_path / "e0.ack", last)
        nothing_is_wrong(report)
        assert report.trainers[0].rejected == {"dropped": 1}
        assert await diff_projections(experiment.database, experiment.key) == []
        why = await inspector.why(now(experiment), "b0/0/1/0/")
        assert why.verdict == "never trained: rejected by trainer: dropped (set grpo)"
        assert [reason.what.partition(": ")[2] for reason in why.reasons[-3:]] == [
            *("handed out in step 1", "rejected, dropped", "step 1 dealt anew")
        ]
    assert await left(store_url, 0, **dropped) == []  # said again it changes nothing
    assert len(await events_of(store_url, "StepDealt")) == 1


async def test_a_row_that_is_dropped_before_its_step_is_leased_is_in_none(
    store_url: str, tmp_path: Path
) -> None:
    await filled(store_url)
    whole = [f"b0/3/{run}/0/" for run in range(RUNS)]
    async with opened(store_url) as experiment:
        served, last = await trained(experiment, tmp_path, drop=[LATER, *whole])
        assert [step.rows for step in served] == [2 * RUNS, RUNS - 1]
        report = await verify(experiment, checkpoint=last)
        nothing_is_wrong(report)
        assert report.trainers[0].rejected == {"dropped": 1 + RUNS}


async def test_a_row_that_is_longer_than_the_stream_takes_now_leaves_a_leased_step(
    store_url: str, tmp_path: Path
) -> None:
    await filled(store_url)
    await left(store_url, 2)
    async with opened(store_url) as experiment:
        served, last = await trained(experiment, tmp_path, max_tokens=4 + RUNS + 1)
        assert [step.rows for step in served] == [2 * RUNS - 2] * 2  # the last run is the longest
        await replays(experiment, served)
        report = await verify(experiment, checkpoint=last)
        nothing_is_wrong(report)
        assert report.trainers[0].rejected == {"oversize": 4}


async def test_rows_of_just_as_many_tokens_as_are_allowed_stay_in_a_leased_step(
    sqlite_url: str,
) -> None:
    await filled(sqlite_url)
    (first,) = await left(sqlite_url, 1)
    (again,) = await left(sqlite_url, 1, max_tokens=4 + RUNS + 2)
    assert again.manifest == first.manifest
    assert await events_of(sqlite_url, "StepDealt") == []


async def test_pairs_that_are_too_long_now_leave_a_leased_step(sqlite_url: str) -> None:
    made = pairs()
    sizes = [len(e.tokens) + max(len(e.chosen), len(e.rejected)) for e in made]  # type: ignore[arg-type]  # a pair has both
    options: dict[str, Any] = {"strategy": None, "groups_per_step": len(made)}
    async with open_store(sqlite_url) as store:
        experiment = await recorded(store, "run", "dpo", made)
        async with experiment.train_stream(**options) as stream:
            assert (await anext(stream)).rows == len(made)
        async with experiment.train_stream(**options, max_tokens=max(sizes) - 1) as stream:
            assert (await anext(stream)).rows == sum(size < max(sizes) for size in sizes)


async def test_what_is_left_needs_no_more_memory_than_the_other_pieces_did(sqlite_url: str) -> None:
    await with_a_long_row(sqlite_url, 6)
    options: dict[str, Any] = {"strategy": "grpo", "groups_per_step": 2}
    async with opened(sqlite_url) as experiment:
        async with experiment.train_stream(**options, tokens_per_microbatch=3) as stream:
            assert [m["input_ids"].shape for m in (await anext(stream)).microbatches] == [
                (1, 6),
                *[(1, 3)] * 3,
            ]
        async with experiment.train_stream(**options, drop=[LONG_ROW]) as stream:
            step = await anext(stream)
            assert [m["input_ids"].shape for m in step.microbatches] == [(1, 3)] * 3


@pytest.mark.parametrize(
    ("drop", "what"),
    [
        ("b0/0/1/0/", r"drop='b0/0/1/0/': it must be a list, drop=\[UID\]"),
        (["b0/0"], "'b0/0' is not a uid"),
        (["b0/0/1/0/", "b0/9/1/0/"], "drop: no row b0/9/1/0/ is stored in experiment 'run'"),
    ],
)
async def test_what_is_no_row_is_refused_by_its_name(sqlite_url: str, drop: Any, what: str) -> None:
    await filled(sqlite_url)
    await left(sqlite_url, 1)
    with pytest.raises((InvalidArgumentError, UnknownNameError), match=what):
        await left(sqlite_url, 1, drop=drop)
    assert await events_of(sqlite_url, "ExperiencesRejected") == []


async def test_a_row_that_was_trained_is_dropped_only_behind_a_rewind(
    store_url: str, tmp_path: Path
) -> None:
    await filled(store_url)
    async with opened(store_url) as experiment:
        await trained(experiment, tmp_path / "a")
        with pytest.raises(
            InvalidArgumentError,
            match=r"b0/2/1/0/ was trained in step 2 of trainer 'trainer'.*resume_from=1",
        ):
            await trained(experiment, tmp_path / "b", drop=[LATER])
        served, last = await trained(experiment, tmp_path / "c", drop=[LATER], resume_from=1)
        assert [step.rows for step in served] == [2 * RUNS - 1]
        nothing_is_wrong(await verify(experiment, checkpoint=last))


async def test_rank_0_drops_a_row_for_all_ranks(store_url: str) -> None:
    await filled(store_url)
    whole: dict[str, Any] = {**OPTIONS, "groups_per_step": 4}

    async def lives(ranks: int, commit: int, **options: Any) -> int:
        async with opened(store_url) as experiment:
            found = await life(experiment, ranks, deliver=1, commit=commit, **whole | options)
            assert all(set(rows.values()) == {1} for rows in found.values())
            return sum(map(len, found.values()))

    assert await lives(2, 0) == 4 * RUNS
    assert await lives(2, 0, drop=["b0/0/1/0/"]) == 4 * RUNS - 1
    assert await lives(2, 1, max_tokens=4 + RUNS + 1) == 4 * RUNS - 1 - 4
    dealt = [event.fact for event in await events_of(store_url, "StepDealt")]
    assert [len(one.dropped) for one in dealt if isinstance(one, StepDealt)] == [1, 4]
    async with opened(store_url) as experiment:
        nothing_is_wrong(await verify(experiment))


async def test_an_experts_row_is_dropped_in_its_own_experiment(store_url: str) -> None:
    async with open_store(store_url) as store:
        experiment = await recorded(store, "run", "experience", rollouts())
        expert = await recorded(store, "expert", "sft", solutions())
        await run_strategy(experiment, "grpo")
        async with experiment.train_stream(**MIXED) as stream:
            assert (await anext(stream)).rows == 2 * RUNS_OF_DATA + 1
        async with experiment.train_stream(**MIXED, drop=["s/0/0/0/", "s/1/0/0/"]) as stream:
            assert [(await anext(stream)).rows for _ in range(2)] == [
                2 * RUNS_OF_DATA,  # leased before
                2 * RUNS_OF_DATA,  # its expert's group was the other one
            ]
        rejected = expert.events(kinds=("ExperiencesRejected",))
        assert [event.body["reasons"] async for event in rejected] == [["dropped"], ["dropped"]]
        nothing_is_wrong(await verify(experiment))
        nothing_is_wrong(await verify(expert))


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("name", ["mix", "mix_chord"])
def test_what_is_left_of_a_mixed_step_may_be_the_experts_rows_alone(
    name: str, layout: str, sqlite_url: str, tmp_path: Path
) -> None:
    algorithm = build(name)
    anyio.run(prepared, sqlite_url, algorithm)
    options: dict[str, Any] = {**MIXED, "experiment": "run", "layout": layout}
    with open_train_stream(sqlite_url, **options) as stream:
        source = next(stream).manifest.source
        assert 0 < sum(source) < len(source)
    own = [f"b0/{task}/{run}/0/" for task in range(TASKS - 1) for run in range(RUNS_OF_DATA)]
    reports: list[tb.StepReport] = []
    with open_train_stream(sqlite_url, **options, drop=own) as stream:
        settings = tb.TrainerSettings(checkpoints=tmp_path, max_steps=2)
        tb.Trainer(stream, policy(), algorithm, settings).run(reports.append)
    assert reports[0].rows == sum(source)
    assert [report.skipped for report in reports] == [False] * len(reports)
    assert reports[0].gradient_norm > 0


def test_a_token_beyond_the_vocabulary_is_told_with_the_command_that_goes_on(
    sqlite_url: str, tmp_path: Path
) -> None:
    anyio.run(with_a_long_row, sqlite_url, 37)
    for _ in range(2):  # it comes back
        with pytest.raises(TrainingError, match=f"trinity-buffer train --drop {LONG_ROW}"):
            train(sqlite_url, tmp_path, qwen2())
    train(sqlite_url, tmp_path, qwen2(), drop=[LONG_ROW])


def test_memory_that_is_too_small_is_told_with_the_longest_row(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    anyio.run(with_a_long_row, sqlite_url, 6)
    reached = type(build("grpo").policy_loss).__call__

    def fails(*args: Any, **keywords: Any) -> Any:
        if keywords["layout"].total.sequences > 3:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return reached(*args, **keywords)

    monkeypatch.setattr(type(build("grpo").policy_loss), "__call__", fails)
    for layout in ("padded", "packed"):
        with pytest.raises(RuntimeError, match="out of memory") as caught:
            train(sqlite_url, tmp_path, qwen2(), layout=layout)
        assert f"its longest row, {LONG_ROW}, has 6 tokens" in caught.value.__notes__[1]
        assert f"`trinity-buffer train --drop {LONG_ROW}`" in caught.value.__notes__[1]
    train(sqlite_url, tmp_path, qwen2(), drop=[LONG_ROW])


def test_a_dataset_passes_on_what_is_dropped(sqlite_url: str) -> None:
    anyio.run(with_a_long_row, sqlite_url, 6)
    options: dict[str, Any] = {"experiment": "run", "strategy": "grpo", "groups_per_step": 2}
    with open_train_stream(sqlite_url, **options) as stream:
        assert next(stream).rows == 4
    (step,) = StepDataset(sqlite_url, **options, drop=[LONG_ROW])
    assert step.rows == 3


def test_weights_are_those_of_a_step_that_never_had_the_row(store_url: str, tmp_path: Path) -> None:
    """What is left is trained as if it had been leased like this."""
    weights = []
    for name, lease_first in (("a", True), ("b", False)):
        anyio.run(_of_policies, store_url, name)
        options: dict[str, Any] = {"experiment": name, "strategy": "grpo", "groups_per_step": 6}
        if lease_first:
            with open_train_stream(store_url, **options) as stream:
                next(stream)
        with open_train_stream(store_url, **options, drop=["b0/1/1/0/"]) as stream:
            settings = tb.TrainerSettings(checkpoints=tmp_path / name)
            trainer = tb.Trainer(stream, policy(), build("grpo"), settings)
            trainer.run()
        weights.append([*trainer.policy.parameters()])
    for mine, its in zip(*weights, strict=True):
        assert torch.equal(mine, its)


async def _of_policies(url: str, name: str) -> None:
    async with open_store(url) as store:
        experiment = await recorded(store, name, "experience", rollouts())
        await run_strategy(experiment, "grpo")


@pytest.mark.parametrize("is_leased", [True, False])
async def test_rows_whose_reward_was_that_of_a_dropped_row_are_not_trained_as_0(
    store_url: str, *, is_leased: bool
) -> None:
    options: dict[str, Any] = {"strategy": None, "groups_per_step": 1, "needs": ("reward",)}
    async with making.opened(store_url, rollouts_per_group=2) as experiment:
        await experiment.writer("e0").write(
            [
                making.rollout(run=run, step=step, reward=run + 1.0 if step else None)
                for run in range(2)
                for step in range(2)
            ]
        )
        if is_leased:
            async with experiment.train_stream(**options) as stream:
                await anext(stream)
        async with experiment.train_stream(**options, drop=["b/0/1/1/"]) as stream:
            step = await anext(stream)
            rewards = [m["token_level_rewards"].sum(-1).tolist() for m in step.microbatches]
            assert rewards == [[1.0, 1.0]]
            await stream.commit(step)
        report = await verify(experiment)
        assert report.trainers[0].rejected == {"dropped": 1, "invalid: reward": 1}
        assert report.problems == ()
