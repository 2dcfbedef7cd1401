"""Exploring: plan a batch, have its rollouts made, write them, seal it; after a crash, the rest.

`explore` goes through a list of tasks that several actors share. The list is cut into batches whose
ids follow from epoch and position alone: ``epoch0-0``, ``epoch0-1``, ... The first to plan a batch
has claimed it, by the order of the log; the others get `BatchTakenError` and go on to the next. So
every task of every epoch is planned once, whatever dies when, and nothing but the log is shared.

`SamplingExplorer` has no list: a policy makes up its problems, batch after batch. Either loads the
weights that a trainer publishes.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import math
import os
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol, Self, TypeVar, runtime_checkable

import anyio
import anyio.to_thread
from msgspec import Meta
from typing_extensions import override

from trinity_buffer import errors
from trinity_buffer.algorithm.arguments import refuse_unknown
from trinity_buffer.events import ConfigurationChanged, PolicyPublished, kinds_of
from trinity_buffer.experience import Experience
from trinity_buffer.identity import EID, Key
from trinity_buffer.options import AtLeast0, Count, option_types, renamed
from trinity_buffer.pipeline.config import BatchOptions, RolloutOptions
from trinity_buffer.pipeline.coordination import waiting
from trinity_buffer.pipeline.coordination.diagnosis import counted
from trinity_buffer.pipeline.store import Experiment, PublishedPolicy
from trinity_buffer.pipeline.train.checkpoint import being_read, require_digest
from trinity_buffer.pipeline.write.planning import require_same_contents
from trinity_buffer.store.rows import BatchRow
from trinity_buffer.user_code import kind_of
from trinity_buffer.writer import WriteReceipt

_logger = logging.getLogger(__name__)

T = TypeVar("T")
M = TypeVar("M")

Rollout = Callable[[T, M], Awaitable[Sequence[Experience]]]
"""One attempt at a task with a model: the experiences of the run, one per step, in order."""


@runtime_checkable
class Loadable(Protocol):
    """A model that can be had with other weights."""

    def load(self, uri: str) -> Self:
        """Return such a model with the weights that were published at ``uri``. Off the event loop.

        Raises:
            CheckpointError: they are not there any more.
        """
        ...


async def use_newest(
    experiment: Experiment,
    known: PublishedPolicy | None,
    use: Callable[[PublishedPolicy], Awaitable[None]],
) -> PublishedPolicy | None:
    """Have what was published last used, if it is not ``known``; return what is in use now.

    A run that was wound back publishes other weights under a version that was there before.
    """
    while True:
        policy = await experiment.newest_policy()
        if policy is None or (known is not None and policy.position == known.position):
            return known
        try:
            await use(policy)
        except errors.CheckpointError:
            # The trainer keeps only its newest checkpoints: between the event and the file, a newer
            # one came. Gone, half there or another's file: all mean to ask again.
            newer = await experiment.newest_policy()
            if newer is None or newer.position == policy.position:
                raise
            continue
        return policy


class Weights:
    """A model that keeps up with what the trainer publishes, if it is `Loadable`.

    Attributes:
        model: with the newest weights that were loaded.
        version: of these weights; as the model comes it is policy version 0. None: it has none,
            for it cannot be loaded anew.
    """

    def __init__(self, experiment: Experiment, model: Any) -> None:
        self._experiment = experiment
        self._loaded: PublishedPolicy | None = None
        self.model = model
        self.version = 0 if isinstance(model, Loadable) else None

    async def load_newest(self) -> None:
        """Load what was published last, if anything is new."""
        self._loaded = await use_newest(self._experiment, self._loaded, self._load)

    async def follow(self) -> None:
        """Load whatever is published, until the experiment is finished."""
        begin = 0 if self._loaded is None else self._loaded.position
        # The configuration names the trainer.
        kinds = kinds_of(PolicyPublished | ConfigurationChanged)
        async for _ in self._experiment.events(begin, follow=True, kinds=kinds):
            await self.load_newest()

    async def _load(self, policy: PublishedPolicy) -> None:
        try:
            self.model = await anyio.to_thread.run_sync(self._loaded_with, policy)
        except errors.CheckpointError as error:
            error.add_note(
                f"the trainer published it as policy version {policy.version}: its commit can "
                "name another path of the same weights that this model loads (policy=PATH), or "
                "publish nothing (policy=False)"
            )
            raise
        self.version = policy.version

    def _loaded_with(self, policy: PublishedPolicy) -> Any:
        """Return the model with these weights, which stay while they are loaded."""
        with being_read(Path(policy.uri)):
            if policy.digest and Path(policy.uri).exists():
                require_digest(Path(policy.uri), policy.digest)
            return self.model.load(policy.uri)


DIGEST_BYTES = 16

BATCHES_PER_QUERY = 256
"""How many batches one query asks for their owners."""

REFUSED_TO_ALL = (401, 403, 404)
"""Statuses of a server that every rollout would get: a wrong key, URL or name of a model."""


class Acknowledgements:
    """An append-only file of the lines of receipts that `write` has returned.

    ``trinity-buffer verify --acknowledged FOLDER`` compares such files with the log. A crash may
    leave the last line unfinished; it is read as never written.

    Raises:
        InvalidArgumentError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        # Its name may be an actor's, which a POSIX locale would have in ASCII.
        self._path = path = Path(os.fsdecode(str(path).encode("utf-8", "surrogateescape")))
        try:
            noted = path.read_bytes() if path.exists() else b""
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            # A kill or a full disk may cut a write short. The next line must not grow out of what
            # is left, nor may a part of a uid be taken for one.
            torn = noted[noted.rfind(b"\n") + 1 :]
            if b"\t" in torn:
                os.write(self._descriptor, b"\n")
            elif torn:
                os.ftruncate(self._descriptor, len(noted) - len(torn))
        except OSError as error:
            raise errors.InvalidArgumentError(
                f"acknowledgements {path}: {error.strerror}"
            ) from error

    def note(self, receipt: WriteReceipt) -> None:
        """Append the lines of ``receipt``, in one write call.

        Raises:
            StoreError: the file takes no more.
        """
        # One call: with O_APPEND the lines of several processes do not mix.
        text = "".join(f"{line}\n" for line in receipt.lines).encode()
        try:
            while text:  # a disk that is nearly full takes a part of it, and then raises
                text = text[os.write(self._descriptor, text) :]
        except OSError as error:
            raise errors.StoreError(
                f"acknowledgements {self._path}: {error.strerror}; what the file lacks is stored "
                "all the same: make room, or name a file elsewhere, and start the explorer again"
            ) from error

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


