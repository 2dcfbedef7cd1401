"""The lease of a strategy's name: the process that holds it decides, the others stand by."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio

from trinity_buffer.errors import LeaseLostError, StoreError
from trinity_buffer.pipeline.background import running
from trinity_buffer.pipeline.events import now_us
from trinity_buffer.pipeline.experiment_handle import ExperimentHandle
from trinity_buffer.pipeline.lease_holders import (
    HEARTBEATS_PER_TTL,
    TTL_S,
    Held,
    LeaseWatch,
    is_dead,
    owner_of_process,
)
from trinity_buffer.pipeline.spoken_wait import one_line
from trinity_buffer.store import promises
from trinity_buffer.store.log import Place
from trinity_buffer.store.promises import place_of
from trinity_buffer.store.transaction import Transaction, lock_experiment

_logger = logging.getLogger(__name__)


class StrategyLease:
    """Taken by the first process of a strategy's name, renewed while it runs, then given back.

    It is of a process, not of a consumer: two consumers of one process never wait for each other,
    since one may be the other's caller.

    Args:
        experiment: whose log is read; its ``lease_ttl_s`` is after how long a holder that is not
            heard of loses the lease, by the monotonic clock of whoever waits for it.
        name: of the annotation set.
        alone: decide without any lease, whoever else does.

    Attributes:
        is_held: whether this process holds it, as far as it knows: `require` knows.
        holder: who holds it in our place, when we asked last.
    """

    def __init__(self, experiment: ExperimentHandle, name: str, *, alone: bool = False) -> None:
        self._database, self._key = experiment.database, experiment.key
        self._name = name
        self._alone = self.is_held = alone
        self._ttl_s = self._patience_s = float(experiment.config.get("lease_ttl_s", TTL_S))
        self._watch = LeaseWatch(self._patience_s)
        self._took = False
        self.holder: str | None = None

    async def ask(self) -> bool:
        """Return whether this process decides; take the lease if nobody has it who lives."""
        while not self.is_held:
            held = await self._database.read(promises.holder, self._key, self._name)
            if held is None or is_dead(held[0]) or self._watch.is_silent(held):
                self._took = True  # also if we are cancelled while it is being taken
                self.is_held = await self._database.write(self._take, held)
                if self.is_held and self.holder is not None:
                    self._say_that_we_decide(self.holder, held)
            elif held[0] == owner_of_process():
                self.is_held = True
            else:
                self.holder = held[0]
                self._grow_patient()
                return False
        self.holder = None
        return True

    def doubt(self, why: StoreError) -> None:
        """Note that another has decided, which is ``why`` a commit failed: `ask` looks again."""
        self.is_held = self._alone
        if isinstance(why, LeaseLostError):
            _logger.warning(
                "%s, and computed again. We lost the lease because this process was paused, or "
                "`add` blocked it, for longer than lease_ttl_s=%g: if `add` takes so long, raise "
                "that",
                one_line(f"{why}"),
                self._ttl_s,
            )

    def _say_that_we_decide(self, before: str, held: Held) -> None:
        """Say why, after ``before`` decided in our place; ``held`` is the lease that we took."""
        if held is None:
            why = "has ended"
        elif is_dead(held[0]):
            why = "is gone"
        else:
            why = f"was not heard of for {self._patience_s:g} s"
        who = place_of(before if held is None else held[0])
        _logger.warning("%s", one_line(f"strategy {self._name!r} decides now: {who} {why}"))

    def require(self, tx: Transaction) -> Place | None:
        """Return where the log ends, if that was asked, and this process holds the lease.

        It goes on holding it until the transaction ends: nobody can take it meanwhile.

        Raises:
            LeaseLostError: another took it, whoever holds it now.
        """
        if self._alone:
            return None
        owner = owner_of_process()
        return promises.require_holder(tx, self._key, self._name, owner=owner)

    def told(self) -> str:
        """Return who decides in our place."""
        who = "another process" if self.holder is None else place_of(self.holder)
        return f"strategy {self._name!r} stands by: {who} decides"

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Renew the lease inside the context while it is held, and give it back at the end."""
        try:
            async with running(self._keep):
                yield
        finally:
            if self._took:
                with anyio.CancelScope(shield=True):
                    await self._database.try_to_write(self._release)

    def _grow_patient(self) -> None:
        """Wait for others twice as long as before, if we have lost the lease to one.

        A strategy that computes for longer than the lease, and lets nothing else run meanwhile,
        would else lose it in every process in turn, and decide nothing.
        """
        if self._took:
            self._took = False
            self._patience_s *= 2
            self._watch = LeaseWatch(self._patience_s)

    def _take(self, tx: Transaction, seen: Held) -> bool:
        """Take the lease if it is as it was ``seen``; return whether it was."""
        lock_experiment(tx, self._key)
        if promises.holder(tx, self._key, self._name) != seen:
            return False
        promises.acquire(
            tx,
            self._key,
            self._name,
            owner=owner_of_process(),
            now_us=now_us(),
            ttl_us=int(self._ttl_s * 1e6),
            dead=None if seen is None else seen[0],
        )
        return True

    async def _keep(self) -> None:
        """Renew until cancelled; where the store cannot be reached, whoever decides hears of it."""
        while not self._alone:
            await anyio.sleep(self._ttl_s / HEARTBEATS_PER_TTL)
            if self.is_held:
                with suppress(StoreError):
                    self.is_held = await self._database.write(self._renew)

    def _renew(self, tx: Transaction) -> bool:
        expires = now_us() + int(self._ttl_s * 1e6)  # as it is once the transaction has begun
        owner = owner_of_process()
        return promises.prolong(tx, self._key, self._name, owner=owner, expires_at_us=expires)

    def _release(self, tx: Transaction) -> None:
        promises.let_go(tx, self._key, self._name, owner=owner_of_process())
        tx.announce()
