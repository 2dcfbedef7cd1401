"""What may be said in the log: a frozen dataclass per kind of event.

A class is how we speak of an event; its bytes are the contract. `body_of` turns a fact into the
mapping that is encoded, key by key in the order of the fields, and `fact_of` turns a decoded body
back. ``docs/events.md`` says who records each kind and when.

A new kind is a class here and a member of `Fact`. Readers ``match`` the facts that they read and
end in ``assert_never``, so the type checker names each reader that has to know the new kind.

A change that old readers would misunderstand raises the `version` of its class and adds an entry
to `UPCASTERS`. A field that only some events have is `optional`: it is left out where it says
nothing, so older stores need no new version.

Columns stay columns: `ExperienceColumns` are lists with one item per experience.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

from trinity_buffer import event_bodies

# isort: off
from trinity_buffer.rollout_events import (  # said again here, where all kinds are
    BatchPlanned as BatchPlanned,
    BatchSealed as BatchSealed,
    Config as Config,
    ConfigurationChanged as ConfigurationChanged,
    ConsumerRegistered as ConsumerRegistered,
    ExperienceColumns as ExperienceColumns,
    ExperiencesAnnotated as ExperiencesAnnotated,
    ExperiencesRecorded as ExperiencesRecorded,
    ExperiencesRejected as ExperiencesRejected,
    ExperimentCreated as ExperimentCreated,
    ExperimentFinished as ExperimentFinished,
    RewardsAssigned as RewardsAssigned,
    named,
    optional,
)
# isort: on


@dataclass(frozen=True, kw_only=True)
class BatchLeased:
    """A trainer took a step: the manifest.

    Attributes:
        sources: names of other experiments whose rows may be mixed in.
        source: per row, 0 for this experiment, else the place in ``sources`` + 1.
        token: fences the trainers before it.
        annotations: per row, the address of its annotation.
        experiences: per row, the address of its experience.
        groups: per row, the number of its group within the step.
        num_groups: how many groups there are.
        planned_groups: how many of them were planned, for backpressure.
        layout: ``padded`` or ``packed``.
        microbatches: per micro-batch [first row, end, width, rank].
        normalizer: of losses that divide by a constant.
        digest: of all that decides what the step computes.
        by_run: whether the trainer is told which rows are of one run; steps of older versions did
            not, and are computed again as they were.
    """

    version: ClassVar[int] = 1

    sources: Sequence[str] = optional(())
    source: Sequence[int] = optional(())
    consumer: str
    token: int
    step: int
    annotation_set: str
    annotations: Sequence[int]
    experiences: Sequence[int]
    groups: Sequence[int]
    num_groups: int
    planned_groups: int
    layout: str
    microbatches: Sequence[Sequence[int]]
    normalizer: float | None
    digest: bytes
    by_run: bool | None = optional(None)


@dataclass(frozen=True, kw_only=True)
class StepDealt:
    """A step that was leased and not committed is served otherwise from here on.

    To another number of ranks: rows, groups and denominators stay those of its `BatchLeased`. Or
    without rows that can never be read, that the trainer was told to drop, or that are too long for
    it, which it rejects in the same transaction. What ranks had reported of the step before is
    void.

    Attributes:
        token: fences the trainers before it.
        leased_at: position of the `BatchLeased`.
        world_size: how many ranks there are now.
        order: places of the rows in the `BatchLeased`, in the order in which they are served now;
            without those that were dropped, here or before.
        microbatches: per micro-batch [first row of that order, end, width, rank].
        digest: of all that decides what the step computes.
        dropped: addresses of annotations: the rows that the step loses here.
        dropped_from: per such row its experiment, "" for this one; empty: all are of this one.
        num_groups: how many groups are left, where rows are dropped.
    """

    version: ClassVar[int] = 2

    consumer: str
    token: int
    step: int
    leased_at: int
    world_size: int
    order: Sequence[int]
    microbatches: Sequence[Sequence[int]]
    digest: bytes
    dropped: Sequence[int] = optional(())
    dropped_from: Sequence[str] = optional(())
    num_groups: int | None = optional(None)


@dataclass(frozen=True, kw_only=True)
class RankJoined:
    """A rank is here; rank 0 calls the others, and they answer."""

    version: ClassVar[int] = 1

    consumer: str
    rank: int
    world_size: int


@dataclass(frozen=True, kw_only=True)
class RanksAssembled:
    """Rank 0 has all ranks together.

    Attributes:
        committed_step: from where they go on.
        joins: positions of the `RankJoined` that it answers.
    """

    version: ClassVar[int] = 1

    consumer: str
    token: int
    committed_step: int
    joins: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class StepPartDone:
    """A rank above 0 went through all steps up to this one.

    Attributes:
        assembly: position of the `RanksAssembled` that it belongs to.
        rows: how many rows it took of each step since its last `StepPartDone`.
    """

    version: ClassVar[int] = 1

    consumer: str
    assembly: int
    rank: int
    step: int
    rows: Sequence[int] = optional(())


@dataclass(frozen=True, kw_only=True)
class StreamEnded:
    """Rank 0 says that there are no steps after this one."""

    version: ClassVar[int] = 1

    consumer: str
    assembly: int
    step: int


@dataclass(frozen=True, kw_only=True)
class StepsCommitted:
    """The weights went through these steps, and the checkpoint is durable.

    Attributes:
        steps: all since the commit before.
        manifests: the digest of each.
        chain: running digest of the manifests that the weights went through.
        rows_by_rank: per step, how many rows each rank took.
        checkpoint: path of the weights after the last step, if there is one.
        metrics: numbers to remember, the finite ones.
        environment: what a replay restores.
        skipped: why the weights did not go through `skipped_steps`: ``non_finite``.
        largest_rows: per skipped step, uids of the rows to look at.
    """

    version: ClassVar[int] = 1

    consumer: str
    token: int
    steps: Sequence[int]
    manifests: Sequence[bytes]
    chain: bytes
    checkpoint: str | None
    checkpoint_digest: str | None
    metrics: Mapping[str, Any]
    environment: Mapping[str, Any]
    rows_by_rank: Sequence[Sequence[int]] = optional(())
    skipped: str | None = optional(None)
    skipped_steps: Sequence[int] = optional(())
    largest_rows: Sequence[Sequence[str]] = optional(())


MEASURED_ROWS = "measures"
"""Column family of a `StepMeasured`: a number per row and column."""

MEASURED_TOKENS = "token_measures"
"""Column family of a `StepMeasured`: a number per token and column, where that was asked for."""


@dataclass(frozen=True, kw_only=True)
class StepMeasured:
    """What a trainer measured in a step, row by row; recorded with its `StepsCommitted`, behind it.

    Attributes:
        segment: key of the columns; rows are those of the manifest, in the order it was served in.
        families: `MEASURED_ROWS`, and perhaps `MEASURED_TOKENS` -> bytes of its segment.
        digest: of the segment, family by family in this order.
        rows: how many rows the manifest has.
        metrics: numbers of the whole step, the finite ones.
    """

    version: ClassVar[int] = 1

    consumer: str
    step: int
    segment: bytes
    families: Mapping[str, int]
    digest: bytes
    rows: int
    metrics: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class PolicyPublished:
    """Weights that explorers shall load.

    Attributes:
        number: the policy version.
        uri: where they are.
        digest: sha256 of the file, where it is known.
    """

    version: ClassVar[int] = 1

    number: int = named("version")
    uri: str
    digest: str | None


@dataclass(frozen=True, kw_only=True)
class TrainerRewound:
    """A trainer went back; commits after `step` are superseded, not deleted."""

    version: ClassVar[int] = 1

    consumer: str
    step: int
    from_step: int = named("from")


@dataclass(frozen=True, kw_only=True)
class SegmentsArchived:
    """Segments left the store.

    Attributes:
        segments: their keys.
        uri: the file that holds them; None where they were deleted.
        digest: sha256 of that file.
    """

    version: ClassVar[int] = 1

    segments: Sequence[bytes]
    uri: str | None
    digest: str | None = optional(None)


@dataclass(frozen=True, kw_only=True)
class SegmentsRestored:
    """Segments that had left the store are in it again; by their keys."""

    version: ClassVar[int] = 1

    segments: Sequence[bytes]


@dataclass(frozen=True, kw_only=True)
class ChainStarted:
    """A store that is older than the heads of events was migrated: from here on each has one.

    Attributes:
        digest: the head that the event before would have, so that the old past is proven too.
    """

    version: ClassVar[int] = 1

    digest: bytes


@dataclass(frozen=True, kw_only=True)
class UnknownEvent:
    """A kind of a newer version of this package; readers pass over it."""

    kind: str
    body: Mapping[str, Any]


WithSegment = ExperiencesRecorded | ExperiencesAnnotated | StepMeasured
"""What has rows, whose tensors lie in a segment."""

Recorded = (
    ExperimentCreated
    | ConfigurationChanged
    | BatchPlanned
    | ExperiencesRecorded
    | BatchSealed
    | ConsumerRegistered
    | ExperiencesAnnotated
    | ExperiencesRejected
    | RewardsAssigned
    | BatchLeased
    | StepDealt
    | RankJoined
    | RanksAssembled
    | StepPartDone
    | StreamEnded
    | StepsCommitted
    | StepMeasured
    | PolicyPublished
    | TrainerRewound
    | SegmentsArchived
    | SegmentsRestored
    | ChainStarted
    | ExperimentFinished
)
"""All facts that this version records."""

Fact = Recorded | UnknownEvent
"""All that a reader may meet in a log."""


@dataclass(frozen=True, slots=True)
class PlacedFact:
    """A fact at its place in the log of an experiment, and who recorded it."""

    position: int
    actor: str
    fact: Fact

    @property
    def kind(self) -> str:
        """How the log names its kind."""
        return kind_of(self.fact)


KINDS: Mapping[str, type[Recorded]] = {each.__name__: each for each in get_args(Recorded)}
"""Kind, as the log names it -> its class."""

UPCASTERS: dict[tuple[str, int], Callable[[dict[str, Any]], dict[str, Any]]] = {
    ("StepDealt", 1): lambda body: body,  # it dropped no rows
}
"""(kind, version) -> returns a body of that version as one of the next."""


def version_of(kind: str) -> int:
    """Return the version of bodies of ``kind`` that is written today; 1 for an unknown kind."""
    found = KINDS.get(kind)
    return 1 if found is None else found.version


def kind_of(fact: Fact) -> str:
    """Return how the log names the kind of ``fact``."""
    return fact.kind if isinstance(fact, UnknownEvent) else type(fact).__name__


def kinds_of(facts: Any) -> tuple[str, ...]:
    """Return how the log names the kinds of a class, or of a union such as ``A | B``."""
    return tuple(each.__name__ for each in get_args(facts) or (facts,))


def body_of(fact: Fact) -> dict[str, Any]:
    """Return ``fact`` as the mapping that is encoded, in the order of its fields."""
    return dict(fact.body) if isinstance(fact, UnknownEvent) else event_bodies.body_of(fact)


def fact_of(kind: str, body: Mapping[str, Any]) -> Fact:
    """Return the fact that a body of today's version says. Keys that are not known are passed over.

    Raises:
        CodecError: the body lacks a field of its kind, or has one of another type.
    """
    found = KINDS.get(kind)
    return UnknownEvent(kind=kind, body=body) if found is None else event_bodies.read(found, body)
