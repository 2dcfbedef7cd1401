"""What users and their scripts rely on by name, as one mapping of lists.

python -m tests.public_names > tests/public_names.json    # of the commit that must not be broken
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import click
import typer

from tests.sample_run import record_sample_run
from trinity_buffer import algorithm
from trinity_buffer.cli.main import app, run_command

PACKAGES = (
    "trinity_buffer",
    "trinity_buffer.algorithm",
    "trinity_buffer.algorithm.add_strategy",
    "trinity_buffer.algorithm.advantage_fn",
    "trinity_buffer.algorithm.entropy_loss_fn",
    "trinity_buffer.algorithm.kl_fn",
    "trinity_buffer.algorithm.policy_loss_fn",
    "trinity_buffer.algorithm.sample_strategy",
)
REGISTRIES = (
    "ADD_STRATEGY",
    "ADVANTAGE_FN",
    "ALGORITHM_TYPE",
    "ENTROPY_LOSS_FN",
    "KL_FN",
    "POLICY_LOSS_FN",
    "SAMPLE_STRATEGY",
)
QUESTIONS = (["stats"], ["events"], ["groups"], ["verify"], ["algorithms"])


def public_names() -> dict[str, list[str]]:
    """Return exports, registered names, commands with their options, and keys of `--json`."""
    found = {name: sorted(importlib.import_module(name).__all__) for name in PACKAGES}
    found |= {name: sorted(getattr(algorithm, name).names()) for name in REGISTRIES}
    group: Any = typer.main.get_command(app)
    names, context = group.list_commands(click.Context(group)), click.Context(group)
    commands = {name: group.get_command(context, name) for name in names}
    found["commands"] = sorted(commands)
    found |= {f"options of {name}": _options(command) for name, command in commands.items()}
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/store.db"
        anyio.run(record_sample_run, url, Path(folder) / "run")
        for question in QUESTIONS:
            found[f"keys of {question[0]} --json"] = _json_keys(*question, url=url)
    return found


def _options(command: click.Command) -> list[str]:
    return sorted(name for param in command.params for name in (*param.opts, *param.secondary_opts))


def _json_keys(*command: str, url: str) -> list[str]:
    store = () if command[0] == "algorithms" else ("--store", url)
    said, before = io.StringIO(), sys.argv
    sys.argv = ["trinity-buffer", *command, *store, "--json"]
    try:
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            run_command()
    finally:
        sys.argv = before
    return sorted({key for line in said.getvalue().splitlines() for key in _keys(json.loads(line))})


def _keys(value: Any, at: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield f"{at}{key}"
            yield from _keys(inner, f"{at}{key}.")
    elif isinstance(value, list):
        for inner in value:
            yield from _keys(inner, at)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(public_names(), indent=1) + "\n")