@dataclass(frozen=True, slots=True)
class BatchReport:
    """The outcome of a sealed batch.

    Attributes:
        reward: mean of the rewards of its runs' last steps; None: they have none.
        policy_version: of the weights; None: the model cannot be loaded anew.
        repaired: True if it was planned before a crash and finished now.
        left_out: planned runs that came to nothing; the batch is sealed without them.
        late: experiences that came after another process had sealed the batch: no strategy sees
            them; not counted in ``experiences``.
    """

    batch: Key
    policy_version: int | None
    rollouts: int
    experiences: int
    reward: float | None
    repaired: bool
    left_out: int = 0
    late: int = 0


@dataclass(frozen=True, kw_only=True)
class ExploreOptions(BatchOptions, RolloutOptions):
    """How `explore` goes through its tasks: what it plans at once, how it rolls out, and these.

    The others are keys of the configuration, some in its section ``explorer``
    (docs/configuration.md).

    Attributes:
        retry_on: errors that another attempt may mend: TimeoutError among them, and that the store
            refuses what the rollout returned. Any other error ends `explore` at once. What a server
            has refused is not tried again (see `RefusedRequestError`).
        retry_delay_s: seconds before the second attempt; doubled before each one after it.
        take_over: finish batches that another actor has begun, once no process of that name is
            there: a second explorer makes what a dead one left.
        max_batches: end after this call has begun so many batches; None: at the end of the list.
        acknowledgements: file that records what the store has acknowledged; None: no file.
        report: called with each batch once it is sealed.
    """

    configured: ClassVar[tuple[str, ...]] = tuple(option_types(BatchOptions))

    retry_on: Annotated[
        tuple[type[Exception], ...], Meta(description="a tuple of Exception classes")
    ] = (OSError, errors.InvalidExperienceError)
    retry_delay_s: AtLeast0 = 1.0
    take_over: bool = False
    max_batches: Count | None = None
    acknowledgements: Path | None = None
    report: Annotated[
        Callable[[BatchReport], None] | None, Meta(description="a function of a BatchReport")
    ] = None


