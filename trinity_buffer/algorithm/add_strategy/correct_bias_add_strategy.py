"""Group-relative advantages in which likely answers earn less."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from typing_extensions import override

from trinity_buffer.algorithm import group_scores
from trinity_buffer.algorithm.add_strategy.add_strategy import ADD_STRATEGY, GRPOAddStrategy
from trinity_buffer.algorithm.annotating import num_runs, rank_penalized
from trinity_buffer.algorithm.arguments import configured
from trinity_buffer.experience import Experience


@ADD_STRATEGY.register_module("correct_bias")
@configured
class CorrectBiasAddStrategy(GRPOAddStrategy):
    """GRPO on rewards that shrink with the rank of the answer's likelihood (arXiv:2506.02355).

    ``r' = r (1 - rank_penalty x rank / n)``, the likeliest answer ranking highest; mean and
    deviation are of ``r'``.

    Args:
        writer: where the scored groups go.
        epsilon: added to the deviation.
        rank_penalty: how much of its reward the likeliest answer of a large group loses.
        kwargs: the options of `GRPOAddStrategy`.
    """

    families: ClassVar[tuple[str, ...]] = ("light", "tokens")

    rank_penalty: float = 0.25

    @override
    def needs_of(self, exps: Sequence[Experience]) -> Sequence[str]:
        """Return the fields of GRPO, and logprobs where there is another run to rank against."""
        return (*self.needs, "logprobs") if num_runs(exps, self.over) > 1 else self.needs

    @override
    def rewards_of(self, exps: Sequence[Experience]) -> group_scores.Rewards:
        """Return the penalized rewards, shape ``(G,)``."""
        return rank_penalized(exps, super().rewards_of(exps), self.rank_penalty, self.over)
