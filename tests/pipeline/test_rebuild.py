"""Projections come out of the log equal, row for row, and nobody sees them half-built."""

from __future__ import annotations

import resource
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pytest
from sqlalchemy import delete, insert, update

from tests.conftest import Resize
from tests.handles import Store, Transaction
from tests.pipeline.planting import append_unfolded, events_of, everything, first_row, unguarded
from tests.raw_store import PROJECTIONS, count, dbapi2, sql
from tests.sample_run import RUNS, SampleRun, record_sample_run, rollout
from tests.whole_stores import diff_projections, rebuild
from trinity_buffer import open_store, verify
from trinity_buffer.errors import StoreError
from trinity_buffer.inspector.source import as_of
from trinity_buffer.pipeline.verify.projections import (
    RebuildReport,
    catch_up,
    no_progress,
    suspects,
)
from trinity_buffer.store import refold
from trinity_buffer.store.refold import open_scratch
from trinity_buffer.store.tables import annotation, consumer, experience, plan, rejection, waiting


async def rebuilt(url: str, **options: Any) -> RebuildReport:
    async with open_store(url) as store:
        return await rebuild(store.database, 1, **options)


async def test_what_was_dropped_comes_out_equal(sample: SampleRun) -> None:
    before = await everything(sample.url)
    assert all(before.values()), "the sample run leaves a projection empty"

    def change(tx: Transaction) -> None:
        for table in PROJECTIONS:
            tx.execute(delete(table))

    await unguarded(sample.url, change)
    report = await rebuilt(sample.url)
    assert await everything(sample.url) == before
    assert report.mended == {name: len(rows) for name, rows in sorted(before.items())}


@pytest.mark.parametrize(
    "harm", ["DELETE FROM configuration", "UPDATE configuration SET config = '{'"], ids=str
)
async def test_an_experiment_is_opened_without_its_row(sample: SampleRun, harm: str) -> None:
    before = await everything(sample.url)
    await unguarded(sample.url, sql(harm))
    async with open_store(sample.url) as store:
        experiment = await store.experiment(sample.name)
        assert experiment.config["rollouts_per_group"] == RUNS
        report = await verify(experiment)
        assert [problem.where for problem in report.problems] == ["configuration"]
        await store.experiment(sample.name, config={"groups_per_step": 1})
        assert (await rebuild(store.database, experiment.key)).mended == {"configuration": 1}
    assert await everything(sample.url) == before


async def test_what_was_right_is_not_touched(sample: SampleRun) -> None:
    before = await everything(sample.url)
    assert (await rebuilt(sample.url)).mended == {}
    assert await everything(sample.url) == before


async def test_changed_missing_and_invented_rows_are_mended(sample: SampleRun) -> None:
    before = await everything(sample.url)

    def change(tx: Transaction) -> None:
        tx.execute(update(experience).values(reward=0.25))
        tx.execute(update(consumer).values(cursor=1))
        tx.execute(delete(annotation).where(annotation.c.consumer == "varied"))
        tx.execute(delete(plan))
        row = first_row(tx, rejection)
        tx.execute(insert(rejection), {**row, "address": 77})
        tx.execute(insert(waiting), {"experiment": 1, "consumer": "ghost", "address": 77})

    await unguarded(sample.url, change)
    assert set((await rebuilt(sample.url)).mended) == {
        "annotation",
        "consumer",
        "experience",
        "plan",
        "rejection",
        "waiting",
    }
    assert await everything(sample.url) == before


async def test_differences_name_table_row_and_column(sample: SampleRun) -> None:

    def change(tx: Transaction) -> str:
        row = first_row(tx, experience)
        mine = experience.c.address == row["address"]
        tx.execute(update(experience).where(mine).values(finish_reason="bored"))
        uid = "/".join(str(row[name]) for name in ("batch", "task", "run", "step", "suffix"))
        return f"address={row['address'] >> 20}:{row['address'] & 0xFFFFF}, uid={uid!r}"

    key = await unguarded(sample.url, change)
    async with open_store(sample.url, read_only=True) as store:
        (found,) = await diff_projections(store.database, 1)
    assert str(found) == f"experience({key}): finish_reason is 'bored', the log says None"
    async with open_store(sample.url) as store:
        await store.database.write(refold.mend, [found])
        assert await diff_projections(store.database, 1) == []


async def test_a_full_span_is_suspected_where_a_row_of_it_was_changed(
    sqlite_sample: SampleRun, resize: Resize
) -> None:
    resize(rows_per_span=5)

    def change(tx: Transaction) -> None:
        mine = experience.c.address == first_row(tx, experience)["address"]
        tx.execute(update(experience).where(mine).values(finish_reason="bored"))

    await unguarded(sqlite_sample.url, change)
    async with open_store(sqlite_sample.url, read_only=True) as store:
        with open_scratch(1) as scratch:
            await catch_up(store.database, scratch, no_progress)
            found = await suspects(store.database, scratch, no_progress)
    assert [span.table for span in found if span.up_to is not None] == ["experience"]


