"""A strategy as a consumer of the log: it reads units, decides them, and commits with its cursor.

Several processes may run a strategy under one name: the one that holds the lease decides, and the
others stand by. A set keeps the configuration it was made with; another one is refused.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import anyio

from trinity_buffer.algorithm.add_strategy import AddStrategy, CompositeAddStrategy, compose
from trinity_buffer.algorithm.arguments import refuse_unknown
from trinity_buffer.errors import (
    ConflictingStrategyError,
    CursorConflictError,
    InvalidArgumentError,
    LeaseLostError,
    UnknownNameError,
)
from trinity_buffer.events import ConsumerRegistered
from trinity_buffer.faultpoints import reached
from trinity_buffer.identity import EID
from trinity_buffer.limits import sizes
from trinity_buffer.pipeline.annotate.deciding import Decider, Decision, StrategySetup
from trinity_buffer.pipeline.annotate.grouping import (
    Deadlines,
    GroupingRules,
    ReadyUnit,
    chunks,
    has_rows,
)
from trinity_buffer.pipeline.annotate.strategies import (
    StrategyLike,
    list_of,
    make_strategy,
    name_of,
    strategy_class,
)
from trinity_buffer.pipeline.annotate.unit_reader import UnitReader
from trinity_buffer.pipeline.background import settle_imports
from trinity_buffer.pipeline.coordination import diagnosis
from trinity_buffer.pipeline.coordination.diagnosis import counted
from trinity_buffer.pipeline.coordination.lease import StrategyLease
from trinity_buffer.pipeline.coordination.presence import Presence
from trinity_buffer.pipeline.coordination.waiting import (
    FAULTS,
    MAX_REJECTED_STEPS,
    RejectionWatch,
    ReportedWait,
    Stall,
    one_line,
)
from trinity_buffer.pipeline.handle import ExperimentHandle, as_json, new_event, now_us
from trinity_buffer.pipeline.load.events import EventCache
from trinity_buffer.store import log, writer_queries
from trinity_buffer.store.rows import ConsumerRow, ExperienceRow
from trinity_buffer.store.transaction import Session, Transaction
from trinity_buffer.writer import StagedWriter

_logger = logging.getLogger(__name__)

ROWS_NAMED = 3
"""At most so many late rows are named in a warning."""


def warn_of_rejections(name: str, annotated: int, reasons: Mapping[str, int]) -> None:
    """Warn of rejections whose reason is a fault, or if every row was rejected."""
    at_fault = any(reason.startswith(FAULTS) for reason in reasons)
    if at_fault or (reasons and not annotated):
        rejected = sum(reasons.values())
        of = counted(rejected + annotated, "experience")
        counts = ", ".join(f"{reason} {number}" for reason, number in reasons.items())
        _logger.warning("strategy %r rejected %d of %s: %s", name, rejected, of, one_line(counts))


def warn_of_late_rows(name: str, eids: Sequence[EID]) -> None:
    """Warn of rows that came after their groups were decided."""
    rows = ", ".join(f"{eid.uid} of run {eid.rid} (group {eid.tid})" for eid in eids[:ROWS_NAMED])
    more = f" and {len(eids) - ROWS_NAMED} more" if len(eids) > ROWS_NAMED else ""
    _logger.warning(
        "strategy %r rejects %s as late: %s%s came after the group was decided; write all rows of "
        "a run in one call",
        name,
        counted(len(eids), "experience"),
        one_line(rows),
        more,
    )


def warn_of_undecided(name: str, experiences: int, groups: int, *, why: str) -> None:
    """Warn of experiences left undecided; 0 ``experiences``: some could not even be read."""
    left = f"{counted(experiences, 'experience')} of {counted(groups, 'group')} waiting"
    left = left if experiences else "what it cannot read yet"
    _logger.warning("strategy %r ended and left %s: %s", name, left, one_line(why))


def same_config(
    recorded: Mapping[str, Any], wanted: Mapping[str, Any], strategy: AddStrategy
) -> bool:
    """Return whether two configurations are equal, with defaults filled in.

    Args:
        recorded: the configuration that the set was made with.
        wanted: the configuration that ``strategy`` was made with.
        strategy: supplies the defaults.
    """
    if _paths(recorded) != _paths(wanted):
        return False
    return _filled(recorded, strategy) == _filled(wanted, strategy)


def config_diff(
    recorded: Mapping[str, Any], wanted: Mapping[str, Any], strategy: AddStrategy
) -> tuple[str, str]:
    """Return the settings that only the first and only the second configuration has, as text."""
    if _paths(recorded) != _paths(wanted):
        before, after = ({"strategy": "+".join(_paths(config))} for config in (recorded, wanted))
    else:
        before, after = (_flat(_filled(config, strategy)) for config in (recorded, wanted))
    differences = (
        [
            f"{key}={value!r}"
            for key, value in mine.items()
            if key not in other or other[key] != value
        ]
        for mine, other in ((before, after), (after, before))
    )
    first, second = (", ".join(texts) or "none of it" for texts in differences)
    return first, second


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten the filled configuration of a set to one key per value."""
    values = {key: value for key, value in config.items() if key not in ("args", "grouping")}
    values |= config.get("grouping", {})
    names = config["strategy"]
    for name, args in zip(names, config["args"], strict=True):
        prefix = f"{name}." if len(names) > 1 else ""
        values |= {f"{prefix}{key}": value for key, value in args.items()}
    return values


