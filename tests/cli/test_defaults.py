"""A run by configuration and one in Python begin with the same numbers."""

from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from trinity_buffer import GroupingRules, StreamOptions
from trinity_buffer.cli.roles import settings_of
from trinity_buffer.cli.run_config import (
    ExploringConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    Section,
)
from trinity_buffer.demo.policy import PolicyConfig
from trinity_buffer.explorer.explore import ExploreOptions
from trinity_buffer.trainer.settings import TrainerSettings

SECTIONS: tuple[type[Section], ...] = (RunConfig, ModelConfig, OptimizerConfig, ExploringConfig)
READERS: tuple[Any, ...] = (
    *(PolicyConfig, ExploreOptions, GroupingRules, StreamOptions),
    TrainerSettings,
)
OTHERS = {
    "groups_per_step": "a stream alone takes the groups one by one",
    "max_staleness": "a stream alone rejects nothing for its age",
    "max_tokens": "one bounds a completion, the other an experience",
    "rollouts_per_group": "of batches that nobody planned, nobody knows",
}
"""Names whose defaults differ, and why."""


def test_a_default_is_the_same_in_the_configuration_and_where_it_is_read() -> None:
    read = [(one.name, one.default) for reader in READERS for one in fields(reader)]
    told = [(name, field.default) for one in SECTIONS for name, field in one.model_fields.items()]
    differing = {
        name
        for name, default in read
        for other, said in told
        if name == other and MISSING is not default != said
    }
    assert differing == OTHERS.keys()


def test_every_setting_of_a_trainer_comes_from_the_configuration() -> None:
    optimizer = OptimizerConfig(learning_rate=0.5, betas=(0.1, 0.2))
    config = RunConfig(optimizer=optimizer, seed=3, record_tokens=True, max_steps=7)
    found = settings_of(config, Path("somewhere"), 5)
    assert found == TrainerSettings(
        checkpoints=Path("somewhere"),
        keep_checkpoints=5,
        learning_rate=0.5,
        betas=(0.1, 0.2),
        seed=3,
        record_tokens=True,
        max_steps=7,
    )
    known = RunConfig.model_fields.keys() | OptimizerConfig.model_fields.keys()
    given = {one.name for one in fields(TrainerSettings)} - known
    assert given == {"checkpoints", "keep_checkpoints"}
