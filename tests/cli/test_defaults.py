"""A run by configuration and one in Python begin with the same numbers."""

from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from tests.raw_store import append, appending
from trinity_buffer import GroupingRules, StreamOptions, open_store
from trinity_buffer.cli.roles import settings_of
from trinity_buffer.cli.run_config import overridden, read_file, resolved
from trinity_buffer.demo.policy import PolicyConfig
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.events import ConfigurationChanged, ExperimentCreated
from trinity_buffer.explorer.explore import ExploreOptions
from trinity_buffer.options import RENAMED, option_types
from trinity_buffer.pipeline.config import ExplorerConfig, ModelConfig, OptimizerConfig, RunConfig
from trinity_buffer.store.log import create_experiment
from trinity_buffer.trainer.trainer import TrainerSettings

SECTIONS: tuple[Any, ...] = (RunConfig, ModelConfig, OptimizerConfig, ExplorerConfig)
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
    told = [(field.name, field.default) for one in SECTIONS for field in fields(one)]
    differing = {
        name
        for name, default in read
        for other, said in told
        if name == other and MISSING is not default != said
    }
    assert differing == OTHERS.keys()


OLD_NAMES = """
deadline_s = 5.0
incomplete = "reject"
max_waiting_groups = 64
record_facts = false
dialect = "sglang"
model = "nowhere"
[exploring]
epochs = 2
[evaluation]
problems = 3
"""


def test_older_names_are_read_with_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(OLD_NAMES)
    with pytest.warns(FutureWarning, match="is called") as warned:
        config = resolved(overridden(read_file(file).values or {}, ["optimizer.lowest_rate=0.5"]))
    places = {str(of.message).partition(" ")[0]: (of.filename, of.lineno) for of in warned}
    lines = ["", *(line.partition(" ")[0].strip("[]") for line in OLD_NAMES.splitlines()[1:])]
    assert places == {
        name: (f"configuration {file}", number)
        for number, name in enumerate(lines, 1)
        if name in RENAMED
    } | {"lowest_rate": ("--set optimizer.lowest_rate", 1)}
    assert (config.group_timeout_s, config.on_incomplete_group) == (5.0, "reject")
    assert (config.max_queued_groups, config.record_row_metrics) == (64, False)
    assert (config.server_type, config.explorer.epochs) == ("sglang", 2)
    assert (config.evaluation.num_eval_samples, config.optimizer.min_lr_ratio) == (3, 0.5)


def older(**options: Any) -> dict[str, Any]:
    return options


def test_older_names_of_keywords_are_taken_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match="deadline_s is called group_timeout_s now"):
        rules = GroupingRules(**older(deadline_s=3))
    assert rules == GroupingRules(group_timeout_s=3)
    with pytest.warns(FutureWarning, match="record_tokens is called record_token_metrics now"):
        settings = TrainerSettings(checkpoints=Path("c"), **older(record_tokens=True))
    assert settings == TrainerSettings(checkpoints=Path("c"), record_token_metrics=True)
    with pytest.raises(InvalidArgumentError, match="leave lowest_rate out"):
        TrainerSettings(checkpoints=Path("c"), min_lr_ratio=1, **older(lowest_rate=1))


def test_a_text_in_place_of_a_path_is_refused_with_the_type_that_is_meant() -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"^checkpoints='x': it must be a pathlib\.Path$"
    ):
        TrainerSettings(**older(checkpoints="x"))


async def test_an_older_name_in_a_section_is_blamed_on_the_line_that_gives_it(
    new_sqlite_url: str,
) -> None:
    async with open_store(new_sqlite_url) as store:
        with pytest.warns(FutureWarning, match="problems is called num_eval_samples") as warned:
            await store.experiment("run", config={"evaluation": {"problems": 3}})
    assert [of.filename for of in warned] == [__file__]


async def test_what_was_recorded_under_older_names_is_read(new_sqlite_url: str) -> None:
    old = {"deadline_s": 3.0, "incomplete": "reject", "rollouts_per_group": 2}
    async with open_store(new_sqlite_url) as store:
        key = await store.database.write(create_experiment, "run")
        created = ExperimentCreated(config={"schema": "experience", **old})
        await store.database.write(appending(key, created))
        experiment = await store.experiment("run")
        assert GroupingRules.of(experiment.config).group_timeout_s == 3.0
        again = {"group_timeout_s": 3.0, "on_incomplete_group": "reject"}
        await store.experiment("run", config=again)
        assert [event.kind async for event in experiment.events()] == ["ExperimentCreated"]


@pytest.mark.parametrize("later", [7, None])
async def test_a_run_with_which_an_older_version_went_on_is_opened(
    new_sqlite_url: str, later: int | None
) -> None:
    """It left the name of today as it was, and recorded its own beside it."""
    async with open_store(new_sqlite_url) as store:
        experiment = await store.experiment("run", config={"max_queued_groups": 3})
        both = {**experiment.config, "max_waiting_groups": later}
        changed = ConfigurationChanged(changes={"max_waiting_groups": [None, later]}, config=both)
        await append(experiment, changed)
        experiment = await store.experiment("run")
        assert experiment.config == {"schema": "experience", "max_queued_groups": later}
        experiment = await store.experiment("run", config={"max_queued_groups": 5})
        assert experiment.config == {"schema": "experience", "max_queued_groups": 5}


def test_every_setting_of_a_trainer_comes_from_the_configuration() -> None:
    optimizer = OptimizerConfig(learning_rate=0.5, betas=(0.1, 0.2))
    config = RunConfig(optimizer=optimizer, seed=3, record_token_metrics=True, max_steps=7)
    found = settings_of(config, Path("somewhere"), 5)
    assert found == TrainerSettings(
        checkpoints=Path("somewhere"),
        keep_checkpoints=5,
        learning_rate=0.5,
        betas=(0.1, 0.2),
        seed=3,
        record_token_metrics=True,
        max_steps=7,
    )
    known = option_types(RunConfig).keys() | option_types(OptimizerConfig).keys()
    given = {one.name for one in fields(TrainerSettings)} - known
    assert given == {"checkpoints", "keep_checkpoints"}