async def explore(
    experiment: Experiment,
    *,
    actor: str,
    tasks: Sequence[T] | Mapping[Any, T],
    rollout: Rollout[T, M],
    model: M,
    **options: Any,
) -> None:
    """Roll out every task and write the experiences, until all tasks are done.

    After a crash, the same call finishes what this actor had begun: only runs that are not stored
    are made. It ends early when the experiment is finished.

    Args:
        actor: name of this process; no two that live at the same time may share it.
        tasks: the tasks. The keys of a mapping are the task ids of the `EID`; those of a sequence
            are its positions. All actors must give the same list. Of a mapping the keys
            are compared; of a sequence the tasks, where JSON can say what they are.
        rollout: makes one run. Its experiences get their `EID` here; ``eid.step`` counts them.
        model: what ``rollout`` is given. One that can ``load(uri)`` (see `Loadable`) is replaced
            by one with newer weights as they are published, and its version is noted as
            ``info["model_version"]``. A run keeps the model that it began with.
        options: see `ExploreOptions`.

    Raises:
        ConflictingPlanError: these batches were planned with other tasks or other sizes.
        InvalidArgumentError: a rollout is not async, or returned something else than experiences.
        InvalidExperienceError: a rollout returned an invalid experience, at each attempt.
        InferenceServerError: a server gave a rollout no answer, at each attempt.
        TrainingError: a rollout was cancelled from within.
    """
    options = renamed(options)
    refuse_unknown("explore", options, option_types(ExploreOptions))
    settings = ExploreOptions.of(experiment.config, **options)
    await _TaskListExplorer(experiment, model, actor, settings, tasks, rollout).run()


@dataclass(slots=True)
class _Batch:
    """A planned batch whose runs are being made."""

    key: Key
    repaired: bool
    missing: Sequence[tuple[Key, int]]
    done: int = 0
    experiences: int = 0
    left_out: int = 0
    rewards: list[float] = field(default_factory=list)

    def count(self, made: Sequence[Experience], runs: int = 1) -> None:
        """Count the experiences of some runs; the reward of a run is that of its last step."""
        self.done += runs
        self.experiences += len(made)
        self.left_out += not made
        last = {e.eid.rid: e.reward for e in made}
        self.rewards += [reward for reward in last.values() if reward is not None]


