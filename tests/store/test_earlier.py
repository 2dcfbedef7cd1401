"""What an earlier position shows is what a fold of the log up to there gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from tests.conftest import Resize
from tests.contract.making import group, opened
from tests.handles import Experiment, Transaction
from tests.pipeline.planting import unguarded
from tests.postgres import PostgresServer
from tests.raw_store import PROJECTIONS, append, sql
from tests.sample_run import record_sample_run
from trinity_buffer import open_store, run_strategy
from trinity_buffer.errors import StoreError
from trinity_buffer.events import (
    ExperiencesRejected,
    ExperimentFinished,
    Recorded,
    RewardsAssigned,
    SegmentsArchived,
    SegmentsRestored,
    StepDealt,
    StepsCommitted,
    TrainerRewound,
)
from trinity_buffer.inspector.source import as_of
from trinity_buffer.pipeline.verify.projections import decoded_events
from trinity_buffer.store import log
from trinity_buffer.store.refold import Scratch, open_scratch
from trinity_buffer.store.rows import first_address

Rows = dict[str, set[tuple[Any, ...]]]


def shown(tx: Transaction, key: int) -> Rows:
    """Return table -> its rows; how a counter's state is written in its index is of no matter."""
    found = {}
    for table in PROJECTIONS:
        columns = [one for one in table.c if (table.name, one.name) != ("counter", "key")]
        rows = tx.execute(select(*columns).where(table.c.experiment == key)).all()
        found[table.name] = {tuple(map(repr, row)) for row in rows}
        assert len(found[table.name]) == len(rows), table.name
    return found


async def require_equal(experiment: Experiment) -> None:
    """Compare both at each position of the log."""
    read, key = experiment.database.read, experiment.key
    events = decoded_events(await read(log.read_after, key, 0, limit=1 << 20))
    there: Rows = {}
    with open_scratch(key) as scratch:
        for placed in events:
            scratch.fold([placed])
            async with as_of(experiment, placed.position) as source:
                there = await source.read(shown, key)
            for name, rows in folded(scratch).items():
                assert there[name] == rows, (placed.position, placed.kind, name)
    assert there == await read(shown, key)


def folded(scratch: Scratch) -> Rows:
    return scratch.ask(shown, scratch.experiment)


@pytest.mark.long
async def test_each_position_of_a_run(store_url: str, tmp_path: Path, resize: Resize) -> None:
    resize(events_per_page=2)
    sample = await record_sample_run(store_url, tmp_path / "run")
    async with open_store(store_url) as store:
        await require_equal(await store.experiment(sample.name))


@pytest.mark.long
async def test_each_position_of_a_run_that_takes_much_of_it_back(
    store_url: str, tmp_path: Path
) -> None:
    """Rewound, dealt anew with fewer rows, scored again, archived and restored, and over."""
    sample = await record_sample_run(store_url, tmp_path / "run")
    async with open_store(store_url) as store:
        experiment = await store.experiment(sample.name)
        await append(experiment, *await taken_back(experiment))
        await require_equal(experiment)


async def taken_back(experiment: Experiment) -> list[Recorded]:
    """Return facts that change what was before them; the last step of a trainer loses two rows."""
    held = await experiment.database.read(of_last_step)
    trainer, step, lost = held[0].consumer, held[0].step, [int(row.address) for row in held[:2]]
    key = b"k" * 16
    return [
        TrainerRewound(consumer=trainer, step=1, from_step=2),
        StepDealt(
            consumer=trainer,
            token=41,
            step=step,
            leased_at=3,
            world_size=1,
            order=[2, 3],
            microbatches=[],
            digest=bytes(32),
            dropped=lost,
            num_groups=1,
        ),
        ExperiencesRejected(
            consumer=trainer,
            by="trainer",
            experiences=lost,
            reasons=["unreadable"] * 2,
            planned_groups=1,
        ),
        StepsCommitted(
            consumer=trainer,
            token=41,
            steps=[2],
            manifests=[bytes(32)],
            chain=bytes(32),
            checkpoint=None,
            checkpoint_digest=None,
            metrics={},
            environment={},
        ),
        TrainerRewound(consumer=trainer, step=1, from_step=2),
        SegmentsArchived(segments=[key, b"l" * 16], uri="file:a.parquet"),
        SegmentsRestored(segments=[key]),
        RewardsAssigned(scoring="length", experiences=[first_address(6)], rewards=[0.25]),
        SegmentsArchived(segments=[key], uri=None),
        ExperimentFinished(reason="done"),
    ]


def of_last_step(tx: Transaction) -> list[Any]:
    return sql("SELECT * FROM delivery ORDER BY step DESC, address LIMIT 4")(tx)


