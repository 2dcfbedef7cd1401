"""Which strategies are scored by their rewards alone, and which have to see experiences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from tests.pipeline.test_reward_table import SlowGRPO
from trinity_buffer.algorithm.add_strategy import (
    ADD_STRATEGY,
    AddStrategy,
    ASYMREAddStrategy,
    CorrectBiasAddStrategy,
    GRPOAddStrategy,
    RECAddStrategy,
    RewardStrategy,
    compose,
)
from trinity_buffer.algorithm.add_strategy.add_strategy import RewardFilter
from trinity_buffer.algorithm.advantage_fn import ASYMREGroupAdvantage
from trinity_buffer.algorithm.group_scores import Rewards, ScoredGroups
from trinity_buffer.experience import Experience
from trinity_buffer.writer import StagedWriter


class Centred(RewardStrategy):
    """A class of one's own, which declares itself."""

    @override
    def score_groups(self, rewards: Rewards) -> ScoredGroups:
        """Return the distance from the largest reward."""
        return ScoredGroups(scores=rewards - rewards.max(axis=-1, keepdims=True))


class NeedsLogprobs(Centred):
    """Needs what rewards do not tell, and yet writes `score_groups` anew."""

    needs: ClassVar[tuple[str, ...]] = ("reward", "action_mask", "logprobs")

    @override
    def score_groups(self, rewards: Rewards) -> ScoredGroups:
        """Return what the class above does."""
        return super().score_groups(rewards)


class Shaped(Centred):
    """Looks at more than the reward to shape it."""

    @override
    def rewards_of(self, exps: Sequence[Experience]) -> Rewards:
        """Return longer answers' rewards doubled."""
        return super().rewards_of(exps) * 2

    @override
    def score_groups(self, rewards: Rewards) -> ScoredGroups:
        """Return what the class above does."""
        return super().score_groups(rewards)


class Scrupulous(RewardStrategy):
    """Declares itself, and yet scores a group in a way of its own."""

    @override
    def score_groups(self, rewards: Rewards) -> ScoredGroups:
        """Return the rewards."""
        return ScoredGroups(scores=rewards)

    @override
    def calculate_group_advantage(
        self, group_id: str, exps: list[Experience]
    ) -> tuple[list[Experience], dict[str, float]]:
        """Leave out groups of one."""
        return super().calculate_group_advantage(group_id, exps) if len(exps) > 1 else ([], {})


class Choosy(RewardFilter):
    """A filter that declares itself, and yet chooses in a way of its own."""

    @override
    def score_groups(self, rewards: Rewards) -> ScoredGroups:
        """Keep all."""
        return ScoredGroups()

    @override
    async def add(self, experiences: list[Experience], step: int) -> tuple[int, dict[str, Any]]:
        """Keep the first."""
        return await super().add(experiences[:1], step)


class Outspoken(ASYMREAddStrategy):
    """Gives a reason of its own."""

    @override
    def reject(self, experiences: Sequence[Experience], reason: str) -> bool:
        """Say who rejects."""
        return super().reject(experiences, f"outspoken {reason}")


class Doubled(ASYMREGroupAdvantage):
    """An advantage function that declares itself, and yet does more."""

    @override
    def score_groups(self, rewards: Rewards, weights: Rewards | None = None) -> ScoredGroups:
        """Return what the class above does."""
        return super().score_groups(rewards, weights)

    @override
    def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, Any]]:
        """Keep everybody twice."""
        kept, metrics = super().process(exps)
        return kept * 2, metrics


class Quiet(Centred):
    """Changes the constructor alone."""

    def __init__(self, writer: Any, **kwargs: Any) -> None:
        super().__init__(writer, **kwargs)


class ByRange(GRPOAddStrategy):
    """GRPO with another measure of how far rewards lie apart."""

    @override
    def moments(
        self, rewards: Sequence[float] | Rewards, weights: Rewards | None = None
    ) -> tuple[Rewards, Rewards]:
        """Return the mean and the range."""
        mean, _ = super().moments(rewards, weights)
        return mean, np.ptp(np.asarray(rewards), axis=-1)


def test_a_subclass_scores_by_the_deviation_of_its_own() -> None:
    scored = ByRange(StagedWriter(), epsilon=0.0).score_groups(np.array([[0.0, 4.0, 2.0]]))
    assert scored.scores is not None
    assert scored.scores.tolist() == [[-0.5, 0.5, 0.0]]


def test_a_class_is_scored_by_rewards_only_as_long_as_its_declaration_tells_all() -> None:
    declared = {
        name for name in ADD_STRATEGY.names() if _scorer(ADD_STRATEGY.get(name)) is not None
    }
    assert declared == {
        *("grpo", "opmd", "asymre", "rec", "reinforce"),
        *("reward_variance", "best_of_group"),
    }
    assert RECAddStrategy(StagedWriter(), drop="balance").from_rewards() is None
    assert compose(StagedWriter(), ["dapo_dynamic_sampling", "grpo"]).from_rewards() is None
    assert _scorer(Centred) is not None
    assert _scorer(Quiet) is not None
    others = (
        SlowGRPO,
        CorrectBiasAddStrategy,
        NeedsLogprobs,
        Shaped,
        Scrupulous,
        Choosy,
        Outspoken,
    )
    for other in others:
        assert _scorer(other) is None
    assert Doubled().from_rewards() is None


def _scorer(kind: type[AddStrategy]) -> object:
    needed: dict[str, dict[str, Any]] = {"overlong_penalty": {"max_length": 8, "cache_length": 2}}
    name = next((n for n in ADD_STRATEGY.names() if ADD_STRATEGY.get(n) is kind), "")
    return kind(StagedWriter(), **needed.get(name, {})).from_rewards()
