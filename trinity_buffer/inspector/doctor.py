"""What is stuck, since when, and what would move it."""

from __future__ import annotations

from dataclasses import dataclass
from shlex import quote

from trinity_buffer.events import now_us
from trinity_buffer.identity import TURNS
from trinity_buffer.pipeline.coordination import waiting
from trinity_buffer.pipeline.coordination.diagnosis import Lack, RunSnapshot, counted, lacks_of
from trinity_buffer.pipeline.store import Experiment, Store
from trinity_buffer.pipeline.write import planning
from trinity_buffer.store import counters, counts, leases, log, trainer_queries, writer_queries
from trinity_buffer.store.rows import ConsumerRow
from trinity_buffer.store.sqlite import log_state
from trinity_buffer.store.trainer_queries import Reader
from trinity_buffer.store.transaction import Transaction

REWARD = (
    'send the recorder `POST /v1/rollouts/TASK/RUN/reward` with `{"reward": 1.0}`, or close them '
    "by `/seal`"
)
"""What moves a rollout that a recorder keeps open."""

UNREAD = "run a strategy (`trinity-buffer annotate`), or train on what was recorded (strategy=None)"
"""What moves experiences that no strategy reads."""


@dataclass(frozen=True, slots=True)
class Stuck:
    """Something that no process moves.

    Attributes:
        experiment: where; "" of the store itself.
        what: is stuck.
        since: seconds since 1970, None where nothing tells.
        remedy: what would move it.
    """

    experiment: str
    what: str
    since: float | None
    remedy: str


@dataclass(frozen=True, slots=True)
class Here:
    """A process that is there.

    Attributes:
        place: its number, its host and when it was seen.
        waiting_for: what it said that it waits for; None: it works.
    """

    experiment: str
    role: str
    name: str
    place: str
    waiting_for: str | None


@dataclass(frozen=True, slots=True)
class Examination:
    """What `examine` has found."""

    url: str
    here: tuple[Here, ...]
    stuck: tuple[Stuck, ...]


async def examine(store: Store, experiment: str | None = None) -> Examination:
    """Return who is there and what is stuck, in one experiment or in all.

    Raises:
        UnknownExperimentError: there is none of this name.
    """
    database = store.database
    here: list[Here] = []
    stuck: list[Stuck] = []
    if database.dialect == "sqlite":
        state = await database.compute(log_state, database.path)
        if state.has_grown:
            stuck.append(Stuck("", state.message(), None, state.remedy))
    names = await store.experiments()
    opened = [await store.experiment(name) for name in names]
    # Of all experiments, even if one is asked about: another one may train on it.
    experts = {entry.config.get("expert_experiment") for entry in opened}
    keys = {entry.name + TURNS: entry.key for entry in opened}
    asked = opened if experiment is None else [await store.experiment(experiment)]
    for entry in asked:
        recorded, is_expert = keys.get(entry.name), entry.name in experts
        seen = await database.read(_Look, entry, recorded, is_expert=is_expert)
        here += seen.here
        stuck += seen.stuck
    return Examination(store.url, tuple(here), tuple(stuck))