@dataclass(eq=False)
class _Explorer(ABC):
    """An explorer: present, up to date with the weights, acknowledged writes, sealed batches."""

    experiment: Experiment
    model: Any
    actor: str
    options: ExploreOptions

    def __post_init__(self) -> None:
        self._writer = self.experiment.writer(self.actor)
        self._weights = Weights(self.experiment, self.model)
        self._begun: dict[str, float] = {}
        self._ended_at = -math.inf
        self._late = Counter[str]()
        path = self.options.acknowledgements
        self._acknowledgements = None if path is None else Acknowledgements(path)

    async def run(self) -> None:
        """Explore until there is nothing left, or the experiment is finished."""
        # While rollouts are in progress, the run does not count as stalled.
        at_work = partial(self._writer.stay_at_work, lambda: bool(self._begun))
        following = []
        try:
            await self._writer.begin_exploring()
            if isinstance(self._weights.model, Loadable):
                await self._weights.load_newest()
                following.append(self._weights.follow)
            present = self._writer.stay_present
            async with waiting.task_group(present, at_work, self._warn_of_slow, *following):
                await self._explore()
        finally:
            if self._acknowledgements is not None:
                self._acknowledgements.close()

    @abstractmethod
    async def _explore(self) -> None:
        """Plan, make, write and seal batches."""

    @contextmanager
    def _running(self, run: EID) -> Iterator[None]:
        """Count ``run`` as being made inside the context."""
        self._begun[run.rid] = time.monotonic()
        try:
            yield
        finally:
            del self._begun[run.rid]
            self._ended_at = time.monotonic()
            self._writer.waits_no_more()

    async def _warn_of_slow(self) -> None:
        """Warn of rollouts that take long, until cancelled; not while others keep ending."""
        timeout_s, every_s, quiet_until = self.options.timeout_s, waiting.wait_report_s(), -math.inf
        remedy = "timeout_s would end" if timeout_s is None else f"timeout_s={timeout_s} ends"
        while True:
            now = time.monotonic()
            since = max(self._ended_at, min(self._begun.values(), default=now))
            left_s = max(since + every_s, quiet_until) - now
            if left_s > 0:
                await anyio.sleep(left_s)
                continue
            quiet_until = now + waiting.REPEATED_AFTER * every_s
            first, begun = next(iter(self._begun.items()))
            message = waiting.one_line(
                f"explorer {self.actor!r} waits for {counted(len(self._begun), 'rollout')}, the "
                f"first of them {first} for {now - begun:.0f} s ({remedy} them)"
            )
            _logger.warning("%s", message)
            await self._writer.waits_for(message)

    async def _plan(self, batch: Key, tasks: Sequence[Key], contents: bytes | None = None) -> bool:
        """Plan a batch as soon as it is admitted; return False if the experiment is finished."""
        size = self.options.rollouts_per_group
        # The version is asked again while the plan waits: newer weights may be what it waits for.
        return await self._writer.plan(
            batch, tasks, size, policy_version=lambda: self._weights.version, contents=contents
        )

    async def _write(self, made: Sequence[Experience]) -> None:
        if made:
            receipt = await self._writer.write(made)
            self._late[str(made[0].eid.batch)] += receipt.rejected
            if self._acknowledgements is not None:
                # After the write has returned: a line must never claim more than the store has.
                self._acknowledgements.note(receipt)

    async def _seal(self, batch: _Batch, version: int | None) -> None:
        await self._writer.seal(batch.key, await self._writer.stored(batch.key))
        if late := self._late.pop(str(batch.key), 0):
            _logger.warning(
                "explorer %r: %s of batch %r are refused as late: another process sealed it before "
                "they came, and no strategy sees them. Raise the strategy's group_timeout_s if it "
                "did, or plan less at once (groups_per_batch)",
                *(self.actor, counted(late, "experience"), batch.key),
            )
        if self.options.report is None:
            return
        mean = sum(batch.rewards) / len(batch.rewards) if batch.rewards else None
        runs = len(batch.missing) - batch.left_out
        numbers = (runs, batch.experiences - late, mean, batch.repaired, batch.left_out, late)
        self.options.report(BatchReport(batch.key, version, *numbers))

    async def _left_behind(self, taken: Sequence[str] | None = None) -> list[_Batch]:
        """Return the batches of actors that are gone, now this one's, if it takes over."""
        if not self.options.take_over:
            return []
        left = await self._writer.take_over(taken)
        return [await self._batch(key, repaired=True) for key in left]

    async def _batch(self, key: Key, *, repaired: bool) -> _Batch:
        """Return a planned batch and what is missing of it."""
        return _Batch(key, repaired, await self._writer.missing(key))


