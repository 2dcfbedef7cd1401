"""The projections as they were when a position was the log's last: views of what they are now.

A row knows the event that made it, so a view leaves out those of later events. A few tables have
rows that later events change or take away: where there are such events, they are folded again.

All is temporary, on a connection of `Database.apart`, and hides what has the same name. Each
function needs a transaction there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import Table, func, select, update
from sqlalchemy.schema import CreateTable

from trinity_buffer.events import PlacedFact
from trinity_buffer.store import fold, log
from trinity_buffer.store.counters import (
    ANNOTATED,
    HIGHEST_VERSION,
    LOWEST_VERSION,
    PLANNED_GROUPS,
    PLANNED_ROLLOUTS,
    RECORDED,
    ROWS,
    STORED_ROLLOUTS,
    planned_by,
    rejected_for,
)
from trinity_buffer.store.rows import SLOT_BITS, first_address
from trinity_buffer.store.tables import (
    FREQUENT,
    NOT_FREQUENT,
    archived,
    assigned_reward,
    configuration,
    consumer,
    delivery,
    step,
)
from trinity_buffer.store.transaction import Transaction


@dataclass(frozen=True, slots=True)
class Refolded:
    """Tables that no view can show as they were once there is a later event of some kinds.

    Attributes:
        undone_by: kinds of events that change rows of earlier ones, or take them away.
        made_by: the kinds that are folded in that case.
    """

    tables: tuple[Table, ...]
    undone_by: tuple[str, ...]
    made_by: tuple[str, ...]


ALWAYS = Refolded(
    (configuration, consumer),
    (),
    ("ExperimentCreated", "ConfigurationChanged", "ExperimentFinished", "ConsumerRegistered"),
)
STEPS = Refolded(
    (step, delivery),
    ("StepDealt", "TrainerRewound"),
    ("BatchLeased", "StepDealt", "StepsCommitted", "TrainerRewound"),
)
SOMETIMES = (
    STEPS,
    Refolded((assigned_reward,), ("RewardsAssigned",), ("RewardsAssigned",)),
    Refolded((archived,), ("SegmentsRestored",), ("SegmentsArchived", "SegmentsRestored")),
)


class Seen(NamedTuple):
    """How far a consumer was; its row knows how far it is. See `tables.consumer`."""

    cursor: int = 0
    calls: int = 0
    rejected_groups: int = 0
    token: int = 0


def to_refold(tx: Transaction, experiment: int, position: int) -> tuple[Refolded, ...]:
    """Return what must be folded again to be as it was at ``position``."""

    def undone(one: Refolded) -> bool:
        return bool(log.read_after(tx, experiment, position, limit=1, kinds=one.undone_by))

    return (ALWAYS, *(one for one in SOMETIMES if undone(one)))


def prepare(tx: Transaction, experiment: int, position: int, refolded: Sequence[Refolded]) -> None:
    """Make the views, and empty tables for what is folded again."""
    if tx.dialect.name == "sqlite":
        tx.rows("PRAGMA query_only=OFF", ())  # the file itself is open read-only, or is ours
        live = "main"
    else:
        ((live,),) = tx.rows(_SCHEMA, ())
        # Whatever the path was: what is temporary must come first, or writing to it would change
        # what there is now.
        tx.rows("SELECT set_config('search_path', $1, false)", (f"pg_temp, {live}",))
    tables = [table for one in refolded for table in one.tables]
    for table in tables:
        made = str(CreateTable(table).compile(dialect=tx.dialect))
        tx.rows(made.replace("CREATE TABLE", "CREATE TEMPORARY TABLE", 1), ())
    for name, query in _views(live, experiment, position).items():
        if name not in {table.name for table in tables}:
            tx.rows(f"CREATE TEMPORARY VIEW {name} AS {query}", ())


_SCHEMA = (
    "SELECT quote_ident(nspname) FROM pg_namespace JOIN pg_class ON relnamespace = pg_namespace.oid"
    " WHERE pg_class.oid = 'experience'::regclass"
)


def fold_again(tx: Transaction, experiment: int, facts: Sequence[PlacedFact]) -> None:
    """Apply events of the kinds that are folded again."""
    for placed in facts:
        fold.fold_rows(tx, experiment, placed)


def place_trainers(tx: Transaction, experiment: int) -> dict[str, int]:
    """Let each trainer be as far as its steps; return trainer -> where the last one is said."""
    mine = (step.c.experiment == experiment, step.c.consumer == consumer.c.name)
    last = {
        "leased_step": select(func.max(step.c.step)).where(*mine),
        "committed_step": select(func.max(step.c.step)).where(
            *mine, step.c.committed_at.is_not(None)
        ),
    }
    tx.execute(
        update(consumer)
        .where(consumer.c.experiment == experiment, consumer.c.kind == "trainer")
        .values({name: func.coalesce(one.scalar_subquery(), 0) for name, one in last.items()})
    )
    said = select(step.c.consumer, func.max(step.c.leased_at)).group_by(step.c.consumer)
    rows = tx.execute(said.where(step.c.experiment == experiment)).all()
    return {name: int(at) for name, at in rows}


def note(tx: Transaction, experiment: int, known: Mapping[str, Seen]) -> None:
    """Let consumers be as far as is known; where nothing is, they are at the beginning."""
    for name, seen in known.items():
        values = {
            "cursor": seen.cursor,
            "calls": seen.calls,
            "rejected_groups": seen.rejected_groups,
            **({"token": seen.token} if seen.token else {}),
        }
        of = (consumer.c.experiment == experiment, consumer.c.name == name)
        tx.execute(update(consumer).where(*of).values(values))


def _views(live: str, experiment: int, position: int) -> dict[str, str]:
    """Return name -> query; ``live`` is the schema of what there is now."""
    mine, end = f"experiment = {experiment}", first_address(position + 1)
    found = {
        name: f"SELECT * FROM {live}.{name} WHERE {mine} AND {column} < {above}"  # noqa: S608 - numbers
        for name, column, above in (
            ("experience", "address", end),
            ("annotation", "address", end),
            ("rejection", "position", position + 1),
            ("policy", "position", position + 1),
            ("archived", "position", position + 1),
        )
    }
    fill = {
        "live": live,
        "mine": mine,
        "end": end,
        "position": position,
        "experiment": experiment,
        "bits": SLOT_BITS,
    }
    found |= {name: query.format(**fill) for name, query in _QUERIES.items()}
    return found | {"counter": " UNION ALL ".join(one.format(**fill) for one in _COUNTERS)}


_QUERIES = {
    "assigned_reward": "SELECT * FROM {live}.assigned_reward WHERE {mine}",
    "batch": (
        "SELECT experiment, batch, batch_is_int, actor, rollouts_per_group, planned_at,"
        " CASE WHEN sealed_at <= {position} THEN sealed_at END AS sealed_at,"
        " CASE WHEN sealed_at <= {position} THEN expected END AS expected, planned_groups,"
        " CASE WHEN sealed_at <= {position} THEN (SELECT CAST(coalesce(sum((SELECT"
        " count(DISTINCT e.run) FROM {live}.experience e WHERE e.experiment = p.experiment"
        " AND e.batch = p.batch AND e.task = p.task AND e.run < b.rollouts_per_group"
        " AND e.address < {end})), 0) AS BIGINT) FROM {live}.plan p"
        " WHERE p.experiment = b.experiment AND p.batch = b.batch) END AS stored_rollouts"
        " FROM {live}.batch b WHERE {mine} AND coalesce(planned_at, sealed_at) <= {position}"
    ),
    "plan": (
        "SELECT p.* FROM {live}.plan p JOIN {live}.batch b ON b.experiment = p.experiment"
        " AND b.batch = p.batch WHERE p.{mine} AND b.planned_at <= {position}"
    ),
    "step": (
        "SELECT experiment, consumer, step, leased_at, rows, groups, planned_groups_so_far,"
        " manifest_digest,"
        " CASE WHEN committed_at <= {position} THEN committed_at END AS committed_at,"
        " CASE WHEN committed_at <= {position} THEN checkpoint END AS checkpoint,"
        " CASE WHEN committed_at <= {position} THEN checkpoint_digest END AS checkpoint_digest,"
        " CASE WHEN committed_at <= {position} THEN chain END AS chain,"
        " CASE WHEN committed_at <= {position} THEN rows_by_rank END AS rows_by_rank,"
        " own_rows_so_far"
        " FROM {live}.step WHERE {mine} AND leased_at <= {position}"
    ),
    "delivery": (
        "SELECT * FROM {live}.delivery d WHERE {mine} AND d.step <="
        " (SELECT c.leased_step FROM consumer c WHERE c.name = d.consumer)"
    ),
    # Of what a strategy had seen: what waits still, and what was decided later. No row is there
    # twice, and no UNION has to look: a question for one row asks the indexes.
    "waiting": (
        "SELECT w.* FROM {live}.waiting w WHERE w.{mine} AND w.address <"
        " (SELECT c.cursor + 1 << {bits} FROM consumer c WHERE c.name = w.consumer)"
        " UNION ALL SELECT a.experiment, a.consumer, a.experience FROM {live}.annotation a"
        " WHERE a.{mine} AND a.address >= {end} AND a.experience <"
        " (SELECT c.cursor + 1 << {bits} FROM consumer c WHERE c.name = a.consumer)"
        " AND NOT EXISTS (SELECT 1 FROM {live}.annotation copied"
        " WHERE copied.experiment = a.experiment AND copied.experience = a.experience"
        " AND copied.consumer = a.consumer AND copied.address < a.address)"
        " UNION ALL SELECT r.experiment, r.consumer, r.address FROM {live}.rejection r"
        " WHERE r.{mine} AND r.position > {position} AND r.address < (SELECT c.cursor + 1"
        " << {bits} FROM consumer c WHERE c.name = r.consumer AND c.kind = 'strategy')"
    ),
}


def _counted(consumer_of: str, state: str, number: str, rows: str) -> str:
    return (
        f"SELECT {{experiment}} AS experiment, {consumer_of} AS consumer, {state} AS key,"  # noqa: S608 - ours
        f" {state} AS state, {number} AS number FROM {{live}}.{rows}"
    )


_FREQUENT = ", ".join(f"'{kind}'" for kind in sorted(FREQUENT))
_EVENTS = "event WHERE {mine} AND position <= {position}"
_PLANNED = "batch WHERE {mine} AND planned_at <= {position}"
_RECORDED = "experience WHERE {mine} AND address < {end}"
_ANNOTATED = "annotation WHERE {mine} AND address < {end} GROUP BY consumer"
_SOME = "count(*) > 0"
_FOR = f"'{rejected_for('')}' || "
_COUNTERS = (
    _counted("''", "kind", "count(*)", f"{_EVENTS} AND kind IN ({_FREQUENT}) GROUP BY kind"),
    _counted("''", "kind", "count(*)", f"{_EVENTS} AND {NOT_FREQUENT} GROUP BY kind"),
    _counted("''", f"'{planned_by('')}' || actor", "count(*)", f"{_PLANNED} GROUP BY actor"),
    *(
        _counted("''", f"'{state}'", f"CAST(sum({number}) AS BIGINT)", f"{_PLANNED} HAVING {_SOME}")
        for state, number in (
            (PLANNED_GROUPS, "planned_groups"),
            (PLANNED_ROLLOUTS, "planned_groups * rollouts_per_group"),
        )
    ),
    _counted(
        "''",
        f"'{STORED_ROLLOUTS}'",
        "CAST(sum(stored_rollouts) AS BIGINT)",
        f"batch WHERE sealed_at IS NOT NULL HAVING {_SOME}",
    ).replace("{live}.", ""),  # as it was: a view
    _counted("''", f"'{RECORDED}'", "count(*)", f"{_RECORDED} HAVING {_SOME}"),
    _counted(
        "''",
        f"{_FOR} refused",
        "count(*)",
        f"{_RECORDED} AND refused IS NOT NULL GROUP BY refused",
    ),
    *(
        _counted(
            "''",
            f"'{state}'",
            f"{of}(policy_version)",
            f"{_RECORDED} HAVING {of}(policy_version) IS NOT NULL",
        )
        for state, of in ((LOWEST_VERSION, "min"), (HIGHEST_VERSION, "max"))
    ),
    _counted("consumer", f"'{ANNOTATED}'", "count(DISTINCT experience)", _ANNOTATED),
    _counted("consumer", f"'{ROWS}'", "count(*)", _ANNOTATED),
    _counted(
        "consumer",
        f"{_FOR} reason",
        "count(*)",
        "rejection WHERE {mine} AND position <= {position} GROUP BY consumer, reason",
    ),
)
