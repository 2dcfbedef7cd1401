"""`explore`: anybody's rollouts of a task list that several actors share.

The list is cut into batches whose ids follow from epoch and position alone: ``epoch0-0``,
``epoch0-1``, ... Whoever plans a batch first has claimed it, by the order of the log; the others
are told `BatchTakenError` and go on to the next. So every task of every epoch is planned once,
whatever dies when, and nothing but the log is shared.

The rollouts that are being made, which say so once none of them has ended for long.

What a store has acknowledged, noted by the explorer itself: the proof from outside.

The explorer: plan, generate, write, seal, again; and after a crash, first what is missing.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import math
import os
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from trinity_buffer.errors import (
    BatchTakenError,
    InvalidArgumentError,
    InvalidExperienceError,
    RefusedRequestError,
    TrainingError,
)
from trinity_buffer.experience import Experience
from trinity_buffer.explorer.weights import Loadable, Weights
from trinity_buffer.identity import EID, Key
from trinity_buffer.own_code import kind_of
from trinity_buffer.pipeline.background import running, task_group
from trinity_buffer.pipeline.diagnosis import counted
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.pipeline.spoken_wait import REPEATED_AFTER, one_line, wait_report_s
from trinity_buffer.pipeline.writing.planning import require_same_contents
from trinity_buffer.pipeline.writing.sql_writer import SQLWriter
from trinity_buffer.store.rows import BatchRow
from trinity_buffer.writer import WriteReceipt

_logger = logging.getLogger(__name__)


class UnderWay:
    """The rollouts that an explorer waits for.

    Args:
        writer: of the explorer.
        timeout_s: after which a rollout is given up, if it ever is.
    """

    def __init__(self, writer: SQLWriter, timeout_s: float | None) -> None:
        self._writer = writer
        self._remedy = "timeout_s would end" if timeout_s is None else f"timeout_s={timeout_s} ends"
        self._begun: dict[str, float] = {}
        self._ended_at = -math.inf

    @contextmanager
    def making(self, run: EID) -> Iterator[None]:
        """Count ``run`` as one that is waited for inside the context."""
        self._begun[run.rid] = time.monotonic()
        try:
            yield
        finally:
            del self._begun[run.rid]
            self._ended_at = time.monotonic()
            self._writer.waits_no_more()

    async def stay_known(self) -> None:
        """Say until cancelled that rollouts are under way, while they are: the run moves."""
        await self._writer.stay_at_work(lambda: bool(self._begun))

    async def watch(self) -> None:
        """Say what is waited for, until cancelled; not while rollouts keep ending."""
        every_s, quiet_until = wait_report_s(), -math.inf
        while True:
            now = time.monotonic()
            since = max(self._ended_at, min(self._begun.values(), default=now))
            left_s = max(since + every_s, quiet_until) - now
            if left_s > 0:
                await anyio.sleep(left_s)
                continue
            quiet_until = now + REPEATED_AFTER * every_s
            said = one_line(self._told(now))
            _logger.warning("%s", said)
            await self._writer.waits_for(said)

    def _told(self, now: float) -> str:
        first, begun = next(iter(self._begun.items()))
        return (
            f"explorer {self._writer.actor!r} waits for {counted(len(self._begun), 'rollout')}, "
            f"the first of them {first} for {now - begun:.0f} s ({self._remedy} them)"
        )


class Acknowledgements:
    """An append-only file of the lines of receipts that `write` has returned.

    ``trinity-buffer verify --acknowledged FOLDER`` compares such files with the log. A crash may
    leave the last line unfinished; it is read as never written.

    Raises:
        InvalidArgumentError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        # Its name may be an actor's, which a POSIX locale would have in ASCII.
        path = Path(os.fsdecode(str(path).encode("utf-8", "surrogateescape")))
        try:
            torn = path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n")
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise InvalidArgumentError(f"acknowledgements {path}: {error.strerror}") from error
        if torn:  # a kill may cut a write short; the next line must not grow out of what is left
            os.write(self._descriptor, b"\n")

    def note(self, receipt: WriteReceipt) -> None:
        """Append the lines of ``receipt``, in one write call."""
        os.write(self._descriptor, "".join(f"{line}\n" for line in receipt.lines).encode())

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplorerSettings:
    """What one explorer generates.

    Attributes:
        actor: its name; its batches are ``<actor>-0``, ``<actor>-1``, ...
        groups_per_batch: problems that are planned at once.
        rollouts_per_group: attempts at each.
        groups_per_write: how many groups are written in one call.
        acknowledgements: file that notes what the store has acknowledged; None: no proof is kept.
        max_batches: end after so many; None: when the experiment is finished.
        take_over: finish batches of explorers that are gone, too.
    """

    actor: str
    groups_per_batch: int = 8
    rollouts_per_group: int = 8
    groups_per_write: int = 8
    acknowledgements: Path | None = None
    max_batches: int | None = None
    take_over: bool = False


