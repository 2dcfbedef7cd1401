"""Events as one line each."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import fmean
from typing import Any, assert_never

from trinity_buffer import events
from trinity_buffer.errors import InvalidArgumentError, UnknownNameError
from trinity_buffer.inspector.group_views import known_rewards
from trinity_buffer.inspector.source import require_position
from trinity_buffer.pipeline.coordination.diagnosis import counted
from trinity_buffer.pipeline.handle import Event
from trinity_buffer.pipeline.store import Experiment
from trinity_buffer.store import inspection, log
from trinity_buffer.store.rows import tokens_of


@dataclass(frozen=True, slots=True)
class EventLine:
    """An event as people read it, and whole; ``recorded_at`` is in seconds since 1970."""

    position: int
    kind: str
    actor: str
    recorded_at: float
    summary: str
    body: Mapping[str, Any] = field(default_factory=dict)


async def position_before(
    handle: Experiment, count: int, *, kinds: Sequence[str] | None = None, up_to: int | None = None
) -> int:
    """Return the position before the last ``count`` events (of these kinds) up to ``up_to``."""
    database, key = handle.database, handle.key
    last = await database.read(log.head, key) if up_to is None else up_to
    if kinds is None:
        return max(0, last - count)  # positions have no gaps
    return await database.read(inspection.position_before, key, count, kinds, last)


async def event_lines(
    experiment: Experiment,
    *,
    after: int = 0,
    up_to: int | None = None,
    follow: bool = False,
    kinds: Sequence[str] | None = None,
) -> AsyncIterator[EventLine]:
    """Yield the events after a position, in order, as lines; see `Experiment.events`.

    Raises:
        UnknownNameError: a kind that no event has.
        InvalidArgumentError: ``up_to`` is no position of the log, or was given with ``follow``.
    """
    if up_to is not None:
        await require_position(experiment, up_to)
        if follow:
            raise InvalidArgumentError("--as-of ends the log: leave out --follow")
    for kind in kinds or ():
        if kind not in events.KINDS:
            raise UnknownNameError(f"no event is a {kind!r}; kinds are {', '.join(events.KINDS)}")
    async for event in experiment.events(after, follow=follow, kinds=kinds):
        if up_to is not None and event.position > up_to:
            return
        yield line_of(event)


def line_of(event: Event) -> EventLine:
    """Return an event as one line."""
    head = (event.position, event.kind, event.actor, event.recorded_at)
    return EventLine(*head, _summary(event.fact), event.body)


def _summary(fact: events.Fact) -> str:  # noqa: C901, PLR0911, PLR0912 - one case per kind
    match fact:
        case events.ExperimentCreated():
            return ", ".join(f"{key}={value!r}" for key, value in fact.config.items())
        case events.ConfigurationChanged():
            pairs = fact.changes.items()
            return ", ".join(f"{key}: {before!r} -> {after!r}" for key, (before, after) in pairs)
        case events.ExperimentFinished():
            return fact.reason
        case events.BatchPlanned():
            size = f"{len(fact.tasks)} tasks × {fact.rollouts_per_group} rollouts"
            return f"batch {fact.batch}: {size}"
        case events.BatchSealed():
            return f"batch {fact.batch}: {fact.expected} experiences"
        case events.ExperiencesRecorded():
            return _recorded(fact)
        case events.ConsumerRegistered():
            return f"{fact.kind} {fact.consumer}"
        case events.ExperiencesAnnotated():
            size = f"{len(fact.experiences)} in {counted(len(fact.planned), 'group')}"
            return f"set {fact.consumer}: {size}"
        case events.ExperiencesRejected():
            return f"by {fact.by} {fact.consumer}: {_reasons(fact.reasons)}"
        case events.BatchLeased():
            rows, groups = counted(len(fact.annotations), "row"), counted(fact.num_groups, "group")
            parts = counted(len(fact.microbatches), "micro-batch")
            return f"step {fact.step} of {fact.consumer}: {rows}, {groups}, {parts}"
        case events.StepDealt():
            ranks = counted(fact.world_size, "rank")
            less = f", without {counted(len(fact.dropped), 'row')}" if fact.dropped else ""
            return f"step {fact.step} of {fact.consumer} to {ranks}{less}"
        case events.StepsCommitted():
            return _committed(fact)
        case events.StepMeasured():
            return f"step {fact.step} of {fact.consumer}: {fact.rows} rows"
        case events.TrainerRewound():
            return f"{fact.consumer} back to step {fact.step}"
        case events.RewardsAssigned():
            return f"{len(fact.rewards)} rewards of {fact.scoring}"
        case events.SegmentsArchived():
            return f"{len(fact.segments)} segments to {fact.uri or 'nowhere: deleted for good'}"
        case events.SegmentsRestored():
            return f"{len(fact.segments)} segments"
        case events.PolicyPublished():
            return f"version {fact.number}: {fact.uri}"
        case events.ChainStarted():
            return f"all before it has the head {fact.digest.hex()}"
        case (
            events.RankJoined()
            | events.RanksAssembled()
            | events.StepPartDone()
            | events.StreamEnded()
            | events.UnknownEvent()
        ):
            body = events.body_of(fact).items()
            return ", ".join(f"{key}={_short(value)}" for key, value in body)
        case _:
            assert_never(fact)


def _short(value: Any) -> str:
    if isinstance(value, bytes):
        return value.hex()[:12]
    return f"{len(value)} of them" if isinstance(value, list | dict) else str(value)


def _recorded(fact: events.ExperiencesRecorded) -> str:
    columns, order = fact.columns, zip(fact.columns.step, fact.columns.suffix, count())
    runs = zip(map(str, columns.batch), map(str, columns.task), columns.run, strict=True)
    rows = list(zip(runs, columns.reward, strict=True))
    own = (rows[slot] for *_, slot in sorted(order) if slot not in fact.refused)
    rewards = [fmean(of_run) for of_run in known_rewards(own)]
    parts = [f"{len(columns)} of batch {_shortened(columns.batch)}"]
    if rewards:
        parts.append(f"mean reward {fmean(rewards):.3f}")
    tokens = map(tokens_of, columns.prompt_length, columns.length, columns.trained_tokens)
    parts.append(f"{sum(tokens)} tokens")
    if fact.refused:
        parts.append(f"refused: {_reasons(fact.refused.values())}")
    return ", ".join(parts)


def _shortened(keys: Sequence[object]) -> str:
    names = list(dict.fromkeys(map(str, keys)))
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")


def _reasons(reasons: Iterable[str]) -> str:
    counted = Counter(reasons).items()
    return ", ".join(f"{count} {reason}" for reason, count in sorted(counted))


def _committed(fact: events.StepsCommitted) -> str:
    first, last = fact.steps[0], fact.steps[-1]
    numbers = f"step {first}" if first == last else f"steps {first} to {last}"
    line = f"{numbers} of {fact.consumer}, checkpoint {fact.checkpoint or 'none'}"
    skipped = fact.skipped_steps
    return line if not skipped else f"{line}, skipped ({fact.skipped}): {_shortened(skipped)}"
