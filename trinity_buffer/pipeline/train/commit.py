"""A trainer's steps in flight, and what a commit records of them, row measures included."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from trinity_buffer.codec.segments import Column, content_digest, encode_segment
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.events import MEASURED_ROWS, MEASURED_TOKENS, BatchLeased, StepMeasured
from trinity_buffer.pipeline.handle import new_event
from trinity_buffer.pipeline.manifest import rows_by_rank
from trinity_buffer.pipeline.tensors import columns_of
from trinity_buffer.pipeline.train.step import TrainStep
from trinity_buffer.store.log import NewEvent
from trinity_buffer.store.segments import SegmentRow, SegmentStore, new_key

Numbers = npt.NDArray[np.float32]
T_co = TypeVar("T_co", covariant=True)


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


def measured_event(
    consumer: str, measures: StepMeasures, store: SegmentStore
) -> tuple[NewEvent, list[SegmentRow]]:
    """Put ``measures`` into ``store``; return the event that records them, and their segment.

    Encodes: call it off the event loop.
    """
    number = len(next(iter(measures.rows.values())))
    arrays = {n: np.ascontiguousarray(of, np.dtype("<f4")) for n, of in measures.rows.items()}
    shapes = np.zeros((number, 0), np.int64)
    columns = [Column(n, "float32", shapes, of.view(np.uint8)) for n, of in arrays.items()]
    families = {MEASURED_ROWS: encode_segment(columns, {}, number)}
    if measures.tokens:
        of_tokens = [
            c for name, values in measures.tokens.items() for c in columns_of(name, values)
        ]
        families[MEASURED_TOKENS] = encode_segment(of_tokens, {}, number)
    key = new_key()
    measured = StepMeasured(
        consumer=consumer,
        step=measures.step,
        segment=key,
        families={family: len(blob) for family, blob in families.items()},
        digest=content_digest(list(families.values())),
        rows=number,
        metrics=finite(measures.metrics),
    )
    return new_event(measured), store.put(key, families)


_logger = logging.getLogger(__name__)


PolicyPath = str | Path | Literal[False] | None
"""The weights that a commit publishes: a path, None for the checkpoint, False for none."""


@dataclass(frozen=True, slots=True)
class Commit:
    """The arguments of a commit; see `CommitDoor.commit`."""

    checkpoint: str | Path | None
    policy: PolicyPath
    environment: Mapping[str, Any] | None
    metrics: Mapping[str, float] | None
    skipped: Mapping[int, Sequence[str]] | None
    digests: Mapping[Path, str] | None

    def __post_init__(self) -> None:
        if isinstance(self.policy, bool) and self.policy:
            raise InvalidArgumentError(
                "policy=True: leave it out to publish the checkpoint, give another path of the "
                "same weights, or False to publish nothing"
            )

    @property
    def paths(self) -> tuple[Path | None, Path | None]:
        """Absolute paths of the checkpoint, and of the weights that explorers load."""
        policy = self.checkpoint if self.policy is None else self.policy or None
        checkpoint, published = (
            None if path is None else Path(path).absolute() for path in (self.checkpoint, policy)
        )
        return checkpoint, published


class CommitDoor(Protocol[T_co]):
    """A stream whose steps are committed, by a function that returns or by one that is awaited."""

    def commit(
        self,
        step: TrainStep,
        checkpoint: str | Path | None = None,
        policy: PolicyPath = None,
        environment: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        skipped: Mapping[int, Sequence[str]] | None = None,
        digests: Mapping[Path, str] | None = None,
    ) -> T_co:
        """Record, in one transaction, that the steps up to ``step`` are in ``checkpoint``.

        The checkpoint's files are flushed to disk first. A committed step is never served again, so
        commit only what you have saved. Repeating a commit is a no-op. A rank above 0 tells rank 0
        that it went through the steps and has written its files of the checkpoint, if any; the
        other arguments are used by rank 0 alone.

        Args:
            checkpoint: file or folder that holds the weights after ``step``; None to commit
                without one.
            policy: the weights that explorers load as policy version ``step.step``: None publishes
                the checkpoint, a path another file or folder with the same weights, and False
                nothing. Without a checkpoint, only a path publishes anything.
            environment: the environment for replay; by default that of `environment_of_run`.
            metrics: numbers to record with the step; those that are not finite are left out.
            skipped: steps that did not change the weights -> uids of the rows to look at.
            digests: absolute path -> what `pipeline.train.checkpoint.written` returned, of files of
                the checkpoint that need not be hashed and written through to the disk again.

        Raises:
            LeaseLostError: another process took over, or the ranks assembled anew without this
                one; nothing was recorded.
            CheckpointError: no file at ``checkpoint`` or ``policy``.
            InvalidArgumentError: a step up to ``step`` was not delivered by this stream, or it is
                committed already, with another checkpoint or policy.
        """
        if not isinstance(step, TrainStep):
            raise InvalidArgumentError(f"commit() takes a step of the stream, not {step!r:.60}")
        request = Commit(checkpoint, policy, environment, metrics, skipped, digests)
        return self.record(step, request)

    def record(self, step: TrainStep, request: Commit) -> T_co:
        """Carry out a `commit`."""
        ...


class Delivered(NamedTuple):
    """A delivered and uncommitted step, without its tensors.

    Attributes:
        rows: number of its rows on this rank.
        measures: what was measured of it, if anything was.
    """

    manifest: BatchLeased
    rows: int
    measures: StepMeasures | None = None


def require_rows(delivered: Sequence[Delivered], by_rank: Sequence[Sequence[int]]) -> None:
    """Raise unless each rank took the rows of the steps that were assigned to it.

    Args:
        delivered: the steps about to be committed.
        by_rank: for each step, the number of rows that each rank reports.

    Raises:
        InvalidArgumentError: a rank took too few or too many rows of a step.
    """
    for (manifest, *_), taken in zip(delivered, by_rank, strict=True):
        dealt = rows_by_rank(manifest)
        if taken != dealt:
            raise InvalidArgumentError(
                f"commit of step {manifest.step}: its ranks took {taken} rows, they were dealt "
                f"{dealt}: start all ranks again, they resume from the last commit"
            )


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

    def require_same(self, step: int, request: Commit) -> None:
        """Raise unless a repeated commit of ``step`` names what the first one recorded.

        Raises:
            InvalidArgumentError: its checkpoint or policy would be silently ignored.
        """
        if request.paths == (None, None) or self._unknown is None or step <= self._unknown:
            return  # committed by an earlier stream, or too long ago to remember how
        recorded = self._named.get(step, (None, None))
        named = zip(("checkpoint", "policy"), request.paths, recorded, strict=True)
        for what, path, known in named:
            if path is not None and path != known:
                how = f"with {known}" if known is not None else f"without a {what}"
                raise InvalidArgumentError(
                    f"commit of step {step} with {what} {path}: the step is committed already, "
                    f"{how}. A commit covers all steps up to its own, once and for all: make it "
                    "when what it names is written"
                )

    def add(self, first: int, step: int, request: Commit) -> None:
        """Note a commit of the steps from ``first`` to ``step``.

        Warns once if checkpoints stop, and once if one reuses an earlier path.
        """
        if self._unknown is None:
            self._unknown = first - 1
        checkpoint, _ = request.paths
        if checkpoint is not None:
            self._saved_at = step
            earlier = [at for at, (path, _) in self._named.items() if path == checkpoint]
            if earlier and not self._warned_of_path:
                self._warned_of_path = True
                _logger.warning(
                    "trainer %r: the checkpoint of step %d was written over that of step %d (%s): "
                    "while the next one is written, a crash leaves no checkpoint to go on from, "
                    "and explorers may read half of it; give each step a path of its own",
                    self._trainer,
                    step,
                    earlier[-1],
                    checkpoint,
                )
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
        self._named[step] = request.paths
        if len(self._named) > COMMITS_KEPT:
            self._unknown = min(self._named)
            del self._named[self._unknown]


NON_FINITE = "non_finite"
"""Reason of a committed step that did not change the weights."""


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the finite metrics: events hold no NaN or infinity."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
