"""A conversation: its messages, and the exact tokens that a model saw and said.

A model's chat template makes prompts of messages, and messages and tool calls of tokens. Tool calls
are read in the forms that the chat templates of common models teach.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from hashlib import sha256
from typing import Any, NamedTuple

from jinja2 import TemplateError

from trinity_buffer.errors import InferenceServerError, InvalidArgumentError
from trinity_buffer.experience import Experience
from trinity_buffer.sampling import MODE, SEGMENTS

_LOG = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]


def require_messages(messages: Iterable[Any]) -> list[Any]:
    """Return ``messages`` as a list, or raise InvalidArgumentError if they are none."""
    listed = [messages] if isinstance(messages, str) else list(messages)
    if not all(isinstance(message, Mapping) for message in listed):
        raise InvalidArgumentError(
            f"messages={messages!r:.100}: a conversation begins with a list of messages, such as "
            "[{'role': 'user', 'content': '2 + 2?'}]"
        )
    return listed


TEXT_PARTS = dict.fromkeys(("text", "input_text", "output_text"), "text")
TEXT_PARTS |= {"refusal": "refusal", "thinking": "thinking"}
"""Types of content parts that are texts -> the key of the text."""


def as_texts(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages, the content parts of each joined into one text.

    Raises:
        InvalidArgumentError: they are no messages, or a part is a picture, a sound or the like,
            which tokens do not hold.
    """
    messages = require_messages(messages)
    texts = [dict(message) for message in messages]
    for number, message in enumerate(texts):
        if isinstance(parts := message.get("content"), list):
            message["content"] = "\n".join(_text_of(part, number) for part in parts)
    return texts


def _text_of(part: Any, number: int) -> str:
    """Return the text of a content part of the message ``number``."""
    if isinstance(part, str):
        return part
    kind = part.get("type", next(iter(part), "part")) if isinstance(part, Mapping) else type(part)
    text = part.get(TEXT_PARTS[kind]) if kind in TEXT_PARTS else None
    if not isinstance(text, str):
        raise InvalidArgumentError(
            f"messages[{number}] holds a part {str(kind)!r:.40}, which is no text: tokens are all "
            "that is stored of messages, and a model would be trained without it"
        )
    return text


REASONING = ("reasoning", "reasoning_content")
"""Where a message holds the reasoning; vLLM has used both names."""


