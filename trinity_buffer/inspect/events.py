"""Events as one line each."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trinity_buffer.errors import UnknownNameError
from trinity_buffer.pipeline.events import Event
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.store import inspection, log
from trinity_buffer.store.projections import EVENT_KINDS


@dataclass(frozen=True, slots=True)
class EventLine:
    """An event as people read it; ``recorded_at`` is in seconds since 1970."""

    position: int
    kind: str
    actor: str
    recorded_at: float
    summary: str


async def position_before(
    experiment: Experiment, count: int, *, kinds: Sequence[str] | None = None
) -> int:
    """Return the position after which lie the last ``count`` events (of these kinds)."""
    database = experiment.database
    if kinds is None:
        return max(0, await database.read(log.head, experiment.key) - count)
    return await database.read(inspection.position_before, experiment.key, count, kinds)


async def event_lines(
    experiment: Experiment,
    *,
    after: int = 0,
    follow: bool = False,
    kinds: Sequence[str] | None = None,
) -> AsyncIterator[EventLine]:
    """Yield the events after a position, in order, as lines; see `Experiment.events`.

    Raises:
        UnknownNameError: a kind that no event has.
    """
    for kind in kinds or ():
        if kind not in EVENT_KINDS:
            raise UnknownNameError(f"no event is a {kind!r}; kinds are {', '.join(EVENT_KINDS)}")
    async for event in experiment.events(after, follow=follow, kinds=kinds):
        yield line_of(event)


def line_of(event: Event) -> EventLine:
    """Return an event as one line."""
    summarise = _SUMMARIES.get(event.kind, _unknown)
    return EventLine(
        event.position, event.kind, event.actor, event.recorded_at, summarise(event.body)
    )


Body = Mapping[str, Any]


def _unknown(body: Body) -> str:
    return ", ".join(f"{key}={_short(value)}" for key, value in body.items())


def _short(value: Any) -> str:
    if isinstance(value, bytes):
        return value.hex()[:12]
    return f"{len(value)} of them" if isinstance(value, list | dict) else str(value)


def _created(body: Body) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in body["config"].items())


def _changed(body: Body) -> str:
    pairs = body["changes"].items()
    return ", ".join(f"{key}: {before!r} -> {after!r}" for key, (before, after) in pairs)


def _planned(body: Body) -> str:
    tasks = body["tasks"]
    return f"batch {body['batch']}: {len(tasks)} tasks × {body['rollouts_per_group']} rollouts"


def _recorded(body: Body) -> str:
    meta, refused = body["meta"], body["refused"]
    rewards = [reward for reward in meta["reward"] if reward is not None]
    parts = [f"{len(meta['batch'])} of batch {_some(meta['batch'])}"]
    if rewards:
        parts.append(f"mean reward {sum(rewards) / len(rewards):.3f}")
    parts.append(f"{sum(meta['length'])} tokens")
    if refused:
        parts.append(f"refused: {_reasons(refused.values())}")
    return ", ".join(parts)


def _some(keys: Sequence[Any]) -> str:
    names = list(dict.fromkeys(map(str, keys)))
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")


def _reasons(reasons: Any) -> str:
    counted = Counter(reasons).items()
    return ", ".join(f"{count} {reason}" for reason, count in sorted(counted))


def _annotated(body: Body) -> str:
    groups = len(body["planned"])
    return f"set {body['consumer']}: {len(body['experiences'])} in {groups} groups"


def _rejected(body: Body) -> str:
    return f"by {body['by']} {body['consumer']}: {_reasons(body['reasons'])}"


def _leased(body: Body) -> str:
    count, parts = len(body["annotations"]), len(body["microbatches"])
    where = f"step {body['step']} of {body['consumer']}"
    return f"{where}: {count} rows, {body['num_groups']} groups, {parts} micro-batches"


def _committed(body: Body) -> str:
    steps = body["steps"]
    numbers = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    line = f"{numbers} of {body['consumer']}, checkpoint {body['checkpoint'] or 'none'}"
    skipped = body.get("skipped_steps")
    return line if not skipped else f"{line}, skipped ({body['skipped']}): {_some(skipped)}"


_SUMMARIES: dict[str, Callable[[Body], str]] = {
    "ExperimentCreated": _created,
    "ConfigurationChanged": _changed,
    "ExperimentFinished": lambda body: str(body["reason"]),
    "BatchPlanned": _planned,
    "BatchSealed": lambda body: f"batch {body['batch']}: {body['expected']} experiences",
    "ExperiencesRecorded": _recorded,
    "ConsumerRegistered": lambda body: f"{body['kind']} {body['consumer']}",
    "ExperiencesAnnotated": _annotated,
    "ExperiencesRejected": _rejected,
    "BatchLeased": _leased,
    "StepsCommitted": _committed,
    "TrainerRewound": lambda body: f"{body['consumer']} back to step {body['step']}",
    "RewardsAssigned": lambda body: f"{len(body['rewards'])} rewards of {body['scoring']}",
    "SegmentsArchived": lambda body: (
        f"{len(body['segments'])} segments to {body['uri'] or 'nowhere: deleted for good'}"
    ),
    "PolicyPublished": lambda body: f"version {body['version']}: {body['uri']}",
}
