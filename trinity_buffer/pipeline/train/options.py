"""Options of a train stream, and the commit that it resumes from."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Concatenate, Literal, ParamSpec, TypeVar

from msgspec import Meta
from typing_extensions import override

from trinity_buffer.algorithm.sample_strategy import SAMPLE_STRATEGY, SampleStrategy
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.options import Count, Natural, StepOptions, option_types
from trinity_buffer.pipeline.annotate.consumer import RECORDED
from trinity_buffer.store.url import StoreURL


@dataclass(frozen=True, kw_only=True)
class StreamOptions(StepOptions):
    """How a train stream forms its steps; recorded steps are served as recorded.

    Recorded steps lose only rows that ``damaged_rows``, ``drop`` or ``max_tokens`` removes.

    The options of `StepOptions` default to the experiment's configuration, if it has them.

    Attributes:
        strategy: the annotation set to train on; None: the experiences as recorded.
        consumer: name of this trainer; its steps, manifests and commits belong to it.
        device: device of the tensors of a micro-batch.
        max_tokens: an experience with more is rejected (``oversize``), from an uncommitted step
            too; also the default normalizer of the losses.
        follow: wait for more rows; otherwise end, with a smaller last step, after the stored ones.
        prefetch: number of steps that are leased and decoded ahead.
        wait_for_lease: wait for the holder of the lease, or raise `LeaseHeldError`.
        wait_for_set: with ``follow``, wait, with a warning, for a set that does not exist yet; if
            False, such a set is an error at once, and nothing is registered.
        damaged_rows: how to treat rows that became unreadable for good after their step was leased:
            ``"refuse"`` ends the trainer with an error that names them; ``"drop"`` removes them
            from the step, recorded by a `StepDealt`, and rejects them (``damaged``, ``deleted``).
            The rest of the step is trained.
        drop: uids of rows not to train on, such as one too long for the memory: they are rejected
            (``dropped``), and uncommitted steps that hold them are repartitioned, recorded by a
            `StepDealt`. A uid that the trainer's own experiment lacks is looked up in the expert's.
        resume_from: rewind to this committed step first; later commits are superseded.
        rank, world_size: this process of a data-parallel trainer. Rank 0 leases, the others read
            the manifests from the log; all must open the stream, and all must commit. The number
            of ranks may change on restart: uncommitted steps are repartitioned. A rank without a
            group in a step gets micro-batches without rows, and takes part as usual.
        sample_strategy: which groups a step takes, by its registered name: ``"default"``,
            ``"staleness_control"`` or ``"mix"``.
        max_staleness: ``staleness_control``: groups that are older, in policy versions, are
            rejected (``stale``).
        expert_experiment: ``mix``: the experiment of the same store whose rows are the expert's.
        expert_data_ratio: ``mix``: share of the expert's groups in ``groups_per_step``.
        recompute_old_logprob: leave ``old_logprob`` out, for the trainer to compute.
        needs: stored columns that every row must have. A set without ``advantages`` is refused
            before its first step; a row that lacks another one is rejected (``invalid``). A row
            with a ``token_level_reward`` does not lack its ``reward``.
    """

    configured: ClassVar[tuple[str, ...]] = tuple(option_types(StepOptions))

    strategy: str | None
    consumer: str = "trainer"
    device: str = "cpu"
    max_tokens: Count | None = None
    follow: bool = False
    prefetch: Count = 1
    wait_for_lease: bool = True
    wait_for_set: bool = True
    damaged_rows: Literal["refuse", "drop"] = "refuse"
    # A string is a sequence too: each of its characters would be taken for a uid.
    drop: Annotated[Sequence[str], Meta(description="a list, drop=[UID]")] = ()
    resume_from: int | None = None
    rank: Natural = 0
    world_size: Count = 1
    sample_strategy: str = "default"
    max_staleness: float | None = None
    expert_experiment: str | None = None
    expert_data_ratio: float | None = None
    recompute_old_logprob: bool = False
    needs: tuple[str, ...] = ()

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank >= self.world_size:
            raise InvalidArgumentError(
                f"rank={self.rank} of world_size={self.world_size}: ranks count from 0"
            )
        # Options that another one makes meaningless are errors, lest they be ignored silently.
        mixes = self.sample_strategy == "mix"
        if mixes != (self.expert_experiment is not None):
            raise InvalidArgumentError(
                "sample_strategy='mix' and expert_experiment= go together: name the experiment of "
                "this store that holds the expert's rows"
            )
        if self.expert_data_ratio is not None and not mixes:
            raise InvalidArgumentError("expert_data_ratio= needs sample_strategy='mix'")
        if self.max_staleness is not None and self.sample_strategy != "staleness_control":
            raise InvalidArgumentError("max_staleness= needs sample_strategy='staleness_control'")
        self.sampling()

    @property
    def annotation_set(self) -> str:
        """Name of the annotation set to train on."""
        return RECORDED if self.strategy is None else self.strategy

    def sampling(self) -> SampleStrategy:
        """Return the strategy that selects the groups of a step.

        Raises:
            UnknownNameError: no such strategy.
            InvalidArgumentError: an impossible ratio or staleness.
        """
        kind: Any = SAMPLE_STRATEGY.get(self.sample_strategy)
        args = {"max_staleness": self.max_staleness, "expert_data_ratio": self.expert_data_ratio}
        # Unset options are left out, so that each strategy keeps its own defaults.
        made: SampleStrategy = kind(**{k: v for k, v in args.items() if v is not None})
        return made


@dataclass(frozen=True, slots=True)
class Resume:
    """The last commit of the live line, from which to resume.

    Attributes:
        step: the last committed gradient step.
        checkpoint: its checkpoint, None if it was committed without one.
        digest: sha256 of the checkpoint, already verified against the files.
        chain: link of the manifest chain after that step.
        skipped: number of consecutive steps up to ``step`` that changed no weight.
        metrics: the numbers recorded with its commit.
        environment: the environment of that commit; empty: unknown.
    """

    step: int
    checkpoint: Path | None
    digest: str | None
    chain: bytes
    skipped: int = 0
    metrics: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)


P = ParamSpec("P")
R = TypeVar("R")


def takes(
    options: Callable[P, object],
) -> Callable[[Callable[..., R]], Callable[Concatenate[StoreURL, P], R]]:
    """Give a function of a store and ``**options`` the keywords of ``options``, for all to see."""

    def show(function: Callable[..., R]) -> Callable[Concatenate[StoreURL, P], R]:
        own, passed_on = inspect.signature(function), inspect.signature(options)
        named = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        shown = own.replace(parameters=[*named, *passed_on.parameters.values()])
        function.__signature__ = shown  # type: ignore[attr-defined]  # read by inspect.signature
        return function

    return show
