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

What explorers and strategies say in the log; `trinity_buffer.events` has all kinds of events.

From a fact to the mapping that is encoded, and back, checked against the types of the fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, ClassVar, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from trinity_buffer.errors import CodecError
from trinity_buffer.identity import Key

Config = Mapping[str, Any]


def optional(default: Any, *, name: str | None = None) -> Any:
    """Return a field that a body leaves out where the value is ``default``."""
    return field(default=default, metadata={"optional": True, "name": name})


def named(name: str) -> Any:
    """Return a field whose key in the body is ``name``, which Python would read otherwise."""
    return field(metadata={"name": name})


@dataclass(frozen=True, kw_only=True)
class ExperimentCreated:
    """The first event of every experiment.

    Attributes:
        config: the resolved configuration, schema included.
    """

    version: ClassVar[int] = 1

    config: Config


@dataclass(frozen=True, kw_only=True)
class ConfigurationChanged:
    """The experiment was opened with another configuration.

    Attributes:
        changes: key -> [before, after].
        config: the whole configuration that holds from here on.
    """

    version: ClassVar[int] = 1

    changes: Mapping[str, Sequence[Any]]
    config: Config


@dataclass(frozen=True, kw_only=True)
class BatchPlanned:
    """An explorer is going to generate these rollouts.

    Attributes:
        batch: unique in the experiment.
        tasks: the prompts.
        rollouts_per_group: runs of each task.
        contents: digest of what stands behind the tasks, where they are no more than positions.
    """

    version: ClassVar[int] = 1

    batch: Key
    tasks: Sequence[Key]
    rollouts_per_group: int
    contents: bytes | None = optional(None)


