"""Leases: one process at a time decides for a strategy's name, or trains under a trainer's.

A lease is taken when it is free, its holder is dead, or its holder fell silent by the monotonic
clock of the process that waits; it is renewed while its holder runs, and given back at the end.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import anyio
from typing_extensions import override

from trinity_buffer import errors
from trinity_buffer.events import NewEvent, now_us
from trinity_buffer.options import StepOptions
from trinity_buffer.pipeline.coordination import waiting
from trinity_buffer.store import leases, log
from trinity_buffer.store.connection import Database
from trinity_buffer.store.leases import describe_owner
from trinity_buffer.store.log import Place
from trinity_buffer.store.transaction import Transaction

TTL_S = StepOptions.lease_ttl_s
HEARTBEATS_PER_TTL = 4
LOOKED_EVERY_S = 2.0
"""Who waits for a lease looks at it oftener."""


def owner_name() -> str:
    """Return ``host:pid:start:random``, by which others on this machine see whether we live."""
    pid, random = os.getpid(), uuid.uuid4().hex[:8]
    name = f"{waiting.this_host()}:{pid}:{waiting.start_of(pid)}:{random}"
    _OWNERS.add(name)
    return name


_OWNERS = set[str]()
"""The owners of this process that may hold a lease."""


def is_dead(owner: str) -> bool:
    """Return whether ``owner`` is of this machine and certainly gone: its process, or its stream.

    A process that is only paused is not dead: its lease runs out by itself.
    """
    host, pid, start, _ = owner.rsplit(":", 3)
    if not waiting.is_this_host(host) or not pid.isdigit():
        return False
    if int(pid) == os.getpid() and start == waiting.start_of(os.getpid()):
        return owner not in _OWNERS
    return not waiting.lives(int(pid), start)


Held: TypeAlias = tuple[str, int, int] | None
"""(owner, token, expires_at) of a lease, as `leases.holder` returns it."""


@dataclass(slots=True)
class LeaseWatch:
    """Judges, by the monotonic clock of who watches, whether a lease can be taken.

    A lease that we have not seen renewed for ``ttl_s`` can. Clocks of other machines, or one that
    was moved, take no lease from anybody who lives.

    Attributes:
        ttl_s: how long a lease lives that is not renewed.
        seen: the lease as it was at the last look.
        since, looked: when it was first seen just so, and when it was looked at last.
        renewed: whether it was seen to change.
    """

    ttl_s: float
    seen: Held = None
    since: float = field(default_factory=time.monotonic)
    looked: float = field(default_factory=time.monotonic)
    renewed: bool = False

    def is_free(self, held: Held) -> bool:
        """Return whether no live process has the lease: its holder is gone, or fell silent.

        Time in which the store was away does not count: the holder could not renew it either.
        """
        if held is None or is_dead(held[0]):
            return True
        now = time.monotonic()
        if held != self.seen:
            self.renewed = self.seen is not None
            self.seen, self.since = held, now
        elif now - self.looked > self.ttl_s / HEARTBEATS_PER_TTL + LOOKED_EVERY_S:
            self.since = now
        self.looked = now
        return now - self.since >= self.ttl_s

    @property
    def renewed_s(self) -> float:
        """How many seconds ago it was renewed; by its holder's clock where we did not see it."""
        silent_s = time.monotonic() - self.since
        if self.renewed or self.seen is None:
            return silent_s
        return max(silent_s, (now_us() - self.seen[2]) / 1e6 + self.ttl_s)


_logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Lease:
    """A claim on the name of a strategy or a trainer.

    Attributes:
        database: of the store.
        experiment: key of the experiment.
        consumer: name of the strategy or trainer.
        ttl_s: after how long without a heartbeat another process may take it, by the monotonic
            clock of the process that waits for it.
        owner: who holds it.
        token: fences those who held it before.
    """

    database: Database
    experiment: int
    consumer: str
    ttl_s: float = TTL_S
    owner: str = field(default_factory=owner_name)
    token: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.of = self.experiment, self.consumer
        self._watch = LeaseWatch(self.ttl_s)

    def take(self, tx: Transaction, seen: Held) -> bool:
        """Take the lease if it is as it was ``seen``, or ours; return whether it was."""
        tx.lock(self.experiment)
        held = leases.holder(tx, *self.of)
        if held != seen and (held is None or held[0] != self.owner):
            return False
        _OWNERS.add(self.owner)  # again, if its consumer runs again
        ttl_us = int(self.ttl_s * 1e6)
        # Above the trainer's tokens in the log too, so that it fences if the table was lost.
        self.token = leases.acquire(tx, *self.of, owner=self.owner, now_us=now_us(), ttl_us=ttl_us)
        return True

    def renew(self, tx: Transaction) -> None:
        """Extend it, if it is still ours.

        Put and not extended: the process that took it while we were paused may have left again, and
        a lease without an owner would be taken from a live trainer.
        """
        self.standing(tx)
        expires = now_us() + int(self.ttl_s * 1e6)  # as it is once the transaction has begun
        leases.put(tx, *self.of, owner=self.owner, token=self.token, expires_at_us=expires)

    def standing(self, tx: Transaction) -> leases.Standing:
        """Return the last committed step and the end of the log, if the lease is still held.

        No other process can take it until the transaction ends.

        Raises:
            LeaseLostError: another took it.
        """
        # An expired lease still counts as held, unless another process has taken it since; so does
        # one whose row is gone, as long as no event has a newer token.
        return leases.require(tx, *self.of, token=self.token)

    async def release(self) -> None:
        """Give it back: another process may take it at once."""
        await self.database.try_to_write(leases.release, *self.of, owner=self.owner)


@dataclass(eq=False)
class StrategyLease(Lease):
    """Taken by the first consumer of a strategy's name, renewed while it runs, then given back.

    Two consumers of one process take turns as those of two processes do.

    Attributes:
        alone: decide without a lease, even if others do.
        is_held: whether this consumer decides, as far as it knows: `standing` knows.
        held_by: who holds it in our place, when we asked last.
    """

    alone: bool = False
    is_held: bool = field(default=False, init=False)
    held_by: str | None = field(default=None, init=False)
    _took: bool = field(default=False, init=False)

    async def ask(self) -> bool:
        """Return whether this process decides; take the lease if no live process has it."""
        while not (self.is_held or self.alone):
            held = await self.database.read(leases.holder, *self.of)
            if held is not None and held[0] == self.owner:
                self.is_held, self.token = True, held[1]
            elif held is None or self._watch.is_free(held):
                self._took = True  # also if we are cancelled while it is being taken
                self.is_held = self._took = await self.database.write(self.take, held)
                if self.is_held and self.held_by is not None:
                    who = describe_owner(self.held_by if held is None else held[0])
                    silent = f"was not heard of for {self._watch.ttl_s:g} s"
                    gone = "is gone" if held is not None and is_dead(held[0]) else silent
                    why = "decides no more" if held is None else gone
                    text = f"strategy {self.consumer!r} decides now: {who} {why}"
                    _logger.warning("%s", waiting.one_line(text))
            else:
                self.held_by = held[0]
                if self._took:
                    # We have lost it. A strategy that computes for longer than the lease, and lets
                    # nothing else run meanwhile, would lose it in every process in turn, and decide
                    # nothing: so we wait twice as long as before.
                    self._took = False
                    self._watch = LeaseWatch(2 * self._watch.ttl_s)
                return False
        self.is_held, self.held_by = True, None
        return True

    def invalidate(self, why: errors.StoreError) -> None:
        """Note that another has decided, which is ``why`` a commit failed: `ask` looks again."""
        self.is_held = False
        if isinstance(why, errors.LeaseLostError):
            _logger.warning(
                "%s, and computed again. We lost the lease because this process was paused, or "
                "`add` blocked it, for longer than lease_ttl_s=%g: if `add` takes so long, raise "
                "that",
                waiting.one_line(f"{why}"),
                self.ttl_s,
            )

    @override
    def standing(self, tx: Transaction) -> leases.Standing:
        if self.alone:
            return leases.Standing(0, None)
        # By its owner: its token is in no event, so that who had it since may have left no trace. A
        # row that is gone counts as lost, unlike a trainer's.
        return leases.require(tx, *self.of, owner=self.owner)

    def holder_text(self) -> str:
        """Return who decides in our place."""
        who = "another process" if self.held_by is None else describe_owner(self.held_by)
        return f"strategy {self.consumer!r} stands by: {who} decides"

    async def keep(self) -> None:
        """Renew it while it is held, until cancelled; who decides hears of the store's errors."""
        while not self.alone:
            await anyio.sleep(self.ttl_s / HEARTBEATS_PER_TTL)
            if self.is_held:
                try:
                    await self.database.write(self.renew)
                except errors.LeaseLostError:
                    self.is_held = False
                except errors.StoreError:
                    continue

    @override
    async def release(self) -> None:
        _OWNERS.discard(self.owner)
        self.is_held = False
        if self._took:
            with anyio.CancelScope(shield=True):
                await super().release()


