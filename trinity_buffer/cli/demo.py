"""``trinity-buffer demo``: a whole run, four processes on one store, watched as it learns."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
from rich.console import Console
from rich.live import Live

from trinity_buffer.cli.options import made_folder
from trinity_buffer.cli.printing import progress
from trinity_buffer.cli.run_config import RunConfig, of_experiment
from trinity_buffer.cli.supervisor import Supervisor, command_of
from trinity_buffer.demo import view
from trinity_buffer.demo.view import RunNumbers
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.pipeline.store import open_store
from trinity_buffer.pipeline.verifying.verify import VerifyReport, verify

FRAMES_PER_S = 4
PLAIN_LINE_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class DemoPaths:
    """Where the files of a demo are: everything beside the store is named after it."""

    store: str
    base: Path

    @property
    def logs(self) -> Path:
        """What the processes said."""
        return self.base.with_suffix(".logs")

    @property
    def checkpoints(self) -> Path:
        """Checkpoints of the trainer."""
        return self.base.with_suffix(".checkpoints")

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
    """

    paths: DemoPaths
    experiment: str
    config: RunConfig
    explorers: int = 2
    chaos_every_s: float | None = None
    limit_s: float | None = None
    console: Console = field(default_factory=Console)
    _numbers: RunNumbers = field(default_factory=RunNumbers)
    _supervisor: Supervisor = field(default_factory=lambda: Supervisor({}, Path()))

    def run(self) -> int:
        """Run to the end; return the exit code."""
        try:
            return anyio.run(self._run)
        except KeyboardInterrupt:
            self.console.print(
                f"\ninterrupted at step {self._numbers.step}; run the same command again to go on "
                "where it was"
            )
            return 0
        finally:
            # again: an impatient second Ctrl-C may have cut the first one short
            self._supervisor.stop()

    async def _run(self) -> int:
        begin = time.monotonic()
        async with open_store(self.paths.store) as store:
            for folder in (self.paths.logs, self.paths.checkpoints, self.paths.acknowledgements):
                made_folder(folder)  # after the store was opened: it may be refused
            experiment = await self._experiment(store)
            numbers = self._numbers
            failed: str | None = None
            supervisor = self._supervisor = Supervisor(
                self._commands(), self.paths.logs, self.chaos_every_s, self.config.seed
            )
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
                failed = f"nothing was trained in {seconds:.0f} s: {numbers.rejected} rejected"
            return await self._conclude(experiment, supervisor, seconds, failed)

    async def _experiment(self, store: Any) -> Experiment:
        if self.experiment in await store.experiments():
            found: Experiment = await store.experiment(self.experiment)
            asked, self.config = self.config, of_experiment(found.config)
            kept = "" if asked == self.config else ", with the configuration that it began with"
            self.console.print(
                f"{self.paths.store} is there already: this resumes it{kept}",
                highlight=False,
                soft_wrap=True,
            )
            return found
        config = self.config.model_dump()
        self.console.print_json(data=config)
        return await store.experiment(self.experiment, config=config)  # type: ignore[no-any-return]

    def _commands(self) -> dict[str, list[str]]:
        common = ("--store", self.paths.store, "--experiment", self.experiment)
        commands = {
            f"explorer-{number}": command_of(
                "explore",
                *common,
                "--actor",
                f"e{number}",
                "--acknowledge",
                str(self.paths.acknowledgements),
            )
            for number in range(self.explorers)
        }
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
                    title = f"{self.experiment} · {self.paths.store}"
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
        self._show(self._numbers, report, supervisor, seconds)
        if failed is None:
            accuracy = await anyio.to_thread.run_sync(self._accuracy, checkpoint)
            self._say(f"accuracy {accuracy:.2f}")
        self._say(f"lost {report.lost}, duplicated {report.duplicated}")
        if failed is not None:
            self._say(f"failed: {failed}", style="red")
        elif self._numbers.finished is None:
            self._say(
                f"cut short by --limit {self.limit_s:g} at step {self._numbers.step}: run the same "
                "command again to go on"
            )
        return 0 if report.ok and failed is None else 1

    def _say(self, line: str, *, style: str | None = None) -> None:
        self.console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    async def _last_checkpoint(self, experiment: Experiment) -> Path | None:
        found = await experiment.last_checkpoint(self.config.trainer)
        return None if found is None else Path(found)

    def _accuracy(self, checkpoint: Path | None) -> float:
        """Return the exact-match accuracy of the last committed weights on fresh problems."""
        # torch is imported only here: while the run is on, this process must leave the cores to the
        # others.
        from trinity_buffer.cli.roles import first_policy, task_of  # noqa: PLC0415
        from trinity_buffer.demo.policy import TransformerPolicy  # noqa: PLC0415
        from trinity_buffer.demo.rollout import evaluate  # noqa: PLC0415

        policy = (
            first_policy(self.config)
            if checkpoint is None
            else TransformerPolicy.load(checkpoint / "policy.safetensors")
        )
        return evaluate(policy, task_of(self.config), 1000, seed=self.config.seed + 1_000_000)

    def _show(
        self, numbers: RunNumbers, report: VerifyReport, supervisor: Supervisor, seconds: float
    ) -> None:
        say = self.console.print
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
        verdict = "everything holds" if report.ok else f"FAILED: {wrong}"
        if not numbers.trained:
            verdict += " of what was stored, and nothing was trained"
        say(f"verify: {verdict}")
        say(f"store: {self.paths.store}   logs: {self.paths.logs}", highlight=False, soft_wrap=True)
        say("try next:")
        for command in (
            "stats",
            "groups --limit 5",
            "events --after 0 --kind StepsCommitted --limit 3",
        ):
            say(
                f"  trinity-buffer {command} --store {self.paths.store}",
                highlight=False,
                soft_wrap=True,
            )


def store_path(store: str | None, name: str) -> DemoPaths:
    """Return where the demo ``name`` keeps its files.

    Raises:
        InvalidArgumentError: a name that no file can have.
    """
    if not name or "/" in name:
        raise InvalidArgumentError(f"--name {name!r}: must be a text without '/'")
    base = Path("runs") / name
    if store is None:
        made_folder(base.parent)
        return DemoPaths(f"sqlite:///{base}.db", base)
    plain = store.removeprefix("sqlite:///")
    return DemoPaths(store, base if "://" in plain else Path(plain).with_suffix(""))
