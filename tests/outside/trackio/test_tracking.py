"""A run's numbers in trackio: what its own store holds is what the log says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import anyio

from tests.outside.small_run import STEPS, told

READ = (
    "import json; from trackio.sqlite_storage import SQLiteStorage as S; "
    "(run,) = S.get_run_records('sort'); "  # one, though two processes wrote it
    "print(json.dumps(S.get_logs('sort', run['name'], run_id=run['id'])))"
)


def test_trackio_keeps_what_the_log_says(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    anyio.run(told, url)
    place = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio")}

    def said(*words: str) -> str:
        done = subprocess.run([sys.executable, *words], env=place, text=True, capture_output=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    track = ("-m", "trinity_buffer", "track", "--store", url, "--to", "trackio:sort/first")
    said(*track)
    said(*track, "--after", str(STEPS))
    kept = json.loads(said("-c", READ).splitlines()[-1])
    steps = [
        json.loads(line)
        for line in said("-m", "trinity_buffer", "steps", "--store", url, "--json").splitlines()
    ]
    assert len(steps) == STEPS
    assert [(row["step"], row["loss"], row["batch/reward"]) for row in kept] == [
        (step["step"], step["metrics"]["loss"], step["reward"]) for step in steps
    ]
