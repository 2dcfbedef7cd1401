"""What `stats` says at little cost is what `verify` counts from events, on every backend."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.handles import Experiment, Transaction
from tests.raw_store import appending, sql
from tests.sample_run import RUNS, record_sample_run, rollout
from tests.trainer.test_mixing import filled, taken
from trinity_buffer import open_store, run_strategy, verify
from trinity_buffer.events import ExperiencesRejected
from trinity_buffer.store import counters, counts, log, trainer_queries, writer_queries
from trinity_buffer.store.rows import position_of

Counts = counts.StrategyCounts | counts.TrainerCounts


async def both(experiment: Experiment) -> tuple[list[Counts], list[Counts]]:
    """Return what is tallied and what is counted, of sets and trainers."""

    def look(tx: Transaction) -> list[Counts]:
        key, rows = experiment.key, writer_queries.consumers(tx, experiment.key).values()
        sets = [row for row in rows if row.kind == "strategy"]
        trainers = [row for row in rows if row.kind == "trainer"]
        numbers = counters.numbers_of(tx, key)
        return [
            *(counts.of_strategy(tx, key, row, numbers) for row in sets),
            *(counts.of_trainer(tx, key, row, numbers) for row in trainers),
        ]

    report = await verify(experiment)
    return await experiment.database.read(look), [*report.strategies, *report.trainers]


async def test_tallies_are_what_is_counted(store_url: str, tmp_path: Path) -> None:
    """With rows that are refused, unseen, waiting, rejected, ready, handed out and committed."""
    sample = await record_sample_run(store_url, tmp_path / "run")
    async with open_store(store_url) as store:
        experiment = await store.experiment(sample.name)
        await experiment.writer("e0").write([rollout("b1", 0, 2, 0.25)])
        another = experiment.train_stream(
            strategy="varied", consumer="trainer 2", groups_per_step=1
        )
        async with another as stream:
            await stream.commit(await anext(stream))
            # Step 2 is made ahead. To ask for it would have step 3 made too, on a slow machine.
            async for event in experiment.events(follow=True, kinds=["BatchLeased"]):
                if (event.body["consumer"], event.body["step"]) == ("trainer 2", 2):
                    break
        tallied, counted = await both(experiment)
    assert tallied == counted
    grpo, varied, trainer, other = tallied
    assert isinstance(other, counts.TrainerCounts)
    assert (other.rows, other.ready, other.leased, other.committed) == (12, 4, 4, 4)
    assert isinstance(grpo, counts.StrategyCounts)
    assert isinstance(varied, counts.StrategyCounts)
    assert isinstance(trainer, counts.TrainerCounts)
    assert (grpo.recorded, grpo.unseen, grpo.waiting, grpo.annotated) == (19, 1, 1, 16)
    assert (grpo.rejected, varied.rejected) == ({"late": 1}, {"late": 1, "zero_variance": RUNS})
    assert (trainer.rows, trainer.ready, trainer.leased, trainer.committed) == (16, 4, 4, 8)


async def test_what_lies_behind_a_cursor_is_unseen(sqlite_url: str, tmp_path: Path) -> None:
    sample = await record_sample_run(sqlite_url, tmp_path / "run")
    async with open_store(sqlite_url) as store:
        experiment = await store.experiment(sample.name)

        def look(tx: Transaction) -> None:
            key = experiment.key
            row = writer_queries.consumers(tx, key)["grpo"]
            taken = sql("SELECT address FROM experience WHERE refused IS NULL")(tx)
            for cursor in range(log.head(tx, key) + 1):
                moved = replace(row, cursor=cursor)
                expected = sum(position_of(address) > cursor for (address,) in taken)
                assert counts.unseen(tx, key, moved)[0] == expected

        await experiment.database.read(look)


async def test_rows_that_a_trainer_rejects_before_their_turn_are_not_ready(
    store_url: str, tmp_path: Path
) -> None:
    sample = await record_sample_run(store_url, tmp_path / "run")
    async with open_store(store_url) as store:
        experiment = await store.experiment(sample.name)
        await experiment.database.write(_reject_one_that_is_ready, experiment.key)
        tallied, counted = await both(experiment)
    assert tallied == counted
    trainer = tallied[-1]
    assert isinstance(trainer, counts.TrainerCounts)
    assert (trainer.ready, trainer.rejected) == (RUNS - 1, {"stale": 1})


def _reject_one_that_is_ready(tx: Transaction, key: int) -> None:
    ready = (
        "SELECT max(address) FROM annotation "
        "WHERE consumer = 'grpo' AND address NOT IN (SELECT address FROM delivery)"
    )
    ((address,),) = sql(ready)(tx)
    fact = ExperiencesRejected(
        consumer="trainer", by="trainer", experiences=[address], reasons=["stale"], planned_groups=0
    )
    appending(key, fact, actor="trainer")(tx)


async def test_rows_of_an_expert_are_none_of_the_set(store_url: str) -> None:
    async with open_store(store_url) as store:
        experiment = await filled(store)
        await taken(experiment, 2)
        tallied, counted = await both(experiment)
    assert tallied == counted
    trainer = tallied[-1]
    assert isinstance(trainer, counts.TrainerCounts)
    assert 0 < trainer.leased <= trainer.rows


async def test_steps_of_another_experiments_trainer_are_not_waited_for(
    sqlite_url: str, tmp_path: Path
) -> None:
    sample = await record_sample_run(sqlite_url, tmp_path / "run")
    async with open_store(sqlite_url) as store:
        done = await store.experiment("done", config={"rollouts_per_group": 1})
        await done.writer("e0").write([rollout("b0", 0, 0, 1.0)])
        await run_strategy(done, "grpo")
        async with done.train_stream(strategy="grpo") as stream:
            await stream.commit(await anext(stream))
        found = []
        for experiment in (await store.experiment(sample.name), done):
            key, database = experiment.key, experiment.database
            row = await database.read(writer_queries.consumer_row, key, "trainer")
            assert row is not None
            after = {"after": row.committed_step}
            uncommitted = await database.read(trainer_queries.steps, key, "trainer", **after)
            found.append([step.leased_at for step in uncommitted])
        leased = [e.position async for e in (await store.experiment("sort")).events(kinds=LEASED)]
    assert found == [leased[2:], []]


LEASED = ("BatchLeased",)
