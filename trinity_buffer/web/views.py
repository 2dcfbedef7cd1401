"""The pages of the inspector: for each, the name of its template and what stands in it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from trinity_buffer.inspect import (
    Match,
    event_lines,
    groups,
    leases,
    overview,
    position_before,
    rejection_counts,
    rejections,
    search,
)
from trinity_buffer.inspect.blobs import Unreadable
from trinity_buffer.inspect.doctor import examine
from trinity_buffer.inspect.overviews import overview_of
from trinity_buffer.inspect.source import Source
from trinity_buffer.store.rows import first_address
from trinity_buffer.web.asked import GREATEST, Asked, Page, View, turned
from trinity_buffer.web.diff_view import diff_page
from trinity_buffer.web.rollout_view import rollout_page
from trinity_buffer.web.step_views import staleness_page, step_page, steps_page

PAGE = 50
GROUPS_OF_BATCH = 500
FIRST_S = 0.5
SEARCH_S = 5.0
"""A search is cut into answers of about so many seconds; the first one comes sooner."""


async def overview_page(asked: Asked) -> Page:
    """Return counts from the plan to the commit, and what is stuck now."""
    source, examined = asked.source, None
    if source.position is None:
        (counted,) = (await overview(asked.store, asked.name)).experiments
        examined = await examine(asked.store, asked.name)
    else:
        counted = await overview_of(source)
    return "overview.html", {
        "counted": counted,
        "examined": examined,
        "leases": await leases(source),
        "rejected": await rejection_counts(source),
        "live": counted.head,
    }


async def groups_page(asked: Asked) -> Page:
    """Return groups, the newest first."""
    batch, before = asked.text("batch"), asked.whole("before", GREATEST)
    found = await groups(
        asked.source,
        annotation_set=asked.text("set"),
        batch=batch,
        limit=PAGE if batch is None else GROUPS_OF_BATCH,
        before=before,
    )
    more = batch is None and len(found) == PAGE
    return "groups.html", {
        "groups": found,
        "batch": batch,
        **turned(asked, "before", min(g.newest for g in found) if more else None, ["batch", "set"]),
    }


async def rejected_page(asked: Asked) -> Page:
    """Return what was left out; of one consumer, page by page."""
    source, by = asked.source, asked.text("by")
    before = asked.whole("before", GREATEST)
    found = await rejections(source, by=by, reason=asked.text("reason"), limit=PAGE, before=before)
    more = _lowest(one.address for one in found) if by and len(found) == PAGE else None
    return "rejected.html", {
        "counts": await rejection_counts(source),
        "rejected": found,
        "by": by,
        "reason": asked.text("reason"),
        **turned(asked, "before", more, ["by", "reason"]),
    }


def _lowest(written: Any) -> int:
    """Return the lowest of addresses that are written as ``position:slot``."""
    parts = (one.partition(":") for one in written)
    return min(first_address(int(position)) + int(slot) for position, _, slot in parts)


class _LongEnough(Exception):  # noqa: N818 - no error: what ends a part of a search
    def __init__(self, address: int) -> None:
        self.address = address


async def search_page(asked: Asked) -> Page:
    """Return rollouts whose texts hold what is looked for: as many as are found in some seconds."""
    source, text = asked.source, asked.text("text")
    found: list[Match] = []
    unreadable: list[Unreadable] = []
    more = None
    if text is not None:
        more = await _search(source, text, asked, found, unreadable)
    return "search.html", {
        "text": text,
        "exact": asked.text("exact"),
        "found": found,
        "unreadable": unreadable,
        "more": more,
        **turned(asked, "after", more, ["text", "exact"]),
    }


async def _search(
    source: Source, text: str, asked: Asked, found: list[Match], unreadable: list[Unreadable]
) -> int | None:
    """Search into the lists; return the address after which it goes on, None at the end."""
    after = asked.whole("after", GREATEST)
    until = time.monotonic() + (FIRST_S if after is None else SEARCH_S)

    def looked_at(address: int) -> None:
        if time.monotonic() > until:
            raise _LongEnough(address)

    some = search(
        source,
        text,
        exact=asked.text("exact") is not None,
        after=-1 if after is None else after,
        looked_at=looked_at,
        unreadable=unreadable,
    )
    try:
        async for match in some:
            if len(found) >= PAGE and match.address != found[-1].address:
                return found[-1].address
            found.append(match)
    except _LongEnough as enough:
        return enough.address
    return None


async def events_page(asked: Asked) -> Page:
    """Return events: the last ones, followed live, or those after a position."""
    experiment, up_to = await asked.store.experiment(asked.name), asked.source.position
    asked_after = asked.whole("after", GREATEST >> 20)
    after = (
        await position_before(experiment, PAGE, up_to=up_to) if asked_after is None else asked_after
    )
    lines = []
    async for line in event_lines(experiment, after=after, up_to=up_to):
        lines.append(line)
        if len(lines) == PAGE:
            break
    last = lines[-1].position if lines else after
    return "events.html", {
        "events": lines,
        "older": max(0, after - PAGE) if after > 0 else None,
        "newer": last if asked_after is not None else None,
        "follow": last if asked_after is None and up_to is None else None,
    }


PAGES: Mapping[str, View] = {
    "steps": steps_page,
    "steps/{part}": step_page,
    "groups": groups_page,
    "rollout": rollout_page,
    "rejected": rejected_page,
    "staleness": staleness_page,
    "search": search_page,
    "diff": diff_page,
    "events": events_page,
    "": overview_page,
}
"""Path behind the name of an experiment -> its page; the empty one, which fits all, comes last."""
