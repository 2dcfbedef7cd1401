"""The stream of gradient steps: lease, decode, collate, hand over; commit with the checkpoint; resume."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from trinity_buffer.crash_points import reached
from trinity_buffer.errors import (
    CheckpointError,
    ConflictingStrategyError,
    InvalidArgumentError,
    StoreError,
)
from trinity_buffer.pipeline import checkpoint as checkpoints
from trinity_buffer.pipeline.background import running
from trinity_buffer.pipeline.collate import MicroBatch, collate_step
from trinity_buffer.pipeline.environment import environment_of_run
from trinity_buffer.pipeline.events import decoded, new_event, now_us
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.pipeline.grouping import GroupingRules
from trinity_buffer.pipeline.manifest import (
    FIRST_LINK,
    LayoutName,
    Manifest,
    chain,
    plan_microbatches,
)
from trinity_buffer.pipeline.ready_groups import ReadyGroups
from trinity_buffer.pipeline.recorded_strategy import RecordedStrategy
from trinity_buffer.pipeline.row_loader import RowLoader
from trinity_buffer.pipeline.strategy_consumer import StrategyConsumer
from trinity_buffer.pipeline.trainer_lease import TTL_S, TrainerLease, hold_lease
from trinity_buffer.store import leases, log, queries
from trinity_buffer.store.dialect import lock_experiment
from trinity_buffer.store.log import NewEvent
from trinity_buffer.store.queries import ConsumerRow, ReadyRow, StepRow

RECORDED = "recorded"
"""Name of the annotation set that a trainer with ``strategy=None`` reads: whole groups, nothing computed."""


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """How a train stream forms its steps; recorded manifests are served as recorded, whatever these say.

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
        resume_from: rewind to this committed step first; later commits are superseded.
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
    resume_from: int | None = None
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.layout not in ("padded", "packed"):
            raise InvalidArgumentError(
                f"layout={self.layout!r}: accepted are 'padded' and 'packed'"
            )
        if self.groups_per_step < 1 or self.prefetch < 1:
            raise InvalidArgumentError("groups_per_step and prefetch must be at least 1")
        if not 0 <= self.rank < self.world_size:
            raise InvalidArgumentError(
                f"rank={self.rank} of world_size={self.world_size}: ranks count from 0"
            )


