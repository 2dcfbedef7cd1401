"""What may be said in the log: a struct per kind of event.

A class is how we speak of an event; its bytes are the contract. `trinity_buffer.codec` encodes a
fact key by key in the order of its fields, behind the version of its kind under ``v``, and decodes
bodies by the types of the fields. ``docs/events.md`` says who records each kind and when.

A new kind is a class here and a member of `Recorded`. Readers ``match`` the facts that they read
and end in ``assert_never``, so the type checker names each reader that has to know the new kind.

A change that old readers would misunderstand raises the ``tag`` of its class, which is the version,
and adds an entry to `UPCASTERS`. A field with a default is left out of a body where it says
nothing, so older stores need no new version. Keys that are not known are passed over.

Columns stay columns: `ExperienceColumns` are lists with one item per experience.

An address names a row by one number: the position of its event and the row's slot there, as
`store.rows.address_of` joins them. An experience has that of its `ExperiencesRecorded`, an
annotation that of its `ExperiencesAnnotated`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias, get_args

from msgspec import Struct, field, structs

from trinity_buffer.identity import Key

Config: TypeAlias = Mapping[str, Any]

Measured: TypeAlias = Mapping[Any, Any]
"""What a caller measured, or noted, by its own names: texts nearly always, and ints."""

Number: TypeAlias = float | int | bool
"""A number that is stored as it came: an int stays one, so that its bytes are those that were."""


class EventBody(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="v", tag=1):
    """The fields of an event; ``v`` is the version of their form."""


class ExperimentCreated(EventBody, frozen=True, kw_only=True):
    """The first event of every experiment.

    Attributes:
        config: the resolved configuration, schema included.
    """

    config: Config


class ConfigurationChanged(EventBody, frozen=True, kw_only=True):
    """The experiment was opened with another configuration.

    Attributes:
        changes: key -> [before, after].
        config: the whole configuration that holds from here on.
    """

    changes: Mapping[str, Sequence[Any]]
    config: Config


class BatchPlanned(EventBody, frozen=True, kw_only=True):
    """An explorer is going to generate these rollouts.

    Attributes:
        batch: unique in the experiment.
        tasks: the prompts.
        rollouts_per_group: runs of each task.
        contents: digest of what stands behind the tasks, where they are no more than positions.
    """

    batch: Key
    tasks: Sequence[Key]
    rollouts_per_group: int
    contents: bytes | None = None


class ExperienceColumns(Struct, frozen=True, kw_only=True):
    """What an ``ExperiencesRecorded`` says of its experiences: lists with one item per experience.

    Attributes:
        batch, task, run, step, suffix: the `identity.EID` of the experience; batch and task name
            its group, run one rollout of it, and step a turn of that.
        length: its tokens; ``response_length`` those that the action mask covers, and
            ``trained_tokens`` those that it selects.
        kind: of the experience, such as ``single_turn``.
        digest: of its content.
    """

    batch: Sequence[Key]
    task: Sequence[Key]
    run: Sequence[int]
    step: Sequence[int]
    suffix: Sequence[str]
    reward: Sequence[Number | None]
    policy_version: Sequence[int | None]
    prompt_length: Sequence[int]
    length: Sequence[int]
    response_length: Sequence[int]
    trained_tokens: Sequence[int]
    kind: Sequence[str]
    finish_reason: Sequence[str | None]
    digest: Sequence[bytes]

    def __post_init__(self) -> None:
        if len(set(map(len, structs.astuple(self)))) > 1:
            raise ValueError("its columns differ in length")

    def __len__(self) -> int:
        return len(self.batch)

    def uids(self) -> Iterator[str]:
        """Yield the uid of each experience, as `EID.uid` writes it."""
        eids = zip(self.batch, self.task, self.run, self.step, self.suffix, strict=True)
        return (f"{batch}/{task}/{run}/{step}/{suffix}" for batch, task, run, step, suffix in eids)


class ExperiencesRecorded(EventBody, frozen=True, kw_only=True):
    """Experiences are durable.

    Attributes:
        segment: key of their tensors.
        families: column family -> bytes of its segment.
        columns: ids, rewards, policy versions, lengths, finish reasons, content digests.
        refused: slot -> reason, of experiences that no strategy will see (``late``, ``invalid``).
        scorable: that one number per row can stand for what a strategy makes of it: each has a
            boolean action mask, and none has rewards, advantages or returns per token. Nothing:
            only the segment tells.
        sampling: slot -> how tokens of it were sampled, as lists of the fields of `Sampled`; of
            the experiences that were not just sampled at temperature 1.
    """

    segment: bytes
    families: Mapping[str, int]
    columns: ExperienceColumns = field(name="meta")
    refused: Mapping[int, str]
    scorable: bool | None = None
    sampling: Mapping[int, Sequence[Any]] | None = None

    @property
    def rows(self) -> int:
        """How many experiences there are."""
        return len(self.columns.batch)


class BatchSealed(EventBody, frozen=True, kw_only=True):
    """A batch is complete; what comes later is refused.

    Its explorer says so, or a person; or, at its deadline, the strategy of the trainer's set.

    Attributes:
        expected: experiences that it holds, without those refused as late.
    """

    batch: Key
    expected: int


class ConsumerRegistered(EventBody, frozen=True, kw_only=True):
    """A strategy or a trainer took a name.

    Attributes:
        kind: ``strategy`` or ``trainer``.
        config: what the name stands for from now on.
    """

    consumer: str
    kind: str
    config: Config


class ExperiencesAnnotated(EventBody, frozen=True, kw_only=True):
    """A strategy decided groups, and these rows of them are to be trained.

    Attributes:
        consumer: the annotation set.
        seen: position up to which it had read the log.
        calls: how often the strategy had been called.
        after: where its cursor must be for this to be recorded; None: anywhere. Given where a group
            has no rows: a row can be decided only once, which protects all other groups.
        segment: key of the annotations.
        families: column family -> bytes of its segment.
        digest: of the segment; None in what older versions wrote.
        experiences: address of each row's experience, copies included.
        groups: per row, the number of its group within this event: 0, 1, ... in the order in which
            they come, the rows of each side by side.
        planned: per group, whether a plan names it, which none does of copies, nor of further tasks
            of a planned batch.
        metrics: per call of the strategy, what it measured; not per group above, since groups of
            which no row stays count here, and several may share a call.
    """

    consumer: str
    seen: int
    calls: int
    after: int | None = None
    segment: bytes
    families: Mapping[str, int]
    digest: bytes | None = None
    experiences: Sequence[int]
    groups: Sequence[int]
    planned: Sequence[bool]
    metrics: Sequence[Measured]

    @property
    def rows(self) -> int:
        """How many annotations there are."""
        return len(self.experiences)


class ExperiencesRejected(EventBody, frozen=True, kw_only=True):
    """A strategy or a trainer left experiences out.

    Attributes:
        consumer: whose decision it is.
        seen, calls, after: of a strategy, as in `ExperiencesAnnotated`.
        by: ``strategy`` or ``trainer``.
        experiences: addresses of experiences; of a trainer: of annotations.
        reasons: one per address.
        planned_groups: planned groups of which nothing is left.
    """

    consumer: str
    seen: int | None = None
    calls: int | None = None
    after: int | None = None
    by: str
    experiences: Sequence[int]
    reasons: Sequence[str]
    planned_groups: int


class RewardsAssigned(EventBody, frozen=True, kw_only=True):
    """Stored experiences were scored anew; strategies may read this scoring by its name.

    Attributes:
        scoring: its name.
        experiences: addresses.
        rewards: one per address.
        seen: everything that was recorded up to this position was scored; None (older events): up
            to the position of this event.
    """

    scoring: str
    experiences: Sequence[int]
    rewards: Sequence[Number]
    seen: int | None = None


class ExperimentFinished(EventBody, frozen=True, kw_only=True):
    """Consumers that follow the experiment end."""

    reason: str


class BatchLeased(EventBody, frozen=True, kw_only=True):
    """A trainer took a gradient step's rows; this event is the manifest of the step.

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
        digest: of what the step computes, as `pipeline.manifest.manifest_digest` lists it: not of
            ``consumer``, ``token``, ``num_groups``, ``planned_groups`` and ``by_run``, which the
            head of the event covers.
        by_run: whether the trainer is told which rows are of one run; steps of older versions did
            not, and are computed again as they were.
    """

    sources: Sequence[str] = []
    source: Sequence[int] = []
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
    normalizer: Number | None
    digest: bytes
    by_run: bool | None = None


class StepDealt(EventBody, frozen=True, kw_only=True, tag=2):
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

    consumer: str
    token: int
    step: int
    leased_at: int
    world_size: int
    order: Sequence[int]
    microbatches: Sequence[Sequence[int]]
    digest: bytes
    dropped: Sequence[int] = []
    dropped_from: Sequence[str] = []
    num_groups: int | None = None


class RankJoined(EventBody, frozen=True, kw_only=True):
    """A rank is here; rank 0 calls the others, and they answer."""

    consumer: str
    rank: int
    world_size: int


class RanksAssembled(EventBody, frozen=True, kw_only=True):
    """Rank 0 has all ranks together.

    Attributes:
        committed_step: from where they go on.
        joins: positions of the `RankJoined` that it answers.
    """

    consumer: str
    token: int
    committed_step: int
    joins: Sequence[int]


class StepPartDone(EventBody, frozen=True, kw_only=True):
    """A rank above 0 went through all steps up to this one.

    It has written its files of the checkpoint, if there is one.

    Attributes:
        assembly: position of the `RanksAssembled` that it belongs to.
        rows: how many rows it took of each step since its last `StepPartDone`.
    """

    consumer: str
    assembly: int
    rank: int
    step: int
    rows: Sequence[int] = []


class StreamEnded(EventBody, frozen=True, kw_only=True):
    """Rank 0 says that there are no steps after this one."""

    consumer: str
    assembly: int
    step: int


class StepsCommitted(EventBody, frozen=True, kw_only=True):
    """The weights went through these steps, and the checkpoint is durable.

    Attributes:
        steps: all since the commit before.
        manifests: the digest of each.
        chain: running digest of all manifests up to here, those of skipped steps included.
        rows_by_rank: per step, how many rows each rank took.
        checkpoint: path of the weights after the last step, if there is one.
        metrics: numbers to remember, the finite ones.
        environment: what a replay restores.
        skipped: why the weights did not go through `skipped_steps`: ``non_finite``.
        largest_rows: per skipped step, uids of the rows to look at.
    """

    consumer: str
    token: int
    steps: Sequence[int]
    manifests: Sequence[bytes]
    chain: bytes
    checkpoint: str | None
    checkpoint_digest: str | None
    metrics: Measured
    environment: Measured
    rows_by_rank: Sequence[Sequence[int]] = []
    skipped: str | None = None
    skipped_steps: Sequence[int] = []
    largest_rows: Sequence[Sequence[str]] = []


MEASURED_ROWS = "measures"
"""Column family of a `StepMeasured`: a number per row and column."""

MEASURED_TOKENS = "token_measures"
"""Column family of a `StepMeasured`: a number per token and column, where that was asked for."""


class StepMeasured(EventBody, frozen=True, kw_only=True):
    """What a trainer measured in a step, row by row; recorded with its `StepsCommitted`, behind it.

    Attributes:
        segment: key of the columns; rows are those of the manifest, in the order it was served in.
        families: `MEASURED_ROWS`, and perhaps `MEASURED_TOKENS` -> bytes of its segment.
        digest: of the segment, family by family in this order.
        rows: how many rows the manifest has.
        metrics: numbers of the whole step, the finite ones.
    """

    consumer: str
    step: int
    segment: bytes
    families: Mapping[str, int]
    digest: bytes
    rows: int
    metrics: Measured


class PolicyPublished(EventBody, frozen=True, kw_only=True):
    """Weights that explorers shall load.

    Attributes:
        number: the policy version.
        uri: where they are.
        digest: sha256 of the file, where it is known.
    """

    number: int = field(name="version")
    uri: str
    digest: str | None


class TrainerRewound(EventBody, frozen=True, kw_only=True):
    """A trainer went back; commits after `step` are superseded, not deleted.

    Its leased steps stay, and are served again. So do the policies that it published: explorers
    load the last published one, whatever its version, until the next commit publishes another.
    """

    consumer: str
    step: int
    from_step: int = field(name="from")


class SegmentsArchived(EventBody, frozen=True, kw_only=True):
    """Segments left the store.

    Attributes:
        segments: their keys.
        uri: the file that holds them; None where they were deleted.
        digest: sha256 of that file.
    """

    segments: Sequence[bytes]
    uri: str | None
    digest: str | None = None


class SegmentsRestored(EventBody, frozen=True, kw_only=True):
    """Segments that had left the store are in it again; by their keys."""

    segments: Sequence[bytes]


class ChainStarted(EventBody, frozen=True, kw_only=True):
    """A store that is older than the heads of events was migrated: from here on each has one.

    Attributes:
        digest: the head that the event before would have, so that the old past is proven too.
    """

    digest: bytes


class UnknownEvent(Struct, frozen=True, kw_only=True):
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


class NewEvent(Struct, frozen=True):
    """A fact that is about to be recorded.

    Attributes:
        fact: what the projections fold.
        encoded: the same as bytes, which is what is stored.
    """

    fact: Fact
    encoded: bytes


class PlacedFact(Struct, frozen=True):
    """A fact at its place in the log of an experiment, and who recorded it."""

    position: int
    actor: str
    fact: Fact

    @property
    def kind(self) -> str:
        """How the log names its kind."""
        return kind_of(self.fact)


def now_us() -> int:
    """Return the wall clock in microseconds since 1970.

    Displayed times and the deadlines of incomplete groups may depend on it, whether a process of
    another machine counts as present, and whether ``wait_for_lease=False`` finds a lease expired;
    never the order of the log, nor who may commit under a lease.
    """
    return time.time_ns() // 1000


KINDS: Mapping[str, type[Recorded]] = {each.__name__: each for each in get_args(Recorded)}
"""Kind, as the log names it -> its class."""

UPCASTERS: dict[tuple[str, int], Callable[[dict[str, Any]], dict[str, Any]]] = {
    ("StepDealt", 1): lambda body: body  # it dropped no rows
}
"""(kind, version) -> returns a body of that version as one of the next."""


def version_of(kind: str) -> int:
    """Return the version of bodies of ``kind`` that is written today; 1 for an unknown kind."""
    cls = KINDS.get(kind)
    tag = 1 if cls is None else cls.__struct_config__.tag
    assert isinstance(tag, int)  # all classes above have one
    return tag


def kind_of(fact: Fact) -> str:
    """Return how the log names the kind of ``fact``."""
    return fact.kind if isinstance(fact, UnknownEvent) else type(fact).__name__


@cache
def kinds_of(facts: Any) -> tuple[str, ...]:
    """Return how the log names the kinds of a class, or of a union such as ``A | B``."""
    return tuple(each.__name__ for each in get_args(facts) or (facts,))


def body_of(fact: Fact) -> dict[str, Any]:
    """Return ``fact`` as the mapping that its body is, in the order of its fields."""
    if isinstance(fact, UnknownEvent):
        return dict(fact.body)
    body = {}
    for each in structs.fields(fact):
        value = getattr(fact, each.name)
        if each.required or value not in (None, []):
            is_columns = isinstance(value, ExperienceColumns)
            body[each.encode_name] = structs.asdict(value) if is_columns else value
    return body
