"""Tool calls in what a model said, in the forms that the chat templates of common models teach."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from trinity_buffer.errors import InvalidArgumentError

Tools = Sequence[Mapping[str, Any]]

_ID_LETTERS = 9
"""Of an id: the templates of Mistral accept no other length."""

_DECODER = json.JSONDecoder(strict=False)  # models write line breaks into strings
_CONSTANTS = {"True": True, "False": False, "None": None}  # as templates write them


class _Span(NamedTuple):
    """A part of a text that is no content: a call, or the header of a message."""

    begin: int
    end: int
    name: str | None = None
    arguments: Mapping[str, Any] = {}
    id: str | None = None


def tool_calls_in(text: str, tools: Tools, turn: int = 0) -> tuple[str, list[dict[str, Any]]]:
    """Return ``text`` without the calls in it, and the calls in the form of the OpenAI dialect.

    What cannot be read as a call stays in the text.

    Args:
        text: what a model said, with its special tokens.
        tools: those that were offered to it.
        turn: number from which the ids of the calls are made.
    """
    read = next(read for marker, read in _FORMS if marker in text)
    spans = list(read(text, tools))
    calls = [span for span in spans if span.name is not None]
    if not calls:
        return text, []
    begins, ends = [span.begin for span in spans], [span.end for span in spans]
    pieces = zip([0, *ends], [*begins, len(text)], strict=True)
    rest = "".join(text[begin:end] for begin, end in pieces)
    return rest, [
        {
            "id": call.id or _id(f"{turn} {number} {text}"),
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": json.dumps(call.arguments, ensure_ascii=False),
            },
        }
        for number, call in enumerate(calls)
    ]


def with_decoded_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``message`` with the arguments of its tool calls as chat templates expect them.

    The OpenAI dialect has JSON texts, which a template would encode once more.

    Raises:
        InvalidArgumentError: the arguments of a call are no JSON object.
    """
    if not message.get("tool_calls"):
        return dict(message)
    return {**message, "tool_calls": [_decoded(call) for call in message["tool_calls"]]}


def _decoded(call: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _decoded(call["function"])}
    arguments = _arguments(call.get("arguments"))
    if arguments is None:
        raise InvalidArgumentError(
            f"the arguments of the tool call {call.get('name')!r} are no JSON object: "
            f"{call['arguments']!r:.80}"
        )
    return {**call, "arguments": arguments}


def _arguments(given: Any) -> Mapping[str, Any] | None:
    """Return arguments as an object; None if they are something else."""
    if isinstance(given, str) and given.strip():
        given, _ = _json_at(given.strip(), 0)
        return given if isinstance(given, dict) else None
    return given if isinstance(given, Mapping) else None if given else {}


def _json_at(text: str, begin: int) -> tuple[Any, int]:
    """Return the JSON value that begins there, and where it ends; None if there is none."""
    try:
        return _DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None, begin