def test_a_library_is_told_that_the_name_of_a_scratch_is_a_uri(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Most are built to see it; others would make a file of that name."""
    connect, told = dbapi2.connect, []

    def noted(name: str, **options: Any) -> Any:
        told.append((name.startswith("file:"), options["uri"]))
        return connect(name, **options)

    monkeypatch.setattr(dbapi2, "connect", noted)
    with open_scratch(1):
        assert told == [(True, True)]


async def test_deliveries_are_looked_at_by_source_so_that_their_key_finds_them(
    sample: SampleRun, resize: Resize
) -> None:
    resize(rows_per_span=2)
    async with open_store(sample.url) as store:
        spans = await store.database.read(refold.spans, 1)
        with open_scratch(1) as scratch:
            await catch_up(store.database, scratch, no_progress)
            found = await suspects(store.database, scratch, no_progress)
    handed_out = [span for span in (*spans, *found) if span.table == "delivery"]
    assert len(handed_out) >= 2
    assert {span.owner for span in handed_out} == {("trainer", "")}
    assert all(span.up_to is None for span in found)


async def test_spans_of_any_size_find_the_same(sample: SampleRun, resize: Resize) -> None:
    resize(rows_per_span=2)
    before = await everything(sample.url)

    def change(tx: Transaction) -> None:
        tx.execute(update(experience).where(experience.c.run == 2).values(length=1))
        tx.execute(delete(annotation).where(annotation.c.group_slot == 1))
        tx.execute(update(plan).values(ordinal=7))

    await unguarded(sample.url, change)
    assert set((await rebuilt(sample.url)).mended) == {"annotation", "experience", "plan"}
    assert await everything(sample.url) == before


async def test_a_log_that_contradicts_itself_changes_nothing(sample: SampleRun) -> None:
    body = dict((await events_of(sample.url, "ExperiencesRecorded"))[0].body)
    position = await append_unfolded(sample.url, "ExperiencesRecorded", body)
    before = await everything(sample.url)
    with pytest.raises(StoreError, match=rf"event {position} \(ExperiencesRecorded\) cannot"):
        await rebuilt(sample.url)
    assert await everything(sample.url) == before
    async with open_store(sample.url, read_only=True) as store:
        experiment = await store.experiment(sample.name)
        with pytest.raises(StoreError, match=rf"to {position} cannot be folded .*verify` names it"):
            async with as_of(experiment, position):
                pass


async def test_a_disk_that_is_full_is_not_taken_for_a_log_that_contradicts_itself(
    sqlite_sample: SampleRun,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    async with open_store(sqlite_sample.url, read_only=True) as store:
        experiment = await store.experiment(sqlite_sample.name)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, hard))
        try:
            for look in (verify(experiment), diff_projections(store.database, experiment.key)):
                with pytest.raises(StoreError, match="let TMPDIR name another folder"):
                    await look
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert (await verify(experiment)).ok


async def test_other_experiments_stay_as_they_are(store_url: str, tmp_path: Path) -> None:
    await record_sample_run(store_url, tmp_path / "one")
    await record_sample_run(store_url, tmp_path / "two", name="another")
    await unguarded(store_url, lambda tx: tx.execute(update(experience).values(reward=0.25)))
    assert (await rebuilt(store_url)).mended == {"experience": 18}
    async with open_store(store_url, read_only=True) as store:
        assert len(await diff_projections(store.database, 2)) == 18
        assert await diff_projections(store.database, 1) == []


async def test_others_see_all_of_the_change_or_none(sqlite_sample: SampleRun) -> None:
    """The projections are empty until they are whole, and writers go on meanwhile."""
    whole = {name: len(rows) for name, rows in (await everything(sqlite_sample.url)).items()}

    def change(tx: Transaction) -> None:
        for table in PROJECTIONS:
            if table.name != "configuration":
                tx.execute(delete(table))

    await unguarded(sqlite_sample.url, change)
    seen: list[dict[str, int]] = []
    async with open_store(sqlite_sample.url) as store, anyio.create_task_group() as tasks:

        async def watch() -> None:
            with anyio.move_on_after(30):
                while not seen or seen[-1]["experience"] < whole["experience"]:
                    seen.append(await store.database.read(refold.counts, 1))

        tasks.start_soon(watch)
        async with open_store(sqlite_sample.url) as other:
            await rebuild(other.database, 1)
    assert {counts["experience"] for counts in seen} == {0, whole["experience"]}
    assert seen[-1] == whole
    assert sqlite_sample.name == "sort"


@pytest.mark.long
async def test_writers_go_on_while_projections_are_rebuilt(sample: SampleRun) -> None:
    await unguarded(sample.url, lambda tx: tx.execute(update(experience).values(reward=0.25)))
    stages: Counter[str] = Counter()
    async with open_store(sample.url) as store, open_store(sample.url) as other:
        await _write_and_rebuild(store, other, sample, stages)
        assert await diff_projections(store.database, 1) == []
        num_stored = await count(store, "experience")
    assert num_stored == 18 + 50
    assert stages["compare"]


async def _write_and_rebuild(
    store: Store, other: Store, sample: SampleRun, stages: Counter[str]
) -> None:
    writer = (await store.experiment(sample.name)).writer("e1")

    async def write() -> None:
        for number in range(50):
            await writer.write([rollout(f"c{number}", 0, 0, 1.0)])

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write)
        for _ in range(3):
            await rebuild(other.database, 1, lambda stage, done, total: stages.update([stage]))