@dataclass(frozen=True, slots=True)
class BatchReport:
    """What is said of one batch that was sealed.

    Attributes:
        reward: mean of the rewards of its runs' last steps; None: they have none.
        policy_version: of the weights; None: the model cannot be loaded anew.
        repaired: True if it was planned before a crash and finished now.
        left_out: planned runs that came to nothing; the batch is sealed without them.
    """

    batch: Key
    policy_version: int | None
    rollouts: int
    experiences: int
    reward: float | None
    repaired: bool
    left_out: int = 0


class Sampler(Loadable, Protocol):
    """A policy that makes rollouts of its own."""

    def rollout(
        self, pairs: Sequence[tuple[Key, int]], *, batch: Key, policy_version: int
    ) -> list[Experience]:
        """Return the experiences of the runs ``pairs``, (task, run), of ``batch``."""
        ...


class Explorer:
    """Has rollouts made with the newest published policy, and writes them.

    Args:
        experiment: where they go, and where new policies are announced.
        sampler: makes the rollouts; as it comes it is policy version 0.
        settings: everything else.
    """

    def __init__(
        self,
        experiment: Experiment,
        sampler: Sampler,
        settings: ExplorerSettings,
    ) -> None:
        self._experiment = experiment
        self._settings = settings
        self._writer = experiment.writer(settings.actor)
        self._weights = Weights(experiment, sampler)
        self._under_way = UnderWay(self._writer, None)
        path = settings.acknowledgements
        self._acknowledgements = None if path is None else Acknowledgements(path)

    async def run(self, report: Callable[[BatchReport], None]) -> None:
        """Explore until the experiment is finished or ``max_batches`` are planned."""
        try:
            await self._writer.begin_exploring()
            await self._weights.load_newest()
            number, unfinished = await self._writer.unsealed()
            for batch in unfinished:
                report(await self._finish(batch, repaired=True))
            beside = (self._weights.follow, self._writer.stay_present, self._under_way.stay_known)
            async with running(*beside):
                while self._settings.max_batches is None or number < self._settings.max_batches:
                    for left in await self._left_behind():
                        report(await self._finish(left, repaired=True))
                    batch = f"{self._settings.actor}-{number}"
                    tasks = list(range(self._settings.groups_per_batch))
                    planned = await self._writer.plan(
                        batch,
                        tasks,
                        self._settings.rollouts_per_group,
                        policy_version=lambda: self._weights.version,
                    )
                    if not planned:
                        return
                    report(await self._finish(batch, repaired=False))
                    number += 1
        finally:
            if self._acknowledgements is not None:
                self._acknowledgements.close()

    async def _left_behind(self) -> list[str]:
        """Return the batches of explorers that are gone, which are this one's to finish now."""
        return await self._writer.take_over() if self._settings.take_over else []

    async def _finish(self, batch: Key, *, repaired: bool) -> BatchReport:
        """Generate and write what is missing of a planned batch, then seal it."""
        missing = await self._writer.missing(batch)
        version, sampler = self._weights.version, self._weights.model
        experiences, rewards = 0, []
        for pairs in _by_group(missing, self._settings.groups_per_write):
            rollout = partial(sampler.rollout, pairs, batch=batch, policy_version=version)
            with self._under_way.making(EID(batch, *pairs[0])):
                made = await anyio.to_thread.run_sync(rollout)
            receipt = await self._writer.write(made)
            if self._acknowledgements is not None:
                self._acknowledgements.note(receipt)
            experiences += len(made)
            last = {e.eid.rid: e.reward for e in made}
            rewards += [reward for reward in last.values() if reward is not None]
        await self._writer.seal(batch, await self._writer.stored(batch))
        mean = sum(rewards) / len(rewards) if rewards else None
        return BatchReport(batch, version, len(missing), experiences, mean, repaired)


def _by_group(pairs: Sequence[tuple[Key, int]], groups: int) -> list[list[tuple[Key, int]]]:
    """Return ``pairs`` in pieces of whole groups."""
    by_task: dict[Key, list[tuple[Key, int]]] = {}
    for pair in pairs:
        by_task.setdefault(pair[0], []).append(pair)
    tasks = list(by_task.values())
    pieces = (tasks[start : start + groups] for start in range(0, len(tasks), groups))
    return [[pair for task in piece for pair in task] for piece in pieces]


