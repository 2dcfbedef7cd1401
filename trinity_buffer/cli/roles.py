"""The processes of a run, explorer, strategy and trainer, each from the configuration in the store.

A replay is a trainer too: it trains a run again from its log, and compares the weights with the
recorded ones. A trainer that ``torchrun`` started has several ranks, each a ``trinity-buffer
train`` of its own.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import anyio
import torch
import torch.distributed
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from trinity_buffer import errors
from trinity_buffer.algorithm import ADD_STRATEGY, Algorithm
from trinity_buffer.cli import run_config
from trinity_buffer.cli.escaping import escaped
from trinity_buffer.cli.options import Run, chosen_experiment, make_folder, make_folder_of, only_one
from trinity_buffer.cli.run_backends import backend_for, require_run
from trinity_buffer.demo.policy import TransformerPolicy
from trinity_buffer.events import ConfigurationChanged, ExperimentFinished, TrainerRewound, kinds_of
from trinity_buffer.explorer.explore import BatchReport
from trinity_buffer.identity import require_name
from trinity_buffer.options import option_types, renamed, renamed_key
from trinity_buffer.pipeline.annotate.consumer import RECORDED, ConsumerReport, run_strategy
from trinity_buffer.pipeline.config import BatchOptions, RunConfig
from trinity_buffer.pipeline.coordination.diagnosis import counted
from trinity_buffer.pipeline.history import replay as replaying
from trinity_buffer.pipeline.store import Experiment, Store, open_store
from trinity_buffer.pipeline.sync_stream import SyncTrainStream, open_train_stream
from trinity_buffer.pipeline.train.checkpoint import digest_of, require_digest
from trinity_buffer.pipeline.train.options import StreamOptions, require_checkpoint_of
from trinity_buffer.store import writer_queries
from trinity_buffer.trainer.checkpoint import read_step, save_checkpoint
from trinity_buffer.trainer.determinism import largest_difference
from trinity_buffer.trainer.parallel import Processes, processes_here
from trinity_buffer.trainer.requirements import strategies_of, strategy_of, stream_options
from trinity_buffer.trainer.trainer import KEPT_CHECKPOINTS, StepReport, Trainer, TrainerSettings
from trinity_buffer.user_code import own_code

Say = Callable[[str], None]
Stream = SyncTrainStream | replaying.ReplayStream

DEFAULT_NAME = "run"

OF_STEPS = (
    *("groups_per_batch", "groups_per_step", "rollouts_per_group", "tokens_per_microbatch"),
    *("layout", "max_staleness", "max_queued_groups", "strategy", "strategy_args"),
    *("group_timeout_s", "idle_s", "on_incomplete_group", "stalled_after_s"),
    *("commit_every_steps", "max_steps", "max_tokens", "max_rejected_steps", "lease_ttl_s"),
    *("algorithm_args.add_strategy", "algorithm_args.add_strategy_args", "expert_experiment"),
    *("algorithm_args.sample_strategy", "algorithm_args.sample_strategy_args", "evaluation"),
    *("async_checkpoints", "record_row_metrics", "record_token_metrics", "max_skipped_steps"),
    *("rollout", "tasks", "evaluate", "explorer", "server", "server_type", "tokenizer"),
)
"""Keys without effect on a replay: of what steps hold, and when a run measures, commits, ends."""

SET_BY_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def plain(message: str) -> None:
    """Print a line with the time of day."""
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {escaped(message)}\n")
    sys.stdout.flush()


def use_one_thread() -> None:
    """Let torch use one thread, as processes of a run share few cores, unless the user chose."""
    if not os.environ.get("OMP_NUM_THREADS"):
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)


@contextmanager
def ranks_of_environment() -> Iterator[Processes]:
    """Join the ranks that the environment names, and leave them at the end.

    Raises:
        InvalidArgumentError: it names several ranks, but not where they meet.
    """
    number = os.environ.get("WORLD_SIZE", "1")
    if number == "1":  # torchrun with one process needs no process group
        yield Processes()
        return
    missing = [name for name in SET_BY_TORCHRUN if not os.environ.get(name)]
    if missing:
        raise errors.InvalidArgumentError(
            f"WORLD_SIZE={number} without {', '.join(missing)}: start several ranks with `torchrun "
            "--nproc-per-node N --no-python trinity-buffer train`, which sets them all; for a "
            "trainer on its own, unset WORLD_SIZE"
        )
    store, rank, world_size = next(rendezvous("env://"))
    # torchrun keeps its store when it restarts the ranks. Without a prefix they would find the
    # addresses of their predecessors there, and wait for those until a timeout.
    life = f"life {_life()}"
    has_nccl = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    backend, own = "cpu:gloo,cuda:nccl" if has_nccl else "gloo", PrefixStore(life, store)
    torch.distributed.init_process_group(backend, store=own, rank=rank, world_size=world_size)
    try:
        yield processes_here()
    finally:
        torch.distributed.destroy_process_group()


def step_to_rewind_to(asked: int | None, say: Say = lambda _: None) -> int | None:
    """Return the step that was asked for; None in a restart by torchrun, which repeats the words.

    Args:
        asked: ``--resume-from``.
        say: hears that a restart goes on.
    """
    if asked is None or _life() == "0":
        return asked
    say(
        f"torchrun has started the ranks again: --resume-from {asked} is not repeated, they go on "
        "from the last commit"
    )
    return None


def _life() -> str:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def on_rank_0(processes: Processes, work: Callable[[], Any]) -> Any:
    """Return the result of ``work``, which rank 0 alone runs; every rank must call this."""
    return processes.gather(None if processes.rank else work())[0]


def device_here(device: str) -> str:
    """Return the device that a configuration means in this process: of ``cuda``, its rank's GPU.

    Raises:
        InvalidArgumentError: torch sees no such GPU, or several ranks would share one.
    """
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return device
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if index and ranks > 1:
        raise errors.InvalidArgumentError(
            f"device={device} is one GPU, and {ranks} ranks on this machine need one each: give "
            "device=cuda (--set device=cuda)"
        )
    number = int(index or os.environ.get("LOCAL_RANK", "0"))
    # torchrun starts a rank for each GPU, and each must find its own.
    needed, available = max(number + 1, ranks), torch.cuda.device_count()
    if needed > available:
        raise errors.InvalidArgumentError(
            f"device={device} needs {counted(needed, 'GPU')}, and torch {torch.__version__} sees "
            f"{available} on this machine: run it where there are enough, or with --set device=cpu"
        )
    return f"{kind}:{number}"


def at_its_device(config: RunConfig) -> RunConfig:
    """Return the configuration with the device of this rank, and make it torch's current one.

    Raises:
        InvalidArgumentError: there is no such device.
    """
    device = device_here(config.device)
    if device.startswith("cuda"):
        torch.cuda.set_device(device)  # its random state is saved, and kernels launch there
    return replace(config, device=device)


async def prepare(run: Run, *, explores: bool = False, resume_from: int | None = None) -> str:
    """Create the experiment of a run, or record what changed in its configuration, if anything.

    A refusal records nothing, and creates neither a store nor its folder.

    Args:
        run: its experiment; None: the only one there is but for its turns, else `DEFAULT_NAME`.
        explores: require what makes rollouts; else what is trained.
        resume_from: the step to which the trainer is to go back.

    Returns:
        The experiment's name.

    Raises:
        InvalidArgumentError: says which key is wrong, or what the run lacks.
        CheckpointError: there is no such step to go back to.
    """
    url, name, file, overrides = run
    if file is None and not overrides:
        return await chosen_experiment(url, name)
    settings = partial(_settings, file or {}, overrides, explores)

    async def record(store: Store) -> str:
        names = await store.experiments()
        chosen = name or only_one(names) or DEFAULT_NAME
        opened = await store.experiment(chosen) if chosen in names else None
        if opened is None and resume_from is not None:
            raise errors.CheckpointError(
                f"--resume-from {resume_from}: there is no experiment {chosen!r} to go back in: "
                "name another with --experiment, or leave the option out to begin it"
            )
        before = {} if opened is None else opened.config
        changed = settings(names, before, None if opened is None else await opened.columns())
        config = run_config.of_experiment(changed)
        await run_config.require_expert(store, chosen, config)
        if opened is not None:
            run_config.require_model(chosen, {**before, **(file or {})}, explores=explores)
            row = await store.database.read(writer_queries.consumer_row, opened.key, config.trainer)
            reads = strategy_of(run_config.algorithm_of(config)) or RECORDED
            if row is not None and row.kind == "trainer" and row.config.get("strategy") != reads:
                raise errors.InvalidArgumentError(
                    f"trainer {config.trainer!r} of experiment {chosen!r} trains on "
                    f"{row.config.get('strategy')!r}, and algorithm={config.algorithm} would read "
                    f"{reads!r}: name another trainer too (--set trainer=NAME), or another "
                    "--experiment"
                )
            if resume_from is not None:
                await require_checkpoint_of(store.database, opened.key, config.trainer, resume_from)
        # Keys that are not ours, such as `extra` of a run in Python, stay.
        await store.experiment(chosen, config={**before, **changed})
        if opened is None or file is None:
            return chosen
        if left_out := ", ".join(run_config.left_out(config, file, overrides)):
            plain(
                f"the file of --config leaves out {left_out}, which {chosen} has recorded and "
                "keeps (--set KEY=VALUE changes it, KEY=null lifts a bound)"
            )
        return chosen

    # Two steps: a run that is refused must not leave an empty store behind.
    with suppress(*(() if resume_from is not None else (errors.UnknownStoreError,))):
        async with open_store(url, create=False) as store:
            return await record(store)
    require_name("an experiment's name", name or DEFAULT_NAME)
    settings()
    make_folder_of(url)
    async with open_store(url) as store:
        return await record(store)


def _settings(
    file: Mapping[str, Any],
    overrides: Sequence[str],
    explores: bool,
    names: Collection[str] = (),
    before: Mapping[str, Any] = MappingProxyType({}),
    columns: Collection[str] | None = None,
) -> dict[str, Any]:
    """Return the configuration to record; raise InvalidArgumentError if a part lacks."""
    known = asdict(run_config.of_experiment(before))
    if "rollouts_per_group" not in before:
        del known["rollouts_per_group"]  # its default depends on the algorithm
    config = run_config.resolved(run_config.overridden(run_config.merged(known, file), overrides))
    settings = run_config.recorded(config)
    # Everything is checked before it is recorded: all processes of the run will read it.
    if "/" in config.trainer and config.trainer != before.get("trainer"):
        raise errors.InvalidArgumentError(f"trainer={config.trainer}: must be a text without '/'")
    if not explores:
        device_here(config.device)
    schema = before.get("schema", settings["schema"])
    require_run(config, explores=explores, schema=schema, columns=columns, experiments=names)
    return settings


async def _config_of(
    store: Store,
    experiment: Experiment,
    *,
    explores: bool | None = None,
    expert_rows: bool = False,
    replays: bool = False,
) -> RunConfig:
    """Return the configuration of a run, which has what ``explores`` requires; see `require_run`.

    Of a run that is replayed, what is `run_config.effective`.

    Raises:
        InvalidArgumentError: the run lacks what it needs, or ``expert_rows`` are none.
    """
    config = run_config.of_experiment(experiment.config)
    if replays:
        config = run_config.effective(config)
    if explores is not None:
        run_config.require_model(experiment.name, experiment.config, explores=explores)
    await run_config.require_expert(store, experiment.name, config, rows=expert_rows)
    schema, columns = experiment.config.get("schema", "experience"), await experiment.columns()
    names = await store.experiments()
    require_run(config, explores=explores, schema=schema, columns=columns, experiments=names)
    return config


async def explore(url: str, experiment: str, *, actor: str, say: Say, **options: Any) -> None:
    """Explore until the experiment is finished.

    Args:
        options: of `ExploreOptions`, ``acknowledgements`` and ``max_batches`` among them.
    """
    use_one_thread()
    batches = 0

    def on_batch(report: BatchReport) -> None:
        nonlocal batches
        batches += 1
        repaired = " (planned before a crash, finished now)" if report.repaired else ""
        made = f"{report.experiences} recorded"
        if report.reward is not None:
            made = f"{report.rollouts} rollouts, reward {report.reward:.3f}"
        made += f", {counted(report.late, 'experience')} late" if report.late else ""
        version = report.policy_version
        policy = "" if version is None else f", policy {version}"  # a server's is that of each turn
        say(f"{report.batch}: {made}{policy}{repaired}")

    async with open_store(url) as store:
        opened = await store.experiment(experiment)
        config = await _config_of(store, opened, explores=True)
        if options["acknowledgements"] is not None:
            make_folder(options["acknowledgements"].parent)
        say(f"explores {experiment} as {actor}")
        options |= {name: getattr(config, name) for name in option_types(BatchOptions)}
        await backend_for(config).explore(opened, report=on_batch, actor=actor, **options)
        if batches:
            return
        why = f"--batches {options['max_batches']} counts what it has planned before"
        if await opened.is_finished():
            why = "the experiment is finished"
        elif config.rollout is not None:
            why = "each of its tasks was planned before"
        say(f"{actor} had nothing to explore: {why}")


async def annotate(
    url: str,
    experiment: str,
    *,
    strategy: str | None,
    name: str | None,
    args: dict[str, Any] | None,
    follow: bool,
) -> ConsumerReport:
    """Run a strategy: the one that is named, else that of an existing set, else the run's."""
    use_one_thread()
    async with open_store(url) as store:
        opened = await store.experiment(experiment)
        if (name or strategy) == (opened.config.get("trainer") or "trainer"):
            raise errors.InvalidArgumentError(
                f"{name or strategy!r} is the trainer's name: give the annotation set another, "
                "with --name"
            )
        options: dict[str, Any] = {"name": name, "follow": follow}
        row = None
        if strategy is None and name is not None and args is None:
            row = await opened.database.read(writer_queries.consumer_row, opened.key, name)
        if strategy is not None:
            names, args = strategy.split("+"), args or {}
        elif row is not None:
            # A set goes on as it began, whatever the run's configuration says by now.
            began = dict(row.config)
            names, args, rules = (began.pop(key) for key in ("strategy", "args", "grouping"))
            options |= renamed(rules, warn=False) | began
        else:
            config = await _config_of(store, opened)
            names, configured = strategies_of(run_config.algorithm_of(config))
            args = run_config.merged(configured, args or {}, run_config.tables_of(names))
        if names:
            return await run_named(opened, names, args, **options)
        if follow:
            plain(
                "nothing to annotate: the trainer reads what was recorded; waits for the run's end"
            )
            await opened.until_finished()
        return ConsumerReport(0, 0, 0, 0)


