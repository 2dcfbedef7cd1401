"""The learning rate of each step: it rises, falls, and stays at its lowest."""

from __future__ import annotations

from pathlib import Path

import pytest

import trinity_buffer as tb

SETTINGS = tb.TrainerSettings(
    checkpoints=Path("unused"),
    learning_rate=0.5,
    critic_learning_rate=2.0,
    warmup_steps=3,
    decay_steps=10,
    lowest_rate=0.2,
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


@pytest.mark.parametrize("step", SHARES)
def test_the_rate_of_a_step_rises_falls_and_stays(step: int) -> None:
    assert SETTINGS.rate_at(step) == pytest.approx(0.5 * SHARES[step])
    assert SETTINGS.critic_rate_at(step) == pytest.approx(2.0 * SHARES[step])


def test_a_rate_without_a_schedule_is_one_number() -> None:
    settings = tb.TrainerSettings(checkpoints=Path("unused"), learning_rate=0.5)
    assert {settings.rate_at(step) for step in (1, 2, 1000)} == {0.5}
