"""What explorers and strategies say in the log; `trinity_buffer.events` has all kinds of events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

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
    """Somebody opened the experiment with another configuration.

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
    """Whoever follows the experiment ends."""

    version: ClassVar[int] = 1

    reason: str
