"""Which of two settings of a run's algorithm wins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trinity_buffer import open_store
from trinity_buffer.cli.options import Run
from trinity_buffer.cli.roles import annotate, prepare
from trinity_buffer.cli.run_config import (
    algorithm_of,
    effective,
    overridden,
    read_file,
    resolved,
)
from trinity_buffer.errors import InvalidArgumentError, UnknownNameError
from trinity_buffer.events import ConsumerRegistered
from trinity_buffer.trainer.requirements import strategies_of, strategy_of, stream_options


def args_of(part: str, **config: Any) -> dict[str, Any]:
    return dict(algorithm_of(resolved(config)).choices[part].args)


def test_the_algorithm_decides_what_nobody_sets() -> None:
    algorithm = algorithm_of(resolved({"algorithm": "opmd"}))
    assert strategy_of(algorithm) == "opmd"
    assert algorithm.choices["policy_loss_fn"].name == "opmd"
    assert algorithm.entropy_loss.entropy_coef == 0


@pytest.mark.parametrize(("algorithm", "runs"), [("sft", 1), ("cpt", 1), ("dpo", 1), ("grpo", 8)])
def test_rows_that_stand_alone_wait_for_no_others(algorithm: str, runs: int) -> None:
    assert resolved({"algorithm": algorithm}).rollouts_per_group == runs
    assert resolved({"algorithm": algorithm, "rollouts_per_group": 3}).rollouts_per_group == 3


@pytest.mark.parametrize("config", [{}, {"rollouts_per_group": 4}])
@pytest.mark.parametrize("overrides", [[], ["groups_per_step=2"]])
async def test_recorded_rows_stand_alone_unless_their_experiment_says_otherwise(
    new_sqlite_url: str, tmp_path: Path, config: dict[str, Any], overrides: list[str]
) -> None:
    async with open_store(new_sqlite_url) as store:
        await store.experiment("x", schema="sft", config=config)
    await prepare(Run(new_sqlite_url, "x", {"algorithm": "sft", "model": str(tmp_path)}, overrides))
    async with open_store(new_sqlite_url) as store:
        found = (await store.experiment("x")).config["rollouts_per_group"]
    assert found == config.get("rollouts_per_group", 1)


async def test_what_a_file_leaves_out_of_what_is_recorded_is_named(
    new_sqlite_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first = {"max_steps": 6, "seed": 3, "optimizer": {"learning_rate": 0.5, "weight_decay": 0.25}}
    args = {"kl_loss_fn": "none"}
    await prepare(
        Run(new_sqlite_url, "x", first | {"algorithm_args": args, "layout": "packed"}, [])
    )
    assert capsys.readouterr().out == ""
    then = {"optimizer": {"weight_decay": 0.25}}
    await prepare(
        Run(new_sqlite_url, "x", then, ["layout=packed", "algorithm_args.kl_loss_fn=none"])
    )
    said = "the file of --config leaves out max_steps=6, optimizer.learning_rate=0.5, seed=3, which"
    assert said in capsys.readouterr().out
    await prepare(Run(new_sqlite_url, "x", None, ["seed=4"]))  # there is no file
    await prepare(Run(new_sqlite_url, "x", first | {"max_steps": None, "algorithm_args": args}, []))
    assert "the file of --config leaves out layout='packed', which x" in capsys.readouterr().out
    async with open_store(new_sqlite_url) as store:
        assert (await store.experiment("x")).config["max_steps"] is None


@pytest.mark.parametrize("key", ["model", "rollout", "tasks", "evaluate", "tokenizer"])
def test_a_file_that_names_anything_of_ones_own_names_its_folder(tmp_path: Path, key: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'{key} = "mine"')
    assert (read_file(path).values or {})["folder"] == str(tmp_path)
    path.write_text(f'{key} = "mine"\nfolder = "below"')
    assert (read_file(path).values or {})["folder"] == str(tmp_path / "below")
    path.write_text("seed = 1")
    assert read_file(path).values == {"seed": 1}
    path = tmp_path / "run.yaml"
    path.write_text(f"{key}: mine\nfolder: null")
    assert (read_file(path).values or {})["folder"] == str(tmp_path)


def test_arguments_of_the_algorithm_win_over_its_recipe() -> None:
    given = {"policy_loss_fn_args": {"clip_range_high": 0.5}}
    assert args_of("policy_loss_fn", algorithm="dapo", algorithm_args=given) == {
        **args_of("policy_loss_fn", algorithm="dapo"),
        "clip_range_high": 0.5,
    }


def test_a_key_of_its_own_wins_over_the_arguments() -> None:
    algorithm = algorithm_of(
        resolved(
            {
                "algorithm_args": {
                    "policy_loss_fn_args": {"clip_range_low": 0.1, "clip_range_high": 0.5},
                    "entropy_loss_fn_args": {"entropy_coef": 0.5},
                    "add_strategy_args": {"epsilon": 1e-3},
                },
                "loss": {"args": {"clip_range_high": 0.3}},
                "optimizer": {"entropy_coef": 0.02},
                "strategy": "opmd",
                "rollouts_per_group": 4,
            }
        )
    )
    loss = algorithm.choices["policy_loss_fn"].args
    assert (loss["clip_range_low"], loss["clip_range_high"]) == (0.1, 0.3)
    assert algorithm.entropy_loss.entropy_coef == 0.02
    assert strategies_of(algorithm)[0] == ["opmd"]
    assert "epsilon" not in strategies_of(algorithm)[1]
    assert algorithm.rollouts_per_group == 4


def test_a_name_that_says_what_is_chosen_anyway_keeps_the_arguments() -> None:
    given = {"policy_loss_fn_args": {"clip_range": 0.5}, "add_strategy_args": {"epsilon": 0.25}}
    named = {"loss": {"name": "ppo"}, "strategy": "grpo"}
    for own in ({}, {"policy_loss_fn": "ppo", "add_strategy": "grpo"}):
        algorithm = algorithm_of(resolved({**named, "algorithm_args": {**given, **own}}))
        assert algorithm.choices["policy_loss_fn"].args["clip_range"] == 0.5
        assert strategies_of(algorithm)[1]["epsilon"] == 0.25


@pytest.mark.parametrize("several", [False, True])
def test_arguments_of_the_strategy_keep_the_others_among_those_of_the_algorithm(
    several: bool,
) -> None:
    given: dict[str, Any] = {"epsilon": 0.25, "std_threshold": 0.5}
    changed: dict[str, Any] = {"epsilon": 0.125}
    if several:
        given, changed = {"grpo": given}, {"grpo": changed}
    own = {"add_strategy_args": given}
    name = "dapo" if several else "grpo"
    config = {"algorithm": name, "algorithm_args": own, "strategy_args": changed}
    args = algorithm_of(resolved(config)).strategies[-1].args
    assert (args["epsilon"], args["std_threshold"]) == (0.125, 0.5)


def test_an_algorithm_of_your_own_may_leave_a_part_of_the_folder_without_an_argument(
    tmp_path: Path,
) -> None:
    """Without ``algorithm_args`` it cannot be built, and outside the folder not be found."""
    (tmp_path / "that_asks.py").write_text(
        """from trinity_buffer.algorithm.algorithm import AlgorithmType, Recipe
