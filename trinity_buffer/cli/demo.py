"""``trinity-buffer demo``: a whole run, four processes on one store, watched as it learns."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
from rich.live import Live

from trinity_buffer.cli.demo_own import make_model
from trinity_buffer.cli.demo_sources import expert_batches, expert_of, needs_of_run, teacher_of
from trinity_buffer.cli.ends import ends_of
from trinity_buffer.cli.options import made_folder, made_folder_of
from trinity_buffer.cli.printing import Terminal, progress
from trinity_buffer.cli.roles import explore
from trinity_buffer.cli.run_algorithm import algorithm_of, recorded
from trinity_buffer.cli.run_config import RunConfig, of_experiment
from trinity_buffer.cli.supervisor import Supervisor, command_of
from trinity_buffer.demo import view
from trinity_buffer.demo.view import RunNumbers
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.pipeline.store import Store, open_store
from trinity_buffer.pipeline.verifying.verify import VerifyReport, verify
from trinity_buffer.store.url import named
from trinity_buffer.trainer.checkpoint import POLICY_FILE
from trinity_buffer.trainer.requirements import strategies_of

FRAMES_PER_S = 4
PLAIN_LINE_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class DemoPaths:
    """Where the files of a demo are: everything beside the store is named after it."""

    store: str
    base: Path

    def of(self, source: str) -> DemoPaths:
        """Return the paths of what is made for this demo: its teacher, or its expert."""
        return DemoPaths(self.store, self.base.with_name(f"{self.base.name}-{source}"))

    @property
    def logs(self) -> Path:
        """What the processes said."""
        return self.base.with_suffix(".logs")

    @property
    def checkpoints(self) -> Path:
        """Checkpoints of the trainer."""
        return self.base.with_suffix(".checkpoints")

    @property
    def model(self) -> Path:
        """The random model of transformers that a run begins with."""
        return self.base.with_suffix(".model")

    @property
    def acknowledgements(self) -> Path:
        """What the explorers noted of acknowledged writes."""
        return self.base.with_suffix(".acks")

    @property
    def picture(self) -> Path:
        """The reward curve."""
        return self.base.with_suffix(".png")


@dataclass(slots=True)
class Demo:
    """One demo, from opening the store to the last line.

    Attributes:
        explorers: how many explorer processes.
        chaos_every_s: kill a random process about so often; None: never.
        limit_s: stop after so long, whatever was reached.
        brief: suggest no commands at the end.
    """

    paths: DemoPaths
    experiment: str
    config: RunConfig
    explorers: int = 2
    chaos_every_s: float | None = None
    limit_s: float | None = None
    brief: bool = False
    console: Terminal = field(default_factory=Terminal)
    _numbers: RunNumbers = field(default_factory=RunNumbers)
    _supervisors: list[Supervisor] = field(default_factory=list)

    def run(self) -> int:
        """Run to the end; return the exit code."""
        try:
            return anyio.run(self.run_in_loop)
        except KeyboardInterrupt:
            at = "after its end" if self._numbers.finished else f"at step {self._numbers.step}"
            self._say(f"\ncut short by Ctrl-C {at}: run the same command again to go on")
            return 0
        except BaseExceptionGroup as errors:
            if errors.subgroup(SystemExit) is None:
                raise
            return 1  # nobody reads what it prints any more, as behind `| head`
        finally:
            # again: an impatient second Ctrl-C may have cut the first one short
            for supervisor in self._supervisors:
                supervisor.stop()

    async def run_in_loop(self) -> int:
        """Run to the end, in an event loop that is there already; return the exit code."""
        begin = time.monotonic()
        made_folder_of(self.paths.store)
        async with open_store(self.paths.store) as store:
            for folder in (self.paths.logs, self.paths.checkpoints, self.paths.acknowledgements):
                made_folder(folder)  # after the store was opened: it may be refused
            if self.experiment not in await store.experiments():
                code = await self._teach(store)
                if code is not None:
                    return code
                await self._ask_expert(store)
            experiment = await self._experiment(store)
            numbers = self._numbers
            failed: str | None = None
            supervisor = Supervisor(
                self._commands(), self.paths.logs, self.chaos_every_s, self.config.seed
            )
            self._supervisors.append(supervisor)
            if not await experiment.is_finished():
                supervisor.start()
                try:
                    failed = await self._watch(experiment, numbers, supervisor, begin)
                finally:
                    with anyio.CancelScope(shield=True):
                        await anyio.to_thread.run_sync(supervisor.stop)
            else:
                self.console.print(
                    "this run is finished already; here is how it ended (--name starts another)"
                )
                async for event in experiment.events():
                    numbers.take(event)
            seconds = time.monotonic() - begin
            if failed is None and not numbers.trained:
                failed = f"nothing was trained in {seconds:.0f} s, {numbers.rejected} rejected" + (
                    "" if numbers.finished is not None else f": {self._cut_short}"
                )
            holds = await self._expert_holds(store)
            code = await self._conclude(experiment, supervisor, seconds, failed)
            return code if holds else 1

    async def _teach(self, store: Store) -> int | None:
        """Train the teacher of a run that needs one; an exit code if the run cannot begin yet."""
        if not needs_of_run(self.config).teacher or self.config.teacher is not None:
            return None
        name = f"{self.experiment}-teacher"
        if (
            name not in await store.experiments()
            or not await (await store.experiment(name)).is_finished()
        ):
            self._say(f"first its teacher learns from solutions: experiment {name}")
            paths, config = self.paths.of("teacher"), teacher_of(self.config)
            teacher = replace(self, paths=paths, experiment=name, config=config, explorers=1)
            code = await replace(teacher, brief=True, _numbers=RunNumbers()).run_in_loop()
            if code or not await (await store.experiment(name)).is_finished():
                return code
        checkpoint = await (await store.experiment(name)).last_checkpoint(self.config.trainer)
        policy = str(Path(checkpoint or "") / POLICY_FILE)
        self.config = self.config.model_copy(update={"teacher": policy})
        self._say(f"taught: {policy}")
        return None

    async def _ask_expert(self, store: Store) -> None:
        """Record as many of an expert's solutions as the run can take, if it mixes them in."""
        batches = expert_batches(self.config)
        if not batches or self.config.expert_experiment is not None:
            return
        # All of them before the run: its trainer need not wait for any.
        config, noted = expert_of(self.config), self.paths.of("expert").acknowledgements
        solutions = batches * config.groups_per_batch
        self._say(f"first its expert records {solutions} solutions: experiment {self._expert}")
        await store.experiment(self._expert, config=recorded(config))
        await explore(
            self.paths.store,
            self._expert,
            actor="expert",
            acknowledgements=made_folder(noted) / "expert.ack",
            max_batches=batches,
            say=lambda _: None,
        )
        self.config = self.config.model_copy(update={"expert_experiment": self._expert})

    async def _experiment(self, store: Store) -> Experiment:
        if self.experiment in await store.experiments():
            found = await store.experiment(self.experiment)
            asked, self.config = self.config, of_experiment(found.config)
            kept = "" if asked == self.config else ", with the configuration that it began with"
            self.console.print(
                f"{self._shown} is there already: this resumes it{kept}",
                highlight=False,
                soft_wrap=True,
            )
            return found
        if self.config.model == str(self.paths.model.resolve()):
            await anyio.to_thread.run_sync(make_model, self.paths.model, self.config.seed)
        task = self.config.rollout or self.config.task.name
        self._say(f"{self.config.algorithm} learns the task {task}; its settings:")
        self._say(f"  trinity-buffer stats --config {self._where()}")
        return await store.experiment(self.experiment, config=recorded(self.config))

    @property
    def _cut_short(self) -> str:
        at = f"cut short by --limit {self.limit_s:g} at step {self._numbers.step}"
        return f"{at}: run the same command again to go on"

    @property
    def _expert(self) -> str:
        """The experiment with an expert's data, if this demo makes it."""
        return f"{self.experiment}-expert"

    @property
    def _shown(self) -> str:
        """The store, as it may be shown: without a password."""
        return named(self.paths.store) if "://" in self.paths.store else self.paths.store

    def _where(self) -> str:
        """Return the options that name this run to any command."""
        return f"--store {self._shown} --experiment {self.experiment}"

    def _commands(self) -> dict[str, list[str]]:
        common = ("--store", self.paths.store, "--experiment", self.experiment)
        noted = ("--acknowledge", str(self.paths.acknowledgements))
        commands = {
            f"explorer-{number}": command_of("explore", *common, "--actor", f"e{number}", *noted)
            for number in range(self.explorers)
        }
        if strategies_of(algorithm_of(self.config))[0]:
            commands["strategy"] = command_of("annotate", *common, "--follow")
        commands["trainer"] = command_of(
            "train", *common, "--follow", "--checkpoints", str(self.paths.checkpoints)
        )
        return commands

    async def _watch(
        self, experiment: Experiment, numbers: RunNumbers, supervisor: Supervisor, begin: float
    ) -> str | None:
        """Show the run until it is finished, its time is up, or a process cannot be kept alive.

        Returns what the process said last that cannot be kept alive.
        """
        failed = None
        async with AsyncExitStack() as stack:
            live = None
            if self.console.is_terminal:
                live = stack.enter_context(
                    Live(console=self.console, refresh_per_second=FRAMES_PER_S, transient=True)
                )
            group = await stack.enter_async_context(anyio.create_task_group())
            group.start_soon(self._fold, experiment, numbers)
            said = 0.0
            while numbers.finished is None and not self._time_is_up(begin):
                broken = supervisor.tend()
                if broken is not None:
                    failed = f"{broken.name} gave up: {broken.last_line()} (log: {broken.log})"
                    break
                if live is not None:
                    title = f"{self.experiment} · {self._shown}"
                    live.update(view.drawn(title, numbers, supervisor.children, supervisor.kills))
                elif time.monotonic() - said >= PLAIN_LINE_EVERY_S:
                    said = time.monotonic()
                    kills = f"  killed {supervisor.kills}" if self.chaos_every_s else ""
                    self.console.print(
                        f"{said - begin:5.0f} s  {numbers.line()}{kills}",
                        highlight=False,
                        soft_wrap=True,
                    )
                await anyio.sleep(1 / FRAMES_PER_S)  # the frame rate of what a person looks at
            if numbers.finished is not None:
                await self._wait_for_children(supervisor)
            group.cancel_scope.cancel()
        return failed

    def _time_is_up(self, begin: float) -> bool:
        return self.limit_s is not None and time.monotonic() - begin > self.limit_s

    async def _fold(self, experiment: Experiment, numbers: RunNumbers) -> None:
        async for event in experiment.events(follow=True):
            numbers.take(event)

    async def _wait_for_children(self, supervisor: Supervisor) -> None:
        with anyio.move_on_after(5):
            while supervisor.running:
                supervisor.tend()
                await anyio.sleep(0.05)  # processes have no event to wait for on every platform

    async def _conclude(
        self, experiment: Experiment, supervisor: Supervisor, seconds: float, failed: str | None
    ) -> int:
        checkpoint = await self._last_checkpoint(experiment)
        with progress() as tell:
            report = await verify(
                experiment,
                acknowledged=self.paths.acknowledgements,
                checkpoint=checkpoint,
                progress=tell,
            )
        self._show(report, supervisor, seconds, whole=failed is None)
        if failed is None:
            accuracy = await anyio.to_thread.run_sync(self._accuracy, checkpoint)
            if accuracy is not None:
                self._say(f"accuracy {accuracy:.2f}")
        self._say(f"lost {report.lost}, duplicated {report.duplicated}")
        if failed is not None:
            self._say(f"failed: {failed}", style="red")
        elif self._numbers.finished is None:
            self._say(self._cut_short)
        return 0 if report.ok and failed is None else 1

    def _say(self, line: str, *, style: str | None = None) -> None:
        self.console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    async def _expert_holds(self, store: Store) -> bool:
        """Verify what was made for an expert, and say so; True where nothing was."""
        if self.config.expert_experiment != self._expert:
            return True
        expert = await store.experiment(self._expert)
        report = await verify(expert, acknowledged=self.paths.of("expert").acknowledgements)
        self._say(
            f"expert: {report.experiences} solutions, "
            f"lost {report.lost}, duplicated {report.duplicated}"
        )
        return report.ok

    async def _last_checkpoint(self, experiment: Experiment) -> Path | None:
        found = await experiment.last_checkpoint(self.config.trainer)
        return None if found is None else Path(found)

    def _accuracy(self, checkpoint: Path | None) -> float | None:
        """Return the exact-match accuracy of the last committed weights on fresh problems."""
        ends = ends_of(self.config)
        policy: Any = (
            ends.policy() if checkpoint is None else ends.load(checkpoint / ends.policy_file)
        )
        return ends.accuracy(policy, problems=1000, seed=self.config.seed + 1_000_000)

    def _show(
        self, report: VerifyReport, supervisor: Supervisor, seconds: float, *, whole: bool
    ) -> None:
        """Show what came of the run; ``whole``: it did not fail."""
        say, numbers = self.console.print, self._numbers
        say(
            f"reward   {view.sparkline([reward for _, reward in numbers.rewards])}",
            highlight=False,
            soft_wrap=True,
        )
        say(
            f"accuracy {view.sparkline([value for _, value in numbers.accuracies])}",
            highlight=False,
            soft_wrap=True,
        )
        say(
            f"{numbers.rollouts.total} rollouts, {numbers.step} gradient steps"
            + (f" ({len(numbers.skipped)} skipped: not finite)" if numbers.skipped else "")
            + f", {seconds:.0f} s"
            + (f", {supervisor.kills} processes killed" if supervisor.kills else ""),
            highlight=False,
        )
        picture = str(self.paths.picture)
        if numbers.rewards and view.save_curve(picture, numbers, self.experiment):
            say(f"curve: {picture}", highlight=False, soft_wrap=True)
        wrong = "; ".join(map(str, report.problems[:3]))
        verdict = "everything holds" if whole else "what was stored holds, but the run failed"
        say(f"verify: {verdict if report.ok else f'FAILED: {wrong}'}")
        say(f"store: {self._shown}   logs: {self.paths.logs}", highlight=False, soft_wrap=True)
        if self.brief:
            return
        say("try next:")
        for command in (
            "stats",
            "groups --limit 5",
            "events --after 0 --kind StepsCommitted --limit 3",
        ):
            say(f"  trinity-buffer {command} {self._where()}", highlight=False, soft_wrap=True)


def store_path(store: str | None, name: str) -> DemoPaths:
    """Return where the demo ``name`` keeps its files.

    Raises:
        InvalidArgumentError: a name that no file can have.
    """
    if not name or "/" in name:
        raise InvalidArgumentError(f"--name {name!r}: must be a text without '/'")
    base = Path("runs") / name
    if store is None:
        return DemoPaths(f"sqlite:///{base}.db", base)
    plain = store.removeprefix("sqlite:///")
    return DemoPaths(store, base if "://" in plain else Path(plain).expanduser().with_suffix(""))
