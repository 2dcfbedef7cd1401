"""The three kinds of process of a run, each from its configuration in the store."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import anyio
import torch

from trinity_buffer.algorithm import ADD_STRATEGY, Algorithm
from trinity_buffer.cli.demo_ends import require_policies
from trinity_buffer.cli.ends import Ends, ends_of
from trinity_buffer.cli.escaping import escaped
from trinity_buffer.cli.expert_check import require_expert
from trinity_buffer.cli.options import made_folder
from trinity_buffer.cli.ranks import device_here, number_of_rank_0
from trinity_buffer.cli.run_algorithm import algorithm_of, look_for, parts_of, require_parts_of
from trinity_buffer.cli.run_config import RunConfig, of_experiment, require_model
from trinity_buffer.errors import InvalidArgumentError, NonFiniteError, TrainingError
from trinity_buffer.events import (
    ConfigurationChanged,
    ExperimentFinished,
    TrainerRewound,
    kinds_of,
)
from trinity_buffer.explorer.explore import BatchReport
from trinity_buffer.own_code import own_code
from trinity_buffer.pipeline.annotating.strategy_consumer import ConsumerReport, run_strategy
from trinity_buffer.pipeline.diagnosis import counted
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.pipeline.history.replay import ReplayStream
from trinity_buffer.pipeline.store import Store, open_store
from trinity_buffer.pipeline.streaming.stream_options import CONFIGURED, GoingOn
from trinity_buffer.pipeline.sync_stream import SyncTrainStream, open_train_stream
from trinity_buffer.store import queries
from trinity_buffer.store.rows import ConsumerRow
from trinity_buffer.trainer.parallel import OneProcess, Processes
from trinity_buffer.trainer.requirements import (
    strategies_of,
    strategy_of,
    stream_options,
)
from trinity_buffer.trainer.settings import KEPT_CHECKPOINTS
from trinity_buffer.trainer.trainer import StepReport, Trainer, TrainerSettings

Say = Callable[[str], None]


def use_one_thread() -> None:
    """Several processes share few cores: more threads each would only wait for each other."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


def at_its_device(config: RunConfig) -> RunConfig:
    """Return the configuration with the device of this rank, which becomes torch's current one.

    Raises:
        InvalidArgumentError: it is not there.
    """
    device = device_here(config.device)
    if device.startswith("cuda"):
        torch.cuda.set_device(device)  # whose random numbers are kept, and where kernels run
    return config.model_copy(update={"device": device})


async def require_parts(store: Store, experiment: Experiment, *, expert_rows: bool = False) -> None:
    """Return if a run has what its algorithm needs; see `require_parts_of` and `require_expert`.

    Raises:
        InvalidArgumentError: says what is lacking, and what to do.
    """
    config = of_experiment(experiment.config)
    require_policies(config)
    await require_expert(store, experiment.name, config, rows=expert_rows)
    require_parts_of(
        config,
        schema=experiment.config.get("schema", "experience"),
        columns=await experiment.columns(),
        experiments=await store.experiments(),
    )


async def explore(
    url: str,
    experiment: str,
    *,
    actor: str,
    acknowledgements: Path | None,
    max_batches: int | None,
    take_over: bool = False,
    say: Say,
) -> None:
    """Explore until the experiment is finished."""
    use_one_thread()

    batches = 0

    def tell(report: BatchReport) -> None:
        nonlocal batches
        batches += 1
        repaired = " (planned before a crash, finished now)" if report.repaired else ""
        made = f"{report.experiences} recorded"
        if report.reward is not None:
            made = f"{report.rollouts} rollouts, reward {report.reward:.3f}"
        say(f"{report.batch}: {made}, policy {report.policy_version}{repaired}")

    async with open_store(url) as store:
        opened = await store.experiment(experiment)
        await require_parts(store, opened)
        require_model(experiment, opened.config, explores=True)
        config = of_experiment(opened.config)
        ends = ends_of(config)
        ends.require_explorable()
        if acknowledgements is not None:
            made_folder(acknowledgements.parent)
        say(f"explores {experiment} as {actor}")
        await ends.explore(
            opened,
            algorithm_of(config),
            actor=actor,
            acknowledgements=acknowledgements,
            max_batches=max_batches,
            take_over=take_over,
            report=tell,
        )
        if not batches:
            say(
                f"{actor} had nothing to explore: {await _why_nothing(opened, config, max_batches)}"
            )


async def _why_nothing(experiment: Experiment, config: RunConfig, batches: int | None) -> str:
    if await experiment.is_finished():
        return "the experiment is finished"
    if config.rollout is not None:
        return "each of its tasks was planned before"
    return f"--batches {batches} counts what it has planned before"