def _paths(config: Mapping[str, Any]) -> list[str]:
    """Return the names of the strategies; ``module:Class`` means ``module.Class``."""
    return [name.replace(":", ".") for name in config["strategy"]]


def with_over(
    args: Mapping[str, Any], strategy: AddStrategy, recorded: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the arguments of a set with ``over``, the unit of its statistics, filled in.

    By default each run counts once. A set made before ``over`` existed counts rows, so that its
    arithmetic stays the same.

    Args:
        args: the arguments from the caller.
        strategy: the strategy made with them.
        recorded: the configuration of the set, if it exists.
    """
    if isinstance(strategy, CompositeAddStrategy):
        return {
            name: stage_args
            for name, stage, _ in strategy.stages
            if (stage_args := _with_over(args.get(name, {}), stage, _args_of(recorded, name)))
        }
    return _with_over(args, strategy, None if recorded is None else recorded["args"])


def _args_of(recorded: Mapping[str, Any] | None, name: str) -> Mapping[str, Any] | None:
    if recorded is None or len(recorded["strategy"]) < 2:
        return None
    args: Mapping[str, Any] = recorded["args"].get(name, {})
    return args


def _with_over(
    args: Mapping[str, Any], strategy: AddStrategy, recorded: Mapping[str, Any] | None
) -> dict[str, Any]:
    if "over" in args or not strategy.takes_over():
        return dict(args)
    before = recorded is not None and "over" not in recorded
    return {**args, "over": "rows" if before else "runs"}


def _filled(config: Mapping[str, Any], strategy: AddStrategy) -> dict[str, Any]:
    """Return a configuration with all arguments of each strategy."""
    args = config["args"]
    listed = [(strategy, args)]
    if len(config["strategy"]) > 1:
        assert isinstance(strategy, CompositeAddStrategy)  # the paths are equal, so it has stages
        listed = [(stage, args.get(name, {})) for name, stage, _ in strategy.stages]
    filled = [_defaults(stage) | stage_args for stage, stage_args in listed]
    rules = asdict(GroupingRules()) | config.get("grouping", {})  # an old set lacks newer rules
    return {**config, "strategy": _paths(config), "args": filled, "grouping": rules}


def _defaults(strategy: AddStrategy) -> dict[str, Any]:
    """Return the defaults of a strategy that can be compared with a recorded configuration."""
    usable = {}
    defaults = type(strategy).default_args()
    if strategy.takes_over():  # what sets from before ``over`` do
        defaults["over"] = "rows"
    for name, default in defaults.items():
        try:
            usable[name] = as_json(name, default)
        except InvalidArgumentError:  # no JSON value equals it
            continue
    return usable


REST_S = 0.25
"""Least time between two checks of a standby, however busy the log is."""

LOOKS_AFTER_S = 1.0
"""A standby notices a holder that died after so long; one that ends announces it."""

STILL_S = 1.0
"""A holder that commits nothing for so long may have nothing left to decide: the standby checks,
and doubles the interval each time."""

SELDOM_S = 30.0
"""Upper bound of that interval."""


class Standby:
    """Waits for the lease of a strategy while another process decides.

    Without ``follow`` it ends as soon as the holder has decided everything stored at the start.

    Args:
        experiment: the experiment whose log is read.
        name: name of the annotation set.
        reader: reads undecided units when their number matters.
    """

    def __init__(self, experiment: ExperimentHandle, name: str, reader: UnitReader) -> None:
        self._experiment, self._name, self._reader = experiment, name, reader
        self._stored = self._recorded = -1  # head and last experience at the first check
        self._cursor = -1
        self._pause_s = STILL_S
        self._due = 0.0

    async def rest(self, wait: ReportedWait, state: tuple[int, int]) -> None:
        """Wait for a commit after ``state``, at most `LOOKS_AFTER_S`."""
        await anyio.sleep(REST_S)  # else each commit of the holder would wake this process
        await wait.changed(state, LOOKS_AFTER_S)

    async def is_over(self) -> bool:
        """Return whether the holder has decided everything stored at the first call.

        Reading undecided units is expensive: it happens only when the holder's cursor has passed
        the last experience, or has stopped moving.
        """
        row, is_done = await self._experiment.database.read(self._load_state)
        if is_done:
            return True
        now = time.monotonic()
        if row.cursor != self._cursor and self._cursor < self._recorded:
            self._due = now + self._pause_s
        self._cursor = row.cursor
        if now < self._due:
            return False
        self._pause_s = min(2 * self._pause_s, SELDOM_S)
        self._due = now + self._pause_s
        return not await self._reader.is_left(row, self._stored)

    def _load_state(self, tx: Transaction) -> tuple[ConsumerRow, bool]:
        """Return the state of the last commit, and whether it decided all experiences."""
        key, name = self._experiment.key, self._name
        if self._stored < 0:
            self._stored = log.head(tx, key)
            self._recorded = writer_queries.last_recorded(tx, key)
        row = writer_queries.consumer_row(tx, key, name)
        assert row is not None  # registered before
        if row.cursor < self._recorded:
            return row, False
        up_to = self._recorded
        return row, not writer_queries.waiting_addresses(
            tx, key, name, after=-1, up_to=up_to, limit=1
        )


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


class _PageResult(NamedTuple):
    """The outcome of reading one page of the log.

    Attributes:
        worked: whether there was anything to do.
        finished: whether the experiment is finished and there was nothing to do.
        left: ready but undecided units, one list per commit.
        late: addresses of rows whose groups were decided before.
    """

    worked: bool
    finished: bool
    left: list[list[ReadyUnit]]
    late: list[int]


class StrategyConsumer:
    """Runs one strategy over one experiment; its annotations form the set ``name``.

    Any number of processes may run the same name: one of them holds a lease and decides, and the
    others stand by until it ends or falls silent.

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
        strategy: StrategyLike,
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
        self._listed = list_of(strategy)
        self._args = dict(args or {})
        self._rewards = rewards
        self.name = name or "+".join(map(name_of, self._listed))
        self.rules = rules or GroupingRules.of(experiment.config)
        self.strategy = self._made(self._args)
        setup = self._configure(None)
        self._unit = setup.unit
        self._cache = EventCache(experiment.key, experiment.name)
        self._reader = UnitReader(
            experiment, self.name, self._unit, self.rules, self._cache, rewards
        )
        self._decider = Decider(experiment, setup, self._reader, self._cache)
        self._watch = RejectionWatch(
            f"strategy {self.name!r}",
            experiment.config.get("groups_per_step"),
            experiment.config.get("max_rejected_steps", MAX_REJECTED_STEPS),
            counts="groups",
        )
        self._presence = Presence(experiment.database, experiment.key, "strategy", self.name)
        self._lease = StrategyLease(experiment, self.name, alone=not speaks)
        self._deadlines = Deadlines(experiment, self.name, self.rules.deadline_s)
        self.has_read_all = False  # up to the head at the last read
        self._annotated = 0
        self._rejected = 0
        self._reasons = Counter[str]()

    def _made(self, args: Mapping[str, Any]) -> AddStrategy:
        """Return the strategy with these arguments."""
        if len(self._listed) == 1:
            return make_strategy(self._listed[0], self._staged, args)
        return compose(self._staged, [strategy_class(strategy) for strategy in self._listed], args)

    def _configure(self, recorded: Mapping[str, Any] | None) -> StrategySetup:
        """Make the strategy, with ``over`` filled in.

        Args:
            recorded: the configuration of the set, if it exists.
        """
        args = with_over(self._args, self.strategy, recorded)
        self.strategy = self._made(args)
        names = [name_of(strategy) for strategy in self._listed]
        recorded_args = as_json(f"arguments of strategy {self.name!r}", args)
        self.config = {"strategy": names, "args": recorded_args, "grouping": asdict(self.rules)}
        if self._rewards is not None:
            self.config["rewards"] = self._rewards
        return StrategySetup(
            self.name, self.strategy, self._staged, args, self.rules, self._rewards
        )

    async def run(self, *, follow: bool = False) -> ConsumerReport:
        """Decide the stored rows; with ``follow``, go on until the experiment is finished.

        Raises:
            ConflictingStrategyError: the set ``name`` has another configuration.
        """
        await self._register()
        async with self._presence.heartbeats(), self._lease.kept():
            await self._decide_all(follow=follow)
        if self._speaks:
            await self._report_undecided()
        return self._report()

    async def _decide_all(self, *, follow: bool) -> None:
        """Decide units, or stand by while another process does, until the work is done."""
        changes = self.experiment.database.changes
        stall = None  # inside a trainer, the trainer's own stall ends it
        if self._speaks:
            stall = Stall(self.experiment.database, self.experiment.key, self._presence)
        wait = ReportedWait(
            changes, self._waiting_for, self._presence, aloud=self._speaks, stall=stall
        )
        other = Standby(self.experiment, self.name, self._reader)
        while True:
            await self._presence.seen(at_once=follow)  # a trainer that follows waits for it
            state = await changes.state()
            if await self._lease.ask():
                wait.over()
                if await self._decide_on(wait, follow=follow):
                    return
            elif not follow and await other.is_over():
                return
            else:
                self._presence.waiting_for = self._lease.told()
                await other.rest(wait, state)

    async def _decide_on(self, wait: ReportedWait, *, follow: bool) -> bool:
        """Continue from the last commit; return True at the end, False if the lease is lost."""
        await self._start_over()
        ending = not follow
        while self._lease.is_held:
            await self._presence.seen()
            state = await self.experiment.database.changes.state()
            await self._deadlines.keep()
            try:
                page = await self._advance(live=follow)
            except (CursorConflictError, LeaseLostError) as error:
                self._lease.doubt(error)
                break
            if page.worked:
                wait.over()
                continue
            self.has_read_all = True
            if ending and not self._reader.becomes_idle:
                return True
            ending = ending or page.finished  # one more page: rows may precede the end
            if not ending or self._reader.becomes_idle:
                settle_imports()
                await wait.changed(state, self._seconds_to_deadline())
        return False

    def _seconds_to_deadline(self) -> float | None:
        """Return the seconds until the next group or batch must be closed, or None."""
        left = (self._reader.seconds_to_deadline(), self._deadlines.seconds_left())
        return min((seconds for seconds in left if seconds is not None), default=None)

    async def _waiting_for(self) -> str:
        if self._lease.held_by is not None:
            return self._lease.told()
        return f"strategy {self.name!r} waits: {await self._lacking()}"

    async def _lacking(self) -> str:
        """Return why nothing is decided, and which process would bring the missing rows."""
        experiment = self.experiment
        if self._reader.becomes_idle:
            groups = diagnosis.counted(self._reader.num_waiting[1], "group")
            return f"{groups}, each decided when nothing came for it for {self.rules.idle_s:g} s"
        if self._reader.unscored is not None:
            return (
                f"scoring {self._rewards!r} has no rewards for what is recorded from position "
                f"{self._reader.unscored} on; `tb.assign_rewards` again under this name brings them"
            )
        return await experiment.database.read(
            diagnosis.of_strategy, experiment.key, self.name, whole_batches=self._unit == "batch"
        )

    async def _report_undecided(self) -> None:
        warn_of_rejections(self.name, self._annotated, self._reasons)
        if self._reader.num_waiting[0] or self._reader.unscored is not None:
            warn_of_undecided(self.name, *self._reader.num_waiting, why=await self._lacking())

    def _report(self) -> ConsumerReport:
        return ConsumerReport(self._annotated, self._rejected, *self._reader.num_waiting)

    async def _advance(self, *, live: bool = False) -> _PageResult:
        """Read one page and decide the units that are ready.

        Args:
            live: whether a trainer may be waiting for the first of them.
        """
        database = self.experiment.database
        page = await database.session(lambda s: self._read_page(s, live=live))
        for units in page.left:
            await self._decide(units)
        if page.late:
            decision = await self._decider.by_experiences([], page.late)
            rows = await database.session(lambda s: self._commit_late(s, decision, page.late))
            warn_of_late_rows(self.name, [rows[address].eid for address in page.late])
        return page

    def _read_page(self, s: Session, *, live: bool) -> _PageResult:
        """Read one page, and decide the first ready units if their rewards suffice.

        In one trip to the database: a consumer that follows a log seldom finds more than one group.
        """
        read = self._reader.read(s)
        # Units without rows first: only the commit that moves the cursor past them records that
        # they are decided.
        units = sorted(self._reader.take_ready(), key=has_rows)
        late = self._reader.take_late()
        in_step = live and not self._reader.behind
        most = sizes().experiences_per_live_commit if in_step else sizes().experiences_per_commit
        left = chunks(units, most)
        if left and self._decide_by_rewards(s, left[0]):
            del left[0]
        worked = bool(read or units or late)
        finished = not worked and s.read(writer_queries.is_finished, self.experiment.key)
        return _PageResult(worked, finished, left, late)

    def _decide_by_rewards(self, s: Session, units: Sequence[ReadyUnit]) -> bool:
        """Decide ``units`` by rewards alone; return False if experiences have to be loaded."""
        loaded, scored, events = self._decider.partition(s, units)
        if not loaded:
            self._commit(s, self._decider.by_rewards(s, scored, events), scored)
        return not loaded

    async def _decide(self, units: Sequence[ReadyUnit]) -> None:
        """Decide ``units``, beginning with those whose experiences have to be loaded."""
        database = self.experiment.database
        loaded, scored, events = await database.read_session(
            lambda s: self._decider.partition(s, units)
        )
        if loaded:
            decision = await self._decider.by_experiences(loaded, [])
            await database.session(lambda s: self._commit(s, decision, loaded))

        def by_rewards(s: Session) -> None:
            self._commit(s, self._decider.by_rewards(s, scored, events), scored)

        if scored:
            await database.session(by_rewards)

    async def _start_over(self) -> None:
        """Continue after the last commit of this name, of this process or another."""
        self._staged.groups.clear()
        self._staged.rejections.clear()
        row = await self.experiment.database.read(
            writer_queries.consumer_row, self.experiment.key, self.name
        )
        assert row is not None  # registered before
        self._decider.calls = row.calls
        await self._reader.load(row)

    async def _register(self) -> None:
        event = new_event(
            ConsumerRegistered(consumer=self.name, kind="strategy", config=self.config)
        )
        database, key = self.experiment.database, self.experiment.key
        row = await database.read(writer_queries.consumer_row, key, self.name)
        if row is None:
            row = await database.write(
                writer_queries.registered, key, self.name, event, clock=now_us
            )
        if row.kind != "strategy":
            raise ConflictingStrategyError(
                f"{self.name!r} is a {row.kind} of experiment {self.experiment.name!r}: give the "
                "annotation set a name of its own with name="
            )
        as_before = with_over(self._args, self.strategy, row.config)
        if as_before != with_over(self._args, self.strategy, None):
            _logger.warning("%s", one_line(_COUNTS_ROWS.format(self.name)))
            setup = self._configure(row.config)
            self._decider = Decider(self.experiment, setup, self._reader, self._cache)
        if not same_config(row.config, self.config, self.strategy):
            before, now = config_diff(row.config, self.config, self.strategy)
            raise ConflictingStrategyError(
                f"the annotation set {self.name!r} of experiment {self.experiment.name!r} was made "
                f"with {before}, this is {now}: give the new one a name of its own with name= "
                "(--name)"
            )

    def _commit(self, s: Session, decision: Decision, units: Sequence[ReadyUnit]) -> None:
        """Commit the decision on ``units`` together with the cursor."""
        if not decision.events:
            return
        store, key = self.experiment.database.segments, self.experiment.key
        reached("before-annotate")

        def commit(tx: Transaction) -> None:
            decision.append(tx, store, key, self.name, require=self._lease.require)
            reached("inside-annotate")

        s.write(commit)
        self._reader.committed()
        reached("after-annotate")
        self._annotated += decision.annotated
        self._rejected += decision.rejected
        self._reasons.update(decision.reasons)
        if decision.annotated:
            self._watch.accepted()
        elif decision.rejected and units:
            groups = [group for unit in units for group in unit.groups if group.members]
            if groups:
                first = groups[0].members[0]
                row = self._reader.rows(s, [first])[first]
                self._watch.rejected(len(groups), decision.reasons, lambda: row.eid.uid)

    def _commit_late(
        self, s: Session, decision: Decision, late: Sequence[int]
    ) -> dict[int, ExperienceRow]:
        """Commit the rejection of late rows; return these rows."""
        self._commit(s, decision, [])
        return self._reader.rows(s, late)


async def run_strategy(
    experiment: ExperimentHandle,
    strategy: StrategyLike,
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
    refuse_unknown("run_strategy", grouping, GroupingRules.__slots__)
    rules = GroupingRules.of(experiment.config, **grouping)
    if rewards is not None:
        known = await experiment.database.read(writer_queries.scorings, experiment.key)
        if rewards not in known:
            raise UnknownNameError(
                f"experiment {experiment.name!r} has no scoring {rewards!r} "
                f"(there: {', '.join(known) or 'none'})"
            )
    consumer = StrategyConsumer(experiment, strategy, args, name=name, rules=rules, rewards=rewards)
    return await consumer.run(follow=follow)
