"""What is stuck, since when, and what would move it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from shlex import quote
from typing import Any

from trinity_buffer.identity import TURNS
from trinity_buffer.pipeline.coordination.diagnosis import Lack, Surroundings, counted, lacks_of
from trinity_buffer.pipeline.coordination.presence import is_unheard, own_wait_of, place_of
from trinity_buffer.pipeline.coordination.stall import is_at_work
from trinity_buffer.pipeline.handle import now_us
from trinity_buffer.pipeline.store import Store
from trinity_buffer.pipeline.write.planning import (
    PUBLISHING,
    Admission,
    is_unpublished,
    unpublished,
)
from trinity_buffer.store import counters, counts, log, promises, trainer_queries, writer_queries
from trinity_buffer.store.promises import PresenceRow
from trinity_buffer.store.rows import ConsumerRow
from trinity_buffer.store.trainer_queries import Reader
from trinity_buffer.store.transaction import Transaction
from trinity_buffer.store.wal import log_state

REWARD = (
    'send the recorder `POST /v1/rollouts/TASK/RUN/reward` with `{"reward": 1.0}`, or close them '
    "by `/seal`"
)
"""What moves a rollout that a recorder keeps open."""


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
            stuck.append(Stuck("", state.told(), None, state.remedy))
    names = await store.experiments()
    opened = [await store.experiment(name) for name in names]
    experts = {entry.config.get("expert_experiment") for entry in opened}
    keys = {entry.name + TURNS: entry.key for entry in opened}
    asked = opened if experiment is None else [await store.experiment(experiment)]
    for entry in asked:
        look = _Look(
            entry.name, entry.key, is_expert=entry.name in experts, recorded=keys.get(entry.name)
        )
        people, stuck_here = await database.read(look)
        here += people
        stuck += stuck_here
    return Examination(store.url, tuple(here), tuple(stuck))


class _Look:
    """One transaction's look at one experiment; an expert's is read by another's trainer.

    What a recorder's turns become is in the experiment ``recorded``.
    """

    def __init__(self, name: str, key: int, *, is_expert: bool, recorded: int | None) -> None:
        self._name = name
        self._key = key
        self._is_expert = is_expert
        self._recorded = recorded
        self._trainer: str | None = None  # that the command would start

    def __call__(self, tx: Transaction) -> tuple[list[Here], list[Stuck]]:
        around = Surroundings.of(tx, self._key)
        here = [
            Here(self._name, row.role, row.name, place_of(row), row.waiting_for)
            for row in around.here
        ]
        config = writer_queries.config_of(tx, self._recorded or self._key)
        if config is None or config[1] or self._is_expert:
            return here, []  # what is finished waits for nothing, and an expert's for a run
        self._trainer = config[0].get("trainer", "trainer")
        kinds = ("strategy", "trainer")
        strategies, trainers = (
            [row for row in around.consumers.values() if row.kind == kind] for kind in kinds
        )
        wanted = {str(row.config.get("strategy")) for row in trainers}
        stuck = [
            *self._of_explorers(tx, around, [row for row in strategies if row.name in wanted]),
            *self._of_unread(tx, strategies),
            *(
                finding
                for row in strategies
                if row.name in wanted or not trainers
                for finding in self._of_strategy(tx, around, row)
            ),
            *(finding for row in trainers for finding in self._of_trainer(tx, around, row)),
            *self._of_unpublished(tx, config[0]),
            *self._of_cycles(tx, around, config[0]),
            *self._of_waiting(around),
            *self._of_unheard(tx, around),
        ]
        return here, stuck

    def _since(self, tx: Transaction, position: int | None) -> float | None:
        if not position:
            return None
        at = log.recorded_at(tx, self._key, [position]).get(position)
        return None if at is None else at / 1e6

    def _of_explorers(
        self, tx: Transaction, around: Surroundings, strategies: list[ConsumerRow]
    ) -> Iterator[Stuck]:
        lacks: dict[str, Lack] = {}
        for strategy in [*strategies, None]:
            lacks |= {lack.batch: lack for lack in lacks_of(tx, self._key, strategy)}
        for lack in lacks.values():
            if around.who("explorer", lack.actor or None) is not None:
                continue
            since = self._since(tx, lack.planned_at)
            yield Stuck(self._name, lack.told(), since, _remedy_of(lack))

    def _of_unread(self, tx: Transaction, strategies: list[ConsumerRow]) -> Iterator[Stuck]:
        if self._recorded is not None:
            number, first = counts.unrewarded(tx, self._key, self._recorded)
            if number:
                name = self._name.removesuffix(TURNS)
                what = f"{counted(number, 'rollout')} of {name!r} without a reward"
                yield Stuck(self._name, what, self._since(tx, first), REWARD)
            return
        if strategies:
            return
        number, first = counts.unseen(tx, self._key, None)
        if number:
            what = f"{counted(number, 'experience')} recorded, and no annotation set"
            remedy = (
                "run a strategy (`trinity-buffer annotate`), or train on what was recorded "
                "(strategy=None)"
            )
            yield Stuck(self._name, what, self._since(tx, first), remedy)

    def _of_strategy(
        self, tx: Transaction, around: Surroundings, row: ConsumerRow
    ) -> Iterator[Stuck]:
        number, first = counts.unseen(tx, self._key, row)
        if not number or around.who("strategy", row.name) is not None:
            return
        if row.name == "recorded":
            remedy = "start its trainer again, which makes the groups of what was recorded"
        else:
            remedy = (
                f"`trinity-buffer annotate --name {row.name} --follow`, or "
                f"run_strategy(name={row.name!r})"
            )
        seen = f"{counted(number, 'experience')} unseen"
        what = f"no process annotates set {row.name!r}: {seen}"
        yield Stuck(self._name, what, self._since(tx, first), remedy)

    def _of_trainer(
        self, tx: Transaction, around: Surroundings, row: ConsumerRow
    ) -> Iterator[Stuck]:
        if around.who("trainer", row.name) is not None:
            return
        named = "" if row.name == self._trainer else " --set " + quote(f"trainer={row.name}")
        again = f"start trainer {row.name!r} again (`trinity-buffer train --follow{named}`)"
        leased = counts.first_uncommitted(tx, self._key, row)
        if leased is not None:
            steps = counted(row.leased_step - row.committed_step, "step")
            what = (
                f"no process trains as {row.name!r}: {steps} handed out and not committed, from "
                f"step {row.committed_step + 1} on"
            )
            yield Stuck(
                self._name, what, self._since(tx, leased), f"{again}: it is served them first"
            )
        numbers = counters.numbers_of(tx, self._key)
        terms, _, _ = counts.of_trainer(tx, self._key, row, numbers)
        if terms.ready:
            reader = Reader(self._key, row.name, "", row.name)
            start = trainer_queries.first_undelivered(tx, reader)
            first = counts.first_row(tx, self._key, terms.annotation_set, start)
            since = self._since(tx, first)
            rows = f"{counted(terms.ready, 'row')} of set {terms.annotation_set!r}"
            yield Stuck(
                self._name, f"no process trains as {row.name!r}: {rows} ready", since, again
            )

    def _of_cycles(
        self, tx: Transaction, around: Surroundings, config: dict[str, Any]
    ) -> Iterator[Stuck]:
        """Yield explorers, trainer and strategy if each is there, and waits for the next."""
        rules = Admission.of(config)
        known, trainer = around.consumers.get(rules.trainer), around.who("trainer", rules.trainer)
        explorers = [row for row in around.here if row.role == "explorer" and row.waiting_for]
        if known is None or trainer is None or not (trainer.waiting_for and explorers):
            return
        strategy = around.who("strategy", str(known.config.get("strategy")))
        if is_at_work(tx, self._key) or (strategy is not None and not strategy.waiting_for):
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
        since = self._since(tx, log.head(tx, self._key))
        what = f"{' waits for '.join(names)}: {'; '.join(map(own_wait_of, circle))}"
        yield Stuck(self._name, what, since, remedy)

    def _of_unpublished(self, tx: Transaction, config: dict[str, Any]) -> Iterator[Stuck]:
        """Yield the trainer that commits steps and publishes no weights, if rollouts show that."""
        rules = Admission.of(config)
        backlog = trainer_queries.backlog(tx, self._key, rules.trainer)
        version = writer_queries.newest_version(tx, self._key)
        if is_unpublished(rules, backlog) and version is not None and version <= backlog.published:
            step = trainer_queries.step_at(tx, self._key, rules.trainer, backlog.published + 1)
            since = self._since(tx, None if step is None else step.committed_at)
            made = f"the newest rollout was made with version {version}"
            yield Stuck(self._name, f"{unpublished(rules, backlog)}; {made}", since, PUBLISHING)

    def _of_waiting(self, around: Surroundings) -> Iterator[Stuck]:
        """Yield the trainers that wait for a set that is not there."""
        for row in around.here:
            if row.role == "trainer" and row.name not in around.consumers and row.waiting_for:
                remedy = "annotate a set of this name, or start the trainer on one that is there"
                yield Stuck(self._name, row.waiting_for, row.started_at / 1e6, remedy)

    def _of_unheard(self, tx: Transaction, around: Surroundings) -> Iterator[Stuck]:
        """Yield the processes that are there, and are paused or hang."""
        now = now_us()
        for row in around.here:
            held = promises.holder(tx, self._key, row.name)
            expired = held is not None and held[2] < now and _is_its_lease(row, held[0])
            if is_unheard(row, lease_expired=expired):
                place = f"pid {row.pid} on host {promises.name_of(row.host)}"
                yield Stuck(
                    self._name,
                    f"{row.role} {row.name!r} has not been seen for "
                    f"{(now - row.last_seen) / 1e6:.0f} s: {place}",
                    row.last_seen / 1e6,
                    f"it is paused, or hangs: look at it (`kill -CONT {row.pid}` lets a paused one "
                    "go on), or end it and start it again",
                )


def _is_its_lease(row: PresenceRow, owner: str) -> bool:
    """Return whether a process may hold a lease of its name: of a strategy others stand by."""
    holds = owner.startswith(f"{row.host}:{row.pid}:")
    return row.role == "trainer" or (row.role == "strategy" and holds)


def _remedy_of(lack: Lack) -> str:
    if lack.actor:
        return (
            f"start explorer {lack.actor!r} again, or another one with --take-over, which "
            "generates what is missing; or seal the batch as it is "
            f"(`trinity-buffer seal {quote(lack.batch)}`)"
        )
    return "plan the batch, seal it, or run its strategy with rollouts_per_group= or deadline_s="
