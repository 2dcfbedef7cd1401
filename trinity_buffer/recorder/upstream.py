"""What is asked of the server behind a recorder, and what of its answers the client asked for."""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from trinity_buffer.errors import InferenceServerError, InvalidArgumentError
from trinity_buffer.explorer.completions import (
    ASKED_FOR_CHAT,
    ASKED_FOR_TEXT,
    chat_completion,
    pinned,
    reasoning_in,
    text_completion,
)
from trinity_buffer.explorer.conversation import Completion

_LOG = logging.getLogger(__name__)

CHAT = "/v1/chat/completions"
OURS = ("token_ids", "prompt_token_ids")


def require_request(body: Any) -> None:
    """Raise InvalidArgumentError unless a request is well-formed, as far as it is read here."""
    if not isinstance(body, dict):
        raise InvalidArgumentError("a request must be a JSON object")
    if not isinstance(body.get("stream_options") or {}, dict):
        raise InvalidArgumentError("stream_options must be a JSON object")
    for key in ("messages", "tools"):
        if not _is_objects(body.get(key)):
            raise InvalidArgumentError(f"{key} must be a list of JSON objects")
    if not all(map(_has_calls, body.get("messages") or ())):
        raise InvalidArgumentError("tool_calls must be a list of tool calls")


def _is_objects(value: Any) -> bool:
    """Return whether it is a list of JSON objects, or nothing."""
    return not value or (isinstance(value, list) and all(isinstance(item, dict) for item in value))


def _has_calls(message: Mapping[str, Any]) -> bool:
    """Return whether what a message has for tool calls are some."""
    calls = message.get("tool_calls")
    return _is_objects(calls) and _is_objects([call.get("function") or {} for call in calls or ()])


@contextmanager
def understanding(root: str) -> Iterator[None]:
    """Read what the server at ``root`` answers inside the context.

    Raises:
        InferenceServerError: it cannot be read.
    """
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise InferenceServerError(
            f"{root}: its answer is no whole completion ({reason})"
        ) from error


