"""The views say what the questions say, on every backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from tests.conftest import STORE
from tests.handles import Store, Transaction
from tests.postgres import PostgresServer
from tests.sample_run import record_sample_run
from trinity_buffer import open_store, verify
from trinity_buffer.identity import EID
from trinity_buffer.inspector import blame, overview, rejection_counts, steps
from trinity_buffer.inspector.source import now
from trinity_buffer.store.schema import VIEWS, unsound

UID = "batch, task, run, step, suffix"


async def asked(store: Store, query: str) -> list[tuple[Any, ...]]:
    def look(tx: Transaction) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in tx.execute(text(query)).all()]

    return await store.database.read(look)


async def test_an_overview_says_when_the_first_and_the_last_thing_happened(
    new_sqlite_url: str, tmp_path: Path
) -> None:
    sample = await record_sample_run(new_sqlite_url, tmp_path / "run")
    async with open_store(new_sqlite_url, read_only=True) as store:
        (counted,) = (await overview(store, sample.name)).experiments
        times = [e.recorded_at async for e in (await store.experiment(sample.name)).events()]
    assert (counted.first_at, counted.last_at) == (times[0], times[-1])


async def test_the_views_say_what_the_questions_say(store_url: str, tmp_path: Path) -> None:
    sample = await record_sample_run(store_url, tmp_path / "run")
    async with open_store(store_url, read_only=True) as store:
        experiment = await store.experiment(sample.name)
        source = now(experiment)
        (counted,) = (await overview(store, sample.name)).experiments
        rows = await asked(store, f"SELECT {UID}, reward, experiment, refused FROM rollouts")
        stored = [one async for one in experiment.read(families=("light",))]
        assert len(rows) == counted.experiences
        assert {name for *_, name, _ in rows} == {sample.name}
        taken = {EID(*row[:5]).uid: row[5] for row in rows if row[7] is None}
        assert taken == {one.eid.uid: one.reward for one in stored}

        found = await asked(
            store, "SELECT annotation_set, count(*) FROM annotated_rollouts GROUP BY annotation_set"
        )
        assert dict(found) == {one.consumer: one.rows for one in counted.strategies if one.rows}

        found = await asked(
            store, "SELECT rejected_by, reason, count(*) FROM rejected_rollouts GROUP BY 1, 2"
        )
        expected = await rejection_counts(source)
        assert {(by, why): count for by, why, count in found} == {
            (by, why): count
            for by, reasons in expected.items()
            for why, count in reasons.items()
            if by != "door"
        }

        lines = await steps(source)
        shown = await asked(
            store,
            'SELECT trainer, step, "rows", "groups", handed_out_position, committed_position, '
            "committed_at IS NULL FROM gradient_steps ORDER BY step",
        )
        assert [tuple(row[:6]) for row in shown] == [
            (one.trainer, one.step, one.rows, one.groups, one.leased_at, one.committed_at)
            for one in lines
        ]
        assert [bool(row[6]) for row in shown] == [one.state == "leased" for one in lines]
        for line in lines:
            eaten = await asked(
                store,
                f"SELECT {UID}, committed, annotation_set FROM trained_rollouts "
                f"WHERE gradient_step = {line.step}",
            )
            given = (await blame(source, line.step)).rows
            assert sorted(EID(*row[:5]).uid for row in eaten) == sorted(one.uid for one in given)
            assert {bool(row[5]) for row in eaten} == {line.state == "committed"}


@pytest.mark.parametrize("view", ["rollouts", "gradient_steps"])
async def test_a_view_can_only_be_read(new_sqlite_url: str, view: str) -> None:
    async with open_store(new_sqlite_url) as store:
        with pytest.raises(Exception, match="cannot modify"):
            await store.database.write(lambda tx: tx.execute(text(f"DELETE FROM {view}")))


async def test_a_view_that_was_replaced_is_named(store_url: str, tmp_path: Path) -> None:
    sample = await record_sample_run(store_url, tmp_path / "run")

    def gone(tx: Transaction) -> list[str]:
        before = unsound(tx)
        tx.execute(text("DROP VIEW rollouts"))
        return before + unsound(tx)

    async with open_store(store_url) as store:
        (told,) = await store.database.write(gone)
        assert told.startswith("view rollouts is missing")
        await store.database.write(
            lambda tx: tx.execute(text(f"CREATE VIEW rollouts AS {VIEWS['rollouts']}"))
        )
        assert (await verify(await store.experiment(sample.name))).ok


CHANGES = {
    "trigger evil on event": "CREATE FUNCTION evil() RETURNS trigger LANGUAGE plpgsql AS "
    "$$ BEGIN RETURN NULL; END $$; "
    "CREATE TRIGGER evil BEFORE INSERT ON event FOR EACH ROW EXECUTE FUNCTION evil()",
    "rule evil on segment": "CREATE RULE evil AS ON INSERT TO segment DO INSTEAD NOTHING",
    "row security on experience": "ALTER TABLE experience ENABLE ROW LEVEL SECURITY",
    "trigger event_forbids_update is missing": "ALTER TABLE event ENABLE REPLICA TRIGGER "
    "event_forbids_update",
    "trigger event_forbids_delete is missing": "CREATE OR REPLACE FUNCTION event_forbids_delete() "
    "RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
    "/* event: DELETE is forbidden, the log is append-only */ RETURN NULL; END $$",
    "trigger event_forbids_truncate is missing": "DROP TRIGGER event_forbids_truncate ON event; "
    "CREATE TRIGGER event_forbids_truncate BEFORE UPDATE ON event "
    "EXECUTE FUNCTION event_forbids_truncate()",
    "index uq_experience_eid": "DROP INDEX uq_experience_eid; CREATE UNIQUE INDEX "
    "uq_experience_eid ON experience (experiment, batch, task, run, step, suffix) "
    "WHERE address < 0",
    "view rejected_rollouts": "ALTER VIEW rejected_rollouts RENAME TO shown; CREATE VIEW "
    "rejected_rollouts AS SELECT * FROM shown WHERE reward > 0",
}
"""What verify says -> what somebody with psql did before."""


async def test_what_is_done_to_the_schema_of_a_server_is_named(
    postgres_server: PostgresServer, postgres_store_url: str
) -> None:
    async with open_store(postgres_store_url) as store:
        assert await store.database.read(unsound) == []
        for statements in CHANGES.values():
            postgres_server.execute(statements, database=STORE)
        told = await store.database.read(unsound)
    assert [sum(one.startswith(name) for one in told) for name in CHANGES] == [1] * len(CHANGES)
    assert len(told) == len(CHANGES)


@pytest.mark.parametrize("view", ["trained_rollouts", "rejected_rollouts"])
async def test_a_view_finds_annotations_by_their_key(view: str, new_sqlite_url: str) -> None:
    """Left alone, SQLite walked all of them for each row: six minutes for a demo's store."""
    async with open_store(new_sqlite_url) as store:
        await store.experiment("run", config={})
        for query in (f"SELECT batch, count(*) FROM {view} GROUP BY 1", f"SELECT * FROM {view}"):
            plan = [step for *_, step in await asked(store, f"EXPLAIN QUERY PLAN {query}")]
            (looked,) = [step for step in plan if step.startswith("SEARCH a ")]
            assert "(experiment=? AND consumer=? AND address=?)" in looked
