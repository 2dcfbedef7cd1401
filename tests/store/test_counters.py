"""Counters are what plain SQL counts, after every event, and `verify` and `rebuild` hold them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from sqlalchemy import text
from typing_extensions import override

from tests.contract.making import group, opened
from tests.handles import Experiment, Transaction
from tests.pipeline.planting import unguarded
from tests.raw_store import append
from tests.sample_run import RUNS, record_sample_run, rollout
from tests.store.test_earlier import taken_back
from tests.trainer.test_mixing import filled, taken
from tests.whole_stores import diff_projections, downgrade, migrate, open_for_migration, rebuild
from trinity_buffer import open_store, run_strategy, verify
from trinity_buffer.algorithm.add_strategy import AddStrategy
from trinity_buffer.events import ExperiencesAnnotated, PlacedFact
from trinity_buffer.experience import Experience
from trinity_buffer.inspector import now, rejection_counts
from trinity_buffer.inspector.overviews import ExperimentOverview, overview, overview_of
from trinity_buffer.inspector.source import as_of
from trinity_buffer.store import counters, counts, fold, log, writer_queries

PLAIN = (
    "SELECT '', kind, count(*) FROM event GROUP BY kind",
    "SELECT '', 'planned by: ' || actor, count(*) FROM batch WHERE planned_at IS NOT NULL "
    "GROUP BY actor",
    "SELECT '', 'planned groups', count(*) FROM plan HAVING count(*) > 0",
    "SELECT '', 'planned rollouts', sum(b.rollouts_per_group) FROM plan p JOIN batch b "
    "ON b.batch = p.batch HAVING count(*) > 0",
    "SELECT '', 'stored rollouts', sum(stored_rollouts) FROM batch WHERE sealed_at IS NOT NULL "
    "HAVING count(*) > 0",
    "SELECT '', 'recorded', count(*) FROM experience HAVING count(*) > 0",
    "SELECT '', 'lowest version', min(policy_version) FROM experience "
    "HAVING min(policy_version) IS NOT NULL",
    "SELECT '', 'highest version', max(policy_version) FROM experience "
    "HAVING max(policy_version) IS NOT NULL",
    "SELECT '', 'rejected: ' || refused, count(*) FROM experience WHERE refused IS NOT NULL "
    "GROUP BY refused",
    "SELECT consumer, 'annotated', count(DISTINCT experience) FROM annotation GROUP BY consumer",
    "SELECT consumer, 'rows', count(*) FROM annotation GROUP BY consumer",
    "SELECT consumer, 'rejected: ' || reason, count(*) FROM rejection GROUP BY consumer, reason",
)
STORED = (
    "SELECT b.batch, count(p.task), (SELECT count(*) FROM (SELECT DISTINCT e.task, e.run "
    "FROM experience e JOIN plan q ON q.batch = e.batch AND q.task = e.task "
    "WHERE e.batch = b.batch AND e.run < b.rollouts_per_group) AS runs) "
    "FROM batch b LEFT JOIN plan p ON p.batch = b.batch WHERE b.sealed_at IS NOT NULL "
    "GROUP BY b.batch, b.rollouts_per_group"
)


def in_plain_sql(tx: Transaction) -> counters.Numbers:
    rows = [row for query in PLAIN for row in tx.fetch_all(query, ())]
    return {(name, state): int(number) for name, state, number in rows}


def stored_in_plain_sql(tx: Transaction) -> list[tuple[str, int, int]]:
    return sorted(
        (key, int(groups), int(stored)) for key, groups, stored in tx.fetch_all(STORED, ())
    )


def stored(tx: Transaction) -> list[tuple[str, int, int]]:
    query = "SELECT batch, planned_groups, stored_rollouts FROM batch WHERE sealed_at IS NOT NULL"
    return sorted(
        (key, int(groups or 0), int(number)) for key, groups, number in tx.fetch_all(query, ())
    )


def handed_out(tx: Transaction) -> list[tuple[str, int, int]]:
    return sorted(tx.fetch_all("SELECT consumer, step, own_rows_so_far FROM step", ()))


def handed_out_in_plain_sql(tx: Transaction) -> list[tuple[str, int, int]]:
    query = (
        "SELECT consumer, step, (SELECT count(*) FROM delivery d WHERE d.consumer = s.consumer "
        "AND d.source = '' AND d.step <= s.step) FROM step s"
    )
    return sorted(tx.fetch_all(query, ()))


async def require_plain(experiment: Experiment) -> None:
    read, key = experiment.database.read, experiment.key
    assert await read(counters.numbers_of, key) == await read(in_plain_sql)
    assert await read(stored) == await read(stored_in_plain_sql)
    plans = await read(counts.of_plans, key, await read(counters.numbers_of, key))
    assert plans == (await verify(experiment)).plans
    assert await read(handed_out) == await read(handed_out_in_plain_sql)


async def test_counters_are_what_plain_sql_counts(store_url: str, tmp_path: Path) -> None:
    sample = await record_sample_run(store_url, tmp_path / "run")
    async with open_store(store_url) as store:
        await require_plain(await store.experiment(sample.name))


async def test_versions_go_both_ways_and_none_is_no_version(store_url: str) -> None:
    async with opened(store_url) as experiment:
        writer, seen = experiment.writer("e0"), []
        for task, version in enumerate([None, 5, 2, 7, 0]):
            info = {} if version is None else {"model_version": version}
            made = group(task=task)
            for one in made:
                one.info = dict(info)
            await writer.write(made)
            numbers = await experiment.database.read(counters.numbers_of, experiment.key)
            ends = (counters.LOWEST_VERSION, counters.HIGHEST_VERSION)
            seen.append(tuple(numbers.get(("", end)) for end in ends))
            await require_plain(experiment)
    assert seen == [(None, None), (5, 5), (2, 5), (2, 7), (0, 7)]


async def test_rollouts_that_come_after_the_seal_are_stored_all_the_same(store_url: str) -> None:
    """Planned 2 × 2; sealed with one group; then a planned run, one beyond, and another task."""
    async with opened(store_url) as experiment:
        writer = experiment.writer("e0")
        await writer.plan("b0", [0, 1], rollouts_per_group=2)
        await writer.write([rollout("b0", 0, run, 1.0) for run in range(2)])
        await writer.seal("b0", expected=2)
        await require_plain(experiment)
        late = [rollout("b0", 1, 0, 1.0), rollout("b0", 1, 5, 1.0), rollout("b0", 9, 0, 1.0)]
        for one in late:
            await writer.write([one])
            await require_plain(experiment)
        assert await experiment.database.read(stored) == [("b0", 2, 3)]
        assert await writer.missing("b0") == [(1, 1)]
        assert (await verify(experiment)).problems == ()


async def test_rows_that_a_step_loses_are_handed_out_no_more(
    store_url: str, tmp_path: Path
) -> None:
    sample = await record_sample_run(store_url, tmp_path / "run")
    async with open_store(store_url) as store:
        experiment = await store.experiment(sample.name)
        before = await experiment.database.read(handed_out)
        await append(experiment, *await taken_back(experiment))
        assert before == [("trainer", 1, 4), ("trainer", 2, 8), ("trainer", 3, 12)]
        assert await experiment.database.read(handed_out) == [*before[:2], ("trainer", 3, 10)]
        await require_plain(experiment)


async def test_what_older_versions_did_not_count_is_counted_when_they_are_migrated(
    store_url: str, tmp_path: Path
) -> None:
    """A run, and one that mixes in an expert's rows."""
    await record_sample_run(store_url, tmp_path / "run")
    async with open_store(store_url) as store:
        mixing = (await taken(await filled(store), 2))[-1].step
        names = await store.experiments()
    async with open_for_migration(store_url) as database:
        await database.write(downgrade, "0003")
    await migrate(store_url)
    async with open_store(store_url) as store:
        assert mixing == 2
        for name in names:
            experiment = await store.experiment(name)
            assert await diff_projections(store.database, experiment.key) == []


