"""Fill a store as the demo fills its own, and measure how long `verify` takes: a line a look.

python -m benchmarks.verify                       # a million experiences; again: goes on, or looks
python -m benchmarks.verify --experiences 100000 --store /tmp/verify.db
python -m benchmarks.verify --record              # kept, and in docs/proofs/reliability.md

Each look is a whole process, as a user starts it, so that its imports count. Beside it stands what
no look can be quicker than: the bytes of the file, read and put through BLAKE2b, in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import torch

from benchmarks.performance import LOOKS, RECORD, record
from benchmarks.provenance import provenance
from trinity_buffer.experience import EID, Experience
from trinity_buffer.explorer.explore import Acknowledgements
from trinity_buffer.pipeline.annotate.consumer import run_strategy
from trinity_buffer.pipeline.store import Experiment, open_store
from trinity_buffer.pipeline.write.writer import SQLWriter
from trinity_buffer.writer import WriteReceipt

EXPERIMENT = "verified"
TASKS, RUNS, TOKENS, PROMPT = 8, 8, 8, 4
"""Of the demo: 64 experiences a batch and a call."""
GROUPS_PER_STEP = 16
STORE = Path(tempfile.gettempdir()) / "trinity-buffer-verify.db"
BATCHES_AT_ONCE = 512
"""Batches that are explored before a strategy and a trainer take their turn."""


async def fill(url: str, wanted: int, folder: Path | None = None) -> None:
    """Explore, annotate and train until there are ``wanted`` experiences; some may be there.

    Args:
        url: of the store, or its file.
        wanted: how many.
        folder: of the acknowledgements; None: none are kept.
    """
    acknowledged = None
    if folder is not None:
        await anyio.Path(folder).mkdir(parents=True, exist_ok=True)
        acknowledged = Acknowledgements(folder / "e0.ack")
    async with open_store(url) as store:
        config = {"rollouts_per_group": RUNS}
        experiment = await store.experiment(EXPERIMENT, config=config)
        writer = experiment.writer(actor="e0")
        first = await batches_done(writer)
        while first * TASKS * RUNS < wanted:
            last = min(first + BATCHES_AT_ONCE, -(-wanted // (TASKS * RUNS)))
            for batch in range(first, last):
                receipt = await _explore(writer, batch)
                if acknowledged is not None:
                    acknowledged.note(receipt)
            await run_strategy(experiment, "grpo")
            await _train(experiment)
            print(f"{last * TASKS * RUNS} experiences", file=sys.stderr, flush=True)
            first = last
    if acknowledged is not None:
        acknowledged.close()


async def batches_done(writer: SQLWriter) -> int:
    """Return how many batches an explorer has sealed."""
    planned, unsealed = await writer.unsealed()
    return planned - len(unsealed)


async def _explore(writer: SQLWriter, number: int) -> WriteReceipt:
    batch, made = rollouts(number)
    await writer.plan(batch, list(range(TASKS)), RUNS)
    receipt = await writer.write(made)
    await writer.seal(batch, len(made))
    return receipt


def rollouts(seed: int) -> tuple[str, list[Experience]]:
    """Return the name and the experiences of the batch with this number."""
    batch = f"e0-{seed}"
    generator = torch.Generator().manual_seed(seed)
    size = (TASKS * RUNS, TOKENS)
    tokens = torch.randint(0, 12, size, dtype=torch.int64, generator=generator)
    logprobs = -torch.rand(size, generator=generator)
    rewards = torch.randint(0, 2, size[:1], generator=generator).tolist()
    return batch, [
        Experience(
            eid=EID(batch, row // RUNS, row % RUNS),
            tokens=tokens[row],
            prompt_length=PROMPT,
            logprobs=logprobs[row, PROMPT:],
            reward=float(rewards[row]),
            info={"model_version": seed // BATCHES_AT_ONCE, "solved": bool(rewards[row])},
            prompt_text="sort 3 1 2",
            response_text="1 2 3",
        )
        for row in range(len(tokens))
    ]


async def _train(experiment: Experiment) -> None:
    options = {"strategy": "grpo", "groups_per_step": GROUPS_PER_STEP}
    async with experiment.train_stream(**options) as stream:
        async for step in stream:
            await stream.commit(step)


def look(path: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the seconds of one ``trinity-buffer verify``, of clock and of processor."""
    command = (sys.executable, "-m", "trinity_buffer", "verify", "--json", "--store", str(path))
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run((*command, *arguments), stdout=subprocess.PIPE, check=False)
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = json.loads(done.stdout)
    if not found["ok"]:
        raise SystemExit(f"verify found {found['problems'][:3]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "experiences": found["experiences"],
        "events": found["events"],
        "segments": found["segments"],
        "wall_s": round(seconds, 2),
        "cpu_s": round(cpu, 2),
        "experiences_per_s": round(found["experiences"] / seconds),
        "largest_mb": after.ru_maxrss // 1024,
    }


def bare(path: Path) -> dict[str, Any]:
    """Return the seconds in which the file is read and hashed."""
    began, cpu, digest = time.perf_counter(), time.process_time(), hashlib.blake2b()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {
        "bytes": path.stat().st_size,
        "wall_s": round(time.perf_counter() - began, 2),
        "cpu_s": round(time.process_time() - cpu, 2),
    }


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--experiences", type=int, default=1_000_000)
    parser.add_argument("--store", type=Path, default=STORE)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--record", action="store_true", help=f"append to {RECORD}, renew {LOOKS}")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    folder = asked.store.with_suffix(".acks")
    asyncio.run(fill(str(asked.store), asked.experiences, folder))
    acknowledged = ("--acknowledged", str(folder))
    looks = {"full": (), "full, acknowledged": acknowledged, "quick": ("--quick",)}
    lines: list[dict[str, Any]] = []
    for _ in range(asked.repetitions):
        lines.append({"case": "bare", **bare(asked.store)})
        lines += [{"case": name, **look(asked.store, given)} for name, given in looks.items()]
        for line in lines[-1 - len(looks) :]:
            print(json.dumps({"op": "verify", **line}), flush=True)
    if asked.record:
        command = (
            f"python -m benchmarks.verify --experiences {asked.experiences} "
            f"--repetitions {asked.repetitions} --record"
        )
        for case in ("full", "full, acknowledged", "quick", "bare"):
            some = [line for line in lines if line["case"] == case]
            middle = sorted(some, key=lambda line: line["wall_s"])[len(some) // 2]
            row = {"op": "verify", "backend": "sqlite", **middle, "repetitions": len(some)}
            record({**row, **provenance(command)})


if __name__ == "__main__":
    main()