@dataclass(eq=False)
class _TaskListExplorer(_Explorer):
    """Rolls out a list of tasks that several actors share."""

    tasks: Sequence[Any] | Mapping[Any, Any]
    rollout: Rollout[Any, Any]

    @override
    def __post_init__(self) -> None:
        tasks: Any = self.tasks  # of a caller who may not check types
        tasks = () if tasks is None else tasks
        named = tasks if isinstance(tasks, Mapping) else enumerate(tasks)
        self._tasks: dict[Key, Any] = dict(named)
        if not self._tasks or isinstance(self.tasks, str):
            what = f"{self.tasks!r:.60}, a text" if self._tasks else "empty"
            raise errors.InvalidArgumentError(f"tasks is {what}: give a list of at least one task")
        super().__post_init__()
        self._slots = anyio.Semaphore(self.options.concurrency)
        # The newest that the store was seen to hold; infinite: it was warned.
        self._known_version = 0.0

    @override
    async def _explore(self) -> None:
        begun = 0
        async with waiting.task_group() as group:
            async for batch in self._claimed():
                if not batch.missing:
                    await self._seal(batch, self._weights.version)
                for task, run in batch.missing:  # each as soon as there is a slot for it
                    await self._slots.acquire()
                    group.start_soon(self._make, batch, EID(batch.key, task, run))
                begun += 1
                if begun == self.options.max_batches:
                    return

    async def _claimed(self) -> AsyncIterator[_Batch]:
        """Yield the batches that are this actor's to make."""
        batches = self._batches()
        taken: list[str] = []  # by others
        while page := dict(islice(batches, BATCHES_PER_QUERY)):
            rows = await self._writer.batches(list(page))
            known = await self._writer.contents_of(list(rows.values()))
            for batch, tasks in page.items():
                row = rows.get(batch)
                if row is not None and row.sealed_at is not None and self._is(row, tasks):
                    # Sealed by anyone with other tasks under these numbers: not this list.
                    require_same_contents(batch, known, self._contents(tasks))
                    continue
                try:
                    planned = await self._plan(batch, tasks, self._contents(tasks))
                except errors.BatchTakenError:
                    taken.append(batch)
                    continue
                if not planned:
                    return
                yield await self._batch(batch, repaired=row is not None)
            for left in await self._left_behind(taken) if taken else []:
                taken.remove(str(left.key))
                yield left
        # Their owners may have died since.
        for left in await self._left_behind(taken) if taken else []:
            yield left

    def _batches(self) -> Iterator[tuple[str, list[Key]]]:
        keys, size = list(self._tasks), self.options.groups_per_batch
        for epoch in range(self.options.epochs):
            for number, start in enumerate(range(0, len(keys), size)):
                yield f"epoch{epoch}-{number}", keys[start : start + size]

    def _is(self, row: BatchRow, tasks: Sequence[Key]) -> bool:
        same = list(map(str, row.tasks)) == list(map(str, tasks))
        return same and row.rollouts_per_group == self.options.rollouts_per_group

    def _contents(self, tasks: Sequence[Key]) -> bytes | None:
        """Return the digest of tasks that have no keys of their own, None if they are not JSON."""
        if isinstance(self.tasks, Mapping):
            return None
        try:
            text = json.dumps([self._tasks[task] for task in tasks], sort_keys=True)
        except (TypeError, ValueError, RecursionError):
            return None
        return hashlib.sha256(text.encode()).digest()[:DIGEST_BYTES]

    async def _make(self, batch: _Batch, run: EID) -> None:
        """Make one run and write it; seal the batch after its last one."""
        made = await self._attempted(run)
        # Only now: so a kill costs no more rollouts than run at the same time.
        self._slots.release()
        batch.count(made)
        if batch.done == len(batch.missing):
            await self._seal(batch, self._weights.version)

    async def _attempted(self, run: EID) -> list[Experience]:
        """Return the experiences of a run, which are stored; none if it is left out."""
        options, attempts = self.options, 1
        # The slot is held between attempts: a server in trouble gets fewer requests.
        while isinstance(made := await self._attempt(run), Exception):
            status = made.status if isinstance(made, errors.RefusedRequestError) else None
            if attempts == options.attempts or isinstance(made, errors.RefusedRequestError):
                if options.on_failure == "raise" or status in REFUSED_TO_ALL:
                    raise made
                why = f"after {counted(attempts, 'attempt')}: {type(made).__name__}: {made}"
                _logger.warning("%s", waiting.one_line(f"rollout {run.rid} is left out {why}"))
                return []
            await anyio.sleep(options.retry_delay_s * 2 ** (attempts - 1))
            attempts += 1
        return made

    async def _attempt(self, run: EID) -> list[Experience] | Exception:
        """Return the experiences of a run, which are stored, or an error of ``retry_on``."""
        try:
            made = await self._once(run)
        except self.options.retry_on as error:
            return error
        try:
            await self._write(made)
        except errors.InvalidArgumentError as error:
            # Of what was made; other errors are not the rollout's.
            error.add_note(f"in the rollout {run.rid}")
            if not isinstance(error, self.options.retry_on):
                raise
            return error
        return made

    async def _once(self, run: EID) -> list[Experience]:
        model, version = self._weights.model, self._weights.version
        try:
            # The store is not inside: a timeout must not cut a write short.
            with anyio.move_on_after(self.options.timeout_s) as limit, self._running(run):
                awaitable = self.rollout(self._tasks[run.task], model)
                is_async = inspect.isawaitable(awaitable)
                returned = await awaitable if is_async else awaitable
        except Exception as error:
            error.add_note(f"in the rollout {run.rid}")
            raise
        except anyio.get_cancelled_exc_class() as error:
            if anyio.current_effective_deadline() == -math.inf:
                raise  # all of `explore` is
            raise errors.TrainingError(
                f"rollout {run.rid} was cancelled from within, by a task that it waited for: catch "
                "that error in the rollout, and return [] to leave the run out"
            ) from error
        if limit.cancelled_caught:
            raise TimeoutError(
                f"rollout {run.rid} took longer than timeout_s={self.options.timeout_s}; give it "
                f"more time, or more attempts (attempts={self.options.attempts})"
            )
        if not is_async:
            raise errors.InvalidArgumentError(
                f"rollout {run.rid} returned {kind_of(returned)} without being awaited: write it "
                "as an async function of a task and a model that returns a list of Experience"
            )
        made = [copy(e) for e in _listed(run, returned)]  # other runs may return the same ones
        for step, experience in enumerate(made):
            experience.eid = EID(run.batch, run.task, run.run, step)
            if version is not None and experience.info.get("model_version") is None:
                experience.info = experience.info | {"model_version": version}
        await self._doubt_versions(run, [e.info.get("model_version") for e in made], version)
        return made

    async def _doubt_versions(self, run: EID, versions: Sequence[Any], own: int | None) -> None:
        """Warn once of a version that was never published: its rows would look fresh for long.

        The ``own`` one of its weights was; since then the trainer may have been rewound.
        """
        said = max((v for v in versions if type(v) is int and v != own), default=0)
        if said <= max(self._known_version, self._weights.version or 0):
            return
        newest = await self.experiment.newest_policy()
        if newest is None and self._weights.version is None:
            return  # of a trainer that publishes nothing
        known = 0.0 if newest is None else float(newest.version)
        if said > known and self._known_version < math.inf:
            _logger.warning(
                "rollout %s says model_version=%d, and the newest policy that is published is %d: "
                "its staleness is counted from %d; leave model_version out, or give that of the "
                "weights which made it",
                *(run.rid, said, known, said),
            )
            known = math.inf
        self._known_version = max(self._known_version, known)


