"""A strategy as a consumer of the log: it reads units, decides them, and commits with its cursor.

A unit is what a strategy decides at once, a group or several. It is ready once its runs are stored
(as many as planned, else ``rollouts_per_group``), its batch is sealed or its time is over
(`grouping`), counted from what the log recorded: a restart does not begin it anew. Of a whole batch
without a plan more groups may come: it waits for its seal, or its time.

What is decided, its annotations and the cursor are one transaction. After a crash before it, the
next process reads the same rows, with what their groups got since, and calls the strategy again:
only the outcome is recorded once.

Several processes may run a strategy under one name: the one that holds the lease decides, and the
others stand by. A set keeps the configuration it was made with; another one is refused.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from typing import Any, ClassVar, get_args

import anyio.to_thread
from typing_extensions import override

from trinity_buffer import errors
from trinity_buffer.algorithm.add_strategy import ADD_STRATEGY, AddStrategy, compose
from trinity_buffer.algorithm.arguments import made, refuse_unknown
from trinity_buffer.algorithm.group_scores import Unit
from trinity_buffer.codec.objects import new_event
from trinity_buffer.events import ConsumerRegistered, ExperiencesRecorded, now_us
from trinity_buffer.experience import Experience
from trinity_buffer.identity import order_of
from trinity_buffer.limits import sizes
from trinity_buffer.options import GroupingRules, option_types, renamed
from trinity_buffer.pipeline.annotate import deciding
from trinity_buffer.pipeline.annotate.grouping import Grouping, ReadyUnit, UnitReader, num_members
from trinity_buffer.pipeline.coordination import diagnosis, waiting
from trinity_buffer.pipeline.coordination.diagnosis import counted
from trinity_buffer.pipeline.coordination.lease import TTL_S, StrategyLease
from trinity_buffer.pipeline.handle import ExperimentHandle, as_json, by_size
from trinity_buffer.pipeline.load.columns import load_experiences
from trinity_buffer.pipeline.load.reading import EventCache, require_families
from trinity_buffer.store import log, segments, writer_queries
from trinity_buffer.store.rows import SLOT_BITS, ConsumerRow, ExperienceRow, format_address
from trinity_buffer.store.transaction import Session, Transaction
from trinity_buffer.writer import StagedWriter

_logger = logging.getLogger(__name__)

ROWS_NAMED = 3
"""At most so many late rows are named in a warning."""

REST_S = 0.25
"""Least time between two checks of a standby, however busy the log is."""

LOOKS_AFTER_S = 1.0
"""A standby notices a holder that died after so long; one that ends announces it."""

STILL_S = 1.0
"""A holder that commits nothing for so long may have nothing left to decide: the standby checks,
and doubles the interval each time."""

SELDOM_S = 30.0
"""Upper bound of that interval."""


@dataclass(slots=True)
class Standby:
    """Tells when the process that decides in our place has decided all that is stored.

    Attributes:
        reader: of the set; reads undecided units when their number matters.
        stored, recorded: head and last experience at the first check; -1: there was none yet.
        cursor: of the holder, at the last check.
        due: when undecided units are read next.
        pause_s: how long after that again.
    """

    reader: UnitReader
    stored: int = -1
    recorded: int = -1
    cursor: int = -1
    due: float = 0.0
    pause_s: float = STILL_S

    async def is_over(self) -> bool:
        """Return whether the holder has decided all that was stored and ready at the first call.

        Rows of incomplete groups do not count, as their runs may never come, unless a seal or a
        deadline has closed the group since then.
        Reading undecided units is expensive: it happens only when the holder's cursor has passed
        the last experience, or has stopped moving.
        """
        experiment = self.reader.experiment

        def load(tx: Transaction) -> tuple[ConsumerRow, bool]:
            of = tx, experiment.key
            if self.stored < 0:
                self.stored, self.recorded = log.head(*of), writer_queries.last_recorded(*of)
            row = writer_queries.consumer_row(*of, self.reader.name)
            assert row is not None  # registered before
            is_done = row.cursor >= self.recorded and not writer_queries.waiting_addresses(
                *of, self.reader.name, after=-1, up_to=self.recorded, limit=1
            )
            return row, is_done

        row, is_done = await experiment.database.read(load)
        if is_done:
            return True
        now = time.monotonic()
        if row.cursor != self.cursor and self.cursor < self.recorded:
            self.due = now + self.pause_s
        self.cursor = row.cursor
        if now < self.due:
            return False
        self.pause_s = min(2 * self.pause_s, SELDOM_S)
        self.due = now + self.pause_s
        return not await self.reader.is_left(self.stored)


_COUNTS_ROWS = (
    "annotation set {!r} was made by an older version and goes on as it did: where a run has "
    "several rows, each counts in the statistics of its group (over='rows'); a set of another "
    "name= takes each run once"
)


@dataclass(frozen=True, slots=True)
class ConsumerReport:
    """What a strategy consumer did until it ended.

    Attributes:
        annotated, rejected: experiences (copies counted) of this process.
        waiting: experiences that were read and are left because their groups are incomplete (in
            ``stats`` they are ``unseen`` until its next commit, then ``waiting``).
        waiting_groups: of which so many groups.
    """

    annotated: int
    rejected: int
    waiting: int
    waiting_groups: int


class StrategyConsumer:
    """Runs one strategy over one experiment; its annotations form the set ``name``.

    Any number of processes may run the same name: one of them holds a lease and decides, and the
    others stand by until it ends or falls silent. The lease is a row and no event. That its holder
    was killed, processes of its machine see at once, others after ``lease_ttl_s`` of silence.

    Args:
        experiment: whose log is read.
        strategy: a registered name, an `AddStrategy` class, or a list of them (filters first, one
            commit).
        args: constructor arguments of the strategy (of a list: name -> arguments).
        name: of the annotation set; by default the strategy's registered name.
        rules: how experiences become groups; by default as the experiment is configured.
        rewards: name of a scoring whose rewards take the place of the recorded ones.
        speaks: False if a trainer reports the waits, and runs this beside its own work: it
            decides without a lease.
    """

    def __init__(
        self,
        experiment: ExperimentHandle,
        strategy: deciding.StrategyLike,
        args: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
        rules: GroupingRules | None = None,
        rewards: str | None = None,
        speaks: bool = True,
    ) -> None:
        self.experiment = experiment
        self._speaks = speaks
        self._staged = StagedWriter()
        self._classes = deciding.classes_of(strategy)
        self._args = dict(args or {})
        self._rewards = rewards
        self.name = name or "+".join(name for name, _ in self._classes)
        self.rules = rules or GroupingRules.of(experiment.config)
        self._configure(None)
        self._cache = EventCache(experiment.key, experiment.name)
        grouping = Grouping(self._unit, self.rules)
        due_us = math.inf if self.rules.group_timeout_s is None else 0.0
        self._reader = UnitReader(experiment, self.name, grouping, self._cache, due_us, rewards)
        who, size = f"strategy {self.name!r}", experiment.config.get("groups_per_step")
        most = experiment.config.get("max_rejected_steps", waiting.MAX_REJECTED_STEPS)
        self._watch = waiting.RejectionWatch(who, size, most, counts="groups")
        database, key = experiment.database, experiment.key
        self._presence = waiting.Presence(database, key, "strategy", self.name)
        # Several trainers share the set `recorded`, and may decide at once. Of two commits that
        # decide the same row, or the same unit without rows, the fold refuses the second, whose
        # trainer goes on from what is left.
        ttl_s = float(experiment.config.get("lease_ttl_s") or TTL_S)
        self._lease = StrategyLease(database, key, self.name, ttl_s, alone=not speaks)
        self.has_read_all = False  # up to the head at the last read
        self._calls = 0  # how often the strategy was called, by any process of its name
        self._annotated = 0
        self._reasons = Counter[str]()
        self._warned = False  # of experiences without advantages
        self._changed = set[str]()  # fields of which was warned that they are not stored

    def _configure(self, recorded: Mapping[str, Any] | None) -> None:
        """Make the strategy, with ``over`` filled in.

        Args:
            recorded: the configuration of the set, if it exists.
        """
        args = deciding.with_over(self._args, self._classes, recorded)
        if len(self._classes) == 1:
            self.strategy: AddStrategy = made(self._classes[0][1], self._staged, **args)
        else:
            # A class that was named by its path has arguments under that; `compose` knows classes.
            names = {name: ADD_STRATEGY.name_of(cls) for name, cls in self._classes}
            by_class = {names.get(name, name): of_one for name, of_one in args.items()}
            self.strategy = compose(self._staged, [cls for _, cls in self._classes], by_class)
        self._unit = self.strategy.unit_for(**args)
        families = self.strategy.families_for(**args)
        require_families(f"strategy {self.name!r}", families)
        if self._unit not in get_args(Unit):
            raise errors.InvalidArgumentError(
                f"strategy {self.name!r} has unit={self._unit!r}: accepted are group and batch"
            )
        self._families = ("light", *(family for family in families if family != "light"))
        # What decides a group by its rewards, if the strategy needs nothing else.
        self._scorer = self.strategy.from_rewards() if self._unit == "group" else None
        self.config = {
            "strategy": [name for name, _ in self._classes],
            "args": as_json(
                f"arguments of strategy {self.name!r}", deciding.effective(args, self._classes)
            ),
            "grouping": asdict(self.rules),
        }
        if self._rewards is not None:
            self.config["rewards"] = self._rewards

    async def run(self, *, follow: bool = False) -> ConsumerReport:
        """Decide the stored rows; with ``follow``, go on until the experiment is finished.

        Raises:
            ConflictingStrategyError: the set ``name`` has another configuration.
        """
        await self._register()
        annotating = [name for name, cls in self._classes if cls.annotates]
        if len(annotating) > 1:
            _logger.warning(
                "strategy %r: each of %s sets advantages, and those of %s stay: name one of them "
                "(a class that only chooses has `annotates = False`)",
                self.name,
                ", ".join(annotating),
                annotating[-1],
            )
        try:
            async with waiting.task_group(self._presence.keep, self._lease.keep):
                await self._decide_all(follow=follow)
        finally:
            try:
                await self._lease.release()
            finally:
                await self._presence.gone()
        rows, groups = self._reader.grouping.num_waiting
        rejected = self._reasons.total()
        at_fault = any(reason.startswith(waiting.FAULTS) for reason in self._reasons)
        if self._speaks and (at_fault or (rejected and not self._annotated)):
            why = ", ".join(f"{reason} {number}" for reason, number in self._reasons.items())
            why, of = waiting.one_line(why), counted(rejected + self._annotated, "experience")
            _logger.warning("strategy %r rejected %d of %s: %s", self.name, rejected, of, why)
        if self._speaks and (rows or self._reader.unscored is not None):
            left = f"{counted(rows, 'experience')} of {counted(groups, 'group')} waiting"
            left = left if rows else "what it cannot read yet"
            why = waiting.one_line(await self._lacking())
            _logger.warning("strategy %r ended and left %s: %s", self.name, left, why)
        return ConsumerReport(self._annotated, rejected, rows, groups)

    async def _register(self) -> None:
        """Register the set, or continue the one that has this name and configuration."""
        database, key = self.experiment.database, self.experiment.key
        if (row := await database.read(writer_queries.consumer_row, key, self.name)) is None:
            fact = ConsumerRegistered(consumer=self.name, kind="strategy", config=self.config)
            # It looks again under the lock, and returns the row of a process that was quicker.
            row = await database.write(writer_queries.registered, key, self.name, new_event(fact))
        if row.kind != "strategy":
            raise errors.ConflictingStrategyError(
                f"{self.name!r} is a {row.kind} of experiment {self.experiment.name!r}: give the "
                "annotation set a name of its own with name="
            )
        if row.config == self.config:
            return
        by_default = self.config["args"]
        self._configure(row.config)
        if self.config["args"] != by_default:
            _logger.warning("%s", waiting.one_line(_COUNTS_ROWS.format(self.name)))
        if differences := deciding.config_diff(self._classes, row.config, self.config):
            made, this = differences
            raise errors.ConflictingStrategyError(
                f"the annotation set {self.name!r} of experiment {self.experiment.name!r} was made "
                f"with {made}, this is {this}: give the new one a name of its own with name= "
                "(--name)"
            )

    async def _decide_all(self, *, follow: bool) -> None:
        """Decide units, or stand by while another process does, until the work is done."""
        database, speaks = self.experiment.database, self._speaks
        key = self.experiment.key if speaks else None  # inside a trainer, its own wait ends
        wait = waiting.ReportedWait(database, key, self._waiting_for, self._presence, aloud=speaks)
        other: Standby | None = None
        while True:
            # At once: a trainer that follows waits for a strategy that it sees, and ends otherwise.
            await self._presence.seen(at_once=follow)
            # Taken before all is read, so that what is committed meanwhile ends the wait.
            state = await database.changes.state()
            if await self._lease.ask():
                wait.over()
                if await self._decide_on(wait, follow=follow):
                    return
                continue
            if not follow:
                other = other or Standby(self._reader)
                if await other.is_over():
                    return
            self._presence.waiting_for = self._lease.holder_text()
            await anyio.sleep(REST_S)  # else each commit of the holder would wake this process
            await wait.changed(state, LOOKS_AFTER_S)

    async def _decide_on(self, wait: waiting.ReportedWait, *, follow: bool) -> bool:
        """Continue from the last commit; return True at the end, False if the lease is lost."""
        database = self.experiment.database
        self._staged.groups.clear()
        self._staged.rejections.clear()
        # It forgets all groups: what was taken and not committed comes again from the store.
        self._calls = (await database.read_session(self._reader.load)).calls
        ending = not follow
        while self._lease.is_held:
            await self._presence.seen()
            state = await database.changes.state()
            if self._reader.due_us < math.inf:
                # Before the page is read that then closes the groups of these batches. It needs no
                # lease, since a batch is sealed only once, and finds out whether this set may.
                await self._reader.seal_overdue()
            try:
                page = partial(self._read_page, live=follow)
                worked, is_finished, left = await database.session(page)
                if left:  # the others see now that it works, which may take long
                    wait.over()
                    await self._presence.seen()
                for units in left:
                    await self._decide(units)
                # Last: its commit moves the cursor past units without rows, which must be recorded
                # before.
                if late := self._reader.grouping.take_late():
                    await database.session(partial(self._reject_late, late=late))
            except (errors.CursorConflictError, errors.LeaseLostError) as error:
                # It is not given back: `ask` finds whether it is still ours, and then the cursor of
                # the store counts.
                self._lease.invalidate(error)
                break
            if worked or late:
                wait.over()
                continue
            self.has_read_all = True
            overdue_us, idle_us = self._reader.grouping.next_ends_us()
            if ending and math.isinf(idle_us):
                return True
            ending = ending or is_finished  # one more page: rows may precede the end
            if not ending or idle_us < math.inf:
                # Now, rather than in the middle of the next group.
                waiting.settle_imports()
                due_us = min(overdue_us, idle_us, self._reader.due_us)
                await wait.changed(state, max(0.0, (due_us - now_us()) / 1e6))
        return False

    async def _waiting_for(self) -> str:
        if self._lease.held_by is not None:
            return self._lease.holder_text()
        return f"strategy {self.name!r} waits: {await self._lacking()}"

    async def _lacking(self) -> str:
        """Return why nothing is decided, and which process would bring the missing rows."""
        experiment = self.experiment
        if self._reader.grouping.next_ends_us()[1] < math.inf:
            groups = counted(self._reader.grouping.num_waiting[1], "group")
            return f"{groups}, each decided when nothing came for it for {self.rules.idle_s:g} s"
        if self._reader.unscored is not None:
            return (
                f"scoring {self._rewards!r} has no rewards for what is recorded from position "
                f"{self._reader.unscored} on; `tb.assign_rewards` again under this name brings them"
            )
        return await experiment.database.read(
            diagnosis.of_strategy, experiment.key, self.name, whole_batches=self._unit == "batch"
        )

    def _read_page(self, s: Session, *, live: bool) -> tuple[bool, bool, list[list[ReadyUnit]]]:
        """Read one page, and decide the first ready units if their rewards suffice.

        In one trip to the database: a consumer that follows a log seldom finds more than one group.

        The first commit of the page moves the cursor to its end. What is left of it is then in the
        table `waiting`, from which the next commits take it, or after a crash another process,
        which reads the events of these rows once more.

        Args:
            live: whether the consumer follows: commits are smaller then, to be trained sooner.

        Returns:
            Whether there was anything to do; if not, whether the experiment is finished; ready but
            undecided units, one list per commit.
        """
        read = self._reader.read(s)
        # Units without rows (nothing came, or all was refused) first: only the commit that moves
        # the cursor past them records that they are decided.
        ready = self._reader.grouping.take_ready(self._reader.clock_us)
        units = sorted(ready, key=lambda unit: any(group.members for group in unit))
        in_step = live and not self._reader.behind
        most = sizes.experiences_per_live_commit if in_step else sizes.experiences_per_commit
        left = [*by_size(units, num_members, most)]
        if left and self._decide_by_rewards(s, left[0]):
            del left[0]
        if read or units:
            return True, False, left
        return False, s.read(writer_queries.is_finished, self.experiment.key), left

    def _begin(self, units: Sequence[ReadyUnit]) -> tuple[deciding.Decision, list[ReadyUnit]]:
        """Return a decision on ``units``, and the groups of each that the strategy sees.

        Those that lack runs are rejected in it, unless ``on_incomplete_group`` is ``keep``, the
        default; the only other value is ``reject``.
        """
        decision = deciding.Decision(self.name, seen=self._reader.seen)
        if not all(any(group.members for group in unit) for unit in units):
            decision.after = self._reader.cursor
        groups = [*chain.from_iterable(units)]
        decision.planned = {"/".join(group.key): group.planned for group in groups}
        if self.rules.on_incomplete_group == "keep":
            return decision, list(units)
        short = chain.from_iterable(group.members for group in groups if group.short)
        decision.reject(short, "incomplete_group")
        return decision, [[group for group in unit if not group.short] for unit in units]

    def _decide_by_rewards(self, s: Session, units: Sequence[ReadyUnit]) -> bool:
        """Decide and commit ``units`` by rewards; return False if experiences have to be loaded.

        It opens no segment: a damaged row is annotated here, and rejected by the trainer.
        """
        if self._scorer is None:
            return False
        decision, shown = self._begin(units)
        groups = [group for group in chain.from_iterable(shown) if group.members]
        addresses = [address for group in groups for address in group.members]
        try:
            recorded = self._cache.events(s, {address >> SLOT_BITS for address in addresses})
        except errors.CodecVersionError:
            raise
        except errors.CodecError:
            return False
        events = {at: e for at, e in recorded.items() if isinstance(e, ExperiencesRecorded)}
        # Rewards are in the event, but rows without tensors have to be rejected one by one.
        # Archived rows go the long way too, which reads their file.
        keys = [event.segment for event in events.values() if event.scorable]
        if len(keys) < len(events) or s.read(segments.archived_at, keys):
            return False
        assigned = None
        if self._rewards is not None:
            key = self.experiment.key
            assigned = s.read(writer_queries.assigned_rewards, key, self._rewards, addresses)
        # Each group counts as one call of `add`, whichever way it is decided.
        self._calls += len(groups)
        if groups:
            with deciding.blame_strategy(self.name, lambda: s.read(self._uid, addresses[0])):
                table = deciding.table_of(groups, events, assigned)
                decision.score(groups, table, self._scorer, self.strategy.over)
        self._commit(s, decision, units)
        return True

    def _rows(self, tx: Transaction, addresses: Collection[int]) -> dict[int, ExperienceRow]:
        """Return address -> row of the experience there.

        Raises:
            StoreError: the table lacks one.
        """
        stored = writer_queries.experience_rows(tx, self.experiment.key, sorted(addresses))
        rows = {row.address: row for row in stored}
        for address in sorted(set(addresses) - rows.keys()):
            raise errors.StoreError(
                f"experiment {self.experiment.name!r}: the table experience lacks "
                f"{format_address(address)}, which is recorded: run `trinity-buffer rebuild`, "
                "which makes it from the log again"
            )
        return rows

    def _uid(self, tx: Transaction, address: int) -> str:
        return self._rows(tx, [address])[address].eid.uid

    async def _decide(self, units: Sequence[ReadyUnit]) -> None:
        """Have the strategy decide on ``units``, by experiences unless rewards do; and commit."""
        database = self.experiment.database
        by_rewards = partial(self._decide_by_rewards, units=units)
        if self._scorer is not None and await database.session(by_rewards):
            return
        decision, shown = self._begin(units)
        wanted = [a for unit in shown for group in unit for a in group.members]
        rows = await database.read(self._rows, wanted)
        seen: dict[int, dict[str, Any]] = {}
        # Light rows are small, so one load can cover a whole commit.
        light = self._families == ("light",)
        most = sizes.experiences_per_commit if light else sizes.experiences_per_load
        for part in by_size(shown, num_members, most):
            of_units = [
                sorted((rows[a] for group in unit for a in group.members), key=sort_key)
                for unit in part
            ]
            loaded = await self._load([row for unit in of_units for row in unit], decision)
            for unit_rows in of_units:
                members = [loaded[row.address] for row in unit_rows if row.address in loaded]
                if not members:
                    continue
                # Before the call: the strategy may change its list and the fields of experiences.
                over = self.strategy.over
                seen.update((e.address or 0, deciding.fields_of(e, over)) for e in members)
                # In the event loop, since `add` is a coroutine of the user's: where it blocks that
                # for long, it can lose the lease, as `StrategyLease.invalidate` explains.
                with deciding.blame_strategy(self.name, partial(str, members[0].eid.uid)):
                    answer = await self.strategy.add(members, self._calls)
                    decision.metrics.append(deciding.metrics_of(answer))
                self._calls += 1
        await anyio.to_thread.run_sync(decision.take, self._staged, seen, rows)
        await database.session(lambda s: self._commit(s, decision, units))

    async def _load(
        self, rows: Sequence[ExperienceRow], decision: deciding.Decision
    ) -> dict[int, Experience]:
        """Return address -> experience; those that are damaged or were deleted are rejected.

        Raises:
            ArchivedSegmentError: tensors cannot be read here and now, and are not gone for good.
        """
        if not rows:
            return {}
        database = self.experiment.database
        experiences = await load_experiences(database, self._cache, rows, self._families)
        bad = {e.address or 0: "damaged" for e in experiences if e.damaged is not None}
        # `archived` is set only where the row's tensors cannot be read here and now.
        absent = [pair for pair in zip(rows, experiences, strict=True) if pair[1].archived]
        keys = [row.segment for row, _ in absent]
        left = await database.read(segments.archived_at, keys) if keys else {}
        for row, experience in absent:
            _, uri = left.get(row.segment, (0, ""))
            if uri is not None:
                raise errors.ArchivedSegmentError(f"{row.eid}: {experience.archived}")
            bad[row.address] = "deleted"
        decision.reasons |= bad
        if self.rules.on_incomplete_group == "reject":
            broken = {row.eid.tid for row in rows if row.address in bad}
            short = [r.address for r in rows if r.eid.tid in broken and r.address not in bad]
            decision.reject(short, "incomplete_group")
        loaded = {e.address or 0: e for e in experiences if e.address not in decision.reasons}
        if self._rewards is not None:
            assigned = await database.read(
                writer_queries.assigned_rewards, self.experiment.key, self._rewards, list(loaded)
            )
            for address, experience in loaded.items():
                # A row that the scoring left out has no reward, not its recorded one.
                experience.reward = assigned.get(address)
        return loaded

    def _commit(self, s: Session, decision: deciding.Decision, units: Sequence[ReadyUnit]) -> None:
        """Commit the decision on ``units`` together with the cursor."""
        database, key = self.experiment.database, self.experiment.key
        events, segment_rows = decision.encode(database.segments, calls=self._calls)
        # Unplanned groups whose rows were all refused: of them there is nothing to record. The
        # cursor stays, and moves with the next commit; until then a restart reads them again.
        if not events:
            return

        # Where a server is lost, this alone is run again: it changes nothing in memory.
        def commit(tx: Transaction) -> None:
            database.segments.attach(tx, segment_rows)
            # Locks, and raises unless we own the lease: if it is lost later, that cannot matter.
            # The same statement tells where the log ends; without a lease, `append` locks and asks.
            end = self._lease.standing(tx).end
            log.append(tx, key, [(self.name, event) for event in events], last=end)

        s.write(commit)
        self._reader.cursor = max(self._reader.cursor, self._reader.seen)
        self._annotated += len(decision.experiences)
        self._reasons.update(decision.reasons.values())
        if decision.without_advantages and self.strategy.annotates and not self._warned:
            self._warned = True
            _logger.warning(
                "strategy %r kept %s without advantages, in whose place a trainer reads 0: set "
                "`advantages` of what it keeps, or `annotates = False` in a class that only "
                "chooses",
                self.name,
                counted(decision.without_advantages, "experience"),
            )
        changed = decision.changed - self._changed
        # A list hands rewards on from stage to stage, to one that makes advantages of them.
        if len(self._classes) > 1 and self.strategy.annotates:
            changed.discard("reward")
        if changed:
            self._changed |= changed
            _logger.warning(
                "strategy %r changed %s of what it keeps, which is not stored: trainers read what "
                "was recorded. Give rewards by `tb.assign_rewards` and run_strategy(rewards=), and "
                "a token that is not to be trained an advantage of 0",
                self.name,
                " and ".join(sorted(changed)),
            )
        members = [group.members for unit in units for group in unit if group.members]
        reasons = set(decision.reasons.values())
        if decision.experiences:
            self._watch.accepted()
        elif reasons and members:
            self._watch.rejected(len(members), reasons, lambda: s.read(self._uid, members[0][0]))

    def _reject_late(self, s: Session, late: Sequence[int]) -> None:
        """Reject rows that came after their groups were decided, and warn of them."""
        decision = deciding.Decision(self.name, seen=self._reader.seen)
        decision.reject(late, "late")
        self._commit(s, decision, [])
        eids = [row.eid for row in s.read(self._rows, late[:ROWS_NAMED]).values()]
        named = ", ".join(f"{eid.uid} of run {eid.rid} (group {eid.tid})" for eid in eids)
        _logger.warning(
            "strategy %r rejects %s as late: %s%s came after the group was decided; write all rows "
            "of a run in one call",
            self.name,
            counted(len(late), "experience"),
            waiting.one_line(named),
            f" and {len(late) - len(eids)} more" if len(late) > len(eids) else "",
        )


def sort_key(row: ExperienceRow) -> tuple[object, ...]:
    """Return the sort key of the rows that a strategy sees: batch, task, run, step, suffix."""
    eid = row.eid
    return (order_of(eid.batch), order_of(eid.task), eid.run, eid.step, eid.suffix)


RECORDED = "recorded"
"""Name of the set that ``strategy=None`` reads: whole groups, nothing computed."""


class RecordedStrategy(AddStrategy):
    """Keeps every experience as it is; trainers that compute advantages themselves read its set."""

    families: ClassVar[tuple[str, ...]] = ("light",)
    annotates: ClassVar[bool] = False
    needs: ClassVar[tuple[str, ...]] = ()

    @override
    async def add(self, experiences: list[Experience], step: int) -> tuple[int, dict[str, Any]]:
        """Write everything."""
        await self.writer.write(experiences)
        return len(experiences), {}


def recorder(experiment: ExperimentHandle) -> StrategyConsumer:
    """Return the consumer that groups recorded rows, inside the trainer that reads them."""
    config = experiment.config
    alone = {"rollouts_per_group": 1} if config.get("schema") in ("sft", "dpo", "cpt") else {}
    rules = GroupingRules.of({**alone, **config})
    return StrategyConsumer(experiment, RecordedStrategy, name=RECORDED, rules=rules, speaks=False)


async def run_strategy(
    experiment: ExperimentHandle,
    strategy: deciding.StrategyLike,
    args: Mapping[str, Any] | None = None,
    *,
    name: str | None = None,
    follow: bool = False,
    rewards: str | None = None,
    **grouping: Any,
) -> ConsumerReport:
    """Run ``strategy`` over ``experiment`` and report what it did.

    Args:
        strategy: a registered name, an `AddStrategy` class, or a list of them.
        args: constructor arguments, such as ``{"epsilon": 1e-6}``.
        name: of the annotation set; by default the strategy's name.
        follow: go on until an ``ExperimentFinished`` event; otherwise end when what is stored is
            decided.
        rewards: name of a scoring (`assign_rewards`) whose rewards take the place of the recorded
            ones.
        grouping: fields of `GroupingRules`; by default the experiment's configuration.

    Raises:
        ConflictingStrategyError: the annotation set exists with another configuration.
        UnknownNameError: no such strategy, or no such scoring.
    """
    grouping = renamed(grouping)
    accepted = (*option_types(GroupingRules), "name", "follow", "rewards")
    refuse_unknown("run_strategy", grouping, accepted)
    rules = GroupingRules.of(experiment.config, **grouping)
    if rewards is not None:
        known = await experiment.database.read(writer_queries.scorings, experiment.key)
        if rewards not in known:
            raise errors.UnknownNameError(
                f"experiment {experiment.name!r} has no scoring {rewards!r} "
                f"(there: {', '.join(known) or 'none'})"
            )
    consumer = StrategyConsumer(experiment, strategy, args, name=name, rules=rules, rewards=rewards)
    return await consumer.run(follow=follow)
