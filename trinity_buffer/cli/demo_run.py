"""``trinity-buffer demo``: a whole run, four processes on one store, watched as it learns."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any

import anyio
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from trinity_buffer.cli import run_config
from trinity_buffer.cli.options import base_of, beside, make_folder, make_folder_of, path_of
from trinity_buffer.cli.output import Terminal, progress, shown
from trinity_buffer.cli.roles import device_here, explore
from trinity_buffer.cli.run_backends import backend_for, require_policies, require_run, task_of
from trinity_buffer.cli.supervisor import Supervisor, command_of
from trinity_buffer.demo.recipes import config_for, teacher_config
from trinity_buffer.demo.rollout import Needs, needs_of, require_solutions
from trinity_buffer.demo.tiny_model import make_tiny_model
from trinity_buffer.errors import InvalidArgumentError, UnknownNameError
from trinity_buffer.inspector.overviews import overview_of, rejection_counts
from trinity_buffer.inspector.source import now
from trinity_buffer.inspector.step_lines import StepLine, steps
from trinity_buffer.pipeline.config import RunConfig
from trinity_buffer.pipeline.store import Experiment, Store, open_store
from trinity_buffer.pipeline.verify.verify import verify
from trinity_buffer.store.url import named
from trinity_buffer.trainer.checkpoint import POLICY_FILE
from trinity_buffer.trainer.requirements import strategies_of

OWN_PACKAGE = "trinity_buffer.demo.own"
"""What `init` writes; `demo --model hf` runs it in the demo's processes."""

FRAMES_PER_S = 2
PLAIN_LINE_EVERY_S = 2.0
LAST_MOMENTS_S = 5
"""How long the processes of a finished run may take to end by themselves."""

STEPS_WITHOUT_END = 1000
"""Steps that an expert's data suffice for, if the run has no last step."""

WINDOW_S = 5.0

STARTING = "starting: no step is committed yet"
"""What is shown until there are numbers."""


def demo_config(
    chosen: Mapping[str, Any], model: Path | None, file: Mapping[str, Any], overrides: Sequence[str]
) -> RunConfig:
    """Return the recipe of algorithm and task, overridden by what the user gives.

    Args:
        chosen: values of the command's own options, by key of the configuration.
        model: folder of a model of transformers; None: our own transformer.
        file: the content of a configuration file.
        overrides: as ``optimizer.learning_rate=3e-4``.

    Raises:
        InvalidArgumentError: an option that is not read, or contradicts a key; or the run lacks
            something that the demo cannot make.
    """
    values = run_config.overridden(file, overrides)
    for key, value in chosen.items():
        section, _, last = key.rpartition(".")
        option = f"--{'task' if key == 'task.name' else last} {value}"
        if section and model is not None:
            raise InvalidArgumentError(f"{option}: --model hf has a task of its own")
        table = values.get(section) if section else values
        other = table.get(last, value) if isinstance(table, dict) else value
        if other != value:
            raise InvalidArgumentError(f"{option}, and {key}={other}: give one of the two")
    algorithm = chosen.get("algorithm", values.get("algorithm"))
    if algorithm is not None and not isinstance(algorithm, str):
        raise InvalidArgumentError(f"algorithm={algorithm}: must be the name of one")
    if model is not None:  # what `init` writes, with the model in this folder
        base = run_config.parsed(Path(str(files(OWN_PACKAGE).joinpath("run.toml"))))
        for key in run_config.PLACES:
            base.pop(key, None)
        for key in ("rollout", "tasks", "evaluate"):
            base[key] = f"{OWN_PACKAGE}.{base[key]}"
        base |= {"model": str(model.resolve()), "algorithm": algorithm or base["algorithm"]}
    else:
        task = {"name": chosen.get("task.name"), "digits": chosen.get("task.digits", 3)}
        task |= values["task"] if isinstance(values.get("task"), dict) else {}
        base = config_for(algorithm, task["name"], task["digits"])
    base["seed"] = chosen.get("seed", 0)
    result = run_config.resolved(run_config.overridden(run_config.merged(base, file), overrides))
    if "task.digits" in chosen and result.task.name != "sort":
        raise InvalidArgumentError(
            f"--digits {chosen['task.digits']}: the task {result.task.name!r} has none: leave it "
            "out, or choose --task sort"
        )
    _require_parts(result)  # refused here once, rather than by three processes and a new store
    return result