def _listed(run: EID, returned: Any) -> list[Experience]:
    """Return the experiences that a rollout returned.

    Raises:
        InvalidArgumentError: they are something else.
    """
    if isinstance(returned, str | bytes | Mapping) or not hasattr(returned, "__iter__"):
        wrong = kind_of(returned)
    else:
        made = list(returned)
        others = [e for e in made if not isinstance(e, Experience)]
        if not others:
            return made
        wrong = f"{kind_of(returned)} that holds {kind_of(others[0])}"
    raise errors.InvalidArgumentError(
        f"rollout {run.rid} returned {wrong}: return a list of Experience, or [] to leave it out"
    )


class Sampler(Loadable, Protocol):
    """A policy that makes rollouts of its own."""

    def rollout(
        self, pairs: Sequence[tuple[Key, int]], *, batch: Key, policy_version: int
    ) -> list[Experience]:
        """Return the experiences of the runs ``pairs``, (task, run), of ``batch``."""
        ...


@dataclass(eq=False)
class SamplingExplorer(_Explorer):
    """Has a policy make rollouts of problems of its own, in batches ``<actor>-0``, ``<actor>-1``...

    It ends when the experiment is finished, or when ``options.max_batches`` are planned, those of
    an earlier process of this name among them.

    Attributes:
        experiment: where they go, and where new policies are announced.
        model: a `Sampler`; as it comes it is policy version 0.
        actor: name of this process.
        options: of those of `explore` the sizes, ``take_over``, ``acknowledgements``, ``report``.
        groups_per_write: how many groups are made, and written, in one call.
    """

    groups_per_write: int = 8

    @override
    async def _explore(self) -> None:
        number, unfinished = await self._writer.unsealed()
        for key in unfinished:
            await self._finish(await self._batch(key, repaired=True))
        most = self.options.max_batches
        while most is None or number < most:
            for left in await self._left_behind():
                await self._finish(left)
            batch = f"{self.actor}-{number}"
            if not await self._plan(batch, list(range(self.options.groups_per_batch))):
                return
            await self._finish(await self._batch(batch, repaired=False))
            number += 1

    async def _finish(self, batch: _Batch) -> None:
        """Generate and write what is missing of a planned batch, then seal it."""
        # The whole batch by one policy, whatever is published meanwhile.
        sampler, version = self._weights.model, self._weights.version
        tasks = list(dict.fromkeys(task for task, _ in batch.missing))
        for start in range(0, len(tasks), self.groups_per_write):
            chosen = tasks[start : start + self.groups_per_write]
            pairs = [(task, run) for task in chosen for of, run in batch.missing if of == task]
            rollout = partial(sampler.rollout, pairs, batch=batch.key, policy_version=version)
            with self._running(EID(batch.key, *pairs[0])):
                made = await anyio.to_thread.run_sync(rollout)
            await self._write(made)
            batch.count(made, len(pairs))
        await self._seal(batch, version)
