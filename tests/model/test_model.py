"""The real store beside a model of it in a few sets: whatever happens, both say the same."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack, ExitStack
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import update
from typing_extensions import override

from tests.contract.making import rollout
from tests.handles import Experiment, Store, SyncTrainStream, TrainStep
from tests.whole_stores import diff_projections, rebuild
from trinity_buffer import compact, open_store, open_train_stream, run_strategy, verify
from trinity_buffer.errors import (
    ConflictingExperienceError,
    ConflictingPlanError,
    ConflictingSealError,
    LeaseHeldError,
    LeaseLostError,
    UnknownNameError,
)
from trinity_buffer.store import tables

T = TypeVar("T")

TASKS, RUNS = 2, 2
BATCHES = ("b0", "b1", "b2")
TURNS_PER_COMPARISON = 10
EXPERIMENTS = count()

batches = st.sampled_from(BATCHES)
some_rollouts = st.lists(
    st.tuples(batches, st.integers(0, TASKS - 1), st.integers(0, RUNS - 1)), min_size=1, max_size=5
)
Address = tuple[str, int, int]
"""(batch, task, run)"""


class Model:
    """What must be so: sets of addresses, and what each step was made of."""

    def __init__(self) -> None:
        self.planned: set[str] = set()
        self.sealed: set[str] = set()
        self.stored: set[Address] = set()
        self.late: set[Address] = set()
        self.annotated: list[frozenset[Address]] = []
        self.steps: dict[int, frozenset[Address]] = {}
        self.committed = 0
        self.deleted: set[int] = set()

    def group(self, batch: str, task: int) -> frozenset[Address]:
        """Return what is stored of a group, without what came too late."""
        return frozenset(a for a in self.stored - self.late if a[:2] == (batch, task))

    def ready(self) -> set[frozenset[Address]]:
        """Return the groups that have all of their runs, or get no more of them."""
        pairs = {(batch, task) for batch, task, _ in self.stored - self.late}
        whole = {p for p in pairs if len(self.group(*p)) == RUNS or p[0] in self.sealed}
        return {self.group(*pair) for pair in whole} - set(self.annotated)


class StoreMachine(RuleBasedStateMachine):
    """Random histories of one experiment, with one strategy and one trainer."""

    url: str
    folder: Path

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.name = f"run-{next(EXPERIMENTS)}"
        self.runner = asyncio.Runner()
        self.trainers = ExitStack()
        self.stream: SyncTrainStream | None = None
        self.fenced: SyncTrainStream | None = None
        self.delivered: list[TrainStep] = []
        self.orphans: list[TrainStep] = []
        self.expired = False
        self.annotates = False
        self.turns = 0
        self.opened = AsyncExitStack()
        self.store: Store = self.run(self.opened.enter_async_context(open_store(self.url)))
        config = {"groups_per_step": 1, "rollouts_per_group": RUNS}
        self.experiment: Experiment = self.run(self.store.experiment(self.name, config=config))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` to its end."""
        return self.runner.run(work)

    @override
    def teardown(self) -> None:
        """Serve what is left, so that all that was annotated was served once; then close."""
        self.close_stream()
        self.train()
        while self.stream is not None:
            self.train()
        assert {*self.model.steps.values()} == {*self.model.annotated}
        self.compare()
        self.trainers.close()
        self.run(self.opened.aclose())
        self.runner.close()

    # -- explorers

    @rule(batch=batches)
    def plan(self, batch: str) -> None:
        writer = self.experiment.writer(batch)
        planning = writer.plan(batch, list(range(TASKS)), RUNS)
        used = self.held(batch) or batch in self.model.sealed
        if used and batch not in self.model.planned:
            with pytest.raises(ConflictingPlanError):
                self.run(planning)
            return
        assert self.run(planning)
        self.model.planned.add(batch)
        missing = {(batch, *pair) for pair in self.run(writer.missing(batch))}
        everything = {(batch, task, run) for task in range(TASKS) for run in range(RUNS)}
        assert missing == everything - self.model.stored

    def held(self, batch: str) -> int:
        """Return how much of a batch is stored, what came too late included."""
        return sum(address[0] == batch for address in self.model.stored)

    @rule(addresses=some_rollouts)
    def write(self, addresses: list[Address]) -> None:
        """Among them what is stored already, what comes twice in one call, and what is too late."""
        writer = self.experiment.writer("e0")
        receipt = self.run(writer.write([rollout(*address) for address in addresses]))
        new = set(addresses) - self.model.stored
        late = {address for address in new if address[0] in self.model.sealed}
        assert (receipt.written, receipt.duplicates, receipt.rejected) == (
            len(new),
            len(addresses) - len(new),
            len(late),
        )
        self.model.stored |= new
        self.model.late |= late

    @rule(addresses=some_rollouts)
    def write_concurrently(self, addresses: list[Address]) -> None:
        """A call each, at the same time."""
        writer = self.experiment.writer("e1")

        async def all_of_them() -> int:
            calls = [writer.write([rollout(*address)]) for address in addresses]
            return sum(receipt.written for receipt in await asyncio.gather(*calls))

        new = set(addresses) - self.model.stored
        assert self.run(all_of_them()) == len(new)
        self.model.stored |= new
        self.model.late |= {address for address in new if address[0] in self.model.sealed}

    @precondition(lambda self: self.model.stored)
    @rule(data=st.data())
    def write_other_content(self, data: st.DataObject) -> None:
        address = data.draw(st.sampled_from(sorted(self.model.stored)))
        fresh = rollout(address[0], address[1], address[2], suffix="a1")
        with pytest.raises(ConflictingExperienceError):
            self.run(self.experiment.writer("e0").write([fresh, rollout(*address, seed=1)]))

    @rule(batch=batches, wrong=st.booleans())
    def seal(self, batch: str, wrong: bool) -> None:
        writer = self.experiment.writer(batch)
        held = sum(address[0] == batch for address in self.model.stored - self.model.late)
        if wrong:
            with pytest.raises(ConflictingSealError):
                self.run(writer.seal(batch, held + 1))
        else:
            self.run(writer.seal(batch, held))
            self.model.sealed.add(batch)

    # -- strategy

    @rule()
    def annotate(self) -> None:
        report = self.run(run_strategy(self.experiment, "grpo", {"epsilon": 1e-6}))
        self.annotates = True
        ready = self.model.ready()
        assert report.annotated == sum(map(len, ready))
        self.model.annotated += ready
        undecided = (
            self.model.stored - self.model.late - {a for g in self.model.annotated for a in g}
        )
        assert report.waiting == len(undecided)

    # -- trainer

    def open_stream(self) -> SyncTrainStream:
        opening = open_train_stream(
            self.url, experiment=self.name, strategy="grpo", groups_per_step=1, wait_for_lease=False
        )
        opened = self.trainers.enter_context(opening)
        self.expired = False
        return opened

    @rule()
    def train(self) -> None:
        """Take the next step; what was handed out before a crash comes first, and as it was."""
        if not self.annotates:
            with pytest.raises(UnknownNameError):
                self.open_stream()
            return
        if self.stream is None:
            self.stream = self.open_stream()
            self.delivered = []
            resume = self.stream.resume
            assert (resume.step if resume else 0) == self.model.committed
        step = next(self.stream, None)
        if step is None:
            self.close_stream()
            return
        assert step.step == self.model.committed + len(self.delivered) + 1
        assert step.recorded or step.step not in self.model.steps
        trained = self.addresses_of(step)
        assert self.model.steps.setdefault(step.step, trained) == trained
        assert trained in self.model.annotated
        assert len({*self.model.steps.values()}) == len(self.model.steps), (
            "a group was served twice"
        )
        self.delivered.append(step)

    def addresses_of(self, step: TrainStep) -> frozenset[Address]:
        """Return what a step trains on, by what its tensors say of the prompt's group."""

        async def find() -> frozenset[Address]:
            wanted = set(step.manifest.experiences)
            table = tables.experience
            query = table.select().where(table.c.experiment == self.experiment.key)
            rows = await self.store.database.read(lambda tx: tx.execute(query).all())
            return frozenset(
                (row.batch, int(row.task), row.run) for row in rows if row.address in wanted
            )

        assert sum(len(m["group_index"]) for m in step.microbatches) == len(
            step.manifest.experiences
        )
        return self.run(find())

    @precondition(lambda self: self.stream is not None and self.delivered)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        """Commit what was delivered, or some of it; a second time changes nothing."""
        assert self.stream is not None
        upto = data.draw(st.integers(0, len(self.delivered) - 1))
        for _ in range(2):
            self.stream.commit(self.delivered[upto])
        self.model.committed = self.delivered[upto].step
        self.delivered = self.delivered[upto + 1 :]

    @precondition(lambda self: self.stream is not None)
    @rule()
    def close_stream(self) -> None:
        """The trainer ends; what it has not committed will be served again."""
        self.stream, self.fenced, self.delivered, self.orphans = None, None, [], []
        self.trainers.close()

    @precondition(lambda self: self.stream is not None and not self.expired)
    @rule()
    def nobody_else_may_train(self) -> None:
        with pytest.raises(LeaseHeldError):
            self.open_stream()

    @precondition(lambda self: self.stream is not None and self.fenced is None)
    @rule()
    def take_over(self) -> None:
        """The trainer is silent for longer than its lease, and another takes it."""
        self.expire()
        self.fenced, self.orphans = self.stream, self.delivered
        self.stream, self.delivered = None, []
        self.train()

    def expire(self) -> None:
        async def make_old() -> None:
            mine = tables.lease.c.experiment == self.experiment.key
            old = update(tables.lease).where(mine).values(expires_at=1)
            await self.store.database.write(lambda tx: tx.execute(old))

        self.run(make_old())

    @precondition(lambda self: self.stream is not None)
    @rule()
    def expire_untaken(self) -> None:
        """A lease that expired and that nobody took goes on: `commit` and `train` must succeed."""
        self.expire()
        self.expired = True  # until somebody opens: its holder renews it only some seconds later

    @precondition(lambda self: self.stream is not None and self.orphans)
    @rule()
    def commit_of_the_fenced(self) -> None:
        assert self.fenced is not None
        new = [step for step in self.orphans if step.step > self.model.committed]
        for step in new:
            with pytest.raises(LeaseLostError):
                self.fenced.commit(step)

    # -- keepers

    @rule()
    def rebuild(self) -> None:
        report = self.run(rebuild(self.store.database, self.experiment.key))
        assert report.mended == {}

    @precondition(lambda self: self.stream is None and self.model.committed)
    @rule(delete=st.booleans())
    def compact(self, delete: bool) -> None:
        """Only what every trainer is done with goes, and what was trained can still be told."""
        archive = None if delete else self.folder
        self.run(compact(self.experiment, keep_steps=0, archive=archive, delete=delete))

    @invariant()
    def rebuilt_is_live(self) -> None:
        """Compared now and then and in the end: it takes ten times as long as a rule."""
        self.turns += 1
        if self.turns % TURNS_PER_COMPARISON == 0:
            self.compare()

    def compare(self) -> None:
        assert self.run(diff_projections(self.store.database, self.experiment.key)) == []

    @rule(families=st.sampled_from([(), ("light",), ("light", "tokens", "text", "heavy")]))
    def verify(self, families: tuple[str, ...]) -> None:
        """Everything adds up, in the program's own words and in the model's."""
        report = self.run(verify(self.experiment))
        assert report.problems == ()

        async def addresses() -> set[Address]:
            return {
                (str(event_row.eid.batch), int(event_row.eid.task), event_row.eid.run)
                async for event_row in self.experiment.read(families=families, include_refused=True)
            }

        assert self.run(addresses()) == self.model.stored


@pytest.fixture
def machine(store_url: str, tmp_path: Path) -> type[StoreMachine]:
    """The machine on a store of this test's; each history has an experiment of its own."""

    class OnThisStore(StoreMachine):
        url = store_url
        folder = tmp_path

    return OnThisStore


def check(machine: type[StoreMachine], histories: int, steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=histories,
            stateful_step_count=steps,
            deadline=None,
            phases=(Phase.explicit, Phase.reuse, Phase.generate),
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.long
def test_the_store_and_the_model_agree(machine: type[StoreMachine]) -> None:
    check(machine, histories=4, steps=20)


@pytest.mark.long
def test_the_store_and_the_model_agree_in_many_histories(machine: type[StoreMachine]) -> None:
    check(machine, histories=10, steps=50)
