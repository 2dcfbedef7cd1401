"""The learning rate of each step, and what a restart with other settings changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from torch.optim import AdamW

import trinity_buffer as tb
from tests.trainer.data import policy, prepared
from tests.trainer.gradients import train
from trinity_buffer.algorithm import build
from trinity_buffer.errors import CheckpointError

SETTINGS = tb.TrainerSettings(
    checkpoints=Path("unused"),
    learning_rate=0.5,
    critic_learning_rate=2.0,
    warmup_steps=3,
    decay_steps=10,
    min_lr_ratio=0.2,
)
SHARES = {
    1: 0.25 * 0.92,
    2: 0.5 * 0.84,
    3: 0.75 * 0.76,
    4: 0.68,
    9: 0.28,
    10: 0.2,
    11: 0.2,
    99: 0.2,
}
"""Step -> share of the highest rate: what it has risen to, times what it has fallen to."""


def test_a_learning_rate_of_0_trains_the_critic_alone(sqlite_url: str, tmp_path: Path) -> None:
    algorithm = build("ppo")
    anyio.run(prepared, sqlite_url, algorithm)
    trainer, _ = train(sqlite_url, algorithm, tmp_path, max_steps=1, learning_rate=0.0)
    for name, weight in policy().state_dict().items():
        assert torch.equal(weight, trainer.policy.state_dict()[name]), name
    critic: Any = trainer.state.critic
    fresh, trained = policy().new_critic().state_dict(), critic[0].state_dict()
    assert any(not torch.equal(weight, trained[name]) for name, weight in fresh.items())


@pytest.mark.parametrize("step", SHARES)
def test_the_rate_of_a_step_rises_falls_and_stays(step: int) -> None:
    assert SETTINGS.rate_at(step) == pytest.approx(0.5 * SHARES[step])
    assert SETTINGS.critic_rate_at(step) == pytest.approx(2.0 * SHARES[step])


def test_a_rate_without_a_schedule_is_one_number() -> None:
    settings = tb.TrainerSettings(checkpoints=Path("unused"), learning_rate=0.5)
    assert {settings.rate_at(step) for step in (1, 2, 1000)} == {0.5}


OTHERS: dict[str, Any] = {"learning_rate": 0.25, "weight_decay": 0.5, "betas": (0.5, 0.6)}


@pytest.mark.parametrize("name", OTHERS)
def test_a_setting_changed_at_a_restart_holds_from_there_on(
    name: str, sqlite_url: str, tmp_path: Path
) -> None:
    """The step after the restart is the one of AdamW itself with the other setting."""
    anyio.run(prepared, sqlite_url, build("ppo"))
    same: dict[str, Any] = {}
    other = {name: OTHERS[name]}
    trained = {}
    for consumer, changed in (("same", same), ("other", other)):
        train(sqlite_url, build("ppo"), tmp_path / consumer, max_steps=1, consumer=consumer)
        trainer, _ = train(
            sqlite_url, build("ppo"), tmp_path / consumer, max_steps=2, consumer=consumer, **changed
        )
        trained[consumer] = trainer
    for part in ("policy", "critic"):
        weights = [_weights(trainer, part) for trainer in trained.values()]
        is_rate_of_policy = name == "learning_rate" and part == "critic"
        assert torch.equal(*weights) == is_rate_of_policy  # the critic has a rate of its own
    state = trained["other"].state
    assert state.critic is not None
    for optimizer in (state.optimizer, state.critic[1]):
        group = optimizer.param_groups[0]
        assert tuple(group["betas"]) == other.get("betas", (0.9, 0.999))
        assert group["weight_decay"] == other.get("weight_decay", 0.0)
    assert state.optimizer.param_groups[0]["lr"] == other.get("learning_rate", 1e-3)


def _weights(trainer: tb.Trainer, part: str) -> torch.Tensor:
    critic = trainer.state.critic
    assert critic is not None
    model = trainer.policy if part == "policy" else critic[0]
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def test_the_settings_of_a_given_optimizer_stay_and_a_warning_names_those_that_differ(
    sqlite_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    anyio.run(prepared, sqlite_url, build("grpo"))

    def trainer(max_steps: int, **given: Any) -> torch.optim.Optimizer:
        model = policy()
        optimizer = AdamW(model.parameters(), **given)
        settings = tb.TrainerSettings(checkpoints=tmp_path, max_steps=max_steps)
        with tb.open_train_stream(
            sqlite_url, experiment="run", strategy="grpo", groups_per_step=2
        ) as stream:
            tb.Trainer(stream, model, build("grpo"), settings, optimizer=optimizer).run()
        return optimizer

    trainer(1, lr=0.01, weight_decay=0.1)
    trainer(2, lr=0.01, weight_decay=0.1)
    assert not caplog.records
    group = trainer(3, lr=0.02, weight_decay=0.3).param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.01, 0.1)
    (record,) = caplog.records
    assert record.getMessage() == (
        "the settings of the given AdamW are those of the checkpoint: param_groups[0]['lr'] = 0.01 "
        "(not 0.02), param_groups[0]['weight_decay'] = 0.1 (not 0.3); to change them, assign to "
        "optimizer.param_groups once the Trainer is made"
    )


def _two_groups(weights: list[Any], size: int) -> AdamW:
    groups: Any = [{"params": weights[:size]}, {"params": weights[size:], "weight_decay": 0.0}]
    return AdamW(groups)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (None, r"has groups of \[3, \d+\] weights, not of \[\d+\]"),
        (lambda weights: _two_groups(weights, 5), r"not of \[5, \d+\]"),
        (lambda weights: AdamW(weights[:4]), r"not of \[4\]"),
        (lambda weights: _two_groups(weights[::-1], 3), "has its weights in another order"),
        (
            lambda weights: torch.optim.SGD(
                [{"params": weights[:3]}, {"params": weights[3:]}], 0.1
            ),
            "has amsgrad, betas, .*: it is another optimizer",
        ),
    ],
)
def test_the_state_of_another_optimizer_is_refused_at_a_restart(
    make: Any, says: str, sqlite_url: str, tmp_path: Path
) -> None:
    anyio.run(prepared, sqlite_url, build("grpo"))

    def life(steps: int, make: Any) -> None:
        settings = tb.TrainerSettings(checkpoints=tmp_path, max_steps=steps)
        options: dict[str, Any] = {"strategy": "grpo", "groups_per_step": 2}
        with tb.open_train_stream(sqlite_url, experiment="run", **options) as stream:
            model = policy()
            optimizer = None if make is None else make(list(model.parameters()))
            tb.Trainer(stream, model, build("grpo"), settings, optimizer=optimizer).run()

    life(1, lambda weights: _two_groups(weights, 3))
    with pytest.raises(CheckpointError, match=rf"not this (AdamW|SGD): it .*{says}"):
        life(2, make)
    life(2, lambda weights: _two_groups(weights, 3))