async def run_named(
    experiment: Experiment, names: list[str], args: dict[str, Any], **options: Any
) -> ConsumerReport:
    """Run a strategy by its names.

    Raises:
        TrainingError: a strategy of the user's own failed; the message names its line.
    """
    run_config.look_for(names, experiment.config.get("folder"))
    with own_code({f"strategy {name!r}": ADD_STRATEGY.get(name) for name in names}):
        return await run_strategy(experiment, names, args, **options)


def settings_of(
    config: RunConfig, checkpoints: Path, keep_checkpoints: int | None = KEPT_CHECKPOINTS
) -> TrainerSettings:
    """Return the settings of the trainer of a run."""
    keys = vars(config) | vars(config.optimizer)
    settings = {one.name: keys[one.name] for one in fields(TrainerSettings) if one.name in keys}
    return TrainerSettings(checkpoints=checkpoints, keep_checkpoints=keep_checkpoints, **settings)


def trainer_on(
    stream: Stream, config: RunConfig, algorithm: Algorithm, settings: TrainerSettings
) -> Trainer:
    """Return the trainer of a run on ``stream``, restored from the stream's last commit."""
    backend = backend_for(config)
    paths = {"reference": config.reference, "teacher": config.teacher}
    others: dict[str, Any] = {of: backend.load(at) for of, at in paths.items() if at is not None}
    return Trainer(stream, backend.policy(), algorithm, settings, **others)


