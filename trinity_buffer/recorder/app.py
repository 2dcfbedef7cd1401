"""The recorder as a web application: an OpenAI-compatible server before another one.

More is asked of that one than the client asked for, which is taken out of its answers.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar
from uuid import uuid4

import anyio
import msgspec
from anyio.abc import TaskGroup
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from trinity_buffer.errors import InvalidArgumentError, TrinityBufferError
from trinity_buffer.explorer import server
from trinity_buffer.explorer.conversation import Completion, reasoning_in, understanding, warn_once
from trinity_buffer.pipeline.coordination.waiting import task_group
from trinity_buffer.recorder.guard import refusal, status_of
from trinity_buffer.recorder.recording import Recording, Rollout, Turn

T = TypeVar("T")

Json = Mapping[str, Any]
"""A request, an answer or a chunk of one, or a part of these."""

CHAT = "/v1/chat/completions"
OURS = ("token_ids", "prompt_token_ids")


def require_request(body: Any) -> None:
    """Raise InvalidArgumentError unless a request is well-formed, as far as it is read here."""
    if not isinstance(body, dict):
        raise InvalidArgumentError("a request must be a JSON object")
    if not isinstance(body.get("stream_options") or {}, dict):
        raise InvalidArgumentError("stream_options must be a JSON object")
    prompts = body.get("prompt")
    if isinstance(prompts, list) and len(prompts) > 1 and not isinstance(prompts[0], int):
        raise InvalidArgumentError(
            f"prompt is a list of {len(prompts)}: send each prompt in a request of its own, else "
            "they would become runs of one task, which are compared with each other"
        )
    for key in ("messages", "tools"):
        if not _is_objects(body.get(key)):
            raise InvalidArgumentError(f"{key} must be a list of JSON objects")
    if not all(map(_has_calls, body.get("messages") or ())):
        raise InvalidArgumentError("tool_calls must be a list of tool calls")


def _is_objects(value: Any) -> bool:
    """Return whether it is a list of JSON objects, or nothing."""
    return not value or (isinstance(value, list) and all(isinstance(item, dict) for item in value))


def _has_calls(message: Json) -> bool:
    """Return whether what a message has for tool calls are some."""
    calls = message.get("tool_calls")
    return _is_objects(calls) and _is_objects([call.get("function") or {} for call in calls or ()])


def asked_of_upstream(path: str, body: Json) -> dict[str, Any]:
    """Return the request that brings ids and log-probs, with no default left to the server."""
    asked: dict[str, Any] = dict(server.ASKED_FOR_CHAT if path == CHAT else server.ASKED_FOR_TEXT)
    if body.get("logprobs"):
        asked.pop("logprobs")  # the client wants as many as it says
    if body.get("tools") and body.get("stream"):
        asked["stream"] = False  # a streamed tool call would lose its ids
        body = {key: value for key, value in body.items() if key != "stream_options"}
    elif body.get("stream"):
        # By its count of tokens, lost ids are noticed.
        asked["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
    tools = body.get("tools") or ()
    if any(tool.get("strict") or (tool.get("function") or {}).get("strict") for tool in tools):
        warn_once(
            "tools with strict=true are asked for without it: a server that forces their arguments "
            "into the schema samples otherwise than its log-probs say"
        )
        asked["tools"] = [_without_strict(tool) for tool in tools]
    return {**server.pinned(body), **asked}


def _without_strict(tool: Json) -> dict[str, Any]:
    """Return a tool whose arguments the server does not force into their schema.

    Some agents ask for that of every tool. It would restrict what is sampled, which no log-prob
    shows; without it their calls are those of the model.
    """
    plain = {key: value for key, value in tool.items() if key != "strict"}
    if isinstance(function := plain.get("function"), Mapping):
        plain["function"] = {key: value for key, value in function.items() if key != "strict"}
    return plain


def wants_usage(body: Json) -> bool:
    """Return whether a client asks that its stream ends with the usage."""
    return bool((body.get("stream_options") or {}).get("include_usage"))


def completions_of(answer: Json) -> list[Completion]:
    """Return the choices of an answer, in the order of their indexes; see `understanding`.

    Raises:
        ValueError: there is no choice, or one did not end.
    """
    choices = sorted(answer.get("choices") or (), key=lambda choice: choice.get("index", 0))
    if not choices or not all(choice.get("finish_reason") for choice in choices):
        raise ValueError("each answer needs a choice, and each choice a finish_reason")
    if not all(_has_calls(choice.get("message") or {}) for choice in choices):
        raise ValueError("tool_calls must be a list of tool calls")
    completions = [server.completion_of(answer, choice) for choice in choices]
    for completion in completions:
        # An array takes only numbers: anything else in the lists is an error here.
        for ids in (completion.prompt_ids, completion.token_ids):
            array("q", ids or ())
        array("d", completion.logprobs or ())
    return completions


def stripped(answer: dict[str, Any], body: Json) -> dict[str, Any]:
    """Take out of an answer, or a chunk of one, what the client has not asked for."""
    gone = [] if body.get("return_token_ids") else [*OURS]
    gone += [] if body.get("logprobs") else ["logprobs"]
    gone += ["usage"] if body.get("stream") and not wants_usage(body) else []
    for part in (answer, *(answer.get("choices") or ())):
        for key in gone:
            part.pop(key, None)
    return answer


def event(chunk: Json) -> bytes:
    """Return a chunk as a server-sent event."""
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def as_chunks(answer: Json, *, usage: bool) -> list[bytes]:
    """Return a whole answer as a stream: a chunk of each choice, and usage."""
    # Clients that stream accept nothing but chunks, in name and in shape.
    top = {key: value for key, value in answer.items() if key not in ("choices", "usage", "object")}
    top["object"] = "chat.completion.chunk"
    chunks = []
    for choice in answer.get("choices") or ():
        delta = dict(choice.get("message") or {})
        if delta.get("tool_calls"):
            calls = enumerate(delta["tool_calls"])
            delta["tool_calls"] = [{"index": number, **call} for number, call in calls]
        rest = {key: value for key, value in choice.items() if key != "message"}
        chunks.append({**top, "choices": [{**rest, "delta": delta}]})
    if usage:
        chunks.append({**top, "choices": [], "usage": answer.get("usage")})
    return [event(chunk) for chunk in chunks]


@dataclass(slots=True)
class StreamedAnswer:
    """Puts the chunks of a stream together to the answer that it is."""

    _top: dict[str, Any] = field(default_factory=dict)
    _choices: dict[int, dict[str, Any]] = field(default_factory=dict)

    def take(self, chunk: Json) -> bool:
        """Take in a chunk; return whether it ends one of the choices.

        Raises:
            ValueError: it says that the answer failed.
        """
        if chunk.get("error"):
            raise ValueError(f"it broke off by {json.dumps(chunk['error']):.300}")
        self._top |= {key: chunk[key] for key in ("prompt_token_ids", "usage") if chunk.get(key)}
        ends = False
        for part in chunk.get("choices") or ():
            index, delta = part.get("index", 0), part.get("delta") or {}
            empty: dict[str, Any] = {"index": index, "token_ids": [], "logprobs": {}, "message": {}}
            choice = self._choices.setdefault(index, empty)
            choice["token_ids"] += part.get("token_ids") or []
            content = part.get("text") or delta.get("content") or ""
            for key, text in {"content": content, **reasoning_in(delta)}.items():
                choice["message"][key] = choice["message"].get(key, "") + text
            # Servers send the log-probs of each chunk; the answer has them joined.
            for key, values in (part.get("logprobs") or {}).items():
                if isinstance(values, Sequence):
                    choice["logprobs"].setdefault(key, []).extend(values)
            sent_once = ("prompt_token_ids", "finish_reason")
            choice |= {key: part[key] for key in sent_once if part.get(key)}
            ends = ends or bool(part.get("finish_reason"))
        return ends

    def answer(self) -> dict[str, Any]:
        """Return the whole answer, as it would have come without streaming."""
        return {**self._top, "choices": list(self._choices.values())}


HEADER = "x-trinity-rollout"
"""Header that names the rollout of a request, where its path does not."""

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


@dataclass
class Recorder:
    """Answers as the upstream does, and records what it answers.

    Attributes:
        upstream: the inference server.
        recording: where it goes.
        batch: of rollouts that name none.
        token: that a request must bring as ``Authorization: Bearer``; None: it answers all programs
            of this machine, under a name of this machine.
        ack: ``"after"``: an answer leaves when it is durable; ``"before"``: at once.
        max_in_flight: requests that are answered at the same time; more are told 429.
        logprobs_mode: what the upstream was started with.
    """

    upstream: server.Server
    recording: Recording
    batch: str = "recorded"
    token: str | None = None
    ack: Literal["after", "before"] = "after"
    max_in_flight: int = 1024
    logprobs_mode: server.LogprobsMode = "raw_logprobs"
    _in_flight: int = 0
    _background: TaskGroup | None = None

    def __post_init__(self) -> None:
        self._weights = server.ServedWeights(self.upstream)

    def app(self) -> Starlette:
        """Return the application."""

        async def models(_: Request) -> Response:
            return JSONResponse(await self.upstream.get("/v1/models"))

        routes = [self._route("/v1/batches/{batch}/seal", self._seal)]
        # Behind the base URL of an agent too: the longest first, else /v1 were part of the name.
        named = "/rollouts/{rollout:path}"
        for place in (f"{named}/v1", f"/v1{named}", named):
            routes += [self._route(f"{place}/{end}", self._close) for end in ("reward", "seal")]
        for place in ("/v1", f"{named}/v1"):
            ends = ("chat/completions", "completions")
            routes += [self._route(f"{place}/{end}", self._complete) for end in ends]
            routes.append(self._route(f"{place}/models", models, "GET"))
        answers: Any = dict.fromkeys((TrinityBufferError, HTTPException, ClientDisconnect), _error)
        return Starlette(routes=routes, lifespan=self._lifespan, exception_handlers=answers)

    def _route(
        self, path: str, answer: Callable[[Request], Awaitable[Response]], method: str = "POST"
    ) -> Route:
        async def allowed(request: Request) -> Response:
            reason = refusal(request.method, request.headers, self.token)
            if reason is not None:
                raise HTTPException(*reason)
            return await answer(request)

        return Route(path, allowed, methods=[method])

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        async with anyio.create_task_group() as group:
            self._background = group
            yield

    async def _close(self, request: Request) -> Response:
        """Record what a rollout has come to, with its reward."""
        body = _json_of(await request.body() or b"{}")
        if request.url.path.endswith("/reward") and isinstance(body, dict) and "reward" not in body:
            raise InvalidArgumentError(
                f"the body has no key 'reward', but {sorted(body)}: send {{\"reward\": 1.0}}, or "
                "close the rollout without one by /seal"
            )
        reward = body.get("reward") if isinstance(body, dict) else body
        try:
            reward = msgspec.convert(reward, float | None)
        except msgspec.ValidationError as error:
            raise InvalidArgumentError(f"reward={reward!r:.40}: it must be a number") from error
        rollout = self._named(request, request.path_params["rollout"])
        receipt = await self.recording.close(rollout, reward)
        answer = {"uids": list(receipt.uids), "position": receipt.position}
        return JSONResponse({**answer, "duplicates": receipt.duplicates})

    async def _seal(self, request: Request) -> Response:
        """Record that a batch is complete."""
        return JSONResponse({"expected": await self.recording.seal(request.path_params["batch"])})

    async def _complete(self, request: Request) -> Response:
        """Answer a request for a completion."""
        if self.recording.failed is not None:
            raise self.recording.failed
        if self._in_flight >= self.max_in_flight:
            message = f"{self._in_flight} requests are being answered: try again"
            raise HTTPException(429, message, {"retry-after": "1"})
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
        server.require_sampled(asked, self.logprobs_mode, ASK_ITSELF)
        server.require_texts(body.get("messages") or (), ASK_ITSELF)
        named = request.path_params.get("rollout") or _as_utf8(request.headers.get(HEADER, ""))
        rollout = self._named(request, named or uuid4().hex)
        if named:
            rollout = await self.recording.continued(rollout, body.get("messages") or ())
        else:
            self.recording.begin_rollout(rollout)
        await self.recording.require_open(rollout, body.get("n"))
        headers = {HEADER: str(rollout).encode().decode("latin-1")}  # as UTF-8: see `_as_utf8`
        weights = await self._weights.now()
        chunks, streams = self.upstream.chunks(path, asked), asked.get("stream")
        asking = chunks.__anext__ if streams else partial(self.upstream.passed, path, asked)
        status, answer, retry_headers = await self._unless_gone(request, asking)
        if status >= 400:
            return JSONResponse(answer, status, retry_headers)
        if streams:
            pieces = self._streamed(chunks, body, rollout, weights)
            return StreamingResponse(pieces, headers=headers, media_type="text/event-stream")
        await self._store(answer, body, rollout, weights)
        if body.get("stream"):
            whole = [*as_chunks(stripped(answer, body), usage=wants_usage(body)), DONE]
            return Response(b"".join(whole), headers=headers, media_type="text/event-stream")
        # Not a JSONResponse, which cannot write all that a server may say, such as NaN.
        text = json.dumps(stripped(answer, body), separators=(",", ":"))
        return Response(text, headers=headers, media_type="application/json")

    async def _unless_gone(self, request: Request, asking: Callable[[], Awaitable[T]]) -> T:
        """Return the answer of ``asking``, which ends if the client goes away."""
        answers: list[T] = []

        async def stop_if_client_goes(scope: anyio.CancelScope) -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            scope.cancel()

        async with task_group() as group:
            # Generating on for a client that is gone would cost the GPU for nothing.
            group.start_soon(stop_if_client_goes, group.cancel_scope)
            answers.append(await asking())
            group.cancel_scope.cancel()
        if not answers or await request.is_disconnected():
            raise HTTPException(499, "the client went away and saw no answer, which is no turn")
        return answers[0]

    def _named(self, request: Request, name: str) -> Rollout:
        """Return the rollout of this name, which no encoded slash may split."""
        # Decoded, it could not be told from a slash between the parts.
        if b"%2f" in request.scope.get("raw_path", b"").lower():
            raise InvalidArgumentError(f"rollout {name!r:.80}: no part of it may hold a slash")
        return Rollout.of(name, self.batch)

    async def _store(self, answer: Json, body: Json, rollout: Rollout, weights: str | None) -> None:
        """Record an answer; it is durable on return, unless it may leave before that.

        Args:
            weights: their version when it was asked for.
        """
        with understanding(self.upstream.root):
            made = completions_of(answer)
        server.require_whole(answer, made, self.upstream.root, NO_TURN, MUST_RETURN)
        mode, options = self.logprobs_mode, server.changes(body)
        made = await self._weights.stamped(made, weights, logprobs_mode=mode, sampling=options)
        messages, tools = body.get("messages") or (), body.get("tools") or ()
        turns = [Turn(messages, tools, completion) for completion in made]
        # The turn happened, even if the client hangs up now.
        with anyio.CancelScope(shield=True):
            if self.ack == "after":
                await self.recording.record_turns(rollout, turns)
            else:
                assert self._background is not None
                await self._background.start(self.recording.record_turns, rollout, turns)

    async def _streamed(
        self, chunks: AsyncGenerator[Any], body: Json, rollout: Rollout, weights: str | None
    ) -> AsyncIterator[bytes]:
        """Yield the chunks as they come; the last of each choice when all is durable."""
        whole, held = StreamedAnswer(), []
        try:
            # A client that goes away closes this, and so the connection to the upstream.
            async with aclosing(chunks):
                async for chunk in chunks:
                    with understanding(self.upstream.root):
                        ends = whole.take(chunk)
                        has_choices, has_usage = chunk.get("choices"), chunk.get("usage")
                        piece = event(stripped(chunk, body))
                    if has_usage and not (has_choices or wants_usage(body)):
                        continue  # that was asked for by us
                    if ends or not has_choices:
                        held.append(piece)
                    else:
                        yield piece
            await self._store(whole.answer(), body, rollout, weights)
            for piece in held:
                yield piece
            yield DONE
        except TrinityBufferError as error:
            # The head has left already: all that is left to say is in the stream.
            yield event({"error": {"message": str(error), "type": type(error).__name__}})
        finally:
            self._in_flight -= 1


def _as_utf8(header: str) -> str:
    """Return a header, which Starlette takes for Latin-1, as the UTF-8 that it is, or as it is."""
    try:
        return header.encode("latin-1").decode()
    except UnicodeDecodeError:
        return header


def _json_of(body: bytes) -> Any:
    try:
        value = json.loads(body)
        if b"\\ud" in body.lower():  # half a character, which cannot be passed on as UTF-8
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the request is no JSON: {error}") from error
    return value


async def _error(request: Request, error: Exception) -> Response:
    """Return an error as OpenAI's clients expect one."""
    status, message, kind = status_of(error), str(error), type(error).__name__
    if isinstance(error, HTTPException):
        status, message, kind = error.status_code, error.detail, "recorder"
        if status in (404, 405):  # which Starlette raises where no route has this path
            message = f"there is no {request.method} {request.url.path:.80}: there are {PATHS}"
    body = {"error": {"message": message, "type": kind}}
    return JSONResponse(body, status, getattr(error, "headers", None))
