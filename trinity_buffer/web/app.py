"""The inspector as a web application: pages about a store that is only read, and its metrics."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from trinity_buffer.errors import (
    InvalidArgumentError,
    StoreError,
    TrinityBufferError,
    UnknownExperimentError,
    UnknownNameError,
)
from trinity_buffer.inspector.events import event_lines
from trinity_buffer.inspector.source import Source, as_of, as_of_position
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.pipeline.store import open_store
from trinity_buffer.web.guard import Guard
from trinity_buffer.web.metrics import CONTENT_TYPE, metrics
from trinity_buffer.web.pages import PAGES
from trinity_buffer.web.request import GREATEST, Asked, View, whole
from trinity_buffer.web.templating import named, rendered, segment

STATIC = Path(__file__).parent / "static"
STATUS: dict[type[TrinityBufferError], int] = {
    UnknownNameError: 404,
    UnknownExperimentError: 404,
    InvalidArgumentError: 400,
    StoreError: 503,
}
"""Of an answer for an error of ours."""


def inspector(url: str, *, token: str | None = None) -> Guard:
    """Return the application that shows the store at ``url``, as ASGI wants it.

    Args:
        url: of the store; it is opened, read-only, when the server begins.
        token: that a request must bring; None: only requests under a name of this machine are
            answered.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with open_store(url, read_only=True) as store:
            app.state.store = store
            async with aclosing(_Earlier()) as app.state.earlier:
                yield

    own = "/{experiment}"
    routes = [
        Route("/", _experiments),
        Route("/metrics", _metrics),
        Mount("/-/static", StaticFiles(directory=STATIC)),
        Route(f"{own}/events/stream", _stream),
        Route(f"{own}/at", _then),
        *(Route(f"{own}/@{{position:int}}/{path}", _page(view)) for path, view in PAGES.items()),
        *(Route(f"{own}/{path}", _page(view)) for path, view in PAGES.items()),
    ]
    handlers = {TrinityBufferError: _error_page}
    return Guard(Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers), token)


EARLIER = 4
"""So many earlier positions are kept open for the next page about them: to open one folds the log
up to there, and each has a connection of its own."""


@dataclass
class _Opened:
    """An experiment as it was; pages about it are made one after the other."""

    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    lock: anyio.Lock = field(default_factory=anyio.Lock)
    source: Source | None = None


class _Earlier:
    """Experiments as they were, those that were asked about last."""

    def __init__(self) -> None:
        self._opened: dict[tuple[str, int], _Opened] = {}
        self._free = anyio.Semaphore(EARLIER)

    async def aclose(self) -> None:
        """Close all of them."""
        await self._close(*self._opened)

    @asynccontextmanager
    async def at(self, experiment: Experiment, position: int) -> AsyncIterator[Source]:
        """Yield ``experiment`` as it was at ``position``."""
        key = (experiment.name, position)
        async with self._free:
            opened = self._opened[key] = self._opened.pop(key, _Opened())
            idle = [other for other, of in self._opened.items() if not of.lock.locked()]
            await self._close(*[other for other in idle if other != key][: 1 - EARLIER])
            async with opened.lock:
                if opened.source is None:
                    opened.source = await opened.stack.enter_async_context(
                        as_of(experiment, position)
                    )
                try:
                    with as_of_position(position):
                        yield opened.source
                except StoreError:  # its connection may be lost: the next page opens another
                    await opened.stack.aclose()
                    opened.source = None
                    raise

    async def _close(self, *keys: tuple[str, int]) -> None:
        for key in keys:
            await self._opened.pop(key).stack.aclose()


def _page(view: View) -> Any:
    async def answer(request: Request) -> Response:
        name, position = _asked_of(request)
        part, store = request.path_params.get("part", ""), request.app.state.store
        experiment = await store.experiment(name)
        earlier = request.app.state.earlier
        opened = as_of(experiment, None) if position is None else earlier.at(experiment, position)
        async with opened as source:
            template, shown = await view(Asked(store, source, request.query_params, part))
        at = _at(name, position)
        return _rendered(template, {"live": None, **shown, **at})

    return answer


def _asked_of(request: Request) -> tuple[str, int | None]:
    """Return the experiment that a page is about, and as of which position."""
    return named(request.path_params["experiment"]), request.path_params.get("position")


def _at(name: str, position: int | None) -> dict[str, Any]:
    """Return what the bar of a page about an experiment is made of."""
    root = _path(name)
    bar = {"name": name, "root": root, "here": root, "position": position}
    return bar if position is None else {**bar, "here": f"{root}/@{position}", "live": None}


def _rendered(template: str, shown: dict[str, Any], status: int = 200) -> Response:
    return HTMLResponse(rendered(template, shown), status)


def _path(name: str) -> str:
    return f"/{segment(name)}"


async def _then(request: Request) -> Response:
    """Lead to the experiment as it was at the position that is asked for."""
    position = whole("position", request.query_params.get("position") or "", GREATEST >> 20)
    name = named(request.path_params["experiment"])
    return RedirectResponse(f"{_path(name)}/@{position}/", 303)


async def _experiments(request: Request) -> Response:
    """Return the list of experiments; where there is one, its page."""
    store = request.app.state.store
    names = await store.experiments()
    if len(names) == 1:
        return RedirectResponse(f"{_path(names[0])}/", 303)
    listed = [(name, _path(name)) for name in names]
    shown = {"name": None, "here": "", "live": None, "url": store.url, "experiments": listed}
    return _rendered("experiments.html", shown)


async def _metrics(request: Request) -> Response:
    return Response(await metrics(request.app.state.store), media_type=CONTENT_TYPE)


async def _stream(request: Request) -> Response:
    """Return events as they are recorded, after a position or the last one that was received."""
    experiment = await request.app.state.store.experiment(named(request.path_params["experiment"]))
    position = request.headers.get("last-event-id") or request.query_params.get("after") or "0"
    lines = _event_stream(experiment, whole("after", position, GREATEST >> 20))
    return StreamingResponse(lines, media_type="text/event-stream")


BURST_S, REST_S = 0.1, 0.5
"""How long fresh events are told without a rest, and the rest: no watcher slows a trainer."""


async def _event_stream(experiment: Experiment, after: int) -> AsyncIterator[str]:
    yield ": hello\n\n"
    rested = time.monotonic()
    async with aclosing(event_lines(experiment, after=after, follow=True)) as lines:  # type: ignore[type-var]
        async for line in lines:
            fields = asdict(line)
            del fields["body"]
            yield f"id: {line.position}\ndata: {json.dumps(fields)}\n\n"
            if time.monotonic() - rested > BURST_S and time.time() - line.recorded_at < REST_S:
                await anyio.sleep(REST_S)
                rested = time.monotonic()
    yield "event: end\ndata: \n\n"


async def _error_page(request: Request, error: Exception) -> Response:
    status = next((code for kind, code in STATUS.items() if isinstance(error, kind)), 500)
    shown = {"name": None, "here": "", "live": None, "error": str(error)}
    if "experiment" in request.path_params and not isinstance(error, UnknownExperimentError):
        shown |= _at(*_asked_of(request))
    return _rendered("error.html", shown, status)