def train(
    url: str,
    experiment: str,
    *,
    checkpoints: Path,
    keep_checkpoints: int | None = KEPT_CHECKPOINTS,
    follow: bool,
    say: Say,
    processes: Processes | None = None,
    **going_on: Any,
) -> None:
    """Train until the target is reached or the stream ends; then finish the experiment.

    Args:
        keep_checkpoints: how many of the newest stay on disk; None: all.
        processes: the ranks of this trainer, which all call this; None: there is one.
    """
    processes = processes or Processes()
    use_one_thread()
    config, reason = anyio.run(_begin, url, experiment, not follow)
    if reason is not None and going_on.get("resume_from") is None:
        say(
            f"{config.trainer} has finished this run and trains it no further; to go on all the "
            "same, --resume-from goes back, and --set changes what ended it"
        )
        say(f"{experiment} is finished: {reason}")
        return
    config = at_its_device(config)
    algorithm, backend = run_config.algorithm_of(config), backend_for(config)
    asked = going_on.get("resume_from")
    going_on["resume_from"] = step_to_rewind_to(asked, say)
    with open_train_stream(
        url,
        experiment=experiment,
        strategy=strategy_of(algorithm),
        consumer=config.trainer,
        device=config.device,
        max_tokens=backend.max_tokens,
        follow=follow,
        expert_experiment=config.expert_experiment,
        rank=processes.rank,
        world_size=processes.world_size,
        **going_on,
        **{name: getattr(config, name) for name in StreamOptions.configured},
        **stream_options(
            algorithm,
            recompute_old_logprob=config.recompute_old_logprob,
            teacher=config.teacher is not None,
        ),
    ) as stream:
        settings = settings_of(config, make_folder(checkpoints), keep_checkpoints)
        trainer = trainer_on(stream, config, algorithm, settings)
        begin = "begins" if stream.resume is None else f"resumes after step {stream.resume.step}"
        among = f", {processes.world_size} ranks" if processes.world_size > 1 else ""
        say(f"trains {experiment} as {config.trainer}{among}: {begin}")
        num_skipped = 0 if stream.resume is None else stream.resume.skipped
        evaluation = _Evaluation(config, trainer, processes)
        # A rewind trains on, past the target too.
        if stream.resume is not None and stream.resume.step != asked:
            evaluation.accuracy = stream.resume.metrics.get("accuracy")
            evaluation.measured_at = stream.resume.step

        def on_step(report: StepReport) -> bool:
            nonlocal num_skipped
            say(line_of(report))
            num_skipped += report.skipped
            return evaluation.is_reached

        if evaluation.is_reached:
            say(f"nothing is trained further: {evaluation.place}")
        else:
            with own_code(run_config.parts_of(algorithm)):
                trainer.run(on_step, measure=evaluation)
        _conclude(experiment, config, trainer.state.step, num_skipped, say)
        # Without --follow more data may still come, so the experiment stays open.
        if follow and not processes.rank:
            stream.finish(evaluation.place)
            say(f"{experiment} is finished: {evaluation.place}")


