"""Texts and conversations as token ids, by the tokenizer that somebody names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from trinity_buffer.errors import InvalidArgumentError, InvalidExperienceError
from trinity_buffer.explorer.chat_format import rendered
from trinity_buffer.explorer.local_model import load_tokenizer

Said = str | Sequence[Mapping[str, Any]]
"""A text, or the messages of a conversation."""


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

    def prompt(self, said: Said) -> list[int]:
        """Return the tokens of a prompt; of messages, up to where the answer begins."""
        return self._text(said) if isinstance(said, str) else self._chat(said, ask=True)

    def answer(self, prompt: Said, said: Said) -> list[int]:
        """Return the tokens of an answer to ``prompt``, with the one that ends it.

        Raises:
            InvalidExperienceError: the chat template changes the prompt once it is answered.
        """
        if isinstance(said, str):
            if not isinstance(prompt, str):
                said = [{"role": "assistant", "content": said}]
            else:
                end = self._tokenizer.eos_token_id
                return self._text(said) + ([] if end is None else [end])
        asked = [] if isinstance(prompt, str) else _messages(prompt)
        before, whole = self.prompt(prompt), self._chat([*asked, *_messages(said)], ask=False)
        if whole[: len(before)] != before:
            raise InvalidExperienceError(
                "the chat template writes the prompt otherwise once it is answered: its answer has "
                "no tokens of its own"
            )
        return whole[len(before) :]

    def _text(self, said: str) -> list[int]:
        return list(self._tokenizer.encode(said, add_special_tokens=False))

    def _chat(self, said: Sequence[Mapping[str, Any]], *, ask: bool) -> list[int]:
        try:
            return self._text(rendered(self._tokenizer, _messages(said), ask=ask))
        except InvalidArgumentError as error:  # of this row
            raise InvalidExperienceError(str(error)) from error


def _messages(said: Any) -> list[dict[str, Any]]:
    if not isinstance(said, list) or not all(isinstance(one, Mapping) for one in said):
        raise TypeError(f"neither a text nor a list of messages: {said!r:.50}")
    return [dict(message) for message in said]
