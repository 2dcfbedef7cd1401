"""No size of a page, block, span or batch changes a result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import delete, select, update
from torch import Tensor

from tests.conftest import Resize
from tests.contract.making import rollout
from tests.handles import Experiment, TrainStep, Transaction
from tests.pipeline.planting import everything, unguarded
from tests.raw_store import PROJECTIONS, rows
from tests.sample_run import SampleRun
from tests.small_sizes import NAMES, resized, small
from tests.whole_stores import diff_projections, rebuild, replayed_steps
from trinity_buffer import assign_rewards, compact, open_store, run_strategy, verify
from trinity_buffer.experience import Experience
from trinity_buffer.inspector import groups
from trinity_buffer.store import segments, writer_queries
from trinity_buffer.store.rows import ExperienceRow
from trinity_buffer.store.tables import experience, segment

TASKS, RUNS = 7, 2
ROWS = TASKS * RUNS
SMALL = [2, pytest.param(3, marks=pytest.mark.long)]
ANY_SIZES = st.fixed_dictionaries({name: st.integers(1, 5) for name in NAMES})


def experiences() -> list[Experience]:
    """Return all rows in the order of their groups; every third group has equal rewards."""
    return [
        rollout("b", task, run, reward=float(run and task % 3), length=3 + task, seed=run)
        for task in range(TASKS)
        for run in range(RUNS)
    ]


async def write_all(experiment: Experiment) -> None:
    """Write one call of many rows, then many calls of one row at once."""
    writer, some = experiment.writer("e0"), experiences()
    await writer.plan("b", list(range(TASKS)), RUNS)
    await writer.write(some[: ROWS // 2])
    async with anyio.create_task_group() as group:
        for one in some[ROWS // 2 :]:
            group.start_soon(writer.write, [one])
    await writer.seal("b", ROWS)


def described(step: TrainStep) -> list[Any]:
    """Return the numbers of a step."""
    keys = ("input_ids", "action_mask", "advantages", "rollout_logprob", "token_level_rewards")
    return [[m[key].tolist() for key in keys] for m in step.microbatches]


def _listed(values: Tensor | None) -> list[float] | None:
    return None if values is None else values.tolist()


async def lived(url: str) -> dict[str, Any]:
    """Let a run happen in an empty store; return what must not depend on any size."""
    async with open_store(url) as store:
        experiment = await store.experiment("run", config={"rollouts_per_group": RUNS})
        await write_all(experiment)
        scored = await assign_rewards(experiment, "length", lambda e: float(len(e.tokens)))
        reports = [
            await run_strategy(experiment, "grpo", {"epsilon": 1e-6}),
            await run_strategy(experiment, ["reward_variance", "grpo"], name="varied"),
            await run_strategy(experiment, "grpo", {"epsilon": 0.5}, name="l", rewards="length"),
        ]
        served = []
        async with experiment.train_stream(strategy="l", groups_per_step=3) as stream:
            async for step in stream:
                served.append(described(step))
                await stream.commit(step)
        await experiment.finish("enough")
        log = [event.position async for event in experiment.events(follow=True)]
        assert log == list(range(1, len(log) + 1))
        verified = await verify(experiment)
        assert verified.problems == (), verified
        assert await diff_projections(store.database, experiment.key) == []
        assert [described(step) async for step in replayed_steps(experiment)] == served
        read = [e async for e in experiment.read()]
    mended = await spoilt_and_rebuilt(url)
    return {
        "served": served,
        "reports": reports,
        "scored": scored,
        "read": [(e.eid.uid, e.reward, e.tokens.tolist(), _listed(e.logprobs)) for e in read],
        "counted": (verified.experiences, verified.manifests, verified.plans),
        "sets": [(one.consumer, one.annotated, one.rejected) for one in verified.strategies],
        "mended": mended,
    }


async def spoilt_and_rebuilt(url: str) -> int:
    """Empty all projections; return how many rows of experiences `rebuild` has made again."""
    before = await everything(url)

    def change(tx: Transaction) -> None:
        for table in PROJECTIONS:
            tx.execute(delete(table))

    await unguarded(url, change)
    async with open_store(url) as store:
        report = await rebuild(store.database, 1)
    assert await everything(url) == before
    return report.mended["experience"]


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run comes to with the sizes that users have."""
    return anyio.run(lived, f"sqlite:///{tmp_path_factory.mktemp('usual') / 'a.db'}")


@pytest.mark.long
@pytest.mark.parametrize("size", SMALL)
async def test_a_run_of_small_pages_comes_to_the_same(
    store_url: str, size: int, resize: Resize, usual: Mapping[str, Any]
) -> None:
    assert len(usual["served"]) == 3
    assert usual["mended"] == usual["scored"] == ROWS
    resize(**small(size))
    assert await lived(store_url) == usual


