"""A conversation: its messages, and the exact tokens that a model saw and said."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any

from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.experience import Experience
from trinity_buffer.sampling import MODE, SEGMENTS

_LOG = logging.getLogger(__name__)


TEXT_PARTS = {
    **dict.fromkeys(("text", "input_text", "output_text"), "text"),
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Types of content parts that are texts -> the key of the text."""


def as_texts(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages, the content parts of each joined into one text.

    Raises:
        InvalidArgumentError: a part is a picture, a sound or the like, which tokens do not hold.
    """
    return [
        {**message, "content": "\n".join(_text_of(part, number) for part in message["content"])}
        if isinstance(message.get("content"), list)
        else dict(message)
        for number, message in enumerate(messages)
    ]


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
        """Return what ``info["sampling_segments"]`` says of its tokens; None: nothing."""
        if not self.sampling:
            return None
        begin = len(self.prompt_ids)
        segment = {"begin": begin, "end": begin + len(self.token_ids), **self.sampling}
        return segment if self.logprobs_mode is None else {**segment, MODE: self.logprobs_mode}

    def weight_segment(self) -> dict[str, Any]:
        """Return what ``info["weight_segments"]`` says of its tokens."""
        begin = len(self.prompt_ids)
        segment = {
            "begin": begin,
            "end": begin + len(self.token_ids),
            "version": self.weight_version,
            "later_version": self.later_weight_version,
            "checksum": self.weight_checksum,
        }
        return {key: value for key, value in segment.items() if value is not None}

    def message(self) -> dict[str, Any]:
        """Return it as a message of the assistant."""
        spoken = SaidMessage(role="assistant", content=self.text, **self.reasoning)
        if self.tool_calls:
            spoken["tool_calls"] = [dict(call) for call in self.tool_calls]
        spoken.completion = self
        return spoken


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

    def __init__(
        self, messages: Sequence[Mapping[str, Any]] = (), *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self.messages: list[dict[str, Any]] = []
        self.tools = [dict(tool) for tool in tools]
        self.turns: list[Completion] = []
        self._open_calls: list[str] = []
        for message in messages:
            self.heard(message)

    def heard(self, message: Mapping[str, Any]) -> None:
        """Take in a message of the system, the user or a tool.

        Raises:
            InvalidArgumentError: one of the assistant, or the answer to a call that nobody waits
                for.
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
                    f"tool_call_id={call!r} answers no call; open are {self._open_calls}"
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
        """Return what can be trained of it, in the order of the turns.

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
        return experiences_of(
            self.turns, reward, messages=self.messages, tools=self.tools, info=info or {}
        )


def experiences_of(
    turns: Sequence[Completion],
    reward: float | None,
    *,
    messages: Sequence[Mapping[str, Any]] = (),
    tools: Sequence[Mapping[str, Any]] = (),
    info: Mapping[str, Any] = MappingProxyType({}),
) -> list[Experience]:
    """Return what can be trained of ``turns``; see `Conversation.experiences`."""
    stretches: list[list[Completion]] = []
    tokens: list[int] = []
    for turn in turns:
        # By token: an equal text may have been tokenised otherwise.
        if stretches and list(turn.prompt_ids[: len(tokens)]) == tokens:
            stretches[-1].append(turn)
        else:
            if stretches:
                _tell_of_a_split()
            stretches.append([turn])
            tokens = []
        tokens += [*turn.prompt_ids[len(tokens) :], *turn.token_ids]
    made = [_experience(stretch, info) for stretch in stretches]
    for experience in made:
        experience.reward = reward
        experience.messages = [dict(message) for message in messages]
        experience.tools = [dict(tool) for tool in tools] or None
    return made


def _experience(turns: Sequence[Completion], info: Mapping[str, Any]) -> Experience:
    """Return turns of which each one's prompt continues all that was seen and said before."""
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
        action_mask=mask,
        logprobs=logprobs if are_known else None,
        info={**_origin(turns), **info},
        response_text="".join(turn.text for turn in turns),
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
        if all(version.isdecimal() for version in versions):
            info["model_version"] = min(map(int, versions))
        info["weight_segments"] = [turn.weight_segment() for turn in turns]
    return info


@cache  # once in a process
def _tell_of_a_split() -> None:
    _LOG.warning(
        "the prompt of a turn does not begin with all tokens before it: its run becomes several "
        "experiences, and so will others. Unless your turns rewrite the past on purpose, the chat "
        "template drops something, or the tokenizer makes other tokens of what the model said"
    )
