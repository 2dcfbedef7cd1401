"""TensorBoard and trackio, as `trinity_buffer.inspector.tracking.Tracker`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override

from trinity_buffer.algorithm.arguments import did_you_mean
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.inspector.tracking import Tracker
from trinity_buffer.lazy import extra


class TensorBoard(Tracker):
    """Writes scalars that ``tensorboard --logdir FOLDER`` shows.

    Args:
        folder: of this run; its parent is what TensorBoard is pointed at.

    Raises:
        InvalidArgumentError: the extra ``tensorboard`` is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        extra("tensorboard", "tensorboard")
        writing = extra("torch.utils.tensorboard", "tensorboard")
        self._writer: Any = writing.SummaryWriter(str(Path(folder).expanduser()))

    @override
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        # TensorBoard shows what is flushed, and a run may be killed.
        self._writer.flush()

    @override
    def close(self) -> None:
        self._writer.close()


class Trackio(Tracker):
    """Writes to a project of trackio, which ``trackio show`` shows.

    Args:
        project: its name.
        run: of this run, which is gone on with where it is there; None: a new one, whose name
            trackio makes up.

    Raises:
        InvalidArgumentError: the extra ``trackio`` is not installed.
    """

    def __init__(self, project: str, run: str | None = None) -> None:
        # A named run is gone on with; without a name two runs must not become one.
        resume = "never" if run is None else "allow"
        self._run: Any = extra("trackio", "trackio").init(project=project, name=run, resume=resume)

    @override
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    @override
    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[[str], Tracker]] = {
    "tensorboard": TensorBoard,
    "trackio": lambda place: Trackio(*place.split("/", 1)),
}
"""Name -> what makes one of a place: a folder, or a project, or a run of one."""


def tracker_of(target: str) -> Tracker:
    """Return the tracker of ``name:place``, such as ``tensorboard:runs/tb``.

    Raises:
        InvalidArgumentError: there is none of this name, no place is named, or it is not installed.
    """
    name, _, place = target.partition(":")
    if name not in TRACKERS or not place:
        raise InvalidArgumentError(
            f"--to {target}: give name:place, tensorboard:FOLDER or trackio:PROJECT[/RUN]"
            f"{did_you_mean(name, TRACKERS)}"
        )
    return TRACKERS[name](place)
