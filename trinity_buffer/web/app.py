"""The inspector as a web application: pages about a store that is only read, and its metrics.

`Guard` decides who may ask, and what every answer says to a browser. The metrics are in the text
format of Prometheus (version 0.0.4).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from trinity_buffer import errors
from trinity_buffer.inspector.doctor import Examination, examine
from trinity_buffer.inspector.events import event_lines
from trinity_buffer.inspector.overviews import STEPS_OF_STALENESS, Overview, overview
from trinity_buffer.inspector.source import Source, as_of, as_of_position
from trinity_buffer.pipeline.store import Experiment, Store, open_store
from trinity_buffer.recorder.guard import LOCAL, status_of
from trinity_buffer.web.pages import GREATEST, PAGES, Asked, View, whole
from trinity_buffer.web.templating import named, rendered, segment

COOKIE = "trinity_buffer"
HEADERS = {
    b"content-security-policy": b"default-src 'self'; base-uri 'none'; form-action 'self'; "
    b"frame-ancestors 'none'",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"same-origin",
    b"cache-control": b"no-store",
}


class Guard:
    """The application ``app`` behind a token; without one, for names of this machine alone.

    A name from elsewhere that leads to this machine would let a foreign page read the store.
    """

    def __init__(self, app: Any, token: str | None) -> None:
        self._app = app
        self._token = None if token is None else _bytes(token)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        # On every answer, those of Starlette's own errors and static files included.
        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *HEADERS.items()]}
            await send(message)

        # As it was asked for: whatever a name of an experiment holds, it is one part of the path.
        scope = {**scope, "path": scope["raw_path"].decode("latin-1")}
        answer = self._answer(Request(scope)) or self._app
        await answer(scope, receive, with_headers)

    def _answer(self, request: Any) -> Response | None:
        # PostgreSQL refuses NUL in a text, which would be an error page of the server.
        if "%00" in request.url.path or "%00" in request.url.query:
            return PlainTextResponse("no name holds a NUL", 400)
        if self._token is None:
            local = request.url.hostname in LOCAL
            return None if local else PlainTextResponse("ask for 127.0.0.1, or give --token", 421)
        asked = request.query_params.get("token")
        # In constant time, so that the token cannot be guessed character by character.
        if asked is not None and hmac.compare_digest(_bytes(asked), self._token):
            # The same address without the token, which a cookie stands for from now on.
            entry = RedirectResponse(request.url.remove_query_params("token"), 303)
            entry.set_cookie(COOKIE, _cookie_of(self._token), httponly=True, samesite="lax")
            return entry
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ").encode("latin-1")
        cookie = _bytes(request.cookies.get(COOKIE, ""))
        known = hmac.compare_digest(cookie, _cookie_of(self._token).encode())
        if asked is None and (hmac.compare_digest(bearer, self._token) or known):
            return None
        wanted = "this inspector wants its token: /?token=TOKEN, or Authorization: Bearer TOKEN"
        return PlainTextResponse(wanted, 401, {"www-authenticate": "Bearer"})


def _cookie_of(token: bytes) -> str:
    """Return the cookie's value, which opens this inspector without revealing the token."""
    return hmac.new(token, b"trinity-buffer serve", hashlib.sha256).hexdigest()


def _bytes(text: str) -> bytes:
    """Return the bytes of a text, those too that the command line could not read."""
    return text.encode("utf-8", "surrogateescape")


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

HELP = {
    "store_bytes": "Size of the database on disk.",
    "events_total": "Events of the log, by kind.",
    "experiences_total": "Experiences that were recorded.",
    "planned_rollouts_total": "Rollouts that were planned.",
    "missing_rollouts": "Planned rollouts that are not stored yet.",
    "policy_version": "The newest policy that was published.",
    "annotated_experiences_total": "Experiences with annotations, by annotation set.",
    "unseen_experiences": "Experiences that a strategy has not read yet.",
    "waiting_experiences": "Experiences that wait for their group.",
    "rejected_experiences_total": "Experiences that were left out, by whom and why.",
    "refused_experiences_total": "Experiences that were refused at the door, by reason.",
    "leased_step": "The last gradient step that a trainer was handed.",
    "committed_step": "The last gradient step that a trainer committed.",
    "ready_rows": "Rows that a trainer could be handed.",
    "leased_rows": "Rows that were handed out and are not committed.",
    "committed_rows": "Rows in committed steps; a rewind takes some back.",
    "staleness_mean": "Mean policy versions between sampling and training, of the last "
    f"{STEPS_OF_STALENESS} steps.",
    "stuck": "What does not move on by itself: `trinity-buffer doctor` names them.",
    "here": "Processes that are there, by role.",
}
"""Name -> what it counts; what ends in ``_total`` only grows."""


_Sample = tuple[str, float | None, dict[str, str]]
"""Name, value (None: it is not known) and labels."""


