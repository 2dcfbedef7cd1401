"""What a trainer refuses when it is made, in one sentence, and what it takes all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

import trinity_buffer as tb
from tests.trainer.data import CONFIG, policy, prepared, recorded, rollouts
from trinity_buffer.algorithm import PolicyLossFn, build
from trinity_buffer.demo.policy import TransformerCritic, TransformerPolicy
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.trainer.requirements import strategy_of, stream_options, warn_of_rounding


async def with_advantages(url: str) -> None:
    """Record runs with advantages of their own."""
    made = rollouts()
    for one in made:
        one.advantages = one.returns = torch.full(
            (len(one.tokens) - one.prompt_length,), one.reward or -1.0
        )
    async with tb.open_store(url) as store:
        experiment = await store.experiment("run", config={"rollouts_per_group": 3})
        await experiment.writer("test").write(made)


@pytest.mark.parametrize("name", ["grpo", "dapo", "asymre"])
@pytest.mark.parametrize("strategy", [None, "recorded"])
def test_a_stream_that_brings_no_advantages_is_refused_a_loss_that_reads_them(
    name: str, strategy: str | None, sqlite_url: str, tmp_path: Path
) -> None:
    algorithm = build(name)
    anyio.run(prepared, sqlite_url, build("rloo"))
    with tb.open_train_stream(sqlite_url, experiment="run", strategy=None) as stream:
        next(iter(stream))  # makes the set 'recorded'
    with (
        tb.open_train_stream(sqlite_url, experiment="run", strategy=strategy) as stream,
        pytest.raises(
            InvalidArgumentError,
            match=rf"'{name}' needs advantages, and this stream reads no annotation set: open it "
            rf"with strategy='{strategy_of(algorithm)}'".replace("+", r"\+"),
        ),
    ):
        tb.Trainer(stream, policy(), algorithm, tb.TrainerSettings(checkpoints=tmp_path))


@pytest.mark.parametrize("needs", [(), ("advantages",)])
def test_advantages_that_were_recorded_are_trained_on(
    needs: tuple[str, ...], sqlite_url: str, tmp_path: Path
) -> None:
    anyio.run(with_advantages, sqlite_url)
    losses = []
    with tb.open_train_stream(
        sqlite_url, experiment="run", strategy=None, needs=needs, groups_per_step=2
    ) as stream:
        settings = tb.TrainerSettings(checkpoints=tmp_path, max_steps=1)
        tb.Trainer(stream, policy(), build("grpo"), settings).run(
            lambda report: losses.append(report.loss)
        )
    assert losses[0] != 0


def test_rows_to_come_may_bring_advantages_that_the_stream_asks_for(
    sqlite_url: str, tmp_path: Path
) -> None:
    async def begun() -> None:
        async with tb.open_store(sqlite_url) as store:
            await store.experiment("run", config={})

    anyio.run(begun)
    settings = tb.TrainerSettings(checkpoints=tmp_path)
    with tb.open_train_stream(
        sqlite_url, experiment="run", strategy=None, needs=("advantages",)
    ) as stream:
        tb.Trainer(stream, policy(), build("grpo"), settings)
    with (
        tb.open_train_stream(sqlite_url, experiment="run", strategy=None) as stream,
        pytest.raises(InvalidArgumentError, match=r"with needs=\('advantages',\)"),
    ):
        tb.Trainer(stream, policy(), build("grpo"), settings)


MODEL = policy()


class Wrapped:
    """Scores by a policy that it holds."""

    def __init__(self, inner: TransformerPolicy) -> None:
        self.scores, self.parameters = inner.scores, inner.parameters


@pytest.mark.parametrize(
    ("model", "given", "said"),
    [
        ("gpt2", {}, "'gpt2' is no model: give the Trainer one that is loaded"),
        (TransformerPolicy, {}, "TransformerPolicy'> is no model"),
        (policy().requires_grad_(requires_grad=False), {}, "no parameter of the model requires"),
        (policy(), {"optimizer": AdamW}, "AdamW'> is no optimizer: make one of the model's"),
        (policy(), {"optimizer": AdamW(policy().parameters())}, "holds no parameter of this model"),
        (
            MODEL,
            {"optimizer": AdamW([*MODEL.parameters(), torch.ones(1)])},
            "1 parameters that are",
        ),
        (policy(), {"reference": "gpt2"}, "'gpt2' is no model"),
        (MODEL, {"reference": MODEL}, "reference= is the very model that is trained"),
        (MODEL, {"teacher": MODEL}, "teacher= is the very model that is trained"),
        (MODEL, {"reference": Wrapped(MODEL)}, "or shares weights with it"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_a_sentence(
    model: Any, given: dict[str, Any], said: str, sqlite_url: str, tmp_path: Path
) -> None:
    anyio.run(prepared, sqlite_url, build("grpo"))
    with (
        tb.open_train_stream(sqlite_url, experiment="run", strategy="grpo") as stream,
        pytest.raises(InvalidArgumentError, match=said),
    ):
        tb.Trainer(stream, model, build("grpo"), tb.TrainerSettings(checkpoints=tmp_path), **given)


class SharedTrunk(TransformerPolicy):
    """A policy whose critic reads its own blocks."""

    @override
    def new_critic(self) -> TransformerCritic:
        critic = super().new_critic()
        critic.blocks = self.blocks
        return critic


def test_a_critic_of_weights_that_the_policy_trains_too_is_refused(
    sqlite_url: str, tmp_path: Path
) -> None:
    algorithm, settings = build("ppo"), tb.TrainerSettings(checkpoints=tmp_path)
    anyio.run(prepared, sqlite_url, algorithm)
    options: dict[str, Any] = {"strategy": None, **stream_options(algorithm)}
    with (
        tb.open_train_stream(sqlite_url, experiment="run", **options) as stream,
        pytest.raises(InvalidArgumentError, match=r"critic of SharedTrunk holds 8 weights"),
    ):
        tb.Trainer(stream, SharedTrunk(CONFIG), algorithm, settings)


def test_a_model_that_nothing_reads_is_told(
    sqlite_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    algorithm, settings = build("grpo", kl_loss_fn="none"), tb.TrainerSettings(checkpoints=tmp_path)
    anyio.run(prepared, sqlite_url, algorithm)
    with tb.open_train_stream(sqlite_url, experiment="run", strategy="grpo") as stream:
        tb.Trainer(stream, policy(), algorithm, settings, reference=policy(1), teacher=policy(2))
    assert "reference='TransformerPolicy': algorithm 'grpo' measures no divergence" in caplog.text
    assert "teacher='TransformerPolicy': algorithm 'grpo' distils nothing" in caplog.text


@pytest.mark.parametrize(
    ("name", "settings", "models", "said"),
    [
        ("on_policy_distill", {}, {"teacher": policy(2)}, "teacher_logprobs.*teacher=True"),
        ("grpo_verl", {"recompute_old_logprob": True}, {}, "logprobs.*recompute_old_logprob=True"),
    ],
)
def test_a_stream_that_rejects_rows_for_what_the_trainer_computes_is_refused(
    name: str,
    settings: dict[str, Any],
    models: dict[str, Any],
    said: str,
    sqlite_url: str,
    tmp_path: Path,
) -> None:
    algorithm, made = build(name), rollouts()
    for one in made:
        one.logprobs = None if settings else one.logprobs

    async def stored() -> None:
        async with tb.open_store(sqlite_url) as store:
            await recorded(store, "run", "experience", made)

    anyio.run(stored)
    options = {"strategy": None, **stream_options(algorithm)}
    ours = tb.TrainerSettings(checkpoints=tmp_path, **settings)
    with (
        tb.open_train_stream(sqlite_url, experiment="run", **options) as stream,
        pytest.raises(InvalidArgumentError, match=rf"rejects rows without {said}.*consumer="),
    ):
        tb.Trainer(stream, policy(), algorithm, ours, **models)


def test_rows_may_be_rejected_for_what_nobody_computes(sqlite_url: str, tmp_path: Path) -> None:
    algorithm, made = build("raft"), rollouts()
    made[0].logprobs = None

    async def stored() -> None:
        async with tb.open_store(sqlite_url) as store:
            await recorded(store, "run", "experience", made)

    anyio.run(stored)
    options = {"strategy": None, **stream_options(algorithm), "needs": ("logprobs",)}
    ours = tb.TrainerSettings(checkpoints=tmp_path)
    with tb.open_train_stream(sqlite_url, experiment="run", **options) as stream:
        tb.Trainer(stream, policy(), algorithm, ours)


@pytest.mark.parametrize(
    ("dtype", "rate", "is_lost"),
    [(torch.bfloat16, 1e-6, True), (torch.bfloat16, 1e-2, False), (torch.float32, 1e-6, False)],
)
def test_steps_that_16_bits_round_away_are_told(
    dtype: torch.dtype,
    rate: float,
    is_lost: bool,
    sqlite_url: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    algorithm, model = build("grpo"), policy(0, dtype)
    anyio.run(prepared, sqlite_url, algorithm)
    settings = tb.TrainerSettings(checkpoints=tmp_path, learning_rate=rate)
    before = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    with tb.open_train_stream(sqlite_url, experiment="run", strategy="grpo") as stream:
        tb.Trainer(stream, model, algorithm, settings).run()
    after = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    assert bool((before == after).double().mean() > 0.5) == is_lost
    told = "are bfloat16, to which steps of learning_rate=1e-06 are mostly rounded away"
    assert (told in caplog.text) == is_lost


def test_many_weights_in_float16_are_not_taken_for_large_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = torch.nn.Linear(2048, 2048, bias=False).half()
    torch.nn.init.constant_(model.weight, 0.05)  # which sum up to more than float16 holds
    warn_of_rounding(model, AdamW(model.parameters(), lr=1e-3))  # type: ignore[arg-type]
    assert not caplog.text


def test_the_rate_of_a_warm_up_is_that_which_it_rises_to(caplog: pytest.LogCaptureFixture) -> None:
    model = policy(0, torch.bfloat16)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    LambdaLR(optimizer, lambda step: step / 10)
    warn_of_rounding(model, optimizer)
    assert not caplog.text


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_an_optimizer_of_some_of_the_weights_trains_as_if_the_others_were_frozen(
    layout: Any, sqlite_url: str, tmp_path: Path
) -> None:
    anyio.run(prepared, sqlite_url, build("grpo"))
    norms: dict[str, list[float]] = {"frozen": [], "free": []}
    trained = {}
    for consumer, seen in norms.items():
        model = trained[consumer] = policy()
        some = [*model.head.parameters()]
        for weight in model.parameters():
            if consumer == "frozen":
                weight.requires_grad_(any(weight is one for one in some))
        settings = tb.TrainerSettings(checkpoints=tmp_path / consumer)
        with tb.open_train_stream(
            sqlite_url,
            experiment="run",
            strategy="grpo",
            consumer=consumer,
            groups_per_step=2,
            layout=layout,
        ) as stream:
            optimizer = SGD(some, lr=10.0)
            tb.Trainer(stream, model, build("grpo"), settings, optimizer=optimizer).run(
                lambda report, seen=seen: seen.append(report.gradient_norm)  # type: ignore[misc]
            )
        assert {n for n, w in model.named_parameters() if w.grad is not None} == {"head.weight"}
    assert len(norms["free"]) == 3
    assert norms["free"] == norms["frozen"]
    before = policy().state_dict()
    frozen = trained["frozen"].state_dict()
    for name, weight in trained["free"].state_dict().items():
        assert torch.equal(weight, frozen[name]), name
        assert torch.equal(weight, before[name]) == (name != "head.weight"), name


@pytest.mark.parametrize("name", ["rloo", "ppo", "grpo"])
def test_an_algorithm_that_reads_recorded_rewards_is_refused_on_a_set_of_others(
    name: str, store_url: str, tmp_path: Path
) -> None:
    async def scored_anew() -> None:
        async with tb.open_store(store_url) as store:
            experiment = await recorded(store, "run", "experience", rollouts())
            await tb.assign_rewards(experiment, "other", lambda row: -float(row.reward or 0))
            await tb.run_strategy(experiment, "grpo", rewards="other")

    anyio.run(scored_anew)
    algorithm, settings = build(name), tb.TrainerSettings(checkpoints=tmp_path, max_steps=1)
    with tb.open_train_stream(
        store_url, experiment="run", strategy="grpo", groups_per_step=2
    ) as stream:
        if name == "grpo":  # which takes the advantages of the set
            tb.Trainer(stream, policy(), algorithm, settings).run()
            return
        with pytest.raises(InvalidArgumentError, match=r"the recorded rewards, .* scoring 'other'"):
            tb.Trainer(stream, policy(), algorithm, settings)


class Detached(PolicyLossFn):
    """Looks at what it was given, and returns what no training lowers."""

    @override
    def __call__(self, logprob: Tensor, action_mask: Tensor, *, layout: Any = None) -> Any:
        """Return a number."""
        return self.of((logprob * action_mask).sum()), {}

    def of(self, loss: Tensor) -> Tensor:
        """Return a copy without history."""
        return loss.detach()


class OnItsOwn(Detached):
    """Has a gradient, of something else than the policy."""

    @override
    def of(self, loss: Tensor) -> Tensor:
        """Return a leaf."""
        return torch.tensor(loss.item(), requires_grad=True)


class Bare(PolicyLossFn):
    """Forgets the metrics."""

    @override
    def __call__(self, logprob: Tensor, action_mask: Tensor, *, layout: Any = None) -> Any:
        """Return a loss alone."""
        return (logprob * action_mask).sum()


def test_a_loss_without_metrics_is_told_what_to_return() -> None:
    algorithm = build("grpo", policy_loss_fn=Bare, kl_loss_fn="none", entropy_loss_fn="none")
    logprob, mask = torch.zeros(1, 2, requires_grad=True), torch.ones(1, 2, dtype=torch.bool)
    said = "the loss of Bare returned a value of type Tensor: .* `return loss, {}`"
    with pytest.raises(TypeError, match=said):
        algorithm.loss(logprob, {"action_mask": mask})


def test_a_part_that_is_made_already_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="is no class with default_args, give one that"):
        build("grpo", policy_loss_fn=Bare())


@pytest.mark.parametrize("loss", [Detached, OnItsOwn])
@pytest.mark.parametrize("kl", ["none", "k2"])
def test_a_loss_that_does_not_depend_on_the_policy_is_refused(
    loss: type[Detached], kl: str, sqlite_url: str, tmp_path: Path
) -> None:
    algorithm = build("grpo", policy_loss_fn=loss, kl_loss_fn=kl)
    anyio.run(prepared, sqlite_url, algorithm)
    settings = tb.TrainerSettings(checkpoints=tmp_path)
    with tb.open_train_stream(sqlite_url, experiment="run", strategy="grpo") as stream:
        trainer = tb.Trainer(stream, policy(), algorithm, settings)
        said = f"the loss of {loss.__name__} does not depend on logprob.* without detach"
        with pytest.raises(InvalidArgumentError, match=said):
            trainer.run()
    with tb.open_train_stream(sqlite_url, experiment="run", strategy="grpo") as stream:
        assert stream.resume is None, "nothing was committed"
