"""What is asked again and again must not cost more the longer a run is."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from pysqlite3 import dbapi2
from sqlalchemy import text

from tests.handles import Transaction
from tests.store.noting import noted
from trinity_buffer import open_store
from trinity_buffer.events import BatchLeased, PlacedFact, StepsCommitted
from trinity_buffer.identity import EID
from trinity_buffer.store import counts, inspection, log, refold, trainer_queries, writer_queries
from trinity_buffer.store.fold import fold_all
from trinity_buffer.store.rows import ConsumerRow

LEASED = BatchLeased(
    consumer="t",
    step=1,
    token=1,
    annotations=[1 << 20],
    groups=[0],
    num_groups=1,
    planned_groups=1,
    microbatches=[[0, 1, 8, 0]],
    layout="padded",
    annotation_set="s",
    experiences=[1 << 20],
    normalizer=None,
    digest=bytes(16),
)
COMMITTED = StepsCommitted(
    consumer="t",
    token=1,
    steps=[1],
    manifests=[bytes(16)],
    rows_by_rank=[[1]],
    chain=bytes(16),
    checkpoint="step-1",
    checkpoint_digest="00",
    metrics={},
    environment={},
)

TRAINER = ConsumerRow("t", "trainer", {"strategy": "s"}, 0, 0, 0, 1, 4, 3)

ASKED_FOR_EACH_BATCH: dict[str, Callable[[Transaction], Any]] = {
    "batch_row": lambda tx: writer_queries.batch_row(tx, 1, "b"),
    "count_in_batch": lambda tx: writer_queries.count_in_batch(tx, 1, "b"),
    "runs_of": lambda tx: writer_queries.runs_of(tx, 1, ["b"]),
    "stored": lambda tx: writer_queries.stored(tx, 1, [EID("b", "t", 0)]),
    "settled": lambda tx: writer_queries.settled(tx, 1, "s", [("b", "t")], cursor=9, seen=9),
    "members": lambda tx: inspection.members(tx, 1, [("b", "t"), ("c", "t")]),
    "annotation_rows": lambda tx: inspection.annotation_rows(tx, 1, [1 << 20, 2 << 20]),
    "deliveries": lambda tx: inspection.deliveries(tx, 1, ["t"], [1 << 20, 2 << 20], ""),
    "rejections": lambda tx: inspection.rejections(tx, 1, ["s"], [1 << 20, 2 << 20]),
    "find": lambda tx: inspection.find(tx, 1, EID("b", "t", 0)),
    "rejected": lambda tx: inspection.rejected(tx, 1, "s", reason=None, limit=9),
    "actors": lambda tx: inspection.actors(tx, 1, [4, 5]),
    "annotated_experiences": lambda tx: inspection.annotated_experiences(
        tx, 1, ["s"], [1 << 20, 2 << 20]
    ),
    "steps": lambda tx: trainer_queries.steps(tx, 1, "t", after=4, limit=2),
    "rare kinds": lambda tx: log.read_after(
        tx, 1, 4, limit=9, kinds=("PolicyPublished", "StepsCommitted"), up_to=8
    ),
    "rows of a batch": lambda tx: writer_queries.experiences(
        tx,
        1,
        writer_queries.Filter(
            batch="b", addresses=writer_queries.addresses_in_batch(tx, 1, "b", "t", limit=9)
        ),
        after=-1,
        limit=9,
    ),
    "read_at": lambda tx: log.read_at(tx, 1, [4, 5]),
    "steps_from_link": lambda tx: trainer_queries.steps_from_link(tx, 1, "t", 2),
    "a lease": lambda tx: fold_all(tx, 1, [PlacedFact(9, "t", LEASED)]),
    "a commit": lambda tx: fold_all(tx, 1, [PlacedFact(10, "t", COMMITTED)]),
    "a span of deliveries": lambda tx: refold.rows_of(
        tx, 1, refold.Span("delivery", ("t", ""), 1 << 20, 2 << 20)
    ),
    "a span of rejections": lambda tx: refold.rows_of(
        tx, 1, refold.Span("rejection", ("s",), 1 << 20, 2 << 20)
    ),
    "an actor's batches": lambda tx: writer_queries.batches_of_actor(tx, 1, "e0"),
    "open batches": lambda tx: counts.open_batches(tx, 1),
    "counted rollouts": lambda tx: counts.of_plans(tx, 1, {}),
    "a trainer's numbers": lambda tx: counts.of_trainer(tx, 1, TRAINER, {}),
    "older groups": lambda tx: inspection.newest_groups(tx, 1, 9, before=9),
}

WALKS = ("(experiment=?)", "(experiment=? AND address<?)")
WALKS_OF = {
    "a span of deliveries": ("(experiment=? AND consumer=?)",),
    "a commit": ("(experiment=? AND consumer=?)", "(experiment=? AND consumer=? AND step<?)"),
    "older groups": ("(experiment=? AND address>?)",),
    "rare kinds": ("event USING PRIMARY KEY (experiment=? AND position>? AND position<?)",),
}
"""Further ones, of a question that must not walk like this."""
PAGES = {"older groups": "SEARCH e USING PRIMARY KEY (experiment=? AND address<?)"}
"""The walk through a page, of a question that ends with it."""


TOO_FEW_ROWS = {"stored", "members"}
"""Of these PostgreSQL takes any index of a table that is empty."""


@pytest.mark.parametrize("name", sorted(ASKED_FOR_EACH_BATCH.keys() - TOO_FEW_ROWS))
async def test_a_server_too_finds_it_by_key(postgres_url: str, name: str) -> None:
    plans: list[str] = []

    def ask(tx: Transaction) -> None:
        tx.execute(text("SET LOCAL enable_seqscan = off"))  # empty tables are read whole otherwise
        with noted(tx) as asked:
            ASKED_FOR_EACH_BATCH[name](tx)
        for statement, given in asked:
            plan = tx.fetch_all(f"EXPLAIN {statement}", given)
            plans.append("\n".join(line for (line,) in plan))

    async with open_store(postgres_url) as store:
        await store.experiment("long", config={})
        await store.database.write(ask)
    assert plans
    for plan in plans:
        assert "Seq Scan" not in plan, plan
        assert not re.search(r"Index Cond: \(experiment = [^)]*\)$", plan, re.MULTILINE), plan


@pytest.mark.parametrize("name", ASKED_FOR_EACH_BATCH)
async def test_a_batch_is_found_without_a_walk_through_the_experiment(
    new_sqlite_url: str, name: str
) -> None:
    asked: list[str] = []

    def ask(tx: Transaction) -> None:
        driver: Any = tx.connection.connection.driver_connection
        driver.set_trace_callback(asked.append)  # statements with their values
        ASKED_FOR_EACH_BATCH[name](tx)
        driver.set_trace_callback(None)

    async with open_store(new_sqlite_url) as store:
        await store.experiment("long", config={})
        await store.database.write(ask)
    assert asked
    with closing(dbapi2.connect(new_sqlite_url.removeprefix("sqlite:///"))) as connection:
        for statement in asked:
            steps = connection.execute(f"EXPLAIN QUERY PLAN {statement}").fetchall()
            walks = (*WALKS, *WALKS_OF.get(name, ()))
            others = [step for *_, step in steps if step != PAGES.get(name)]
            assert not [step for step in others if step.endswith(walks)], statement
