"""Scores stored rollouts by a new reward function, beside the recorded rewards.

A scoring has a name. Its rewards are events (`RewardsAssigned`); a strategy that is run with
``rewards=NAME`` sees them in place of the recorded ones, in an annotation set of its own. All
events of a call are one transaction, so that no strategy meets a group of which a part is scored,
or scored by two functions.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from trinity_buffer.codec.objects import new_event
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.events import RewardsAssigned
from trinity_buffer.experience import Experience
from trinity_buffer.limits import sizes
from trinity_buffer.pipeline.handle import ExperimentHandle
from trinity_buffer.pipeline.load.columns import load_experiences
from trinity_buffer.pipeline.load.reading import EventCache, require_families
from trinity_buffer.store import log, writer_queries
from trinity_buffer.store.rows import ExperienceRow
from trinity_buffer.store.transaction import Transaction

_logger = logging.getLogger(__name__)


async def assign_rewards(
    experiment: ExperimentHandle,
    name: str,
    reward: Callable[[Experience], float | None],
    *,
    families: Sequence[str] = ("light", "tokens", "text"),
    actor: str = "user",
) -> int:
    """Score every stored experience under the scoring ``name``; return how many were.

    What was recorded stays as it is. Scoring again under the same name replaces its rewards, and
    takes none away: what cannot be read any more keeps the one that it has. The rewards are
    recorded together, once all are there. A strategy that is run with this scoring waits for
    experiences that were recorded later, until they are scored by another call.

    Args:
        reward: the new reward function; None leaves an experience without a reward in this scoring,
            as one does that cannot be read: the strategy rejects it.
        families: column families that it reads.

    Raises:
        InvalidArgumentError: a reward that is not finite, no reward where the scoring has one, or
            no such family; nothing was recorded.
    """
    require_families("assign_rewards", families)
    key, every, limit = experiment.key, writer_queries.Filter(), sizes.experiences_per_page

    def load(tx: Transaction, after: int) -> tuple[list[ExperienceRow], int]:
        rows = writer_queries.experiences(tx, key, every, after=after, limit=limit)
        return rows, log.head(tx, key)

    cache = EventCache(key, experiment.name)
    after, pages, without = -1, list[dict[int, float]](), dict[int, str]()
    while True:
        rows, seen = await experiment.database.read(load, after)
        if not rows:
            break
        # Pages by address: rows that are recorded meanwhile come last and are included.
        after = rows[-1].address
        rewards: dict[int, float] = {}
        for experience in await load_experiences(experiment.database, cache, rows, families):
            if (value := _scored(name, experience, reward)) is not None:
                rewards[cast("int", experience.address)] = value
            elif experience.damaged is experience.archived is None:
                without[cast("int", experience.address)] = experience.eid.uid
        pages.append(rewards)
    if not pages:
        return 0
    facts = [
        RewardsAssigned(
            scoring=name, experiences=list(page), rewards=list(page.values()), seen=seen
        )
        for page in [*filter(None, pages)] or pages[-1:]
    ]
    events = [(actor, new_event(fact)) for fact in facts]

    def append(tx: Transaction) -> None:
        tx.lock(key)
        # The earlier reward would stay, beside those of another function.
        for address in writer_queries.assigned_rewards(tx, key, name, list(without)):
            raise InvalidArgumentError(
                f"scoring {name!r} has a reward of {without[address]} by an earlier call, and now "
                "there is none: score under another name"
            )
        log.append(tx, key, events)

    await _warn_of_others(experiment, name, pages)
    await experiment.database.write(append)
    return sum(map(len, pages))


async def _warn_of_others(
    experiment: ExperimentHandle, name: str, pages: Sequence[Mapping[int, float]]
) -> None:
    """Warn of rewards that differ from those that an annotation set was computed from."""
    read, key, changed = experiment.database.read, experiment.key, 0
    consumers = await read(writer_queries.consumers, key)
    sets = [row.name for row in consumers.values() if row.config.get("rewards") == name]
    for page in pages if sets else ():
        before = await read(writer_queries.assigned_rewards, key, name, list(page))
        changed += sum(page[address] != reward for address, reward in before.items())
    if changed:
        _logger.warning(
            "scoring %r gets other rewards for %d experiences than before: groups, steps and blame "
            "show them of set %r too, which was computed from those before; score under another "
            "name to keep both",
            name,
            changed,
            sets[0],
        )


def _scored(
    name: str, experience: Experience, reward: Callable[[Experience], float | None]
) -> float | None:
    value: Any = None if experience.damaged is not None else reward(experience)
    if value is None:
        return None
    try:
        score = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # a list, a tensor of two numbers
        score = math.nan
    # NaN compares false with everything.
    if not abs(score) <= torch.finfo(torch.float32).max:
        raise InvalidArgumentError(
            f"scoring {name!r}: the reward of {experience.eid.uid} is {value!r:.40}, it "
            "must be a number, finite in float32, or None"
        )
    return score
