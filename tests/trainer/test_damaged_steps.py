"""Steps that were leased before rows of theirs were damaged: refused, or trained without these."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from sqlalchemy import select

from tests.crash.forking import CONTEXT
from tests.handles import Experiment, TrainStep, Transaction, VerifyReport
from tests.pipeline.edits import Edit, in_body
from tests.pipeline.planting import beside_heads, events_of, unguarded
from tests.planted_faults.dying import open_and_die
from tests.planted_faults.scenes import RUNS, nothing_is_wrong, opened
from tests.planted_faults.trainer_checks import Weights
from tests.sample_run import rollout
from tests.small_sizes import resized
from tests.trainer.data import RUNS as RUNS_OF_DATA
from tests.trainer.data import policy, recorded, rollouts, solutions
from tests.trainer.test_elastic_ranks import life
from tests.trainer.test_mixing import MIXED
from tests.whole_stores import diff_projections, replayed_steps
from trinity_buffer import (
    compact,
    inspector,
    open_replay_stream,
    open_store,
    open_train_stream,
    run_strategy,
    verify,
)
from trinity_buffer.algorithm import build
from trinity_buffer.errors import DamagedSegmentError
from trinity_buffer.events import ExperiencesRecorded, StepDealt
from trinity_buffer.explorer.explore import Acknowledgements
from trinity_buffer.inspector.source import now
from trinity_buffer.pipeline.load.columns import FAMILIES
from trinity_buffer.store.tables import segment
from trinity_buffer.store.trainer_queries import step_with_rows
from trinity_buffer.trainer.models import StepReport
from trinity_buffer.trainer.trainer import Trainer, TrainerSettings

TASKS = 4
OPTIONS: dict[str, Any] = {"strategy": "grpo", "groups_per_step": 2}
DROP: dict[str, Any] = {**OPTIONS, "damaged_rows": "drop"}
THIRD_TASK = [f"b0/2/{run}/0/" for run in range(RUNS)]


async def filled(url: str, told: Path | None = None) -> None:
    """Record and annotate four groups, each run in a segment of its own."""
    async with opened(url) as experiment:
        for task in range(TASKS):
            for run in range(RUNS):
                made = [rollout("b0", task, run, float(run % 2))]
                receipt = await experiment.writer("e0").write(made)
                if told is not None:
                    Acknowledgements(told).note(receipt)
        await experiment.writer("e0").seal("b0", TASKS * RUNS)
        await run_strategy(experiment, "grpo")


async def left(url: str, steps: int, **options: Any) -> list[TrainStep]:
    """Return so many steps that a trainer takes and never commits."""
    async with opened(url) as experiment, experiment.train_stream(**OPTIONS | options) as stream:
        return [await anext(stream) for _ in range(steps)]


async def harmed(url: str, *uids: str, of: str = "run", gone: tuple[str, ...] = ()) -> None:
    """Flip a bit in the segments of these rows of an experiment, or take families of them away."""
    async with open_store(url, read_only=True) as store:
        events = (await store.experiment(of)).events(kinds=("ExperiencesRecorded",))
        facts = [event.fact async for event in events]
    recorded = [fact for fact in facts if isinstance(fact, ExperiencesRecorded)]
    keys = [one.segment for one in recorded if not set(uids).isdisjoint(one.columns.uids())]
    assert keys

    def change(tx: Transaction) -> None:
        for key in keys:
            mine = segment.c.key == key
            if gone:
                tx.execute(segment.delete().where(mine, segment.c.family.in_(gone)))
                continue
            mine &= segment.c.family == "tokens"
            ((data,),) = tx.execute(select(segment.c.data).where(mine)).all()
            flipped = bytes([*data[:-1], data[-1] ^ 1])
            tx.execute(segment.update().where(mine).values(data=flipped))

    await unguarded(url, change, chained=False)


async def trained(
    experiment: Experiment, folder: Path, **options: Any
) -> tuple[list[TrainStep], Path]:
    """Return the steps that a trainer takes and commits, and its last checkpoint."""
    served, last = [], folder
    async with experiment.train_stream(**DROP | options) as stream:
        weights = Weights(folder, stream)
        async for step in stream:
            weights.train(step)
            served.append(step)
            last = await weights.commit(step)
    return served, last


def nothing_but_the_damage(report: VerifyReport) -> None:
    """Nothing is lost or trained twice, and only the segments are found to be damaged."""
    assert {problem.check for problem in report.problems} == {"segments"}
    assert (report.lost_items, report.duplicated_items) == ((), ())


async def replays(experiment: Experiment, served: list[TrainStep]) -> None:
    again = [step async for step in replayed_steps(experiment)]
    assert [step.chain for step in again[-len(served) :]] == [step.chain for step in served]
    for one, other in zip(served, again[-len(served) :], strict=True):
        for mine, its in zip(one.microbatches, other.microbatches, strict=True):
            assert all(torch.equal(mine[name], its[name]) for name in mine)


@pytest.mark.long
@pytest.mark.parametrize("gone", [(), FAMILIES, ("light",)], ids="-".join)
async def test_a_leased_step_that_cannot_be_read_is_refused_with_the_ways_out(
    store_url: str, gone: tuple[str, ...]
) -> None:
    await filled(store_url)
    await left(store_url, 2)
    await harmed(store_url, *THIRD_TASK, gone=gone)
    what = (
        r"step 2 of trainer 'trainer' was leased and 4 of its 8 rows can never be read "
        r"\(damaged\): b0/2/0/0/ at 10:0, b0/2/1/0/ at 11:0, b0/2/2/0/ at 12:0 \.\.\.\. segment "
        r"[0-9a-f]{32} .*backup.*"
        r"damaged_rows='drop'.*--drop-damaged-rows"
    )
    for options in ({}, {"world_size": 2}):
        with pytest.raises(DamagedSegmentError, match=what):
            await left(store_url, 2, **options)
    dealt = [event.fact for event in await events_of(store_url, "StepDealt")]
    assert [(one.step, one.dropped) for one in dealt if isinstance(one, StepDealt)] == [(1, [])]
    assert await events_of(store_url, "ExperiencesRejected") == []


async def test_a_replay_names_the_step_and_the_rows_that_cannot_be_read(
    store_url: str, tmp_path: Path
) -> None:
    await filled(store_url)
    async with opened(store_url) as experiment:
        await trained(experiment, tmp_path)
    await harmed(store_url, "b0/2/1/0/")
    what = (
        r"step 2 of trainer 'trainer' was leased and 1 of its 8 rows can never be read "
        r"\(damaged\): b0/2/1/0/ at 11:0\. segment [0-9a-f]{32} .*backup.*--steps :1"
    )
    async with opened(store_url) as experiment:
        steps = replayed_steps(experiment)
        assert (await anext(steps)).step == 1
        with pytest.raises(DamagedSegmentError, match=what):
            await anext(steps)
    await harmed(store_url, "b0/0/1/0/")
    async with opened(store_url) as experiment:  # before the first one there are none
        with pytest.raises(DamagedSegmentError, match=r"replay other steps: those after a later"):
            await anext(replayed_steps(experiment))


async def test_rows_of_a_leased_step_are_dropped_and_the_rest_is_trained(
    store_url: str, tmp_path: Path
) -> None:
    await filled(store_url, tmp_path / "e0.ack")
    before = await left(store_url, 2)
    await harmed(store_url, "b0/0/1/0/")
    await harmed(store_url, *THIRD_TASK, gone=("light",))
    async with opened(store_url) as experiment:
        served, last = await trained(experiment, tmp_path / "weights")
        assert [step.rows for step in served] == [7, 4]
        totals = [step.microbatches[0].layout.total for step in served]
        assert [(one.sequences, one.groups) for one in totals] == [(7, 2), (4, 1)]
        kept = [row for step in served for row in step.manifest.annotations]
        was = [row for step in before for row in step.manifest.annotations]
        assert kept == [row for row in was if row in set(kept)]
        await replays(experiment, served)
        report = await verify(experiment, tmp_path / "e0.ack", last)
        nothing_but_the_damage(report)
        (counts,) = report.trainers
        assert (counts.committed, counts.leased, counts.rejected) == (11, 0, {"damaged": 5})
        assert counts.holds
        assert await diff_projections(experiment.database, experiment.key) == []
        source = now(experiment)
        lines = await inspector.steps(source)
        assert [(one.rows, one.groups, one.state) for one in lines] == [
            (7, 2, "committed"),
            (4, 1, "committed"),
        ]
        found = await inspector.blame(source, 1)
        assert (len(found.rows), found.proven) == (7, True)
        why = await inspector.why(source, "b0/0/1/0/")
        assert not why.trained
        assert why.verdict == "never trained: rejected by trainer: damaged (set grpo)"
        rows = {one.eid.uid async for one in experiment.read(trained_in=2)}
        assert rows == {f"b0/3/{run}/0/" for run in range(RUNS)}


@pytest.mark.long  # a server that forks processes takes seconds to begin
async def test_a_trainer_that_is_killed_behind_the_event_goes_on_without_asking_again(
    store_url: str, tmp_path: Path
) -> None:
    await filled(store_url)
    await left(store_url, 2)
    await harmed(store_url, "b0/0/1/0/", gone=FAMILIES)
    process = CONTEXT.Process(target=open_and_die, args=(store_url, DROP))
    process.start()
    await anyio.to_thread.run_sync(process.join)
    assert process.exitcode == -signal.SIGKILL
    async with opened(store_url) as experiment:
        served, last = await trained(experiment, tmp_path, damaged_rows="refuse")
        assert [(step.rows, step.recorded) for step in served] == [(7, True), (8, True)]
        nothing_but_the_damage(await verify(experiment, checkpoint=last))
    assert len(await events_of(store_url, "StepDealt")) == 1


async def test_a_step_of_which_nothing_is_left_changes_nothing_and_is_committed(
    store_url: str, tmp_path: Path
) -> None:
    await filled(store_url)
    await left(store_url, 3, groups_per_step=1)
    await harmed(store_url, *THIRD_TASK)
    async with opened(store_url) as experiment:
        served, last = await trained(experiment, tmp_path, groups_per_step=1)
        assert [step.rows for step in served] == [4, 4, 0, 4]
        assert served[2].microbatches == []
        assert served[2].apply(lambda batch, layout: {"rows": len(batch)}) == {}
        await replays(experiment, served)
        report = await verify(experiment, checkpoint=last)
        nothing_but_the_damage(report)
        assert report.chain == 4
        assert (await inspector.blame(now(experiment), 3)).rows == ()


async def test_ranks_come_and_go_before_and_behind_what_is_dropped(store_url: str) -> None:
    await filled(store_url)
    chosen = {**DROP, "groups_per_step": 4}

    async def lives(ranks: int, commit: int) -> int:
        async with opened(store_url) as experiment:
            found = await life(experiment, ranks, deliver=1, commit=commit, **chosen)
            assert all(set(rows.values()) == {1} for rows in found.values())
            return sum(map(len, found.values()))

    assert await lives(2, 0) == 16
    await harmed(store_url, "b0/0/1/0/")
    assert await lives(2, 0) == 15  # as many ranks as before
    await harmed(store_url, *THIRD_TASK, gone=FAMILIES)
    assert await lives(1, 0) == 11  # fewer, and more is lost
    assert await lives(3, 0) == 11
    assert await lives(2, 1) == 11
    dealt = [event.fact for event in await events_of(store_url, "StepDealt")]
    assert [len(one.dropped) for one in dealt if isinstance(one, StepDealt)] == [1, 4, 0, 0]
    async with opened(store_url) as experiment:
        nothing_but_the_damage(await verify(experiment))
        with resized(events_per_page=1):  # and what is dealt anew is read once more
            nothing_but_the_damage(await verify(experiment))
        (row,) = await inspector.steps(now(experiment))
        assert (row.rows, row.groups) == (11, 3)


async def test_a_rewound_step_whose_tensors_were_deleted_goes_on_without_them(
    store_url: str, tmp_path: Path
) -> None:
    await filled(store_url, tmp_path / "e0.ack")
    async with opened(store_url) as experiment:
        await trained(experiment, tmp_path / "a", groups_per_step=1)
        last_but_one: dict[str, Any] = {"keep_steps": 1, "archive": None, "delete": True}
        assert (await compact(experiment, **last_but_one, actor="janitor")).segments == 12
    (archived,) = await events_of(store_url, "SegmentsArchived")
    assert archived.actor == "janitor"
    async with opened(store_url) as experiment:
        served, last = await trained(experiment, tmp_path / "b", groups_per_step=1, resume_from=1)
        assert [step.rows for step in served] == [0, 0, 4]
        again, last = await trained(experiment, tmp_path / "c", groups_per_step=1, resume_from=1)
        assert [step.chain for step in again] == [step.chain for step in served]
        report = await verify(experiment, tmp_path / "e0.ack", last)
        nothing_is_wrong(report)
        assert report.trainers[0].rejected == {"deleted": 8}


async def test_an_experts_rows_are_dropped_and_rejected_in_the_log_of_the_expert(
    store_url: str,
) -> None:
    options: dict[str, Any] = {**MIXED, "damaged_rows": "drop"}
    async with open_store(store_url) as store:
        experiment = await recorded(store, "run", "experience", rollouts())
        await recorded(store, "expert", "sft", solutions())
        await run_strategy(experiment, "grpo")
        async with experiment.train_stream(**MIXED) as stream:
            assert (await anext(stream)).rows == 2 * RUNS_OF_DATA + 1
    await harmed(store_url, "s/0/0/0/", of="expert")
    async with open_store(store_url) as store:
        experiment, expert = [await store.experiment(name) for name in ("run", "expert")]
        async with experiment.train_stream(**options) as stream:
            step = await anext(stream)
            await stream.commit(step)
        assert not any(step.manifest.source)
        assert step.rows == 2 * RUNS_OF_DATA
        rejected = expert.events(kinds=("ExperiencesRejected",))
        told = [(event.body["consumer"], event.body["reasons"]) async for event in rejected]
        assert told[0] == ("run/trainer", ["damaged"])
        nothing_is_wrong(await verify(experiment))
        nothing_but_the_damage(await verify(expert))


async def groups_of_policies(url: str) -> None:
    """Record and annotate groups of a policy, each in a segment of its own."""
    async with open_store(url) as store:
        experiment = await store.experiment("run", config={"rollouts_per_group": RUNS_OF_DATA})
        made = rollouts()
        for begin in range(0, len(made), RUNS_OF_DATA):
            await experiment.writer("e0").write(made[begin : begin + RUNS_OF_DATA])
        await run_strategy(experiment, "grpo")
        async with experiment.train_stream(**OPTIONS) as stream:
            assert [step.rows async for step in stream] == [2 * RUNS_OF_DATA] * 3


async def test_steps_with_rows_are_counted_without_the_empty_one(sqlite_url: str) -> None:
    await filled(sqlite_url)
    await left(sqlite_url, 3, groups_per_step=1)
    await harmed(sqlite_url, *THIRD_TASK)
    await left(sqlite_url, 4, groups_per_step=1, damaged_rows="drop")
    async with opened(sqlite_url) as experiment:
        read, key = experiment.database.read, experiment.key
        found = [await read(step_with_rows, key, "trainer", number) for number in range(6)]
    assert found == [0, 1, 2, 4, 5, 6]  # 3 is empty, 5 and 6 are to come


def test_the_trainer_goes_through_an_empty_step_with_its_weights_as_they_are(
    sqlite_url: str, tmp_path: Path
) -> None:
    anyio.run(groups_of_policies, sqlite_url)
    uids = [f"b0/{task}/{run}/0/" for task in (2, 3) for run in range(RUNS_OF_DATA)]
    anyio.run(lambda: harmed(sqlite_url, *uids))
    reports: list[StepReport] = []
    settings = TrainerSettings(checkpoints=tmp_path, keep_checkpoints=None)
    with open_train_stream(sqlite_url, experiment="run", **DROP) as stream:
        trainer = Trainer(stream, policy(), build("grpo"), settings)
        trainer.run(reports.append)
    assert [(one.rows, one.skipped) for one in reports] == [(6, False), (0, False), (6, False)]
    first, second, third = ((tmp_path / f).read_bytes() for f in _weights(tmp_path))
    assert first == second != third
    with open_replay_stream(sqlite_url, experiment="run") as stream:
        again = Trainer(stream, policy(), build("grpo"), settings)
        again.run()
    for mine, its in zip(trainer.policy.parameters(), again.policy.parameters(), strict=True):
        assert torch.equal(mine, its)


def _weights(folder: Path) -> list[str]:
    files = sorted(folder.glob("step-*/policy*"))
    return [str(file.relative_to(folder)) for file in files]


@pytest.mark.long
@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (in_body("StepDealt", dropped=[]), "step 1 was dealt with other rows"),
        (in_body("StepDealt", order=[0, 0, 1, 2, 3, 4, 5]), "step 1 was dealt with other rows"),
        (in_body("StepDealt", num_groups=1), "dealt with 2 groups, recorded are 1"),
        (
            in_body("ExperiencesRejected", experiences=[], reasons=[]),
            "was taken out of its step and not rejected",
        ),
    ],
    ids=["not told", "twice", "groups", "not rejected"],
)
async def test_rows_that_leave_a_step_are_told_and_rejected(
    sqlite_url: str, tmp_path: Path, edit: Edit, what: str
) -> None:
    await filled(sqlite_url)
    await left(sqlite_url, 1)
    await harmed(sqlite_url, "b0/0/1/0/")
    async with opened(sqlite_url) as experiment:
        await trained(experiment, tmp_path)
        nothing_but_the_damage(await verify(experiment))
    await unguarded(sqlite_url, edit)
    async with opened(sqlite_url) as experiment:
        problems = beside_heads(await verify(experiment))
    assert any(what in problem.what for problem in problems), problems
