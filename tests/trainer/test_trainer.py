"""The loop: every algorithm steps and commits; a resumed one goes on as if nothing had been."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from typing_extensions import override

from tests.handles import TrainStep
from tests.planted_faults.trainer_checks import take_over
from tests.trainer.data import CONFIG, policy, prepared, rollouts
from tests.trainer.gradients import train
from trinity_buffer import open_replay_stream, open_store, open_train_stream, run_strategy
from trinity_buffer.algorithm import ALGORITHM_TYPE, build
from trinity_buffer.demo.policy import TransformerCritic, TransformerPolicy
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.trainer.checkpoint import read_step
from trinity_buffer.trainer.models import value_loss
from trinity_buffer.trainer.trainer import StepReport, Trainer, TrainerSettings


@pytest.mark.parametrize("name", ALGORITHM_TYPE.names())
def test_every_algorithm_trains_and_commits(name: str, sqlite_url: str, tmp_path: Path) -> None:
    algorithm = build(name)
    anyio.run(prepared, sqlite_url, algorithm)
    trainer, reports = train(sqlite_url, algorithm, tmp_path / "checkpoints", max_steps=2)
    assert [report.step for report in reports] == [1, 2]
    assert all(report.committed for report in reports)
    assert max(report.gradient_norm for report in reports) > 0
    before = policy().state_dict()
    assert any(not torch.equal(before[k], w) for k, w in trainer.policy.state_dict().items())


class Twice(TransformerPolicy):
    """Names its head twice, as one does that chains the weights of parts which share some."""

    @override
    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return chain(super().parameters(recurse), self.head.parameters())


@pytest.mark.parametrize("is_own", [False, True])
def test_a_weight_that_a_policy_names_twice_is_stepped_and_counted_once(
    is_own: bool, sqlite_url: str, tmp_path: Path
) -> None:
    anyio.run(prepared, sqlite_url, build("grpo"))
    trained: list[list[Any]] = []
    for kind in (TransformerPolicy, Twice):
        model, reports = kind(CONFIG), list[StepReport]()
        own = torch.optim.SGD(nn.Module.parameters(model), lr=0.5) if is_own else None
        settings = TrainerSettings(checkpoints=tmp_path / kind.__name__, max_gradient_norm=0.05)
        with open_train_stream(
            sqlite_url, experiment="run", strategy="grpo", consumer=kind.__name__
        ) as stream:
            Trainer(stream, model, build("grpo"), settings, optimizer=own).run(reports.append)
        trained.append([report.gradient_norm for report in reports])
        trained[-1] += [weight.tolist() for weight in model.state_dict().values()]
    assert trained[0] == trained[1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("ppo", {}),
        (
            "rloo",
            {
                "kl_penalty_fn": "k1",
                "kl_penalty_fn_args": {"adaptive": True, "target_kl": 0.1, "horizon": 10.0},
            },
        ),
        ("grpo", {"kl_loss_fn_args": {"adaptive": True, "target_kl": 1e-4, "horizon": 10.0}}),
    ],
)
def test_a_resumed_run_ends_with_the_same_weights(
    name: str, arguments: dict[str, Any], sqlite_url: str, tmp_path: Path
) -> None:
    anyio.run(prepared, sqlite_url, build(name, **arguments))

    def run(folder: str, max_steps: int) -> Trainer:
        algorithm = build(name, **arguments)  # its coefficients are of this process
        return train(
            sqlite_url, algorithm, tmp_path / folder, max_steps=max_steps, consumer=folder
        )[0]

    through = run("through", 3)
    run("resumed", 2)
    resumed = run("resumed", 3)
    assert resumed.state.coefficients == through.state.coefficients
    models: list[tuple[Any, Any]] = [(through.policy, resumed.policy)]
    if through.state.critic is not None and resumed.state.critic is not None:
        models.append((through.state.critic[0], resumed.state.critic[0]))
    assert len(models) == (2 if name == "ppo" else 1)
    for one, other in models:
        for (key, expected), found in zip(
            one.state_dict().items(), other.state_dict().values(), strict=True
        ):
            assert torch.equal(expected, found), key


def test_a_replay_into_the_folder_of_its_run_removes_no_checkpoint_of_that(
    sqlite_url: str, tmp_path: Path
) -> None:
    anyio.run(prepared, sqlite_url, build("grpo"))
    train(sqlite_url, build("grpo"), tmp_path, max_steps=2)
    with open_replay_stream(sqlite_url, experiment="run") as replay:
        settings = TrainerSettings(checkpoints=tmp_path, max_steps=2)
        Trainer(replay, policy(), build("grpo"), settings).run()
    assert len(list(tmp_path.glob("step-*"))) == 4  # two each
    assert train(sqlite_url, build("grpo"), tmp_path, max_steps=3)[0].state.step == 3


def test_a_trainer_that_begins_in_the_folder_of_another_is_told(
    sqlite_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    anyio.run(prepared, sqlite_url, build("grpo"))
    for steps in (1, 2):
        train(sqlite_url, build("grpo"), tmp_path, max_steps=steps)
    assert "there are some already" not in caplog.text
    train(sqlite_url, build("grpo"), tmp_path, max_steps=1, consumer="other")
    assert "'other' begins with step 1 and removes old checkpoints" in caplog.text
    assert "there are some already, such as step-00000001: if" in caplog.text


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_reference_that_is_trained_already_is_told(
    is_trained: bool, sqlite_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    anyio.run(prepared, sqlite_url, build("grpo"))
    train(sqlite_url, build("grpo"), tmp_path, max_steps=1)
    options: dict[str, Any] = {"strategy": "grpo", "groups_per_step": 2}
    with open_train_stream(sqlite_url, experiment="run", **options) as stream:
        model = policy()
        if is_trained:
            assert stream.resume is not None
            assert stream.resume.checkpoint is not None
            model.restore(stream.resume.checkpoint / model.file_name)
        Trainer(stream, model, build("grpo"), TrainerSettings(checkpoints=tmp_path))
    assert ("has the weights after step 1 already" in caplog.text) == is_trained


def test_an_adaptive_coefficient_moves(sqlite_url: str, tmp_path: Path) -> None:
    adaptive = {"adaptive": True, "target_kl": 1e-6, "horizon": 10.0, "kl_coef": 0.1}
    algorithm = build("grpo", kl_loss_fn_args=adaptive)
    anyio.run(prepared, sqlite_url, algorithm)
    trainer, _ = train(sqlite_url, algorithm, tmp_path / "c", max_steps=3, learning_rate=1e-2)
    assert trainer.state.coefficients["kl_loss"] > 0.1


def test_a_coefficient_that_is_fixed_at_a_restart_is_the_one_that_was_given(
    sqlite_url: str, tmp_path: Path
) -> None:
    adaptive = {"adaptive": True, "target_kl": 1e-6, "horizon": 10.0, "kl_coef": 0.1}
    anyio.run(prepared, sqlite_url, build("grpo"))
    train(sqlite_url, build("grpo", kl_loss_fn_args=adaptive), tmp_path, max_steps=1)
    fixed = build("grpo", kl_loss_fn_args={"kl_coef": 0.25})
    _, (report,) = train(sqlite_url, fixed, tmp_path, max_steps=2)
    assert fixed.kl_loss.kl_coef == report.metrics["actor/kl_coef"] == 0.25


class ValueHead(nn.Linear):
    """A critic of the hidden states of the policy."""

    def __init__(self, trunk: TransformerPolicy, *, detached: bool) -> None:
        super().__init__(CONFIG.width, 1)
        self._of, self._detached = [trunk], detached

    def values(self, input_ids: Tensor, **limits: Any) -> Tensor:
        hidden, _ = self._of[0].last_hidden({"input_ids": input_ids, **limits})
        return self(hidden.detach() if self._detached else hidden).squeeze(-1)  # type: ignore[no-any-return]

    def save(self, path: Path) -> None:
        save_file(self.state_dict(), path)


@pytest.mark.parametrize("detached", [False, True])
def test_a_critic_of_the_policys_hidden_states_changes_no_gradient_of_the_policy(
    detached: bool, sqlite_url: str, tmp_path: Path
) -> None:
    anyio.run(prepared, sqlite_url, build("ppo"))
    norms, model = [], policy()
    model.new_critic = lambda: ValueHead(model, detached=detached)  # type: ignore[assignment,return-value,method-assign]
    with open_train_stream(sqlite_url, experiment="run", strategy=None) as stream:
        settings = TrainerSettings(checkpoints=tmp_path, max_steps=1, max_gradient_norm=1e-3)
        Trainer(stream, model, build("ppo"), settings).run(
            lambda report: norms.append(report.gradient_norm)
        )
    stepped = [weight.grad for weight in model.parameters() if weight.grad is not None]
    assert norms[0] > 1e-3
    assert float(torch.nn.utils.get_total_norm(stepped)) == pytest.approx(1e-3, rel=1e-2)


def test_a_model_in_float64_is_trained(sqlite_url: str, tmp_path: Path) -> None:
    anyio.run(prepared, sqlite_url, build("grpo"))
    with open_train_stream(sqlite_url, experiment="run", strategy="grpo") as stream:
        settings = TrainerSettings(checkpoints=tmp_path, max_steps=1)
        trainer = Trainer(stream, policy(0, torch.float64), build("grpo"), settings)
        trainer.run()
    assert trainer.state.step == 1


def test_a_correction_weighs_what_the_trainer_recomputed(sqlite_url: str, tmp_path: Path) -> None:
    algorithm = build("grpo", importance_correction="token_mis")
    anyio.run(prepared, sqlite_url, algorithm)
    plain = train(sqlite_url, build("grpo"), tmp_path / "p", max_steps=1, consumer="plain")
    weighed = train(sqlite_url, algorithm, tmp_path / "w", max_steps=1, recomputed=True)
    assert weighed[1][0].metrics.keys() > plain[1][0].metrics.keys()
    assert weighed[1][0].gradient_norm != plain[1][0].gradient_norm
    with pytest.raises(InvalidArgumentError, match="set recompute_old_logprob=True"):
        train(sqlite_url, algorithm, tmp_path / "n", max_steps=1, consumer="none")


def test_a_missing_teacher_is_named_with_the_ways_out(sqlite_url: str, tmp_path: Path) -> None:
    algorithm = build("on_policy_distill")
    anyio.run(prepared, sqlite_url, algorithm)
    with (
        open_train_stream(sqlite_url, experiment="run", strategy=None) as stream,
        pytest.raises(
            InvalidArgumentError, match=r"teacher_logprobs.*or give the trainer a teacher"
        ),
    ):
        Trainer(stream, policy(), algorithm, TrainerSettings(checkpoints=tmp_path)).run(
            lambda _: None
        )


@pytest.mark.parametrize("name", ["on_policy_distill", "jsd"])
def test_a_missing_teacher_is_named_before_anything_is_stored(
    name: str, sqlite_url: str, tmp_path: Path
) -> None:
    async def begun() -> None:
        async with open_store(sqlite_url) as store:
            await store.experiment("run", config={})

    anyio.run(begun)
    with (
        open_train_stream(sqlite_url, experiment="run", strategy=None) as stream,
        pytest.raises(InvalidArgumentError, match="needs teacher_logprobs"),
    ):
        Trainer(stream, policy(), build(name), TrainerSettings(checkpoints=tmp_path))


def test_who_was_taken_over_behind_its_commit_removes_nothing(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = build("grpo")
    anyio.run(prepared, sqlite_url, algorithm)

    async def taken_over() -> None:
        async with open_store(sqlite_url) as store:
            await take_over(await store.experiment("run"))

    def commit_and_pause(step: TrainStep, *given: Any, **kept: Any) -> None:
        commit(step, *given, **kept)
        if step.step == 3:
            anyio.run(taken_over)
            (tmp_path / "step-00000001").mkdir()  # of the successor, which has gone back

    with open_train_stream(
        sqlite_url, experiment="run", strategy="grpo", groups_per_step=1
    ) as stream:
        commit = stream.commit
        monkeypatch.setattr(stream, "commit", commit_and_pause)
        settings = TrainerSettings(checkpoints=tmp_path, keep_checkpoints=1, max_steps=3)
        Trainer(stream, policy(), algorithm, settings).run()
    left = sorted(folder.name for folder in tmp_path.glob("step-*"))
    assert left == ["step-00000001", "step-00000002", "step-00000003"]


def test_what_was_never_committed_takes_the_place_of_no_checkpoint(
    sqlite_url: str, tmp_path: Path
) -> None:
    anyio.run(prepared, sqlite_url, build("grpo"))
    left = []
    for steps in (2, 4, 6):
        with open_train_stream(
            sqlite_url, experiment="run", strategy="grpo", groups_per_step=1
        ) as stream:
            settings = TrainerSettings(checkpoints=tmp_path, max_steps=steps, commit_every_steps=2)
            Trainer(stream, policy(), build("grpo"), settings).run()
        if steps == 2:
            (tmp_path / "step-00000003").mkdir()  # of a process that was killed before its commit
        left.append(sorted(int(folder.name[-1]) for folder in tmp_path.glob("step-*")))
    assert left == [[2, 3], [2, 3, 4], [4, 6]]


@pytest.mark.parametrize(
    ("name", "strategy", "compares"), [("grpo", "grpo", "grpo"), ("rloo", None, "rloo")]
)
def test_an_algorithm_that_compares_runs_is_refused_an_experiment_of_one_run_of_a_task(
    name: str, strategy: str | None, compares: str, sqlite_url: str, tmp_path: Path
) -> None:
    async def recorded_alone() -> None:
        async with open_store(sqlite_url) as store:
            experiment = await store.experiment("run", config={"rollouts_per_group": 1})
            await experiment.writer("test").write(rollouts())
            if strategy is not None:
                await run_strategy(experiment, strategy)

    anyio.run(recorded_alone)
    with (
        open_train_stream(sqlite_url, experiment="run", strategy=strategy) as stream,
        pytest.raises(
            InvalidArgumentError,
            match=f"needs several runs of a task, which '{compares}' compares: "
            "rollouts_per_group=1; give 2 or more",
        ),
    ):
        Trainer(stream, policy(), build(name), TrainerSettings(checkpoints=tmp_path))


def test_recomputed_logprobs_are_those_of_the_policy_before_the_step(
    sqlite_url: str, tmp_path: Path
) -> None:
    algorithm = build("grpo")
    anyio.run(prepared, sqlite_url, algorithm)
    by_stream = train(sqlite_url, algorithm, tmp_path / "s", max_steps=2, recomputed=True)
    settings: dict[str, Any] = {"consumer": "other", "recompute_old_logprob": True}
    by_trainer = train(sqlite_url, algorithm, tmp_path / "t", max_steps=2, **settings)
    for _, reports in (by_stream, by_trainer):
        assert all(abs(report.metrics["actor/ppo_kl"]) < 1e-6 for report in reports)


def test_what_was_trained_after_the_last_commit_is_committed_at_the_end(
    sqlite_url: str, tmp_path: Path
) -> None:
    """Three steps, a commit every two of them."""
    algorithm = build("grpo")
    anyio.run(prepared, sqlite_url, algorithm)
    folder = tmp_path / "checkpoints"
    trainer, reports = train(sqlite_url, algorithm, folder, max_steps=9, commit_every_steps=2)
    assert [report.committed for report in reports] == [False, True, False]
    (_, *_, last) = sorted(folder.iterdir())
    assert read_step(last) == trainer.state.step == 3


def test_values_come_from_what_precedes_a_token_in_both_layouts() -> None:
    critic = TransformerCritic(CONFIG, seed=1)
    torch.nn.init.normal_(critic.head.weight)
    rows = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]])
    padded = critic.values(rows)
    packed = critic.values(
        torch.tensor([1, 2, 3, 4, 5, 6]), cu_seqlens=torch.tensor([0, 4, 6], dtype=torch.int32)
    )
    torch.testing.assert_close(packed, torch.cat([padded[0], padded[1, :2]]))
    changed = rows.clone()
    changed[0, 3] = 9
    torch.testing.assert_close(critic.values(changed), padded)
    assert padded[:, 0].tolist() == [0, 0]


def test_the_value_loss_by_hand_with_and_without_a_clip() -> None:
    mask = torch.tensor([[True, True, False]])
    now, before = torch.tensor([[1.0, 0.0, 9.0]]), torch.tensor([[0.0, 0.0, 0.0]])
    wanted = torch.tensor([[2.0, 1.0, float("nan")]])
    plain = value_loss(now, before, wanted, mask)
    assert float(plain) == pytest.approx(0.5 * (1 + 1) / 2)
    clipped = value_loss(now, before, wanted, mask, clip_range=0.5)
    assert float(clipped) == pytest.approx(0.5 * (1.5**2 + 1) / 2)
    with pytest.raises(InvalidArgumentError, match="value_clip_range=0"):
        TrainerSettings(checkpoints=Path(), value_clip_range=0)
