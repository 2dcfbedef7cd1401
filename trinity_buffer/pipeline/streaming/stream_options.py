"""What a train stream is asked for, and what it hands out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trinity_buffer.algorithm.sample_strategy import SAMPLE_STRATEGY, SampleStrategy
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.pipeline.streaming.collate import MicroBatch
from trinity_buffer.pipeline.streaming.manifest import LayoutName, Manifest
from trinity_buffer.pipeline.streaming.step_tensors import Reduce, changed, joined, recount, scatter
from trinity_buffer.pipeline.streaming.trainer_lease import TTL_S

CONFIGURED = ("groups_per_step", "tokens_per_microbatch", "layout", "lease_ttl_s")
"""Options that are the experiment's configuration unless they are given."""


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """How a train stream forms its steps; recorded ones are served as recorded all the same.

    ``groups_per_step``, ``tokens_per_microbatch``, ``layout`` and ``lease_ttl_s`` that are not
    given are those of the experiment's configuration, if it has them.

    Attributes:
        strategy: the annotation set to train on; None: what was recorded.
        consumer: name of this trainer; its steps, manifests and commits belong to it.
        groups_per_step: groups of one gradient step.
        tokens_per_microbatch: budget of computed tokens (rows × width padded, tokens packed); None:
            one micro-batch.
        layout: ``"padded"`` (right-padded rows) or ``"packed"``.
        device: where the tensors of a micro-batch are put.
        max_tokens: an experience with more is rejected (``oversize``); also the default normalizer
            of the losses.
        follow: wait for more; otherwise end, with a smaller last step, when what is stored has been
            served.
        prefetch: how many steps are leased and decoded ahead.
        lease_ttl_s: after so long without a heartbeat another process may take over.
        wait_for_lease: wait for the holder of the lease, or raise `LeaseHeldError`.
        wait_for_set: with ``follow``, wait aloud for a set that nobody has annotated yet; otherwise
            it is refused at once, and nothing is registered.
        resume_from: rewind to this committed step first; later commits are superseded.
        rank, world_size: this process of a data-parallel trainer. Rank 0 leases, the others read
            the manifests from the log; all must open the stream, and all must commit. Any number
            may follow any other: steps that are not committed are dealt anew. A rank without a
            group of a step gets micro-batches without rows, and takes part as ever.
        sample_strategy: which groups a step takes, by its registered name: ``"default"``,
            ``"staleness_control"`` or ``"mix"``.
        max_staleness: ``staleness_control``: groups that are older, in policy versions, are
            rejected (``stale``).
        expert_experiment: ``mix``: the experiment of the same store whose rows are the expert's.
        expert_data_ratio: ``mix``: share of the expert's groups in ``groups_per_step``.
        recompute_old_logprob: leave ``old_logprob`` out, for the trainer to compute.
        needs: stored columns that every row must have. A set without ``advantages`` is refused
            before its first step; a row that lacks another one is rejected (``invalid``).
    """

    strategy: str | None
    consumer: str = "trainer"
    groups_per_step: int = 1
    tokens_per_microbatch: int | None = None
    layout: LayoutName = "padded"
    device: str = "cpu"
    max_tokens: int | None = None
    follow: bool = False
    prefetch: int = 1
    lease_ttl_s: float = TTL_S
    wait_for_lease: bool = True
    wait_for_set: bool = True
    resume_from: int | None = None
    rank: int = 0
    world_size: int = 1
    sample_strategy: str = "default"
    max_staleness: float | None = None
    expert_experiment: str | None = None
    expert_data_ratio: float | None = None
    recompute_old_logprob: bool = False
    needs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.layout not in ("padded", "packed"):
            raise InvalidArgumentError(
                f"layout={self.layout!r}: accepted are 'padded' and 'packed'"
            )
        _require_count("groups_per_step", self.groups_per_step)
        _require_count("prefetch", self.prefetch)
        _require_count("tokens_per_microbatch", self.tokens_per_microbatch or 1)
        if not 0 <= self.rank < self.world_size:
            raise InvalidArgumentError(
                f"rank={self.rank} of world_size={self.world_size}: ranks count from 0"
            )
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

    @classmethod
    def of(cls, config: Mapping[str, Any], **given: Any) -> StreamOptions:
        """Return the options ``given``, and for the others what ``config`` of an experiment says.

        Raises:
            TypeError: ``given`` names an option that there is not.
            UnknownNameError, InvalidArgumentError: an impossible option.
        """
        configured = {name: config[name] for name in CONFIGURED if name in config}
        return cls(**{**configured, **given})

    def sampling(self) -> SampleStrategy:
        """Return the strategy that plans what a step takes.

        Raises:
            UnknownNameError: no such strategy.
            InvalidArgumentError: an impossible ratio or staleness.
        """
        kind: Any = SAMPLE_STRATEGY.get(self.sample_strategy)
        given = {
            "max_staleness": self.max_staleness,
            "expert_data_ratio": self.expert_data_ratio,
        }
        made: SampleStrategy = kind(**{k: v for k, v in given.items() if v is not None})
        return made


