"""What is asked again and again must not cost more the longer a run is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from pysqlite3 import dbapi2

from trinity_buffer.identity import EID
from trinity_buffer.pipeline.store import open_store
from trinity_buffer.store import inspection, queries
from trinity_buffer.store.transaction import Transaction

ASKED_FOR_EACH_BATCH: dict[str, Callable[[Transaction], Any]] = {
    "batch_row": lambda tx: queries.batch_row(tx, 1, "b"),
    "count_in_batch": lambda tx: queries.count_in_batch(tx, 1, "b"),
    "runs_of": lambda tx: queries.runs_of(tx, 1, "b"),
    "sealed_among": lambda tx: queries.sealed_among(tx, 1, ["b"]),
    "stored": lambda tx: queries.stored(tx, 1, [EID("b", "t", 0)]),
    "decided_groups": lambda tx: queries.decided_groups(tx, 1, "s", [("b", "t")], cursor=9),
    "members": lambda tx: inspection.members(tx, 1, [("b", "t"), ("c", "t")]),
    "refused_runs": lambda tx: queries.refused_runs(tx, 1, [("b", "t")], cursor=9),
}

WALKS = ("(experiment=?)", "(experiment=? AND address<?)")


@pytest.mark.parametrize("name", ASKED_FOR_EACH_BATCH)
async def test_a_batch_is_found_without_a_walk_through_the_experiment(
    sqlite_url: str, name: str
) -> None:
    asked: list[str] = []

    def ask(tx: Transaction) -> None:
        driver: Any = tx.connection.connection.driver_connection
        driver.set_trace_callback(asked.append)  # statements with their values
        ASKED_FOR_EACH_BATCH[name](tx)
        driver.set_trace_callback(None)

    async with open_store(sqlite_url) as store:
        await store.experiment("long", config={})
        await store.database.read(ask)
    assert asked
    with closing(dbapi2.connect(sqlite_url.removeprefix("sqlite:///"))) as connection:
        for statement in asked:
            steps = connection.execute(f"EXPLAIN QUERY PLAN {statement}").fetchall()
            walks = [step for *_, step in steps if step.endswith(WALKS)]
            assert not walks, statement
