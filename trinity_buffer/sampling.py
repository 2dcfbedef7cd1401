"""How the tokens of a response were sampled, where that changes their probabilities.

``info["sampling_segments"]`` of an experience is a list of mappings: the options of the tokens
``[begin, end)`` (by default of the whole response), and ``logprobs_mode``. All other tokens were
sampled at temperature 1 without options.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

SEGMENTS = "sampling_segments"
"""The key in ``info``."""

MODE = "logprobs_mode"
LEAST_TEMPERATURE = 0.01
"""Below it servers take the likeliest token, or another temperature than they were asked for."""

RAW = "raw_logprobs"
"""Log-probabilities from before temperature, top-p and their like."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "temperature": (1.0,),
    "top_p": (1.0,),
    "top_k": (-1, 0),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "min_new_tokens": (0,),  # as SGLang calls it
    "bad_words": ([], ()),
    "allowed_token_ids": ([], ()),
}
"""Options that are applied behind raw log-probs, and the values at which they change nothing."""

_NO_OPTIONS = frozenset({"begin", "end", MODE})


class Sampled(NamedTuple):
    """How some tokens were sampled.

    Attributes:
        begin, end: which, counted from the first token of the prompt.
        temperature: that their logits were divided by.
        unscorable: an option that no trainer can score, with its value, or None.
    """

    begin: int
    end: int
    temperature: float
    unscorable: str | None


def not_neutral(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``options`` without those that change nothing, such as None."""
    return {
        key: value
        for key, value in options.items()
        if value is not None and value not in NEUTRAL.get(key, ())
    }


def problem_of_segments(segments: object, prompt_length: int, length: int) -> str | None:
    """Describe the fault of an experience's ``info["sampling_segments"]``, or return None."""
    if not isinstance(segments, Sequence) or not all(isinstance(part, dict) for part in segments):
        return f"is {segments!r:.80}: make it a list of mappings, such as {{'temperature': 0.7}}"
    last = prompt_length
    for segment in segments:
        begin, end = segment.get("begin", prompt_length), segment.get("end", length)
        if type(begin) is not int or type(end) is not int or not last <= begin <= end <= length:
            return (
                f"has the tokens {begin!r:.40} to {end!r:.40}: each begin and end must lie in the "
                f"response ({prompt_length} to {length}), behind the segment before"
            )
        heat = segment.get("temperature", 1.0)
        if not isinstance(heat, int | float) or not 0 <= heat < math.inf:
            return f"has the temperature {heat!r:.40}: it must be a number, 0 or more"
        last = end
    return None


def sampled(info: Mapping[str, Any], prompt_length: int, length: int) -> list[Sampled] | None:
    """Return the segments whose sampling changes how a trainer scores them, or None.

    Args:
        info: of an experience; segments that have a problem are passed over.
        prompt_length, length: its tokens.
    """
    segments = info.get(SEGMENTS)
    if not segments or problem_of_segments(segments, prompt_length, length) is not None:
        return None
    sampling = []
    for segment in segments:
        bent = not_neutral({key: value for key, value in segment.items() if key not in _NO_OPTIONS})
        begin, end = segment.get("begin", prompt_length), segment.get("end", length)
        if bent and begin < end:
            heat = float(bent.pop("temperature", 1.0))
            unscorable = [f"{key}={value!r:.80}" for key, value in bent.items()]
            if heat < LEAST_TEMPERATURE:  # the likeliest token: it was not drawn at all
                heat, unscorable = 1.0, [f"temperature={heat:g}"]
            elif segment.get(MODE, info.get(MODE)) == RAW and not unscorable:
                unscorable = [f"temperature={heat:g} and raw log-probs"]
            sampling.append(Sampled(begin, end, heat, next(iter(unscorable), None)))
    return sampling or None