class _Look:
    """One transaction's look at one experiment; an expert's is read by another's trainer.

    What a recorder's turns become is in the experiment ``recorded``.
    """

    def __init__(
        self, tx: Transaction, entry: Experiment, recorded: int | None, *, is_expert: bool
    ) -> None:
        self._tx, self._name, self._key = tx, entry.name, entry.key
        self._around = around = RunSnapshot.of(tx, self._key)
        self.here = [
            Here(self._name, row.role, row.name, waiting.describe_process(row), row.waiting_for)
            for row in around.here
        ]
        self.stuck: list[Stuck] = []
        config = writer_queries.config_of(tx, recorded or self._key)
        if config is None or config[1] or is_expert:
            return  # what is finished waits for nothing, and an expert's for a run
        rules = planning.Admission.of(config[0])
        consumers = around.consumers.values()
        strategies = [row for row in consumers if row.kind == "strategy"]
        trainers = [row for row in consumers if row.kind == "trainer"]
        wanted = {str(row.config.get("strategy")) for row in trainers}
        read = [row for row in strategies if row.name in wanted]
        self._of_explorers(read)
        if recorded is not None:
            number, first = counts.unrewarded(tx, self._key, recorded)
            rollouts = f"{counted(number, 'rollout')} of {self._name.removesuffix(TURNS)!r}"
            what, remedy = f"{rollouts} without a reward", REWARD
        else:
            number, first = (0, 0) if strategies else counts.unseen(tx, self._key, None)
            what = f"{counted(number, 'experience')} recorded, and no annotation set"
            remedy = UNREAD
        if number:
            self._add(what, remedy, at=first)
        for row in read if trainers else strategies:
            self._of_strategy(row)
        for row in trainers:
            self._of_trainer(row, is_configured=row.name == rules.trainer)
        self._of_unpublished(rules)
        self._of_cycles(rules)
        self._of_processes()

    def _add(
        self, what: str, remedy: str, *, at: int | None = None, since: float | None = None
    ) -> None:
        """Add what is stuck since the event ``at``, or since a time."""
        if at:
            us = log.recorded_at(self._tx, self._key, [at]).get(at)
            since = None if us is None else us / 1e6
        self.stuck.append(Stuck(self._name, what, since, remedy))

    def _of_explorers(self, strategies: list[ConsumerRow]) -> None:
        lacks: dict[str, Lack] = {}
        # None: batches that no strategy waits for yet.
        for strategy in [*strategies, None]:
            lacks |= {lack.batch: lack for lack in lacks_of(self._tx, self._key, strategy)}
        for lack in lacks.values():
            if self._around.who("explorer", lack.actor or None) is not None:
                continue
            remedy = (
                "plan the batch, seal it, or run its strategy with rollouts_per_group= or "
                "group_timeout_s="
            )
            if lack.actor:
                remedy = (
                    f"start explorer {lack.actor!r} again, or another one with --take-over, which "
                    "generates what is missing; or seal the batch as it is "
                    f"(`trinity-buffer seal {quote(lack.batch)}`)"
                )
            self._add(lack.describe(), remedy, at=lack.planned_at)

    def _of_strategy(self, row: ConsumerRow) -> None:
        number, first = counts.unseen(self._tx, self._key, row)
        if not number or self._around.who("strategy", row.name) is not None:
            return
        if row.name == "recorded":
            remedy = "start its trainer again, which makes the groups of what was recorded"
        else:
            remedy = (
                f"`trinity-buffer annotate --name {quote(row.name)} --follow`, or "
                f"run_strategy(name={row.name!r})"
            )
        seen = f"{counted(number, 'experience')} unseen"
        self._add(f"no process annotates set {row.name!r}: {seen}", remedy, at=first)

    def _of_trainer(self, row: ConsumerRow, *, is_configured: bool) -> None:
        tx, key = self._tx, self._key
        if self._around.who("trainer", row.name) is not None:
            return
        named = "" if is_configured else " --set " + quote(f"trainer={row.name}")
        again = f"start trainer {row.name!r} again (`trinity-buffer train --follow{named}`)"
        missing = f"no process trains as {row.name!r}"
        for first in trainer_queries.steps(tx, key, row.name, after=row.committed_step, limit=1):
            steps = counted(row.leased_step - row.committed_step, "step")
            what = f"{missing}: {steps} handed out and not committed, from step {first.step} on"
            self._add(what, f"{again}: it is served them first", at=first.leased_at)
        # Rows may be ready whether or not steps are uncommitted: both are said.
        terms = counts.of_trainer(tx, key, row, counters.numbers_of(tx, key))
        if terms.ready:
            start = trainer_queries.first_undelivered(tx, Reader(key, row.name, "", row.name))
            rows = f"{counted(terms.ready, 'row')} of set {terms.annotation_set!r}"
            at = counts.first_row(tx, key, terms.annotation_set, start)
            self._add(f"{missing}: {rows} ready", again, at=at)

    def _of_cycles(self, rules: planning.Admission) -> None:
        """Add explorers, trainer and strategy if each is there, and waits for the next."""
        around = self._around
        known, trainer = around.consumers.get(rules.trainer), around.who("trainer", rules.trainer)
        # Those that wait say so themselves; one that computes moves the run.
        explorers = [row for row in around.here if row.role == "explorer" and row.waiting_for]
        if known is None or trainer is None or not (trainer.waiting_for and explorers):
            return
        strategy = around.who("strategy", str(known.config.get("strategy")))
        decides = strategy is not None and not strategy.waiting_for
        if decides or any(map(waiting.is_at_work, leases.processes(self._tx, self._key))):
            return
        circle = [explorers[0], trainer]
        steps, most = known.leased_step - known.committed_step, rules.most_uncommitted_steps
        remedy = "bring what the last of them lacks, or loosen the bound that the first waits for"
        if most is not None and steps > most:
            remedy = (
                f"{counted(steps, 'step')} are handed out and not committed: commit at least once "
                f"in {counted(most, 'step')} (commit_every_steps, save_steps), or set "
                f"max_staleness to {steps}"
            )
        elif strategy is not None:
            circle.append(strategy)
        names = [f"{row.role} {row.name!r}" for row in [*circle, circle[0]]]
        what = f"{' waits for '.join(names)}: {'; '.join(map(waiting.own_wait_of, circle))}"
        self._add(what, remedy, at=log.head(self._tx, self._key))

    def _of_unpublished(self, rules: planning.Admission) -> None:
        """Add the trainer that commits steps and publishes no weights, if rollouts show that."""
        tx, key = self._tx, self._key
        backlog = trainer_queries.backlog(tx, key, rules.trainer)
        version = writer_queries.newest_version(tx, key)
        is_behind = version is not None and version <= backlog.published
        if is_behind and planning.is_unpublished(rules, backlog):
            step = trainer_queries.step_at(tx, key, rules.trainer, backlog.published + 1)
            made = f"the newest rollout was made with version {version}"
            at = None if step is None else step.committed_at
            self._add(f"{planning.unpublished(rules, backlog)}; {made}", planning.PUBLISHING, at=at)

    def _of_processes(self) -> None:
        """Add trainers that wait for a set that is not there, and what is paused or hangs."""
        here, now = self._around.here, now_us()
        for row in here:
            is_unknown = row.role == "trainer" and row.name not in self._around.consumers
            if is_unknown and row.waiting_for:
                remedy = "annotate a set of this name, or start the trainer on one that is there"
                self._add(row.waiting_for, remedy, since=row.started_at / 1e6)
        for row in here:
            held = leases.holder(self._tx, self._key, row.name)
            expired = held is not None and held[2] < now
            # A process may hold a lease of its name: for that of a strategy others stand by.
            if held is not None and row.role != "trainer":
                own = held[0].startswith(f"{row.host}:{row.pid}:")
                expired = expired and own and row.role == "strategy"
            if waiting.is_unheard(row, lease_expired=expired):
                age = f"{(now - row.last_seen) / 1e6:.0f} s"
                place = f"pid {row.pid} on host {leases.name_of(row.host)}"
                self._add(
                    f"{row.role} {row.name!r} has not been seen for {age}: {place}",
                    f"it is paused, or hangs: look at it (`kill -CONT {row.pid}` lets a paused one "
                    "go on), or end it and start it again",
                    since=row.last_seen / 1e6,
                )