@dataclass(frozen=True, kw_only=True)
class ExperienceColumns:
    """What an ``ExperiencesRecorded`` says of its experiences: lists with one item per experience.

    Attributes:
        batch, task, run, step, suffix: the address of the experience.
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
    reward: Sequence[float | None]
    policy_version: Sequence[int | None]
    prompt_length: Sequence[int]
    length: Sequence[int]
    response_length: Sequence[int]
    trained_tokens: Sequence[int]
    kind: Sequence[str]
    finish_reason: Sequence[str | None]
    digest: Sequence[bytes]

    def __len__(self) -> int:
        return len(self.batch)

    def uids(self) -> Iterator[str]:
        """Yield the uid of each experience, as `EID.uid` writes it."""
        eids = zip(self.batch, self.task, self.run, self.step, self.suffix, strict=True)
        return (f"{batch}/{task}/{run}/{step}/{suffix}" for batch, task, run, step, suffix in eids)


@dataclass(frozen=True, kw_only=True)
class ExperiencesRecorded:
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

    version: ClassVar[int] = 1

    segment: bytes
    families: Mapping[str, int]
    columns: ExperienceColumns = named("meta")  # noqa: RUF009 - says how the key is named
    refused: Mapping[int, str]
    scorable: bool | None = optional(None)
    sampling: Mapping[int, Sequence[Any]] | None = optional(None)

    @property
    def rows(self) -> int:
        """How many experiences there are."""
        return len(self.columns)


@dataclass(frozen=True, kw_only=True)
class BatchSealed:
    """A batch is complete; what comes later is refused.

    Attributes:
        expected: experiences that it holds.
    """

    version: ClassVar[int] = 1

    batch: Key
    expected: int


@dataclass(frozen=True, kw_only=True)
class ConsumerRegistered:
    """A strategy or a trainer took a name.

    Attributes:
        kind: ``strategy`` or ``trainer``.
        config: what the name stands for from now on.
    """

    version: ClassVar[int] = 1

    consumer: str
    kind: str
    config: Config


@dataclass(frozen=True, kw_only=True)
class ExperiencesAnnotated:
    """A strategy decided groups, and these rows of them are to be trained.

    Attributes:
        consumer: the annotation set.
        seen: position up to which it had read the log.
        calls: how often the strategy had been called.
        after: where its cursor had to be for this to hold; for groups without rows.
        segment: key of the annotations.
        families: column family -> bytes of its segment.
        digest: of the segment; None in what older versions wrote.
        experiences: address of each row's experience, copies included.
        groups: per row, the number of its group within this event.
        planned: per group, whether its batch was planned.
        metrics: per group, what the strategy measured.
    """

    version: ClassVar[int] = 1

    consumer: str
    seen: int
    calls: int
    after: int | None = optional(None)
    segment: bytes
    families: Mapping[str, int]
    digest: bytes | None = optional(None)
    experiences: Sequence[int]
    groups: Sequence[int]
    planned: Sequence[bool]
    metrics: Sequence[Mapping[str, Any]]

    @property
    def rows(self) -> int:
        """How many annotations there are."""
        return len(self.experiences)


@dataclass(frozen=True, kw_only=True)
class ExperiencesRejected:
    """A strategy or a trainer left experiences out.

    Attributes:
        consumer: whose decision it is.
        seen, calls, after: of a strategy, as in `ExperiencesAnnotated`.
        by: ``strategy`` or ``trainer``.
        experiences: addresses of experiences; of a trainer: of annotations.
        reasons: one per address.
        planned_groups: planned groups of which nothing is left.
    """

    version: ClassVar[int] = 1

    consumer: str
    seen: int | None = optional(None)
    calls: int | None = optional(None)
    after: int | None = optional(None)
    by: str
    experiences: Sequence[int]
    reasons: Sequence[str]
    planned_groups: int


@dataclass(frozen=True, kw_only=True)
class RewardsAssigned:
    """Stored experiences were scored anew; strategies may read this scoring by its name.

    Attributes:
        scoring: its name.
        experiences: addresses.
        rewards: one per address.
        seen: everything that was recorded up to this position was scored; None (older events): up
            to the position of this event.
    """

    version: ClassVar[int] = 1

    scoring: str
    experiences: Sequence[int]
    rewards: Sequence[float]
    seen: int | None = optional(None)


@dataclass(frozen=True, kw_only=True)
class ExperimentFinished:
    """Consumers that follow the experiment end."""

    version: ClassVar[int] = 1

    reason: str


T = TypeVar("T")


def _dataclass_body(fact: object) -> dict[str, Any]:
    """Return ``fact`` as the mapping that is encoded, in the order of its fields."""
    plan = _plans(type(fact))
    items = ((name, getattr(fact, attribute), default) for attribute, name, default, _ in plan)
    return {name: _plain(value) for name, value, default in items if not _left_out(value, default)}


def _plain(value: Any) -> Any:
    return dict(vars(value)) if isinstance(value, ExperienceColumns) else value


def _left_out(value: Any, default: Any) -> bool:
    return default is not MISSING and value in (None, (), [])


def _read_body(kind: type[T], body: Mapping[str, Any]) -> T:
    """Return the fact of this ``kind`` that a body says. Keys that are not known are passed over.

    Raises:
        CodecError: the body lacks a field of its kind, or has one of another type.
    """
    values = {}
    for attribute, name, default, form in _plans(kind):
        if name in body:
            values[attribute] = _checked(kind.__name__, name, body[name], form)
        elif default is MISSING:
            raise CodecError(f"the body of an event {kind.__name__} is damaged: it has no {name!r}")
    return kind(**values)


class _Form(NamedTuple):
    """Of which types a value may be, and of which its items; nothing: of any."""

    types: frozenset[type]
    items: frozenset[type]


class _Plan(NamedTuple):
    """A field: its attribute, its key in the body, what it is where it is left out, its form."""

    attribute: str
    name: str
    default: Any
    form: _Form


_READ_AS: Mapping[Any, frozenset[type]] = {
    Sequence: frozenset({list, tuple}),
    Mapping: frozenset({dict}),
    int: frozenset({int, bool}),
    float: frozenset({float, int, bool}),
}
_ANYTHING: frozenset[type] = frozenset()


def _types(hint: Any) -> frozenset[type]:
    """Return of which types a decoded value of this hint may be; nothing: of any."""
    if hint is Any:
        return _ANYTHING
    plain = get_origin(hint) or hint
    if plain in _READ_AS:
        return _READ_AS[plain]
    members = get_args(hint)
    return frozenset().union(*map(_types, members)) if members else frozenset({plain})


_OF_COLUMNS = _Form(frozenset({dict}), frozenset({list, tuple}))


def _form(hint: Any) -> _Form:
    if hint is ExperienceColumns:
        return _OF_COLUMNS
    items = get_args(hint)[-1] if get_origin(hint) in (Sequence, Mapping) else Any
    return _Form(_types(hint), _types(items))


def _checked(kind: str, name: str, value: Any, form: _Form) -> Any:
    sound = type(value) in form.types
    if sound and form.items:
        items = value.values() if type(value) is dict else value
        sound = form.items.issuperset(map(type, items))
    if not sound:
        raise CodecError(f"the body of an event {kind} is damaged: its {name!r} is {value!r:.100}")
    return _columns(kind, value) if form is _OF_COLUMNS else value


def _columns(kind: str, value: Mapping[str, Any]) -> ExperienceColumns:
    """Return the columns of an event. Those that are not known are passed over."""
    columns = {}
    for attribute, name, _, form in _plans(ExperienceColumns):
        if name not in value:
            raise CodecError(f"the body of an event {kind} is damaged: it has no column {name!r}")
        columns[attribute] = _checked(kind, name, value[name], form)
    if len(set(map(len, columns.values()))) > 1:
        raise CodecError(f"the body of an event {kind} is damaged: its columns differ in length")
    return ExperienceColumns(**columns)


def _plans(kind: type[Any]) -> tuple[_Plan, ...]:
    if kind not in _PLANS:
        # Once per kind: resolving type hints takes longer than reading an event.
        hints = get_type_hints(kind)
        _PLANS[kind] = tuple(_plan(each, _form(hints[each.name])) for each in fields(kind))
    return _PLANS[kind]


def _plan(each: Field[Any], form: _Form) -> _Plan:
    default = each.default if each.metadata.get("optional") else MISSING
    return _Plan(each.name, each.metadata.get("name") or each.name, default, form)


_PLANS: dict[type[Any], tuple[_Plan, ...]] = {}


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
    ("StepDealt", 1): lambda body: body  # it dropped no rows
}
"""(kind, version) -> returns a body of that version as one of the next."""


def version_of(kind: str) -> int:
    """Return the version of bodies of ``kind`` that is written today; 1 for an unknown kind."""
    cls = KINDS.get(kind)
    return 1 if cls is None else cls.version


def kind_of(fact: Fact) -> str:
    """Return how the log names the kind of ``fact``."""
    return fact.kind if isinstance(fact, UnknownEvent) else type(fact).__name__


def kinds_of(facts: Any) -> tuple[str, ...]:
    """Return how the log names the kinds of a class, or of a union such as ``A | B``."""
    return tuple(each.__name__ for each in get_args(facts) or (facts,))


def body_of(fact: Fact) -> dict[str, Any]:
    """Return ``fact`` as the mapping that is encoded, in the order of its fields."""
    return dict(fact.body) if isinstance(fact, UnknownEvent) else _dataclass_body(fact)


def fact_of(kind: str, body: Mapping[str, Any]) -> Fact:
    """Return the fact that a body of today's version says. Keys that are not known are passed over.

    Raises:
        CodecError: the body lacks a field of its kind, or has one of another type.
    """
    cls = KINDS.get(kind)
    return UnknownEvent(kind=kind, body=body) if cls is None else _read_body(cls, body)
