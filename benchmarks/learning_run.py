"""One learning run: everything goes through a store, in one process and one event loop."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import torch
from anyio.from_thread import BlockingPortal
from typing_extensions import override

import trinity_buffer as tb
from benchmarks.learning_progress import Progress, StuckError, to_stderr
from benchmarks.learning_setups import SETUPS, Setup
from trinity_buffer.algorithm import build
from trinity_buffer.demo.policy import PolicyConfig, TransformerPolicy
from trinity_buffer.demo.rollout import TaskSampler, evaluate
from trinity_buffer.demo.tasks import Problem, Task
from trinity_buffer.experience import EID, Experience
from trinity_buffer.explorer.explorer import Explorer, ExplorerSettings
from trinity_buffer.pipeline.annotating.strategy_consumer import run_strategy
from trinity_buffer.pipeline.background import running
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.pipeline.streaming.stream_options import TrainStep
from trinity_buffer.pipeline.streaming.sync_stream import SyncTrainStream
from trinity_buffer.pipeline.streaming.train_stream import TrainStream
from trinity_buffer.trainer.requirements import strategies_of, strategy_of, stream_options
from trinity_buffer.trainer.trainer import StepReport, Trainer, TrainerSettings

PROBLEMS = 512
"""Fresh ones, per evaluation."""

IMPORT_CHUNK = 2048

BATCHES_PER_STEP = 100
"""A strategy that has kept too few groups of so many batches will not keep enough: an error."""


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
    """A train stream that has the data of a step made when it is asked for the step.

    Args:
        portal: of the event loop that the stream lives in.
        stream: what is read.
        more: makes the data of the step of this number.
        progress: told what is waited for.
    """

    def __init__(
        self,
        portal: BlockingPortal,
        stream: TrainStream,
        more: Callable[[int], Awaitable[None]],
        progress: Progress,
    ) -> None:
        super().__init__(portal, stream)
        self._asked = 0
        self._make = partial(portal.call, more)
        self._progress = progress

    @override
    def __next__(self) -> TrainStep:
        self._asked += 1
        self._make(self._asked)
        self._progress.enter(f"waits for step {self._asked} of the stream", waits=True)
        step = super().__next__()
        self._progress.enter(f"trains step {step.step}")
        return step


def run(
    name: str,
    setup: Setup,
    seed: int,
    folder: Path,
    teacher: Path | None = None,
    say: Callable[[str], None] = to_stderr,
) -> Outcome:
    """Train ``name`` from random weights and return how far it came.

    Args:
        name: of the algorithm.
        setup: its numbers.
        seed: of weights, problems and rollouts.
        folder: for the store and the checkpoints.
        teacher: policy file, where the setup distils one.
        say: takes a line about every evaluation, and about what takes long.

    Raises:
        StuckError: it got no further.
    """
    begin = time.process_time()
    learning = _Learning(name, setup, seed, folder, teacher, say)
    anyio.run(learning.run)
    learning.outcome.cpu_s = time.process_time() - begin
    return learning.outcome


class _Learning:
    def __init__(
        self,
        name: str,
        setup: Setup,
        seed: int,
        folder: Path,
        teacher: Path | None,
        say: Callable[[str], None],
    ) -> None:
        self.setup, self.seed, self.folder = setup, seed, folder
        self.task = setup.make_task()
        self.teacher = None if teacher is None else TransformerPolicy.load(teacher)
        given = {"rollouts_per_group": setup.rollouts_per_group, **setup.args}
        self.algorithm = build(name, **given)
        self.outcome = Outcome()
        self.progress = Progress(f"{name}, seed {seed}", say)

    def first_policy(self) -> TransformerPolicy:
        """Return random weights."""
        shape = PolicyConfig(self.task.vocab_size, 64, 2, 2, self.task.max_length)
        return TransformerPolicy(shape, seed=self.seed)

    async def run(self) -> None:
        name = f"{self.algorithm.name}-{self.seed}"
        async with tb.open_store(f"sqlite:///{self.folder}/{name}.db") as store:
            schema = self.algorithm.type.schema
            experiment = await store.experiment(name, config={"schema": schema})
            self.algorithm.check_schema(schema)
            if self.setup.data != "rollouts":
                await self.record(experiment, self.setup)
            if self.setup.expert:
                expert = await store.experiment(f"{name}-expert", config={"schema": "sft"})
                await self.record(expert, replace(self.setup, data="solutions"))
            async with running(partial(self.progress.watch, experiment.finish)):
                await self.stream(experiment)
        if self.progress.stuck is not None:
            raise StuckError(self.progress.stuck)

    async def record(self, experiment: Experiment, setup: Setup) -> None:
        self.progress.enter(f"writes {setup.data} into {experiment.name}")
        await _record(experiment, setup, self.task, self.seed)

    async def stream(self, experiment: Experiment) -> None:
        """Train on what the experiment holds, or on what is explored step by step."""
        setup, rollouts = self.setup, self.setup.data == "rollouts"
        more = self.explorer(experiment) if rollouts else _nothing
        async with (
            experiment.train_stream(
                strategy=strategy_of(self.algorithm),
                groups_per_step=setup.groups_per_step,
                max_tokens=self.task.max_length,
                follow=rollouts,
                expert_experiment=f"{experiment.name}-expert" if setup.expert else None,
                **stream_options(self.algorithm, teacher=self.teacher is not None),
            ) as stream,
            BlockingPortal() as portal,
        ):
            exploring = ExploringStream(portal, stream, more, self.progress)
            await anyio.to_thread.run_sync(self.train, exploring)

    def explorer(self, experiment: Experiment) -> Callable[[int], Awaitable[None]]:
        """Return what explores and annotates until a step can be made of what the strategy kept."""
        usual = self.algorithm.sample.plan(1, self.setup.groups_per_step).usual
        names, args = strategies_of(self.algorithm)
        seen = kept = batches = 0

        async def more(step: int) -> None:
            nonlocal seen, kept, batches
            last = batches + BATCHES_PER_STEP
            while kept < usual * step:
                has = f"{kept} of the {usual * step} groups that step {step} needs were kept"
                if batches == last:
                    raise StuckError(f"{experiment.name}: {has}, after {batches} batches")
                batches += 1
                self.progress.enter(f"explores batch {batches}, {has}")
                await self.explore(experiment, usual, batches)
                if not names:
                    kept += usual
                    continue
                self.progress.enter(f"annotates batch {batches}, {has}")
                await run_strategy(experiment, names if len(names) > 1 else names[0], args)
                async for event in experiment.events(seen, kinds=("ExperiencesAnnotated",)):
                    seen, kept = event.position, kept + len(event.body["planned"])

        return more

    async def explore(self, experiment: Experiment, groups: int, batches: int) -> None:
        """Explore until so many batches are stored in all, with the newest policy."""
        settings = ExplorerSettings(
            actor="e0",
            groups_per_batch=groups,
            rollouts_per_group=self.setup.rollouts_per_group,
            groups_per_write=groups,
            max_batches=batches,
        )
        sampler = TaskSampler(self.first_policy(), self.task, self.seed)
        explorer = Explorer(experiment, sampler, settings)
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
            self.progress.enter(f"evaluates step {step.step}")
            accuracy = evaluate(trainer.policy, self.task, PROBLEMS, seed=self.seed + 7_000)
            self.outcome.curve.append((step.step, round(accuracy, 4)))
            self.progress.tell(
                f"step {step.step} of {setup.max_steps}: accuracy {accuracy:.3f}, "
                f"has to reach {setup.threshold}"
            )
            if accuracy >= setup.threshold:
                self.outcome.reached = step.step
            return self.outcome.reached is not None

        try:
            trainer.run(report)
        except StuckError as error:  # raised through the portal, it would come out in a group
            self.progress.stuck = str(error)


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


def trained_teacher(folder: Path, *, small: bool = False) -> Path:
    """Return the file of a policy that has learnt the task from solutions, trained once."""
    setup = replace(SETUPS["sft"], threshold=2.0, max_steps=150, groups_per_step=128)
    setup = setup.small() if small else setup
    path = folder / f"teacher-{setup.digest}.safetensors"
    if not path.exists():
        to_stderr(f"trains a teacher once, kept as {path}")
        with tempfile.TemporaryDirectory() as made:
            learning = _Learning("sft", setup, 1234, Path(made), None, to_stderr)
            anyio.run(learning.run)
            newest = max(Path(made).glob("checkpoints-1234/step-*/policy.safetensors"))
            folder.mkdir(parents=True, exist_ok=True)
            TransformerPolicy.load(newest).save(path)
    return path