def asked_of_upstream(path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request that brings ids and log-probs, with no default left to the server."""
    asked: dict[str, Any] = dict(ASKED_FOR_CHAT if path == CHAT else ASKED_FOR_TEXT)
    if body.get("logprobs"):
        asked.pop("logprobs")  # the client wants as many as it says
    if body.get("tools") and body.get("stream"):
        asked["stream"] = False  # a streamed tool call would lose its ids
        body = {key: value for key, value in body.items() if key != "stream_options"}
    elif body.get("stream"):
        # By its count of tokens, lost ids are noticed.
        asked["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
    if any(map(_is_strict, body.get("tools") or ())):
        _say_strict()
        asked["tools"] = [_without_strict(tool) for tool in body["tools"]]
    return {**pinned(body), **asked}


def _is_strict(tool: Mapping[str, Any]) -> bool:
    return bool(tool.get("strict") or (tool.get("function") or {}).get("strict"))


def _without_strict(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool whose arguments the server does not force into their schema.

    Some agents ask for that of every tool. It would restrict what is sampled, which no log-prob
    shows; without it their calls are those of the model.
    """
    plain = {key: value for key, value in tool.items() if key != "strict"}
    if isinstance(function := plain.get("function"), Mapping):
        plain["function"] = {key: value for key, value in function.items() if key != "strict"}
    return plain


@cache  # once for a process
def _say_strict() -> None:
    _LOG.warning(
        "tools with strict=true are asked for without it: a server that forces their arguments "
        "into the schema samples otherwise than its log-probs say"
    )


def wants_usage(body: Mapping[str, Any]) -> bool:
    """Return whether a client asks that its stream ends with the usage."""
    return bool((body.get("stream_options") or {}).get("include_usage"))


def is_usage(chunk: Mapping[str, Any]) -> bool:
    """Return whether a chunk of a stream brings nothing but the usage."""
    return bool(chunk.get("usage")) and not chunk.get("choices")


def completions_of(path: str, answer: Mapping[str, Any]) -> list[Completion]:
    """Return the choices of an answer, in the order of their indexes; see `understanding`.

    Raises:
        ValueError: there is no choice, or one did not end.
    """
    read = chat_completion if path == CHAT else text_completion
    choices = sorted(answer.get("choices") or (), key=lambda choice: choice.get("index", 0))
    if not choices or not all(choice.get("finish_reason") for choice in choices):
        raise ValueError("each answer needs a choice, and each choice a finish_reason")
    if not all(_has_calls(choice.get("message") or {}) for choice in choices):
        raise ValueError("tool_calls must be a list of tool calls")
    completions = [read(answer, choice) for choice in choices]
    for completion in completions:
        # An array takes only numbers: anything else in the lists is an error here.
        for ids in (completion.prompt_ids, completion.token_ids):
            array("q", ids or ())
        array("d", completion.logprobs or ())
    return completions


def stripped(answer: dict[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    """Take out of an answer, or a chunk of one, what the client has not asked for."""
    gone = [] if body.get("return_token_ids") else [*OURS]
    gone += [] if body.get("logprobs") else ["logprobs"]
    gone += ["usage"] if body.get("stream") and not wants_usage(body) else []
    for part in (answer, *(answer.get("choices") or ())):
        for key in gone:
            part.pop(key, None)
    return answer


def event(chunk: Mapping[str, Any]) -> bytes:
    """Return a chunk as a server-sent event."""
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def as_chunks(answer: Mapping[str, Any], *, usage: bool) -> list[bytes]:
    """Return a whole answer as a stream: a chunk of each choice and one that ends it, and usage."""
    # Clients that stream accept nothing but chunks, in name and in shape.
    top = {key: value for key, value in answer.items() if key not in ("choices", "usage", "object")}
    top["object"] = "chat.completion.chunk"
    chunks = []
    for choice in answer.get("choices") or ():
        delta = dict(choice.get("message") or {})
        if delta.get("tool_calls"):
            delta["tool_calls"] = [
                {"index": number, **call} for number, call in enumerate(delta["tool_calls"])
            ]
        rest = {key: value for key, value in choice.items() if key != "message"}
        chunks.append({**top, "choices": [{**rest, "delta": delta, "finish_reason": None}]})
        end = {"index": choice.get("index", 0), "delta": {}}
        chunks.append({**top, "choices": [{**end, "finish_reason": choice.get("finish_reason")}]})
    if usage:
        chunks.append({**top, "choices": [], "usage": answer.get("usage")})
    return [event(chunk) for chunk in chunks]


class StreamedAnswer:
    """Puts the chunks of a stream together to the answer that it is."""

    def __init__(self) -> None:
        self._top: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def take(self, chunk: Mapping[str, Any]) -> bool:
        """Take in a chunk; return whether it ends one of the choices.

        Raises:
            ValueError: it says that the answer failed.
        """
        if chunk.get("error"):
            raise ValueError(f"it broke off by {json.dumps(chunk['error']):.300}")
        if chunk.get("prompt_token_ids"):
            self._top["prompt_token_ids"] = chunk["prompt_token_ids"]
        if chunk.get("usage"):
            self._top["usage"] = chunk["usage"]
        ends = False
        for part in chunk.get("choices") or ():
            ends = self._take_choice(part) or ends
        return ends

    def _take_choice(self, part: Mapping[str, Any]) -> bool:
        index = part.get("index", 0)
        empty: dict[str, Any] = {"index": index, "text": "", "token_ids": [], "logprobs": None}
        empty["reasoning"] = {}
        choice = self._choices.setdefault(index, empty)
        delta = part.get("delta") or {}
        choice["text"] += part.get("text") or delta.get("content") or ""
        for key, text in reasoning_in(delta).items():
            choice["reasoning"][key] = choice["reasoning"].get(key, "") + text
        choice["token_ids"] += part.get("token_ids") or []
        if part.get("prompt_token_ids"):
            choice["prompt_token_ids"] = part["prompt_token_ids"]
        # Servers send the log-probs of each chunk; the answer has them joined.
        for key, values in (part.get("logprobs") or {}).items():
            if isinstance(values, Sequence):
                choice["logprobs"] = choice["logprobs"] or {}
                choice["logprobs"].setdefault(key, []).extend(values)
        if part.get("finish_reason"):
            choice["finish_reason"] = part["finish_reason"]
        return bool(part.get("finish_reason"))

    def answer(self) -> dict[str, Any]:
        """Return the whole answer, as it would have come without streaming."""
        choices = [
            {
                **choice,
                "message": {"role": "assistant", "content": choice["text"], **choice["reasoning"]},
            }
            for choice in self._choices.values()
        ]
        return {**self._top, "choices": choices}
