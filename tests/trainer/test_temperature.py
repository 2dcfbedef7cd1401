"""Rows that were sampled at another temperature than 1, or with more than a temperature."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from torch import Tensor

import trinity_buffer as tb
from tests.handles import StepMeasures, TrainStep
from tests.trainer.data import CONFIG, VOCABULARY, policy, recorded, rollouts, solutions
from tests.trainer.qwen import qwen2
from trinity_buffer import verify
from trinity_buffer.algorithm import build
from trinity_buffer.demo.policy import TransformerPolicy
from trinity_buffer.errors import InvalidExperienceError, TrainingError
from trinity_buffer.trainer.causal_lm import CausalLM
from trinity_buffer.trainer.trainer import StepReport

HOT, COLD = 2.0, 0.5
ALGORITHM = partial(build, "grpo", kl_loss_fn="k2", policy_loss_fn_args={"clip_range": 0.05})


def qwen() -> CausalLM:
    return CausalLM(qwen2(vocab_size=VOCABULARY))


class WholeLogits(TransformerPolicy):
    whole_logits = True


MODELS = pytest.mark.parametrize(
    "make", [policy, qwen, lambda: WholeLogits(CONFIG, seed=0)], ids=["demo", "qwen", "whole"]
)


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        found = model.model(tokens[None]) if isinstance(model, CausalLM) else model(tokens[None])
    logits: Tensor = getattr(found, "logits", found)
    return logits[0].double()


def heats(row: tb.Experience) -> Tensor:
    """Return the temperature of each token."""
    found = torch.ones(len(row.tokens), dtype=torch.float64)
    for one in row.info.get("sampling_segments", ()):
        begin, end = one.get("begin", row.prompt_length), one.get("end", len(row.tokens))
        found[begin:end] = one.get("temperature", 1.0)
    return found


def sampled_at(model: Any) -> list[tb.Experience]:
    """Return runs of a policy: turns of two temperatures, of one for the whole, and of none."""
    made = rollouts()
    for number, row in enumerate(made):
        begin, end = row.prompt_length, len(row.tokens)
        both = [
            {"begin": begin, "end": begin + 1, "temperature": HOT, "top_p": 1.0},
            {
                "begin": begin + 1,
                "end": end,
                "temperature": COLD,
                "logprobs_mode": "processed_logprobs",
            },
        ]
        segments: Any = (both, [{"temperature": COLD}], None)[number % 3]
        if segments is not None:
            row.info["sampling_segments"] = segments
        every = (logits_of(model, row.tokens)[:-1] / heats(row)[1:, None]).log_softmax(-1)
        chosen = every.gather(1, row.tokens[1:, None].long())[:, 0]
        row.logprobs = chosen[begin - 1 :].float()
    return made


async def store(url: str, made: list[tb.Experience], strategy: str | None = "grpo") -> None:
    async with tb.open_store(url) as opened:
        experiment = await recorded(opened, "run", "experience", made)
        if strategy is not None:
            await tb.run_strategy(experiment, strategy)


def first_step(url: str, **options: Any) -> TrainStep:
    with tb.open_train_stream(
        url, experiment="run", strategy="grpo", groups_per_step=6, consumer="look", **options
    ) as stream:
        return next(iter(stream))


def trained(url: str, model: Any, folder: Path, **options: Any) -> StepMeasures:
    reports: list[StepReport] = []
    settings = tb.TrainerSettings(checkpoints=folder, max_steps=1, learning_rate=0.01)
    with tb.open_train_stream(
        url, experiment="run", strategy="grpo", groups_per_step=6, **options
    ) as stream:
        tb.Trainer(stream, model, ALGORITHM(), settings).run(reports.append)
    (report,) = reports
    assert report.measures is not None
    return report.measures


@MODELS
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_policy_that_sampled_has_a_ratio_of_1_at_the_first_step(
    make: Any, layout: str, sqlite_url: str, tmp_path: Path
) -> None:
    anyio.run(store, sqlite_url, sampled_at(make()))
    rows = trained(sqlite_url, make(), tmp_path, layout=layout, tokens_per_microbatch=40).rows
    np.testing.assert_allclose(rows["ratio_mean"], 1, atol=1e-4)
    np.testing.assert_allclose(rows["ratio_max"], 1, atol=1e-4)
    np.testing.assert_allclose(rows["gap_max"], 0, atol=1e-4)
    np.testing.assert_allclose(rows["kl"], 0, atol=1e-4)  # the reference, at the same temperature
    assert (rows["clipped"] == 0).all()


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_all_micro_batches_have_the_temperature_of_each_token(layout: str, sqlite_url: str) -> None:
    made = sampled_at(policy())
    for row in made[1:]:
        row.info.pop("sampling_segments", None)
    anyio.run(store, sqlite_url, made)
    step = first_step(sqlite_url, layout=layout, tokens_per_microbatch=24)
    assert len(step.microbatches) > 1
    hot = 0
    for batch in step.microbatches:
        assert batch["temperature"].dtype == torch.float32
        assert batch["temperature"].shape == batch["input_ids"].shape
        for place in batch["sample_index"].tolist():
            hot += int(place == 0)
    column = torch.cat([batch["temperature"].flatten() for batch in step.microbatches])
    assert column[column != 1].tolist() == [HOT] + [COLD] * (
        len(made[0].tokens) - made[0].prompt_length - 1
    )
    assert hot == 1


@pytest.mark.parametrize("groups", [1, 6])  # of one group, a rank has no rows
def test_each_rank_has_the_key_though_the_hot_row_is_on_one(groups: int, sqlite_url: str) -> None:
    made = rollouts()
    made[0].info["sampling_segments"] = [{"temperature": COLD}]
    anyio.run(store, sqlite_url, made)
    barrier = Barrier(2)

    def batches(rank: int) -> list[Any]:
        with tb.open_train_stream(
            sqlite_url,
            experiment="run",
            strategy="grpo",
            groups_per_step=groups,
            rank=rank,
            world_size=2,
        ) as stream:
            found = next(iter(stream)).microbatches
            barrier.wait(30)  # each has its part, before one leaves
        return found

    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(batches, range(2)))
    columns = [torch.cat([one["temperature"].flatten() for one in found]) for found in both]
    assert sorted(COLD in column for column in columns) == [False, True]


def test_a_run_at_a_temperature_replays_to_the_same_bits(sqlite_url: str, tmp_path: Path) -> None:
    anyio.run(store, sqlite_url, sampled_at(policy()))
    settings = tb.TrainerSettings(checkpoints=tmp_path, learning_rate=0.01)
    with tb.open_train_stream(
        sqlite_url, experiment="run", strategy="grpo", groups_per_step=2, layout="packed"
    ) as stream:
        first = tb.Trainer(stream, policy(), ALGORITHM(), settings)
        first.run()
    with tb.open_replay_stream(sqlite_url, experiment="run") as stream:
        again = tb.Trainer(stream, policy(), ALGORITHM(), settings)
        again.run()
    assert first.state.step == again.state.step == 3
    for name, weight in first.policy.state_dict().items():
        assert torch.equal(weight, again.policy.state_dict()[name])
        assert not torch.equal(weight, policy().state_dict()[name])


def test_a_step_at_temperature_1_has_no_such_key(sqlite_url: str) -> None:
    made = rollouts()
    made[0].info["sampling_segments"] = [{"temperature": 1.0, "top_k": -1}]
    anyio.run(store, sqlite_url, made)
    assert all("temperature" not in batch for batch in first_step(sqlite_url).microbatches)


@MODELS
def test_scores_at_a_temperature_are_those_of_divided_logits(make: Any) -> None:
    """Log-probabilities, entropies, their gradients, and expected changes of entropy."""
    tokens = torch.tensor([[1, 5, 3, 2, 0, 4]])
    heat = torch.tensor([[1, 1, 2.0, 0.5, 0.7, 1]])
    model = make()
    weights = list(model.parameters())
    plain = model.model if isinstance(model, CausalLM) else model
    logits = plain(tokens)
    logits = getattr(logits, "logits", logits)[:, :-1] / heat[:, 1:, None]
    every = logits.log_softmax(-1)
    expected = every.gather(-1, tokens[:, 1:, None])[..., 0], -(every.exp() * every).sum(-1)
    batch = {"input_ids": tokens, "temperature": heat}
    found = model.scores(batch)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one[:, 1:], other)
        slopes = [
            torch.autograd.grad(x.square().sum(), weights, retain_graph=True, allow_unused=True)
            for x in (one, other)
        ]
        for slope, wanted in zip(*slopes, strict=True):
            assert (slope is None) == (wanted is None)
            if slope is not None and wanted is not None:
                torch.testing.assert_close(slope, wanted, atol=1e-5, rtol=1e-4)
    share = every.exp()
    change = (share.square() * (every + expected[1][..., None])).sum(-1)
    torch.testing.assert_close(model.entropy_changes(batch)[:, 1:], change)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"top_p": 0.9}, "top_p=0.9"),
        ({"top_k": 20, "temperature": 0.7}, "top_k=20"),
        ({"min_p": 0.1}, "min_p=0.1"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        ({"presence_penalty": 0.5}, "presence_penalty=0.5"),
        ({"guided_json": "{}"}, "guided_json='{}'"),
        ({"temperature": 0}, "temperature=0"),
        (
            {"temperature": 0.7, "logprobs_mode": "raw_logprobs"},
            "temperature=0.7 and raw log-probs",
        ),
    ],
)
def test_what_cannot_be_scored_is_refused_with_uid_and_option(
    options: dict[str, Any], said: str, sqlite_url: str, tmp_path: Path
) -> None:
    made = rollouts()
    made[4].info["sampling_segments"] = [options]
    anyio.run(store, sqlite_url, made)
    message = rf"^row b0/1/1/0/ was sampled with {said}: no trainer can compute"
    with pytest.raises(TrainingError, match=message):
        trained(sqlite_url, policy(), tmp_path)
    batch = first_step(sqlite_url).microbatches[0]
    with pytest.raises(TrainingError, match=message):  # in a loop of one's own
        tb.token_scores(policy(), batch)


def test_what_cannot_be_scored_is_trained_where_nothing_recorded_is_compared(
    sqlite_url: str, tmp_path: Path
) -> None:
    made = rollouts()
    made[4].info["sampling_segments"] = [{"top_p": 0.9}]
    anyio.run(store, sqlite_url, made)
    settings = tb.TrainerSettings(checkpoints=tmp_path, max_steps=1, recompute_old_logprob=True)
    for correction in ("none", "token_tis"):
        algorithm = build("grpo", importance_correction=correction)
        with tb.open_train_stream(
            sqlite_url, experiment="run", strategy="grpo", groups_per_step=6, consumer=correction
        ) as stream:
            trainer = tb.Trainer(stream, policy(), algorithm, settings)
            if correction == "none":
                trainer.run()
                continue
            with pytest.raises(TrainingError, match=r"b0/1/1/0/ was sampled with top_p=0\.9"):
                trainer.run()


@pytest.mark.parametrize("mixed", [False, True])
def test_a_trainer_of_one_temperature_is_given_no_rows_of_another(
    sqlite_url: str, *, mixed: bool
) -> None:
    made = rollouts()
    for row in made[mixed:]:
        row.info["sampling_segments"] = [{"temperature": 0.7}]
    anyio.run(store, sqlite_url, made)
    (batch,) = first_step(sqlite_url).microbatches
    with pytest.raises(TrainingError, match=r"temperature=1, and rows .* sampled at 0\.7"):
        batch.require_plain(1.0)
    if not mixed:
        batch.require_plain(0.7)
        return
    with pytest.raises(TrainingError, match=r"temperature=0\.7, and rows .* sampled at 1:"):
        batch.require_plain(0.7)


def test_rows_that_are_imitated_are_scored_at_temperature_1(
    sqlite_url: str, tmp_path: Path
) -> None:
    losses = []
    for consumer, segments in (("plain", None), ("hot", [{"temperature": 3.0, "top_p": 0.5}])):
        made = solutions()
        for row in made:
            row.info = {} if segments is None else {"sampling_segments": segments}

        async def record(made: list[tb.Experience] = made, name: str = consumer) -> None:
            async with tb.open_store(sqlite_url) as opened:
                await recorded(opened, name, "sft", made)

        anyio.run(record)
        settings = tb.TrainerSettings(checkpoints=tmp_path / consumer, max_steps=1)
        with tb.open_train_stream(sqlite_url, experiment=consumer, strategy=None) as stream:
            tb.Trainer(stream, policy(), build("sft"), settings).run(
                lambda report: losses.append(report.loss)
            )
    assert losses[0] == losses[1]


def test_a_policy_that_does_not_read_the_temperature_is_refused(
    sqlite_url: str, tmp_path: Path
) -> None:
    class Passes(TransformerPolicy):
        takes = frozenset[str]()

    anyio.run(store, sqlite_url, sampled_at(policy()))
    with pytest.raises(
        TrainingError, match=r"row b0/0/0/0/ has temperature, and the policy, a Passes, would pass"
    ):
        trained(sqlite_url, Passes(CONFIG, seed=0), tmp_path)


@pytest.mark.parametrize(
    ("segments", "said"),
    [
        ({"temperature": 0.5}, "make it a list of mappings"),
        ([{"temperature": "hot"}], "has the temperature 'hot'"),
        ([{"temperature": -1.0}], "has the temperature -1.0"),
        ([{"begin": 0, "end": 3, "temperature": 0.5}], "has the tokens 0 to 3"),
        ([{"temperature": 0.5}, {"temperature": 0.7}], "behind the segment before"),
    ],
)
@pytest.mark.parametrize("many", [False, True])
async def test_segments_that_say_nothing_sound_are_refused_at_the_door(
    segments: Any, said: str, sqlite_url: str, *, many: bool
) -> None:
    made = rollouts() if many else rollouts()[:1]
    made[0].info["sampling_segments"] = segments
    async with tb.open_store(sqlite_url) as opened:
        experiment = await opened.experiment("run", config={})
        with pytest.raises(InvalidExperienceError, match=rf"info\['sampling_segments'\] .*{said}"):
            await experiment.writer("test").write(made)


async def test_a_prompt_that_was_cut_has_no_tokens_that_were_sampled(sqlite_url: str) -> None:
    cut = tb.Experience(
        eid=tb.EID("b", 0, 0, 0),
        tokens=[1, 2],
        prompt_length=2,
        truncate_status="prompt_truncated",
        info={"sampling_segments": [{"temperature": 0.5}]},
    )
    async with tb.open_store(sqlite_url) as opened:
        experiment = await recorded(opened, "run", "experience", [cut])
        (event,) = [e async for e in experiment.events(kinds=("ExperiencesRecorded",))]
        assert "sampling" not in event.body
        assert (await verify(experiment)).ok


async def test_how_rows_were_sampled_is_read_back_and_verified(store_url: str) -> None:
    made = sampled_at(policy())
    async with tb.open_store(store_url) as opened:
        experiment = await recorded(opened, "run", "experience", made)
        found = [row async for row in experiment.read()]
        report = await verify(experiment)
    assert report.ok
    kept = {row.eid: row.info.get("sampling_segments") for row in found}
    assert kept == {row.eid: row.info.get("sampling_segments") for row in made}