async def _begin(url: str, experiment: str, expert_rows: bool) -> tuple[RunConfig, str | None]:
    """Return the configuration of a run, and why its trainer finished it.

    None if it did not, or the run was changed or rewound since.
    """
    reason = None
    async with open_store(url, read_only=True) as store:
        opened = await store.experiment(experiment)
        config = await _config_of(store, opened, explores=False, expert_rows=expert_rows)
        kinds = kinds_of(ExperimentFinished | ConfigurationChanged | TrainerRewound)
        async for event in opened.events(kinds=kinds):
            match event.fact:
                case ExperimentFinished(reason=why) if event.actor == config.trainer:
                    reason = why
                case ConfigurationChanged() | TrainerRewound(consumer=config.trainer):
                    reason = None
    return config, reason


def _conclude(experiment: str, config: RunConfig, steps: int, skipped: int, say: Say) -> None:
    """Say that ``max_steps`` ends a trainer, if it does; it may have trained nothing this time.

    Raises:
        TrainingError: no step of the run has changed the weights.
    """
    if not steps:
        raise errors.TrainingError(
            f"no step was trained of {experiment}: nothing is ready for the trainer "
            f"{config.trainer!r}; `trinity-buffer stats` tells what waits and `trinity-buffer "
            "rejected` what was left out, and why. What a trainer rejected it never takes again: "
            "with other settings, such as recompute_old_logprob=true, start a new one (--set "
            "trainer=NAME)"
        )
    if steps == skipped:
        raise errors.NonFiniteError(
            f"{counted(skipped, 'step')} of {experiment} changed nothing: loss or gradient norm "
            "were not finite; look at the rows that `trinity-buffer events --kind StepsCommitted "
            "--json` names, and at the learning rate and coefficients"
        )
    if config.max_steps is not None and steps >= config.max_steps:
        say(
            f"ends: max_steps={config.max_steps} of {experiment}'s configuration is reached; "
            "to train on, --set max_steps=N, or max_steps=null for no bound"
        )


