"""The pages of the inspector: for each, the name of its template and what stands in it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np

from trinity_buffer.errors import UnknownNameError
from trinity_buffer.inspect import (
    Match,
    StepLine,
    blame,
    event_lines,
    groups,
    leases,
    overview,
    position_before,
    rejection_counts,
    rejections,
    search,
    show,
    staleness,
    steps,
    tokens,
    why,
)
from trinity_buffer.inspect.doctor import examine
from trinity_buffer.inspect.source import Source
from trinity_buffer.inspect.tokens import TokenTable
from trinity_buffer.store.address import first_address
from trinity_buffer.web.asked import GREATEST, Asked, whole
from trinity_buffer.web.charts import histogram
from trinity_buffer.web.report import actors_of, charts_of

PAGE = 50
GROUPS_OF_BATCH = 500
STEPS_OF_CHARTS = 200
TOKENS = 500
TEXT = 20_000
"""So many characters of one text are shown."""
SEARCH_S = 5.0
"""A search is cut into answers of about so many seconds."""
OVERLAYS = ("text", "mask", "advantage", "logprob")
SHADES = 5

Page = tuple[str, dict[str, Any]]
View = Callable[[Asked], Awaitable[Page]]


async def overview_page(asked: Asked) -> Page:
    """Return counts from the plan to the commit, and what is stuck."""
    source = await asked.source()
    (counted,) = (await overview(asked.store, asked.name)).experiments
    examined = await examine(asked.store, asked.name)
    return "overview.html", {
        "counted": counted,
        "examined": examined,
        "leases": await leases(source),
        "rejected": await rejection_counts(source),
        "live": counted.head,
    }


async def steps_page(asked: Asked) -> Page:
    """Return gradient steps: curves, and a row for each."""
    source, after = await asked.source(), asked.whole("after")
    some = await _steps(source, asked, after, STEPS_OF_CHARTS)
    shown = some[:PAGE] if after is not None else some[-PAGE:]
    return "steps.html", {
        "charts": charts_of(some),
        "steps": shown,
        "older": max(0, shown[0].step - 1 - PAGE) if shown and shown[0].step > 1 else None,
        "newer": shown[-1].step if shown and after is not None else None,
        "trainer": asked.text("trainer"),
        "live": None if after is not None else await source.head(),
    }


async def _steps(source: Source, asked: Asked, after: int | None, limit: int) -> list[StepLine]:
    """Return steps, none where nobody trains and no trainer is named."""
    trainer = asked.text("trainer")
    try:
        return await steps(source, trainer=trainer, after=after, limit=limit)
    except UnknownNameError:
        if trainer is not None:
            raise
        return []


async def step_page(asked: Asked) -> Page:
    """Return what one gradient step was given; a bar of the histogram leads to its rows."""
    source = await asked.source()
    found = await blame(source, whole("step", asked.part), trainer=asked.text("trainer"))
    low, high = asked.real("low"), asked.real("high")
    rows = [
        row
        for row in found.rows
        if (low is None or (row.reward is not None and row.reward >= low))
        and (high is None or (row.reward is not None and row.reward <= high))
    ]
    if asked.text("sort") == "abs-advantage":
        rows.sort(key=lambda row: -abs(row.advantage or 0.0))
    start = asked.whole("from") or 0
    return "step.html", {
        "found": found,
        "bars": histogram([row.reward for row in found.rows if row.reward is not None]),
        "rows": rows[start : start + PAGE],
        "matching": len(rows),
        "next": start + PAGE if start + PAGE < len(rows) else None,
        "kept": {key: value for key, value in asked.query.items() if key != "from"},
    }


async def groups_page(asked: Asked) -> Page:
    """Return groups, the newest first."""
    batch, before = asked.text("batch"), asked.whole("before", GREATEST)
    found = await groups(
        await asked.source(),
        annotation_set=asked.text("set"),
        batch=batch,
        limit=PAGE if batch is None else GROUPS_OF_BATCH,
        before=before,
    )
    more = batch is None and len(found) == PAGE
    return "groups.html", {
        "groups": found,
        "batch": batch,
        "set": asked.text("set"),
        "before": min(group.newest for group in found) if more else None,
    }


async def rollout_page(asked: Asked) -> Page:
    """Return one rollout: what it holds, why it was trained or not, and its tokens."""
    source, uid = await asked.source(), asked.text("uid") or ""
    overlay = asked.text("overlay") or "text"
    found, start = await show(source, uid), asked.whole("from") or 0
    try:
        table = await tokens(source, found.uid, annotation_set=asked.text("set"))
    except UnknownNameError:
        table = None
    return "rollout.html", {
        "found": found,
        "why": await why(source, found.uid),
        "texts": {name: value for name, value in found.objects.items() if value},
        "limit": TEXT,
        "table": table,
        "rows": [] if table is None else token_rows(table, overlay, start),
        "from": start,
        "next": start + TOKENS if table is not None and start + TOKENS < len(table.ids) else None,
        "page": TOKENS,
        "overlay": overlay if overlay in OVERLAYS else "text",
        "overlays": OVERLAYS,
        "set": asked.text("set"),
    }


def token_rows(table: TokenTable, overlay: str, start: int) -> list[dict[str, Any]]:
    """Return a page of tokens; ``shade`` is how strongly the overlay marks each, -5 to 5."""
    end = min(start + TOKENS, len(table.ids))
    shades = _shades(table, overlay)
    return [
        {
            "at": at,
            "id": int(table.ids[at]),
            "mask": bool(table.mask[at]),
            "prompt": at < table.prompt_length,
            "shade": int(shades[at]),
            "values": [_known(values[at]) for values in table.columns.values()],
        }
        for at in range(start, end)
    ]


def _known(value: Any) -> float | None:
    return None if np.isnan(value) else float(value)


def _shades(table: TokenTable, overlay: str) -> Any:
    if overlay == "mask":
        return table.mask * SHADES
    values = np.nan_to_num(table.columns.get(overlay, np.zeros(len(table.ids))))
    most = np.abs(values).max(initial=0.0)
    return np.rint(values / most * SHADES) if most > 0 else np.zeros(len(values))


async def rejected_page(asked: Asked) -> Page:
    """Return what was left out; of one consumer, page by page."""
    source, by = await asked.source(), asked.text("by")
    before = asked.whole("before", GREATEST)
    found = await rejections(source, by=by, reason=asked.text("reason"), limit=PAGE, before=before)
    return "rejected.html", {
        "counts": await rejection_counts(source),
        "rejected": found,
        "by": by,
        "reason": asked.text("reason"),
        "before": _lowest(one.address for one in found) if by and len(found) == PAGE else None,
    }


def _lowest(written: Any) -> int:
    """Return the lowest of addresses that are written as ``position:slot``."""
    parts = (one.partition(":") for one in written)
    return min(first_address(int(position)) + int(slot) for position, _, slot in parts)


async def staleness_page(asked: Asked) -> Page:
    """Return how old what was trained on was: over steps, and by actor."""
    source, after, trainer = await asked.source(), asked.whole("after"), asked.text("trainer")
    try:
        some = await staleness(source, trainer=trainer, after=after, limit=PAGE)
    except UnknownNameError:
        if trainer is not None:
            raise
        some = []
    first = some[0].step if some else 0
    return "staleness.html", {
        "rows": some,
        "actors": actors_of(some),
        "older": max(0, first - 1 - PAGE) if first > 1 else None,
        "newer": some[-1].step if some and after is not None else None,
        "trainer": trainer,
    }


class _LongEnough(Exception):  # noqa: N818 - no error: what ends a part of a search
    def __init__(self, position: int) -> None:
        self.position = position


async def search_page(asked: Asked) -> Page:
    """Return rollouts whose texts hold what is looked for: as many as are found in some seconds."""
    source, text = await asked.source(), asked.text("text")
    found: list[Match] = []
    more = None
    if text is not None:
        more = await _search(source, text, asked, found)
    exact = asked.text("exact")
    return "search.html", {"text": text, "exact": exact, "found": found, "more": more}


async def _search(source: Source, text: str, asked: Asked, found: list[Match]) -> int | None:
    """Search into ``found``; return the address after which it goes on, None at the end."""
    until, after = time.monotonic() + SEARCH_S, asked.whole("after", GREATEST)

    def progress(_: str, position: int, head: int) -> None:
        if time.monotonic() > until and position < head:
            raise _LongEnough(position)

    some = search(
        source,
        text,
        exact=asked.text("exact") is not None,
        after=-1 if after is None else after,
        progress=progress,
    )
    try:
        async for match in some:
            if len(found) >= PAGE and match.address != found[-1].address:
                return found[-1].address
            found.append(match)
    except _LongEnough as enough:
        return first_address(enough.position) - 1
    return None


async def events_page(asked: Asked) -> Page:
    """Return events: the last ones, followed live, or those after a position."""
    experiment = await asked.store.experiment(asked.name)
    asked_after = asked.whole("after", GREATEST >> 20)
    after = await position_before(experiment, PAGE) if asked_after is None else asked_after
    lines = []
    async for line in event_lines(experiment, after=after):
        lines.append(line)
        if len(lines) == PAGE:
            break
    last = lines[-1].position if lines else after
    return "events.html", {
        "events": lines,
        "older": max(0, after - PAGE) if after > 0 else None,
        "newer": last if asked_after is not None else None,
        "follow": last if asked_after is None else None,
    }


PAGES: Mapping[str, View] = {
    "steps": steps_page,
    "steps/{part}": step_page,
    "groups": groups_page,
    "rollout": rollout_page,
    "rejected": rejected_page,
    "staleness": staleness_page,
    "search": search_page,
    "events": events_page,
    "": overview_page,
}
"""Path behind the name of an experiment -> its page; the empty one, which fits all, comes last."""