async def annotate(
    url: str,
    experiment: str,
    *,
    strategy: str | None,
    name: str | None,
    args: dict[str, Any] | None,
    follow: bool,
) -> ConsumerReport:
    """Run the strategy of the run, or another one; of a set that is there by default its own."""
    use_one_thread()
    async with open_store(url) as store:
        opened = await store.experiment(experiment)
        if (name or strategy) == opened.config.get("trainer", "trainer"):
            raise InvalidArgumentError(
                f"{name or strategy!r} is the trainer's name: give the annotation set another, "
                "with --name"
            )
        if strategy is not None:
            return await run_named(
                opened, strategy.split("+"), args or {}, name=name, follow=follow
            )
        if name is not None and args is None:
            row = await opened.database.read(queries.consumer_row, opened.key, name)
            if row is not None:
                return await _go_on(opened, row, follow=follow)
        await require_parts(store, opened)
        names, configured = strategies_of(algorithm_of(of_experiment(opened.config)))
        if not names:
            return await _nothing_to_annotate(opened, follow=follow)
        given = configured if args is None else args
        return await run_named(opened, names, given, name=name, follow=follow)


async def _go_on(experiment: Experiment, made: ConsumerRow, *, follow: bool) -> ConsumerReport:
    """Run the strategy of an annotation set with what it was made with."""
    options = dict(made.config)
    names, args, grouping = (options.pop(key) for key in ("strategy", "args", "grouping"))
    return await run_named(
        experiment, names, args, name=made.name, follow=follow, **grouping, **options
    )


async def run_named(
    experiment: Experiment, names: list[str], args: dict[str, Any], **options: Any
) -> ConsumerReport:
    """Return what `run_strategy` did; what fails in a strategy of the user's own is a sentence.

    Raises:
        TrainingError: a strategy of the user's own failed; names its line.
    """
    look_for(names, experiment.config.get("folder"))
    with own_code({f"strategy {name!r}": ADD_STRATEGY.get(name) for name in names}):
        return await run_strategy(experiment, names, args, **options)


async def _nothing_to_annotate(experiment: Experiment, *, follow: bool) -> ConsumerReport:
    """Return at once, or when the experiment is finished: the trainer reads what was recorded."""
    if follow:
        plain("nothing to annotate: the trainer reads what was recorded; waits for the run's end")
        await experiment.until_finished()
    return ConsumerReport(0, 0, 0, 0)


async def config_of(
    url: str, experiment: str, *, expert_rows: bool = False
) -> tuple[RunConfig, str]:
    """Return the configuration of a run, and the schema of its data."""
    async with open_store(url, read_only=True) as store:
        opened = await store.experiment(experiment)
        await require_parts(store, opened, expert_rows=expert_rows)
        require_model(experiment, opened.config)
        return of_experiment(opened.config), opened.config.get("schema", "experience")


def settings_of(
    config: RunConfig, checkpoints: Path, keep_checkpoints: int | None = KEPT_CHECKPOINTS
) -> TrainerSettings:
    """Return how the trainer of a run makes gradients into steps."""
    given = vars(config) | vars(config.optimizer)
    named = {one.name: given[one.name] for one in fields(TrainerSettings) if one.name in given}
    return TrainerSettings(checkpoints=checkpoints, keep_checkpoints=keep_checkpoints, **named)


def trainer_on(
    stream: SyncTrainStream | ReplayStream,
    config: RunConfig,
    algorithm: Algorithm,
    settings: TrainerSettings,
) -> Trainer:
    """Return the trainer of a run on ``stream``, at the stream's last commit."""
    ends = ends_of(config)
    return Trainer(
        stream,
        ends.policy(),
        algorithm,
        settings,
        reference=None if config.reference is None else ends.load(config.reference),
        teacher=None if config.teacher is None else ends.load(config.teacher),
    )


def train(
    url: str,
    experiment: str,
    *,
    checkpoints: Path,
    keep_checkpoints: int | None = KEPT_CHECKPOINTS,
    follow: bool,
    say: Say,
    processes: Processes | None = None,
    **going_on: Unpack[GoingOn],
) -> None:
    """Train until the target is reached or the stream ends; then finish the experiment.

    Args:
        processes: the ranks of this trainer, which all call this; None: it is on its own.
    """
    processes = processes or OneProcess()
    use_one_thread()
    config, _ = anyio.run(partial(config_of, url, experiment, expert_rows=not follow))
    ends_of(config).require_trainable()
    reason = anyio.run(_finished_by, url, experiment, config.trainer)
    if reason is not None and going_on.get("resume_from") is None:
        say(
            f"{config.trainer} has finished this run and trains it no further; to go on all the "
            "same, --resume-from goes back, and --set changes what ended it"
        )
        say(f"{experiment} is finished: {reason}")
        return
    config = at_its_device(config)
    algorithm = algorithm_of(config)
    with open_train_stream(
        url,
        experiment=experiment,
        strategy=strategy_of(algorithm),
        consumer=config.trainer,
        device=config.device,
        max_tokens=ends_of(config).max_tokens,
        follow=follow,
        expert_experiment=config.expert_experiment,
        rank=processes.rank,
        world_size=processes.world_size,
        **going_on,
        **config.model_dump(include=set(CONFIGURED)),
        **stream_options(
            algorithm,
            recompute_old_logprob=config.recompute_old_logprob,
            teacher=config.teacher is not None,
        ),
    ) as stream:
        settings = settings_of(config, made_folder(checkpoints), keep_checkpoints)
        trainer = trainer_on(stream, config, algorithm, settings)
        begin = "begins" if stream.resume is None else f"resumes after step {stream.resume.step}"
        among = f", {processes.world_size} ranks" if processes.world_size > 1 else ""
        say(f"trains {experiment} as {config.trainer}{among}: {begin}")
        measured = _Evaluation(config, ends_of(config), trainer, processes)
        if stream.resume is not None and going_on.get("resume_from") is None:
            measured.note(stream.resume.metrics.get("accuracy"))
        num_skipped = 0 if stream.resume is None else stream.resume.skipped

        def tell(report: StepReport) -> bool:
            nonlocal num_skipped
            say(line_of(report))
            num_skipped += report.skipped
            return measured.reached

        if measured.reached:
            say(f"nothing is trained further: {measured.said}step {trainer.state.step}")
        else:
            with own_code(parts_of(algorithm)):
                trainer.run(tell, measure=measured)
        _require_trained(experiment, config, trainer.state.step, num_skipped)
        if follow and not processes.rank:
            _finish(stream, experiment, f"{measured.said}step {trainer.state.step}", say)


