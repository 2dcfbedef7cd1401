"""An inference server, as JSON over HTTP: questions, and whose weights it holds."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Self

from trinity_buffer.errors import InferenceServerError, InvalidArgumentError, RefusedRequestError
from trinity_buffer.explorer.conversation import Completion
from trinity_buffer.lazy import extra

_LOG = logging.getLogger(__name__)

NOT_FOUND = 404

ASK_AGAIN_S = 10.0
"""So long a server that does not name its weights is not asked for them again."""

WAIT_AND_ASK_AGAIN = (408, 429)
"""Statuses 4xx that blame the server's load, not the request."""

Dialect = Literal["vllm", "sglang"]

VERSION_AT: dict[Dialect, tuple[str, ...]] = {
    "vllm": ("/weight_info",),
    "sglang": ("/model_info", "/get_model_info"),
}
"""Where a server names its weights; the newest place first."""


class Server:
    """Talks JSON with an inference server; close it, or enter it as a context.

    Args:
        url: with or without the ``/v1`` at its end; control endpoints are beside that.
        api_key: sent as a bearer token.
        timeout_s: of one answer.

    Raises:
        InvalidArgumentError: ``url`` is not one.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise InvalidArgumentError(f"{url!r} is no URL of a server: write http://HOST:PORT/v1")
        self.root = url.rstrip("/").removesuffix("/v1")
        self._httpx = extra("httpx2", "server")
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        # No pool limit: who calls has a limit of rollouts, and two would wait for each other.
        self._client = self._httpx.AsyncClient(
            headers=headers,
            timeout=self._httpx.Timeout(timeout_s, connect=10.0),
            # Servers close an idle connection after five seconds: not while we take it up again.
            limits=self._httpx.Limits(max_connections=None, keepalive_expiry=2.0),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def post(self, path: str, body: Mapping[str, Any] | None = None, **query: str) -> Any:
        """Return the answer to a POST of ``body`` to ``path``.

        Raises:
            InferenceServerError: it cannot be reached, or refuses (see `RefusedRequestError`).
        """
        return await self._ask("POST", path, body or {}, query)

    async def get(self, path: str) -> Any:
        """Return the answer to a GET of ``path``; None where there is no such path.

        Raises:
            InferenceServerError: it cannot be reached, or refuses.
        """
        return await self._ask("GET", path, None, {})

    async def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, query: Mapping[str, str]
    ) -> Any:
        answer = await self._sent(method, path, body, query)
        # Servers differ in their control endpoints: one that is not there is an answer.
        if answer.status_code == NOT_FOUND and method == "GET":
            return None
        if answer.is_error:
            raise _refusal(str(answer.url), answer.status_code, answer.text)
        return _json(answer)

    async def _sent(
        self, method: str, path: str, body: Mapping[str, Any] | None, query: Mapping[str, str]
    ) -> Any:
        url = f"{self.root}{path}"
        try:
            return await self._client.request(method, url, json=body, params=query or None)
        except (self._httpx.HTTPError, OSError) as error:
            raise self._unreachable(url, error) from error

    def _unreachable(self, url: str, error: Exception) -> InferenceServerError:
        if isinstance(error, InferenceServerError):
            return error
        message = f"{url}: {type(error).__name__} {error}".rstrip()
        return InferenceServerError(f"{message}; is the server up?")

    async def passed(self, path: str, body: Mapping[str, Any]) -> tuple[int, Any, dict[str, str]]:
        """Return status, answer and ``Retry-After`` of a POST, whatever the status is.

        Raises:
            InferenceServerError: it cannot be reached, or its answer is no JSON.
        """
        answer = await self._sent("POST", path, body, {})
        after = answer.headers.get("retry-after")
        headers = {} if after is None else {"retry-after": after}
        return answer.status_code, _json(answer), headers

    async def chunks(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any]:
        """Yield the chunks of a streamed answer.

        Raises:
            InferenceServerError: it cannot be reached, refuses, or breaks off before ``[DONE]``.
        """
        url = f"{self.root}{path}"
        is_done = False
        try:
            async with self._client.stream("POST", url, json=dict(body)) as answer:
                if answer.is_error:
                    text = (await answer.aread()).decode(errors="replace")
                    raise _refusal(url, answer.status_code, text)
                async for line in answer.aiter_lines():
                    data = line.removeprefix("data: ")
                    is_done = is_done or data == "[DONE]"
                    if data not in (line, "[DONE]"):
                        yield json.loads(data)
        except (self._httpx.HTTPError, OSError, ValueError) as error:
            raise self._unreachable(url, error) from error
        if not is_done:
            raise InferenceServerError(f"{url}: its stream ended before [DONE]: ask again")

    async def weight_version(self, dialect: Dialect = "vllm") -> str | None:
        """Return the name of the weights that the server holds now; None: it does not tell.

        vLLM tells with ``VLLM_SERVER_DEV_MODE=1``.
        """
        for path in VERSION_AT[dialect]:
            answer = await self.get(path)
            version = answer.get("weight_version") if isinstance(answer, Mapping) else None
            if version is not None:
                return str(version)
        return None

    async def weight_checksum(self) -> str | None:
        """Return a digest of the checksums that vLLM computes of its weights; None: it does not."""
        try:
            answer = await self.post("/weight_checker", {"action": "checksum"})
        except InferenceServerError:
            return None
        checksums = json.dumps(answer.get("checksums"), sort_keys=True)
        return hashlib.sha256(checksums.encode()).hexdigest()

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


class ServedWeights:
    """Whose weights a server of vLLM's answers with, request by request.

    Args:
        server: which is asked.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._checksums: dict[str, str | None] = {}
        self._has_warned = False
        self._silent_until = 0.0

    async def now(self) -> str | None:
        """Return the version of the weights; None: the server does not tell, with one warning.

        It is asked again after `ASK_AGAIN_S`: it may have been restarted in another mode.

        Raises:
            InferenceServerError: the server cannot be reached, or failed.
        """
        if time.monotonic() < self._silent_until:
            return None
        try:
            version = await self._server.weight_version()
        except RefusedRequestError:
            version = None
        if version is None:
            self._silent_until = time.monotonic() + ASK_AGAIN_S
            if not self._has_warned:
                self._has_warned = True
                _LOG.warning(
                    "%s does not say which weights it answers with (/weight_info; vLLM does with "
                    "VLLM_SERVER_DEV_MODE=1): recorded without a policy version, its answers never "
                    "count as stale",
                    self._server.root,
                )
        elif version not in self._checksums:
            self._checksums[version] = None
            self._checksums[version] = await self._server.weight_checksum()
        return version

    async def stamped(
        self, completions: Sequence[Completion], before: str | None
    ) -> list[Completion]:
        """Return the choices of an answer with the version ``before`` it, and a later one."""
        after = before if before is None else await self.now()
        stamp: dict[str, Any] = {
            "weight_version": before,
            "later_weight_version": None if after == before else after,
            "weight_checksum": None if before is None else self._checksums.get(before),
        }
        return [replace(made, **stamp) for made in completions]


def _refusal(url: str, status: int, text: str) -> InferenceServerError:
    """Return the error for a failed request; one refused with 4xx is not sent again."""
    message = f"{url}: {status} {text[:300]}"
    if not 400 <= status < 500 or status in WAIT_AND_ASK_AGAIN:
        return InferenceServerError(message)
    error = RefusedRequestError(message)
    error.status = status
    return error


def _json(answer: Any) -> Any:
    try:
        return answer.json()
    except ValueError as error:
        raise InferenceServerError(f"{answer.url}: its answer is no JSON ({error})") from error
