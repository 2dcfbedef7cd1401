"""The recorder as a web application: an OpenAI-compatible server before another one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal
from uuid import uuid4

import anyio
from anyio.abc import TaskGroup
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from trinity_buffer.errors import (
    ConflictError,
    InferenceServerError,
    InvalidArgumentError,
    StoreError,
    TrinityBufferError,
)
from trinity_buffer.explorer.completions import (
    changes,
    require_all_sampled,
    require_ids,
    require_sampled,
    require_texts,
)
from trinity_buffer.explorer.server import ServedWeights, Server
from trinity_buffer.pipeline.background import task_group
from trinity_buffer.recorder.guard import refusal
from trinity_buffer.recorder.recording import Recording, Rollout, Turn
from trinity_buffer.recorder.upstream import (
    CHAT,
    DONE,
    StreamedAnswer,
    as_chunks,
    asked_of_upstream,
    completions_of,
    event,
    is_usage,
    require_request,
    stripped,
    understanding,
    wants_usage,
)

HEADER = "x-trinity-rollout"
"""Header that names the rollout of a request, where its path does not."""

STATUS: dict[type[TrinityBufferError], int] = {
    InvalidArgumentError: 400,
    ConflictError: 409,
    InferenceServerError: 502,
    StoreError: 503,
}
"""Of an answer for an error of ours."""

PATHS = (
    "POST /v1/chat/completions, POST /v1/completions and GET /v1/models, each also behind "
    "/rollouts/TASK/RUN; POST /v1/rollouts/TASK/RUN/reward, POST /v1/rollouts/TASK/RUN/seal and "
    "POST /v1/batches/BATCH/seal"
)
"""What a recorder answers."""

MUST_RETURN = (
    "another upstream must return prompt_token_ids, and token_ids and logprobs with each choice, "
    "where the request says return_token_ids"
)
"""What one may do about an upstream whose answers lack ids."""

ASK_ITSELF = "send it to the inference server itself, where it is not recorded"
"""What one may do about a request whose answer cannot be trained."""

NO_TURN = "nothing of this answer is stored"
"""What became of an answer that lacks tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecorderSettings:
    """How a recorder answers.

    Attributes:
        batch: of rollouts that name none.
        token: that a request must bring as ``Authorization: Bearer``; None: it answers all programs
            of this machine, under a name of this machine.
        ack: ``"after"``: an answer leaves when it is durable; ``"before"``: at once.
        max_in_flight: requests that are answered at the same time; more are told 429.
        logprobs_mode: what the upstream was started with.
    """

    batch: str = "recorded"
    token: str | None = None
    ack: Literal["after", "before"] = "after"
    max_in_flight: int = 1024
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"


