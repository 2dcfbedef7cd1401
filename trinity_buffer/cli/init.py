"""``trinity-buffer init``: a folder to begin with."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import typer

from trinity_buffer.cli.options import make_folder
from trinity_buffer.errors import InvalidArgumentError

WRITTEN = ("run.toml", "rollout.py", "README.md")
MODEL = "model"


def init(folder: Path, seed: int = 0) -> None:
    """Write a run to start from: configuration, rollouts, a small random model.

    It runs as it is; its README says how.

    Example: trinity-buffer init own

    Args:
        folder: Folder to write to; created if missing.
        seed: Of the random weights.
    """
    from trinity_buffer.demo.tiny_model import make_tiny_model  # noqa: PLC0415 - torch

    taken = [name for name in (*WRITTEN, MODEL) if (folder / name).exists()]
    if taken:
        raise InvalidArgumentError(
            f"{folder} has {', '.join(taken)} already: nothing was written, name another folder"
        )
    make_folder(folder)
    make_tiny_model(folder / MODEL, seed=seed)
    for name in WRITTEN:
        text = files("trinity_buffer.demo").joinpath("own", name).read_text()
        (folder / name).write_text(text)
    typer.echo(f"{folder}: {', '.join(WRITTEN)} and {MODEL}/; {folder / 'README.md'} says how")
