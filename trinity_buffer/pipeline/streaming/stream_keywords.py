"""The keywords of a train stream, so that a caller sees them: types for checkers, a signature too.

What each means, and its default, is said once, in `StreamOptions`; a test holds the two together.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Required, TypedDict, TypeVar

from trinity_buffer.pipeline.streaming.manifest import LayoutName

F = TypeVar("F", bound=Callable[..., object])


class StreamKeywords(TypedDict, total=False):
    """What `StreamOptions` takes, by keyword."""

    strategy: Required[str | None]
    consumer: str
    groups_per_step: int
    tokens_per_microbatch: int | None
    layout: LayoutName
    device: str
    max_tokens: int | None
    follow: bool
    prefetch: int
    lease_ttl_s: float
    wait_for_lease: bool
    wait_for_set: bool
    resume_from: int | None
    rank: int
    world_size: int
    sample_strategy: str
    max_staleness: float | None
    expert_experiment: str | None
    expert_data_ratio: float | None
    recompute_old_logprob: bool
    needs: tuple[str, ...]


def takes(options: Callable[..., object]) -> Callable[[F], F]:
    """Let the signature of a function show the keywords of ``options`` for its ``**options``."""

    def show(function: F) -> F:
        own = inspect.signature(function)
        named = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        passed_on = [
            p.replace(kind=p.KEYWORD_ONLY) for p in inspect.signature(options).parameters.values()
        ]
        shown = own.replace(parameters=[*named, *passed_on])
        function.__signature__ = shown  # type: ignore[attr-defined]  # what inspect reads
        return function

    return show