T = TypeVar("T")
M = TypeVar("M")

Rollout = Callable[[T, M], Awaitable[Sequence[Experience]]]
"""One attempt at a task with a model: the experiences of the run, one per step, in order."""

DIGEST_BYTES = 16

BATCHES_PER_LOOK = 256
"""Of how many batches one query asks who has them."""

REFUSED_TO_ALL = (401, 403, 404)
"""Statuses of a server that every rollout would get: a wrong key, URL or name of a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExploreOptions:
    """How `explore` goes through its tasks.

    Attributes:
        epochs: passes over the whole list.
        groups_per_batch: tasks that are planned, and later sealed, at once.
        rollouts_per_group: attempts at each task; these two default to what the experiment's
            configuration says, else to 8.
        concurrency: rollouts at the same time; a kill of the process loses at most this many.
        timeout_s: seconds that one attempt at a rollout may take; then it is a TimeoutError.
        attempts: how often a rollout is tried while it fails with an error of ``retry_on``.
        retry_on: errors that another attempt may mend: TimeoutError among them, and that the store
            refuses what the rollout returned. Any other error ends `explore` at once. What a server
            has refused is not tried again (see `RefusedRequestError`).
        retry_delay_s: seconds before the second attempt; doubled before each one after it.
        on_failure: what becomes of a rollout whose last attempt failed too: ``"raise"`` ends
            `explore`, and the next one makes what is missing; ``"leave_out"`` seals the batch
            without it, and warns.
        take_over: finish batches that another actor has begun, once no process of that name is
            there: a second explorer makes what a dead one left.
        max_batches: end after this call has begun so many batches; None: at the end of the list.
        acknowledgements: file that records what the store has acknowledged; None: no file.
        report: called with each batch once it is sealed.
    """

    epochs: int = 1
    groups_per_batch: int = 8
    rollouts_per_group: int = 8
    concurrency: int = 32
    timeout_s: float | None = None
    attempts: int = 3
    retry_on: tuple[type[Exception], ...] = (OSError, InvalidExperienceError)
    retry_delay_s: float = 1.0
    on_failure: Literal["raise", "leave_out"] = "raise"
    take_over: bool = False
    max_batches: int | None = None
    acknowledgements: Path | None = None
    report: Callable[[BatchReport], None] | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "groups_per_batch", "rollouts_per_group", "concurrency", "attempts"):
            self._require(name, _is_count(getattr(self, name)), "a number, 1 or more")
        most, seconds, delay = self.max_batches, self.timeout_s, self.retry_delay_s
        self._require(
            "max_batches", most is None or _is_count(most), "a number, 1 or more, or None"
        )
        some = seconds is None or (_is_seconds(seconds) and seconds > 0)
        self._require("timeout_s", some, "seconds, more than 0, or None")
        self._require("retry_delay_s", _is_seconds(delay) and delay >= 0, "seconds, 0 or more")
        kinds = type(self.retry_on) is tuple and all(map(_is_error, self.retry_on))
        self._require("retry_on", kinds, "a tuple of Exception classes")
        chosen = self.on_failure in ("raise", "leave_out")
        self._require("on_failure", chosen, "'raise' or 'leave_out'")
        told = self.report is None or callable(self.report)
        self._require("report", told, "a function of a BatchReport, or None")

    def _require(self, name: str, is_right: bool, what: str) -> None:  # noqa: FBT001 - of a line
        if not is_right:
            raise InvalidArgumentError(f"{name}={getattr(self, name)!r}: must be {what}")


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1


def _is_seconds(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _is_error(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, Exception)


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
    sizes = ("groups_per_batch", "rollouts_per_group")
    known = {name: experiment.config[name] for name in sizes if name in experiment.config}
    settings = ExploreOptions(**{**known, **options})
    await _Exploration(experiment, actor, tasks, rollout, model, settings).run()


@dataclass(slots=True)
class _Batch:
    """A planned batch whose runs are being made."""

    key: str
    repaired: bool
    missing: Sequence[tuple[Key, int]]
    done: int = 0
    experiences: int = 0
    left_out: int = 0
    rewards: list[float] = field(default_factory=list)

    def take(self, made: Sequence[Experience]) -> None:
        """Count one run."""
        self.done += 1
        self.experiences += len(made)
        self.left_out += not made
        if made and made[-1].reward is not None:
            self.rewards.append(made[-1].reward)


class _Exploration:
    def __init__(
        self,
        experiment: Experiment,
        actor: str,
        tasks: Sequence[Any] | Mapping[Any, Any],
        rollout: Rollout[Any, Any],
        model: Any,
        options: ExploreOptions,
    ) -> None:
        if not tasks:
            raise InvalidArgumentError("tasks is empty: give at least one task")
        self._writer = experiment.writer(actor)
        self._is_named = isinstance(tasks, Mapping)
        pairs = tasks.items() if isinstance(tasks, Mapping) else enumerate(tasks)
        self._tasks: dict[Key, Any] = dict(pairs)
        self._rollout = rollout
        self._model = model
        self._weights = Weights(experiment, model) if isinstance(model, Loadable) else None
        self._options = options
        self._slots = anyio.Semaphore(options.concurrency)
        self._under_way = UnderWay(self._writer, options.timeout_s)
        path = options.acknowledgements
        self._acknowledgements = None if path is None else Acknowledgements(path)

    async def run(self) -> None:
        """Go through the list."""
        under_way = self._under_way
        beside = [self._writer.stay_present, under_way.watch, under_way.stay_known]
        try:
            await self._writer.begin_exploring()
            if self._weights is not None:
                await self._weights.load_newest()
                beside.append(self._weights.follow)
            async with running(*beside):
                await self._make_all()
        finally:
            if self._acknowledgements is not None:
                self._acknowledgements.close()

    async def _make_all(self) -> None:
        begun, most = 0, self._options.max_batches
        async with task_group() as group:
            async for batch in self._claimed():
                await self._begin(batch, group)
                begun += 1
                if begun == most:
                    return

    async def _claimed(self) -> AsyncIterator[_Batch]:
        """Yield the batches that are this actor's to make."""
        batches = self._batches()
        taken: list[str] = []  # by others
        while page := dict(islice(batches, BATCHES_PER_LOOK)):
            rows = await self._writer.batches(list(page))
            known = await self._writer.contents_of(list(rows.values()))
            for batch, tasks in page.items():
                row = rows.get(batch)
                if row is not None and row.sealed_at is not None and self._is(row, tasks):
                    require_same_contents(batch, known, self._contents(tasks))
                    continue
                try:
                    planned = await self._plan(batch, tasks)
                except BatchTakenError:
                    taken.append(batch)
                    continue
                if not planned:
                    return
                missing = await self._writer.missing(batch)
                yield _Batch(batch, row is not None, missing)
            async for left in self._left_behind(taken):
                yield left
        async for left in self._left_behind(taken):  # somebody may have died meanwhile
            yield left

    async def _left_behind(self, taken: list[str]) -> AsyncIterator[_Batch]:
        """Yield, and take out of ``taken``, batches of other actors that are gone."""
        if not (self._options.take_over and taken):
            return
        for batch in await self._writer.take_over(taken):
            taken.remove(batch)
            yield _Batch(batch, repaired=True, missing=await self._writer.missing(batch))

    def _batches(self) -> Iterator[tuple[str, list[Key]]]:
        keys, size = list(self._tasks), self._options.groups_per_batch
        for epoch in range(self._options.epochs):
            for number, start in enumerate(range(0, len(keys), size)):
                yield f"epoch{epoch}-{number}", keys[start : start + size]

    def _is(self, row: BatchRow, tasks: Sequence[Key]) -> bool:
        same = list(map(str, row.tasks)) == list(map(str, tasks))
        return same and row.rollouts_per_group == self._options.rollouts_per_group

    async def _plan(self, batch: str, tasks: Sequence[Key]) -> bool:
        return await self._writer.plan(
            batch,
            tasks,
            self._options.rollouts_per_group,
            policy_version=None if self._weights is None else self._version,
            contents=self._contents(tasks),
        )

    def _contents(self, tasks: Sequence[Key]) -> bytes | None:
        """Return the digest of tasks that have no keys of their own, None if JSON cannot say it."""
        if self._is_named:
            return None
        try:
            said = json.dumps([self._tasks[task] for task in tasks], sort_keys=True)
        except (TypeError, ValueError, RecursionError):
            return None
        return hashlib.sha256(said.encode()).digest()[:DIGEST_BYTES]

    def _version(self) -> int:
        assert self._weights is not None
        return self._weights.version

    async def _begin(self, batch: _Batch, group: TaskGroup) -> None:
        """Start what is missing of a planned batch, each run as soon as there is a slot for it."""
        if not batch.missing:
            await self._seal(batch)
        for task, run in batch.missing:
            await self._slots.acquire()
            group.start_soon(self._make, batch, EID(batch.key, task, run))

    async def _make(self, batch: _Batch, run: EID) -> None:
        """Make one run and write it; seal the batch after its last one."""
        made = await self._attempted(run)
        # Only now: so a kill costs no more rollouts than run at the same time.
        self._slots.release()
        batch.take(made)
        if batch.done == len(batch.missing):
            await self._seal(batch)

    async def _attempted(self, run: EID) -> list[Experience]:
        """Return the experiences of a run, which are stored; none if it is left out."""
        options = self._options
        attempts = 1
        while isinstance(made := await self._attempt(run), Exception):
            if attempts == options.attempts or isinstance(made, RefusedRequestError):
                self._leave_out(run, made, attempts)
                return []
            await anyio.sleep(options.retry_delay_s * 2 ** (attempts - 1))
            attempts += 1
        return made

    def _leave_out(self, run: EID, failure: Exception, attempts: int) -> None:
        is_of_all = isinstance(failure, RefusedRequestError) and failure.status in REFUSED_TO_ALL
        if self._options.on_failure == "raise" or is_of_all:
            raise failure
        why = f"{type(failure).__name__}: {failure}"
        _logger.warning(
            "%s",
            one_line(f"rollout {run.rid} is left out after {counted(attempts, 'attempt')}: {why}"),
        )

    async def _attempt(self, run: EID) -> list[Experience] | Exception:
        """Return the experiences of a run, which are stored, or an error of ``retry_on``."""
        try:
            made = await self._once(run)
        except self._options.retry_on as error:
            return error
        try:
            await self._write(made)
        except InvalidArgumentError as error:  # of what was made; others are not the rollout's
            error.add_note(f"in the rollout {run.rid}")
            if not isinstance(error, self._options.retry_on):
                raise
            return error
        return made

    async def _write(self, made: Sequence[Experience]) -> None:
        if made:
            receipt = await self._writer.write(made)
            if self._acknowledgements is not None:
                self._acknowledgements.note(receipt)

    async def _once(self, run: EID) -> list[Experience]:
        model, version = self._model, None
        if self._weights is not None:
            model, version = self._weights.model, self._weights.version
        try:
            with anyio.fail_after(self._options.timeout_s), self._under_way.making(run):
                given = self._rollout(self._tasks[run.task], model)
                is_async = inspect.isawaitable(given)
                returned = await given if is_async else given
        except Exception as error:
            error.add_note(f"in the rollout {run.rid}")
            raise
        except anyio.get_cancelled_exc_class() as error:
            if anyio.current_effective_deadline() == -math.inf:
                raise  # all of `explore` is
            raise TrainingError(
                f"rollout {run.rid} was cancelled from within, by a task that it waited for: catch "
                "that error in the rollout, and return [] to leave the run out"
            ) from error
        if not is_async:
            raise InvalidArgumentError(
                f"rollout {run.rid} returned {kind_of(returned)} without being awaited: write it "
                "as an async function of a task and a model that returns a list of Experience"
            )
        made = [copy(one) for one in _listed(run, returned)]  # other runs may return the same ones
        for step, experience in enumerate(made):
            experience.eid = EID(run.batch, run.task, run.run, step)
            if version is not None:
                experience.info = {"model_version": version} | experience.info
        return made

    async def _seal(self, batch: _Batch) -> None:
        await self._writer.seal(batch.key, await self._writer.stored(batch.key))
        if self._options.report is None:
            return
        mean = sum(batch.rewards) / len(batch.rewards) if batch.rewards else None
        version = None if self._weights is None else self._weights.version
        runs = len(batch.missing) - batch.left_out
        self._options.report(
            BatchReport(
                batch.key, version, runs, batch.experiences, mean, batch.repaired, batch.left_out
            )
        )


def _listed(run: EID, returned: Any) -> list[Experience]:
    """Return the experiences that a rollout returned.

    Raises:
        InvalidArgumentError: they are something else.
    """
    if isinstance(returned, str | bytes | Mapping) or not isinstance(returned, Iterable):
        wrong = kind_of(returned)
    else:
        made = list(returned)
        others = [one for one in made if not isinstance(one, Experience)]
        if not others:
            return made
        wrong = f"{kind_of(returned)} that holds {kind_of(others[0])}"
    raise InvalidArgumentError(
        f"rollout {run.rid} returned {wrong}: return a list of Experience, or [] to leave the run "
        "out"
    )
