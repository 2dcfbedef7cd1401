"""A step of two sources: the policy's own data and an expert's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import Any

import torch
from typing_extensions import override

from trinity_buffer.algorithm.arguments import SHARE, checked, configured
from trinity_buffer.algorithm.sample_strategy import sample_strategy
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.experience import CustomField, Experience

CUSTOM_FIELDS = (
    CustomField("is_expert", "expert_mask", torch.bool),
    CustomField("step", "step", torch.int32),
)
"""Columns that MIX and CHORD need."""


@sample_strategy.SAMPLE_STRATEGY.register_module("mix")
@configured
class MixSampleStrategy(sample_strategy.SampleStrategy):
    """Takes ``ceil(expert_data_ratio x size)`` units of an expert, the rest of the policy's own.

    The policy's own come first. An expert's experience gets reward 0, and log-probabilities,
    advantages and returns of 0, so that both kinds make one batch.

    Args:
        reader: of the policy's own data.
        batch_size: what one `sample` takes, of both kinds together.
        expert_reader: of the expert's data.
        expert_data_ratio: share of the expert's data, between 0 and 1.
        sft_dataset_name: name of the expert's data, for messages.
        kwargs: the arguments of `SampleStrategy`.
    """

    _: KW_ONLY
    expert_reader: sample_strategy.SampleReader | None = None
    expert_data_ratio: float = checked(0.5, SHARE)
    sft_dataset_name: str = "sft_dataset"

    @override
    def plan(self, step: int, size: int) -> sample_strategy.SamplePlan:
        """Return how ``size`` units are divided."""
        # Rounded up: a small step still has an expert's row.
        expert = math.ceil(self.expert_data_ratio * size)
        return sample_strategy.SamplePlan(size - expert, expert)

    @override
    async def sample(self, step: int) -> sample_strategy.Sampled:
        """Return the policy's own experiences, then the expert's."""
        plan = self.plan(step, self.batch_size)
        usual = await self._taken(self.reader, plan.usual)
        expert = await self._taken(self.expert_reader, plan.expert)
        for experience in expert:
            experience.reward = 0.0
            # Columns of zeros, so that both kinds collate into one batch; the loss masks them.
            for name in ("logprobs", "advantages", "returns"):
                zeros = torch.zeros(experience.response_length, dtype=torch.float32)
                setattr(experience, name, zeros)
        for rows, is_expert in ((usual, False), (expert, True)):
            for experience in rows:
                experience.info.update(is_expert=is_expert, step=step)
                experience.custom_fields = list(CUSTOM_FIELDS)
        return (
            [*usual, *expert],
            sample_strategy.version_metrics(usual),
            sample_strategy.representative_samples(usual),
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return how far both readers are."""
        return {
            name: {} if reader is None else dict(reader.state_dict())
            for name, reader in self._readers().items()
        }

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``."""
        for name, reader in self._readers().items():
            if reader is not None:
                reader.load_state_dict(state[name])

    def _readers(self) -> dict[str, sample_strategy.SampleReader | None]:
        return {"usual": self.reader, "expert": self.expert_reader}

    async def _taken(
        self, reader: sample_strategy.SampleReader | None, size: int
    ) -> list[Experience]:
        if size == 0:
            return []
        if reader is None:
            raise InvalidArgumentError(
                f"sampling needs reader= and expert_reader= (of {self.sft_dataset_name!r})"
            )
        return await reader.read(size)
