"""Prompts out of messages, and messages out of tokens, as a model's chat template has them."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, cached_property
from typing import Any, NamedTuple

from jinja2 import TemplateError

from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.explorer.conversation import Completion, SaidMessage, as_texts
from trinity_buffer.explorer.tool_calls import Tools, tool_calls_in, with_decoded_arguments

Messages = Sequence[Mapping[str, Any]]

_LOG = logging.getLogger(__name__)
_MARK = "TRINITYBUFFERMARK"
"""Stands for what a model said, where is looked for what a template writes behind it."""


class Prompt(NamedTuple):
    """What a model sees of a conversation.

    Attributes:
        ids: its tokens; those that the model said itself are those that were sampled.
        text: what the template makes of all messages.
    """

    ids: list[int]
    text: str


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

    def prompt(self, messages: Messages, tools: Tools) -> Prompt:
        """Return the prompt of a conversation.

        What the model said in it is not tokenised again, as long as its messages are those of
        `Completion.message`, and the template repeats what was there before.

        Raises:
            InvalidArgumentError: the template cannot write such messages.
        """
        text = rendered(self._tokenizer, messages, tools)
        if tools and not self._has_compared_tools:
            self._has_compared_tools = True  # they are written always, or never
            self._warn_of_unseen_tools(text, messages)
        try:
            ids = self._continued(text, messages, tools)
        except InvalidArgumentError:  # a template that writes only conversations that end otherwise
            ids = None
        return Prompt(self._ids(text) if ids is None else ids, text)

    def read(self, made: Completion, tools: Tools) -> Completion:
        """Return what a model said with the tool calls that are in it."""
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

    def _warn_of_unseen_tools(self, text: str, messages: Messages) -> None:
        with suppress(InvalidArgumentError):  # it writes such a conversation only with tools
            if rendered(self._tokenizer, messages) == text:
                warn_of_unseen_tools()

    def _continued(self, text: str, messages: Messages, tools: Tools) -> list[int] | None:
        """Return the tokens up to the last thing that the model said, and what follows it.

        None if there is no such thing, or the template writes the past otherwise than it was.
        """
        at, said = _last_said(messages)
        if said is None or said.prompt_text is None or not text.startswith(said.prompt_text):
            return None
        before = messages[:at]
        if rendered(self._tokenizer, before, tools) != said.prompt_text:
            return None
        marked = _marked(messages[at])
        turn = rendered(self._tokenizer, [*before, marked], tools, ask=False)
        whole = rendered(self._tokenizer, [*before, marked, *messages[at + 1 :]], tools)
        end, rest = self._split(turn.rpartition(_MARK)[2], whole.rpartition(_MARK)[2], said)
        written = text[len(said.prompt_text) :].removesuffix(end + rest)
        if _MARK not in whole or not text.endswith(end + rest) or not _holds(written, said):
            return None
        is_known = self._end_texts(said).fullmatch(end) is not None
        if not is_known and (said.tool_calls or (self._is_ended(said) and end.strip())):
            return None
        if not (is_known and self._is_ended(said)):
            rest = end + rest
        return [*said.prompt_ids, *said.token_ids, *self._ids_behind(said, rest)]

    def _split(self, turn: str, whole: str, said: Completion) -> tuple[str, str]:
        """Return how a template ends the turn ``said``, and what it writes after that.

        Args:
            turn: what it writes behind the text of that turn, or the last argument of its last
                call, if nothing follows.
            whole: the same, and what follows.
        """
        ends = self._end_texts(said)
        found = ends.search(turn) if said.tool_calls else ends.match(whole)
        if found is None:
            return turn, whole.removeprefix(turn)
        return found[0], whole.removeprefix(turn[: found.end()] if said.tool_calls else found[0])

    def _is_ended(self, said: Completion) -> bool:
        """Return whether the last token of a turn ended it."""
        last, is_stop = said.token_ids[-1], said.finish_reason in ("stop", "tool_calls")
        return last in self._end_ids or (is_stop and last in self._special)

    def _end_texts(self, said: Completion) -> re.Pattern[str]:
        """Return what matches an end of a turn, and the blanks before it."""
        ends = {*self._end_ids, *(said.token_ids[-1:] if self._is_ended(said) else ())}
        texts = [text for text in (self._text([end]) for end in ends) if text.strip()]
        return re.compile(rf"\s*(?:{'|'.join(map(re.escape, texts)) or '(?!)'})")

    def _ids_behind(self, said: Completion, text: str) -> list[int]:
        """Return the tokens of ``text``, as they are behind those of a turn."""
        last = said.token_ids[-1]
        ids = self._ids(self._text([last]) + text) if self._is_ended(said) else []
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


@cache  # once in a process
def warn_of_unseen_tools() -> None:
    """Warn, once in a process, of a chat template that writes no tools."""
    _LOG.warning(
        "the chat template writes no tools: the model sees none of those that it is given "
        "(tools=). Take a template that writes them, or describe them in a message"
    )


def decoded(tokenizer: Any, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """Return the text of tokens as it is: some tokenizers take out blanks before punctuation."""
    return str(
        tokenizer.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
    )


def rendered(
    tokenizer: Any, messages: Messages, tools: Tools = (), *, ask: bool = True, **options: Any
) -> str:
    """Return what the chat template of ``tokenizer`` makes of a conversation.

    Args:
        ask: end with the beginning of the model's answer.
        options: of the template's own, such as ``enable_thinking``.

    Raises:
        InvalidArgumentError: it cannot write such messages, or they hold more than texts.
    """
    texts = as_texts(messages)
    decoded = [with_decoded_arguments(message) for message in texts]
    options["add_generation_prompt"] = ask
    try:
        try:
            return _applied(tokenizer, decoded, tools, options)
        except TypeError:  # as DeepSeek's, which takes arguments as texts
            return _applied(tokenizer, texts, tools, options)
    except (TemplateError, TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"the chat template cannot write this conversation ({error})"
        ) from error


def _applied(tokenizer: Any, messages: list[Any], tools: Tools, options: Mapping[str, Any]) -> str:
    offered = [dict(tool) for tool in tools] or None
    return str(tokenizer.apply_chat_template(messages, tools=offered, tokenize=False, **options))


def _last_said(messages: Messages) -> tuple[int, Completion | None]:
    """Return the last message that a model said, as it said it, and its tokens."""
    for at in range(len(messages) - 1, -1, -1):
        message = messages[at]
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


def _holds(written: str, said: Completion) -> bool:
    """Return whether a template has written all of the text and the calls of what was said."""
    letters = "".join(written.split())
    names = [call["function"]["name"] for call in said.tool_calls]
    return all("".join(part.split()) in letters for part in (said.text, *names))
