"""How many experiences a second: written, annotated, delivered as collated batches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import get_args

from benchmarks.bare import Transaction, merged
from benchmarks.measuring import Figure, figure_of_rates, interleaved
from benchmarks.sites import Site
from benchmarks.workload import BATCH, ROWS_PER_STEP, RUNS, calls, experiences
from trinity_buffer.experience import Experience
from trinity_buffer.options import Layout
from trinity_buffer.pipeline.annotate.consumer import run_strategy
from trinity_buffer.pipeline.store import open_store
from trinity_buffer.pipeline.sync_stream import open_train_stream

EXPERIMENT = "bench"
GRPO = {"epsilon": 1e-6}
WRITES = ((64, 1), (64, 4), (8, 1), (1, 1), (1, 64))
"""(experiences per call, concurrent callers)."""

READ_FAMILIES = ("light", "tokens")
STORED_PER_CALL = 64


async def _filled(url: str, given: Sequence[Sequence[Experience]], callers: int) -> float:
    """Write to a new store and return the seconds; opening and planning are outside."""
    async with open_store(url) as store:
        experiment = await store.experiment(EXPERIMENT, config={"rollouts_per_group": RUNS})
        writer = experiment.writer(actor="explorer-0")
        tasks = list(dict.fromkeys(e.eid.task for some in given for e in some))
        await writer.plan(BATCH, tasks, RUNS)
        todo = iter(given)

        async def caller() -> None:
            for some in todo:
                await writer.write(some)

        began = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(callers)))
        return time.perf_counter() - began


def write_once(site: Site, given: Sequence[Sequence[Experience]], callers: int) -> float:
    """Return the seconds in which so many callers write ``given`` to a new store."""
    url = site.new_url()
    try:
        return asyncio.run(_filled(url, given, callers))
    finally:
        site.drop(url)


def write(site: Site, tasks: int, repetitions: int) -> Iterator[Figure]:
    """Measure durable writes; encode, digest and transaction are inside the clock.

    The limit writes the rows that the store had written for as many callers, in as many
    transactions as if all of these had always shared one.
    """
    every = experiences(tasks)
    for per_call, callers in WRITES:
        with written_calls(site, every, per_call, callers) as (url, given, transactions):
            seconds = interleaved(
                partial(write_once, site, given, callers),
                partial(site.time_writes, url, transactions),
                repetitions,
            )
        who = "one caller" if callers == 1 else f"{callers} callers"
        case = f"{per_call} per call, {who}"
        yield figure_of_rates("write", case, site.backend, sum(map(len, given)), seconds)


@contextmanager
def written_calls(
    site: Site, every: Sequence[Experience], per_call: int, callers: int
) -> Iterator[tuple[str, list[Sequence[Experience]], list[Transaction]]]:
    """Have a store with as many of ``every`` as one case writes, its calls and transactions."""
    some = every if per_call * callers >= 64 else every[: len(every) * per_call // 16]
    given = calls(some, per_call)
    with written_store(site, given, callers=callers) as url:
        events = site.written(url, "ExperiencesRecorded", "experience")
        yield url, given, merged(events, max(1, callers * len(events) // len(given)))


@contextmanager
def written_store(
    site: Site, given: Sequence[Sequence[Experience]], *, grpo: bool = False, callers: int = 1
) -> Iterator[str]:
    """Have a store with what ``given`` says; ``grpo``: annotated by it."""
    url = site.new_url()
    try:
        asyncio.run(_filled(url, given, callers))
        if grpo:
            asyncio.run(_annotate(url, "grpo"))
        yield url
    finally:
        site.drop(url)


async def _annotate(url: str, name: str) -> float:
    async with open_store(url) as store:
        experiment = await store.experiment(EXPERIMENT)
        began = time.perf_counter()
        report = await run_strategy(experiment, "grpo", GRPO, name=name)
        seconds = time.perf_counter() - began
    assert report.waiting == 0
    return seconds


def annotate(site: Site, tasks: int, repetitions: int) -> Iterator[Figure]:
    """Measure GRPO over all groups; the limit reads the light columns and writes the same rows."""
    given = calls(experiences(tasks), STORED_PER_CALL)
    with written_store(site, given, grpo=True) as url:
        recorded = site.written(url, "ExperiencesRecorded", "experience")
        annotated = site.written(url, "ExperiencesAnnotated", "annotation")
        keys = [_keys(some) for some in _together(recorded, 2048 // STORED_PER_CALL)]
        names = (f"grpo-{number}" for number in range(repetitions + 1))
        seconds = interleaved(
            lambda: asyncio.run(_annotate(url, next(names))),
            lambda: site.time_reads(url, keys, ("light",)) + site.time_writes(url, annotated),
            repetitions,
        )
    yield figure_of_rates("annotate", "grpo, groups of 8", site.backend, tasks * RUNS, seconds)


def _together(transactions: Sequence[Transaction], number: int) -> list[Sequence[Transaction]]:
    return [transactions[at : at + number] for at in range(0, len(transactions), number)]


def _keys(transactions: Sequence[Transaction]) -> list[bytes]:
    return list(dict.fromkeys(bytes(row[0]) for one in transactions for row in one["segment"]))


def stream_once(url: str, consumer: str, layout: Layout, expected: int) -> float:
    """Return the seconds in which a new trainer gets all of its steps; opening is outside."""
    with open_train_stream(
        url,
        experiment=EXPERIMENT,
        strategy="grpo",
        consumer=consumer,
        groups_per_step=ROWS_PER_STEP // RUNS,
        layout=layout,
    ) as stream:
        began = time.perf_counter()
        rows = sum(len(batch["group_index"]) for step in stream for batch in step.microbatches)
        seconds = time.perf_counter() - began
    assert rows == expected
    return seconds


def stream(site: Site, tasks: int, repetitions: int) -> Iterator[Figure]:
    """Measure collated batches of 256, each leased; the limit reads the same segments' bytes."""
    given = calls(experiences(tasks), STORED_PER_CALL)
    with written_store(site, given, grpo=True) as url:
        keys = keys_of_steps(site, url)
        for layout in get_args(Layout):
            names = (f"{layout}-{number}" for number in range(repetitions + 1))
            seconds = interleaved(
                lambda: stream_once(url, next(names), layout, tasks * RUNS),  # noqa: B023
                partial(site.time_reads, url, keys, READ_FAMILIES),
                repetitions,
            )
            case = f"batches of {ROWS_PER_STEP}, {layout}"
            yield figure_of_rates("stream", case, site.backend, tasks * RUNS, seconds)


def keys_of_steps(site: Site, url: str) -> list[list[bytes]]:
    """Return the keys of the segments that each step reads."""
    recorded = site.written(url, "ExperiencesRecorded", "experience")
    return [_keys(some) for some in _together(recorded, ROWS_PER_STEP // STORED_PER_CALL)]