@pytest.mark.long
@settings(max_examples=8)
@given(sizes=ANY_SIZES)
def test_a_run_of_any_sizes_comes_to_the_same(
    sizes: dict[str, int], usual: Mapping[str, Any]
) -> None:
    with TemporaryDirectory() as folder, resized(**sizes):
        assert anyio.run(lived, f"sqlite:///{folder}/a.db") == usual


@pytest.mark.parametrize("size", SMALL)
async def test_a_changed_row_of_an_early_span_is_found(
    sample: SampleRun, size: int, resize: Resize
) -> None:
    resize(**small(size))

    def change(tx: Transaction) -> Sequence[int]:
        first = tx.execute(select(experience.c.address).order_by("address")).scalars().all()
        mine = experience.c.address == first[size]
        tx.execute(update(experience).where(mine).values(reward=0.123))
        return first

    first = await unguarded(sample.url, change)
    async with open_store(sample.url) as store:
        report = await verify(await store.experiment(sample.name))
        (problem,) = report.problems
        position, slot = divmod(first[size], 1 << 20)
        assert f"address={position}:{slot}" in problem.what
        assert (await rebuild(store.database, 1)).mended == {"experience": 1}


@pytest.mark.parametrize("size", [1, 2, 3, 7])
async def test_each_damaged_segment_is_named(sample: SampleRun, size: int, resize: Resize) -> None:
    resize(segments_per_audit=size, events_per_page=3)

    def change(tx: Transaction) -> set[bytes]:
        tx.execute(update(segment).values(checksum=0))
        return {bytes(key) for key in tx.execute(select(segment.c.key)).scalars()}

    keys = await unguarded(sample.url, change)
    async with open_store(sample.url, read_only=True) as store:
        report = await verify(await store.experiment(sample.name))
    assert {one.where.split()[1] for one in report.problems} == {key.hex() for key in keys}


async def test_what_may_leave_does_not_depend_on_the_page(store_url: str, resize: Resize) -> None:
    """A segment of two groups stays until both are trained, wherever a page ends."""
    async with open_store(store_url) as store:
        experiment = await store.experiment("run", config={"rollouts_per_group": RUNS})
        some = experiences()
        for start in range(0, ROWS, 3):
            await experiment.writer("e0").write(some[start : start + 3])
        await run_strategy(experiment, "grpo", {"epsilon": 1e-6})
        async with experiment.train_stream(strategy="grpo", groups_per_step=1) as stream:
            for _ in range(5):
                await stream.commit(await anext(stream))
        stored = await rows(store, "experience")
        done = [row["segment"] for row in stored if int(row["task"]) < 5]
        left = {row["segment"] for row in stored if int(row["task"]) >= 5}
        wanted = [key for key in dict.fromkeys(done) if key not in left]
        assert len(wanted) == 3
        needs = await store.database.read(segments.needs_of, experiment.key, keep_steps=0)
        for limit in range(1, ROWS + 2):
            assert await leaving(experiment, needs, limit) == wanted, limit
        resize(rows_per_file=4, segments_per_page=2)
        report = await compact(experiment, keep_steps=0, archive=None, delete=True)
        assert report.segments == len(wanted)
        assert (await verify(experiment)).problems == ()


async def leaving(
    experiment: Experiment, needs: Sequence[segments.Need], limit: int
) -> list[bytes]:
    """Return what may leave, asked in pages of ``limit`` segments."""
    found: list[bytes] = []
    after, read = -1, experiment.database.read
    while held := await read(segments.held_segments, experiment.key, after=after, limit=limit):
        done = await read(segments.finished, experiment.key, held, needs)
        found += [one.segment for one in done]
        after = held[-1].last
    return found


async def test_a_rebuild_lets_others_write_at_every_stage(
    sample: SampleRun, resize: Resize
) -> None:
    """Somebody else's write is through before the next page is folded or compared."""
    resize(events_per_page=3, rows_per_span=3, tail_events=1)
    stages: dict[str, int] = {}

    async def write(number: int) -> None:
        async with open_store(sample.url) as store:
            experiment = await store.experiment(sample.name)
            await experiment.publish_policy(number, "elsewhere")

    def meanwhile(stage: str, done: int, total: int) -> None:
        stages[stage] = stages.get(stage, 0) + 1
        if stages[stage] > 2:
            return
        other = Thread(target=anyio.run, args=(write, 100 + len(stages)), daemon=True)
        other.start()
        other.join(10)
        assert not other.is_alive(), f"a rebuild keeps a writer waiting during {stage}"

    await unguarded(sample.url, lambda tx: tx.execute(update(experience).values(reward=0.25)))
    async with open_store(sample.url) as store:
        report = await rebuild(store.database, 1, meanwhile)
        assert await diff_projections(store.database, 1) == []
    assert report.mended == {"experience": 18}
    assert min(stages["fold"], stages["compare"]) > 2


