"""Texts and conversations as token ids, by the tokenizer that the user names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from trinity_buffer.errors import InvalidArgumentError, InvalidExperienceError
from trinity_buffer.explorer.chat_format import rendered
from trinity_buffer.explorer.conversation import as_texts
from trinity_buffer.explorer.local_model import load_tokenizer

MEDIA = ("image", "images", "video", "videos", "audio", "audios", "multi_modal_inputs")
"""Columns of data sets beside messages, of which tokens hold nothing."""

Said = str | Sequence[Mapping[str, Any]]
"""A text, or the messages of a conversation."""


NOTHING: Mapping[str, Any] = MappingProxyType({})
"""Beside a text or messages."""


def tools_of(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools of a row of a data set, in the column that TRL names.

    Raises:
        InvalidExperienceError: it holds pictures, sounds or films.
    """
    media = [name for name in MEDIA if row.get(name)]
    if media:
        raise InvalidExperienceError(
            f"it has {media[0]}, and texts are all that is imported: a model would be trained "
            "without them"
        )
    tools = row.get("tools")
    return (json.loads(tools) if isinstance(tools, str) and tools else tools) or None


class Texts:
    """A tokenizer of transformers; None where the files hold tokens themselves.

    What is tokenised here may have been sampled as other tokens: no log-probability goes with it.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @cached_property
    def _tokenizer(self) -> Any:
        if self._folder is None:
            raise InvalidArgumentError(
                "these files hold texts and no tokens: give --tokenizer FOLDER"
            )
        if not self._folder.is_dir():  # or it would be looked for on the Hub, for a minute
            raise InvalidArgumentError(f"--tokenizer {self._folder}: there is no such folder")
        return load_tokenizer(self._folder)

    def prompt(self, messages: Said, row: Mapping[str, Any] = NOTHING) -> list[int]:
        """Return the tokens of a prompt; of messages, up to where the answer begins.

        Args:
            row: what the chat template is given beside messages, in the columns that TRL names.

        Raises:
            InvalidExperienceError: a message holds more than texts.
        """
        if isinstance(messages, str):
            return self._text(messages)
        return self._chat(messages, row, ask=True)

    def answer(self, prompt: Said, answered: Said, row: Mapping[str, Any] = NOTHING) -> list[int]:
        """Return the tokens of an answer to ``prompt``, with the one that ends it.

        Raises:
            InvalidExperienceError: the chat template changes the prompt once it is answered, or a
                message holds more than texts, is not of the assistant, or says nothing.
        """
        if isinstance(answered, str):
            if not isinstance(prompt, str):
                answered = [{"role": "assistant", "content": answered}]
            else:
                end = self._tokenizer.eos_token_id
                return self._text(answered) + ([] if end is None else [end])
        # All of them a model's: every token of an answer is trained.
        for message in _messages(answered):
            if message.get("role") != "assistant":
                raise InvalidExperienceError(
                    f"the answer has a message of role {message.get('role')!r:.40}, which would be "
                    "trained as if the model had said it: an answer has messages of role "
                    "'assistant'"
                )
            if message.get("content") is None and not message.get("tool_calls"):
                raise InvalidExperienceError(
                    "a message of the assistant has neither content nor tool_calls: nothing but "
                    "its end would be trained"
                )
        asked = [] if isinstance(prompt, str) else prompt
        before = self.prompt(prompt, row)
        whole = self._chat([*asked, *answered], row, ask=False)
        if whole[: len(before)] != before:
            raise InvalidExperienceError(
                "the chat template writes the prompt otherwise once it is answered: its answer has "
                "no tokens of its own"
            )
        return whole[len(before) :]

    def turn(
        self, prompt: Said, answered: Said, row: Mapping[str, Any] = NOTHING
    ) -> dict[str, Any]:
        """Return fields of an experience: the tokens of a prompt with its answer, texts, tools."""
        before = self.prompt(prompt, row)
        return {
            "tokens": before + self.answer(prompt, answered, row),
            "prompt_length": len(before),
            "prompt_text": prompt if isinstance(prompt, str) else None,
            "response_text": answered if isinstance(answered, str) else None,
            "tools": tools_of(row),
        }

    def _text(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _chat(
        self, messages: Sequence[Mapping[str, Any]], row: Mapping[str, Any], *, ask: bool
    ) -> list[int]:
        messages, options = _messages(messages), row.get("chat_template_kwargs") or {}
        try:
            text = rendered(self._tokenizer, messages, tools_of(row) or (), ask=ask, **options)
        except InvalidArgumentError as error:  # of this row
            raise InvalidExperienceError(str(error)) from error
        return self._text(text)


def only_texts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what `as_texts` returns, of the messages of a row.

    Raises:
        InvalidExperienceError: one of them holds more than texts.
    """
    try:
        return as_texts(messages)
    except InvalidArgumentError as error:
        raise InvalidExperienceError(str(error)) from error


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
        raise TypeError(f"neither a text nor a list of messages: {value!r:.50}")
    return [dict(message) for message in value]