@dataclass(slots=True)
class _Evaluation:
    """Measures greedy accuracy on fresh problems, every few steps, if the backend can."""

    config: RunConfig
    trainer: Trainer
    processes: Processes
    accuracy: float | None = None
    measured_at: int = 0

    def __call__(self, step: int) -> dict[str, float]:
        rules, config = self.config.evaluation, self.config
        if step % rules.every_steps and step != config.max_steps:
            return {}
        policy: Any = self.trainer.policy
        size, seed = rules.num_eval_samples, config.seed + step
        ask = partial(backend_for(config).accuracy, policy, problems=size, seed=seed)
        measured: float | None = on_rank_0(self.processes, ask)
        if measured is None:
            return {}
        self.accuracy, self.measured_at = measured, step
        return {"accuracy": measured}

    @property
    def is_reached(self) -> bool:
        """Whether the last accuracy is the target."""
        target = self.config.evaluation.target_accuracy
        return self.accuracy is not None and target is not None and self.accuracy >= target

    @property
    def place(self) -> str:
        """The last step, and the last accuracy with its own step if there is one."""
        step = self.trainer.state.step
        if self.accuracy is None:
            return f"step {step}"
        measured = f"accuracy {self.accuracy:.3f} at step {self.measured_at}"
        return measured if self.measured_at == step else f"step {step}, {measured}"


