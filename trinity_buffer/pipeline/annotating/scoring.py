"""Rewards of a later scoring: a new reward function over stored rollouts, beside what was recorded.

A scoring has a name. Its rewards are events (`RewardsAssigned`); a strategy that is run with
``rewards=NAME`` sees them in place of the recorded ones, in an annotation set of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.events import RewardsAssigned
from trinity_buffer.experience import Experience
from trinity_buffer.pipeline.events import new_event, now_us
from trinity_buffer.pipeline.experiment_handle import ExperimentHandle
from trinity_buffer.pipeline.loading.event_cache import EventCache
from trinity_buffer.pipeline.loading.experiences import load_experiences
from trinity_buffer.sizes import sizes
from trinity_buffer.store import log, reads
from trinity_buffer.store.transaction import Transaction


async def assign_rewards(
    experiment: ExperimentHandle,
    name: str,
    reward: Callable[[Experience], float | None],
    *,
    families: Sequence[str] = ("light", "tokens", "text"),
    actor: str = "user",
) -> int:
    """Score every stored experience under the scoring ``name``; return how many were.

    What was recorded stays as it is. Scoring again under the same name replaces its rewards.

    Args:
        reward: the new reward function; None leaves an experience without a reward in this scoring,
            as one does that cannot be read.
        families: column families that it reads.

    Raises:
        InvalidArgumentError: a reward that is not finite; nothing of that page was recorded.
    """
    cache = EventCache(experiment.key, experiment.name)
    wanted, after, scored = reads.Filter(), -1, 0
    while True:
        rows = await experiment.database.read(
            reads.experiences,
            experiment.key,
            wanted,
            after=after,
            limit=sizes().experiences_per_page,
        )
        if not rows:
            return scored
        after = rows[-1].address
        experiences = await load_experiences(experiment.database, cache, rows, families)
        found = [(e, reward(e)) for e in experiences if e.damaged is None]
        rewards = {
            cast("int", e.address): _checked(e, name, value)
            for e, value in found
            if value is not None
        }
        if rewards:
            scored_anew = RewardsAssigned(
                scoring=name, experiences=list(rewards), rewards=list(rewards.values())
            )
            event = new_event(scored_anew)
            await experiment.database.write(_append, experiment.key, event, actor)
        scored += len(rewards)


def _append(tx: Transaction, experiment: int, event: log.NewEvent, actor: str) -> None:
    log.append(tx, experiment, [event], actor=actor, now_us=now_us())


def _checked(experience: Experience, name: str, value: float) -> float:
    if not math.isfinite(value):
        raise InvalidArgumentError(
            f"scoring {name!r}: the reward of {experience.eid.uid} is {value}, it must be finite"
        )
    return float(value)
