"""What waits for a trainer, read from the log, against what the projections say of it."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from tests.conftest import Resize
from tests.contract.making import group, opened, rollout
from tests.handles import Event, Experiment, Store, Transaction
from tests.pipeline.planting import write_body
from tests.raw_store import rows, sql
from trinity_buffer import open_store, run_strategy
from trinity_buffer.codec.objects import decode_fact
from trinity_buffer.errors import CodecError
from trinity_buffer.events import Fact
from trinity_buffer.pipeline.handle import decoded
from trinity_buffer.pipeline.load.reading import EventCache
from trinity_buffer.pipeline.train.sampler import ReadyGroup, ReadyGroups
from trinity_buffer.store.log import StoredEvent
from trinity_buffer.store.rows import first_address
from trinity_buffer.store.trainer_queries import Reader, annotated_page

RUNS, CALLS = 3, 3


async def ragged(experiment: Experiment, seed: int) -> None:
    """Write groups whose rows lie in several events each, annotated in several events."""
    random_ = random.Random(seed)
    todo = [(task, run) for task in range(12) for run in range(RUNS)]
    random_.shuffle(todo)
    for call in range(CALLS):
        some = [
            rollout("b", task, run, length=random_.randint(4, 40), version=9 * (task % 4 > 0))
            for task, run in todo[call::CALLS]
        ]
        await experiment.writer("e0").write(some)
        await run_strategy(experiment, "grpo", {"epsilon": 1e-6})


def reader_of(experiment: Experiment, name: str = "trainer") -> Reader:
    """Return the trainer ``name`` of the experiment."""
    return Reader(experiment.key, name, "", name)


async def ready(
    experiment: Experiment, reader: Reader, *, from_the_start: bool = False
) -> list[ReadyGroup]:
    """Return all groups that wait for a trainer."""
    waiting = ReadyGroups("grpo", reader, EventCache(experiment.key, experiment.name), 0)
    if not from_the_start:
        await experiment.database.read(waiting.start)
    await experiment.database.read_session(lambda s: waiting.fill(s, 10**6))
    return [*waiting.groups]


async def expected(experiment: Experiment, reader: Reader) -> list[tuple[Any, ...]]:
    """Return (annotation, group, planned, experience, version), off the projections."""
    held = {one["address"] for one in await rows(experiment, "delivery")}
    gone = {
        one["address"]
        for one in await rows(experiment, "rejection")
        if one["consumer"] == reader.name
    }
    query = (
        "SELECT a.address, a.group_slot, a.planned, a.experience, e.policy_version "
        "FROM annotation AS a JOIN experience AS e ON e.address = a.experience ORDER BY a.address"
    )
    every = [tuple(row) for row in await experiment.database.read(sql(query))]
    return [one for one in every if one[0] not in held | gone]


def as_rows(groups: list[ReadyGroup]) -> list[tuple[Any, ...]]:
    """Return the rows of groups as `expected` does."""
    return [
        (annotation, group.key[2], group.planned, experience, version)
        for group in groups
        for annotation, experience, version in zip(
            group.annotations, group.experiences, group.policy_versions, strict=True
        )
    ]


@pytest.mark.parametrize(("page", "kept"), [(1024, 32_768), (2, 1)])
async def test_the_log_says_what_the_projections_say(
    store_url: str, resize: Resize, page: int, kept: int
) -> None:
    resize(rows_per_page=page, rows_kept=kept)
    async with opened(store_url, rollouts_per_group=RUNS) as experiment:
        await ragged(experiment, seed=page)
        reader = reader_of(experiment)
        whole = await ready(experiment, reader)
        assert as_rows(whole) == await expected(experiment, reader)
        assert len({group.key for group in whole}) == len(whole) == 12
        # Some are handed out, some are too old before their turn; then one starts anew.
        options = {"sample_strategy": "staleness_control", "max_staleness": 0}
        async with experiment.train_stream(strategy="grpo", **options) as stream:
            await anext(stream)
            await anext(stream)
        left = await ready(experiment, reader)
        assert as_rows(left) == await expected(experiment, reader)
        assert await ready(experiment, reader, from_the_start=True) == left
        assert 0 < len(as_rows(left)) < len(as_rows(whole))
        assert await rows(experiment, "rejection")


async def test_events_of_a_single_row_are_all_found(store_url: str, resize: Resize) -> None:
    resize(rows_per_page=1)
    async with opened(store_url, rollouts_per_group=1) as experiment:
        for task in range(4):
            await experiment.writer("e0").write(group(task=task, runs=1))
            await run_strategy(experiment, "grpo", {"epsilon": 1e-6})
        waiting = await ready(experiment, reader_of(experiment))
        assert as_rows(waiting) == await expected(experiment, reader_of(experiment))
        events = [found.key[1] for found in waiting]
        for place, event in enumerate(events):  # from an event on, it is the first
            positions, _ = await experiment.database.read(
                annotated_page,
                experiment.key,
                annotation_set="grpo",
                trainer=reader_of(experiment),
                start=first_address(event),
                limit=9,
            )
            assert positions == events[place:]


async def test_rows_of_another_experiment_and_beyond_the_page_are_not_looked_at(
    sqlite_url: str,
) -> None:
    """Both experiments have sets, trainers and addresses that are called the same."""
    async with open_store(sqlite_url) as store:
        both = [await annotated_one_by_one(store, name, n) for name, n in (("one", 1), ("two", 2))]
        found = {}
        for experiment in both:
            read, key = experiment.database.read, experiment.key
            pages = [await read(_page, key, rows) for rows in range(3)]
            found[experiment.name] = [(len(positions), len(spent)) for positions, spent in pages]
    assert found == {"one": [(0, 0), (1, 1), (1, 1)], "two": [(0, 0), (1, 1), (2, 2)]}


async def annotated_one_by_one(store: Store, name: str, number: int) -> Experiment:
    """Return an experiment whose trainer takes the first row and rejects the others."""
    experiment = await store.experiment(name, config={"rollouts_per_group": 1})
    for task in range(number):
        await experiment.writer("e0").write([rollout("b", task, length=50 if task else 8)])
        await run_strategy(experiment, "grpo", {"epsilon": 1e-6})
    async with experiment.train_stream(strategy="grpo", max_tokens=20) as stream:
        assert len([step async for step in stream]) == 1
    return experiment


def _page(tx: Transaction, key: int, limit: int) -> tuple[list[int], set[int]]:
    trainer = Reader(key, "trainer", "", "trainer")
    return annotated_page(tx, key, annotation_set="grpo", trainer=trainer, start=0, limit=limit)


async def test_a_group_whose_rows_go_for_different_reasons_counts_once(store_url: str) -> None:
    long, bare = rollout("b", 1, 0, length=50), rollout("b", 1, 1)
    bare.logprobs = None
    kept = [rollout("b", task, run) for task in (0, 2) for run in range(2)]
    async with opened(store_url, rollouts_per_group=2) as experiment:
        writer = experiment.writer("e0")
        await writer.plan("b", [0, 1, 2], 2)
        await writer.write([*kept, long, bare])
        await run_strategy(experiment, "grpo", {"epsilon": 1e-6})
        options: dict[str, Any] = {"max_tokens": 20, "needs": ("logprobs",)}
        async with experiment.train_stream(strategy="grpo", groups_per_step=3, **options) as stream:
            steps = [step async for step in stream]
        consumers = await rows(experiment, "consumer")
        reasons = [row["reason"] for row in await rows(experiment, "rejection")]
    assert [len(step.manifest.annotations) for step in steps] == [len(kept)]
    assert sorted(reasons) == ["invalid: logprobs", "oversize"]
    assert [row["rejected_groups"] for row in consumers if row["kind"] == "trainer"] == [1]


async def test_an_event_is_decoded_once_while_it_is_in_use(
    store_url: str, monkeypatch: pytest.MonkeyPatch, resize: Resize
) -> None:
    times: Counter[int] = Counter()

    def counted(name: str, stored: StoredEvent) -> Event:
        times[stored.position] += 1
        return decoded(name, stored)

    # Room for the one event that annotates everything, and for nothing else.
    resize(rows_kept=RUNS)
    async with opened(store_url, rollouts_per_group=RUNS) as experiment:
        for task in range(8):
            await experiment.writer("e0").write(group(task=task, runs=RUNS))
        await run_strategy(experiment, "grpo", {"epsilon": 1e-6})
        monkeypatch.setattr("trinity_buffer.pipeline.load.reading.decoded", counted)
        async with experiment.train_stream(strategy="grpo") as stream:
            assert len([step async for step in stream]) == 8
        annotations = await rows(experiment, "annotation")
    # Once for the groups; the events of the experiences drive it out; once more for all steps.
    assert [times[last] for last in {row["address"] >> 20 for row in annotations}] == [2]
    assert max(times.values()) == 2


async def test_a_strategy_decodes_what_was_recorded_once(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    times: Counter[tuple[str, int]] = Counter()

    def counted(kind: str, blob: bytes) -> Fact:
        times[kind, hash(bytes(blob))] += 1
        return decode_fact(kind, blob)

    async with opened(store_url, rollouts_per_group=RUNS) as experiment:
        for task in range(4):
            await experiment.writer("e0").write(group(task=task, runs=RUNS))
        monkeypatch.setattr("trinity_buffer.pipeline.handle.decode_fact", counted)
        await run_strategy(experiment, "grpo", {"epsilon": 1e-6})
    assert [times[one] for one in times if one[0] == "ExperiencesRecorded"] == [1] * 4


async def test_an_event_that_is_gone_or_damaged_is_named(sqlite_url: str) -> None:
    async with opened(sqlite_url, rollouts_per_group=1) as experiment:
        await experiment.writer("e0").write(group(runs=1))
        await run_strategy(experiment, "grpo", {"epsilon": 1e-6})
        (row,) = await rows(experiment, "experience")
        rows_of_log = EventCache(experiment.key, experiment.name)
        with pytest.raises(CodecError, match="no event at position 77"):
            await experiment.database.read_session(lambda s: rows_of_log.events(s, [77]))
    position = row["address"] >> 20
    await write_body(sqlite_url, position, b"\xc1")
    async with (
        opened(sqlite_url, rollouts_per_group=1) as experiment,
        experiment.train_stream(strategy="grpo") as stream,
    ):
        with pytest.raises(CodecError, match=f"the event at position {position}: "):
            await anext(stream)


@pytest.mark.parametrize(("asked", "through"), [(1, [0, 0, 1]), (2, [1])])
async def test_it_is_known_when_no_more_is_to_be_read(
    store_url: str, asked: int, through: list[int]
) -> None:
    async with opened(store_url, rollouts_per_group=1) as experiment:
        for task in range(3):
            await experiment.writer("e0").write(group(task=task, runs=1))
        await run_strategy(experiment, "grpo")
        cache = EventCache(experiment.key, experiment.name)
        waiting = ReadyGroups("grpo", reader_of(experiment), cache, 0)
        found = []
        for _ in through:
            await experiment.database.read_session(lambda s: waiting.fill(s, asked))
            for _ in range(min(asked, len(waiting.groups))):
                waiting.groups.popleft()
            found.append(int(waiting.is_through))
        assert found == through


async def test_a_full_page_may_be_followed_by_another(store_url: str, resize: Resize) -> None:
    resize(rows_per_page=2)
    async with opened(store_url, rollouts_per_group=2) as experiment:
        await experiment.writer("e0").write(group(runs=2))
        await run_strategy(experiment, "grpo")
        cache = EventCache(experiment.key, experiment.name)
        waiting = ReadyGroups("grpo", reader_of(experiment), cache, 0)
        assert await experiment.database.read_session(lambda s: waiting.fill(s, 1)) == 1
        assert waiting.groups.popleft()
        assert not waiting.is_through
        assert await experiment.database.read_session(lambda s: waiting.fill(s, 1)) == 0
        assert waiting.is_through