def _require_count(name: str, value: object) -> None:
    if not (type(value) is int and value >= 1):
        raise InvalidArgumentError(f"{name}={value!r}: it must be an int from 1 on")


@dataclass(frozen=True, slots=True)
class Resume:
    """The last commit of the live line: where to go on.

    Attributes:
        step: the last committed gradient step.
        checkpoint: its checkpoint, None if it was committed without one.
        digest: sha256 of the checkpoint, already compared with what lies on the disk.
        chain: link of the manifest chain after that step.
        skipped: so many steps in a row, that one the last of them, changed no weight.
    """

    step: int
    checkpoint: Path | None
    digest: str | None
    chain: bytes
    skipped: int = 0


@dataclass(slots=True)
class TrainStep:
    """What one gradient step trains on.

    Attributes:
        step: 1, 2, ... of this trainer.
        microbatches: mappings of tensors, those of this rank; accumulate their gradients, then step
            the optimizer.
        manifest: the rows in their order, as recorded in the log.
        chain: link of the manifest chain after this step; keep it with the weights that went
            through the step.
        recorded: True if this step was leased before a restart and is served again.
        policy_versions: of the experiences, where known.
        skipped: True in a replay of a step whose commit says that the weights did not go through
            it.
        rows: how many rows of the manifest this rank was given.
        log_head: of the event that leased the step, as hex; it proves the log up to there.
    """

    step: int
    microbatches: list[MicroBatch]
    manifest: Manifest
    chain: bytes
    recorded: bool
    policy_versions: list[int] = field(default_factory=list)
    skipped: bool = False
    rows: int = 0
    log_head: str = ""

    @property
    def staleness(self) -> float | None:
        """Mean of (step - 1 - policy version) over the rows whose version is known."""
        lags = [self.step - 1 - version for version in self.policy_versions]
        return sum(lags) / len(lags) if lags else None

    def compute(
        self,
        advantage_fn: Callable[..., tuple[MutableMapping[str, Any], Mapping[str, Any]]],
        *,
        reduce: Reduce | None = None,
    ) -> dict[str, Any]:
        """Put advantages over this rank's whole step into the micro-batches; return metrics.

        The micro-batches must hold what the function reads (``values``, ``teacher_logprob``, ...).

        Args:
            advantage_fn: a trainer-side advantage function, such as ``ADVANTAGE_FN.get("rloo")()``.
            reduce: sums a tensor over ranks; for statistics of a step that several ranks share.
        """
        return self.apply(lambda batch, _: advantage_fn(batch, reduce=reduce)[1], reduce=reduce)

    def apply(
        self,
        change: Callable[[dict[str, Any], Any], Mapping[str, Any]],
        *,
        reduce: Reduce | None = None,
    ) -> dict[str, Any]:
        """Let ``change(batch, layout)`` alter the step as one batch; return the metrics it returns.

        Per-token tensors that it adds or replaces are put back into the micro-batches. With another
        action mask come other denominators.
        """
        batch, layout = joined(self.microbatches)
        before = dict(batch)
        metrics = change(batch, layout)
        names = changed(before, batch)
        scatter(batch, self.microbatches, names)
        if "action_mask" in names:
            recount(batch, self.microbatches, reduce)
        return dict(metrics)
