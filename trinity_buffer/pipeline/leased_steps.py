"""What steps were handed out with: their manifests as they are served now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trinity_buffer.events import BatchLeased, StepDealt
from trinity_buffer.pipeline.events import decoded, fact_at
from trinity_buffer.store import log
from trinity_buffer.store.transaction import Transaction


def leased_steps(
    tx: Transaction, key: int, experiment: str, positions: Sequence[int]
) -> dict[int, BatchLeased]:
    """Return position -> manifest, for positions where a step says that it was handed out.

    A step that was dealt anew says so by a `StepDealt`: its rows are those, and come in that order.

    Raises:
        CodecError: the body of an event is damaged, or it is not of a handed out step.
    """
    stored = {event.position: event for event in log.read_at(tx, key, positions)}
    facts = {at: decoded(experiment, event).fact for at, event in stored.items()}
    dealt = {at: fact for at, fact in facts.items() if isinstance(fact, StepDealt)}
    first = {
        event.position: fact_at(experiment, event, BatchLeased)
        for event in log.read_at(tx, key, sorted({fact.leased_at for fact in dealt.values()}))
    }
    return {
        at: _as_dealt(first[dealt[at].leased_at], dealt[at])
        if at in dealt
        else fact_at(experiment, stored[at], BatchLeased)
        for at in stored
    }


def _as_dealt(lease: BatchLeased, dealt: StepDealt) -> BatchLeased:
    """Return the manifest with its rows in the order in which they are served now."""

    def placed(column: Sequence[int]) -> tuple[int, ...]:
        return tuple(column[place] for place in dealt.order)

    return replace(
        lease,
        token=dealt.token,
        annotations=placed(lease.annotations),
        experiences=placed(lease.experiences),
        groups=placed(lease.groups),
        num_groups=len({lease.groups[place] for place in dealt.order}),
        source=placed(lease.source) if lease.source else (),
        microbatches=dealt.microbatches,
        digest=dealt.digest,
    )
