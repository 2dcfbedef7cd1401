"""What inference servers answer, read into completions: vLLM's OpenAI dialect, SGLang's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trinity_buffer.errors import InferenceServerError, InvalidArgumentError
from trinity_buffer.explorer.conversation import Completion

ASKED_FOR_CHAT = {"logprobs": True, "return_token_ids": True}
"""Keys of a chat request that make vLLM answer with ids and log-probs."""

ASKED_FOR_TEXT = {"logprobs": 1, "return_token_ids": True}
"""The same for ``/completions``."""


def chat_completion(answer: Mapping[str, Any], choice: Mapping[str, Any]) -> Completion:
    """Return a choice of an answer to ``/chat/completions``; what it lacks is empty."""
    message = choice.get("message") or {}
    content = (choice.get("logprobs") or {}).get("content")
    return Completion(
        prompt_ids=answer.get("prompt_token_ids") or choice.get("prompt_token_ids") or (),
        token_ids=choice.get("token_ids") or (),
        logprobs=None if content is None else [float(one["logprob"]) for one in content],
        text=message.get("content") or "",
        tool_calls=message.get("tool_calls") or (),
        finish_reason=choice.get("finish_reason"),
    )


def text_completion(answer: Mapping[str, Any], choice: Mapping[str, Any]) -> Completion:
    """Return a choice of an answer to ``/completions``; what it lacks is empty."""
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
    return Completion(
        prompt_ids=choice.get("prompt_token_ids") or answer.get("prompt_token_ids") or (),
        token_ids=choice.get("token_ids") or (),
        logprobs=logprobs,
        text=choice.get("text") or "",
        finish_reason=choice.get("finish_reason"),
    )


def generated(answer: Mapping[str, Any], prompt: Sequence[int]) -> Completion:
    """Return an answer of SGLang's ``/generate``."""
    meta = answer.get("meta_info") or {}
    pairs = meta.get("output_token_logprobs")
    reason = meta.get("finish_reason")
    version = meta.get("weight_version")
    return Completion(
        prompt_ids=prompt,
        token_ids=answer.get("output_ids") or (),
        logprobs=None if pairs is None else [float(pair[0]) for pair in pairs],
        text=answer.get("text") or "",
        finish_reason=reason.get("type") if isinstance(reason, Mapping) else reason,
        weight_version=None if version is None else str(version),
    )


def require_ids(completion: Completion, url: str) -> None:
    """Return if a completion has ids and as many log-probs.

    Raises:
        InferenceServerError: it has not; the message says what to start the server with.
    """
    ids, logprobs = len(completion.token_ids), completion.logprobs
    if completion.prompt_ids and ids and logprobs is not None and len(logprobs) == ids:
        return
    has = f"{len(completion.prompt_ids)} prompt ids, {ids} ids and " + (
        "no log-probs" if logprobs is None else f"{len(logprobs)} log-probs"
    )
    raise InferenceServerError(
        f"{url} answered with {has}: to train on it, all must be there, and text is never "
        "tokenised again. vLLM returns them from 0.10.2 on; pass require_ids=False if nothing of "
        "this shall be trained"
    )


def require_sampled(sampling: Mapping[str, Any], mode: str) -> None:
    """Return if the server's log-probs are those of what it samples.

    Raises:
        InvalidArgumentError: at this temperature or top-p they are not, in the log-prob ``mode``.
    """
    bent = {
        key: sampling[key]
        for key, plain in (("temperature", 1), ("top_p", 1), ("top_k", -1), ("min_p", 0))
        if key in sampling and sampling[key] not in (plain, 0 if key == "top_k" else plain)
    }
    if bent and mode != "processed_logprobs":
        said = ", ".join(f"{key}={value}" for key, value in bent.items())
        raise InvalidArgumentError(
            f"{said}: the log-probs of a server with --logprobs-mode {mode} are those before that, "
            "not those of what is sampled. Sample at temperature=1 and top_p=1, or start it with "
            "--logprobs-mode processed_logprobs and give logprobs_mode='processed_logprobs'"
        )
