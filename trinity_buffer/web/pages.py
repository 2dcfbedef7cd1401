"""The pages of the inspector: of each, what may be asked, its template and what stands in it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from trinity_buffer import inspector
from trinity_buffer.errors import InvalidArgumentError, UnknownNameError
from trinity_buffer.inspector.compare import comparing
from trinity_buffer.inspector.doctor import examine
from trinity_buffer.inspector.experience import Unreadable
from trinity_buffer.inspector.overviews import overview_of
from trinity_buffer.inspector.source import Source, now
from trinity_buffer.inspector.step_lines import ROW_ORDERS, rewards_of_runs
from trinity_buffer.inspector.token_table import TokenTable, token_texts
from trinity_buffer.pipeline.store import Store
from trinity_buffer.store import writer_queries
from trinity_buffer.store.rows import first_address
from trinity_buffer.web.charts import histogram, lanes, step_bar
from trinity_buffer.web.report import charts_of

T = TypeVar("T")

GREATEST = (1 << 62) - 1
GREATEST_STEP = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Asked:
    """A request about one experiment.

    Attributes:
        source: the experiment, as it is or as it was.
        query: what stands behind the question mark.
        part: the last part of the path where it is a value, such as the number of a step.
    """

    store: Store
    source: Source
    query: Mapping[str, str]
    part: str = ""

    @property
    def name(self) -> str:
        """Of the experiment."""
        return self.source.name

    def text(self, key: str) -> str | None:
        """Return a value of the query; None where it is missing or empty."""
        return self.query.get(key) or None

    def whole(self, key: str, greatest: int = GREATEST_STEP) -> int | None:
        """Return a whole number of the query, None where it is missing.

        Raises:
            InvalidArgumentError: it is not a whole number, or too large.
        """
        text = self.text(key)
        return None if text is None else whole(key, text, greatest)

    def real(self, key: str) -> float | None:
        """Return a number of the query, None where it is missing.

        Raises:
            InvalidArgumentError: it is not a number.
        """
        text = self.text(key)
        try:
            return None if text is None else float(text)
        except ValueError:
            raise InvalidArgumentError(f"{key}={text!r}: it must be a number") from None


TRAIL = 50
"""So many pages back a page knows where each began."""


def turned(asked: Asked, key: str, following: int | None, keep: Sequence[str]) -> dict[str, Any]:
    """Return the queries of the ``previous`` and the ``following`` page, None where there is none.

    Args:
        asked: this page; its ``trail`` says where those before it began.
        key: says where a page begins; the first one has none.
        following: where the next page begins.
        keep: keys that stay.
    """
    here, trail = asked.text(key), [at for at in (asked.text("trail") or "").split(",") if at]
    stay = {name: value for name in keep if (value := asked.text(name)) is not None}

    def query(at: object, before: Sequence[str]) -> dict[str, Any]:
        trail = {"trail": ",".join(before[-TRAIL:])} if before else {}
        return stay | ({} if at is None else {key: at}) | trail

    behind = trail if here is None else [*trail, here]
    return {
        "previous": None if here is None else query(trail[-1] if trail else None, trail[:-1]),
        "following": None if following is None else query(following, behind),
    }


def whole(key: str, text: str, greatest: int = GREATEST_STEP) -> int:
    """Return a whole number, zero or more.

    Raises:
        InvalidArgumentError: it is not a whole number, or above ``greatest``.
    """
    # Few digits, or int() would take seconds for a long text.
    digits = text.isascii() and text.isdigit() and len(text) < 20
    if not digits or int(text) > greatest:
        raise InvalidArgumentError(f"{key}={text[:40]!r}: it must be a whole number")
    return int(text)


Page = tuple[str, dict[str, Any]]
"""The name of a template, and what stands in it."""
View = Callable[[Asked], Awaitable[Page]]

PAGE = 50
STEPS_OF_CHARTS = 200
NEIGHBOURS = 30
"""The bar above a step shows so many steps before it and after it."""


async def steps_page(asked: Asked) -> Page:
    """Return gradient steps: curves, a bar that leads to each, and a row for each."""
    after, lines = asked.whole("after"), await _of_trainer(asked, inspector.steps, STEPS_OF_CHARTS)
    shown = lines[:PAGE] if after is not None else lines[-PAGE:]
    return "steps.html", {
        "charts": charts_of(lines),
        "bar": step_bar([(line.step, line.reward) for line in lines]),
        "steps": shown,
        "older": max(0, shown[0].step - 1 - PAGE) if shown and shown[0].step > 1 else None,
        "newer": shown[-1].step if shown and after is not None else None,
        "trainer": asked.text("trainer"),
        "live": None if after is not None else await asked.source.head(),
    }


async def _of_trainer(asked: Asked, ask: Callable[..., Awaitable[list[T]]], limit: int) -> list[T]:
    """Return the rows that ``ask`` returns for the trainer; none if none was named or exists."""
    trainer, after = asked.text("trainer"), asked.whole("after")
    try:
        return await ask(asked.source, trainer=trainer, after=after, limit=limit)
    except UnknownNameError:
        # A run without a trainer has an empty page, and a wrong name is an error.
        if trainer is not None:
            raise
        return []


async def step_page(asked: Asked) -> Page:
    """Return the page of one gradient step; a bar of its histogram leads to the rows."""
    source, number = asked.source, whole("step", asked.part)
    contents = await inspector.blame(source, number, trainer=asked.text("trainer"))
    trainer = contents.line.trainer
    first, most = max(0, number - 1 - NEIGHBOURS), 2 * NEIGHBOURS + 1
    near = await inspector.steps(source, trainer=trainer, after=first, limit=most)
    low, high, start = asked.real("low"), asked.real("high"), asked.whole("from") or 0
    order = ROW_ORDERS.get(asked.text("sort") or "", ROW_ORDERS["slot"])
    rows = [
        row
        for row in sorted(contents.rows, key=order)
        if low is None or (row.run_reward is not None and row.run_reward >= low)
        if high is None or (row.run_reward is not None and row.run_reward <= high)
    ]
    return "step.html", {
        "found": contents,
        "bar": step_bar([(line.step, line.reward) for line in near], current=number),
        "before": number - 1 if near[0].step < number else None,
        "after": number + 1 if near[-1].step > number else None,
        "bars": histogram(rewards_of_runs(contents.rows)),
        "shares": any("loss_share" in row.measured for row in contents.rows),
        "rows": rows[start : start + PAGE],
        "matching": len(rows),
        "next": start + PAGE if start + PAGE < len(rows) else None,
        "kept": {key: value for key, value in asked.query.items() if key != "from"},
    }


async def staleness_page(asked: Asked) -> Page:
    """Return how old what was trained on was: a lane for each actor, and step by step."""
    after, ages = asked.whole("after"), await _of_trainer(asked, inspector.staleness, PAGE)
    # Steps of which no version is known have no line here, and others come before and after them.
    steps = [age.step for age in ages]
    steps = steps or [line.step for line in await _of_trainer(asked, inspector.steps, PAGE)]
    first = steps[0] if steps else 0
    return "staleness.html", {
        "rows": ages,
        "lanes": lanes(ages),
        "actors": inspector.growth_by_actor(ages),
        "older": max(0, first - 1 - PAGE) if first > 1 else None,
        "newer": steps[-1] if steps and after is not None else None,
        "first": first,
        "trainer": asked.text("trainer"),
    }


TOKENS = 500
TEXT = 20_000
"""So many characters of one text are shown."""
PLAIN_OVERLAYS = ("text", "mask")
"""Those that every rollout has; each column of its table is one more."""
SHADES = 5


async def rollout_page(asked: Asked) -> Page:
    """Return one rollout: what it holds, why it was trained or not, and its tokens."""
    source, uid = asked.source, asked.text("uid") or ""
    rollout, start = await inspector.show(source, uid), asked.whole("from") or 0
    try:
        table = await inspector.tokens(source, rollout.uid, annotation_set=asked.text("set"))
    # Tokens that were archived or deleted leave the rest of the page worth having.
    except UnknownNameError:
        table = None
    overlays = (*PLAIN_OVERLAYS, *(() if table is None else table.columns))
    wanted = asked.text("overlay") or ""
    overlay = wanted if wanted in overlays else "text"
    tokens: dict[str, Any] = {}
    if table is not None:
        tokens |= table.lists(start, start + TOKENS)
        tokens["text"] = await token_texts(source, tokens["id"])
        tokens["shade"] = shades_of(table, overlay)[start : start + TOKENS]
    return "rollout.html", {
        "found": rollout,
        "why": await inspector.why(source, rollout.uid),
        "texts": {name: value for name, value in rollout.objects.items() if value},
        "limit": TEXT,
        "table": table,
        "tokens": tokens,
        "from": start,
        "next": start + TOKENS if table is not None and start + TOKENS < len(table.ids) else None,
        "page": TOKENS,
        "overlay": overlay,
        "overlays": overlays,
        "set": asked.text("set"),
    }


def shades_of(table: TokenTable, overlay: str) -> list[int]:
    """Return how strongly the overlay marks each token, -5 to 5.

    Args:
        table: of the rollout.
        overlay: ``mask`` or a column of the table; anything else marks nothing.
    """
    if overlay == "mask":
        return [SHADES * mask for mask in table.mask.tolist()]
    values = table.columns.get(overlay, np.zeros(len(table.ids)))
    if overlay == "ratio":
        values = values - 1.0  # which changes nothing
    elif overlay == "policy_version":
        values = values - np.nanmin(values) + 1.0  # the oldest the palest
    values = np.nan_to_num(values)
    most = np.abs(values).max(initial=0.0) or 1.0
    return [*map(int, np.rint(values / most * SHADES))]


FIRST_S = 0.5
"""So long sets are compared before a first answer."""
LONGEST_S = 60
STEPS = 200
"""So many of the last steps of each run are compared."""


async def diff_page(asked: Asked) -> Page:
    """Return how two annotation sets differ, as far as some seconds reach, or two runs."""
    source = asked.source
    consumers = await source.read(writer_queries.consumers, source.key)
    others: list[str] = []
    if source.position is None:  # as it was, a run is compared with nothing
        others = [name for name in await asked.store.experiments() if name != asked.name]
    first, second, other = (asked.text(name) for name in ("first", "second", "run"))
    sets: inspector.SetDifference | None = None
    runs: inspector.RunDifference | None = None
    reached, head = 0, await source.head()
    if first and second:
        # A page is made while someone waits: what was compared by then is shown, with its position.
        until = time.monotonic() + min(LONGEST_S, asked.whole("seconds") or FIRST_S)
        sets, reached = inspector.SetDifference(first, second), head
        async for so_far, at in comparing(source, first, second):
            sets = so_far
            if time.monotonic() > until:
                reached = at
                break
    elif other and source.position is not None:
        raise InvalidArgumentError("two runs are compared as they are now: open the diff there")
    elif other:
        second_run = now(await asked.store.experiment(other))
        runs = await inspector.compare_runs(source, second_run, limit=STEPS)
    return "diff.html", {
        "names": [row.name for row in consumers.values() if row.kind == "strategy"],
        "others": others,
        "asked": (first, second, other),
        "sets": sets,
        "runs": runs,
        "reached": reached,
        "most_steps": STEPS,
        "head": head,
        "longer": min(LONGEST_S, 4 * (asked.whole("seconds") or FIRST_S)),
    }


GROUPS_OF_BATCH = 500
SEARCH_S = 5.0
"""A search is cut into answers of about so many seconds; the first one comes sooner."""


async def overview_page(asked: Asked) -> Page:
    """Return counts from the plan to the commit, and what is stuck now."""
    source, is_now = asked.source, asked.source.position is None
    counted = await overview_of(source)
    return "overview.html", {
        "counted": counted,
        "examined": await examine(asked.store, asked.name) if is_now else None,
        "leases": await inspector.leases(source),
        "rejected": await inspector.rejection_counts(source),
        "live": counted.head,
    }


async def groups_page(asked: Asked) -> Page:
    """Return groups, the newest first."""
    batch, before = asked.text("batch"), asked.whole("before", GREATEST)
    # A batch is shown whole, if it is not very large.
    chosen, limit = asked.text("set"), PAGE if batch is None else GROUPS_OF_BATCH
    page = await inspector.groups(
        asked.source, annotation_set=chosen, batch=batch, limit=limit, before=before
    )
    oldest = min(g.newest for g in page) if len(page) == limit else None
    turns = turned(asked, "before", oldest, ["batch", "set"])
    return "groups.html", {"groups": page, "batch": batch, **turns}


async def rejected_page(asked: Asked) -> Page:
    """Return the rejected rows; of one consumer, page by page."""
    source, by, reason = asked.source, asked.text("by"), asked.text("reason")
    before = asked.whole("before", GREATEST)
    page = await inspector.rejections(source, by=by, reason=reason, limit=PAGE, before=before)
    more = None
    if by and len(page) == PAGE:
        last = [row.address.split(":") for row in page if row.position == page[-1].position]
        more = min(first_address(int(position)) + int(slot) for position, slot in last)
    return "rejected.html", {
        "counts": await inspector.rejection_counts(source),
        "rejected": page,
        "by": by,
        "reason": reason,
        **turned(asked, "before", more, ["by", "reason"]),
    }


async def search_page(asked: Asked) -> Page:
    """Return rollouts whose texts hold what is looked for: as many as are found in some seconds."""
    source, text = asked.source, asked.text("text")
    matches: list[inspector.Match] = []
    unreadable: list[Unreadable] = []
    more, after = None, asked.whole("after", GREATEST)
    until = time.monotonic() + (FIRST_S if after is None else SEARCH_S)

    def is_long_enough(address: int) -> bool:
        nonlocal more
        more = address if time.monotonic() > until else None
        return more is not None

    if text is not None:
        async for match in inspector.search(
            source,
            text,
            exact=asked.text("exact") is not None,
            after=-1 if after is None else after,
            on_page=is_long_enough,
            unreadable=unreadable,
        ):
            if len(matches) >= PAGE and match.address != matches[-1].address:
                more = matches[-1].address
                break
            matches.append(match)
    return "search.html", {
        "text": text,
        "exact": asked.text("exact"),
        "found": matches,
        "unreadable": unreadable,
        "more": more,
        **turned(asked, "after", more, ["text", "exact"]),
    }


async def events_page(asked: Asked) -> Page:
    """Return events: the last ones, followed live, or those after a position."""
    experiment, up_to = await asked.store.experiment(asked.name), asked.source.position
    asked_after = asked.whole("after", GREATEST >> 20)
    after, lines = asked_after, []
    if after is None:
        after = await inspector.position_before(experiment, PAGE, up_to=up_to)
    async for line in inspector.event_lines(experiment, after=after, up_to=up_to):
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
