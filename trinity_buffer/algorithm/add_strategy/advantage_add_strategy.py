"""Advantage functions as strategies: what computes on lists of experiences can consume the log."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from typing_extensions import override

from trinity_buffer.algorithm.add_strategy.add_strategy import ADD_STRATEGY, AddStrategy
from trinity_buffer.algorithm.advantage_fn import (
    ASYMREGroupAdvantage,
    GiGPOAdvantageFn,
    GRPOGroupedAdvantage,
    PipelineAdvantage,
    RECGroupedAdvantage,
    REINFORCEGroupAdvantage,
)
from trinity_buffer.algorithm.arguments import declared_arguments
from trinity_buffer.algorithm.copies import left_out
from trinity_buffer.algorithm.group_scores import RewardScorer, Unit, as_added
from trinity_buffer.experience import Experience, group_by
from trinity_buffer.writer import BufferWriter

_LEFT_OUT = "zero_variance"


class AdvantageAddStrategy(AddStrategy):
    """Annotates with an advantage function; a subclass names it.

    Args:
        writer: where the scored groups go.
        kwargs: the arguments of the advantage function.
    """

    advantage_fn: ClassVar[type[PipelineAdvantage]]
    deciding: ClassVar[tuple[str, ...]] = ("add", "refuse", "reject", "usable")

    @override
    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "advantage_fn" in vars(cls) and "reference_args" not in vars(cls):
            cls.reference_args = cls.advantage_fn.reference_args

    def __init__(self, writer: BufferWriter, **kwargs: Any) -> None:
        super().__init__(writer)
        self.advantage = self.advantage_fn(**kwargs)
        self.over = self.advantage.over

    @classmethod
    @override
    def default_args(cls) -> dict[str, Any]:
        """Return the defaults of the advantage function."""
        return cls.advantage_fn.default_args()

    @classmethod
    @override
    def takes_over(cls) -> bool:
        """Return whether the advantage function can be told what counts once."""
        return "over" in declared_arguments(cls.advantage_fn)

    @classmethod
    @override
    def unit_for(cls, **arguments: Any) -> Unit:
        """Return the unit that the advantage function needs."""
        return cls.advantage_fn.unit_for(**arguments)

    @classmethod
    @override
    def families_for(cls, **arguments: Any) -> tuple[str, ...]:
        """Return the column families that the advantage function reads."""
        return cls.advantage_fn.families_for(**arguments)

    @override
    def from_rewards(self) -> RewardScorer | None:
        """Return the advantage function's scorer of rewards alone, if it has one."""
        score, own, base = self.advantage.from_rewards(), type(self), AdvantageAddStrategy
        overridden = any(getattr(own, name) is not getattr(base, name) for name in self.deciding)
        return None if score is None or overridden else partial(as_added, score, _LEFT_OUT)

    @override
    async def add(self, experiences: list[Experience], step: int) -> tuple[int, dict[str, Any]]:
        """Score all groups, then write them one by one, in order of first appearance."""
        if not experiences:
            return 0, {}
        sound = self.sound(experiences, self.advantage.problems(experiences))
        scored, metrics = self.advantage.process(sound)
        self.reject(left_out(sound, scored), _LEFT_OUT)
        return await self._write_groups(group_by(scored, "task").values()), metrics


@ADD_STRATEGY.register_module("asymre")
class ASYMREAddStrategy(AdvantageAddStrategy):
    """`ASYMREGroupAdvantage` as a strategy."""

    advantage_fn: ClassVar[type[PipelineAdvantage]] = ASYMREGroupAdvantage


@ADD_STRATEGY.register_module("gigpo")
class GiGPOAddStrategy(AdvantageAddStrategy):
    """`GiGPOAdvantageFn` as a strategy."""

    advantage_fn: ClassVar[type[PipelineAdvantage]] = GiGPOAdvantageFn


@ADD_STRATEGY.register_module("grpo_grouped")
class GRPOGroupedAddStrategy(AdvantageAddStrategy):
    """`GRPOGroupedAdvantage`, with all its options, as a strategy."""

    advantage_fn: ClassVar[type[PipelineAdvantage]] = GRPOGroupedAdvantage


@ADD_STRATEGY.register_module("rec")
class RECAddStrategy(AdvantageAddStrategy):
    """`RECGroupedAdvantage` as a strategy."""

    advantage_fn: ClassVar[type[PipelineAdvantage]] = RECGroupedAdvantage


@ADD_STRATEGY.register_module("reinforce")
class REINFORCEAddStrategy(AdvantageAddStrategy):
    """`REINFORCEGroupAdvantage` as a strategy."""

    advantage_fn: ClassVar[type[PipelineAdvantage]] = REINFORCEGroupAdvantage
