"""A run's numbers in TensorBoard: what its own reader finds in the files is what the log says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.outside.small_run import STEPS, told


@pytest.fixture
def store(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    anyio.run(told, url)
    return url


def command(*words: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "trinity_buffer", *words], check=True, text=True, capture_output=True
    ).stdout


def test_tensorboard_shows_what_the_log_says(store: str, tmp_path: Path) -> None:
    folder = tmp_path / "tensorboard"
    command("track", "--store", store, "--to", f"tensorboard:{folder}", "--after", "1")
    command("track", "--store", store, "--to", f"tensorboard:{folder}", "--after", str(STEPS))
    found = EventAccumulator(str(folder))
    found.Reload()
    lines = command("steps", "--store", store, "--json", "--after", "1").splitlines()
    steps = [json.loads(line) for line in lines]
    for name, value_of in {
        "loss": lambda line: line["metrics"]["loss"],
        "batch/reward": lambda line: line["reward"],
        "batch/rows": lambda line: line["rows"],
    }.items():
        shown = [(scalar.step, scalar.value) for scalar in found.Scalars(name)]
        assert shown == [(line["step"], pytest.approx(value_of(line))) for line in steps]
    assert [line["step"] for line in steps] == [2, 3, 4]
