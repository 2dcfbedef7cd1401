"""How long the answers take that look at a whole run, beside a plain scan of what they look at."""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import sqlalchemy as sa

from trinity_buffer import inspector as ask
from trinity_buffer.codec.objects import decode_fact
from trinity_buffer.codec.segments import decode_segment
from trinity_buffer.inspector.compare import compare_runs, compare_sets
from trinity_buffer.inspector.overviews import overview_of
from trinity_buffer.inspector.source import Source, as_of, now
from trinity_buffer.pipeline.store import Experiment, open_store
from trinity_buffer.pipeline.verify.projections import Progress
from trinity_buffer.store import writer_queries
from trinity_buffer.store.tables import annotation, event, experience, segment
from trinity_buffer.store.transaction import Transaction

NOBODY_SAID = "zzqq"
FIRST_S, SHARE = 1.0, 0.3
"""Limits: of the first sign of life in seconds, and of the speed as a share of a plain scan's."""
AT_ONCE = 65_536

Answer = Callable[[Source, Progress], Awaitable[object]]
Scan = Callable[[Transaction], object]


async def _search(source: Source, progress: Progress) -> None:
    async for _ in ask.search(source, NOBODY_SAID, progress=progress):
        pass


def _texts(tx: Transaction) -> int:
    """Look at each text that a search looks at; return how many hold what nobody said."""
    rows = tx.execute(sa.select(segment.c.data).where(segment.c.family == "text"))
    return sum(
        NOBODY_SAID in str(value).casefold()
        for (data,) in rows
        for values in decode_segment(data).objects.values()
        for value in values.values(range(len(values)))
    )


def _annotations(tx: Transaction) -> None:
    tx.fetch_all(str(sa.select(annotation)), ())
    for (data,) in tx.execute(sa.select(segment.c.data).where(segment.c.family == "annotation")):
        decode_segment(data)


def _steps(tx: Transaction) -> None:
    """Read what a trainer was handed and committed, and the rewards and ages of the rows, twice."""
    kinds = ("BatchLeased", "StepsCommitted")
    for _ in range(2):
        stored = tx.execute(sa.select(event.c.kind, event.c.body).where(event.c.kind.in_(kinds)))
        facts: list[Any] = [decode_fact(kind, body) for kind, body in stored]
        leased = [at for fact in facts for at in getattr(fact, "experiences", ())]
        for start in range(0, len(leased), AT_ONCE):
            wanted = experience.c.address.in_(leased[start : start + AT_ONCE])
            columns = (experience.c.address, experience.c.reward, experience.c.policy_version)
            tx.execute(sa.select(*columns).where(wanted)).all()


def streamed(url: str, _names: object, repetitions: int) -> Iterator[dict[str, Any]]:
    """Yield a line for each answer: its seconds to the first sign and to the end, and its share."""
    gc.freeze()  # as each command does, once it is loaded
    with asyncio.Runner() as runner:
        lines = _streamed(url, repetitions)
        while (line := runner.run(_next(lines))) is not None:
            yield line


async def halfway(source: Source, step: int) -> int:
    """Return the position at which a step was committed."""
    (line,) = await ask.steps(source, after=step - 1, limit=1)
    assert line.committed_at is not None  # all but the last steps are
    return line.committed_at


def _events(position: int) -> Scan:
    """Return what reads all that had happened, and what it says."""

    def scan(tx: Transaction) -> None:
        some = sa.select(event.c.kind, event.c.body).where(event.c.position <= position)
        for kind, body in tx.execute(some):
            decode_fact(kind, body)

    return scan


async def _next(lines: AsyncIterator[dict[str, Any]]) -> dict[str, Any] | None:
    return await anext(lines, None)


async def _streamed(url: str, repetitions: int) -> AsyncIterator[dict[str, Any]]:
    async with open_store(url, read_only=True) as store:
        (name,) = await store.experiments()
        experiment = await store.experiment(name)
        source = now(experiment)
        every = await ask.steps(source, limit=1)
        then = await halfway(source, max(1, every[-1].step // 2))
        consumers = await source.read(writer_queries.consumers, source.key)
        sets = [one for one, row in consumers.items() if row.kind == "strategy"]
        first, second = sets[0], sets[-1]
        cases: dict[str, tuple[Answer, Scan]] = {
            "search": (_search, _texts),
            f"diff {first} {second}": (
                lambda of, progress: compare_sets(of, first, second, progress=progress),
                _annotations,
            ),
            f"diff {name} {name}": (
                lambda of, progress: compare_runs(of, of, progress=progress),
                _steps,
            ),
            "stats --as-of": (_as_of(experiment, then, overview_of), _events(then)),
            "rejected --as-of": (_as_of(experiment, then, ask.rejection_counts), _events(then)),
        }
        for case, (answer, scan) in cases.items():
            yield {"case": f"streamed: {case}", **await _beside(source, answer, scan, repetitions)}


def _as_of(
    experiment: Experiment, position: int, question: Callable[[Source], Awaitable[object]]
) -> Answer:
    async def answer(_: Source, progress: Progress) -> None:
        async with as_of(experiment, position, progress) as then:
            await question(then)

    return answer


async def _beside(source: Source, answer: Answer, scan: Scan, repetitions: int) -> dict[str, Any]:
    """Ask and scan in turns; return medians."""
    firsts, wholes, shares = [], [], []
    for _ in range(repetitions):
        signs: list[float] = []
        began = time.perf_counter()
        await answer(source, lambda *_, s=signs: s.append(time.perf_counter()))
        ended = time.perf_counter()
        await source.read(scan)
        firsts.append(signs[0] - began)
        wholes.append(ended - began)
        shares.append((time.perf_counter() - ended) / wholes[-1])
    return {
        "first_s": round(statistics.median(firsts), 3),
        "first_limit_s": FIRST_S,
        "p50_s": round(statistics.median(wholes), 3),
        "share_of_plain_scan": round(statistics.median(shares), 2),
        "least_share": SHARE,
        "repetitions": repetitions,
    }
