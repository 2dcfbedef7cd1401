"""How the ranks of a data-parallel trainer find each other through the log, and commit together.

Every rank that opens the stream records that it joined. Rank 0, which holds the lease, does so too:
that is its call, and a rank that hears one while it waits joins again. Rank 0 waits for one join of
each behind its call and records an assembly that names them. A rank belongs to the assembly that
answers its own join and to no other, so processes of an earlier life, however many they were, can
neither be mistaken for living ones nor hold a commit up, however long anything took.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import anyio
import anyio.lowlevel
import torch.distributed

from trinity_buffer import events
from trinity_buffer.codec.objects import new_event
from trinity_buffer.errors import InvalidArgumentError, LeaseLostError
from trinity_buffer.pipeline.coordination import waiting
from trinity_buffer.pipeline.coordination.lease import LeaseWatch, TrainerLease
from trinity_buffer.pipeline.handle import ExperimentHandle, decoded
from trinity_buffer.pipeline.manifest import rows_by_rank
from trinity_buffer.pipeline.train.options import StreamOptions
from trinity_buffer.pipeline.train.step import Delivered
from trinity_buffer.store import leases, log
from trinity_buffer.store.leases import PresenceRow, describe_owner
from trinity_buffer.store.log import StoredEvent
from trinity_buffer.store.transaction import Transaction

OfRanks = events.RankJoined | events.RanksAssembled | events.StepPartDone | events.StreamEnded
"""Events by which the ranks communicate."""


def require_one_process() -> None:
    """Raise if this process is one of several ranks and opens a stream as if it were alone.

    Each would be a trainer on its own: the first would train, and the others would wait for it.

    Raises:
        InvalidArgumentError: it is; the message names the missing options.
    """
    rank, world_size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "1")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank = str(torch.distributed.get_rank())
        world_size = str(torch.distributed.get_world_size())
    if rank and world_size != "1":
        raise InvalidArgumentError(
            f"this process is rank {rank} of {world_size} (RANK, WORLD_SIZE), and the train stream "
            f"was opened without them: give rank={rank}, world_size={world_size} where every rank "
            "trains its part and gradients are averaged, as `Trainer` does; or rank=0, "
            "world_size=1 where this process alone trains"
        )


class RankSession:
    """One rank's view of the assembly it belongs to; with one rank it has nothing to do.

    Attributes:
        committed: the last committed step when the ranks assembled.
        wait: wait for the other ranks.
        ended: the last step of the stream, once rank 0 has recorded it.
    """

    def __init__(
        self, experiment: ExperimentHandle, options: StreamOptions, presence: waiting.Presence
    ) -> None:
        self.committed = 0
        self.ended: int | None = None
        self._experiment = experiment
        self._database = experiment.database
        self._name, self._rank = options.consumer, options.rank
        self._world, self._ttl_s = options.world_size, options.lease_ttl_s
        self._watch = LeaseWatch(options.lease_ttl_s)
        self._heard: dict[tuple[str, int], LeaseWatch] = {}  # from processes of other machines
        self._position = 0  # of the assembly
        self._read_up_to = 0
        self._joined = 0  # position of its own last join; of rank 0, its call
        self._called = False  # since then
        self._joins: dict[int, int] = {}  # rank -> position of its last join
        self._rows: dict[tuple[int, int], int] = {}  # (rank, step) -> rows it took
        self._superseded = ""
        self._lacking = ""
        # Rank 0 is present as the trainer, and waits for processes alone, whose end it detects.
        self._presence = presence if self._rank else None
        key = experiment.key if self._rank else None
        self.wait = waiting.ReportedWait(self._database, key, self._waiting_for, self._presence)

    async def _waiting_for(self) -> str:
        return f"rank {self._rank} of trainer {self._name!r} waits for {self._lacking}"

    # -- rank 0
    # ------------------------------------------------------------------------------------------

    async def assemble(self, lease: TrainerLease, committed: int) -> None:
        """Wait for all ranks, then record their assembly and the step after which they begin."""
        if self._world == 1:
            return
        others = set(range(1, self._world))
        await self._join()
        while True:
            state = await self._database.changes.state()
            await self._read()
            if not (absent := sorted(others - self._joins.keys())):
                break
            self._lacking = (
                f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))} of {self._world} to "
                f"open the stream: start every rank with world_size={self._world}"
            )
            await self.wait.changed(state, timeout_s=self._ttl_s / 4)
            if lease.lost is not None:
                raise lease.lost
        self.wait.over()
        joins = [self._joins[rank] for rank in sorted(others)]
        assembled = events.RanksAssembled(
            consumer=self._name, token=lease.token, committed_step=committed, joins=joins
        )
        self._position = await self._append(assembled, token=lease.token)
        self.committed = committed

    async def all_parts(self, delivered: list[Delivered], lease: TrainerLease) -> list[list[int]]:
        """Wait until every other rank has recorded that its part of the steps is done.

        Args:
            delivered: the steps about to be committed, in order.
            lease: lease of the trainer.

        Returns:
            The number of rows that each rank took, for each step.

        Raises:
            LeaseLostError: another process took over, or a rank started again, has left, or is
                gone: at once where its process was of this machine, else after `UNSEEN_S`.
            InvalidArgumentError: a rank took too few or too many rows of a step.
        """
        others, steps = range(1, self._world), [of.manifest.step for of in delivered]
        while True:
            state = await self._database.changes.state()
            await self._read()
            if not (late := [rank for rank in others if (rank, steps[-1]) not in self._rows]):
                break
            self._lacking = (
                f"{await self._late(late, steps[-1])} to commit step {steps[-1]}: every rank calls "
                "commit, and if one is gone, start all of them again"
            )
            await self.wait.changed(state, timeout_s=min(self._ttl_s, waiting.UNSEEN_S) / 4)
            if lease.lost is not None:
                raise lease.lost
        self.wait.over()
        self._rows = {key: rows for key, rows in self._rows.items() if key[1] >= steps[0]}
        rows = []
        for step, of in zip(steps, delivered, strict=True):
            taken = [of.rows, *(self._rows.get((rank, step), 0) for rank in others)]
            if taken != (dealt := rows_by_rank(of.manifest)):
                raise InvalidArgumentError(
                    f"commit of step {step}: its ranks took {taken} rows, they were dealt "
                    f"{dealt}: start all ranks again, they resume from the last commit"
                )
            rows.append(taken)
        return rows

    async def _late(self, ranks: Sequence[int], step: int) -> str:
        """Describe these ranks, which are late with ``step``, and when each was last seen.

        Raises:
            LeaseLostError: one has left, or is gone.
        """
        processes = await self._database.read(leases.processes, self._experiment.key)
        late = []
        for rank in ranks:
            who = (f"rank {rank}", self._name)
            lives = [row for row in processes if (row.role, row.name) == who]
            place = waiting.describe_process(lives[0]) if lives else "which has left"
            if all(map(self._is_gone, lives)):
                await self._read()  # it may have finished its part before it ended
                await anyio.lowlevel.checkpoint_if_cancelled()  # perhaps all of them are
                if (rank, step) not in self._rows:
                    raise LeaseLostError(
                        f"rank {rank} of trainer {self._name!r} ({place}) is gone: start all ranks "
                        "again; they resume from the last commit"
                    )
            late.append(f"rank {rank} ({place})")
        return " and ".join(late)

    def _is_gone(self, row: PresenceRow) -> bool:
        """Return whether the process of a rank has ended, or fell silent on another machine.

        One of this machine may be paused for as long as it lives.
        """
        if waiting.is_this_host(row.host):
            return waiting.has_ended(row)
        process = row.host, row.pid
        heard = self._heard.setdefault(process, LeaseWatch(waiting.UNSEEN_S))
        return heard.is_free((f"{row.host}:{row.pid}::", 0, row.last_seen))

    async def end(self, last_step: int) -> None:
        """Tell the other ranks that there are no steps after ``last_step``."""
        if self._world > 1:
            at = self._position
            await self._append(events.StreamEnded(consumer=self._name, assembly=at, step=last_step))

    # -- the other ranks
    # ------------------------------------------------------------------------------------------

    async def join(self) -> None:
        """Record that this rank joined, and wait for the assembly that names it.

        Raises:
            InvalidArgumentError: rank 0 was started with another number of ranks.
        """
        await self._join()
        while not self._position:
            state = await self._database.changes.state()
            await self._read()
            if self._called:
                await self._join()
            elif not self._position:
                self._lacking = (
                    "rank 0, which holds the lease and calls the others: start it with "
                    f"world_size={self._world}"
                )
                await self.wait.changed(state)
        self.wait.over()

    async def part_done(self, step: int, rows: Sequence[int]) -> None:
        """Record that this rank went through ``step``.

        Args:
            step: the last step.
            rows: number of rows it took of each step since the last call.

        Raises:
            LeaseLostError: the ranks assembled anew without this one.
        """
        await self._read()
        done = events.StepPartDone(
            consumer=self._name, assembly=self._position, rank=self._rank, step=step, rows=rows
        )
        await self._append(done)

    async def wait_for_news(self, state: Any) -> None:
        """Wait for a commit after ``state``.

        Raises:
            LeaseLostError: rank 0 is gone, or the ranks assembled anew without this one.
        """
        # Lease before log: rank 0 releases the lease only after its last event, so a lease that is
        # gone means that the log is complete.
        held = await self._database.read(leases.holder, self._experiment.key, self._name)
        is_gone = self._watch.is_free(held)
        await self._read()
        if self.ended is not None:
            return
        if held is None or is_gone:
            raise LeaseLostError(
                f"rank 0 of trainer {self._name!r} is gone: start all ranks again; they resume "
                "from the last commit"
            )
        self._lacking = f"rank 0 ({describe_owner(held[0])}) to hand out the next step"
        await self.wait.changed(state, timeout_s=self._ttl_s / 4)

    # -- reading
    # ------------------------------------------------------------------------------------------

    async def _join(self) -> None:
        here = events.RankJoined(consumer=self._name, rank=self._rank, world_size=self._world)
        self._joined = self._read_up_to = await self._append(here, self._presence)
        self._called = False

    async def _append(
        self, fact: OfRanks, presence: waiting.Presence | None = None, *, token: int | None = None
    ) -> int:
        key, event = self._experiment.key, new_event(fact)
        heartbeat = None if presence is None else presence.first()

        def append(tx: Transaction) -> list[log.Place]:
            if token is not None:
                leases.require(tx, key, self._name, token=token)
            if heartbeat is not None:  # a rank that joined and is not there has left
                leases.record_presence(tx, key, heartbeat)
            return log.append(tx, key, [(self._name, event)])

        with anyio.CancelScope(shield=True):
            places = await self._database.write(append)
        return places[0].position

    async def _read(self) -> None:
        """Apply the events of ranks since the last call.

        Raises:
            LeaseLostError: the ranks assembled anew without this one, or are about to.
        """
        key, after, kinds = self._experiment.key, self._read_up_to, events.kinds_of(OfRanks)

        def read(tx: Transaction) -> tuple[int, list[StoredEvent]]:
            head = log.head(tx, key)  # a few small events for each step since the last call
            return head, log.read_after(tx, key, after, limit=1 << 31, kinds=kinds, up_to=head)

        head, page = await self._database.read(read)
        for stored in page:
            fact = decoded(self._experiment.name, stored).fact
            assert isinstance(fact, OfRanks)
            if fact.consumer == self._name:
                self._apply(stored.position, fact)
        # Another task of this rank may have read on meanwhile.
        self._read_up_to = max(self._read_up_to, head)
        if self._superseded:
            raise LeaseLostError(
                f"trainer {self._name!r}: {self._superseded}; start all ranks again, they resume "
                "from the last commit"
            )

    def _apply(self, position: int, fact: OfRanks) -> None:
        match fact:
            case events.RankJoined() if not self._position:
                if fact.world_size != self._world and 0 in (self._rank, fact.rank):
                    raise InvalidArgumentError(
                        f"rank {fact.rank} of trainer {self._name!r} was started with world_size="
                        f"{fact.world_size}, this one with {self._world}: start all ranks alike"
                    )
                self._called |= fact.rank == 0
                self._joins[fact.rank] = position
            case events.RankJoined() if 0 in (self._rank, fact.rank):
                self._superseded = f"rank {fact.rank} started again"
            case events.RanksAssembled() if self._rank and self._joined in fact.joins:
                self._position, self.committed = position, fact.committed_step
            case events.RanksAssembled() if self._position and position > self._position:
                self._superseded = "the ranks assembled anew without this process"
            case events.StepPartDone() if fact.assembly == self._position:
                for step, rows in enumerate(fact.rows, fact.step - len(fact.rows) + 1):
                    self._rows[fact.rank, step] = rows
            case events.StreamEnded() if fact.assembly == self._position:
                self.ended = fact.step
            case _:  # of an assembly that this rank is not in
                pass
