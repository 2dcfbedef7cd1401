"""Faults that would break a guarantee, each put in place of a part of the package for one test."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest
from msgspec import structs
from sqlalchemy import delete, select, update

from tests.handles import Experiment, TrainStep, TrainStream
from tests.pipeline.planting import delete_event
from tests.planted_faults import checks
from tests.raw_store import new_event, now_us
from trinity_buffer import StrategyConsumer, open_store, verify
from trinity_buffer.errors import LeaseLostError
from trinity_buffer.events import BatchLeased, ExperiencesRejected, PlacedFact, Recorded, kind_of
from trinity_buffer.pipeline import manifest
from trinity_buffer.pipeline.annotate import deciding
from trinity_buffer.pipeline.annotate.grouping import UnitReader
from trinity_buffer.pipeline.load.columns import RowLoader
from trinity_buffer.pipeline.manifest import LeasedStep, leased_steps
from trinity_buffer.pipeline.train import checkpoint as checkpoints
from trinity_buffer.pipeline.write import batch, planning
from trinity_buffer.store import (
    fold,
    leases,
    log,
    segments,
    tables,
    trainer_queries,
)
from trinity_buffer.store.rows import StepRow

Patch = pytest.MonkeyPatch


def another_content_is_a_duplicate(patch: Patch) -> None:
    """2: who writes other content under a stored EID hears that it is stored."""

    def trusting(batches: Sequence[Any], known: Any, _conflict: str) -> list[Any]:
        return [e for rows in batches for e in rows.experiences if e.eid.uid not in known]

    patch.setattr(batch, "without_known", trusting)


def the_cursor_moves_before_its_output(patch: Patch) -> None:
    """3: the cursor is moved in a transaction of its own, before the decision is committed."""
    usual = StrategyConsumer.run

    async def hasty(self: StrategyConsumer, **how: Any) -> Any:
        read = UnitReader.read

        def and_move(reader: UnitReader, s: Any) -> bool:
            found = read(reader, s)
            key = self.experiment.key
            mine = (tables.consumer.c.experiment == key, tables.consumer.c.name == self.name)
            seen = update(tables.consumer).where(*mine).values({"cursor": reader.seen})
            s.write(lambda tx: tx.execute(seen))
            return found

        with patch.context() as meanwhile:
            meanwhile.setattr(UnitReader, "read", and_move)
            return await usual(self, **how)

    patch.setattr(StrategyConsumer, "run", hasty)


def a_decision_does_not_ask_who_was_first(patch: Patch) -> None:
    """3: rows that are not waiting any more are decided again."""

    usual = fold.TAKEN

    class Careless:
        """Delete what is waiting still, and answer as if all of it had been."""

        def fetch_all(self, tx: Any, *, addresses: list[int], **mine: Any) -> list[tuple[int]]:
            usual.fetch_all(tx, addresses=addresses, **mine)
            return [(address,) for address in addresses]

    patch.setattr(fold, "TAKEN", Careless())


def whoever_decided_commits(patch: Patch) -> None:
    """3: a process whose lease another took commits what it computed."""
    usual = leases.require

    def trusting(tx: Any, experiment: int, name: str, **held: Any) -> leases.Standing:
        return usual(tx, experiment, name, token=held.get("token") or 1_000)

    patch.setattr(leases, "require", trusting)


def a_step_is_served_twice(patch: Patch) -> None:
    """4: the stream hands out each step two times, and the trainer trains what it is handed."""
    usual, kept = TrainStream.__anext__, list[TrainStep]()

    async def twice(self: TrainStream) -> TrainStep:
        if kept:
            return kept.pop()
        kept.append(await usual(self))
        return kept[0]

    patch.setattr(TrainStream, "__anext__", twice)


def uncommitted_steps_are_forgotten(patch: Patch) -> None:
    """4: after a crash the stream goes on behind what it had handed out."""
    usual = trainer_queries.steps_from_link

    def forgetful(tx: Any, experiment: int, name: str, committed: int) -> list[StepRow]:
        return [one for one in usual(tx, experiment, name, committed) if one.step <= committed]

    patch.setattr(trainer_queries, "steps_from_link", forgetful)


def a_resumed_trainer_gets_no_checkpoint(patch: Patch) -> None:
    """4: the stream goes on after the last commit, the weights begin anew."""
    usual = TrainStream.find_last_commit

    async def forgetful(self: TrainStream, committed: int) -> list[StepRow]:
        leased = await usual(self, committed)
        self.resume = None
        return leased

    patch.setattr(TrainStream, "find_last_commit", forgetful)


def the_commit_comes_before_fsync(patch: Patch) -> None:
    """4: a checkpoint is named in the log while it may be in the page cache alone."""
    patch.setattr(checkpoints, "make_durable", checkpoints.digest_of)


def a_commit_is_sent_again_blindly(patch: Patch) -> None:
    """4: a lost answer is taken for a lost commit, and the commit is sent once more."""
    usual = log.append

    def insistent(tx: Any, experiment: int, events: Sequence[Any], **others: Any) -> Any:
        done = usual(tx, experiment, events, **others)
        if kind_of(events[0][1].fact) == "StepsCommitted":
            return usual(tx, experiment, events, **{**others, "last": None})
        return done

    patch.setattr(log, "append", insistent)


def an_event_is_deleted(patch: Patch) -> None:
    """5: somebody takes an event out of the log, past the triggers."""
    usual = verify

    async def after_deletion(experiment: Experiment, **others: Any) -> Any:
        kind = tables.event.c.kind == "ExperiencesAnnotated"
        chosen = select(tables.event.c.position).where(kind).limit(1)
        position = await experiment.database.read(lambda tx: tx.execute(chosen).scalar_one())
        url = experiment.database.url.set(drivername=experiment.database.dialect)
        address = url.render_as_string(hide_password=False)
        await delete_event(address, position)
        # A process that has seen the event is told so before it verifies anything.
        async with open_store(address) as store:
            return await usual(await store.experiment(experiment.name), **others)

    patch.setattr(checks, "verify", after_deletion)


def a_rejection_is_forgotten(patch: Patch) -> None:
    """5: the fold leaves out one row of a rejection, now and in every rebuild."""
    usual = fold.fold_rows

    def forgetful(tx: Any, experiment: int, placed: PlacedFact) -> int:
        stored = usual(tx, experiment, placed)
        if isinstance(placed.fact, ExperiencesRejected):
            last = tables.rejection.c.address == placed.fact.experiences[-1]
            tx.execute(delete(tables.rejection).where(last))
        return stored

    patch.setattr(fold, "fold_rows", forgetful)


def a_replay_has_another_order(patch: Patch) -> None:
    """6: the rows of a manifest come back in another order than that they were trained in."""
    usual = leased_steps

    def swapped(rows: Sequence[int]) -> list[int]:
        # Neighbours are of one length, so that no shape tells.
        return [rows[i ^ 1] for i in range(len(rows))]

    def in_another_order(*args: Any) -> dict[int, LeasedStep]:
        found = usual(*args)
        for at, step in found.items():
            was = step.manifest
            rows = swapped(was.annotations), swapped(was.experiences)
            other = structs.replace(was, annotations=rows[0], experiences=rows[1])
            found[at] = step._replace(manifest=other)
        return found

    patch.setattr(manifest, "leased_steps", in_another_order)


def positions_come_from_a_sequence(patch: Patch) -> None:
    """7: a position is a sequence's next number, given out without a lock until the commit."""
    sequence = count(1)

    def sequenced(
        tx: Any,
        experiment: int,
        said: Sequence[tuple[str, Any]],
        *,
        last: object = None,
    ) -> list[log.Place]:
        placed = [(next(sequence), actor, new) for actor, new in said]
        rows = [
            (experiment, at, kind_of(new.fact), who, now_us(), new.encoded, bytes(32))
            for at, who, new in placed
        ]
        tx.insert_many(tables.event, rows)
        facts = [PlacedFact(at, who, new.fact) for at, who, new in placed]
        fold.fold_all(tx, experiment, facts)
        tx.announce()
        return [log.Place(at, bytes(32)) for at, _, _ in placed]

    patch.setattr(log, "append", sequenced)


