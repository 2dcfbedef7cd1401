"""On tables that PostgreSQL has no statistics of, no question compares every row with every other.

A server that has just been filled has none, and with ``autovacuum = off`` it never gets any. Worst
off is a statement that was prepared while the store was empty: its plan stays.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, get_args

import pytest

from tests.handles import Experiment, Transaction
from tests.postgres import PostgresServer
from tests.sample_run import rollout
from tests.store.noting import noted
from trinity_buffer import open_store, run_strategy
from trinity_buffer.events import TrainerRewound
from trinity_buffer.identity import EID
from trinity_buffer.store import counts, fold, inspection, log, segments, writer_queries
from trinity_buffer.store.rows import ConsumerRow
from trinity_buffer.store.trainer_queries import Reader

TASKS, RUNS = 125, 8
ROWS = TASKS * RUNS
SOME = [str(task) for task in range(TASKS)]
GROUPS = [("b", task) for task in SOME]
END = ROWS << 20
TRAINER = ConsumerRow("t", "trainer", {"strategy": "grpo"}, 0, 0, 0, 1, 1, 1)
NEED = segments.Need(Reader(1, "t", "", "t"), "grpo", 1)
HELD = segments.Held(1, b"key", 1, END)


def _in_state(tx: Transaction, state: writer_queries.State) -> object:
    wanted = writer_queries.Filter(annotation_set="grpo", state=state)
    return writer_queries.experiences(tx, 1, wanted, after=-1, limit=ROWS)


QUESTIONS: dict[str, Callable[[Transaction], Any]] = {
    "how many a batch holds": lambda tx: writer_queries.count_in_batch(tx, 1, "b"),
    "which are stored": lambda tx: writer_queries.stored(
        tx, 1, [EID("b", task, 0) for task in SOME]
    ),
    "which groups are settled": lambda tx: writer_queries.settled(
        tx, 1, "grpo", GROUPS, cursor=ROWS, seen=ROWS
    ),
    "which runs a batch has": lambda tx: writer_queries.runs_of(tx, 1, ["b"]),
    "what groups hold": lambda tx: inspection.members(tx, 1, GROUPS),
    "which groups are the newest": lambda tx: inspection.newest_groups(tx, 1, TASKS, END),
    "a page of a batch": lambda tx: writer_queries.experiences(
        tx,
        1,
        writer_queries.Filter(batch="b", addresses=tuple(range(1 << 20, (1 << 20) + ROWS))),
        after=-1,
        limit=ROWS,
    ),
    **{
        f"what is {state}": partial(_in_state, state=state)
        for state in get_args(writer_queries.State)
    },
    "events of rare kinds": lambda tx: log.read_after(
        tx, 1, 0, limit=9, kinds=(TrainerRewound.__name__, "BatchSealed"), up_to=END
    ),
    "which rollouts lack a reward": lambda tx: counts.unrewarded(tx, 1, 2),
    "which groups are open": lambda tx: counts.open_groups(tx, 1, TRAINER),
    "what a trainer's numbers are": lambda tx: counts.of_trainer(tx, 1, TRAINER, {}),
    "which segments may leave": lambda tx: segments.finished(tx, 1, [HELD], [NEED]),
    "who needs the experiences": lambda tx: segments.needs_of(tx, 1, keep_steps=0),
    "which rollouts came late": lambda tx: fold.count_late(
        tx, 1, [("b", task, run) for task in SOME for run in range(RUNS)], END
    ),
}


@pytest.fixture
def unanalyzed(postgres_server: PostgresServer) -> Iterator[str]:
    """URL of a database without statistics, asked as older servers and old connections are."""
    url = postgres_server.create_database("unanalyzed")
    for setting in ("enable_self_join_elimination = off", "plan_cache_mode = force_generic_plan"):
        postgres_server.execute(f"ALTER DATABASE unanalyzed SET {setting}")
    yield url
    postgres_server.drop_database("unanalyzed")


async def test_without_statistics_no_question_compares_every_row_with_every_other(
    unanalyzed: str,
) -> None:
    """Told by how many rows the nodes of a plan go through that was made while there were none."""
    async with open_store(unanalyzed) as store:
        experiment = await store.experiment("run", config={"rollouts_per_group": RUNS})
        async with store.database.dedicated_connection() as apart:
            asked = await apart.read(_prepared)
            await _fill(experiment)
            worked = await apart.read(_worked, asked)
    assert {name: rows for name, rows in worked.items() if rows > 20 * ROWS} == {}
    assert worked["how many a batch holds"] >= ROWS  # it was there to be looked at


def _prepared(tx: Transaction) -> dict[str, list[str]]:
    """Prepare and plan what every question asks; return how each is executed."""
    found: dict[str, list[str]] = {}
    for name, question in QUESTIONS.items():
        with noted(tx) as asked:
            question(tx)
        found[name] = []
        for statement, given in dict.fromkeys((sql, _literals(some)) for sql, some in asked):
            key = f"asked_{sum(map(len, found.values()))}"
            tx.connection.exec_driver_sql(f"PREPARE {key} AS {statement}")
            found[name].append(f"EXECUTE {key}{given}")
            tx.connection.exec_driver_sql(f"EXPLAIN {found[name][-1]}")
    return found


def _literals(given: Any) -> str:
    return f"({', '.join(map(_literal, given))})" if given else ""


def _literal(value: Any) -> str:
    if isinstance(value, list):
        return f"ARRAY[{', '.join(map(_literal, value))}]::text[]"
    if isinstance(value, bytes):
        return f"'\\x{value.hex()}'"
    return str(value) if isinstance(value, int) else f"'{value}'"


async def _fill(experiment: Experiment) -> None:
    writer = experiment.writer("e0")
    await writer.plan("b", list(range(TASKS)), RUNS)
    runs = itertools.product(range(TASKS), range(RUNS))
    await writer.write([rollout("b", task, run, float(run % 2)) for task, run in runs])
    await run_strategy(experiment, "grpo")
    options = {"strategy": "grpo", "consumer": "t", "follow": False}
    async with experiment.train_stream(**options, groups_per_step=TASKS) as stream:
        async for step in stream:
            await stream.commit(step)


def _worked(tx: Transaction, asked: dict[str, list[str]]) -> dict[str, float]:
    """Return question -> through how many rows the nodes of its plans went."""
    explained = "EXPLAIN (ANALYZE, FORMAT JSON)"
    found = {}
    for name, statements in asked.items():
        plans = [
            tx.connection.exec_driver_sql(f"{explained} {one}").scalar_one() for one in statements
        ]
        found[name] = sum(_rows(plan[0]["Plan"]) for plan in plans)
    return found


def _rows(node: dict[str, Any]) -> float:
    """Return through how many rows a node went, and those below it."""
    each = sum(
        float(number)
        for key, number in node.items()
        if key == "Actual Rows" or key.startswith("Rows Removed by")
    )
    return each * float(node["Actual Loops"]) + sum(map(_rows, node.get("Plans", ())))