async def test_a_log_is_folded_before_the_lock_and_not_under_it(
    sample: SampleRun, resize: Resize
) -> None:
    resize(events_per_page=2)
    told: list[tuple[str, int, int]] = []
    async with open_store(sample.url) as store:
        await rebuild(store.database, 1, lambda *one: told.append(one))
    folded = [done for stage, done, _ in told if stage == "fold"]
    head = told[0][2]
    assert folded == sorted({*range(2, head + 1, 2), head})


@pytest.mark.long
async def test_a_run_that_crosses_the_real_sizes(sqlite_url: str, tmp_path: Path) -> None:
    """17,408 rows in 272 writes: more than a span, a page of events and one of rows."""
    number, runs = 272, 64
    async with open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config={"rollouts_per_group": runs})
        writer = experiment.writer("e0")
        for task in range(number):
            await writer.write(
                [rollout("b", task, r, reward=float(r % 3), length=4) for r in range(runs)]
            )
        report = await run_strategy(experiment, "grpo", {"epsilon": 1e-6})
        assert (report.annotated, report.waiting) == (number * runs, 0)
        steps = 0
        async with experiment.train_stream(strategy="grpo", groups_per_step=16) as stream:
            async for step in stream:
                steps += len(step.manifest.experiences)
                await stream.commit(step)
        assert steps == number * runs
        assert len([e async for e in experiment.read(families=("light",))]) == number * runs
        assert (await verify(experiment)).problems == ()

        def change(tx: Transaction) -> None:
            first = tx.execute(select(experience.c.address).order_by("address")).scalars().all()
            mine = experience.c.address == first[0]
            tx.execute(update(experience).where(mine).values(reward=9.0))

        await unguarded(sqlite_url, change)
        assert len((await verify(experiment)).problems) == 1
        assert (await rebuild(store.database, 1)).mended == {"experience": 1}
        gone = await compact(experiment, keep_steps=1, archive=tmp_path / "archive")
        assert gone.segments == number - 16
        assert (await verify(experiment)).problems == ()


@pytest.mark.parametrize("size", [2, 3])
async def test_who_takes_over_finds_all_that_waits(
    store_url: str, size: int, resize: Resize
) -> None:
    resize(waiting_rows_per_page=size)
    async with open_store(store_url) as store:
        experiment = await store.experiment("run", config={"rollouts_per_group": RUNS + 1})
        last = [rollout("b", task, RUNS, reward=1.0, length=3) for task in range(TASKS)]
        await experiment.writer("e0").write([*experiences(), last[0]])
        report = await run_strategy(experiment, "grpo")  # what waits is kept with what it decides
        left = (report.annotated, report.waiting, report.waiting_groups)
        assert left == (RUNS + 1, ROWS - RUNS, TASKS - 1)
        await experiment.writer("e0").write(last[1:])
        report = await run_strategy(experiment, "grpo")
        assert (report.annotated, report.waiting) == ((RUNS + 1) * (TASKS - 1), 0)


@pytest.mark.parametrize("size", [1, 2, 3, 100])
async def test_a_batch_is_read_by_its_addresses_page_by_page(
    sqlite_url: str, size: int, resize: Resize, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int | None] = []
    usual = writer_queries.experiences

    def spied(
        tx: Transaction, key: int, wanted: writer_queries.Filter, **page: int
    ) -> list[ExperienceRow]:
        asked.append(None if wanted.addresses is None else len(wanted.addresses))
        return usual(tx, key, wanted, **page)

    monkeypatch.setattr(writer_queries, "experiences", spied)
    async with open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config={})
        await experiment.writer("e0").write([*experiences(), rollout("c", 0, 0, reward=1.0)])
        resize(experiences_per_page=size)
        found = [one.eid.uid async for one in experiment.read(batch="b")]
        assert found == [one.eid.uid for one in experiences()]
        assert sum(map(int, filter(None, asked))) == ROWS
        assert len(asked) == -(-ROWS // size)
        resize(experiences_per_page=size, rows_looked_up=ROWS - 1)
        assert [one.eid.uid async for one in experiment.read(batch="b")] == found
        assert asked[-1] is None


@pytest.mark.parametrize("size", [1, 2, 3, 100])
async def test_the_newest_groups_are_found_on_every_page(
    sqlite_url: str, size: int, resize: Resize
) -> None:
    resize(rows_per_page=size)
    async with open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config={})
        await experiment.writer("e0").write(experiences())
        for limit in range(1, TASKS + 2):
            found = [group.task for group in await groups(experiment, limit=limit)]
            assert found == list(range(TASKS))[::-1][:limit]