@pytest.mark.long
async def test_each_position_of_strategies_that_came_later(store_url: str) -> None:
    """One came when the other had decided already, and rejects two groups, one after the other."""
    async with opened(store_url, rollouts_per_group=4) as experiment:
        writer = experiment.writer("e0")
        await writer.plan("b0", [0, 1, 2], 4)
        await writer.write(group("b0", task=0))
        await run_strategy(experiment, "grpo")
        equal = [group("b0", task=task, rewards=[1.0] * 4) for task in (1, 2)]
        await writer.write([*equal[0], *equal[1][:2]])
        await run_strategy(experiment, ["reward_variance", "grpo"], name="late")
        await run_strategy(experiment, "grpo")
        await writer.write(equal[1][2:])
        await run_strategy(experiment, "grpo")
        await run_strategy(experiment, ["reward_variance", "grpo"], name="late")
        await writer.seal("b0", expected=12)
        await require_equal(experiment)


@pytest.mark.long
async def test_nothing_is_left_of_an_earlier_position(store_url: str, tmp_path: Path) -> None:
    sample = await record_sample_run(store_url, tmp_path / "run")
    async with open_store(store_url) as store:
        experiment = await store.experiment(sample.name)
        now = await experiment.database.read(shown, experiment.key)
        for _ in range(6):  # as many as there are connections, and more
            async with as_of(experiment, 3) as source:
                assert await source.read(shown, experiment.key) != now
                assert await experiment.database.read(shown, experiment.key) == now
        assert await experiment.database.read(shown, experiment.key) == now


@pytest.mark.parametrize("harm", ["DELETE FROM event", "UPDATE event SET actor = 'another'"])
async def test_a_log_whose_event_is_missing_or_another_shows_no_later_position(
    store_url: str, tmp_path: Path, harm: str
) -> None:
    sample = await record_sample_run(store_url, tmp_path / "run")
    change = sql(f"{harm} WHERE position = :at", at=5)
    await unguarded(store_url, change, chained=False)
    async with open_store(store_url, read_only=True) as store:
        experiment = await store.experiment(sample.name)
        async with as_of(experiment, 4):
            pass
        with pytest.raises(StoreError, match=r"position [56] breaks the chain of the log: "):
            async with as_of(experiment, 9):
                pass


async def test_a_connection_that_was_lost_does_not_answer_for_now(
    postgres_store_url: str, tmp_path: Path
) -> None:
    """Made anew, it would have no tables of its own, and show the run as it is."""
    sample = await record_sample_run(postgres_store_url, tmp_path / "run")
    async with open_store(postgres_store_url) as store:
        experiment = await store.experiment(sample.name)
        async with as_of(experiment, 3) as source:
            ((pid,),) = await source.read(lambda tx: tx.fetch_all("SELECT pg_backend_pid()", ()))
            await experiment.database.read(
                lambda tx: tx.fetch_all(f"SELECT pg_terminate_backend({pid})", ())
            )
            for _ in range(3):
                with pytest.raises(StoreError, match="connection"):
                    await source.read(shown, source.key)


@pytest.mark.long
async def test_what_is_taken_back_meanwhile_is_there(store_url: str, tmp_path: Path) -> None:
    sample = await record_sample_run(store_url, tmp_path / "run")
    async with open_store(store_url) as store:
        experiment = await store.experiment(sample.name)
        head = await experiment.database.read(log.head, experiment.key)
        async with as_of(experiment, head) as source:
            before = await source.read(shown, source.key)
            for fact in await taken_back(experiment):
                await append(experiment, fact)
                assert await source.read(shown, source.key) == before, fact


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "path"),
    [("last", "public, pg_temp"), ("other", "odd, public"), ("named", '"a :b{c}%s"')],
)
async def test_whatever_the_search_path_is_nothing_that_is_there_is_changed(
    postgres_server: PostgresServer, tmp_path: Path, name: str, path: str
) -> None:
    url = postgres_server.create_database(name)
    async with open_store(url):
        pass
    postgres_server.execute("CREATE SCHEMA odd", database=name)
    if ":" in path:
        postgres_server.execute(f"ALTER SCHEMA public RENAME TO {path}", database=name)
    postgres_server.execute(f"ALTER DATABASE {name} SET search_path = {path}")
    sample = await record_sample_run(url, tmp_path / "run")
    async with open_store(url) as store:
        await append(await store.experiment(sample.name), ExperimentFinished(reason="done"))
    async with open_store(url, read_only=True) as store:
        experiment = await store.experiment(sample.name)
        now = await experiment.database.read(shown, experiment.key)
        await require_equal(experiment)
        assert await experiment.database.read(shown, experiment.key) == now


async def test_who_asks_keeps_nobody_from_writing(store_url: str, tmp_path: Path) -> None:
    """What is written meanwhile is not seen."""
    sample = await record_sample_run(store_url, tmp_path / "run")
    async with open_store(store_url, read_only=True) as reader, open_store(store_url) as store:
        asked, written = [await one.experiment(sample.name) for one in (reader, store)]
        head = await written.database.read(log.head, written.key)
        async with as_of(asked, head) as source:
            before = await source.read(shown, source.key)
            await written.writer("e9").write(group(batch="b9", task=0))
            assert await source.read(shown, source.key) == before
