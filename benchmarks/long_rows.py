"""Long rows: written in how many MiB a second beside the bare database, and in how much memory.

python -m benchmarks.long_rows                  # trajectories of 128k tokens, and pixels; SQLite
python -m benchmarks.long_rows --rows 32 --calls 3 --repetitions 3
python -m benchmarks.long_rows --only train     # the trainer's memory

A writer's memory is what the process holds at most beyond what it held before, in payloads of the
calls that are under way. It includes the payload itself, and up to 64 MiB that SQLite keeps of its
pages. A trainer's is that in payloads of one step, of eight calls: the step that is trained, from
which it reads what a loss does, or all there is, and the next one, which is prepared meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.bare import merged
from benchmarks.measuring import memory_kb, peak_kb, run_measured
from benchmarks.sites import SQLiteSite
from trinity_buffer.experience import EID, Experience
from trinity_buffer.options import Layout
from trinity_buffer.pipeline.annotate.consumer import run_strategy
from trinity_buffer.pipeline.store import open_store
from trinity_buffer.pipeline.sync_stream import open_train_stream
from trinity_buffer.pipeline.train.microbatch import MicroBatch

MIB = 1 << 20
TOKENS, PROMPT = 128 * 1024, 1024
CALLS_PER_STEP = 8
READ_BY_LOSS: dict[Layout, tuple[str, ...]] = {
    "padded": ("input_ids", "attention_mask", "action_mask", "old_logprob", "advantages"),
    "packed": ("input_ids", "position_ids", "action_mask", "old_logprob", "advantages"),
}
"""What a policy and its loss look at."""


def trajectory(eid: EID) -> Experience:
    """Return one of 128k tokens."""
    tokens = torch.randint(0, 151_000, (TOKENS,), dtype=torch.int32)
    return Experience(
        eid=eid,
        tokens=tokens,
        prompt_length=PROMPT,
        logprobs=-torch.rand(TOKENS - PROMPT),
        reward=float(eid.run),
    )


def picture(eid: EID) -> Experience:
    """Return one with 4.6 MiB of pixels."""
    pixels = {"pixel_values": torch.rand(1024, 1176)}
    tokens = torch.randint(0, 151_000, (2048,), dtype=torch.int32)
    return Experience(
        eid=eid, tokens=tokens, prompt_length=256, multi_modal_inputs=pixels, reward=float(eid.run)
    )


KINDS: dict[str, Callable[[EID], Experience]] = {"128k tokens": trajectory, "pixels": picture}


def payload(some: Sequence[Experience]) -> int:
    """Return the bytes of the tensors."""
    return sum(
        int(field.nbytes)
        for one in some
        for field in (one.tokens, one.logprobs, one.action_mask, *_pictures(one))
        if field is not None
    )


def _pictures(one: Experience) -> Sequence[torch.Tensor]:
    return list((one.multi_modal_inputs or {}).values())


async def _write(url: str, given: Sequence[Sequence[Experience]], calls: int) -> list[float]:
    """Write with a caller for each of ``given``; return the seconds, and the KiB held beyond."""
    async with open_store(url) as store:
        writer = (await store.experiment("bench", config={})).writer(actor="explorer-0")
        todo = iter(range(calls))

        async def caller(some: Sequence[Experience]) -> None:
            for number in todo:
                states = (dict(vars(e), eid=EID("b", number, n)) for n, e in enumerate(some))
                await writer.write(list(map(Experience.from_state, states)))

        gc.collect()
        before, began = memory_kb(), time.perf_counter()
        await asyncio.gather(*map(caller, given))
        return [time.perf_counter() - began, peak_kb("self") - before]


def _child(url: str, kind: str, callers: int, rows: int, calls: int) -> None:
    """Write in this process, which has done nothing else; say what it took, a JSON list."""
    torch.set_num_threads(1)
    given = [[KINDS[kind](EID("b", n, r)) for r in range(rows)] for n in range(callers)]
    print(json.dumps([payload(given[0]), *asyncio.run(_write(url, given, calls))]))


def measured(
    site: SQLiteSite, kind: str, callers: int, asked: argparse.Namespace
) -> dict[str, Any]:
    """Return one line: ours and the limit in turns."""
    size, rates, limits, peaks = 0, [], [], []
    for _ in range(asked.repetitions):
        url = site.new_url()
        said = [url, kind, *map(str, (callers, asked.rows, asked.calls))]
        child = [sys.executable, "-m", "benchmarks.long_rows", "--role", *said]
        size, seconds, beyond = json.loads(run_measured(child)[0])
        events = site.written(url, "ExperiencesRecorded", "experience")
        together = max(1, callers * len(events) // asked.calls)
        limits.append(asked.calls * size / site.time_writes(url, merged(events, together)) / MIB)
        rates.append(asked.calls * size / seconds / MIB)
        peaks.append(1 + beyond * 1024 / (callers * size))
        site.drop(url)
    ratios = [own / bare for own, bare in zip(rates, limits, strict=True)]
    return {
        "case": f"{asked.rows} rows of {kind} a call, callers: {callers}",
        "payload_mib": round(size / MIB, 1),
        "mib_per_s": round(statistics.median(rates), 1),
        "bare_mib_per_s": round(statistics.median(limits), 1),
        "ratio": round(statistics.median(ratios), 3),
        "peak_payloads": round(max(peaks), 2),
    }


async def _annotated(url: str, rows: int) -> None:
    async with open_store(url) as store:
        experiment = await store.experiment("bench")
        await run_strategy(experiment, "grpo", rollouts_per_group=rows)


def _train(url: str, layout: Layout, names: str) -> None:
    """Read all steps in this process, which has done nothing else; say in how many KiB."""
    torch.set_num_threads(1)
    given: dict[str, Any] = {
        "strategy": "grpo",
        "consumer": f"{layout}-{names}",
        "groups_per_step": CALLS_PER_STEP,
        "layout": layout,
        "tokens_per_microbatch": TOKENS,
    }
    gc.collect()
    before = memory_kb()
    with open_train_stream(url, experiment="bench", **given) as steps:
        for step in steps:
            for microbatch in step.microbatches:
                _look(microbatch, list(microbatch) if names == "all" else READ_BY_LOSS[layout])
            steps.commit(step)
    print(json.dumps(peak_kb("self") - before))


def _look(microbatch: MicroBatch, names: Sequence[str]) -> None:
    for name in names:
        if name in microbatch and isinstance(microbatch[name], torch.Tensor):
            microbatch[name].count_nonzero()


def trained(site: SQLiteSite, kind: str, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a line for each layout, and for what is looked at."""
    url, here = site.new_url(), [sys.executable, "-m", "benchmarks.long_rows", "--role"]
    calls = CALLS_PER_STEP * asked.steps
    size, *_ = json.loads(run_measured([*here, url, kind, "1", str(asked.rows), str(calls)])[0])
    asyncio.run(_annotated(url, asked.rows))
    payload_of_step = CALLS_PER_STEP * size
    for layout, names in product(READ_BY_LOSS, ("loss", "all")):
        said = json.loads(run_measured([*here, url, layout, names])[0])
        yield {
            "case": f"steps of {CALLS_PER_STEP * asked.rows} rows of {kind}, {layout}, {names}",
            "payload_mib": round(payload_of_step / MIB, 1),
            "peak_payloads": round(said * 1024 / payload_of_step, 2),
        }
    site.drop(url)


def _role(url: str, what: str, *others: str) -> None:
    if what in KINDS:
        _child(url, what, *map(int, others))
    else:
        _train(url, cast("Layout", what), *others)


def main() -> None:
    """Print a line for each kind of row and number of callers, and for each kind of trainer."""
    if sys.argv[1:2] == ["--role"]:
        _role(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=8, help="of a call")
    parser.add_argument("--calls", type=int, default=12)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="of a trainer")
    parser.add_argument("--only", choices=("write", "train"))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        site = SQLiteSite(Path(folder))
        for kind in KINDS:
            for callers in (1, 4) if asked.only != "train" else ():
                print(json.dumps(measured(site, kind, callers, asked)), flush=True)
            for line in trained(site, kind, asked) if asked.only != "write" else ():
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
