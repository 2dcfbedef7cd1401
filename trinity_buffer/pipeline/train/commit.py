"""A trainer's steps in flight, and what a commit records of them, row measures included."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import anyio.to_thread
import numpy as np
import numpy.typing as npt
from msgspec import structs
from torch import Tensor

from trinity_buffer.codec import Column, content_digest, encode_segment
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.events import (
    MEASURED_ROWS,
    MEASURED_TOKENS,
    PolicyPublished,
    StepMeasured,
    StepsCommitted,
)
from trinity_buffer.pipeline.handle import new_event
from trinity_buffer.pipeline.manifest import Manifest
from trinity_buffer.pipeline.tensors import columns_of
from trinity_buffer.pipeline.train import checkpoint as checkpoints
from trinity_buffer.pipeline.train.step import TrainStep
from trinity_buffer.store.log import NewEvent
from trinity_buffer.store.segments import SegmentRow, SegmentStore, new_key

Numbers = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StepMeasures:
    """Measurements of one step.

    Attributes:
        rows: name -> ``[rows of the manifest]``, NaN for missing values.
        metrics: numbers of the whole step.
        tokens: name -> ``[its tokens]`` for each row of the manifest; empty if not requested.
    """

    step: int
    rows: Mapping[str, Numbers]
    metrics: Mapping[str, float] = field(default_factory=dict)
    tokens: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)


def measured_events(
    consumer: str, measures: Sequence[StepMeasures], store: SegmentStore
) -> tuple[list[NewEvent], list[SegmentRow]]:
    """Put ``measures`` into ``store``; return the events that record them, and their segments.

    Encodes: call it off the event loop.
    """
    events: list[NewEvent] = []
    rows: list[SegmentRow] = []
    for step_measures in measures:
        key, families = new_key(), _families(step_measures)
        rows += store.put(key, families)
        measured = StepMeasured(
            consumer=consumer,
            step=step_measures.step,
            segment=key,
            families={family: len(blob) for family, blob in families.items()},
            digest=content_digest(list(families.values())),
            rows=_count(step_measures),
            metrics={
                name: value for name, value in step_measures.metrics.items() if math.isfinite(value)
            },
        )
        events.append(new_event(measured))
    return events, rows


def _count(measures: StepMeasures) -> int:
    return len(next(iter(measures.rows.values())))


def _families(measures: StepMeasures) -> dict[str, bytes]:
    count = _count(measures)
    columns = [_column(name, values) for name, values in measures.rows.items()]
    families = {MEASURED_ROWS: encode_segment(columns, {}, count)}
    if measures.tokens:
        token_columns = [
            c for name, values in measures.tokens.items() for c in columns_of(name, values)
        ]
        families[MEASURED_TOKENS] = encode_segment(token_columns, {}, count)
    return families


def _column(name: str, values: Numbers) -> Column:
    """Return one number per row."""
    data = np.ascontiguousarray(values, np.dtype("<f4")).view(np.uint8)
    return Column(name, "float32", np.zeros((len(values), 0), np.int64), data)


_logger = logging.getLogger(__name__)


PolicyPath = str | Path | Literal[False] | None
"""The weights that a commit publishes: a path, None for the checkpoint, False for none."""


@dataclass(frozen=True, slots=True)
class Commit:
    """The arguments of a commit; see `TrainStream.commit`."""

    checkpoint: str | Path | None = None
    policy: PolicyPath = None
    environment: Mapping[str, Any] | None = None
    metrics: Mapping[str, float] | None = None
    skipped: Mapping[int, Sequence[str]] | None = None
    digests: Mapping[Path, str] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.policy, bool) and self.policy:
            raise InvalidArgumentError(
                "policy=True: leave it out to publish the checkpoint, give another path of the "
                "same weights, or False to publish nothing"
            )

    @property
    def published(self) -> str | Path | None:
        """Path of the weights that explorers load; None: nothing is published."""
        if self.policy is False:
            return None
        return self.checkpoint if self.policy is None else self.policy


class _Delivered(NamedTuple):
    manifest: Manifest
    rows: int


class DeliveredSteps:
    """Delivered but uncommitted steps, without their tensors."""

    def __init__(self) -> None:
        self._steps: dict[int, _Delivered] = {}
        self._measures: dict[int, StepMeasures] = {}

    def add(self, step: TrainStep) -> None:
        """Note that ``step`` was delivered."""
        self._steps[step.step] = _Delivered(step.manifest, step.rows)

    def up_to(self, last: TrainStep, committed: int) -> list[int]:
        """Return the steps after ``committed`` up to ``last``.

        Raises:
            InvalidArgumentError: a step was not delivered, or ``last`` is of another stream.
        """
        steps = list(range(committed + 1, last.step + 1))
        missing = [number for number in steps if number not in self._steps]
        if not missing and self._steps[last.step].manifest.digest != last.manifest.digest:
            missing = [last.step]
        if missing:
            raise InvalidArgumentError(
                f"commit of step {last.step}: step {missing[0]} was not delivered by this stream"
            )
        return steps

    def digests(self, steps: Sequence[int]) -> list[bytes]:
        """Return the digests of the manifests of ``steps``."""
        return [self._steps[step].manifest.digest for step in steps]

    def rows(self, steps: Sequence[int]) -> list[int]:
        """Return the number of rows of each of ``steps`` on this rank."""
        return [self._steps[step].rows for step in steps]

    def require_rows(self, steps: Sequence[int], by_rank: Sequence[Sequence[int]]) -> None:
        """Raise unless each rank took the rows of ``steps`` that were assigned to it.

        Args:
            steps: the steps about to be committed.
            by_rank: for each step, the number of rows that each rank reports.

        Raises:
            InvalidArgumentError: a rank took too few or too many rows of a step.
        """
        for step, taken in zip(steps, by_rank, strict=True):
            dealt = self._steps[step].manifest.rows_by_rank()
            if taken != dealt:
                raise InvalidArgumentError(
                    f"commit of step {step}: its ranks took {taken} rows, they were dealt {dealt}: "
                    "start all ranks again, they resume from the last commit"
                )

    def measure(self, measures: StepMeasures) -> None:
        """Keep measurements of a step until it is committed."""
        self._measures[measures.step] = measures

    def measured(self, steps: Sequence[int]) -> list[StepMeasures]:
        """Return the measurements of those of ``steps`` that have any."""
        return [self._measures[step] for step in steps if step in self._measures]

    def forget(self, steps: Sequence[int]) -> None:
        """Forget steps that are committed."""
        for step in steps:
            del self._steps[step]
            self._measures.pop(step, None)


COMMITS_KEPT = 64
"""Number of commits that are remembered, to tell a repeated commit from a contradicting one."""


class LastCommits:
    """The checkpoints and policies of the last commits of a stream, by step.

    Args:
        trainer: name of the trainer, for messages.
    """

    def __init__(self, trainer: str) -> None:
        self._trainer = trainer
        self._named: dict[int, tuple[Path | None, Path | None]] = {}
        self._unknown: int | None = None  # the last step whose commit is not remembered
        self._saved_at = 0  # the last step with a checkpoint
        self._warned = self._warned_of_path = False

    def require_same(self, step: int, commit: Commit) -> None:
        """Raise unless a repeated commit of ``step`` names what the first one recorded.

        Raises:
            InvalidArgumentError: its checkpoint or policy would be silently ignored.
        """
        new = _named_by(commit)
        if new == (None, None) or self._unknown is None or step <= self._unknown:
            return  # committed by an earlier stream, or too long ago to remember how
        recorded = self._named.get(step, (None, None))
        for what, path, known in zip(("checkpoint", "policy"), new, recorded, strict=True):
            if path is not None and path != known:
                how = f"with {known}" if known is not None else f"without a {what}"
                raise InvalidArgumentError(
                    f"commit of step {step} with {what} {path}: the step is committed already, "
                    f"{how}. A commit covers all steps up to its own, once and for all: make it "
                    "when what it names is written"
                )

    def add(self, steps: Sequence[int], commit: Commit) -> None:
        """Note a commit; warn once if checkpoints stop, and once if one reuses an earlier path."""
        if self._unknown is None:
            self._unknown = steps[0] - 1
        step = steps[-1]
        self._warn_of_same_path(step, _named_by(commit)[0])
        self._named[step] = _named_by(commit)
        if len(self._named) > COMMITS_KEPT:
            self._unknown = min(self._named)
            del self._named[self._unknown]
        if commit.checkpoint is not None:
            self._saved_at = step
        elif self._saved_at and not self._warned:
            self._warned = True
            _logger.warning(
                "trainer %r: step %d is committed without a checkpoint, step %d had one: after a "
                "restart neither the steps between are served again, nor are there weights that "
                "went through them; commit only steps that are saved, which covers all before them",
                self._trainer,
                step,
                self._saved_at,
            )

    def _warn_of_same_path(self, step: int, checkpoint: Path | None) -> None:
        earlier = [at for at, (path, _) in self._named.items() if path and path == checkpoint]
        if earlier and not self._warned_of_path:
            self._warned_of_path = True
            _logger.warning(
                "trainer %r: the checkpoint of step %d was written over that of step %d (%s): "
                "while the next one is written, a crash leaves no checkpoint to go on from, and "
                "explorers may read half of it; give each step a path of its own",
                self._trainer,
                step,
                earlier[-1],
                checkpoint,
            )


def _named_by(commit: Commit) -> tuple[Path | None, Path | None]:
    named = (commit.checkpoint, commit.published)
    first, second = (None if path is None else Path(path).absolute() for path in named)
    return first, second


NON_FINITE = "non_finite"
"""Reason of a committed step that did not change the weights."""


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the finite metrics: events hold no NaN or infinity."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def skips(skipped: Mapping[int, Sequence[str]]) -> dict[str, Any]:
    """Return the fields of `StepsCommitted` for skipped steps and their rows."""
    if not skipped:
        return {}
    return {
        "skipped": NON_FINITE,
        "skipped_steps": list(skipped),
        "largest_rows": [list(uids) for uids in skipped.values()],
    }


class CommitRecords(NamedTuple):
    """The events of a commit, and the rows of the segments that they refer to."""

    events: list[NewEvent]
    segment_rows: list[SegmentRow]


async def commit_records(
    commit: StepsCommitted,
    request: Commit,
    store: SegmentStore,
    measured: Sequence[StepMeasures] = (),
) -> CommitRecords:
    """Flush the files of a commit to disk; return the events that record it.

    Args:
        commit: the event, still without its checkpoint.
        request: names the checkpoint and the policy to publish.
        store: receives the segments of measurements.
        measured: measurements of its steps.

    Raises:
        CheckpointError: no file at ``checkpoint`` or ``policy``.
    """
    path = content = None
    known = dict(request.digests or {})  # checkpoint and policy may share files
    if request.checkpoint is not None:
        path, content = await anyio.to_thread.run_sync(_make_durable, request.checkpoint, known)
    events = [new_event(structs.replace(commit, checkpoint=path, checkpoint_digest=content))]
    if request.published is not None:
        uri, digest = await anyio.to_thread.run_sync(_make_durable, request.published, known)
        published = PolicyPublished(number=commit.steps[-1], uri=uri, digest=digest)
        events.append(new_event(published))
    if not measured:
        return CommitRecords(events, [])
    measured_at, rows = await anyio.to_thread.run_sync(
        measured_events, commit.consumer, measured, store
    )
    return CommitRecords(events + measured_at, rows)


def _make_durable(path: str | Path, known: dict[Path, str]) -> tuple[str, str]:
    """Flush a file or folder to disk; return its absolute path and its digest."""
    whole = Path(path).absolute()
    return str(whole), checkpoints.make_durable(whole, known)