class Verbose(AddStrategy):
    """Rejects each experience, with a reason that no index takes and one of its own."""

    families: ClassVar[tuple[str, ...]] = ("light",)

    @override
    async def add(self, experiences: list[Experience], step: int) -> tuple[int, dict[str, Any]]:
        """Write nothing."""
        for one in experiences:
            self.reject([one], f"task {one.eid.task}: " + "because " * 800)
        return 0, {}


async def test_reasons_may_be_as_long_as_one_likes(store_url: str) -> None:
    """On PostgreSQL a key of an index has 2,700 bytes at most; migrated, it is the same."""
    async with opened(store_url, rollouts_per_group=4) as experiment:
        for task in range(2):
            await experiment.writer("e0").write(group(task=task))
        await run_strategy(experiment, Verbose)
        await require_plain(experiment)
        counted = await rejection_counts(now(experiment))
        assert [len(reason) > 6000 for reason in counted["Verbose"]] == [True, True]
        assert sum(counted["Verbose"].values()) == 8
    async with open_for_migration(store_url) as database:
        await database.write(downgrade, "0002")
    await migrate(store_url)
    async with opened(store_url) as experiment:
        await require_plain(experiment)
        assert await rejection_counts(now(experiment)) == counted
        assert (await verify(experiment)).problems == ()


