"""A server that speaks vLLM's dialect (and SGLang's `/generate`) over a tiny local model.

Real HTTP: Starlette and uvicorn in a thread, on a port of the system's choice.
"""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from trinity_buffer.explorer.conversation import Completion
from trinity_buffer.explorer.local_model import LocalModel


class VLLM:
    """What such a server does with a model.

    Attributes:
        forgets: keys that its answers lack, as of a server that does not know them.
        cuts: tokens of a prompt that SGLang takes, as with ``--allow-auto-truncate``.
        drops: tokens at the end of each choice that its answers lack, with their log-probs.
        asked: bodies of the requests for completions.
        said: paths of the control endpoints, in the order they were called.
        before_answer: called before a completion leaves.
        calls: what its messages hold beside their content, such as ``tool_calls``.
        renames: whether it takes the names of its weights that it is told.
    """

    def __init__(self, folder: Path, *, has_dev_mode: bool = True) -> None:
        self.model = LocalModel(folder, max_tokens=8)
        self.version = "0"
        self.forgets: set[str] = set()
        self.cuts: int | None = None
        self.drops = 0
        self.asked: list[dict[str, Any]] = []
        self.said: list[str] = []
        self.before_answer: list[Any] = []
        self.calls: dict[str, Any] = {}
        self.renames = True
        self._running = anyio.Event()
        self._running.set()
        self._has_dev_mode = has_dev_mode

    def app(self) -> Starlette:
        """Return the application."""
        routes = [
            Route("/v1/models", self.models),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/generate", self.generate, methods=["POST"]),
        ]
        if self._has_dev_mode:
            routes += [
                Route("/weight_info", self.weight_info),
                Route("/model_info", self.weight_info),
                Route("/weight_checker", self.weight_checker, methods=["POST"]),
                Route("/{control}", self.control, methods=["POST"]),
            ]
        return Starlette(routes=routes)

    async def models(self, request: Request) -> Response:
        """Answer with the only model."""
        return JSONResponse({"data": [{"id": "tiny"}]})

    async def chat(self, request: Request) -> Response:
        """Answer to a conversation."""
        body = await request.json()
        tools = body.get("tools") or ()
        many = [
            await self._made(
                body,
                self.model.chat(body["messages"], tools=tools, max_tokens=body.get("max_tokens")),
            )
            for _ in range(body.get("n") or 1)
        ]
        return self._answer(body, many, "chat.completion")

    async def complete(self, request: Request) -> Response:
        """Continue a prompt."""
        body = await request.json()
        making = self.model.complete(body["prompt"], max_tokens=body.get("max_tokens"))
        return self._answer(body, [await self._made(body, making)], "text_completion")

    def _answer(self, body: dict[str, Any], many: list[Completion], kind: str) -> Response:
        top = {"id": "x", "object": kind, "created": 1, "model": "tiny"}
        said = sum(len(made.token_ids) for made in many)
        usage = None if "usage" in self.forgets else _usage(len(many[0].prompt_ids), said)
        many = [self._dropping(made) for made in many]
        choices = [self._choice(body, index, made) for index, made in enumerate(many)]
        if body.get("return_token_ids"):
            for part in [top] if "messages" in body else choices:
                part["prompt_token_ids"] = many[0].prompt_ids
        for part in (top, *choices):
            for key in self.forgets:
                part.pop(key, None)
        if body.get("stream"):
            wanted = (body.get("stream_options") or {}).get("include_usage")
            chunks = self._chunks(top, choices, usage if wanted else None)
            return StreamingResponse(chunks, media_type="text/event-stream")
        if body.get("stream_options"):
            told = "Stream options can only be defined when `stream=True`."
            return JSONResponse({"error": {"message": told}}, status_code=400)
        return JSONResponse({**top, "choices": choices, "usage": usage})

    def _dropping(self, made: Completion) -> Completion:
        end = len(made.token_ids) - self.drops
        return replace(
            made, token_ids=made.token_ids[:end], logprobs=list(made.logprobs or ())[:end]
        )

    def _choice(self, body: dict[str, Any], index: int, made: Completion) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": made.finish_reason}
        if "messages" in body:
            choice["message"] = {"role": "assistant", "content": made.text, **self.calls}
            found: dict[str, Any] = {
                "content": [{"token": "?", "logprob": one} for one in made.logprobs or ()]
            }
        else:
            choice["text"] = made.text
            found = {"token_logprobs": list(made.logprobs or ())}
        if body.get("logprobs") not in (None, False):
            choice["logprobs"] = found
        if body.get("return_token_ids"):
            choice["token_ids"] = made.token_ids
        return choice

    async def _chunks(
        self, top: dict[str, Any], choices: list[dict[str, Any]], usage: dict[str, int] | None
    ) -> AsyncIterator[bytes]:
        """Yield two chunks of each choice, the second with the last token, and what ends them."""
        pieces: list[dict[str, Any]] = []
        for choice in choices:
            message = choice.pop("message", None)
            for half in (slice(0, -1), slice(-1, None)):
                text = (message or {}).get("content", "") if half.start == 0 else ""
                piece = {"index": choice["index"], "finish_reason": None}
                piece |= {"delta": {"content": text}} if message else {"text": choice["text"][half]}
                if "token_ids" in choice:
                    piece["token_ids"] = choice["token_ids"][half]
                if "logprobs" in choice:
                    piece["logprobs"] = {k: v[half] for k, v in choice["logprobs"].items()}
                pieces.append(piece)
            pieces[-1]["finish_reason"] = choice["finish_reason"]
        for number, piece in enumerate(pieces):
            chunk = {**(top if number == 0 else {"id": "x", "created": 1, "model": "tiny"})}
            chunk["object"] = "chat.completion.chunk"
            yield b"data: " + json.dumps({**chunk, "choices": [piece]}).encode() + b"\n\n"
        if usage is not None:
            last = {"id": "x", "created": 1, "model": "tiny", "object": "chat.completion.chunk"}
            yield b"data: " + json.dumps({**last, "choices": [], "usage": usage}).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    async def generate(self, request: Request) -> Response:
        """Answer as SGLang does."""
        body = await request.json()
        most = body["sampling_params"].get("max_new_tokens")
        ids = body["input_ids"][: self.cuts]
        made = await self._made(body, self.model.complete(ids, max_tokens=most))
        said = len(made.token_ids)
        made = self._dropping(made)
        pairs = zip(made.logprobs or (), made.token_ids, strict=True)
        meta = {
            "prompt_tokens": len(ids),
            "completion_tokens": said,
            "finish_reason": {"type": made.finish_reason},
            "weight_version": self.version,
            "output_token_logprobs": [[logprob, token, None] for logprob, token in pairs],
        }
        return JSONResponse({"text": made.text, "output_ids": made.token_ids, "meta_info": meta})

    async def _made(self, body: dict[str, Any], sampling: Any) -> Completion:
        self.asked.append(body)
        await self._running.wait()
        made: Completion = await sampling
        for action in self.before_answer:
            action()
        return made

    async def weight_info(self, request: Request) -> Response:
        """Name the weights."""
        return JSONResponse({"weight_version": self.version})

    async def weight_checker(self, request: Request) -> Response:
        """Answer with a digest of each weight."""
        checksums = {
            name: hashlib.sha256(value.detach().numpy().tobytes()).hexdigest()
            for name, value in self.model.model.state_dict().items()
        }
        return JSONResponse({"checksums": checksums})

    async def control(self, request: Request) -> Response:
        """Pause, load, name, resume."""
        name = request.path_params["control"]
        query = "".join(f"?{key}={value}" for key, value in request.query_params.items())
        self.said.append(f"{name}{query}")
        body = await request.json() if await request.body() else {}
        match name:
            case "pause":
                self._running = anyio.Event()
            case "pause_generation":
                self.said[-1] += f"={body['mode']}"
                self._running = anyio.Event()
            case "resume" | "continue_generation":
                self._running.set()
            case "collective_rpc":
                assert body["method"] == "reload_weights"
                self._load(body["kwargs"]["weights_path"])
            case "update_weights_from_disk":
                self._load(body["model_path"])
                self._rename(body["weight_version"])
                return JSONResponse({"success": True, "message": ""})
            case "update_weight_version":
                self._rename(body["new_version"])
            case _:
                return JSONResponse({"detail": "Not Found"}, status_code=404)
        return JSONResponse({})

    def _rename(self, version: str) -> None:
        self.version = version if self.renames else self.version

    def _load(self, path: str) -> None:
        """Take the weights at ``path``, and fail where there are none."""
        self.model = self.model.load(path)


def _usage(prompt: int, completion: int) -> dict[str, int]:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return {**counts, "total_tokens": prompt + completion}


@contextmanager
def served(app: Any) -> Iterator[str]:
    """Yield the URL at which ``app`` answers until the body ends."""
    # Whoever connects before the server has begun waits in the socket's queue.
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on"))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        listening.close()
