"""The name of an experience. Needs neither torch nor SQL: who only asks questions stays light."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

Key = int | str
"""A batch or task id. ``7`` and ``"7"`` are one key; the type is kept."""


@dataclass(frozen=True, slots=True)
class EID:
    """Address of one experience: batch, task in it, run, and step (turn) of the run.

    ``suffix`` tells deliberate repetitions apart: ``""`` for the first attempt, ``"a1"`` for a
    second one. It is never random: writing the same attempt twice must be writing it once.
    """

    batch: Key = ""
    task: Key = ""
    run: int = 0
    step: int = 0
    suffix: str = ""

    @property
    def uid(self) -> str:
        """``batch/task/run/step/suffix``: unique in an experiment."""
        return f"{self.batch}/{self.task}/{self.run}/{self.step}/{self.suffix}"

    @property
    def sid(self) -> str:
        """``batch/task/step``: the same step of all runs of a task."""
        return f"{self.batch}/{self.task}/{self.step}"

    @property
    def rid(self) -> str:
        """``batch/task/run``: all steps of a run."""
        return f"{self.batch}/{self.task}/{self.run}"

    @property
    def tid(self) -> str:
        """``batch/task``: all runs of a task, which is a group."""
        return f"{self.batch}/{self.task}"

    def to_dict(self) -> dict[str, Any]:
        """Return the five fields."""
        return asdict(self)

    def __str__(self) -> str:
        return self.uid


def order_of(key: Key) -> tuple[int, int, str]:
    """Return a sort key in which numbers sort as numbers, before texts."""
    return (0, key, "") if isinstance(key, int) else (1, 0, key)