def line_of(report: StepReport) -> str:
    """Return a step as one line."""
    numbers = {name: float(f"{value:.4g}") for name, value in report.metrics.items()}
    again = ", served again" if report.recorded else ""
    again += ", skipped: non_finite" if report.skipped else ""
    reward = "-" if "reward" in report.unknown else f"{report.reward:.3f}"
    staleness = "-" if "staleness" in report.unknown else f"{report.staleness:.1f}"
    return (
        f"step {report.step}: loss {report.loss:.4f}, reward {reward}, staleness {staleness}, "
        f"{report.rows} rows in {report.seconds * 1e3:.0f} ms{again} {json.dumps(numbers)}"
    )


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """The result of a replay.

    Attributes:
        first, last: gradient steps that were run again.
        identical: whether the weights are bit for bit those published after ``last``; None: another
            loss was used, or none were published then.
        digest: sha256 of the replayed weights.
        recorded: sha256 of the recorded ones, if there are any.
        differences: of software, device and settings: name -> recorded, here.
        mean_loss: over the steps.
        largest_difference: of the weights, relative to the largest of their tensor; None: they were
            not compared, or it is infinite.
        tensor: the tensor with that difference; None: they were not compared.
        within: whether it is within the tolerance; None: there is none, or they were not compared.
    """

    first: int
    last: int
    identical: bool | None
    digest: str
    recorded: str | None
    differences: dict[str, list[Any]]
    mean_loss: float
    largest_difference: float | None
    tensor: str | None
    within: bool | None


