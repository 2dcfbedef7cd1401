"""An annotation set is taken up again by what means the same, and by nothing else."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

import pytest

from tests.contract.making import group, opened
from tests.pipeline.watching import Watcher
from tests.raw_store import rows
from trinity_buffer import GroupingRules, run_strategy
from trinity_buffer.algorithm import ADD_STRATEGY
from trinity_buffer.errors import ConflictingStrategyError
from trinity_buffer.pipeline.annotate.deciding import config_diff

DEFAULTS = ADD_STRATEGY.get("grpo").default_args()
FILTER = ADD_STRATEGY.get("reward_variance").default_args()


class Odd(Watcher):
    """Has defaults that JSON tells otherwise, or cannot tell."""

    def __init__(
        self, writer: Any, pair: tuple[int, int] = (1, 2), key: Any = len, **more: Any
    ) -> None:
        super().__init__(writer, **more)
        self.pair = pair


@pytest.mark.parametrize(
    ("strategy", "first", "second"),
    [
        ("grpo", {}, DEFAULTS),
        ("grpo", DEFAULTS, {"epsilon": 1e-6}),
        (["reward_variance", "grpo"], {}, {"grpo": DEFAULTS, "reward_variance": FILTER}),
        (["reward_variance", "grpo"], {"grpo": DEFAULTS}, {"reward_variance": {}}),
        (Odd, {}, {"pair": (1, 2)}),
    ],
)
async def test_a_default_is_the_same_spelled_out(
    sqlite_url: str, strategy: Any, first: dict[str, Any], second: dict[str, Any]
) -> None:
    async with opened(sqlite_url, rollouts_per_group=4) as experiment:
        await experiment.writer("e0").write(group(rewards=[0.0, 1.0, 1.0, 1.0]))
        assert (await run_strategy(experiment, strategy, first)).annotated == 4
        (before,) = await rows(experiment, "consumer")
        assert (await run_strategy(experiment, strategy, second)).annotated == 0
        (after,) = await rows(experiment, "consumer")
        assert before == after, "what was recorded stays as it is"


def test_a_set_that_was_made_before_there_was_a_rule_goes_on() -> None:
    made = {"strategy": ["grpo"], "args": {}}
    before = {
        **made,
        "grouping": {"rollouts_per_group": 2, "deadline_s": None, "incomplete": "keep"},
    }
    classes = [("grpo", ADD_STRATEGY.get("grpo"))]
    for idle_s, is_same in ((None, True), (5.0, False)):
        now = {**made, "grouping": asdict(GroupingRules(rollouts_per_group=2, idle_s=idle_s))}
        assert (config_diff(classes, before, now) is None) is is_same


@pytest.mark.parametrize(
    ("strategy", "first", "second"),
    [
        ("grpo", {}, DEFAULTS | {"ddof": 0}),
        ("grpo", DEFAULTS | {"ddof": 0}, {}),
        (["reward_variance", "grpo"], {}, {"grpo": {"ddof": 0}}),
        (Odd, {}, {"pair": (1, 3)}),
        (Odd, {}, {"key": "len"}),
    ],
)
async def test_another_argument_than_the_default_is_another_set(
    sqlite_url: str, strategy: Any, first: dict[str, Any], second: dict[str, Any]
) -> None:
    async with opened(sqlite_url, rollouts_per_group=4) as experiment:
        await run_strategy(experiment, strategy, first, name="set")
        with pytest.raises(ConflictingStrategyError, match="name="):
            await run_strategy(experiment, strategy, second, name="set")


@pytest.mark.parametrize(
    ("strategy", "first", "second", "says"),
    [
        ("grpo", {}, {"epsilon": 0.5}, "made with epsilon=1e-06, this is epsilon=0.5: give"),
        (
            ["reward_variance", "grpo"],
            {},
            {"grpo": {"ddof": 0}},
            "made with grpo.ddof=1, this is grpo.ddof=0: give",
        ),
        ("grpo", {}, None, "made with rollouts_per_group=4, this is rollouts_per_group=2: give"),
    ],
)
async def test_the_arguments_that_differ_are_told_and_no_others(
    sqlite_url: str, strategy: Any, first: Any, second: Any, says: str
) -> None:
    async with opened(sqlite_url, rollouts_per_group=4) as experiment:
        await run_strategy(experiment, strategy, first, name="set")
        grouping: dict[str, Any] = {} if second is not None else {"rollouts_per_group": 2}
        with pytest.raises(ConflictingStrategyError, match=re.escape(says)):
            await run_strategy(experiment, strategy, second or {}, name="set", **grouping)


async def test_other_strategies_are_another_set(sqlite_url: str) -> None:
    async with opened(sqlite_url, rollouts_per_group=4) as experiment:
        await run_strategy(experiment, ["reward_variance", "grpo"], name="set")
        for other in ("grpo", ["grpo", "reward_variance"], ["reward_variance", "opmd"]):
            with pytest.raises(ConflictingStrategyError, match="name="):
                await run_strategy(experiment, other, name="set")


async def test_both_spellings_of_a_path_are_the_same_strategy(sqlite_url: str) -> None:
    module = "trinity_buffer.algorithm.add_strategy"
    async with opened(sqlite_url, rollouts_per_group=4) as experiment:
        for path in (f"{module}.GRPOAddStrategy", f"{module}:GRPOAddStrategy"):
            await run_strategy(experiment, path, name="set")


async def test_an_own_default_that_changed_is_another_configuration(sqlite_url: str) -> None:
    def having(default: float) -> type[Watcher]:
        class Own(Watcher):
            def __init__(self, writer: Any, scale: float = default, **more: Any) -> None:
                super().__init__(writer, **more)

        return Own

    async with opened(sqlite_url, rollouts_per_group=4) as experiment:
        for strategy in (having(1.0), having(1.0)):
            await run_strategy(experiment, strategy)
        with pytest.raises(ConflictingStrategyError, match=r"with scale=1\.0, this is scale=2\.0"):
            await run_strategy(experiment, having(2.0))


async def test_what_differs_is_said_whatever_the_set_is_called(sqlite_url: str) -> None:
    async with opened(sqlite_url, rollouts_per_group=4) as experiment:
        await run_strategy(experiment, "grpo", name="of {lr}")
        with pytest.raises(ConflictingStrategyError, match=r"'of \{lr\}' .* this is epsilon=0\.5"):
            await run_strategy(experiment, "grpo", {"epsilon": 0.5}, name="of {lr}")
