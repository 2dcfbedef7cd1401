"""Options of a train stream, and how it starts by them.

A trainer registers, waits for its set, and finds the commit that it resumes from.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, ClassVar, Concatenate, Literal, ParamSpec, TypeVar

import anyio.to_thread
from msgspec import Meta
from typing_extensions import override

from trinity_buffer import errors
from trinity_buffer.algorithm.arguments import did_you_mean
from trinity_buffer.algorithm.sample_strategy import SAMPLE_STRATEGY, SampleStrategy
from trinity_buffer.codec.objects import new_event
from trinity_buffer.events import ConsumerRegistered, StepsCommitted
from trinity_buffer.identity import FAMILIES, parse_uid
from trinity_buffer.options import Count, Natural, StepOptions, option_types
from trinity_buffer.pipeline.annotate.consumer import RECORDED
from trinity_buffer.pipeline.coordination.waiting import Presence, ReportedWait
from trinity_buffer.pipeline.handle import ExperimentHandle, fact_at
from trinity_buffer.pipeline.train.checkpoint import digest_of, require_digest, resolve_moved
from trinity_buffer.store import inspection, log, trainer_queries, writer_queries
from trinity_buffer.store.connection import Database
from trinity_buffer.store.rows import ConsumerRow, StepRow
from trinity_buffer.store.transaction import Transaction
from trinity_buffer.store.url import StoreURL

_logger = logging.getLogger(__name__)

NEEDED = (
    *("reward", "advantages", "returns", "token_level_reward", "action_mask"),
    *(*FAMILIES["tokens"], *FAMILIES["heavy"]),
)
"""Columns that `StreamOptions.needs` may name; of pictures, ``multi_modal_inputs.NAME``."""


@dataclass(frozen=True, kw_only=True)
class StreamOptions(StepOptions):
    """How a train stream forms its steps; recorded steps are served as recorded.

    Recorded steps lose only rows that ``damaged_rows``, ``drop`` or ``max_tokens`` removes.

    ``groups_per_step``, ``tokens_per_microbatch``, ``layout`` and ``lease_ttl_s`` default to the
    experiment's configuration, if it has them; docs/configuration.md says what they mean.

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
            raise errors.InvalidArgumentError(
                f"rank={self.rank} of world_size={self.world_size}: ranks count from 0"
            )
        for name in self.needs:
            # All rows would lack it, and be rejected for good.
            if name.partition(".")[0] not in NEEDED:
                raise errors.InvalidArgumentError(
                    f"needs={name!r}: no column of rows{did_you_mean(name, NEEDED)}; there are "
                    f"{', '.join(NEEDED)}"
                )
        # Options that another one makes meaningless are errors, lest they be ignored silently.
        mixes = self.sample_strategy == "mix"
        if mixes != (self.expert_experiment is not None):
            raise errors.InvalidArgumentError(
                "sample_strategy='mix' and expert_experiment= go together: name the experiment of "
                "this store that holds the expert's rows"
            )
        if self.expert_data_ratio is not None and not mixes:
            raise errors.InvalidArgumentError("expert_data_ratio= needs sample_strategy='mix'")
        if self.max_staleness is not None and self.sample_strategy != "staleness_control":
            raise errors.InvalidArgumentError(
                "max_staleness= needs sample_strategy='staleness_control'"
            )
        self.sampling()

    def warn_of_unbounded(self) -> None:
        """Warn of an infinite bound on staleness: the run's own binds its explorers alone."""
        if self.sample_strategy == "staleness_control" and self.max_staleness in (None, math.inf):
            _logger.warning(
                "trainer %r: sample_strategy='staleness_control' rejects nothing without a bound: "
                "give max_staleness= (in a run sample_strategy_args={max_staleness=N}; the run's "
                "own max_staleness bounds its explorers)",
                self.consumer,
            )

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


Dropped = Mapping[str, Collection[int]]
"""Name of an experiment, "" for the trainer's own -> addresses of experiences to drop."""

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


async def last_commit(
    experiment: ExperimentHandle, trainer: str, last: StepRow, chain: bytes
) -> Resume:
    """Return the commit of ``last``, the last committed step of the live line, to resume from.

    Args:
        chain: link of the manifest chain after it.

    Raises:
        CheckpointError: the checkpoint is missing or has changed.
    """
    path = None if last.checkpoint is None else _path_of(last, experiment.database.folder)
    if path is not None and last.checkpoint_digest is not None:
        await anyio.to_thread.run_sync(require_digest, path, last.checkpoint_digest)

    def read(tx: Transaction) -> tuple[StepsCommitted, int]:
        row: StepRow | None = last
        commits, skipped = list[StepsCommitted](), 0
        while row is not None:  # back to the last step that changed weights
            assert row.committed_at is not None  # steps before a commit are committed
            (stored,) = log.read_at(tx, experiment.key, [row.committed_at])
            commits.append(fact_at(experiment.name, stored, StepsCommitted))
            steps = commits[-1].steps
            trained = set(steps).difference(commits[-1].skipped_steps)
            skipped += steps[-1] - max(trained, default=steps[0] - 1)
            at, key = steps[0] - 1, experiment.key
            row = None if trained else trainer_queries.step_at(tx, key, trainer, at)
        return commits[0], skipped

    commit, skipped = await experiment.database.read(read)
    digest, metrics = last.checkpoint_digest, commit.metrics
    return Resume(last.step, path, digest, chain, skipped, metrics, commit.environment)