def replay(
    url: str,
    experiment: str,
    *,
    steps: str | None,
    from_checkpoint: Path | None,
    overrides: list[str],
    tolerance: float | None,
    say: Say,
) -> ReplayReport:
    """Train again on the recorded batches, changing nothing in the store.

    Args:
        url: of the store.
        experiment: its name.
        steps: ``A:B``; either may be left out.
        from_checkpoint: begin with these weights, after their step.
        overrides: of the run's configuration, such as ``algorithm=gspo``; the weights then differ.
        tolerance: largest relative difference of the weights that is accepted; None: compare bits.
        say: prints a line.
    """
    use_one_thread()
    first, last = _steps_of_replay(steps, from_checkpoint)
    config, end = anyio.run(_run_to_replay, url, experiment, overrides, last)
    options: dict[str, Any] = {"first": first, "last": end.step, "repeat_skips": not overrides}
    options |= {"experiment": experiment, "consumer": config.trainer, "device": config.device}
    if overrides:  # another algorithm may need other columns than the run's
        options["needs"] = stream_options(run_config.algorithm_of(config))["needs"]
    losses: list[float] = []

    def on_step(report: StepReport) -> None:
        losses.append(report.loss)
        say(line_of(report))
        _score_as_then(trainer, report.step + 1, end)

    with tempfile.TemporaryDirectory() as scratch:
        options["from_checkpoint"] = from_checkpoint
        with replaying.open_replay_stream(url, **options) as stream:
            algorithm = run_config.algorithm_of(config)
            settings = replace(settings_of(config, Path(scratch)), max_skipped_steps=None)
            trainer = trainer_on(stream, config, algorithm, settings)
            _score_as_then(trainer, first, end)
            with own_code(run_config.parts_of(algorithm)):
                trainer.run(on_step)
        weights = save_checkpoint(Path(scratch), trainer.state) / trainer.policy.file_name
        digest = digest_of(weights, like=end.digest)
        identical = None if overrides or end.digest is None else digest == end.digest
        is_measured = tolerance is not None or identical is False
        relative, tensor = _weight_difference(end, weights) if is_measured else (None, None)
    return ReplayReport(
        first,
        end.step,
        identical,
        digest,
        end.digest,
        dict(trainer.differences),
        sum(losses) / len(losses) if losses else 0.0,
        relative,
        tensor,
        within=None if tolerance is None or relative is None else relative <= tolerance,
    )


async def _run_to_replay(
    url: str, experiment: str, overrides: list[str], last: int | None
) -> tuple[RunConfig, replaying.RecordedEnd]:
    """Return how a run is replayed on this device with ``overrides``, and how it had ended."""
    # Refused rather than ignored: the user would take equal weights for a result.
    for key in (renamed_key(override.partition("=")[0]) for override in overrides):
        if any(f"{key}.".startswith(f"{one}.") for one in OF_STEPS):
            raise errors.InvalidArgumentError(
                f"--set {key}: a replay takes its steps, their micro-batches and their advantages "
                "from the log, so that this would change nothing: leave it out"
            )
    async with open_store(url, read_only=True) as store:
        opened = await store.experiment(experiment)
        run = asdict(await _config_of(store, opened, explores=False, replays=True))
        config = at_its_device(run_config.resolved(run_config.overridden(run, overrides)))
        end = await replaying.recorded_end(opened, config.trainer, last)
    # No commits: the replay's checkpoints are thrown away.
    return replace(config, commit_every_steps=1 << 30, max_steps=None), end


def _weight_difference(end: replaying.RecordedEnd, file: Path) -> tuple[float | None, str | None]:
    """Return how far the weights in ``file`` are from the recorded ones; None: those are gone."""
    if end.weights is None or end.digest is None or not end.weights.exists():
        return None, None
    try:
        require_digest(end.weights, end.digest)
    except errors.CheckpointError:  # other weights have taken their place
        return None, None
    return largest_difference(end.weights, file)


def _steps_of_replay(steps: str | None, from_checkpoint: Path | None) -> tuple[int, int | None]:
    begin_at = 1 if from_checkpoint is None else read_step(from_checkpoint) + 1
    begin, _, end = (steps or "").partition(":")
    form = "write it as A:B, such as 10:20"
    try:
        first, last = (int(text) if text else None for text in (begin, end))
    except ValueError as error:
        raise errors.InvalidArgumentError(f"--steps {steps}: {form}") from error
    if last is not None and last < (first or 1):
        wrong = f"it ends before it begins: {form}"
    elif first in (None, begin_at):
        return begin_at, last
    elif from_checkpoint is not None:
        wrong = f"{from_checkpoint} is followed by step {begin_at}"
    else:
        wrong = (
            f"to begin at step {first} the weights after step {(first or 1) - 1} are needed: "
            "--from-checkpoint FOLDER"
        )
    raise errors.InvalidArgumentError(f"--steps {steps}: {wrong}")


def _score_as_then(trainer: Trainer, step: int, end: replaying.RecordedEnd) -> None:
    """Score a step as the run did: from all logits at once, before the log had heads."""
    for model in trainer.scoring:
        if isinstance(model, TransformerPolicy):
            model.whole_logits = step <= end.without_heads