@dataclass(frozen=True, slots=True)
class Resume:
    """The last commit of the live line: where to go on.

    Attributes:
        step: the last committed gradient step.
        checkpoint: its checkpoint, None if it was committed without one.
        digest: sha256 of the checkpoint, already compared with what lies on the disk.
        chain: link of the manifest chain after that step.
    """

    step: int
    checkpoint: Path | None
    digest: str | None
    chain: bytes


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
    """

    step: int
    microbatches: list[MicroBatch]
    manifest: Manifest
    chain: bytes
    recorded: bool
    policy_versions: list[int] = field(default_factory=list)


class TrainStream:
    """An open stream; iterate over it asynchronously. Made by `open_async_train_stream`.

    Attributes:
        resume: the last commit, or None at the very beginning.
        incomplete_groups: with ``strategy=None``, groups left waiting when the stream ended.
    """

    def __init__(self, experiment: Experiment, options: StreamOptions, lease: TrainerLease) -> None:
        self.experiment = experiment
        self.options = options
        self.resume: Resume | None = None
        self.incomplete_groups = 0
        self._database = experiment.database
        self._lease = lease
        self._loader = RowLoader(experiment.database, experiment.key)
        self._ready = ReadyGroups(experiment, self.annotation_set, options.consumer)
        self._committed = 0
        self._delivered: dict[int, TrainStep] = {}
        self._recorded: deque[StepRow] = deque()
        self._next_step = 1
        self._chain = FIRST_LINK
        self._source_is_done = options.strategy is not None
        self._failure: Exception | None = None
        self._send, self._receive = anyio.create_memory_object_stream[TrainStep](
            options.prefetch - 1
        )

    @property
    def annotation_set(self) -> str:
        """Name of the set that is trained on."""
        return RECORDED if self.options.strategy is None else self.options.strategy

    # -- opening
    # ------------------------------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Register, rewind if asked to, find the last commit and what was handed out after it."""
        row = await self._register()
        if self.options.resume_from is not None:
            row = await self._rewind(row, self.options.resume_from)
        self._committed = row.committed_step
        async with self._database.reading() as tx:
            steps = await queries.steps(tx, self.experiment.key, self.options.consumer)
        for done in steps[: row.committed_step]:
            self._chain = chain(self._chain, done.manifest_digest)
        if row.committed_step:
            await self._find_resume(steps[row.committed_step - 1])
        self._recorded = deque(steps[row.committed_step :])
        self._next_step = row.leased_step + 1
        await self._ready.start()

    async def _register(self) -> ConsumerRow:
        config = {"strategy": self.annotation_set}
        name, key = self.options.consumer, self.experiment.key
        event = new_event(
            "ConsumerRegistered", {"consumer": name, "kind": "trainer", "config": config}
        )
        async with self._database.writing() as tx:
            await lock_experiment(tx, key)
            row = await queries.consumer_row(tx, key, name)
            if row is None:
                await log.append(tx, key, [event], actor=name, now_us=now_us())
                row = await queries.consumer_row(tx, key, name)
        assert row is not None
        if row.kind != "trainer" or row.config != config:
            raise ConflictingStrategyError(
                f"consumer {name!r} is a {row.kind} on {row.config.get('strategy')!r}, not a trainer on "
                f"{self.annotation_set!r}: give this one a name of its own with consumer="
            )
        return row

    async def _rewind(self, row: ConsumerRow, step: int) -> ConsumerRow:
        name, key = self.options.consumer, self.experiment.key
        async with self._database.reading() as tx:
            kept = await queries.last_checkpoint(tx, key, name, at=step)
        if step > row.committed_step or (step > 0 and kept is None):
            raise CheckpointError(
                f"resume_from={step}: trainer {name!r} has no checkpoint committed at that step "
                f"(the last committed step is {row.committed_step})"
            )
        if step == row.committed_step:
            return row
        event = new_event(
            "TrainerRewound", {"consumer": name, "step": step, "from": row.committed_step}
        )
        async with self._database.writing() as tx:
            await leases.require(tx, key, name, token=self._lease.token)
            await log.append(tx, key, [event], actor=name, now_us=now_us())
            rewound = await queries.consumer_row(tx, key, name)
        assert rewound is not None
        return rewound

    async def _find_resume(self, last: StepRow) -> None:
        path = Path(last.checkpoint) if last.checkpoint is not None else None
        if path is not None and last.checkpoint_digest is not None:
            await anyio.to_thread.run_sync(checkpoints.require_digest, path, last.checkpoint_digest)
        self.resume = Resume(last.step, path, last.checkpoint_digest, self._chain)

    # -- serving
    # ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Make and serve steps until there are no more; an error comes out where the stream is read."""
        async with self._send:
            try:
                async with running(self._gather):
                    await self._feed()
            except Exception as error:  # noqa: BLE001 - re-raised by __anext__, to whoever reads the stream
                self._failure = error

    async def _gather(self) -> None:
        """With ``strategy=None``, make the groups that are trained on, beside the consumer of the stream."""
        if self.options.strategy is None:
            report = await self._recorder().run(follow=self.options.follow)
            self.incomplete_groups = report.waiting_groups
            self._source_is_done = True
            self._database.changes.notify()

    def _recorder(self) -> StrategyConsumer:
        config = self.experiment.config
        alone = 1 if config.get("schema") in ("sft", "dpo", "cpt") else None
        rules = GroupingRules(
            rollouts_per_group=config.get("rollouts_per_group", alone),
            deadline_s=config.get("deadline_s"),
            incomplete=config.get("incomplete", "keep"),
        )
        return StrategyConsumer(self.experiment, RecordedStrategy, name=RECORDED, rules=rules)

    async def _feed(self) -> None:
        while self._recorded:
            await self._send.send(await self._serve_again(self._recorded.popleft()))
        while (step := await self._next()) is not None:
            await self._send.send(step)

    async def _serve_again(self, row: StepRow) -> TrainStep:
        async with self._database.reading() as tx:
            (stored,) = await log.read_at(tx, self.experiment.key, [row.leased_at])
        manifest = Manifest.from_body(decoded("", stored).body)
        return await self._load(manifest, recorded=True)

    async def _next(self) -> TrainStep | None:
        while True:
            state = await self._database.changes.state()
            ending = self._source_is_done and (
                not self.options.follow or await self.experiment.is_finished()
            )
            rows = await self._ready.take(self.options.groups_per_step, partial_ok=ending)
            if rows:
                rows = await self._without_oversize(rows)
                if rows:
                    return await self._lease_step(rows)
                continue
            if ending:
                return None
            await self._database.changes.changed(state)

    async def _without_oversize(self, rows: list[ReadyRow]) -> list[ReadyRow]:
        limit = self.options.max_tokens
        large = [row for row in rows if limit is not None and row.length > limit]
        if not large:
            return rows
        kept = [row for row in rows if row not in large]
        groups = {(row.address >> 20, row.group_slot) for row in kept}
        gone = {(r.address >> 20, r.group_slot) for r in large if r.planned} - groups
        body = {
            "consumer": self.options.consumer,
            "by": "trainer",
            "experiences": [row.address for row in large],
            "reasons": ["oversize"] * len(large),
            "planned_groups": len(gone),
        }
        event = new_event("ExperiencesRejected", body)
        async with self._database.writing() as tx:
            await leases.require(
                tx, self.experiment.key, self.options.consumer, token=self._lease.token
            )
            await log.append(
                tx, self.experiment.key, [event], actor=self.options.consumer, now_us=now_us()
            )
        return kept

    async def _lease_step(self, rows: list[ReadyRow]) -> TrainStep:
        manifest = self._plan(rows)
        step = await self._load(manifest, recorded=False)
        event = new_event("BatchLeased", manifest.body(self.options.consumer, self._lease.token))
        reached("before-lease")
        async with self._database.writing() as tx:
            await leases.require(
                tx, self.experiment.key, self.options.consumer, token=self._lease.token
            )
            await log.append(
                tx, self.experiment.key, [event], actor=self.options.consumer, now_us=now_us()
            )
            reached("inside-lease")
        reached("after-lease")
        self._next_step += 1
        return step

    def _plan(self, rows: list[ReadyRow]) -> Manifest:
        numbers: dict[tuple[int, int], int] = {}
        groups = [
            numbers.setdefault((row.address >> 20, row.group_slot), len(numbers)) for row in rows
        ]
        order, microbatches = plan_microbatches(
            [row.length for row in rows],
            groups,
            layout=self.options.layout,
            tokens_per_microbatch=self.options.tokens_per_microbatch,
            world_size=self.options.world_size,
        )
        planned = {group for row, group in zip(rows, groups, strict=True) if row.planned}
        return Manifest(
            step=self._next_step,
            annotation_set=self.annotation_set,
            annotations=tuple(rows[i].address for i in order),
            experiences=tuple(rows[i].experience for i in order),
            groups=tuple(groups[i] for i in order),
            num_planned_groups=len(planned),
            layout=self.options.layout,
            microbatches=tuple(microbatches),
            normalizer=None if self.options.max_tokens is None else float(self.options.max_tokens),
        )

    async def _load(self, manifest: Manifest, *, recorded: bool) -> TrainStep:
        rows = await self._loader.load(manifest)
        work = partial(
            collate_step,
            manifest,
            rows,
            rank=self.options.rank,
            world=self.options.world_size,
            device=self.options.device,
        )
        microbatches = await anyio.to_thread.run_sync(work)
        self._chain = chain(self._chain, manifest.digest)
        versions = [row.policy_version for row in rows.meta if row.policy_version is not None]
        return TrainStep(manifest.step, microbatches, manifest, self._chain, recorded, versions)

    def __aiter__(self) -> AsyncIterator[TrainStep]:
        return self

    async def __anext__(self) -> TrainStep:
        try:
            step = await self._receive.receive()
        except anyio.EndOfStream:
            if self._failure is not None:
                raise self._failure from None
            raise StopAsyncIteration from None
        if self._lease.lost is not None:
            raise self._lease.lost
        self._delivered[step.step] = step
        return step

    # -- committing
    # ---------------------------------------------------------------------------------------------

    async def commit(
        self,
        step: TrainStep,
        checkpoint: str | Path | None = None,
        policy: str | Path | None = None,
        environment: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Record, in one transaction, that every delivered step up to ``step`` is in ``checkpoint``.

        The checkpoint's files are written through to the disk first. The same commit again is a
        no-op.

        Args:
            checkpoint: file or folder that holds the weights after ``step``; None where there is
                none to tie to.
            policy: file with the weights that explorers shall load; publishes policy version
                ``step.step``.
            environment: what replay must restore; by default torch's version, device, threads and
                flags.
            metrics: numbers to remember with the step, such as its loss.

        Raises:
            LeaseLostError: another process took over; nothing was recorded.
            CheckpointError: no file at ``checkpoint`` or ``policy``.
        """
        if step.step <= self._committed:
            return
        steps = list(range(self._committed + 1, step.step + 1))
        missing = [number for number in steps if number not in self._delivered]
        if missing:
            raise InvalidArgumentError(
                f"commit of step {step.step}: step {missing[0]} was not delivered by this stream"
            )
        events = await self._commit_events(steps, step, checkpoint, policy, environment, metrics)
        name, key = self.options.consumer, self.experiment.key
        reached("before-commit")
        try:
            async with self._database.writing() as tx:
                await leases.require(tx, key, name, token=self._lease.token)
                await log.append(tx, key, events, actor=name, now_us=now_us())
                reached("inside-commit")
        except StoreError:
            # The connection may have been lost after the commit: read its key back, never send it
            # again blindly.
            async with self._database.reading() as tx:
                row = await queries.consumer_row(tx, key, name)
            if row is None or row.committed_step < step.step or row.token != self._lease.token:
                raise
        reached("after-commit")
        self._committed = step.step
        for number in steps:
            del self._delivered[number]

    async def _commit_events(
        self,
        steps: list[int],
        step: TrainStep,
        checkpoint: str | Path | None,
        policy: str | Path | None,
        environment: Mapping[str, Any] | None,
        metrics: Mapping[str, float] | None,
    ) -> list[NewEvent]:
        digest = None
        if checkpoint is not None:
            digest = await anyio.to_thread.run_sync(
                checkpoints.make_durable, Path(checkpoint).absolute()
            )
        body = {
            "consumer": self.options.consumer,
            "token": self._lease.token,
            "steps": steps,
            "manifests": [self._delivered[number].manifest.digest for number in steps],
            "chain": step.chain,
            "checkpoint": None if checkpoint is None else str(Path(checkpoint).absolute()),
            "checkpoint_digest": digest,
            "metrics": dict(metrics or {}),
            "environment": dict(
                environment if environment is not None else environment_of_run(self.options.device)
            ),
        }
        events = [new_event("StepsCommitted", body)]
        if policy is not None:
            weights = Path(policy).absolute()
            found = await anyio.to_thread.run_sync(checkpoints.make_durable, weights)
            published = {"version": step.step, "uri": str(weights), "digest": found}
            events.append(new_event("PolicyPublished", published))
        return events


@asynccontextmanager
async def open_async_train_stream(
    experiment: Experiment, **options: Any
) -> AsyncIterator[TrainStream]:
    """Open the stream of gradient steps; see `StreamOptions` for the keywords.

    Uncommitted steps of an earlier process of the same consumer are served first, byte for byte as
    they were recorded.

    Raises:
        InvalidArgumentError: an unknown or impossible option.
        LeaseHeldError: another process is this consumer, and ``wait_for_lease`` is False.
        CheckpointError: the last commit's checkpoint is missing or is not the one that was
            committed.
    """
    try:
        chosen = StreamOptions(**options)
    except TypeError as error:
        accepted = ", ".join(StreamOptions.__slots__)
        raise InvalidArgumentError(f"train stream: {error}; accepted are {accepted}") from error
    async with hold_lease(
        experiment.database,
        experiment.key,
        chosen.consumer,
        ttl_s=chosen.lease_ttl_s,
        wait=chosen.wait_for_lease,
    ) as lease:
        stream = TrainStream(experiment, chosen, lease)
        await stream.prepare()
        async with running(stream.run):
            yield stream