async def _finished_by(url: str, experiment: str, trainer: str) -> str | None:
    """Return why ``trainer`` finished its run, if nobody changed the run since."""
    reason = None
    async with open_store(url, read_only=True) as store:
        opened = await store.experiment(experiment)
        ends = kinds_of(ExperimentFinished | ConfigurationChanged | TrainerRewound)
        async for event in opened.events(kinds=ends):
            match event.fact:
                case ExperimentFinished(reason=why) if event.actor == trainer:
                    reason = why
                case ConfigurationChanged():
                    reason = None
                case TrainerRewound(consumer=name) if name == trainer:
                    reason = None
    return reason


def _require_trained(experiment: str, config: RunConfig, steps: int, skipped: int) -> None:
    """Return if a run has changed the weights in any of its ``steps``.

    Raises:
        TrainingError: it has not; says where to look.
    """
    if not steps:
        raise TrainingError(
            f"no step was trained of {experiment}: nothing is ready for the trainer "
            f"{config.trainer!r}; `trinity-buffer stats` tells what waits and `trinity-buffer "
            "rejected` what was left out, and why. What a trainer rejected it never takes again: "
            "with other settings, such as recompute_old_logprob=true, start a new one (--set "
            "trainer=NAME)"
        )
    if steps == skipped:
        raise NonFiniteError(
            f"{counted(skipped, 'step')} of {experiment} changed nothing: loss or gradient norm "
            "were not finite; look at the rows that `trinity-buffer events --kind StepsCommitted "
            "--json` names, and at the learning rate and coefficients"
        )


def _finish(stream: SyncTrainStream, experiment: str, reason: str, say: Say) -> None:
    stream.finish(reason)
    say(f"{experiment} is finished: {reason}")


class _Evaluation:
    """Greedy accuracy on fresh problems, every few steps, where there is a way to tell."""

    def __init__(
        self, config: RunConfig, ends: Ends, trainer: Trainer, processes: Processes
    ) -> None:
        self._processes = processes
        self._config = config
        self._ends = ends
        self._trainer = trainer
        self.said = ""
        self.reached = False

    def __call__(self, step: int) -> dict[str, float]:
        rules = self._config.evaluation
        if step % rules.every_steps and step != self._config.max_steps:
            return {}

        def measure() -> float | None:
            seed = self._config.seed + step
            return self._ends.accuracy(self._trainer.policy, problems=rules.problems, seed=seed)

        accuracy = number_of_rank_0(self._processes, measure)
        self.note(accuracy)
        return {} if accuracy is None else {"accuracy": accuracy}

    def note(self, accuracy: float | None) -> None:
        """Remember what was measured last; None: nothing was."""
        if accuracy is None:
            return
        target = self._config.evaluation.target_accuracy
        self.said = f"accuracy {accuracy:.3f} at "
        self.reached = target is not None and accuracy >= target


def line_of(report: StepReport) -> str:
    """Return one step in one line."""
    numbers = {name: round(value, 4) for name, value in report.metrics.items()}
    again = ", served again" if report.recorded else ""
    again += ", skipped: non_finite" if report.skipped else ""
    return (
        f"step {report.step}: loss {report.loss:.4f}, reward {report.reward:.3f}, "
        f"staleness {report.staleness:.1f}, "
        f"{report.rows} rows in {report.seconds * 1e3:.0f} ms{again} {json.dumps(numbers)}"
    )


def plain(message: str) -> None:
    """Print a line with the time of day."""
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {escaped(message)}\n")
    sys.stdout.flush()


def silent(message: str) -> None:
    """Print nothing: rank 0 speaks for all ranks."""
    del message