def _call(value: Any, begin: int, end: int) -> Iterator[_Span]:
    """Yield the call that a JSON object with a name and arguments stands for."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return
    arguments = _arguments(value.get("arguments", value.get("parameters")))
    if arguments is not None:
        given = value.get("id")
        yield _Span(begin, end, value["name"], arguments, given if isinstance(given, str) else None)


def _named(
    name: str, arguments: Any, begin: int, end: int, call_id: str | None = None
) -> Iterator[_Span]:
    """Yield the call of a name that stands before its arguments."""
    if isinstance(arguments, dict):
        yield _Span(begin, end, name, arguments, call_id)


def _id(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:_ID_LETTERS]


def _tagged(text: str, _: Tools) -> Iterator[_Span]:
    """Yield calls as of Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}``."""
    for opening in re.finditer(r"<tool_call>\s*", text):
        value, end = _json_at(text, opening.end())
        if closing := re.compile(r"\s*</tool_call>").match(text, end):
            end = closing.end()
        yield from _call(value, opening.start(), end)


_FUNCTION = re.compile(
    r"(?:<tool_call>\s*)?<function=([^>\s]{1,256})>(.*?)</function>(?:\s*</tool_call>)?", re.DOTALL
)
_PARAMETER = re.compile(r"<parameter=([^>\s]{1,256})>\n?(.*?)\n?</parameter>", re.DOTALL)


def _marked_up(text: str, tools: Tools) -> Iterator[_Span]:
    """Yield calls as of Qwen3-Coder: ``<function=NAME><parameter=KEY>VALUE</parameter>``."""
    for found in _FUNCTION.finditer(text):
        name, body = found.groups()
        if _PARAMETER.sub("", body).strip():
            continue
        types = _types(name, tools)
        arguments = {
            key: _value(text, types.get(key, ())) for key, text in _PARAMETER.findall(body)
        }
        yield _Span(found.start(), found.end(), name, arguments)


def _types(name: str, tools: Tools) -> dict[str, list[Any]]:
    """Return the types of the parameters of a tool, as far as its schema says them."""
    for tool in map(_function, tools):
        if tool.get("name") == name:
            properties = (tool.get("parameters") or {}).get("properties") or {}
            return {key: [*_types_of(schema)] for key, schema in properties.items()}
    return {}


def _types_of(schema: Any) -> Iterator[Any]:
    """Yield the types that a JSON schema allows; ``Optional[int]`` is ``anyOf`` two of them."""
    if isinstance(schema, Mapping):  # else True: anything goes
        said = schema.get("type") or []
        yield from [said] if isinstance(said, str) else said
        for choice in schema.get("anyOf") or schema.get("oneOf") or ():
            yield from _types_of(choice)


def _value(text: str, types: Sequence[Any]) -> Any:
    if not types or "string" in types:
        return text
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    try:
        return json.loads(text)
    except ValueError:
        return text


_NAME = re.compile(r"([\w.-]++)\s*+(?:\[CALL_ID\]\s*+(\w++)\s*+)?(?:\[ARGS\]\s*+)?(?=\{)")


def _listed(text: str, _: Tools) -> Iterator[_Span]:
    """Yield calls as of Mistral: ``[TOOL_CALLS]``, then a list of them, or a name and arguments."""
    for opening in re.finditer(r"\[TOOL_CALLS\]\s*", text):
        if head := _NAME.match(text, opening.end()):
            value, end = _json_at(text, head.end())
            yield from _named(head[1], value, opening.start(), end, head[2])
            continue
        values, end = _json_at(text, opening.end())
        calls = values if isinstance(values, list) else [values]
        begins = [opening.start(), *[end] * len(calls)]
        spans = [
            span for at, one in zip(begins, calls, strict=False) for span in _call(one, at, end)
        ]
        yield from spans if len(spans) == len(calls) else ()


def _in_channels(text: str, _: Tools) -> Iterator[_Span]:
    """Yield calls as of gpt-oss, ``... to=functions.NAME ...<|message|>{...}``, and all headers."""
    begin = 0
    for end in re.finditer(r"<\|(?:end|call|return)\|>|\Z", text):
        header, marker, body = text[begin : end.start()].partition("<|message|>")
        recipient = re.search(r"to=functions\.([\w.-]+)", header)
        if recipient:
            value = _json_at(body.strip(), 0)[0]
            yield from _named(recipient[1], value, begin, end.end())
        elif marker and "to=" not in header:
            yield _Span(begin, end.start() - len(body))
        begin = end.end()


def _plain(text: str, tools: Tools) -> Iterator[_Span]:
    """Yield calls as of Llama 3: all of the text, or what follows ``<|python_tag|>``, is calls."""
    before, tag, _ = text.partition("<|python_tag|>")
    begin = 0 if not tag else len(before)
    at, offered = begin + len(tag), {tool.get("name") for tool in map(_function, tools)}
    spans: list[_Span] = []
    while (opening := re.compile(r"[\s;,]*(?=\{)").match(text, at)) is not None:
        value, end = _json_at(text, opening.end())
        found = list(_call(value, at if spans else begin, end))
        if not found or not (tag or found[0].name in offered):
            break
        spans += found
        at = end
    if tag or not text[at:].strip():
        yield from spans


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = tool.get("function")
    return inner if isinstance(inner, Mapping) else tool


_FORMS = (
    ("<|channel|>", _in_channels),
    ("[TOOL_CALLS]", _listed),
    ("<function=", _marked_up),
    ("<tool_call>", _tagged),
    ("", _plain),
)
"""Marker -> how the calls of a text that holds it are read; the first one counts."""
