"""Who may ask the inspector, and what every answer of it says to a browser."""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from trinity_buffer.recorder.guard import LOCAL

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
            return self._entry(request)
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ").encode("latin-1")
        cookie = _bytes(request.cookies.get(COOKIE, ""))
        known = hmac.compare_digest(cookie, _cookie_of(self._token).encode())
        if asked is None and (hmac.compare_digest(bearer, self._token) or known):
            return None
        return PlainTextResponse(
            "this inspector wants its token: /?token=TOKEN, or Authorization: Bearer TOKEN",
            401,
            {"www-authenticate": "Bearer"},
        )

    def _entry(self, request: Any) -> Response:
        """Return the same address without the token, which a cookie stands for from now on."""
        assert self._token is not None
        answer = RedirectResponse(request.url.remove_query_params("token"), 303)
        answer.set_cookie(COOKIE, _cookie_of(self._token), httponly=True, samesite="lax")
        return answer


def _cookie_of(token: bytes) -> str:
    """Return what the cookie holds: it opens this inspector, without revealing the token."""
    return hmac.new(token, b"trinity-buffer serve", hashlib.sha256).hexdigest()


def _bytes(text: str) -> bytes:
    """Return the bytes of a text, those too that the command line could not read."""
    return text.encode("utf-8", "surrogateescape")