@dataclass(eq=False)
class TrainerLease(Lease):
    """Of one stream of a trainer, taken before its first step.

    Attributes:
        presence: of the trainer, recorded again with the heartbeats.
        lost: why it is not held any more, once a newer token was seen.
    """

    lost: errors.LeaseLostError | None = field(default=None, init=False)

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self.presence = waiting.Presence(self.database, self.experiment, "trainer", self.consumer)

    async def acquire(self, *, wait: bool) -> None:
        """Take the lease; with ``wait``, as soon as its holder ends, dies or falls silent.

        Raises:
            LeaseHeldError: another process holds it, and ``wait`` is False.
        """

        async def tell() -> str:
            return (
                f"trainer {self.consumer!r} is held by {who}, renewed {self._watch.renewed_s:.0f} "
                "s ago: stop that process, or choose another consumer name"
            )

        wait_for_it = waiting.ReportedWait(self.database, self.experiment, tell)
        while True:
            state = await self.database.changes.state()
            held = await self.database.read(leases.holder, *self.of)
            who = "another process" if held is None else describe_owner(held[0])
            has_expired = held is not None and held[2] <= now_us()
            free = self._watch.is_free(held) or (has_expired and not wait)
            if free and await self.database.write(self.take, held):
                return
            if not wait:
                raise errors.LeaseHeldError(
                    f"trainer {self.consumer!r} is at work in {who}: wait for it, stop that "
                    "process, or choose another consumer name"
                )
            await wait_for_it.changed(state, timeout_s=min(1.0, self.ttl_s / 4))

    def append(
        self,
        tx: Transaction,
        events: Sequence[NewEvent],
        *,
        experiment: int | None = None,
        committed: int | None = None,
    ) -> list[Place]:
        """Append ``events`` of the trainer, by default to its own experiment; return their places.

        Args:
            committed: the last committed step that the events follow; None: they follow any.

        Raises:
            LeaseLostError: a newer token exists.
            StoreError: another step is the last committed one.
        """
        to = self.experiment if experiment is None else experiment
        for key in sorted({to, self.experiment}):  # locks, always in one order
            tx.lock(key)
        # Who had the lease meanwhile, and neither handed out nor committed a step, is passed over:
        # no event has its token. If it went back to an earlier step, `last` shows that.
        last, end = self.standing(tx)
        if committed not in (None, last):  # by a call that was cancelled, and went on all the same
            raise errors.StoreError(
                f"trainer {self.consumer!r}: step {last} is the last committed one, where this "
                f"commit follows step {committed}: open the stream again, it resumes from there"
            )
        ours = [(self.consumer, event) for event in events]
        return log.append(tx, to, ours, last=end if to == self.experiment else None)

    async def is_held(self) -> bool:
        """Return whether no other process has taken over, by the store as it is now."""
        held = await self.database.read(leases.holder, *self.of)
        return held is not None and held[1] == self.token

    async def keep(self) -> None:
        """Renew until cancelled, or until a newer token is seen.

        An error of the store ends nothing here, be it a full disk or a server that is away: an
        expired lease can still be renewed unless another process took it, and the code that uses
        the store reports the error.
        """
        while self.lost is None:
            await anyio.sleep(self.ttl_s / HEARTBEATS_PER_TTL)
            try:
                await self.database.write(self.renew)
            except errors.LeaseLostError as error:
                self.lost = error
            except errors.StoreError as error:
                _logger.warning("trainer %r cannot renew its lease: %s", self.consumer, error)

    @override
    def renew(self, tx: Transaction) -> None:
        super().renew(tx)
        if (heartbeat := self.presence.due_row()) is not None:
            leases.record_presence(tx, self.experiment, heartbeat)

    @override
    async def release(self) -> None:
        _OWNERS.discard(self.owner)  # also if it cannot be given back, it is free
        await self.presence.gone()
        await super().release()


@asynccontextmanager
async def hold_lease(
    database: Database, experiment: int, consumer: str, *, ttl_s: float = TTL_S, wait: bool = True
) -> AsyncIterator[TrainerLease]:
    """Hold the lease of ``consumer`` inside the context, renewing it in the background.

    Raises:
        LeaseHeldError: another process holds it, and ``wait`` is False.
    """
    lease = TrainerLease(database, experiment, consumer, ttl_s)
    try:
        await lease.acquire(wait=wait)
        # A lost lease does not end the body: who delivers or commits the next step raises it.
        async with waiting.task_group(lease.keep, lease.presence.keep):
            yield lease
    finally:
        with anyio.CancelScope(shield=True):
            await lease.release()
