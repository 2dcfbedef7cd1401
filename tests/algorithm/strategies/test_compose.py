from __future__ import annotations

from typing import Any

import pytest
from typing_extensions import override

from tests.algorithm.strategies.rollouts import (
    PlainWriter,
    group,
    rejected,
    rollout,
    scores,
    written,
)
from trinity_buffer.algorithm.add_strategy import AddStrategy, compose, original_uid
from trinity_buffer.errors import InvalidArgumentError, InvalidExperienceError, UnknownNameError
from trinity_buffer.experience import Experience
from trinity_buffer.writer import StagedWriter


class Forgetful(AddStrategy):
    """Writes the first experience and says nothing of the others."""

    @override
    async def add(self, experiences: list[Experience], step: int) -> tuple[int, dict[str, Any]]:
        await self.writer.write_async(experiences[:1])
        return 1, {"kept_groups": 1}


async def test_what_the_filter_keeps_is_what_the_next_one_scores() -> None:
    writer = StagedWriter()
    exps = [*group([1.0, 1.0], "equal"), *group([0.0, 2.0], "differ")]
    count, metrics = await compose(writer, ["reward_variance", "grpo"]).add(exps, 4)
    assert count == 2
    assert scores(written(writer)) == pytest.approx([-(2**-0.5), 2**-0.5], rel=1e-5)
    assert rejected(writer) == [
        ("b/equal/0/0/", "zero_variance"),
        ("b/equal/1/0/", "zero_variance"),
    ]
    assert metrics["kept_groups"] == 1
    assert metrics["group_advantages/reward_mean/mean"] == 1.0


async def test_what_a_stage_forgets_counts_as_filtered() -> None:
    writer = StagedWriter()
    await compose(writer, [Forgetful, "grpo"]).add(group([0.0, 1.0]), 0)
    assert rejected(writer) == [("b/0/1/0/", "filtered")]


async def test_metrics_of_the_same_name_are_kept_apart() -> None:
    writer = StagedWriter()
    _, metrics = await compose(writer, ["reward_variance", Forgetful]).add(group([0.0, 1.0]), 0)
    assert metrics["kept_groups"] == 1
    assert metrics["Forgetful/kept_groups"] == 1


async def test_copies_are_scored_as_groups_of_their_own() -> None:
    writer = StagedWriter()
    exps = [*group([0.0, 2.0], "a"), *group([1.0, 1.0], "b")]
    await compose(writer, ["duplicate_informative", "grpo"]).add(exps, 0)
    assert [len(some) for some in writer.groups] == [2, 2]
    assert scores(writer.groups[0]) == scores(writer.groups[1])
    assert original_uid(writer.groups[1][0]) == "b/a/0/0/"


async def test_a_copy_that_a_later_stage_leaves_out_is_not_rejected() -> None:
    writer = StagedWriter()
    exps = [*group([0.0, 2.0], "a"), *group([1.0, 1.0], "b")]
    await compose(writer, ["duplicate_informative", Forgetful]).add(exps, 0)
    assert all(original_uid(e) is None for e, _ in writer.rejections)
    assert len(writer.rejections) == 3


def test_a_composition_needs_what_its_parts_need() -> None:
    composed = compose(StagedWriter(), ["reward_variance", "correct_bias"])
    assert composed.unit_for() == "group"
    assert composed.families_for() == ("light", "tokens")
    assert composed.annotates
    whole = compose(StagedWriter(), ["duplicate_informative"])
    assert whole.unit == "batch"
    assert not whole.annotates
    by_arguments = compose(
        StagedWriter(), ["grpo_grouped"], {"grpo_grouped": {"std_cal_level": "batch"}}
    )
    assert by_arguments.unit == "batch"


@pytest.mark.parametrize("names", [[], ["grpo", "grpo"]])
def test_a_list_names_each_strategy_once(names: list[str]) -> None:
    with pytest.raises(InvalidArgumentError, match="at least one, and each only once"):
        compose(StagedWriter(), names)


def test_arguments_for_a_strategy_that_is_not_there_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"'gripo'.*did you mean 'grpo'"):
        compose(StagedWriter(), ["grpo"], {"gripo": {}})
    with pytest.raises(InvalidArgumentError, match="did you mean 'epsilon'"):
        compose(StagedWriter(), ["grpo"], {"grpo": {"epsilom": 1.0}})
    with pytest.raises(UnknownNameError, match="did you mean 'grpo'"):
        compose(StagedWriter(), ["gripo"])


async def test_an_empty_unit_is_nothing_to_write() -> None:
    writer = StagedWriter()
    assert await compose(writer, ["reward_variance", "grpo"]).add([], 0) == (0, {})
    assert (await compose(writer, ["grpo"]).add([rollout()], 0))[0] == 1


async def test_what_cannot_be_rejected_is_an_error_before_anything_is_written() -> None:
    writer = PlainWriter()
    experiences = [rollout(run=run, reward=reward) for run, reward in enumerate([None, 1.0, 0.0])]
    with pytest.raises(InvalidExperienceError, match="invalid: reward"):
        await compose(writer, ["reward_variance", "grpo"]).add(experiences, 0)
    assert writer.writes == []
