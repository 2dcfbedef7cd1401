"""Two sets compared in columns differ as they do row by row, at every position of a log."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Resize
from tests.handles import Transaction
from tests.sample_run import record_sample_run
from trinity_buffer import open_store
from trinity_buffer.codec.segments import Column, Segment
from trinity_buffer.inspector.compare import compare_sets
from trinity_buffer.inspector.experience import mean_of, means_of, readable_events
from trinity_buffer.inspector.fates import Fate, fates
from trinity_buffer.inspector.source import Source, as_of, now
from trinity_buffer.store import writer_queries
from trinity_buffer.store.rows import position_of, slot_of


async def row_by_row(source: Source, first: str, second: str) -> dict[str, Any]:
    """Return uid -> state and advantage in both sets, each looked up for itself."""

    def look(tx: Transaction) -> list[tuple[str, Fate, Fate]]:
        rows = writer_queries.experiences(
            tx, source.key, writer_queries.Filter(), after=-1, limit=1000
        )
        decided = fates(tx, source.key, rows)
        found = []
        for row in rows:
            own = {fate.annotation_set: fate for fate in decided[row.address]}
            found.append((row.eid.uid, own[first], own[second]))
        return found

    async def told(fate: Fate) -> tuple[str, float | None]:
        state = fate.state if fate.reason is None else f"{fate.state}: {fate.reason}"
        if fate.first is None:
            return state, None
        events, _ = await readable_events(source, [position_of(fate.first)], ["annotation"])
        segment = events[position_of(fate.first)].segment
        return state, mean_of(segment, "advantages", slot_of(fate.first))

    return {uid: (await told(a), await told(b)) for uid, a, b in await source.read(look)}


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 512])
async def test_sets_differ_as_they_do_row_by_row(
    store_url: str, tmp_path: Path, resize: Resize, size: int
) -> None:
    resize(rows_per_page=size, segments_per_load=size)
    sample = await record_sample_run(store_url, tmp_path / "run")
    async with open_store(sample.url, read_only=True) as store:
        experiment = await store.experiment(sample.name)
        head, compared = await now(experiment).head(), 0
        for position in (*range(1, head + 1), None):
            async with as_of(experiment, position) as source:
                sets = {
                    name
                    for name, row in (
                        await source.read(writer_queries.consumers, source.key)
                    ).items()
                    if row.kind == "strategy"
                }
                if not sets >= {"grpo", "varied"}:
                    continue
                rows = await row_by_row(source, "grpo", "varied")
                found = await compare_sets(source, "grpo", "varied", limit=1000)
            compared += 1
            assert found.experiences == len(rows)
            assert found.states == Counter(f"{a[0]} / {b[0]}" for a, b in rows.values())
            pairs = [(a[1], b[1]) for a, b in rows.values()]
            both = [(a, b) for a, b in pairs if a is not None and b is not None]
            assert (found.both, found.equal) == (len(both), sum(a == b for a, b in both))
            assert found.opposite == sum(a * b < 0 for a, b in both)
            assert found.greatest == max((abs(a - b) for a, b in both), default=0.0)
            assert found.total == pytest.approx(sum(abs(a - b) for a, b in both))
            assert {
                row.uid: ((row.first, row.first_advantage), (row.second, row.second_advantage))
                for row in found.rows
            } == {uid: one for uid, one in rows.items() if one[0][1] != one[1][1]}
        assert compared > 3


def test_means_of_a_column_are_those_of_its_rows() -> None:
    chance = random.Random(0)
    for dtype, kind in (("float32", "<f4"), ("float64", "<f8"), ("int64", "<i8")):
        for rows in (None, [1, 2, 5, 8]):
            sizes = [chance.choice([0, 1, 3, 700]) for _ in rows or range(9)]
            values = np.array([chance.gauss(0, 1e3) for _ in range(sum(sizes))], kind)
            column = Column(
                "advantages",
                dtype,
                np.array(sizes, np.int64)[:, None],
                values.view(np.uint8),
                None if rows is None else np.array(rows, np.int64),
            )
            segment = Segment(9, {"advantages": [column]})
            means, known = means_of(segment, "advantages")
            found = [float(m) if k else None for m, k in zip(means, known, strict=True)]
            plain = [mean_of(segment, "advantages", row) for row in range(9)]
            assert [one is None for one in found] == [one is None for one in plain]
            assert [one or 0.0 for one in found] == pytest.approx([one or 0.0 for one in plain])
    assert not means_of(Segment(9), "advantages")[1].any()