def _require_parts(config: RunConfig) -> None:
    """Raise an error unless a run has what its algorithm needs, or the demo can make it."""
    device_here(config.device)
    require_policies(config)
    needs = needs_of_run(config)
    needed = {"teacher": needs.teacher, "expert_experiment": needs.expert_groups > 0}
    missing = [key for key, is_needed in needed.items() if is_needed and vars(config)[key] is None]
    made: dict[str, Any] = dict.fromkeys(missing, "made by the demo")
    require_run(replace(config, **made), schema=run_config.recorded(config)["schema"])


def needs_of_run(config: RunConfig) -> Needs:
    """Return the needs of a run's algorithm beside its configuration.

    Raises:
        UnknownNameError, InvalidArgumentError: there is no such algorithm, or its task cannot give
            what it needs.
    """
    needs = needs_of(run_config.algorithm_of(config), config.groups_per_step)
    if needs.solutions and config.rollout is not None:
        raise InvalidArgumentError(
            f"algorithm {config.algorithm!r} needs the answers of the tasks, and "
            f"{config.rollout!r} only makes rollouts: choose another one, such as grpo"
        )
    if needs.solutions:
        require_solutions(task_of(config))
    return needs


def teacher_of(config: RunConfig) -> RunConfig:
    """Return the configuration that trains a run's teacher: the same policy, from solutions.

    A run that is cut to a few steps has a teacher of no more.
    """
    recipe = teacher_config(task_of(config))
    steps = min(recipe["max_steps"], config.max_steps or recipe["max_steps"])
    shared = {key: asdict(config)[key] for key in ("task", "model", "device")}
    # Another seed than the pupil's: other initial weights, and other problems.
    return run_config.resolved(recipe | shared | {"max_steps": steps, "seed": config.seed + 1})


def expert_of(config: RunConfig) -> RunConfig:
    """Return the configuration of the experiment that holds an expert's solutions."""
    base = config_for("sft", config.task.name, config.task.digits)
    # No trainer of its own consumes this experiment, so nothing may wait for one.
    return run_config.resolved(base | {"seed": config.seed, "max_queued_groups": None})


def demo_place(store: str | None, name: str) -> tuple[str, Path]:
    """Return the store of the demo ``name``, and the path that its other files are named after.

    Raises:
        InvalidArgumentError: a name that a file cannot have.
    """
    if not name or "/" in name:
        raise InvalidArgumentError(f"--name {name!r}: must be a text without '/'")
    base = Path("runs") / name
    if store is None:
        return f"sqlite:///{base}.db", base
    path = path_of(store)
    return store, base if path is None else base_of(path)


def figures(lines: Sequence[StepLine]) -> dict[str, str]:
    """Return the numbers of the last of committed steps as texts, by what they are."""
    last, begin = lines[-1], time.time() - WINDOW_S
    recent = [line for line in lines if line.recorded_at >= begin]
    accuracies = curve(lines, "accuracy")
    numbers = {
        "step": last.step,
        "accuracy": accuracies[-1][1] if accuracies else None,
        "reward": last.reward,
        "rows/s": sum(line.rows for line in recent) / WINDOW_S,
        "steps/s": len(recent) / WINDOW_S,
        "staleness": last.staleness,
    }
    return {name: shown(value) for name, value in numbers.items()}


def curve(lines: Sequence[StepLine], name: str) -> list[tuple[int, float]]:
    """Return (step, number) of the steps that have a reward, or a measure of another name."""
    values = [line.reward if name == "reward" else line.metrics.get(name) for line in lines]
    pairs = zip(lines, values, strict=True)
    return [(line.step, value) for line, value in pairs if value is not None]


BARS = " ▁▂▃▄▅▆▇█"
WIDTH = 60


