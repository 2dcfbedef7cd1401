"""The live view of a run: numbers from the log alone, drawn or as one plain line."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from trinity_buffer import events
from trinity_buffer.pipeline.handle import Event

WINDOW_S = 5.0

STARTING = "starting: nothing is recorded yet"
"""What is shown until there are numbers."""


class Child(NamedTuple):
    """A process of the run, as the live view shows it."""

    name: str
    alive: bool
    restarts: int
    last_line: str


@dataclass(slots=True)
class Rate:
    """A rate per second, over the last few seconds."""

    total: int = 0
    _recent: deque[tuple[float, int]] = field(default_factory=deque)

    def add(self, number: int, at: float) -> None:
        """Count ``number`` more at the time ``at``."""
        self.total += number
        self._recent.append((at, number))

    def per_second(self, now: float) -> float:
        """Return the rate over the window that ends at ``now``."""
        while self._recent and self._recent[0][0] < now - WINDOW_S:
            self._recent.popleft()
        return sum(number for _, number in self._recent) / WINDOW_S


@dataclass(slots=True)
class RunNumbers:
    """A fold of the events of a run into the numbers of the view.

    Attributes:
        rewards: (gradient step or policy version, mean reward of a write).
        accuracies: (gradient step, accuracy), as the trainer measured them.
        skipped: committed steps that did not change the weights.
        rejected_rows: annotation rows that a trainer has rejected.
        staleness: of the last step, as its trainer measured it.
    """

    rollouts: Rate = field(default_factory=Rate)
    annotated: Rate = field(default_factory=Rate)
    steps: Rate = field(default_factory=Rate)
    rejected: int = 0
    rejected_rows: int = 0
    leased_rows: int = 0
    step: int = 0
    skipped: set[int] = field(default_factory=set)
    policy: int = 0
    recent_reward: float = 0.0
    staleness: float = 0.0
    rewards: list[tuple[int, float]] = field(default_factory=list)
    accuracies: list[tuple[int, float]] = field(default_factory=list)
    finished: str | None = None

    def take(self, event: Event) -> None:
        """Fold one event; most kinds change nothing here."""
        fact, at = event.fact, event.recorded_at
        match fact:
            case events.ExperiencesRecorded():
                self._recorded(fact, at)
            case events.ExperiencesAnnotated():
                self.annotated.add(len(fact.experiences), at)
            case events.ExperiencesRejected():
                self.rejected += len(fact.experiences)
                self.rejected_rows += len(fact.experiences) if fact.by == "trainer" else 0
            case events.BatchLeased():
                self.leased_rows += len(fact.annotations)
            case events.StepDealt():
                self.leased_rows -= len(fact.dropped)
            case events.StepsCommitted():
                self._committed(fact, at)
            case events.PolicyPublished():
                self.policy = fact.number
            case events.ExperimentFinished():
                self.finished = fact.reason
            case events.ConfigurationChanged():  # a changed run goes on
                self.finished = None

    def _committed(self, fact: events.StepsCommitted, at: float) -> None:
        self.steps.add(len(fact.steps), at)
        self.step = fact.steps[-1]
        self.staleness = fact.metrics.get("staleness", self.staleness)
        self.skipped = {step for step in self.skipped if step < fact.steps[0]}
        self.skipped |= set(fact.skipped_steps)
        if "accuracy" in fact.metrics:
            self.accuracies.append((self.step, fact.metrics["accuracy"]))

    def _recorded(self, fact: events.ExperiencesRecorded, at: float) -> None:
        columns = fact.columns
        runs = zip(columns.batch, columns.task, columns.run, strict=True)
        last = dict(zip(runs, columns.reward, strict=True))
        rewards = [float(reward) for reward in last.values() if reward is not None]
        self.rollouts.add(len(last), at)
        versions = [version for version in columns.policy_version if version is not None]
        if rewards:
            mean = sum(rewards) / len(rewards)
            self.recent_reward += (mean - self.recent_reward) * (0.2 if self.rewards else 1.0)
            self.rewards.append((versions[0] if versions else self.policy, mean))

    @property
    def accuracy(self) -> float | None:
        """The last measured accuracy."""
        return self.accuracies[-1][1] if self.accuracies else None

    @property
    def trained(self) -> int:
        """Number of committed steps that changed the weights."""
        return self.step - len(self.skipped)

    @property
    def ready(self) -> int:
        """Annotation rows that the trainer has neither leased nor rejected."""
        return max(0, self.annotated.total - self.leased_rows - self.rejected_rows)

    def figures(self) -> dict[str, str]:
        """Return the numbers as texts, by what they are."""
        now = time.time()
        return {
            "step": str(self.step),
            "accuracy": "-" if self.accuracy is None else f"{self.accuracy:.3f}",
            "reward": f"{self.recent_reward:.3f}" if self.rewards else "-",
            "rollouts/s": f"{self.rollouts.per_second(now):.0f}",
            "steps/s": f"{self.steps.per_second(now):.1f}",
            "ready": str(self.ready),
            "staleness": f"{self.staleness:.1f}",
        }

    def line(self) -> str:
        """Return one plain line."""
        if not self.rollouts.total:
            return STARTING
        it = self.figures()
        return (
            f"step {it['step']:>4}  accuracy {it['accuracy']}  reward {it['reward']}  "
            f"{it['rollouts/s']:>6} rollouts/s  {it['steps/s']:>4} steps/s  "
            f"ready {it['ready']}  staleness {it['staleness']}"
        )


BARS = " ▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 60, low: float = 0.0, high: float = 1.0) -> str:
    """Return a curve in one line of text."""
    if not values:
        return ""
    size = max(1, len(values) // width)
    means = [
        sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)
    ]
    scale = (len(BARS) - 1) / max(high - low, 1e-9)
    return "".join(
        BARS[round(min(max(value - low, 0.0), high - low) * scale)] for value in means[-width:]
    )


def drawn(title: str, numbers: RunNumbers, children: Sequence[Child], kills: int) -> Panel:
    """Return the live view: the run above, one line per process below."""
    top, figures = Table.grid(padding=(0, 3)), numbers.figures()
    top.add_row(*figures, style="dim")
    figures["accuracy"] = f"[bold green]{figures['accuracy']}"
    top.add_row(*figures.values())
    bottom = Table.grid(padding=(0, 2))
    for child in children:
        state = Text("●", style="green" if child.alive else "red")
        again = f"restarted {child.restarts}×" if child.restarts else ""
        bottom.add_row(state, child.name, again, Text(child.last_line[:90], style="dim"))
    curve = Text("reward   " + sparkline([reward for _, reward in numbers.rewards]), style="cyan")
    if not numbers.rollouts.total:
        top, curve = Table.grid(), Text(STARTING, style="dim")
    footer = Text(
        f"{kills} processes killed so far" if kills else "Ctrl-C ends it; nothing is lost",
        style="dim",
    )
    return Panel(Group(top, curve, Text(), bottom, footer), title=title, border_style="blue")


def save_curve(path: str, numbers: RunNumbers, title: str) -> bool:
    """Write reward and accuracy over steps as a PNG; False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an optional extra, and slow to import
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(
        *zip(*numbers.rewards, strict=True), ".", markersize=2, alpha=0.4, label="reward of a write"
    )
    if numbers.accuracies:
        axes.plot(
            *zip(*numbers.accuracies, strict=True),
            "-o",
            markersize=3,
            label="exact match, fresh problems",
        )
    axes.set(xlabel="gradient step (policy version)", ylim=(0, 1.02), title=title)
    axes.legend(loc="lower right")
    axes.grid(visible=True, alpha=0.3)
    figure.savefig(path, dpi=120)
    return True