def a_lease_does_not_fence(patch: Patch) -> None:
    """8: whoever has trained may commit, whoever took over meanwhile."""
    usual = leases.require

    def trusting(tx: Any, experiment: int, name: str, **held: Any) -> leases.Standing:
        if held.get("token") is not None:
            held["token"] += 1_000
        return usual(tx, experiment, name, **held)

    patch.setattr(leases, "require", trusting)


def a_lease_is_a_timeout(patch: Patch) -> None:
    """8: what expired is lost, though nobody took it."""
    usual = leases.require

    def impatient(tx: Any, experiment: int, name: str, **held: Any) -> leases.Standing:
        committed = usual(tx, experiment, name, **held)
        row = leases.holder(tx, experiment, name)
        if row is None or row[2] < now_us():
            raise LeaseLostError("expired")
        return committed

    patch.setattr(leases, "require", impatient)


def the_token_is_checked_without_a_lock(patch: Patch) -> None:
    """8: between the check of the token and the commit another trainer may take the lease."""

    usual = leases.require

    def unlocked(tx: Any, experiment: int, name: str, **held: Any) -> leases.Standing:
        tx.lock = lambda _: None
        try:
            return usual(tx, experiment, name, **held)
        finally:
            del tx.lock

    patch.setattr(leases, "require", unlocked)


def the_door_is_open(patch: Patch) -> None:
    """9: experiences are not validated."""
    patch.setattr(batch, "validate", lambda experience, schema: None)


def nobody_looks_at_checksums(patch: Patch) -> None:
    """9: a blob is taken as it is."""

    def blob_of(key: bytes, family: str, parts: Sequence[tuple[int, int, bytes]]) -> bytes:
        return b"".join(data for _, _, data in parts)

    patch.setattr(segments, "blob_of", blob_of)


def damage_ends_the_stream(patch: Patch) -> None:
    """9: a blob that cannot be read is an error for ever, not a rejection."""

    def none(self: RowLoader, s: Any, lease: BatchLeased) -> dict[int, str]:
        return {}

    patch.setattr(RowLoader, "unreadable", none)


def everybody_may_plan(patch: Patch) -> None:
    """10: explorers generate ahead without bound."""
    patch.setattr(planning.Admission, "admits", lambda self, backlog, version: True)


def rejected_groups_hold_a_place(patch: Patch) -> None:
    """10: a group that a filter rejected is waited for, for ever."""

    def counted(fact: Recorded) -> Any:
        if isinstance(fact, ExperiencesRejected):
            fact = structs.replace(fact, planned_groups=0)
        return new_event(fact)

    patch.setattr(deciding, "new_event", counted)
