"""What somebody with an editor may do to a store, every digest redone that the editor can redo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import Table, delete, select, text, update

from tests.handles import Transaction
from tests.pipeline.planting import first_row
from tests.raw_store import PROJECTIONS
from trinity_buffer.codec.objects import decode_body, encode_body
from trinity_buffer.store import log, segments
from trinity_buffer.store.tables import event, experiment, segment

Edit = Callable[[Transaction], object]


def rows_of(tx: Transaction, kind: str) -> list[Any]:
    """Return the events of a kind, in order."""
    return list(tx.execute(select(event).where(event.c.kind == kind).order_by("position")).all())


def put(tx: Transaction, at: int, **values: object) -> None:
    """Write columns of an event."""
    tx.execute(update(event).where(event.c.position == at).values(**values))


def in_body(kind: str, index: int = 0, **changes: Any) -> Edit:
    """Return what changes fields of a body; a callable gets the old value."""

    def edit(tx: Transaction) -> None:
        row = rows_of(tx, kind)[index]
        body = decode_body(kind, row.body)
        for name, value in changes.items():
            body[name] = value(body[name]) if callable(value) else value
        put(tx, row.position, body=encode_body(kind, body))

    return edit


def in_columns(**changes: Any) -> Edit:
    """Return what changes the first item of columns of the first experiences."""

    def change(meta: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return meta | {name: [value, *meta[name][1:]] for name, value in changes.items()}

    return in_body("ExperiencesRecorded", meta=change)


def other_first(value: Any) -> Callable[[list[Any]], list[Any]]:
    """Return what replaces the first item."""
    return lambda items: [value, *items[1:]]


def first_two_exchanged(items: list[Any]) -> list[Any]:
    return [items[1], items[0], *items[2:]]


def deleted(kind: str, index: int = 0, *, renumbered: bool = False) -> Edit:
    def edit(tx: Transaction) -> None:
        position = rows_of(tx, kind)[index].position
        tx.execute(delete(event).where(event.c.position == position))
        if renumbered:
            later = select(event.c.position).where(event.c.position > position).order_by("position")
            for found in tx.execute(later).scalars().all():
                put(tx, found, position=found - 1)

    return edit


def cut_after(kind: str, index: int) -> Edit:
    def edit(tx: Transaction) -> None:
        position = rows_of(tx, kind)[index].position
        tx.execute(delete(event).where(event.c.position > position))

    return edit


def exchanged(kind: str, one: int, other: int) -> Edit:
    def edit(tx: Transaction) -> None:
        rows = rows_of(tx, kind)
        for here, there in ((rows[one], rows[other]), (rows[other], rows[one])):
            put(tx, here.position, body=there.body, actor=there.actor)

    return edit


def repeated(kind: str) -> Edit:
    def edit(tx: Transaction) -> None:
        last, row = log.end(tx, 1), rows_of(tx, kind)[0]
        said = (last.position + 1, kind, row.actor, row.recorded_at, row.body)
        tx.insert_many(event, [(1, *said, log.head_of(last.head, *said))])

    return edit


def _store(tx: Transaction, row: Any, data: bytes) -> None:
    mine = (segment.c.key == row.key, segment.c.family == row.family, segment.c.part == row.part)
    redone = segments.checksum(row.key, row.family, row.part, data)
    tx.execute(update(segment).where(*mine).values(data=data, checksum=redone))


def _segments(tx: Transaction, family: str) -> list[Any]:
    query = select(segment).where(segment.c.family == family).order_by(segment.c.key)
    return list(tx.execute(query).all())


def byte_of_segment(family: str, *, redone: bool = True) -> Edit:
    def edit(tx: Transaction) -> None:
        row = _segments(tx, family)[0]
        data = row.data[:-1] + bytes([row.data[-1] ^ 1])
        if redone:
            _store(tx, row, data)
        else:
            tx.execute(update(segment).where(segment.c.data == row.data).values(data=data))

    return edit


def segments_exchanged(family: str) -> Edit:
    def edit(tx: Transaction) -> None:
        one, other = _segments(tx, family)[:2]
        _store(tx, one, other.data)
        _store(tx, other, one.data)

    return edit


def segment_gone(family: str) -> Edit:
    def edit(tx: Transaction) -> None:
        key = _segments(tx, family)[0].key
        tx.execute(delete(segment).where(segment.c.key == key))

    return edit


def segment_added(tx: Transaction) -> None:
    store = segments.SegmentStore()
    store.attach(tx, store.put(segments.new_key(), {"light": [b"what is this?"]}))


def sql(statement: str) -> Edit:
    return lambda tx: tx.execute(text(statement))


def row_gone(table: Table) -> Edit:
    def edit(tx: Transaction) -> None:
        row = first_row(tx, table)
        tx.execute(delete(table).where(*(key == row[key.name] for key in table.primary_key)))

    return edit


_RECORDED, _ANNOTATED, _LEASED = "ExperiencesRecorded", "ExperiencesAnnotated", "BatchLeased"
_COMMITTED, _REJECTED = "StepsCommitted", "ExperiencesRejected"

EDITS: dict[str, Edit] = {
    "configuration: another value": in_body("ExperimentCreated", config=lambda old: old | {"a": 1}),
    "plan: another task": in_body("BatchPlanned", tasks=other_first(77)),
    "plan: fewer runs": in_body("BatchPlanned", rollouts_per_group=2),
    "experience: another reward": in_columns(reward=9.0),
    "experience: another policy version": in_columns(policy_version=7),
    "experience: another finish reason": in_columns(finish_reason="length"),
    "experience: another prompt length": in_columns(prompt_length=3),
    "experience: another length": in_columns(length=99),
    "experience: another response length": in_columns(response_length=99),
    "experience: more trained tokens": in_columns(trained_tokens=99),
    "experience: another kind": in_columns(kind="sft"),
    "experience: another content digest": in_columns(digest=bytes(16)),
    "experience: another task": in_columns(task=77),
    "experience: another suffix": in_columns(suffix="a7"),
    "experience: refused as late": in_body(_RECORDED, refused={0: "late"}),
    "experience: refused as invalid": in_body(_RECORDED, refused={0: "invalid"}),
    "experience: late, and not refused": in_body(_RECORDED, 4, refused={}),
    "experience: another segment": in_body(_RECORDED, segment=bytes(16)),
    "seal: another number": in_body("BatchSealed", expected=15),
    "seal: another batch": in_body("BatchSealed", batch="b1"),
    "strategy: another configuration": in_body("ConsumerRegistered", config={"epsilon": 1.0}),
    "annotation: rows exchanged": in_body(_ANNOTATED, experiences=first_two_exchanged),
    "annotation: an unknown row": in_body(_ANNOTATED, experiences=other_first(7 << 40)),
    "annotation: another group": in_body(_ANNOTATED, groups=lambda old: old[::-1]),
    "annotation: not planned": in_body(_ANNOTATED, planned=lambda old: [False] * len(old)),
    "annotation: other metrics": in_body(_ANNOTATED, metrics=[]),
    "annotation: another digest": in_body(_ANNOTATED, digest=bytes(16)),
    "annotation: seen further": in_body(_ANNOTATED, seen=lambda old: old + 1),
    "annotation: called more often": in_body(_ANNOTATED, calls=lambda old: old + 1),
    "rejection: another reason": in_body(_REJECTED, reasons=other_first("stale")),
    "rejection: another row": in_body(_REJECTED, experiences=other_first(7 << 40)),
    "scoring: another reward": in_body("RewardsAssigned", rewards=other_first(9.0)),
    "manifest: rows exchanged": in_body(_LEASED, experiences=first_two_exchanged),
    "manifest: another annotation": in_body(_LEASED, annotations=other_first(7 << 40)),
    "manifest: another group": in_body(_LEASED, groups=other_first(9)),
    "manifest: another normalizer": in_body(_LEASED, normalizer=7.0),
    "manifest: another token": in_body(_LEASED, token=9),
    "manifest: another digest": in_body(_LEASED, digest=bytes(16)),
    "commit: another path": in_body(_COMMITTED, 1, checkpoint="/elsewhere"),
    "commit: another checkpoint's digest": in_body(_COMMITTED, 1, checkpoint_digest="0" * 64),
    "commit: another chain": in_body(_COMMITTED, 1, chain=bytes(16)),
    "commit: another manifest": in_body(_COMMITTED, 1, manifests=[bytes(16)]),
    "commit: other metrics": in_body(_COMMITTED, metrics={"loss": 0.0}),
    "last commit: other metrics": in_body(_COMMITTED, 1, metrics={"loss": 0.0}),
    "commit: another environment": in_body(_COMMITTED, environment={"torch": "0"}),
    "commit: another token": in_body(_COMMITTED, token=9),
    "policy: another version": in_body("PolicyPublished", version=9),
    "policy: another file": in_body("PolicyPublished", uri="/elsewhere"),
    "archive: a file that is not there": in_body("SegmentsArchived", uri="/nowhere.parquet"),
    "event: another actor": lambda tx: put(tx, 3, actor="somebody"),
    "event: another time": lambda tx: put(tx, 3, recorded_at=1),
    "event: another kind": lambda tx: put(tx, 3, kind="SomethingElse"),
    "event: an unreadable body": lambda tx: put(tx, 3, body=b"\xc1"),
    "event: recorded rewards are gone": deleted("RewardsAssigned"),
    "event: recorded rewards are gone, the rest renumbered": deleted(
        "RewardsAssigned", renumbered=True
    ),
    "event: a write is gone": deleted(_RECORDED, 5),
    "event: a lease is gone": deleted(_LEASED, 1),
    "event: the last ones are gone": cut_after(_LEASED, 1),
    "event: all since the first write are gone": cut_after(_RECORDED, 0),
    "event: two writes exchanged": exchanged(_RECORDED, 0, 1),
    "event: a commit is there again": repeated(_COMMITTED),
    "segment: a byte, checksum as it was": byte_of_segment("tokens", redone=False),
    "segment: a byte of tokens": byte_of_segment("tokens"),
    "segment: a byte of an annotation": byte_of_segment("annotation"),
    "segment: two annotations exchanged": segments_exchanged("annotation"),
    "segment: two writes' tokens exchanged": segments_exchanged("tokens"),
    "segment: a write's is gone": segment_gone("tokens"),
    "segment: an annotation's is gone": segment_gone("annotation"),
    "segment: one that nobody names": segment_added,
    **{f"{table.name}: a row is gone": row_gone(table) for table in PROJECTIONS},
    "experiment: renamed": lambda tx: tx.execute(update(experiment).values(name="mine")),
    "trigger: event_forbids_update is gone": sql("DROP TRIGGER event_forbids_update"),
    "trigger: segment_forbids_delete does nothing": lambda tx: [
        tx.execute(text("DROP TRIGGER segment_forbids_delete")),
        tx.execute(
            text(
                "CREATE TRIGGER segment_forbids_delete BEFORE DELETE ON segment BEGIN SELECT 1; END"
            )
        ),
    ],
    "trigger: one more, which swallows events": sql(
        "CREATE TRIGGER eats BEFORE INSERT ON event BEGIN SELECT RAISE(IGNORE); END"
    ),
    "index: uq_experience_eid is gone": sql("DROP INDEX uq_experience_eid"),
}