def sparkline(points: Sequence[tuple[int, float]]) -> str:
    """Return a curve of values from 0 to 1 in one line of text."""
    size = max(1, len(points) // WIDTH)
    means = [fmean(value for _, value in points[i : i + size]) for i in range(0, len(points), size)]
    scale = len(BARS) - 1
    return "".join(BARS[round(min(max(mean, 0.0), 1.0) * scale)] for mean in means[-WIDTH:])


def drawn(title: str, lines: Sequence[StepLine], supervisor: Supervisor) -> Panel:
    """Return the live view: the run above, one line per process below."""
    top, rewards = Table.grid(padding=(0, 3)), Text(STARTING, style="dim")
    if lines:
        numbers = figures(lines)
        top.add_row(*numbers, style="dim")
        numbers["accuracy"] = f"[bold green]{numbers['accuracy']}"
        top.add_row(*numbers.values())
        rewards = Text("reward   " + sparkline(curve(lines, "reward")), style="cyan")
    bottom = Table.grid(padding=(0, 2))
    for child in supervisor.children:
        state = Text("●", style="green" if child.alive else "red")
        again = f"restarted {child.restarts}×" if child.restarts else ""
        bottom.add_row(state, child.name, again, Text(child.last_line()[:90], style="dim"))
    footer = "Ctrl-C ends it; nothing is lost"
    if supervisor.kills:
        footer = f"{supervisor.kills} processes killed so far"
    parts = Group(top, rewards, Text(), bottom, Text(footer, style="dim"))
    return Panel(parts, title=title, border_style="blue")


def save_curve(path: str, lines: Sequence[StepLine], title: str) -> bool:
    """Write reward and accuracy over steps as a PNG; False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an optional extra, and slow to import
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for name, style in (("reward", "."), ("accuracy", "-o")):
        if points := curve(lines, name):
            axes.plot(*zip(*points, strict=True), style, markersize=3, label=name)
    axes.set(xlabel="gradient step", ylim=(0, 1.02), title=title)
    axes.legend(loc="lower right")
    axes.grid(visible=True, alpha=0.3)
    figure.savefig(path, dpi=120)
    return True


@dataclass(slots=True)
class Demo:
    """One demo, from opening the store to the last line.

    Attributes:
        base: what its files are named after: logs, checkpoints, receipts, model, picture.
        explorers: number of explorer processes.
        chaos_every_s: kill a random process about so often; None: never.
        limit_s: stop after so long, whatever was reached.
        brief: suggest no commands at the end.
    """

    store: str
    base: Path
    experiment: str
    config: RunConfig
    explorers: int = 2
    chaos_every_s: float | None = None
    limit_s: float | None = None
    brief: bool = False
    console: Terminal = field(default_factory=Terminal)
    _lines: list[StepLine] = field(default_factory=list)
    _finished: bool = False
    _supervisors: list[Supervisor] = field(default_factory=list)

    def run(self) -> int:
        """Run to the end; return the exit code."""
        try:
            return anyio.run(self.run_in_loop)
        except KeyboardInterrupt:
            at = "after its end" if self._finished else f"at step {self._step}"
            self._say(f"\ncut short by Ctrl-C {at}: run the same command again to go on")
            return 0
        finally:
            # A second Ctrl-C may have interrupted the first stop.
            for supervisor in self._supervisors:
                supervisor.stop()

    async def run_in_loop(self) -> int:
        """Run to the end, in the running event loop; return the exit code."""
        begin = time.monotonic()
        make_folder_of(self.store)
        async with open_store(self.store) as store:
            # After the store, because opening it may be refused.
            for suffix in (".logs", ".checkpoints", ".acks"):
                make_folder(beside(self.base, suffix))
            if self.experiment not in await store.experiments():
                code = await self._teach(store)
                if code is not None:
                    return code
                await self._ask_expert(store)
            experiment = await self._experiment(store)
            failed, logs = None, beside(self.base, ".logs")
            supervisor = Supervisor(self._commands(), logs, self.chaos_every_s, self.config.seed)
            self._supervisors.append(supervisor)
            if await experiment.is_finished():
                self._say(
                    "this run is finished already; here is how it ended (--name starts another)"
                )
            else:
                supervisor.start()
                try:
                    failed = await self._watch(experiment, supervisor, begin)
                finally:
                    with anyio.CancelScope(shield=True):
                        await anyio.to_thread.run_sync(supervisor.stop)
            seconds = time.monotonic() - begin
            await self._look(experiment)
            if failed is None and self._step == self._skipped:
                reasons = (await rejection_counts(now(experiment))).values()
                rejected = sum(sum(of.values()) for of in reasons)
                failed = f"nothing was trained in {seconds:.0f} s, {rejected} rejected"
                failed += "" if self._finished else f": {self._cut_short}"
            expert_holds = True
            if self.config.expert_experiment == self._expert:  # which this demo made
                expert = await store.experiment(self._expert)
                report = await verify(expert, acknowledged=self._expert_receipts)
                lost = f"lost {report.lost}, duplicated {report.duplicated}"
                self._say(f"expert: {report.experiences} solutions, {lost}")
                expert_holds = report.ok
            code = await self._conclude(experiment, supervisor.kills, seconds, failed)
            return code if expert_holds else 1

    async def _teach(self, store: Store) -> int | None:
        """Train the teacher of a run that needs one; an exit code if the run cannot begin yet."""
        if not needs_of_run(self.config).teacher or self.config.teacher is not None:
            return None
        name = f"{self.experiment}-teacher"

        async def is_finished() -> bool:
            there = name in await store.experiments()
            return there and await (await store.experiment(name)).is_finished()

        if not await is_finished():
            self._say(f"first its teacher learns from solutions: experiment {name}")
            base, config = beside(self.base, "-teacher"), teacher_of(self.config)
            teacher = replace(
                self, base=base, experiment=name, config=config, explorers=1, brief=True, _lines=[]
            )
            code = await teacher.run_in_loop()
            if code or not await is_finished():
                return code
        checkpoint = await (await store.experiment(name)).last_checkpoint(self.config.trainer)
        policy = str(Path(checkpoint or "") / POLICY_FILE)
        self.config = replace(self.config, teacher=policy)
        self._say(f"taught: {policy}")
        return None

    async def _ask_expert(self, store: Store) -> None:
        """Record as many of an expert's solutions as the run can take, if it mixes them in."""
        config = expert_of(self.config)
        steps = self.config.max_steps or STEPS_WITHOUT_END
        groups = needs_of_run(self.config).expert_groups * steps
        batches = math.ceil(groups / config.groups_per_batch)
        if not batches or self.config.expert_experiment is not None:
            return
        # All of them before the run begins: its trainer never waits for the expert.
        solutions = batches * config.groups_per_batch
        self._say(f"first its expert records {solutions} solutions: experiment {self._expert}")
        await store.experiment(self._expert, config=run_config.recorded(config))
        receipts = make_folder(self._expert_receipts) / "expert.ack"
        limits: dict[str, Any] = {"acknowledgements": receipts, "max_batches": batches}
        await explore(self.store, self._expert, actor="expert", say=lambda _: None, **limits)
        self.config = replace(self.config, expert_experiment=self._expert)

    async def _experiment(self, store: Store) -> Experiment:
        if self.experiment in await store.experiments():
            experiment = await store.experiment(self.experiment)
            # Processes read the recorded configuration, so options of this call have no effect.
            wanted, self.config = self.config, run_config.of_experiment(experiment.config)
            kept = "" if wanted == self.config else ", with the configuration that it began with"
            self._say(f"{self._shown} is there already: this resumes it{kept}")
            return experiment
        model = beside(self.base, ".model")
        if self.config.model == str(model.resolve()) and not model.exists():
            model.parent.mkdir(parents=True, exist_ok=True)
            await anyio.to_thread.run_sync(lambda: make_tiny_model(model, seed=self.config.seed))
        task = self.config.rollout or self.config.task.name
        self._say(f"{self.config.algorithm} learns the task {task}; its settings:")
        self._say(f"  trinity-buffer stats --config {self._where}")
        return await store.experiment(self.experiment, config=run_config.recorded(self.config))

    @property
    def _cut_short(self) -> str:
        at = f"cut short by --limit {self.limit_s:g} at step {self._step}"
        return f"{at}: run the same command again to go on"

    @property
    def _step(self) -> int:
        return self._lines[-1].step if self._lines else 0

    @property
    def _skipped(self) -> int:
        return sum(line.state == "skipped" for line in self._lines)

    @property
    def _expert(self) -> str:
        """Name of the experiment with an expert's data, if this demo makes it."""
        return f"{self.experiment}-expert"

    @property
    def _expert_receipts(self) -> Path:
        return beside(self.base, "-expert.acks")

    @property
    def _shown(self) -> str:
        """The store without its password."""
        return named(self.store) if "://" in self.store else self.store

    @property
    def _where(self) -> str:
        """The options that name this run to any command."""
        return f"--store {self._shown} --experiment {self.experiment}"

    def _commands(self) -> dict[str, list[str]]:
        """Return the roles of a run, as anybody starts them by hand."""
        common = ("--store", self.store, "--experiment", self.experiment)
        receipts, checkpoints = (str(beside(self.base, s)) for s in (".acks", ".checkpoints"))
        roles = {
            f"explorer-{number}": ["explore", "--actor", f"e{number}", "--acknowledge", receipts]
            for number in range(self.explorers)
        }
        if strategies_of(run_config.algorithm_of(self.config))[0]:
            roles["strategy"] = ["annotate", "--follow"]
        roles["trainer"] = ["train", "--follow", "--checkpoints", checkpoints]
        return {name: command_of(*role, *common) for name, role in roles.items()}

    async def _watch(self, run: Experiment, supervisor: Supervisor, begin: float) -> str | None:
        """Show the run until it is finished, its time is up, or a process cannot be kept alive.

        Returns the last words of a process that cannot be kept alive.
        """
        failed, printed = None, 0.0
        until = math.inf if self.limit_s is None else begin + self.limit_s
        screen = Live(console=self.console, refresh_per_second=FRAMES_PER_S, transient=True)
        with screen if self.console.is_terminal else nullcontext() as live:
            while not self._finished and time.monotonic() <= until:
                await self._look(run)
                broken = supervisor.tend()
                if broken is not None:
                    failed = f"{broken.name} gave up: {broken.last_line()} (log: {broken.log})"
                    break
                if live is not None:
                    where = f"{self.experiment} · {self._shown}"
                    live.update(drawn(where, self._lines, supervisor))
                elif time.monotonic() - printed >= PLAIN_LINE_EVERY_S:
                    printed = time.monotonic()
                    kills = f"  killed {supervisor.kills}" if self.chaos_every_s else ""
                    numbers = figures(self._lines).items() if self._lines else ()
                    line = "  ".join(f"{name} {text:>6}" for name, text in numbers) or STARTING
                    self._say(f"{printed - begin:5.0f} s  {line}{kills}")
                await anyio.sleep(1 / FRAMES_PER_S)
            with anyio.move_on_after(LAST_MOMENTS_S):
                while self._finished and supervisor.running:
                    supervisor.tend()
                    await anyio.sleep(0.05)  # not every platform notifies of the end of a process
        return failed

    async def _look(self, experiment: Experiment) -> None:
        """Read which steps were committed since the last look."""
        source, name, after = now(experiment), self.config.trainer, self._step
        self._finished = await experiment.is_finished()  # before the steps: none comes after it
        with suppress(UnknownNameError):  # there is no trainer yet
            lines = await steps(source, trainer=name, after=after, limit=1 << 31)
            self._lines += [line for line in lines if line.committed_at is not None]

    async def _conclude(
        self, experiment: Experiment, kills: int, seconds: float, failed: str | None
    ) -> int:
        """Verify the run, show its results, and return the exit code; ``failed``: why it did."""
        lines = self._lines
        last = await experiment.last_checkpoint(self.config.trainer)
        checkpoint = None if last is None else Path(last)
        receipts = beside(self.base, ".acks")
        with progress() as report_progress:
            report = await verify(experiment, receipts, checkpoint, progress=report_progress)
        self._say(f"reward   {sparkline(curve(lines, 'reward'))}")
        self._say(f"accuracy {sparkline(curve(lines, 'accuracy'))}")
        rollouts = (await overview_of(now(experiment))).plans.stored
        self._say(
            f"{rollouts} rollouts, {self._step} gradient steps"
            + (f" ({self._skipped} skipped: not finite)" if self._skipped else "")
            + f", {seconds:.0f} s"
            + (f", {kills} processes killed" if kills else "")
        )
        picture = str(beside(self.base, ".png"))
        if curve(lines, "reward") and save_curve(picture, lines, self.experiment):
            self._say(f"curve: {picture}")
        wrong = "; ".join(map(str, report.problems[:3]))
        verdict = "what was stored holds, but the run failed" if failed else "everything holds"
        self._say(f"verify: {verdict if report.ok else f'FAILED: {wrong}'}")
        self._say(f"store: {self._shown}   logs: {beside(self.base, '.logs')}")
        if not self.brief:
            self._say("try next:")
            commits = "events --after 0 --kind StepsCommitted --limit 3"
            for command in ("stats", "groups --limit 5", commits):
                self._say(f"  trinity-buffer {command} {self._where}")
        if failed is None and checkpoint is not None:
            accuracy = await anyio.to_thread.run_sync(self._accuracy, checkpoint)
            if accuracy is not None:
                self._say(f"accuracy {accuracy:.2f}")
        self._say(f"lost {report.lost}, duplicated {report.duplicated}")
        if failed is not None:
            self._say(f"failed: {failed}", style="red")
        elif not self._finished:
            self._say(self._cut_short)
        return 0 if report.ok and failed is None else 1

    def _say(self, line: str, *, style: str | None = None) -> None:
        self.console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    def _accuracy(self, checkpoint: Path) -> float | None:
        """Return the exact-match accuracy of the last committed weights on fresh problems."""
        backend = backend_for(self.config)
        policy: Any = backend.load(checkpoint / backend.policy_file)
        # Far from the seeds of the trainer's evaluations, which are seed + step.
        return backend.accuracy(policy, problems=1000, seed=self.config.seed + 1_000_000)