async def test_a_fold_that_the_second_opinion_contradicts_is_told_of(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version whose fold counts wrongly folds the same wrong numbers again."""
    count = fold.count
    more = "UPDATE counter SET number = number + ? WHERE consumer = ? AND state = 'annotated'"

    def thrice(tx: Transaction, key: int, facts: Sequence[PlacedFact], stored: int) -> None:
        count(tx, key, facts, stored)
        for placed in facts:
            if isinstance(placed.fact, ExperiencesAnnotated):
                twice = 2 * len(set(placed.fact.experiences))
                tx.fetch_all(more, (twice, placed.fact.consumer))

    monkeypatch.setattr(fold, "count", thrice)
    sample = await record_sample_run(sqlite_url, tmp_path / "run")
    async with open_store(sqlite_url) as store:
        (problem,) = (await verify(await store.experiment(sample.name))).problems
    assert (problem.check, problem.where) == ("projections", "all")
    assert "please report it" in problem.what


LIES = (
    "UPDATE counter SET number = number + 1 WHERE state = 'recorded'",
    "UPDATE counter SET number = 9 WHERE state = 'highest version'",
    "UPDATE counter SET number = number - 1 WHERE state = 'rows' AND consumer = 'grpo'",
    "DELETE FROM counter WHERE state = 'rejected: zero_variance'",
    "INSERT INTO counter SELECT experiment, 'nobody', 'rows', 'rows', 3 FROM configuration",
    "UPDATE counter SET number = number - 1 WHERE state = 'stored rollouts'",
    "UPDATE counter SET number = number - 1 WHERE state = 'planned by: e0'",
    "DELETE FROM counter WHERE state = 'BatchLeased'",
    "UPDATE step SET own_rows_so_far = own_rows_so_far + 1 WHERE step = 2",
    "UPDATE batch SET stored_rollouts = stored_rollouts - 1 WHERE sealed_at IS NOT NULL",
    "UPDATE batch SET planned_groups = 3 WHERE batch = 'b1'",
)


@pytest.mark.long
async def test_a_counter_that_lies_is_found_and_mended(store_url: str, tmp_path: Path) -> None:
    sample = await record_sample_run(store_url, tmp_path / "run")
    async with open_store(store_url) as store:
        experiment = await store.experiment(sample.name)
        for lie in LIES:
            await unguarded(store_url, lambda tx, lie=lie: tx.execute(text(lie)))  # type: ignore[misc]
            problems = (await verify(experiment)).problems
            assert [one.check for one in problems] == ["projections"], lie
            await rebuild(store.database, experiment.key)
            await require_plain(experiment)
        assert (await verify(experiment)).problems == ()


@pytest.mark.long
async def test_an_overview_as_of_each_position_grows_to_the_one_of_now(
    store_url: str, tmp_path: Path
) -> None:
    sample = await record_sample_run(store_url, tmp_path / "run")
    async with open_store(store_url, read_only=True) as store:
        (now,) = (await overview(store)).experiments
        experiment = await store.experiment(sample.name)
        then = [await _as_of(experiment, position) for position in range(1, now.head + 1)]
    assert then[-1] == now
    for position, one in enumerate(then, 1):
        assert sum(one.events.values()) == one.head == position
        assert one.experiences <= now.experiences
    assert [one.finished for one in then].count(True) == now.finished
    steps = [one.trainers[0].committed for one in then if one.trainers]
    assert steps == sorted(steps)
    assert {0, 1, 2} == set(steps)


async def _as_of(experiment: Experiment, position: int) -> ExperimentOverview:
    async with as_of(experiment, position) as source:
        return await overview_of(source)


async def test_all_experiments_are_told_as_each_alone(store_url: str, tmp_path: Path) -> None:
    for name in ("one", "two"):
        await record_sample_run(store_url, tmp_path / name, name)
    async with open_store(store_url) as store:
        empty = await store.experiment("empty", config={})
        every = (await overview(store)).experiments
        alone = [(await overview(store, one.name)).experiments[0] for one in every]
        names = await store.database.read(log.experiment_names)
        rows = await store.database.read(writer_queries.consumers, empty.key)
    assert list(every) == alone
    assert [one.name for one in every] == list(names)
    assert (every[2].experiences, every[2].trainers, rows) == (0, (), {})
    assert every[0].experiences == every[1].experiences == 4 * RUNS + 2