async def require_checkpoint_of(database: Database, key: int, trainer: str, step: int) -> None:
    """Raise unless ``trainer`` can resume from ``step``: 0, or a step with an intact checkpoint.

    Checked before a rewind is recorded, which cannot be undone, or what it is to train with.

    Raises:
        CheckpointError: no such checkpoint; the message names the usable ones.
    """
    if step == 0:
        return
    consumer = await database.read(writer_queries.consumer_row, key, trainer)
    committed = 0 if consumer is None else consumer.committed_step
    live = (await database.read(trainer_queries.steps, key, trainer))[:committed]
    saved = {row.step: row for row in live if row.checkpoint is not None}
    wanted, lacks = saved.pop(step, None), "has no checkpoint committed at that step"
    if wanted is not None:
        path, recorded = _path_of(wanted, database.folder), wanted.checkpoint_digest
        made = f"committed {wanted.checkpoint}"
        lacks = f"{made}, which is gone (`train --keep-checkpoints` keeps it)"
        if path.exists():
            actual = await anyio.to_thread.run_sync(partial(digest_of, path, like=recorded))
            if recorded in (None, actual):
                return
            lacks = f"{made}, whose content is another now (restore it)"
    there = [str(at) for at, row in saved.items() if _path_of(row, database.folder).exists()]
    raise errors.CheckpointError(
        f"resume_from={step}: trainer {trainer!r} {lacks}; the last committed step is "
        f"{committed}, there are checkpoints of {', '.join(there[-10:]) or 'none'}"
    )


def _path_of(row: StepRow, folder: Path | None) -> Path:
    return resolve_moved(row.checkpoint or "", row.checkpoint_digest, folder)


async def register(experiment: ExperimentHandle, consumer: str, annotation_set: str) -> ConsumerRow:
    """Return the trainer ``consumer`` of ``annotation_set``, and register it if it is new.

    Raises:
        ConflictingStrategyError: the name belongs to another consumer.
    """
    config = {"strategy": annotation_set}
    event = new_event(ConsumerRegistered(consumer=consumer, kind="trainer", config=config))
    named = experiment.key, consumer
    row = await experiment.database.write(writer_queries.registered, *named, event)
    if row.kind != "trainer" or row.config != config:
        raise errors.ConflictingStrategyError(
            f"consumer {consumer!r} is a {row.kind} on {row.config.get('strategy')!r}, not a "
            f"trainer on {annotation_set!r}: give this one a name of its own, consumer="
        )
    return row


async def rows_to_drop(
    experiment: ExperimentHandle, expert: ExperimentHandle | None, options: StreamOptions
) -> Dropped:
    """Return the rows that a stream drops.

    Raises:
        InvalidArgumentError: an invalid uid, or one whose row is in a committed step.
        UnknownNameError: no row has this uid.
    """
    eids = {uid: parse_uid(uid) for uid in options.drop}
    sources = {"": experiment} if expert is None else {"": experiment, expert.name: expert}

    def find(tx: Transaction) -> Dropped:
        trainer = writer_queries.consumer_row(tx, experiment.key, options.consumer)
        assert trainer is not None  # the stream registered it
        dropped: dict[str, set[int]] = {source: set() for source in sources}
        for uid, eid in eids.items():
            rows = ((source, inspection.find(tx, of.key, eid)) for source, of in sources.items())
            stored = next(((source, row) for source, row in rows if row is not None), None)
            if stored is None:
                where = " and ".join(repr(of.name) for of in sources.values())
                raise errors.UnknownNameError(f"drop: no row {uid} is stored in experiment {where}")
            source, row = stored
            annotated = inspection.annotation_rows(tx, sources[source].key, [row.address])
            notes = [note for _, _, note in annotated]
            served = inspection.deliveries(tx, experiment.key, [trainer.name], notes, source)
            for _, _, step in served:
                if step <= trainer.committed_step:
                    raise errors.InvalidArgumentError(
                        f"drop: row {uid} was trained in step {step} of trainer {trainer.name!r}, "
                        f"which is committed: go back before it too, resume_from={step - 1}"
                    )
            dropped[source].add(row.address)
        return dropped

    return await experiment.database.read(find) if eids else {}


async def has_set(experiment: ExperimentHandle, options: StreamOptions) -> bool:
    """Return whether the set of a stream exists; False if the stream waits for it.

    Raises:
        UnknownNameError: the set does not exist, and the stream does not wait.
    """
    lacking = await _lacking_set(experiment, options.strategy)
    if lacking and not (options.follow and options.wait_for_set):
        raise errors.UnknownNameError(lacking)
    return not lacking


async def wait_for_set(
    experiment: ExperimentHandle, options: StreamOptions, presence: Presence
) -> None:
    """Wait until the set of a stream exists, and report the wait.

    Raises:
        UnknownNameError: the experiment is finished without it.
    """

    async def tell() -> str:
        return f"trainer {options.consumer!r} waits: {lacking}"

    wait = ReportedWait(experiment.database, experiment.key, tell, presence)
    while True:
        state = await experiment.database.changes.state()
        finished = await experiment.is_finished()
        if not (lacking := await _lacking_set(experiment, options.strategy)):
            wait.over()
            return
        if finished:
            raise errors.UnknownNameError(f"the experiment was finished: {lacking}")
        await wait.changed(state)


async def _lacking_set(experiment: ExperimentHandle, name: str | None) -> str:
    """Return that there is no annotation set ``name``, and the remedy; "" if there is one."""
    consumers = await experiment.database.read(writer_queries.consumers, experiment.key)
    known = [row.name for row in consumers.values() if row.kind == "strategy"]
    if name is None or name in known:
        return ""
    return (
        f"experiment {experiment.name!r} has no annotation set {name!r} (there: "
        f"{', '.join(known) or 'none'}{did_you_mean(name, known)}); no process annotates it: run "
        f"a strategy of this name, `trinity-buffer annotate --name {quote(name)} --follow`"
    )
