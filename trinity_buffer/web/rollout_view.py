"""The page about one rollout: what it says, why it was trained or not, and its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trinity_buffer.errors import UnknownNameError
from trinity_buffer.inspect import show, tokens, why
from trinity_buffer.inspect.source import Source
from trinity_buffer.inspect.texts import token_texts
from trinity_buffer.inspect.token_table import TokenTable
from trinity_buffer.web.asked import Asked, Page

TOKENS = 500
TEXT = 20_000
"""So many characters of one text are shown."""
PLAIN_OVERLAYS = ("text", "mask")
"""Those that every rollout has; each column of its table is one more."""
SHADES = 5


async def rollout_page(asked: Asked) -> Page:
    """Return one rollout: what it holds, why it was trained or not, and its tokens."""
    source, uid = asked.source, asked.text("uid") or ""
    found, start = await show(source, uid), asked.whole("from") or 0
    try:
        table = await tokens(source, found.uid, annotation_set=asked.text("set"))
    except UnknownNameError:
        table = None
    overlays = (*PLAIN_OVERLAYS, *(() if table is None else table.columns))
    wanted = asked.text("overlay") or ""
    overlay = wanted if wanted in overlays else "text"
    return "rollout.html", {
        "found": found,
        "why": await why(source, found.uid),
        "texts": {name: value for name, value in found.objects.items() if value},
        "limit": TEXT,
        "table": table,
        "rows": [] if table is None else await _page_of(source, table, overlay, start),
        "from": start,
        "next": start + TOKENS if table is not None and start + TOKENS < len(table.ids) else None,
        "page": TOKENS,
        "overlay": overlay,
        "overlays": overlays,
        "set": asked.text("set"),
    }


async def _page_of(
    source: Source, table: TokenTable, overlay: str, start: int
) -> list[dict[str, Any]]:
    shown = table.ids[start : start + TOKENS]
    return token_rows(table, overlay, start, await token_texts(source, shown))


def token_rows(
    table: TokenTable, overlay: str, start: int, texts: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """Return a page of tokens; ``shade`` is how strongly the overlay marks each, -5 to 5.

    Args:
        table: of the rollout.
        overlay: ``mask`` or a column of the table; anything else marks nothing.
        start: the first token.
        texts: of the tokens from there on, None where nobody knows them.
    """
    end = min(start + TOKENS, len(table.ids))
    shades = _shades(table, overlay)
    return [
        {
            "at": at,
            "id": int(table.ids[at]),
            "text": None if texts is None else texts[at - start],
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
    values = table.columns.get(overlay, np.zeros(len(table.ids)))
    if overlay == "ratio":
        values = values - 1.0  # which changes nothing
    elif overlay == "policy_version":
        values = values - np.nanmin(values) + 1.0  # the oldest the palest
    values = np.nan_to_num(values)
    most = np.abs(values).max(initial=0.0)
    return np.rint(values / most * SHADES) if most > 0 else np.zeros(len(values))