class Recorder:
    """Answers as the upstream does, and records what it answers.

    Args:
        upstream: the inference server.
        recording: where it goes.
        settings: everything else.
    """

    def __init__(self, upstream: Server, recording: Recording, settings: RecorderSettings) -> None:
        self._upstream = upstream
        self._recording = recording
        self._settings = settings
        self._weights = ServedWeights(upstream)
        self._in_flight = 0
        self._background: TaskGroup | None = None

    def app(self) -> Starlette:
        """Return the application."""
        post = ["POST"]
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/batches/{batch}/seal", self._seal, methods=post),
        ]
        # Behind the base URL of an agent too: the longest first, else /v1 were part of the name.
        for place in (
            "/rollouts/{rollout:path}/v1",
            "/v1/rollouts/{rollout:path}",
            "/rollouts/{rollout:path}",
        ):
            ends = (f"{place}/{name}" for name in ("reward", "seal"))
            routes += [Route(path, self._close, methods=post) for path in ends]
        for name in ("chat/completions", "completions"):
            routes += [
                Route(f"/v1/{name}", self._complete, methods=post),
                Route(f"/rollouts/{{rollout:path}}/v1/{name}", self._complete, methods=post),
            ]
        routes.append(Route("/rollouts/{rollout:path}/v1/models", self._models))
        return Starlette(
            routes=routes,
            lifespan=self._lifespan,
            exception_handlers={
                TrinityBufferError: _store_error,
                HTTPException: _no_path,
                _RefusedError: _refused,
            },
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        async with anyio.create_task_group() as group:
            self._background = group
            yield

    async def _models(self, request: Request) -> Response:
        self._require_allowed(request)
        return JSONResponse(await self._upstream.get("/v1/models"))

    async def _close(self, request: Request) -> Response:
        """Record what a rollout has come to, with its reward."""
        self._require_allowed(request)
        body = _json_of(await request.body() or b"{}")
        if request.url.path.endswith("/reward") and isinstance(body, dict) and "reward" not in body:
            raise InvalidArgumentError(
                f"the body has no key 'reward', but {sorted(body)}: send {{\"reward\": 1.0}}, or "
                "close the rollout without one by /seal"
            )
        reward = body.get("reward") if isinstance(body, dict) else body
        rollout = self._named(request, request.path_params["rollout"])
        receipt = await self._recording.close(rollout, _number(reward))
        answer = {"uids": list(receipt.uids), "position": receipt.position}
        return JSONResponse({**answer, "duplicates": receipt.duplicates})

    async def _seal(self, request: Request) -> Response:
        """Record that a batch is complete."""
        self._require_allowed(request)
        return JSONResponse({"expected": await self._recording.seal(request.path_params["batch"])})

    def _require_allowed(self, request: Request) -> None:
        reason = refusal(request.method, request.headers, self._settings.token)
        if reason is not None:
            raise _RefusedError(*reason)

    async def _complete(self, request: Request) -> Response:
        """Answer a request for a completion."""
        self._require_allowed(request)
        if self._recording.failed is not None:
            raise self._recording.failed
        if self._in_flight >= self._settings.max_in_flight:
            message = f"{self._in_flight} requests are being answered: try again"
            raise _RefusedError(429, message, {"retry-after": "1"})
        self._in_flight += 1
        answer: Response | None = None
        try:
            answer = await self._answer(request)
        finally:
            if not isinstance(answer, StreamingResponse):  # which is in flight until its last chunk
                self._in_flight -= 1
        return answer

    async def _answer(self, request: Request) -> Response:
        body = _json_of(await request.body())
        path = CHAT if request.url.path.endswith("/chat/completions") else "/v1/completions"
        require_request(body)
        asked = asked_of_upstream(path, body)
        require_sampled(asked, self._settings.logprobs_mode, ASK_ITSELF)
        require_texts(body.get("messages") or (), ASK_ITSELF)
        rollout = await self._rollout(request, body)
        await self._recording.require_open(rollout, body.get("n"))
        headers = {HEADER: str(rollout)}
        if asked.get("stream"):
            chunks = self._streamed(path, asked, body, rollout)
            return StreamingResponse(chunks, headers=headers, media_type="text/event-stream")
        weights = await self._weights.now()
        passed = await self._passed(request, path, asked)
        if passed is None or await request.is_disconnected():
            return _error(499, "the client went away: it never saw the answer, which is no turn")
        status, answer, retry_headers = passed
        if status >= 400:
            return JSONResponse(answer, status_code=status, headers=retry_headers)
        await self._record(path, answer, body, (rollout, weights))
        if body.get("stream"):
            pieces = [*as_chunks(stripped(answer, body), usage=wants_usage(body)), DONE]
            return Response(b"".join(pieces), headers=headers, media_type="text/event-stream")
        return JSONResponse(stripped(answer, body), headers=headers)

    async def _passed(
        self, request: Request, path: str, asked: Mapping[str, Any]
    ) -> tuple[int, Any, dict[str, str]] | None:
        """Return what the upstream answers; None: the client went away, and it need not go on."""
        passed = None

        async def stop_if_client_goes(scope: anyio.CancelScope) -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            scope.cancel()

        async with task_group() as group:
            # Generating on for a client that is gone would cost the GPU for nothing.
            group.start_soon(stop_if_client_goes, group.cancel_scope)
            passed = await self._upstream.passed(path, asked)
            group.cancel_scope.cancel()
        return passed

    async def _rollout(self, request: Request, body: Mapping[str, Any]) -> Rollout:
        """Return the rollout that the request names, else one of its own."""
        named = request.path_params.get("rollout") or request.headers.get(HEADER)
        rollout = self._named(request, named or uuid4().hex)
        if not named:
            return self._recording.fresh(rollout)
        return await self._recording.continued(rollout, body.get("messages") or ())

    def _named(self, request: Request, name: str) -> Rollout:
        """Return the rollout of this name, which no encoded slash may split."""
        # Decoded, it could not be told from a slash between the parts.
        if b"%2f" in request.scope.get("raw_path", b"").lower():
            raise InvalidArgumentError(
                f"rollout {name!r:.80}: no part of its name may hold a slash"
            )
        return Rollout.of(name, self._settings.batch)

    async def _record(
        self,
        path: str,
        answer: Mapping[str, Any],
        body: Mapping[str, Any],
        origin: tuple[Rollout, str | None],
    ) -> None:
        """Record an answer; it is durable on return, unless it may leave before that.

        Its ``origin`` is its rollout, and the version of the weights when it was asked for.
        """
        rollout, weights = origin
        mode, options = self._settings.logprobs_mode, changes(body)
        with understanding(self._upstream.root):
            made = [
                replace(completion, logprobs_mode=mode, sampling=options)
                for completion in completions_of(path, answer)
            ]
        for completion in made:
            require_ids(completion, self._upstream.root, MUST_RETURN)
        require_all_sampled(answer, made, self._upstream.root, NO_TURN)
        messages, tools = body.get("messages") or (), body.get("tools") or ()
        made = await self._weights.stamped(made, weights)
        turns = [Turn(messages, tools, completion) for completion in made]
        # The turn happened, even if the client hangs up now.
        with anyio.CancelScope(shield=True):
            if self._settings.ack == "after":
                await self._recording.record_turns(rollout, turns)
            else:
                assert self._background is not None
                await self._background.start(self._recording.record_turns, rollout, turns)

    async def _streamed(
        self, path: str, asked: Mapping[str, Any], body: Mapping[str, Any], rollout: Rollout
    ) -> AsyncIterator[bytes]:
        """Yield the chunks as they come; the last of each choice when all is durable."""
        whole, held = StreamedAnswer(), []
        try:
            weights = await self._weights.now()
            # A client that goes away closes this, and so the connection to the upstream.
            async with aclosing(self._upstream.chunks(path, asked)) as chunks:
                async for chunk in chunks:
                    with understanding(self._upstream.root):
                        ends = whole.take(chunk)
                        is_ours = is_usage(chunk) and not wants_usage(body)
                        piece = event(stripped(chunk, body))
                    if is_ours:
                        continue
                    if ends or not chunk.get("choices"):
                        held.append(piece)
                    else:
                        yield piece
            await self._record(path, whole.answer(), body, (rollout, weights))
            for piece in held:
                yield piece
            yield DONE
        except TrinityBufferError as error:
            # The head has left already: all that is left to say is in the stream.
            yield event({"error": {"message": str(error), "type": type(error).__name__}})
        finally:
            self._in_flight -= 1


class _RefusedError(Exception):
    """A request is not answered; it holds the status, the message and headers of the refusal."""


def _json_of(body: bytes) -> Any:
    try:
        value = json.loads(body)
        if b"\\ud" in body.lower():  # half a character, which cannot be passed on as UTF-8
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise _RefusedError(400, f"the request is no JSON: {error}") from error
    return value


def _number(reward: Any) -> float | None:
    if reward is None:
        return None
    try:
        if isinstance(reward, int | float) and not isinstance(reward, bool):
            return float(reward)
    except OverflowError:
        pass
    raise InvalidArgumentError(f"reward={reward!r:.40}: it must be a number")


def _error(status: int, message: str, kind: str = "recorder") -> Response:
    return JSONResponse({"error": {"message": message, "type": kind}}, status_code=status)


async def _store_error(_: Request, error: Exception) -> Response:
    """Return an error of ours as OpenAI's clients expect one."""
    # Not by type: subclasses have the status of their base.
    status = next((code for kind, code in STATUS.items() if isinstance(error, kind)), 500)
    return _error(status, str(error), type(error).__name__)


async def _refused(_: Request, error: Exception) -> Response:
    status, message, *headers = error.args
    answer = _error(status, message)
    answer.headers.update(headers[0] if headers else {})
    return answer


async def _no_path(request: Request, error: Exception) -> Response:
    """Return what there is instead of a path, or a method of it, that is not there."""
    assert isinstance(error, HTTPException)
    message = f"there is no {request.method} {request.url.path:.80}: there are {PATHS}"
    refused = _error(error.status_code, message)
    refused.headers.update(error.headers or {})
    return refused
