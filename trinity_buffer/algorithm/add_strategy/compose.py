"""Several strategies as one: what the first keeps the second sees, and all commit together."""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, ClassVar, TypeVar, cast

import numpy as np
from typing_extensions import override

from trinity_buffer.algorithm.add_strategy.add_strategy import ADD_STRATEGY, AddStrategy
from trinity_buffer.algorithm.arguments import did_you_mean, made
from trinity_buffer.algorithm.copies import original_uid
from trinity_buffer.algorithm.group_scores import Over, Rewards, RewardScorer, Runs, ScoredGroups
from trinity_buffer.errors import InvalidArgumentError, InvalidExperienceError
from trinity_buffer.experience import Experience
from trinity_buffer.writer import INVALID, BufferWriter, StagedWriter

_logger = logging.getLogger(__name__)

T = TypeVar("T")

StrategyName = str | type[AddStrategy]


class CompositeAddStrategy(AddStrategy):
    """Feeds what each stage wrote to the next one, and what the last one wrote to the writer.

    What a stage rejects is rejected; what it neither writes nor rejects is ``filtered``. Use
    `compose` to make one: it works out the unit and the families.

    Args:
        writer: where the result goes.
        stages: name and strategy of each stage, the strategy writing to the paired `StagedWriter`.
    """

    needs: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, writer: BufferWriter, stages: Sequence[tuple[str, AddStrategy, StagedWriter]]
    ) -> None:
        super().__init__(writer)
        self.stages = list(stages)
        overs: set[Over] = {strategy.over for _, strategy, _ in self.stages}
        self.over = "rows" if "rows" in overs else "runs"
        self._warned = False  # of rewards that were changed in vain

    @override
    def from_rewards(self) -> RewardScorer | None:
        """Return all stages in turn, if rewards are enough for each."""
        scores = [(name, strategy.from_rewards()) for name, strategy, _ in self.stages]
        stages = [(name, score) for name, score in scores if score is not None]
        alike = len({strategy.over for _, strategy, _ in self.stages}) == 1
        if len(stages) < len(self.stages) or not alike:
            return None
        return partial(_scored_in_turn, stages)

    @override
    async def add(self, experiences: list[Experience], step: int) -> tuple[int, dict[str, Any]]:
        """Run all stages, then write what the last one wrote.

        A metric whose name an earlier stage used gets the name of its own stage before it.

        Raises:
            InvalidExperienceError: one is invalid and the writer cannot record a rejection.
        """
        groups, metrics = [list(experiences)], dict[str, Any]()
        left_out: list[tuple[Experience, str]] = []
        scoring = [name for name, strategy, _ in self.stages if strategy.annotates]
        scored = ""  # by which stage, once no other one follows
        for name, strategy, staged in self.stages:
            seen = [experience for group in groups for experience in group]
            rewards = [(e, e.reward) for e in seen if scored and e.reward is not None]
            _, of_stage = await strategy.add(seen, step)
            if not self._warned and any(e.reward != reward for e, reward in rewards):
                self._warned = True
                _logger.warning(
                    "strategy %r changes rewards after %r has made advantages of them, which stay "
                    "as they are: put %r before %r, in a set of another name=",
                    *(name, scored, name, scored),
                )
            scored = name if scoring[-1:] == [name] else scored
            metrics |= _renamed(of_stage, metrics, name)
            groups, rejected = staged.groups, staged.rejections
            staged.groups, staged.rejections = [], []
            decided = {e.eid.uid for e in (*chain(*groups), *(e for e, _ in rejected))}
            # What a stage neither wrote nor rejected counts as filtered: nothing goes silently.
            forgotten = [(e, "filtered") for e in seen if e.eid.uid not in decided]
            left_out += rejected + forgotten
        for experience, reason in left_out:
            # A copy that a later stage leaves out was never stored: there is nothing to reject.
            if original_uid(experience) is not None or self.reject([experience], reason):
                continue
            if reason.partition(":")[0] == INVALID:
                raise InvalidExperienceError(f"experience {experience.eid.uid}: {reason}")
        return await self._write_groups(groups), metrics


def _renamed(metrics: Mapping[str, T], before: Container[str], stage: str) -> dict[str, T]:
    """Return ``metrics``, those whose name is taken before under that of their stage."""
    return {f"{stage}/{key}" if key in before else key: v for key, v in metrics.items()}


def _scored_in_turn(
    stages: Sequence[tuple[str, RewardScorer]],
    rewards: Rewards,
    sizes: Runs,
    runs: Runs | None = None,
    /,
) -> ScoredGroups:
    """Return the verdicts on groups where each stage sees the rows that the last one kept."""
    group = np.repeat(np.arange(len(sizes)), sizes)
    stays = np.ones(len(rewards), np.bool_)
    reasons = np.full(len(rewards), "filtered", object)
    scores: Rewards | None = None
    metrics: dict[str, Rewards] = {}
    for name, score in stages:
        at = np.flatnonzero(stays)
        sizes = np.bincount(group[at], minlength=len(sizes))
        scored = score(rewards[at], sizes, None if runs is None else runs[at])
        if scored.scores is not None:
            scores = np.zeros_like(rewards) if scores is None else scores
            scores[at] = scored.scores
        stays[at], reasons[at] = scored.verdicts(len(at))
        metrics |= _renamed(scored.metrics, metrics, name)
    return ScoredGroups(scores=scores, kept=stays, reasons=reasons, metrics=metrics)


def compose(
    writer: BufferWriter,
    strategies: Sequence[StrategyName],
    arguments: Mapping[str, Mapping[str, Any]] | None = None,
) -> CompositeAddStrategy:
    """Return one strategy that runs ``strategies`` in this order, filters first.

    Its ``unit`` is ``"batch"`` if one of them needs that, its families are all that they read, and
    it annotates if one of them does.

    Args:
        writer: where the result goes.
        strategies: registered names or classes.
        arguments: constructor arguments of each, by its name (of a class: its registered name, else
            its ``__name__``).

    Raises:
        InvalidArgumentError: no strategy, arguments of one that is not there, an argument that one
            does not take.
    """
    by_name = dict(arguments or {})
    classes: dict[str, type[AddStrategy]] = {}
    for strategy in strategies:
        if isinstance(strategy, str):
            classes[strategy] = ADD_STRATEGY.get(strategy)
        else:
            classes[ADD_STRATEGY.name_of(strategy)] = strategy
    if len(classes) != len(strategies) or not classes:
        raise InvalidArgumentError("a list of strategies needs at least one, and each only once")
    for name in by_name.keys() - classes.keys():
        raise InvalidArgumentError(
            f"arguments for {name!r}, which is not in the list{did_you_mean(name, classes)} "
            f"(strategies: {', '.join(classes)})"
        )
    arguments_of = {name: dict(by_name.get(name, {})) for name in classes}
    # A stage sees only what the one before it wrote; nothing reaches the store until the last.
    staged = {name: StagedWriter() for name in classes}
    stages = [(n, made(cls, staged[n], **arguments_of[n]), staged[n]) for n, cls in classes.items()]
    units = {cls.unit_for(**arguments_of[n]) for n, cls in classes.items()}
    families = [f for n, cls in classes.items() for f in cls.families_for(**arguments_of[n])]
    attributes = {
        "unit": "batch" if "batch" in units else "group",
        "families": tuple(dict.fromkeys(families)),
        "annotates": any(cls.annotates for cls in classes.values()),
    }
    composed = type("ComposedAddStrategy", (CompositeAddStrategy,), attributes)
    return cast("CompositeAddStrategy", composed(writer, stages))
