"""Only the pass that is trained has dropout, not what it is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

import trinity_buffer as tb
from tests.trainer.data import CONFIG, VOCABULARY, policy, prepared
from tests.trainer.qwen import qwen2
from trinity_buffer.algorithm import build
from trinity_buffer.demo.policy import TransformerCritic, TransformerPolicy
from trinity_buffer.trainer.causal_lm import CausalLM
from trinity_buffer.trainer.models import Models, prepare
from trinity_buffer.trainer.policy import TokenScores, in_eval_mode
from trinity_buffer.trainer.trainer import StepReport


def model() -> Any:
    """Return a model in training mode, but for one layer that its user has frozen."""
    made = qwen2(vocab_size=VOCABULARY, attention_dropout=0.5).train()
    made.model.layers[0].eval()
    return made


class Droppy(TransformerPolicy):
    """A policy of its own kind, with dropout over the scores of the tokens."""

    @override
    def scores(self, microbatch: Mapping[str, Any]) -> TokenScores:
        found = super().scores(microbatch)
        dropped = nn.functional.dropout(found.logprob, 0.5, self.training)
        return TokenScores(dropped, found.entropy)


class Holder:
    """A policy that is no module, but holds one."""

    file_name = "policy.safetensors"

    def __init__(self) -> None:
        self.net = Droppy(CONFIG, seed=0).train()

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.net.parameters()

    def scores(self, microbatch: Mapping[str, Any]) -> TokenScores:
        return self.net.scores(microbatch)

    def save(self, path: str | Path) -> None:
        self.net.save(path)

    def restore(self, path: str | Path) -> None:
        self.net.restore(path)


class DroppyCritic(TransformerCritic):
    """A critic with dropout over its values."""

    @override
    def values(self, *args: Any, **kwargs: Any) -> Tensor:
        return nn.functional.dropout(super().values(*args, **kwargs) + 1, 0.5, self.training)


@pytest.mark.parametrize("make", [lambda: CausalLM(model()), Holder, lambda: Droppy(CONFIG)])
def test_what_a_step_is_compared_with_is_computed_without_dropout(
    make: Any, sqlite_url: str
) -> None:
    algorithm = build("ppo", kl_loss_fn="k2", kl_penalty_fn="k1")
    anyio.run(prepared, sqlite_url, algorithm)
    critic = DroppyCritic(CONFIG, seed=3)
    nn.init.normal_(critic.head.weight)
    with tb.open_train_stream(
        sqlite_url, experiment="run", strategy=None, groups_per_step=2
    ) as stream:
        step = next(iter(stream))
        models = Models(make(), critic, make(), make())
        metrics = prepare(step, algorithm, models, recompute_old_logprob=True)
    assert float(metrics["penalty/kl"]) == 0
    for microbatch in step.microbatches:
        plain = make()
        with in_eval_mode(plain, critic):
            expected = plain.scores(microbatch).logprob
            values = critic.values(microbatch["input_ids"])
        for name in ("old_logprob", "ref_logprob", "teacher_logprob"):
            assert torch.equal(microbatch[name], expected), name
        assert torch.equal(microbatch["values"], values)
    assert critic.training


def test_each_module_has_its_own_mode_again(sqlite_url: str, tmp_path: Path) -> None:
    anyio.run(prepared, sqlite_url, build("grpo"))
    trained = model()
    before = {name: module.training for name, module in trained.named_modules()}
    assert {*before.values()} == {True, False}
    seen: list[bool] = []
    trained.register_forward_pre_hook(lambda *_: seen.append(trained.training))
    settings = tb.TrainerSettings(
        checkpoints=tmp_path, max_steps=1, recompute_old_logprob=True, learning_rate=0.0
    )
    reports: list[StepReport] = []
    with tb.open_train_stream(
        sqlite_url, experiment="run", strategy="grpo", groups_per_step=2
    ) as stream:
        tb.Trainer(stream, trained, build("grpo"), settings).run(reports.append)
    # Before the step, and the reference, a copy: both are tried out first; then the trained pass.
    assert seen == [False] * 4 + [False] * 4 + [True]
    assert {name: module.training for name, module in trained.named_modules()} == before


def test_modes_are_put_back_after_an_error() -> None:
    trained = policy().train()
    with pytest.raises(ZeroDivisionError), in_eval_mode(trained, None):
        1 / trained.training
    assert trained.training
