"""The table of edits in ``docs/proofs/reliability.md``: which look names which edit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from tests.handles import Transaction, VerifyReport
from tests.pipeline.edits import EDITS
from tests.pipeline.planting import chain_anew
from tests.raw_store import guards
from tests.sample_run import SampleRun
from tests.whole_stores import open_for_migration, rebuild
from trinity_buffer import open_store, verify
from trinity_buffer.errors import TrinityBufferError

PAGE = Path(__file__).parents[2] / "docs" / "proofs" / "reliability.md"
LOOKS = ("`verify`", "`--acknowledged`", "`--checkpoint`", "`--head`")
ROW = re.compile(r"^\| ([^|]+?) \| (yes|–) \| (yes|–) \| (yes|–) \| (yes|–) \|$", re.MULTILINE)
FAST = set(list(EDITS)[3::12])


def told() -> dict[str, dict[str, bool]]:
    """Return edit -> look -> whether the page says that it names it."""
    found = ROW.findall(PAGE.read_text())
    return {name: {k: v == "yes" for k, v in zip(LOOKS, row, strict=True)} for name, *row in found}


def test_the_page_lists_the_edits_that_are_tried() -> None:
    assert list(told()) == list(EDITS)
    assert len(EDITS) >= 60


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.long) for n in EDITS]
)
async def test_an_edit_is_named_by_the_looks_that_the_page_says(
    sqlite_sample: SampleRun, name: str
) -> None:
    assert await looked_at(sqlite_sample, name) == told()[name]


async def looked_at(sample: SampleRun, name: str) -> dict[str, bool]:
    """Return look -> whether it names the edit."""
    head = (await report_of(sample, {})).head
    await edited(sample.url, name)
    evidence: dict[str, dict[str, Any]] = {
        "`--acknowledged`": {"acknowledged": sample.acknowledged},
        "`--checkpoint`": {"checkpoint": sample.checkpoint},
        "`--head`": {"head": head},
    }
    found = {"`verify`": bool(await findings(sample, {}, quick=False))}
    without = await findings(sample, {}, quick=True)
    for look, given in evidence.items():
        found[look] = bool(await findings(sample, given, quick=True) - without)
    return found


async def findings(sample: SampleRun, evidence: dict[str, Any], *, quick: bool) -> set[str]:
    try:
        found = await report_of(sample, evidence, quick=quick)
    except TrinityBufferError as error:
        return {str(error)}
    return {*found.lost_items, *found.duplicated_items, *map(str, found.problems)}


async def report_of(sample: SampleRun, evidence: dict[str, Any], **options: Any) -> VerifyReport:
    async with open_store(sample.url, read_only=True) as store:
        (name,) = await store.experiments()
        return await verify(await store.experiment(name), **evidence, **options)


async def edited(url: str, name: str) -> None:
    """Edit the store, and redo what an editor can: checksums, heads, projections, triggers."""
    structural = name.startswith(("trigger", "index"))

    def edit(tx: Transaction) -> None:
        for guard in () if structural else guards("sqlite"):
            tx.execute(text(f"DROP TRIGGER {guard.name}"))
        EDITS[name](tx)
        chain_anew(tx)
        for guard in () if structural else guards("sqlite"):
            tx.fetch_all(guard.statements("sqlite")[0], ())

    async with open_for_migration(url) as database:
        if structural:
            await database.write(lambda tx: EDITS[name](tx))
        else:
            await database.write(edit)
    if name.endswith(": a row is gone"):
        return
    try:
        async with open_store(url) as store:
            await rebuild(store.database, 1)
    except TrinityBufferError:
        pass  # it cannot be folded, which verify says too