async def metrics(store: Store) -> str:
    """Return the numbers of all experiments, a line each."""
    samples = [*_all_samples(await overview(store), await examine(store))]
    lines = []
    # The three characters that the format escapes in the value of a label.
    escapes = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
    # Samples of one name must stand together, below its HELP and TYPE.
    for name, text in HELP.items():
        of_name = [sample for sample in samples if sample[0] == name and sample[1] is not None]
        if of_name:
            full, kind = f"trinity_buffer_{name}", "counter" if name.endswith("_total") else "gauge"
            lines += [f"# HELP {full} {text}\n", f"# TYPE {full} {kind}\n"]
            for _, value, labels in of_name:
                pairs = [f'{key}="{label.translate(escapes)}"' for key, label in labels.items()]
                lines.append(f"{full}{{{','.join(pairs)}}}" if pairs else full)
                lines.append(f" {value}\n")
    return "".join(lines)


def _all_samples(counted: Overview, examined: Examination) -> Iterator[_Sample]:
    stuck = Counter(finding.experiment for finding in examined.stuck)
    here = Counter((process.experiment, process.role) for process in examined.here)
    yield "store_bytes", counted.size_bytes, {}
    for one in counted.experiments:
        own, rejected = {"experiment": one.name}, dict(one.guests)
        yield "experiences_total", one.experiences, own
        yield "planned_rollouts_total", one.plans.planned, own
        yield "missing_rollouts", one.plans.missing, own
        yield "policy_version", one.published, own
        for kind, count in one.events.items():
            yield "events_total", count, own | {"kind": kind}
        for terms in one.strategies:
            labels, rejected[terms.consumer] = own | {"set": terms.consumer}, terms.rejected
            yield "annotated_experiences_total", terms.annotated, labels
            yield "unseen_experiences", terms.unseen, labels
            yield "waiting_experiences", terms.waiting, labels
        for trainer in one.trainers:
            labels, counts = own | {"trainer": trainer.name}, trainer.counts
            rejected[trainer.name] = counts.rejected
            yield "leased_step", trainer.leased, labels
            yield "committed_step", trainer.committed, labels
            yield "ready_rows", counts.ready, labels
            yield "leased_rows", counts.leased, labels
            yield "committed_rows", counts.committed, labels
            yield "staleness_mean", trainer.staleness, labels
        for reason, count in one.refused.items():
            yield "refused_experiences_total", count, own | {"reason": reason}
        for by, reasons in rejected.items():
            for reason, count in reasons.items():
                yield "rejected_experiences_total", count, own | {"by": by, "reason": reason}
        yield "stuck", stuck[one.name], own
        for (_, role), count in sorted(of for of in here.items() if of[0][0] == one.name):
            yield "here", count, own | {"role": role}


STATIC = Path(__file__).parent / "static"


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
    handlers = {errors.TrinityBufferError: _error_page}
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
                    opening = as_of(experiment, position)
                    opened.source = await opened.stack.enter_async_context(opening)
                try:
                    with as_of_position(position):
                        yield opened.source
                except errors.StoreError:  # its connection may be lost: the next page opens another
                    await opened.stack.aclose()
                    opened.source = None
                    raise

    async def _close(self, *keys: tuple[str, int]) -> None:
        # All at once: another page may want to close the same ones meanwhile.
        for opened in [self._opened.pop(key) for key in keys]:
            await opened.stack.aclose()


def _page(view: View) -> Any:
    async def answer(request: Request) -> Response:
        bar, state = _bar(request), request.app.state
        part, position = request.path_params.get("part", ""), bar["position"]
        run = await state.store.experiment(bar["name"])
        opened = as_of(run, None) if position is None else state.earlier.at(run, position)
        async with opened as source:
            template, shown = await view(Asked(state.store, source, request.query_params, part))
        return HTMLResponse(rendered(template, {"live": None, **shown, **bar}))

    return answer


def _bar(request: Request) -> dict[str, Any]:
    """Return the content of a page's bar: the experiment, and as of which position."""
    name, position = named(request.path_params["experiment"]), request.path_params.get("position")
    root = f"/{segment(name)}"
    bar = {"name": name, "root": root, "here": root, "position": position}
    return bar if position is None else {**bar, "here": f"{root}/@{position}", "live": None}


async def _then(request: Request) -> Response:
    """Lead to the experiment as it was at the position that is asked for."""
    position = whole("position", request.query_params.get("position") or "", GREATEST >> 20)
    return RedirectResponse(f"{_bar(request)['root']}/@{position}/", 303)


async def _experiments(request: Request) -> Response:
    """Return the list of experiments; where there is one, its page."""
    store = request.app.state.store
    names = await store.experiments()
    if len(names) == 1:
        return RedirectResponse(f"/{segment(names[0])}/", 303)
    listed = [(name, f"/{segment(name)}") for name in names]
    shown = {"name": None, "here": "", "live": None, "url": store.url, "experiments": listed}
    return HTMLResponse(rendered("experiments.html", shown))


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
    shown = {"name": None, "here": "", "live": None, "error": str(error)}
    if "experiment" in request.path_params and not isinstance(error, errors.UnknownExperimentError):
        shown |= _bar(request)
    return HTMLResponse(rendered("error.html", shown), status_of(error))
