"""The lease of a trainer: taken at the start, renewed while it lives, given back at the end."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio

from trinity_buffer.errors import (
    LeaseHeldError,
    LeaseLostError,
    StoreBusyError,
    StoreError,
    StoreUnavailableError,
)
from trinity_buffer.pipeline.background import running
from trinity_buffer.pipeline.events import now_us
from trinity_buffer.pipeline.lease_holders import (
    HEARTBEATS_PER_TTL,
    TTL_S,
    Held,
    LeaseWatch,
    forget_owner,
    is_dead,
    owner_name,
)
from trinity_buffer.pipeline.presence import Presence
from trinity_buffer.pipeline.spoken_wait import SpokenWait
from trinity_buffer.pipeline.stall import Stall
from trinity_buffer.store import log, promises
from trinity_buffer.store.database import Database
from trinity_buffer.store.log import NewEvent, Place
from trinity_buffer.store.promises import place_of
from trinity_buffer.store.transaction import Transaction, lock_experiment

_logger = logging.getLogger(__name__)


class TrainerLease:
    """A held lease.

    Attributes:
        consumer: whose it is.
        presence: of the trainer, said again with the heartbeats.
        token: fences those who held it before.
        lost: why it is not held any more, once a newer token was seen.
    """

    def __init__(self, database: Database, experiment: int, consumer: str, ttl_s: float) -> None:
        self._database = database
        self._experiment = experiment
        self.consumer = consumer
        self._ttl_us = int(ttl_s * 1e6)
        self.owner = owner_name()
        self.presence = Presence(database, experiment, "trainer", consumer)
        self.token = 0
        self.lost: LeaseLostError | None = None

    async def acquire(self, *, wait: bool) -> None:
        """Take the lease; with ``wait``, as soon as its holder lets go, dies or falls silent.

        Who waits judges silence by its own monotonic clock: a lease that it has not seen renewed
        for its own ``ttl_s``. Clocks of other machines, or one that was moved, take no lease from
        anybody who lives.

        Raises:
            LeaseHeldError: somebody holds it, and ``wait`` is False.
        """
        watch = LeaseWatch(self._ttl_us / 1e6)

        async def tell() -> str:
            where = "another process" if held is None else place_of(held[0])
            return (
                f"trainer {self.consumer!r} is held by {where}, renewed {watch.renewed_s:.0f} s "
                "ago: stop that process, or choose another consumer name"
            )

        stall = Stall(self._database, self._experiment)
        wait_for_it = SpokenWait(self._database.changes, tell, stall=stall)
        while True:
            state = await self._database.changes.state()
            held = await self._database.read(promises.holder, self._experiment, self.consumer)
            silent = watch.is_silent(held)
            free = held is None or is_dead(held[0]) or (silent if wait else held[2] <= now_us())
            if free and await self._database.write(self._take, held):
                return
            if not wait:
                raise LeaseHeldError(self._held_by(held))
            await wait_for_it.changed(state, timeout_s=min(1.0, self._ttl_us / 4e6))

    def _take(self, tx: Transaction, seen: Held) -> bool:
        """Take the lease if it is as it was ``seen``, with nobody alive; return whether it was."""
        lock_experiment(tx, self._experiment)
        held = promises.holder(tx, self._experiment, self.consumer)
        if held != seen and (held is None or held[0] != self.owner):
            return False
        self.token = promises.acquire(
            tx,
            self._experiment,
            self.consumer,
            owner=self.owner,
            now_us=now_us(),
            ttl_us=self._ttl_us,
            dead=None if held is None else held[0],
        )
        return True

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
        of = self._experiment if experiment is None else experiment
        for key in sorted({of, self._experiment}):  # locks, always in one order
            lock_experiment(tx, key)
        last, end = promises.require(tx, self._experiment, self.consumer, token=self.token)
        if committed not in (None, last):  # by a call that was cancelled, and went on all the same
            raise StoreError(
                f"trainer {self.consumer!r}: step {last} is the last committed one, where this "
                f"commit follows step {committed}: open the stream again, it resumes from there"
            )
        end = end if of == self._experiment else None
        return log.append(tx, of, events, actor=self.consumer, now_us=now_us(), last=end)

    async def is_held(self) -> bool:
        """Return whether nobody has taken over, by the store as it is now."""
        held = await self._database.read(promises.holder, self._experiment, self.consumer)
        return held is not None and held[1] == self.token

    def _held_by(self, held: Held) -> str:
        who = "another process" if held is None else place_of(held[0])
        return (
            f"trainer {self.consumer!r} is at work in {who}: wait for it, stop that process, or "
            "choose another consumer name"
        )

    async def keep(self) -> None:
        """Renew until cancelled, or until a newer token is seen.

        A store that cannot be reached ends nothing here: a lease that nobody took, though its time
        is over, can still be renewed, and whoever works with the store hears of it.
        """
        while self.lost is None:
            await anyio.sleep(self._ttl_us / 1e6 / HEARTBEATS_PER_TTL)
            try:
                await self._database.write(self._renew)
            except LeaseLostError as error:
                self.lost = error
            except (StoreUnavailableError, StoreBusyError) as error:
                _logger.warning("trainer %r cannot renew its lease: %s", self.consumer, error)

    def _renew(self, tx: Transaction) -> None:
        expires = now_us() + self._ttl_us  # by the clock as it is once the transaction has begun
        promises.renew(tx, self._experiment, self.consumer, token=self.token, expires_at_us=expires)
        self.presence.note(tx)

    async def release(self) -> None:
        """Give the lease back; its holder is not there any more."""
        forget_owner(self.owner)
        await self.presence.gone()
        await self._database.try_to_write(
            promises.release, self._experiment, self.consumer, token=self.token
        )


@asynccontextmanager
async def hold_lease(
    database: Database, experiment: int, consumer: str, *, ttl_s: float = TTL_S, wait: bool = True
) -> AsyncIterator[TrainerLease]:
    """Hold the lease of ``consumer`` inside the context, renewing it in the background.

    Raises:
        LeaseHeldError: somebody holds it, and ``wait`` is False.
    """
    lease = TrainerLease(database, experiment, consumer, ttl_s)
    try:
        await lease.acquire(wait=wait)
        async with running(lease.keep, lease.presence.keep):
            yield lease
    finally:
        with anyio.CancelScope(shield=True):
            await lease.release()
