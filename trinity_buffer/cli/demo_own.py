"""The demo of a model of transformers: what `init` writes, in the demo's processes."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from trinity_buffer.cli.run_file import PLACES, parsed
from trinity_buffer.demo.tiny_model import make_tiny_model

PACKAGE = "trinity_buffer.demo.own"
NAMED = ("rollout", "tasks", "evaluate")


def own_config(model: Path) -> dict[str, Any]:
    """Return the configuration that `init` writes, with the model in the folder ``model``."""
    found = parsed(Path(str(files(PACKAGE).joinpath("run.toml"))))
    here = {key: f"{PACKAGE}.{found[key]}" for key in NAMED}
    kept = {key: value for key, value in found.items() if key not in PLACES}
    return {**kept, **here, "model": str(model.resolve())}


def make_model(model: Path, seed: int) -> None:
    """Make the random model of a demo, unless it is there: a run that goes on began with it."""
    if not model.exists():
        model.parent.mkdir(parents=True, exist_ok=True)
        make_tiny_model(model, seed=seed)
