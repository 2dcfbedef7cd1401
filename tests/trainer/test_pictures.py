"""Rows with pictures: only a policy that says that it reads them is trained on them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor
from typing_extensions import override

import trinity_buffer as tb
from tests.trainer.data import CONFIG, VOCABULARY, policy, recorded, rollouts
from tests.trainer.qwen import qwen2
from trinity_buffer.algorithm import build
from trinity_buffer.demo.policy import TransformerPolicy
from trinity_buffer.errors import InvalidArgumentError, TrainingError
from trinity_buffer.trainer.last_hidden import OutputHead
from trinity_buffer.trainer.policy import TokenScores


async def with_pictures(url: str) -> None:
    made = rollouts()
    made[4].multi_modal_inputs = {"pixel_values": torch.full((2, 3), 0.5)}
    async with tb.open_store(url) as store:
        experiment = await recorded(store, "run", "experience", made)
        await tb.run_strategy(experiment, "grpo")


def train(url: str, folder: Path, model: Any, **given: Any) -> None:
    settings = tb.TrainerSettings(checkpoints=folder, max_steps=1)
    with tb.open_train_stream(url, experiment="run", strategy="grpo", groups_per_step=6) as stream:
        tb.Trainer(stream, model, build("grpo", kl_loss_fn="k2"), settings, **given).run()


class Looking(TransformerPolicy):
    """A policy that looks at pictures."""

    takes = frozenset({"multi_modal_inputs"})
    seen = 0.0

    @override
    def scores(self, microbatch: Mapping[str, Any]) -> TokenScores:
        inputs = microbatch.multi_modal_inputs  # type: ignore[attr-defined]  # of a MicroBatch
        self.seen = max(float(one["pixel_values"].max()) for one in inputs if one)
        return super().scores(microbatch)


class LookingModel(TransformerPolicy):
    """A model that says its hidden states itself, as `CausalLM` takes it."""

    takes = frozenset({"multi_modal_inputs"})

    @override
    def last_hidden(self, microbatch: Mapping[str, Any]) -> tuple[Tensor, OutputHead]:
        assert any(microbatch.multi_modal_inputs)  # type: ignore[attr-defined]  # of a MicroBatch
        return super().last_hidden(microbatch)


@pytest.mark.parametrize("make", [policy, lambda: qwen2(vocab_size=VOCABULARY)])
def test_a_policy_that_does_not_read_pictures_is_given_none(
    make: Any, sqlite_url: str, tmp_path: Path
) -> None:
    anyio.run(with_pictures, sqlite_url)
    says = (
        r"^step 1: row b0/1/1/0/ has multi_modal_inputs, and the policy, a \w+, would pass over "
        r"it: give a policy that reads it and says so, takes = \{'multi_modal_inputs'\}\. Go on "
    )
    with pytest.raises(TrainingError, match=says):
        train(sqlite_url, tmp_path, make())


def test_a_reference_that_does_not_read_pictures_is_refused(
    sqlite_url: str, tmp_path: Path
) -> None:
    anyio.run(with_pictures, sqlite_url)
    with pytest.raises(TrainingError, match="and the reference, a TransformerPolicy, would pass"):
        train(sqlite_url, tmp_path, Looking(CONFIG), reference=policy())


def test_a_policy_that_reads_pictures_is_trained_on_them(sqlite_url: str, tmp_path: Path) -> None:
    anyio.run(with_pictures, sqlite_url)
    model = Looking(CONFIG, seed=0)
    train(sqlite_url, tmp_path, model)
    assert model.seen == 0.5


def test_a_loop_of_ones_own_hears_that_a_model_is_given_no_pictures(sqlite_url: str) -> None:
    anyio.run(with_pictures, sqlite_url)
    with tb.open_train_stream(
        sqlite_url, experiment="run", strategy="grpo", groups_per_step=6
    ) as stream:
        (batch,) = next(iter(stream)).microbatches
    with pytest.raises(InvalidArgumentError, match="multi_modal_inputs, such as pixels, and Qwen2"):
        tb.token_scores(qwen2(vocab_size=VOCABULARY), batch)
    tb.token_scores(LookingModel(CONFIG), batch)
    with pytest.raises(TrainingError, match="given tokens alone"):
        batch.require_plain(1.0)