def reasoning_in(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reasoning that a server took out of the text of a message, by its key."""
    return {key: message[key] for key in REASONING if message.get(key)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What a model said once, in its own tokens.

    Attributes:
        prompt_ids: all tokens that it saw before.
        token_ids: what it said.
        logprobs: of each of ``token_ids``, as sampled; None: not known.
        text: what it said, decoded.
        tool_calls: tools that it called, in the form of the OpenAI dialect.
        reasoning: what a server took out of the text as its reasoning, under the server's key.
        finish_reason: why it stopped: ``"stop"``, ``"length"``, ``"tool_calls"``, ...
        weight_version: name of the weights, as the server tells; None: it does not.
        later_weight_version: name of the weights at the end, if they changed meanwhile.
        weight_checksum: of the weights ``weight_version``.
        logprobs_mode: whether the log-probs are those before temperature, top-p and
            their like (``"raw_logprobs"``) or after.
        sampling: the options that it was sampled with, such as ``{"temperature": 0.7}``, without
            those that change no probabilities; None: there were none.
        prompt_text: what the chat template wrote for the prompt; None: it was not applied here.
    """

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float] | None
    text: str = ""
    tool_calls: Sequence[Mapping[str, Any]] = ()
    reasoning: Mapping[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    weight_version: str | None = None
    later_weight_version: str | None = None
    weight_checksum: str | None = None
    logprobs_mode: str | None = None
    sampling: Mapping[str, Any] | None = None
    prompt_text: str | None = None

    def sampling_segment(self) -> dict[str, Any] | None:
        """Return the entry of its tokens in ``info["sampling_segments"]``; None: they have none."""
        if not self.sampling:
            return None
        return self._segment(**self.sampling, **{MODE: self.logprobs_mode})

    def weight_segment(self) -> dict[str, Any]:
        """Return the entry of its tokens in ``info["weight_segments"]``."""
        return self._segment(
            version=self.weight_version,
            later_version=self.later_weight_version,
            checksum=self.weight_checksum,
        )

    def _segment(self, **marks: Any) -> dict[str, Any]:
        """Return where its tokens are in its run, and those of ``marks`` that are known."""
        begin = len(self.prompt_ids)
        known = {key: value for key, value in marks.items() if value is not None}
        return {"begin": begin, "end": begin + len(self.token_ids), **known}

    def message(self) -> dict[str, Any]:
        """Return it as a message of the assistant."""
        spoken = SaidMessage(role="assistant", content=self.text, **self.reasoning)
        if self.tool_calls:
            spoken["tool_calls"] = [dict(call) for call in self.tool_calls]
        spoken.completion = self
        return spoken


@contextmanager
def understanding(root: str) -> Iterator[None]:
    """Read what the server at ``root`` answers inside the context.

    Raises:
        InferenceServerError: it cannot be read.
    """
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        why = f"{type(error).__name__}: {error}"
        raise InferenceServerError(f"{root}: its answer is no whole completion ({why})") from error


class SaidMessage(dict[str, Any]):
    """A message that knows its tokens, so that a model need not tokenise it again.

    Attributes:
        completion: what was said.
    """

    completion: Completion


class Conversation:
    """Messages for the model, and beside them the exact tokens of every turn.

    Call `heard` with what others say and `said` with each `Completion`; pass `messages` to the
    model. `experiences` returns what can be trained on: one experience as long as the prompt of
    each turn continues the tokens before it, and a new one whenever it does not (for example when a
    chat template drops the thoughts of an earlier turn).

    Attributes:
        messages: the whole conversation, in the form of the OpenAI dialect.
        turns: what the model said.
    """

    def __init__(self, messages: Messages = (), *, tools: Tools = ()) -> None:
        self.messages: list[dict[str, Any]] = []
        self.tools = [dict(tool) for tool in tools]
        self.turns: list[Completion] = []
        self._open_calls: list[str] = []
        for message in require_messages(messages):
            self.heard(message)

    def heard(self, message: Mapping[str, Any]) -> None:
        """Take in a message of the system, the user or a tool.

        Raises:
            InvalidArgumentError: a message of the assistant, or the answer to a call that was not
                made.
        """
        role = message.get("role")
        if role == "assistant":
            raise InvalidArgumentError(
                "a message of the assistant has no tokens: give the Completion to said()"
            )
        if role == "tool":
            call = message.get("tool_call_id")
            if call not in self._open_calls:
                raise InvalidArgumentError(
                    f"tool_call_id={call!r} answers no call; open are {self._open_calls}. What "
                    "answers none is heard in the role 'user'"
                )
            self._open_calls.remove(call)
        self.messages.append(dict(message))

    def said(self, completion: Completion) -> Completion:
        """Take in what the model said, and return it.

        Raises:
            InvalidArgumentError: its tokens and log-probs do not fit each other, it said nothing,
                or a tool call before it was not answered.
        """
        count = len(completion.token_ids)
        if not completion.prompt_ids or not count:
            raise InvalidArgumentError(
                f"a completion of {len(completion.prompt_ids)} prompt tokens and {count} tokens "
                "cannot be trained: each must be at least one"
            )
        if completion.logprobs is not None and len(completion.logprobs) != count:
            raise InvalidArgumentError(
                f"a completion has {count} tokens and {len(completion.logprobs)} log-probs"
            )
        if self._open_calls:
            raise InvalidArgumentError(
                f"the tool calls {self._open_calls} are not answered: give heard() a message with "
                "role='tool' for each"
            )
        self.turns.append(completion)
        self.messages.append(completion.message())
        self._open_calls = [str(call.get("id")) for call in completion.tool_calls]
        return completion

    def experiences(
        self, reward: float | None, *, info: Mapping[str, Any] | None = None
    ) -> list[Experience]:
        """Return the experiences to train on, in the order of the turns.

        ``action_mask`` is True on what the model said. Each experience carries the reward of the
        whole run. Its ``info`` gets ``finish_reason`` of its last turn and, where a server told
        them, ``weight_versions``: one for each of its turns; if they are numbers,
        ``model_version`` is the oldest. ``weight_segments`` says which tokens ``[begin, end)`` each
        version has said, with the checksum of the weights, and ``sampling_segments`` with which
        options those were sampled that have some.

        Raises:
            InvalidArgumentError: the model said nothing yet.
        """
        if not self.turns:
            raise InvalidArgumentError("the model said nothing yet: there is nothing to train")
        made = [
            experience_of(turns, reward, messages=self.messages, tools=self.tools)
            for turns in stretches_of(self.turns)
        ]
        for experience in made:
            experience.info |= info or {}
        return made


def stretches_of(turns: Sequence[Completion]) -> list[list[Completion]]:
    """Return the turns of each experience: the prompt of each continues all tokens before it."""
    stretches: list[list[Completion]] = []
    tokens: list[int] = []
    for turn in turns:
        # By token: an equal text may have been tokenised otherwise.
        if stretches and list(turn.prompt_ids[: len(tokens)]) == tokens:
            stretches[-1].append(turn)
        else:
            stretches.append([turn])
            tokens = []
        tokens += [*turn.prompt_ids[len(tokens) :], *turn.token_ids]
    if len(stretches) > 1:
        warn_once(
            "the prompt of a turn does not begin with all tokens before it: its run becomes "
            "several experiences, and so will others. Unless your turns rewrite the past on "
            "purpose, the chat template drops something, or the tokenizer makes other tokens of "
            "what the model said"
        )
    return stretches


def experience_of(
    turns: Sequence[Completion], reward: float | None, *, messages: Messages, tools: Tools
) -> Experience:
    """Return a stretch of turns as one experience; see `Conversation.experiences`."""
    prompt_length = end = len(turns[0].prompt_ids)
    mask: list[bool] = []
    logprobs: list[float] = []
    for turn in turns:
        # What came between belongs to others: seen by the model, and not trained.
        between = len(turn.prompt_ids) - end
        mask += [False] * between + [True] * len(turn.token_ids)
        logprobs += [0.0] * between + list(() if turn.logprobs is None else turn.logprobs)
        end = len(turn.prompt_ids) + len(turn.token_ids)
    # One turn without log-probs leaves the whole experience without: zeros would be believed.
    are_known = all(turn.logprobs is not None for turn in turns)
    return Experience(
        tokens=[*turns[-1].prompt_ids, *turns[-1].token_ids],
        prompt_length=prompt_length,
        reward=reward,
        action_mask=mask,
        logprobs=logprobs if are_known else None,
        info=_origin(turns),
        response_text="".join(turn.text for turn in turns),
        messages=[dict(message) for message in messages],
        tools=[dict(tool) for tool in tools] or None,
    )


def _origin(turns: Sequence[Completion]) -> dict[str, Any]:
    """Return how the turns came about: why they ended, and with which weights."""
    own = {"finish_reason": turns[-1].finish_reason, MODE: turns[-1].logprobs_mode}
    info: dict[str, Any] = {key: value for key, value in own.items() if value is not None}
    hot = [segment for turn in turns if (segment := turn.sampling_segment()) is not None]
    if hot:
        info[SEGMENTS] = hot
    versions = [turn.weight_version for turn in turns if turn.weight_version is not None]
    if len(versions) == len(turns):
        info["weight_versions"] = versions
        unnumbered = [version for version in versions if not version.isdecimal()]
        if unnumbered:
            warn_once(
                "a server calls its weights %r, which is no number: what they say has no policy "
                "version, and never counts as stale. `trinity-buffer sync-weights` has it load "
                "what the trainer publishes, and number it",
                unnumbered[0],
            )
        else:
            info["model_version"] = min(map(int, versions))
        info["weight_segments"] = [turn.weight_segment() for turn in turns]
    return info


@cache
def warn_once(message: str, *arguments: str) -> None:
    """Warn, once in a process of the same."""
    _LOG.warning(message, *arguments)


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
    # Headers of messages are cut out with the calls.
    begins, ends = [span.begin for span in spans], [span.end for span in spans]
    pieces = zip([0, *ends], [*begins, len(text)], strict=True)
    rest = "".join(text[begin:end] for begin, end in pieces)
    made = []
    for number, call in enumerate(calls):
        function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
        # Made of the text: the same turn, read again, has the same ids.
        own = sha256(f"{turn} {number} {text}".encode(errors="replace")).hexdigest()
        made.append({"id": call.id or own[:_ID_LETTERS], "type": "function", "function": function})
    return rest, made


def _decoded(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call with its arguments as chat templates expect them.

    The OpenAI dialect has JSON texts, which a template would encode once more.

    Raises:
        InvalidArgumentError: its arguments are no JSON object.
    """
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _decoded(call["function"])}
    arguments = _arguments(call.get("arguments"))
    if arguments is None:
        raise InvalidArgumentError(
            f"the arguments of the tool call {call.get('name')!r} are no JSON object: "
            f"{call['arguments']!r:.80}"
        )
    return {**call, "arguments": arguments}


def _arguments(value: Any) -> Mapping[str, Any] | None:
    """Return arguments as an object; None if they are something else."""
    if isinstance(value, str) and value.strip():
        value, _ = _json_at(value.strip(), 0)
        return value if isinstance(value, dict) else None
    return value if isinstance(value, Mapping) else None if value else {}


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
        own = value.get("id")
        yield _Span(begin, end, value["name"], arguments, own if isinstance(own, str) else None)


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
    for match in _FUNCTION.finditer(text):
        name, body = match.groups()
        if _PARAMETER.sub("", body).strip():
            continue
        types = _types(name, tools)
        texts = _PARAMETER.findall(body)
        arguments = {key: _value(text, types.get(key, ())) for key, text in texts}
        yield _Span(match.start(), match.end(), name, arguments)


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
        kinds = schema.get("type") or []
        yield from [kinds] if isinstance(kinds, str) else kinds
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
            if isinstance(value, dict):
                yield _Span(opening.start(), end, head[1], value, head[2])
            continue
        values, end = _json_at(text, opening.end())
        calls = values if isinstance(values, list) else [values]
        begins = [opening.start(), *[end] * len(calls)]
        pairs = zip(begins, calls, strict=False)
        spans = [span for at, call in pairs for span in _call(call, at, end)]
        yield from spans if len(spans) == len(calls) else ()


def _in_channels(text: str, _: Tools) -> Iterator[_Span]:
    """Yield calls as of gpt-oss, ``... to=functions.NAME ...<|message|>{...}``, and all headers."""
    begin = 0
    for end in re.finditer(r"<\|(?:end|call|return)\|>|\Z", text):
        header, marker, body = text[begin : end.start()].partition("<|message|>")
        recipient = re.search(r"to=functions\.([\w.-]+)", header)
        if recipient:
            value = _json_at(body.strip(), 0)[0]
            if isinstance(value, dict):
                yield _Span(begin, end.end(), recipient[1], value)
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
        spans_of_call = list(_call(value, at if spans else begin, end))
        if not spans_of_call or not (tag or spans_of_call[0].name in offered):
            break
        spans += spans_of_call
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


_MARK = "TRINITYBUFFERMARK"
"""Stands for what a model said, where is looked for what a template writes behind it."""


class ChatFormat:
    """The chat template of a tokenizer.

    Args:
        tokenizer: of transformers.
        ends: tokens with which a model ends its turn.
    """

    def __init__(self, tokenizer: Any, ends: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._end_ids = frozenset(ends)
        self._has_compared_tools = False

    def prompt(self, messages: Messages, tools: Tools) -> tuple[list[int], str]:
        """Return the prompt of a conversation: its tokens, and the text of all messages.

        What the model said in it is not tokenised again, as long as its messages are those of
        `Completion.message`, and the template repeats what was there before.

        Raises:
            InvalidArgumentError: the template cannot write such messages.
        """
        text = rendered(self._tokenizer, messages, tools)
        if tools and not self._has_compared_tools:
            self._has_compared_tools = True  # they are written always, or never
            with suppress(InvalidArgumentError):  # it writes such a conversation only with tools
                if rendered(self._tokenizer, messages) == text:
                    warn_once(
                        "the chat template writes no tools: the model sees none of those that it "
                        "is given (tools=). Take a template that writes them, or describe them in "
                        "a message"
                    )
        try:
            ids = self._continued(text, messages, tools)
        except InvalidArgumentError:  # a template that writes only conversations that end otherwise
            ids = None
        return self._ids(text) if ids is None else ids, text

    def read(self, made: Completion, tools: Tools) -> Completion:
        """Return a completion with the tool calls that its tokens hold."""
        if not tools or not made.token_ids:
            return made
        ids = made.token_ids[:-1] if self._is_ended(made) else made.token_ids
        text, calls = tool_calls_in(self._text(ids), tools, turn=len(made.prompt_ids))
        if not calls:
            return made
        for special in self._special.values():
            text = text.replace(special, "")
        reason = "tool_calls" if made.finish_reason == "stop" else made.finish_reason
        return replace(made, text=text.strip(), tool_calls=calls, finish_reason=reason)

    def _continued(self, text: str, messages: Messages, tools: Tools) -> list[int] | None:
        """Return the tokens up to the last thing that the model said, and what follows it.

        None if there is no such thing, or the template writes the past otherwise than it was.
        """
        at, spoken = _last_said(messages)
        if spoken is None or spoken.prompt_text is None or not text.startswith(spoken.prompt_text):
            return None
        before = messages[:at]
        if rendered(self._tokenizer, before, tools) != spoken.prompt_text:
            return None
        # A mark in place of the text shows what the template itself writes around it.
        marked = _marked(messages[at])
        turn = rendered(self._tokenizer, [*before, marked], tools, ask=False)
        whole = rendered(self._tokenizer, [*before, marked, *messages[at + 1 :]], tools)
        end, rest = self._split(turn.rpartition(_MARK)[2], whole.rpartition(_MARK)[2], spoken)
        written = text[len(spoken.prompt_text) :].removesuffix(end + rest)
        if _MARK not in whole or not text.endswith(end + rest) or not _holds(written, spoken):
            return None
        is_known = self._end_texts(spoken).fullmatch(end) is not None
        if not is_known and (spoken.tool_calls or (self._is_ended(spoken) and end.strip())):
            return None
        if not (is_known and self._is_ended(spoken)):
            rest = end + rest
        return [*spoken.prompt_ids, *spoken.token_ids, *self._ids_behind(spoken, rest)]

    def _split(self, turn: str, whole: str, spoken: Completion) -> tuple[str, str]:
        """Return how a template ends the turn ``said``, and what it writes after that.

        Args:
            turn: what it writes behind the text of that turn, or the last argument of its last
                call, if nothing follows.
            whole: the same, and what follows.
        """
        ends = self._end_texts(spoken)
        ending = ends.search(turn) if spoken.tool_calls else ends.match(whole)
        if ending is None:
            return turn, whole.removeprefix(turn)
        ended = turn[: ending.end()] if spoken.tool_calls else ending[0]
        return ending[0], whole.removeprefix(ended)

    def _is_ended(self, spoken: Completion) -> bool:
        """Return whether the last token of a turn ended it."""
        last, is_stop = spoken.token_ids[-1], spoken.finish_reason in ("stop", "tool_calls")
        return last in self._end_ids or (is_stop and last in self._special)

    def _end_texts(self, spoken: Completion) -> re.Pattern[str]:
        """Return the pattern of the end of a turn, with the blanks before it."""
        ends = {*self._end_ids, *(spoken.token_ids[-1:] if self._is_ended(spoken) else ())}
        texts = [text for text in (self._text([end]) for end in ends) if text.strip()]
        return re.compile(rf"\s*(?:{'|'.join(map(re.escape, texts)) or '(?!)'})")

    def _ids_behind(self, spoken: Completion, text: str) -> list[int]:
        """Return the tokens of ``text``, as they are behind those of a turn."""
        last = spoken.token_ids[-1]
        ids = self._ids(self._text([last]) + text) if self._is_ended(spoken) else []
        return ids[1:] if ids[:1] == [last] else self._ids(text)

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _text(self, ids: Sequence[int]) -> str:
        return decoded(self._tokenizer, ids, skip_special_tokens=False)

    @cached_property
    def _special(self) -> dict[int, str]:
        """The special tokens, which a text does not show, and how they are written."""
        added = self._tokenizer.added_tokens_decoder.items()
        return {token: str(text) for token, text in added if text.special}


def decoded(tokenizer: Any, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """Return the text of tokens as it is: some tokenizers take out blanks before punctuation."""
    kept = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
    return str(tokenizer.decode(ids, **kept))


def rendered(
    tokenizer: Any, messages: Messages, tools: Tools = (), *, ask: bool = True, **options: Any
) -> str:
    """Return a conversation as text, by the chat template of ``tokenizer``.

    Args:
        ask: end with the beginning of the model's answer.
        options: of the template's own, such as ``enable_thinking``.

    Raises:
        InvalidArgumentError: it cannot write such messages, or they hold more than texts.
    """
    texts = as_texts(messages)
    decoded = []
    for message in texts:
        calls = {"tool_calls": list(map(_decoded, message.get("tool_calls") or ()))}
        decoded.append({**message, **calls} if message.get("tool_calls") else message)
    options["add_generation_prompt"] = ask
    try:
        try:
            return _applied(tokenizer, decoded, tools, options)
        except TypeError:  # as DeepSeek's, which takes arguments as texts
            return _applied(tokenizer, texts, tools, options)
    except (TemplateError, TypeError, ValueError) as error:
        what = "the chat template cannot write this conversation"
        raise InvalidArgumentError(f"{what} ({error})") from error


def _applied(tokenizer: Any, messages: list[Any], tools: Tools, options: Mapping[str, Any]) -> str:
    offered = [dict(tool) for tool in tools] or None
    return str(tokenizer.apply_chat_template(messages, tools=offered, tokenize=False, **options))


def _last_said(messages: Messages) -> tuple[int, Completion | None]:
    """Return the last message that a model said, as it said it, and its tokens."""
    for at, message in reversed([*enumerate(messages)]):
        if isinstance(message, SaidMessage) and message == message.completion.message():
            return at, message.completion
    return 0, None


def _marked(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``message`` with a mark where its text, or the arguments of its last call, end."""
    if not message.get("tool_calls"):
        return {**message, "content": _MARK}
    *others, last = message["tool_calls"]
    function = {**last["function"], "arguments": json.dumps({_MARK: _MARK})}
    return {**message, "tool_calls": [*others, {**last, "function": function}]}


def _holds(written: str, spoken: Completion) -> bool:
    """Return whether a template has written all of the text and the calls of what was said."""
    letters = "".join(written.split())
    names = [call["function"]["name"] for call in spoken.tool_calls]
    return all("".join(part.split()) in letters for part in (spoken.text, *names))
