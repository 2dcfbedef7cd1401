"""One learning run: everything goes through a store, in one process and one event loop."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import torch
from anyio.from_thread import BlockingPortal

import trinity_buffer as tb
from benchmarks.learning_setups import SETUPS, Setup
from trinity_buffer.algorithm import build
from trinity_buffer.experience import EID, Experience
from trinity_buffer.explorer.explorer import Explorer, ExplorerSettings
from trinity_buffer.explorer.rollout import evaluate
from trinity_buffer.explorer.tasks import Problem, Task
from trinity_buffer.pipeline.annotating.strategy_consumer import run_strategy
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.pipeline.streaming.stream_options import TrainStep
from trinity_buffer.pipeline.streaming.sync_stream import SyncTrainStream
from trinity_buffer.policy import PolicyConfig, TransformerPolicy, load_policy, save_policy
from trinity_buffer.trainer.requirements import strategies_of, strategy_of, stream_options
from trinity_buffer.trainer.trainer import StepReport, Trainer, TrainerSettings

PROBLEMS = 512
"""Fresh ones, per evaluation."""

IMPORT_CHUNK = 2048


@dataclass(slots=True)
class Outcome:
    """What came of a run.

    Attributes:
        reached: the first evaluated step at which the threshold was reached; None: never.
        curve: (step, accuracy) of every evaluation.
        cpu_s: processor time, everything included.
    """

    reached: int | None = None
    curve: list[tuple[int, float]] = field(default_factory=list)
    cpu_s: float = 0.0


class ExploringStream(SyncTrainStream):
    """A train stream that has its data made when it is asked for a step."""

    more: Callable[[int], Any]
    asked = 0

    async def _receive(self) -> TrainStep | None:
        self.asked += 1
        await self.more(self.asked)
        return await super()._receive()


def run(name: str, setup: Setup, seed: int, folder: Path, teacher: Path | None) -> Outcome:
    """Train ``name`` from random weights and return how far it came.

    Args:
        name: of the algorithm.
        setup: its numbers.
        seed: of weights, problems and rollouts.
        folder: for the store and the checkpoints.
        teacher: policy file, where the setup distils one.
    """
    begin = time.process_time()
    learning = _Learning(name, setup, seed, folder, teacher)
    anyio.run(learning.run)
    learning.outcome.cpu_s = time.process_time() - begin
    return learning.outcome


class _Learning:
    def __init__(
        self, name: str, setup: Setup, seed: int, folder: Path, teacher: Path | None
    ) -> None:
        self.setup, self.seed, self.folder = setup, seed, folder
        self.task = setup.make_task()
        self.teacher = None if teacher is None else load_policy(teacher)
        given = {"rollouts_per_group": setup.rollouts_per_group, **setup.args}
        self.algorithm = build(name, **given)
        self.outcome = Outcome()

    def first_policy(self) -> TransformerPolicy:
        """Return random weights."""
        shape = PolicyConfig(self.task.vocab_size, 64, 2, 2, self.task.max_length)
        return TransformerPolicy(shape, seed=self.seed)

    async def run(self) -> None:
        setup, name = self.setup, f"{self.algorithm.name}-{self.seed}"
        async with tb.open_store(f"sqlite:///{self.folder}/{name}.db") as store:
            schema = self.algorithm.type.schema
            experiment = await store.experiment(name, config={"schema": schema})
            self.algorithm.check_schema(schema)
            if setup.data != "rollouts":
                await _record(experiment, setup, self.task, self.seed)
            if setup.expert:
                expert = await store.experiment(f"{name}-expert", config={"schema": "sft"})
                await _record(expert, replace(setup, data="solutions"), self.task, self.seed)
            rollouts = setup.data == "rollouts"
            options = stream_options(self.algorithm, teacher=self.teacher is not None)
            async with (
                experiment.train_stream(
                    strategy=strategy_of(self.algorithm),
                    groups_per_step=setup.groups_per_step,
                    max_tokens=self.task.max_length,
                    follow=rollouts,
                    expert_experiment=f"{name}-expert" if setup.expert else None,
                    **options,
                ) as stream,
                BlockingPortal() as portal,
            ):
                exploring = ExploringStream(portal, stream)
                exploring.more = self.explorer(experiment) if rollouts else _nothing
                await anyio.to_thread.run_sync(self.train, exploring)

    def explorer(self, experiment: Experiment) -> Callable[[int], Any]:
        """Return what explores and annotates until a step can be made of what the strategy kept."""
        plan = self.algorithm.sample.plan(1, self.setup.groups_per_step)
        names, args = strategies_of(self.algorithm)

        seen = kept = batches = 0

        async def more(step: int) -> None:
            nonlocal seen, kept, batches
            while kept < plan.usual * step:
                batches += 1
                await self.explore(experiment, plan.usual, batches)
                if not names:
                    kept += plan.usual
                    continue
                await run_strategy(experiment, names if len(names) > 1 else names[0], args)
                async for event in experiment.events(seen, kinds=("ExperiencesAnnotated",)):
                    seen, kept = event.position, kept + len(event.body["planned"])

        return more

    async def explore(self, experiment: Experiment, groups: int, batches: int) -> None:
        """Explore until so many batches are stored in all, with the newest policy."""
        settings = ExplorerSettings(
            actor="e0",
            seed=self.seed,
            groups_per_batch=groups,
            rollouts_per_group=self.setup.rollouts_per_group,
            groups_per_write=groups,
            max_batches=batches,
        )
        explorer = Explorer(experiment, self.task, self.first_policy, settings)
        await explorer.run(lambda _: None)

    def train(self, stream: SyncTrainStream) -> None:
        torch.set_num_threads(1)
        setup = self.setup
        settings = TrainerSettings(
            checkpoints=self.folder / f"checkpoints-{self.seed}",
            learning_rate=setup.learning_rate,
            critic_learning_rate=setup.critic_learning_rate,
            warmup_steps=setup.warmup_steps,
            decay_steps=setup.max_steps,
            max_steps=setup.max_steps,
            commit_every_steps=1 if setup.data == "rollouts" else setup.evaluate_every,
        )
        trainer = Trainer(stream, self.first_policy, self.algorithm, settings, teacher=self.teacher)

        def report(step: StepReport) -> bool:
            if step.step % setup.evaluate_every and step.step != setup.max_steps:
                return False
            accuracy = evaluate(trainer.policy, self.task, PROBLEMS, seed=self.seed + 7_000)
            self.outcome.curve.append((step.step, round(accuracy, 4)))
            if accuracy >= setup.threshold:
                self.outcome.reached = step.step
            return self.outcome.reached is not None

        trainer.run(report)


async def _nothing(step: int) -> None:
    """Recorded data are there from the beginning."""


async def _record(experiment: Experiment, setup: Setup, task: Task, seed: int) -> None:
    """Write as many solutions or pairs as the run's steps can take."""
    writer = experiment.writer("import")
    draw = random.Random(seed)
    number = setup.groups_per_step * setup.max_steps
    for start in range(0, number, IMPORT_CHUNK):
        made = []
        for index in range(start, min(start + IMPORT_CHUNK, number)):
            problem = task.problem(seed, "import", index)
            eid = EID(batch="import", task=index, run=0, step=0)
            made.append(_example(problem, eid, setup, task, draw))
        await writer.write(made)


def _example(
    problem: Problem, eid: EID, setup: Setup, task: Task, draw: random.Random
) -> Experience:
    prompt, answer = list(problem.prompt), list(problem.answer)
    if setup.data == "pairs":
        wrong = answer
        while wrong == answer:
            wrong = [draw.randrange(10) for _ in answer]
        return Experience(eid=eid, tokens=prompt, chosen=answer, rejected=wrong)
    return Experience(
        eid=eid,
        tokens=prompt + answer,
        prompt_length=len(prompt),
        prompt_text=task.text(prompt),
        response_text=task.text(answer),
    )


def trained_teacher(folder: Path) -> Path:
    """Return the file of a policy that has learnt the task from solutions, trained once."""
    setup = replace(SETUPS["sft"], threshold=2.0, max_steps=150, groups_per_step=128)
    path = folder / f"teacher-{setup.digest}.safetensors"
    if not path.exists():
        with tempfile.TemporaryDirectory() as made:
            learning = _Learning("sft", setup, 1234, Path(made), None)
            anyio.run(learning.run)
            newest = max(Path(made).glob("checkpoints-1234/step-*/policy.safetensors"))
            folder.mkdir(parents=True, exist_ok=True)
            save_policy(load_policy(newest), path)
    return path
