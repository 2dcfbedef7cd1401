"""One rank in a process of its own, forked by name: a test module has another name there."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from tests.crash.forking import become
from trinity_buffer import open_train_stream


def train(url: str, folder: str, rank: int, ranks: int, dies_in: int) -> None:
    """Be one rank; note what was taken of each step before its part is said to be done."""
    become(f"{folder}/log", None)
    with open_train_stream(
        url, experiment="run", strategy=None, groups_per_step=1, rank=rank, world_size=ranks
    ) as stream:
        for step in stream:
            slots = [slot for m in step.microbatches for slot in m["sample_index"].tolist()]
            rows = [step.manifest.experiences[slot] for slot in slots]
            with Path(folder, "taken").open("a") as file:
                file.write(json.dumps([step.step, rows]) + "\n")
            if step.step == dies_in:
                os.kill(os.getpid(), signal.SIGKILL)
            stream.commit(step)
