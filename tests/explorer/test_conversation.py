"""`tb.Conversation`: turns, tool calls and tokens stay together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import trinity_buffer as tb
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.explorer.conversation import as_texts, warn_once

QUESTION = {"role": "user", "content": "how many?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "count", "arguments": "{}"}}


def turn(prompt: Sequence[int], said: Sequence[int], **changed: Any) -> tb.Completion:
    logprobs = [-token / 8 for token in said]
    made = {"prompt_ids": prompt, "token_ids": said, "logprobs": logprobs, "text": f"<{said}>"}
    return tb.Completion(**{**made, **changed})


def test_turns_that_continue_each_other_are_one_experience_masked_on_what_was_said() -> None:
    talk = tb.Conversation([QUESTION], tools=[{"type": "function"}])
    talk.said(turn([1, 2], [3, 4], tool_calls=[CALL]))
    talk.heard({"role": "tool", "tool_call_id": "c1", "content": "5"})
    talk.said(turn([1, 2, 3, 4, 50, 51], [6], finish_reason="stop"))
    (made,) = talk.experiences(0.5, info={"solved": True})

    assert made.tokens.tolist() == [1, 2, 3, 4, 50, 51, 6]
    assert made.prompt_length == 2
    assert made.action_mask is not None
    assert made.logprobs is not None
    assert made.action_mask.tolist() == [True, True, False, False, True]
    assert made.logprobs.tolist() == [-3 / 8, -4 / 8, 0, 0, -6 / 8]
    assert (made.reward, made.info) == (0.5, {"finish_reason": "stop", "solved": True})
    assert [message["role"] for message in made.messages or ()] == [
        *("user", "assistant", "tool", "assistant")
    ]
    assert made.messages is not None
    assert made.messages[1] == {"role": "assistant", "content": "<[3, 4]>", "tool_calls": [CALL]}
    assert made.tools == [{"type": "function"}]


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


def test_parts_that_are_texts_become_one_text() -> None:
    parts: Any = [{"type": "text", "text": "how"}, "many", {"type": "input_text", "text": "?"}]
    asked: Any = [
        {"role": "user", "content": parts, "name": "me"},
        {"role": "tool", "content": None},
    ]
    assert as_texts(asked) == [{**asked[0], "content": "how\nmany\n?"}, asked[1]]
    assert asked[0]["content"] is parts


@pytest.mark.parametrize(
    ("part", "name"),
    [
        (PICTURE, "image_url"),
        ({"type": "input_audio", "input_audio": {}}, "input_audio"),
        ({"type": "file", "file": {}}, "file"),
        ({"type": "invented", "text": "x"}, "invented"),
        ({"image_url": "https://example.org/a.png"}, "image_url"),
        ({"type": "text"}, "text"),
        (7, "int"),
    ],
)
def test_a_part_that_is_no_text_is_refused_by_its_type(part: Any, name: str) -> None:
    text = {"type": "text", "text": "what is this?"}
    with pytest.raises(InvalidArgumentError, match=rf"messages\[1\] holds a part .*{name}"):
        as_texts([QUESTION, {"role": "user", "content": [text, part]}])


def test_each_turn_says_how_its_tokens_were_sampled() -> None:
    talk = tb.Conversation([QUESTION])
    hot = {"sampling": {"temperature": 2.0}, "logprobs_mode": "processed_logprobs"}
    for prompt, said, options in (
        ([1, 2], [3, 4], hot),
        ([1, 2, 3, 4, 50], [6], {}),
        ([1, 2, 3, 4, 50, 6, 7], [8, 9], {"sampling": {"temperature": 0.5, "top_p": 0.9}}),
    ):
        talk.said(turn(prompt, said, **options))
        talk.heard(QUESTION)
    (made,) = talk.experiences(0.5)
    assert made.info["sampling_segments"] == [
        {"begin": 2, "end": 4, "temperature": 2.0, "logprobs_mode": "processed_logprobs"},
        {"begin": 7, "end": 9, "temperature": 0.5, "top_p": 0.9},
    ]


@pytest.mark.parametrize(
    "prompt",
    [
        [1, 2, 3, 9, 50],  # the text came back as another token
        [1, 2, 50],  # the template left the earlier turn out
        [1, 2, 3],  # shorter than what was there
    ],
)
def test_a_prompt_that_does_not_continue_begins_another_experience(prompt: list[int]) -> None:
    talk = tb.Conversation([QUESTION])
    talk.said(turn([1, 2], [3, 4]))
    talk.heard(QUESTION)
    talk.said(turn(prompt, [6]))
    talk.heard(QUESTION)
    talk.said(turn([*prompt, 6, 7], [8]))
    first, second = talk.experiences(1.0)
    assert first.tokens.tolist() == [1, 2, 3, 4]
    assert second.tokens.tolist() == [*prompt, 6, 7, 8]
    assert second.prompt_length == len(prompt)
    assert second.action_mask is not None
    assert second.action_mask.tolist() == [True, False, True]
    assert (first.reward, second.reward) == (1.0, 1.0)


def test_the_first_run_that_becomes_several_experiences_is_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warn_once.cache_clear()
    for _ in range(2):
        talk = tb.Conversation([QUESTION])
        talk.said(turn([1, 2], [3, 4]))
        talk.heard(QUESTION)
        talk.said(turn([1, 2, 4, 50], [6]))
        assert len(talk.experiences(1.0)) == 2
    (told,) = caplog.messages
    assert "does not begin with all tokens before it: its run becomes several experiences" in told


def test_one_turn_without_log_probs_leaves_its_experience_without() -> None:
    talk = tb.Conversation([QUESTION])
    talk.said(turn([1], [2], logprobs=None))
    talk.said(turn([1, 2, 3], [4]))
    (made,) = talk.experiences(1.0)
    assert made.logprobs is None


def test_the_weights_of_each_turn_are_kept_and_the_oldest_is_the_policy_version() -> None:
    talk = tb.Conversation([QUESTION])
    talk.said(turn([1], [2], weight_version="10"))
    talk.said(turn([1, 2, 3], [4], weight_version="9"))
    (made,) = talk.experiences(1.0)
    assert made.info["weight_versions"] == ["10", "9"]
    assert made.policy_version == 9


def test_weights_that_are_not_numbered_give_no_policy_version_and_are_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(2):
        talk = tb.Conversation([QUESTION])
        talk.said(turn([1], [2], weight_version="7"))
        talk.said(turn([1, 2, 3], [4], weight_version="as at first"))
        (made,) = talk.experiences(1.0)
        assert (made.info["weight_versions"], made.policy_version) == (["7", "as at first"], None)
    (told,) = caplog.messages
    assert "'as at first'" in told
    assert "sync-weights" in told


def test_what_is_not_aligned_is_refused() -> None:
    talk = tb.Conversation([QUESTION])
    with pytest.raises(InvalidArgumentError, match="nothing to train"):
        talk.experiences(1.0)
    with pytest.raises(InvalidArgumentError, match="2 tokens and 1 log-probs"):
        talk.said(turn([1], [2, 3], logprobs=[-1.0]))
    with pytest.raises(InvalidArgumentError, match="0 tokens cannot be trained"):
        talk.said(turn([1], []))
    with pytest.raises(InvalidArgumentError, match=r"said\(\)"):
        talk.heard({"role": "assistant", "content": "hello"})
    with pytest.raises(InvalidArgumentError, match=r"'c9' answers no call.* role 'user'"):
        talk.heard({"role": "tool", "tool_call_id": "c9", "content": ""})
    talk.said(turn([1], [2], tool_calls=[CALL]))
    with pytest.raises(InvalidArgumentError, match=r"\['c1'\] are not answered"):
        talk.said(turn([1, 2, 3], [4]))
    assert len(talk.turns) == 1


@pytest.mark.parametrize("messages", ["hi", [{"role": "user", "content": "hi"}, "there"]])
def test_what_is_no_message_is_refused(messages: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="begins with a list of messages, such as"):
        tb.Conversation(messages)
