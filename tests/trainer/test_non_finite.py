"""NaN and Inf, planted in one place at a time: they change nothing, and reach nobody."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from safetensors.torch import load_file
from typing_extensions import override

from tests.handles import Event
from tests.registries import restored
from tests.trainer.data import policy, prepared
from tests.trainer.gradients import train
from trinity_buffer import open_replay_stream, open_store, open_train_stream
from trinity_buffer.algorithm import Algorithm, build
from trinity_buffer.algorithm.entropy_loss_fn import DefaultEntropyLossFn
from trinity_buffer.algorithm.entropy_loss_fn.entropy_loss_fn import ENTROPY_LOSS_FN
from trinity_buffer.algorithm.policy_loss_fn import PPOPolicyLossFn
from trinity_buffer.algorithm.policy_loss_fn.policy_loss_fn import POLICY_LOSS_FN
from trinity_buffer.demo.policy import TransformerPolicy
from trinity_buffer.errors import CheckpointError, NonFiniteError
from trinity_buffer.trainer.checkpoint import POLICY_FILE
from trinity_buffer.trainer.requirements import strategy_of, stream_options
from trinity_buffer.trainer.trainer import StepReport, Trainer, TrainerSettings

NAN, INF = math.nan, math.inf


class PlantedLoss(PPOPolicyLossFn):
    """PPO's loss with a number that is not finite, in the steps up to ``until`` but ``spared``."""

    def __init__(self, plant: str = "", until: int = 99, spared: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.plant, self.until, self.spared = plant, until, spared

    @override
    def __call__(  # type: ignore[override]
        self,
        logprob: torch.Tensor,
        old_logprob: torch.Tensor,
        action_mask: torch.Tensor,
        advantages: torch.Tensor,
        step: torch.Tensor,
        *,
        layout: Any = None,
    ) -> Any:
        plant = self.plant if int(step[0]) <= self.until and int(step[0]) != self.spared else ""
        row = torch.zeros_like(action_mask)
        row[1] = action_mask[1]
        if plant == "advantages":
            advantages = advantages.masked_fill(row, NAN)
        elif plant == "advantages inf":
            advantages = advantages.masked_fill(row, INF)
        elif plant == "old_logprob":
            old_logprob = old_logprob.masked_fill(row, NAN)
        elif plant == "logprob":
            logprob = logprob + torch.where(row, NAN, 0.0)
        loss, metrics = super().__call__(
            logprob, old_logprob, action_mask, advantages, layout=layout
        )
        still = (logprob - logprob.detach()).sum()
        loss = {
            "loss nan": loss + NAN,
            "loss inf": loss + INF,
            "loss -inf": loss - INF,
            "gradient": loss + still.abs().sqrt(),
            "norm": loss + still * 1e25,
        }.get(plant, loss)
        return loss, metrics | ({"planted": torch.tensor(NAN)} if plant == "metric" else {})


class PlantedEntropy(DefaultEntropyLossFn):
    """An entropy that is infinite."""

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        loss, metrics = super().__call__(*args, **kwargs)
        return loss - INF, metrics | {"entropy": torch.tensor(NAN)}


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    with restored(POLICY_LOSS_FN), restored(ENTROPY_LOSS_FN):
        POLICY_LOSS_FN.register_module("planted")(PlantedLoss)
        ENTROPY_LOSS_FN.register_module("planted")(PlantedEntropy)
        yield


def planted(plant: str, **arguments: Any) -> Algorithm:
    """Return GRPO with a loss in which ``plant`` is not finite."""
    return build(
        "grpo", policy_loss_fn="planted", policy_loss_fn_args={"plant": plant, **arguments}
    )


def numbers_of(value: Any) -> Iterator[float]:
    """Yield all floats of the body of an event."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, dict):
        yield from (number for one in value.values() for number in numbers_of(one))
    elif isinstance(value, (list, tuple)):
        yield from (number for one in value for number in numbers_of(one))


def events_of(url: str, *kinds: str) -> list[Event]:
    async def read() -> list[Event]:
        async with open_store(url, read_only=True) as store:
            experiment = await store.experiment("run")
            return [event async for event in experiment.events(kinds=kinds or None)]

    return anyio.run(read)


def assert_all_that_was_kept_is_finite(url: str, checkpoints: Path) -> None:
    """Look at every number of every event, and at every tensor of every checkpoint."""
    assert all(math.isfinite(number) for e in events_of(url) for number in numbers_of(e.body))
    for file in checkpoints.rglob("*.safetensors"):
        for name, tensor in load_file(file).items():
            assert bool(tensor.isfinite().all()), (file, name)
    for file in checkpoints.rglob(POLICY_FILE):
        TransformerPolicy.load(file)


def broken_policy() -> Any:
    made = policy(1)
    with torch.no_grad():
        next(made.parameters())[3] = NAN
    return made


LOSSES = (
    *("loss nan", "loss inf", "loss -inf", "gradient", "norm"),
    *("advantages", "advantages inf", "old_logprob", "logprob"),
)


@pytest.mark.long
@pytest.mark.parametrize("plant", LOSSES)
def test_a_step_that_is_not_finite_changes_no_weight_and_its_commit_says_so(
    plant: str, sqlite_url: str, tmp_path: Path
) -> None:
    algorithm = planted(plant, until=1)
    anyio.run(prepared, sqlite_url, algorithm)
    trainer, reports = train(sqlite_url, algorithm, tmp_path / "c", max_steps=1)
    assert reports[0].skipped
    first = policy().state_dict()
    assert all(torch.equal(first[k], w) for k, w in trainer.policy.state_dict().items())
    assert not trainer.state.optimizer.state_dict()["state"]
    (committed,) = events_of(sqlite_url, "StepsCommitted")
    assert committed.body["skipped"] == "non_finite"
    assert committed.body["skipped_steps"] == [1]
    (named,) = committed.body["largest_rows"]
    assert named
    _, reports = train(sqlite_url, algorithm, tmp_path / "c", max_steps=2)
    assert not reports[0].skipped
    assert "skipped" not in events_of(sqlite_url, "StepsCommitted")[-1].body
    assert_all_that_was_kept_is_finite(sqlite_url, tmp_path / "c")


def test_the_row_that_is_not_finite_is_named_first(sqlite_url: str, tmp_path: Path) -> None:
    algorithm = planted("advantages")
    anyio.run(prepared, sqlite_url, algorithm)
    train(sqlite_url, algorithm, tmp_path / "c", max_steps=1)
    (committed,) = events_of(sqlite_url, "StepsCommitted")
    (leased,) = (e for e in events_of(sqlite_url, "BatchLeased") if e.body["step"] == 1)
    recorded = {e.position: e.body["meta"] for e in events_of(sqlite_url, "ExperiencesRecorded")}
    address = leased.body["experiences"][1]
    meta, slot = recorded[address >> 20], address & ((1 << 20) - 1)
    assert committed.body["largest_rows"][0][0].startswith(
        f"{meta['batch'][slot]}/{meta['task'][slot]}/{meta['run'][slot]}"
    )


def test_three_skipped_steps_in_a_row_end_the_trainer_and_are_committed(
    sqlite_url: str, tmp_path: Path
) -> None:
    algorithm = planted("loss nan")
    anyio.run(prepared, sqlite_url, algorithm)
    with pytest.raises(NonFiniteError, match=r"3 steps in a row, up to step 3.*look at the rows"):
        train(sqlite_url, algorithm, tmp_path / "c", max_steps=9)
    committed = events_of(sqlite_url, "StepsCommitted")
    assert [event.body["skipped_steps"] for event in committed] == [[1], [2], [3]]
    assert_all_that_was_kept_is_finite(sqlite_url, tmp_path / "c")


def test_skipped_steps_are_counted_across_a_restart(sqlite_url: str, tmp_path: Path) -> None:
    algorithm = planted("loss nan")
    anyio.run(prepared, sqlite_url, algorithm)
    train(sqlite_url, algorithm, tmp_path / "c", max_steps=2)
    with pytest.raises(NonFiniteError, match=r"3 steps in a row, up to step 3"):
        train(sqlite_url, algorithm, tmp_path / "c", max_steps=9)


def test_a_step_that_is_finite_begins_the_count_anew(sqlite_url: str, tmp_path: Path) -> None:
    anyio.run(prepared, sqlite_url, planted(""))
    train(sqlite_url, planted("loss nan"), tmp_path / "c", max_steps=1)
    train(sqlite_url, planted(""), tmp_path / "c", max_steps=2)
    _, (report,) = train(
        sqlite_url, planted("loss nan"), tmp_path / "c", max_steps=3, max_skipped_steps=2
    )
    assert report.skipped


def test_skipped_steps_with_another_between_them_are_not_in_a_row(
    sqlite_url: str, tmp_path: Path
) -> None:
    algorithm = planted("loss nan", spared=2)
    anyio.run(prepared, sqlite_url, algorithm)
    _, reports = train(sqlite_url, algorithm, tmp_path / "c", max_steps=3, max_skipped_steps=2)
    assert [report.skipped for report in reports] == [True, False, True]


def test_a_metric_that_is_not_finite_stops_nothing_and_is_left_out(
    sqlite_url: str, tmp_path: Path
) -> None:
    algorithm = planted("metric")
    anyio.run(prepared, sqlite_url, algorithm)
    _, reports = train(sqlite_url, algorithm, tmp_path / "c", max_steps=1)
    assert not reports[0].skipped
    assert any("planted" in name for name in reports[0].metrics)
    (committed,) = events_of(sqlite_url, "StepsCommitted")
    assert not any("planted" in name for name in committed.body["metrics"])
    assert_all_that_was_kept_is_finite(sqlite_url, tmp_path / "c")


def test_an_accuracy_that_is_not_finite_is_left_out(sqlite_url: str, tmp_path: Path) -> None:
    algorithm = build("grpo")
    anyio.run(prepared, sqlite_url, algorithm)
    options = stream_options(algorithm)
    with open_train_stream(sqlite_url, experiment="run", strategy="grpo", **options) as stream:
        settings = TrainerSettings(checkpoints=tmp_path / "c", max_steps=1)
        trainer = Trainer(stream, policy(), algorithm, settings)
        trainer.run(lambda _: None, measure=lambda _: {"accuracy": NAN, "problems": 3.0})
    (committed,) = events_of(sqlite_url, "StepsCommitted")
    assert committed.body["metrics"]["problems"] == 3.0
    assert "accuracy" not in committed.body["metrics"]


@pytest.mark.parametrize(
    ("name", "arguments", "models"),
    [
        ("grpo", {"entropy_loss_fn": "planted"}, {}),
        ("grpo", {"kl_loss_fn_args": {"kl_coef": 0.1}}, {"reference": True}),
        (
            "rloo",
            {
                "kl_penalty_fn": "k1",
                "kl_penalty_fn_args": {"adaptive": True, "target_kl": 0.1, "horizon": 10.0},
            },
            {"reference": True},
        ),
        ("on_policy_distill", {}, {"teacher": True}),
        ("ppo", {}, {"critic": True}),
    ],
)
def test_models_beside_the_policy_that_are_broken_break_nothing_else(
    name: str, arguments: dict[str, Any], models: dict[str, bool], sqlite_url: str, tmp_path: Path
) -> None:
    algorithm = build(name, **arguments)
    anyio.run(prepared, sqlite_url, algorithm)
    reports: list[StepReport] = []
    with open_train_stream(
        sqlite_url,
        experiment="run",
        strategy=strategy_of(algorithm),
        groups_per_step=2,
        max_tokens=24,
        **stream_options(algorithm, teacher=True),
    ) as stream:
        trainer = Trainer(
            stream,
            policy(),
            algorithm,
            TrainerSettings(checkpoints=tmp_path / "c", max_steps=1),
            reference=broken_policy() if "reference" in models else None,
            teacher=broken_policy() if "teacher" in models else None,
        )
        if "critic" in models:
            assert trainer.state.critic is not None
            with torch.no_grad():
                next(trainer.state.critic[0].parameters())[0] = INF
            with pytest.raises(
                NonFiniteError, match="was written: the weights of a TransformerCritic hold NaN"
            ):
                trainer.run(reports.append)
        else:
            trainer.run(reports.append)
            assert reports[0].skipped
    assert all(math.isfinite(one) for one in trainer.state.coefficients.values())
    assert all(bool(w.isfinite().all()) for w in trainer.policy.state_dict().values())
    assert_all_that_was_kept_is_finite(sqlite_url, tmp_path / "c")


@pytest.mark.parametrize("broken", ["weight", "exp_avg", "exp_avg_sq"])
def test_weights_and_optimizers_that_are_not_finite_are_neither_kept_nor_published(
    broken: str, sqlite_url: str, tmp_path: Path
) -> None:
    algorithm = build("grpo")
    anyio.run(prepared, sqlite_url, algorithm)
    options = stream_options(algorithm)
    with open_train_stream(sqlite_url, experiment="run", strategy="grpo", **options) as stream:
        settings = TrainerSettings(checkpoints=tmp_path / "c", max_steps=3)
        trainer = Trainer(stream, policy(), algorithm, settings)

        def spoil(step: int) -> dict[str, float]:
            if step == 2:
                weight = next(trainer.policy.parameters())
                state = trainer.state.optimizer.state[weight]
                state.get(broken, weight.data)[0, 0] = INF
            return {}

        with pytest.raises(NonFiniteError, match="no checkpoint of step 2 was written"):
            trainer.run(lambda _: None, measure=spoil)
    assert [event.body["steps"] for event in events_of(sqlite_url, "StepsCommitted")] == [[1]]
    assert [event.body["version"] for event in events_of(sqlite_url, "PolicyPublished")] == [1]
    assert [folder.name for folder in (tmp_path / "c").iterdir()] == ["step-00000001"]
    assert_all_that_was_kept_is_finite(sqlite_url, tmp_path / "c")


def test_nobody_loads_weights_that_are_not_finite(tmp_path: Path) -> None:
    path = tmp_path / POLICY_FILE
    broken_policy().save(path)
    with pytest.raises(CheckpointError, match=rf"{POLICY_FILE}: the weights hold NaN or Inf"):
        TransformerPolicy.load(path)


@pytest.mark.parametrize("still_planted", [True, False])
def test_a_replay_repeats_what_was_skipped(
    still_planted: bool, sqlite_url: str, tmp_path: Path
) -> None:
    anyio.run(prepared, sqlite_url, planted(""))
    trainer, _ = train(sqlite_url, planted("gradient", until=2), tmp_path / "c", max_steps=3)
    again = planted("gradient" if still_planted else "", until=2)
    with open_replay_stream(sqlite_url, experiment="run") as stream:
        settings = TrainerSettings(
            checkpoints=tmp_path / "r", commit_every_steps=99, max_skipped_steps=None
        )
        replayed = Trainer(stream, policy(), again, settings)
        reports: list[StepReport] = []
        replayed.run(reports.append)
    assert [report.skipped for report in reports] == [True, True, False]
    for (name, one), other in zip(
        trainer.policy.state_dict().items(), replayed.policy.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other), name