from trinity_buffer.algorithm.policy_loss_fn.ppo_policy_loss import PPOPolicyLossFn

class Loss(PPOPolicyLossFn):
    def __init__(self, width, backend="trinity"):
        super().__init__(clip_range=0.2, backend=backend)
        self.width = width

    @classmethod
    def default_args(cls):
        return {}

class Asking(AlgorithmType):
    use_critic = use_reference = compute_advantage_in_trainer = False
    can_balance_batch, schema = True, "experience"
    recipe = Recipe(add_strategy=("grpo",), policy_loss_fn="that_asks.Loss")
"""
    )
    args = {"policy_loss_fn_args": {"width": 3}}
    config = resolved({"algorithm": "that_asks.Asking", "algorithm_args": args})
    made: Any = algorithm_of(replace(config, folder=str(tmp_path))).policy_loss
    assert made.width == 3


def test_a_replay_is_configured_without_what_had_no_effect() -> None:
    given = {"kl_loss_fn": "none", "kl_loss_fn_args": {"kl_coef": 0.5}, "kl_penalty_fn": "k1"}
    run = resolved({"algorithm_args": given, "teacher": "t", "reference": "r"})
    with pytest.raises(InvalidArgumentError, match="no effect"):
        algorithm_of(run)
    left = effective(run)
    assert left.algorithm_args == {"kl_loss_fn": "none"}
    assert left.teacher is left.reference is None
    used = {"algorithm": "ppo", "algorithm_args": {"kl_penalty_fn": "k1", "kl_loss_fn": "none"}}
    config = resolved({**used, "reference": "r", "optimizer": {"entropy_coef": 0.25}})
    assert effective(config) == config


def test_an_argument_that_no_stream_takes_is_not_dropped() -> None:
    args = {"sample_strategy_args": {"sft_dataset_name": "mine"}}
    algorithm = algorithm_of(resolved({"algorithm": "mix", "algorithm_args": args}))
    with pytest.raises(InvalidArgumentError, match=r"not sft_dataset_name"):
        stream_options(algorithm)
    assert stream_options(algorithm_of(resolved({"algorithm": "mix"})))["expert_data_ratio"] == 0.5


def test_a_section_that_is_set_keeps_the_keys_that_it_leaves_out() -> None:
    before = {"optimizer": {"weight_decay": 0.25, "learning_rate": 0.5}}
    then = overridden(before, ["optimizer.warmup_steps=3", "optimizer={learning_rate=0.1}"])
    wanted = {"weight_decay": 0.25, "learning_rate": 0.1, "warmup_steps": 3}
    assert then["optimizer"] == wanted


@pytest.mark.parametrize("several", [False, True])
async def test_an_argument_of_annotate_leaves_the_others_of_the_run_as_they_are(
    new_sqlite_url: str, several: bool
) -> None:
    configured: dict[str, Any] = {"std_threshold": 0.25, "epsilon": 0.5}
    changed: dict[str, Any] = {"epsilon": 0.125}
    if several:
        configured, changed = {"grpo": configured}, {"grpo": changed}
    strategy = "reward_variance+grpo" if several else "grpo"
    config = {"strategy": strategy, "strategy_args": configured, "model": {}}
    async with open_store(new_sqlite_url) as store:
        opened = await store.experiment("x", config=config)
        await annotate(new_sqlite_url, "x", strategy=None, name="n", args=changed, follow=False)
        facts = [event.fact async for event in opened.events(kinds=["ConsumerRegistered"])]
    assert isinstance(facts[-1], ConsumerRegistered)
    args = facts[-1].config["args"]
    args = args.get("grpo", args)
    assert (args["std_threshold"], args["epsilon"]) == (0.25, 0.125)


def test_an_entropy_bonus_may_be_asked_of_an_algorithm_without_one() -> None:
    algorithm = algorithm_of(resolved({"algorithm": "asymre", "optimizer": {"entropy_coef": 0.02}}))
    assert algorithm.choices["entropy_loss_fn"].name == "default"
    assert algorithm.needs_entropy


def test_a_list_of_strategies_is_one_set() -> None:
    algorithm = algorithm_of(resolved({"algorithm": "dapo"}))
    assert strategy_of(algorithm) == "dapo_dynamic_sampling+grpo"
    names, args = strategies_of(algorithm)
    assert set(args) == set(names)


def test_what_an_algorithm_asks_of_the_stream() -> None:
    def asked(name: str, **config: Any) -> dict[str, Any]:
        return stream_options(algorithm_of(resolved({"algorithm": name})), **config)

    assert asked("grpo")["needs"] == ("advantages", "logprobs")
    assert asked("grpo", recompute_old_logprob=True)["needs"] == ("advantages",)
    assert asked("rloo")["needs"] == ("logprobs", "reward")
    assert asked("sft")["needs"] == asked("dpo")["needs"] == ()
    assert asked("jsd")["needs"] == ("logprobs", "teacher_logprobs")
    assert asked("jsd", teacher=True)["needs"] == ("logprobs",)
    assert asked("mix")["sample_strategy"] == "mix"
    assert asked("mix")["expert_data_ratio"] == 0.5


@pytest.mark.parametrize(
    ("overrides", "args"),
    [
        (["loss.name=topr"], {}),
        (["loss.args.advantage_threshold=1", "loss.name=topr"], {"advantage_threshold": 1}),
        (["algorithm=opmd"], {}),
        (
            ["algorithm=grpo", "loss.args.clip_range=0.1"],
            {"clip_range_low": 0.3, "clip_range": 0.1},
        ),
    ],
)
def test_another_loss_does_not_get_the_arguments_of_the_one_before(
    overrides: list[str], args: dict[str, Any]
) -> None:
    recorded = {"algorithm": "grpo", "loss": {"name": None, "args": {"clip_range_low": 0.3}}}
    config = resolved(overridden(recorded, overrides))
    assert config.loss.args == args
    assert algorithm_of(config).name == config.algorithm


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"algorithm": "grop"}, "grpo"),
        ({"algorithm_args": {"policy_los_fn": "ppo"}}, "policy_loss_fn"),
        ({"loss": {"args": {"clip_rang": 0.1}}}, "clip_range"),
        ({"algorithm_args": {"kl_loss_fn": "k4"}}, "k3"),
    ],
)
def test_a_misspelt_setting_is_met_with_what_is_accepted(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises((UnknownNameError, InvalidArgumentError), match=message):
        algorithm_of(resolved(config))
