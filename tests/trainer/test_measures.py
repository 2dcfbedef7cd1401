"""What a trainer measures of each row: as a plain computation says, recorded with its commit."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
import numpy as np
import pytest
import torch
from torch import Tensor

from tests.handles import StepMeasures, VerifyReport
from tests.trainer.data import policy, prepared
from tests.trainer.two_ranks import RankOfTwo
from trinity_buffer import open_replay_stream, open_store, open_train_stream, verify
from trinity_buffer.algorithm import build
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.inspector.experience import show
from trinity_buffer.inspector.source import now
from trinity_buffer.inspector.step_lines import StepContents, blame, steps
from trinity_buffer.inspector.token_table import tokens
from trinity_buffer.trainer.models import Models, StepMeter, prepare
from trinity_buffer.trainer.parallel import Processes
from trinity_buffer.trainer.trainer import StepReport, Trainer, TrainerSettings

T = TypeVar("T")
ALGORITHM = partial(build, "grpo", policy_loss_fn_args={"clip_range": 0.05})


def train(
    url: str, folder: Path, name: str = "trainer", layout: Any = "padded", **settings: Any
) -> tuple[Trainer, list[StepReport]]:
    """Train all three steps with another reference than the policy."""
    reports: list[StepReport] = []
    with open_train_stream(
        url, experiment="run", strategy="grpo", consumer=name, groups_per_step=2, layout=layout
    ) as stream:
        made = TrainerSettings(checkpoints=folder / name, learning_rate=0.02, **settings)
        trainer = Trainer(stream, policy(), ALGORITHM(), made, reference=policy(1))
        trainer.run(reports.append)
    return trainer, reports


def ask(url: str, question: Callable[..., Any], *args: Any, **named: Any) -> Any:
    async def asked() -> Any:
        async with open_store(url, read_only=True) as store:
            return await question(now(await store.experiment("run")), *args, **named)

    return anyio.run(asked)


def verified(url: str) -> VerifyReport:
    async def asked() -> VerifyReport:
        async with open_store(url) as store:
            return await verify(await store.experiment("run"))

    return anyio.run(asked)


def by_hand(url: str) -> dict[str, dict[str, float]]:
    """Return uid -> numbers of the first step, each row for itself, in float64."""
    weights: dict[str, float] = {}
    found: dict[str, dict[str, float]] = {}
    algorithm = ALGORITHM()
    with open_train_stream(
        url, experiment="run", strategy="grpo", consumer="hand", groups_per_step=2
    ) as stream:
        step = next(stream)
        prepare(step, algorithm, Models(policy(), reference=policy(1)))
        for batch in step.microbatches:
            scores = policy().scores(batch)
            leaf = scores.logprob.detach().requires_grad_()
            given = {key: batch[key] for key in algorithm.policy_loss.select_keys}
            loss, _ = algorithm.policy_loss(logprob=leaf, layout=batch.layout, **given)
            (slope,) = torch.autograd.grad(loss, leaf)
            for row, uid in enumerate(stream.uids(step, batch["sample_index"].tolist())):
                mask = batch["action_mask"][row]

                def at(values: Tensor, row: int = row, mask: Tensor = mask) -> Tensor:
                    return values[row][mask].detach().double()

                ratio = (at(leaf) - at(batch["old_logprob"])).exp()
                gap = (at(leaf) - at(batch["rollout_logprob"])).abs()
                clipped = at(slope).eq(0) & at(batch["advantages"]).ne(0)
                weights[uid] = float(at(slope).abs().sum())
                found[uid] = {
                    "ratio_mean": float(ratio.mean()),
                    "ratio_max": float(ratio.max()),
                    "clipped": float(clipped.double().mean()),
                    "kl": float((at(leaf) - at(batch["ref_logprob"])).mean()),
                    "entropy": float(at(scores.entropy).mean()),
                    "gap_mean": float(gap.mean()),
                    "gap_max": float(gap.max()),
                }
    total = sum(weights.values())
    return {uid: {"loss_share": weights[uid] / total, **found[uid]} for uid in found}


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_each_row_is_measured_as_a_plain_computation_says(
    layout: str, sqlite_url: str, tmp_path: Path
) -> None:
    anyio.run(prepared, sqlite_url, ALGORITHM())
    train(sqlite_url, tmp_path, layout=layout, max_steps=1)
    wanted = by_hand(sqlite_url)
    eaten: StepContents = ask(sqlite_url, blame, 1, trainer="trainer")
    assert {row.uid: dict(row.measured) for row in eaten.rows} == {
        uid: pytest.approx(numbers, rel=1e-4, abs=1e-5) for uid, numbers in wanted.items()
    }
    assert 0 < sum(row["clipped"] for row in wanted.values()) < len(wanted)  # some, and not all
    shown = ask(sqlite_url, show, eaten.rows[0].uid)
    (own,) = [step for step in shown.sets[0].steps if step.trainer == "trainer"]
    assert own.measured == eaten.rows[0].measured


def test_every_step_of_a_commit_has_its_numbers(store_url: str, tmp_path: Path) -> None:
    anyio.run(prepared, store_url, ALGORITHM())
    _, reports = train(store_url, tmp_path, commit_every_steps=2, warmup_steps=3)
    lines = ask(store_url, steps)
    for line, report in zip(lines, reports, strict=True):
        assert line.metrics["gradient_norm"] == report.gradient_norm
        assert line.metrics["loss"] == report.loss
        assert report.measures is not None
    assert [line.metrics["learning_rate"] for line in lines] == pytest.approx([0.005, 0.01, 0.015])
    assert verified(store_url).ok


def test_a_replay_begins_with_the_step_after_its_checkpoint(
    sqlite_url: str, tmp_path: Path
) -> None:
    anyio.run(prepared, sqlite_url, ALGORITHM())
    _, reports = train(sqlite_url, tmp_path)
    before, _ = sorted((tmp_path / "trainer").glob("step-*"))
    last = reports[-1].step
    for first, begin in ((1, before), (last - 1, before), (last, None), (last, before)):
        settings = TrainerSettings(checkpoints=tmp_path / "again", learning_rate=0.02)
        with open_replay_stream(
            sqlite_url, experiment="run", from_checkpoint=begin and str(begin), first=first
        ) as stream:
            replayed = Trainer(stream, policy(), ALGORITHM(), settings, reference=policy(1))
            again: list[StepReport] = []
            if (first, begin) != (last, before):
                after = 0 if begin is None else last - 1
                with pytest.raises(InvalidArgumentError, match=rf"after step {after}.* {first}:"):
                    replayed.run(again.append)
                assert not again
                continue
            replayed.run(again.append)
            assert [report.loss for report in again] == [reports[-1].loss]


def test_a_replay_measures_the_same(sqlite_url: str, tmp_path: Path) -> None:
    anyio.run(prepared, sqlite_url, ALGORITHM())
    trainer, reports = train(sqlite_url, tmp_path)
    again: list[StepReport] = []
    with open_replay_stream(sqlite_url, experiment="run") as stream:
        settings = TrainerSettings(checkpoints=tmp_path / "again", learning_rate=0.02)
        replayed = Trainer(stream, policy(), ALGORITHM(), settings, reference=policy(1))
        replayed.run(again.append)
    for one, other in zip(reports, again, strict=True):
        assert one.measures is not None
        assert other.measures is not None
        for name, values in one.measures.rows.items():
            np.testing.assert_array_equal(values, other.measures.rows[name])
    for name, weight in trainer.policy.state_dict().items():
        assert torch.equal(weight, replayed.policy.state_dict()[name])


def test_measuring_changes_no_weight_and_can_be_left_out(sqlite_url: str, tmp_path: Path) -> None:
    anyio.run(prepared, sqlite_url, ALGORITHM())
    measured, _ = train(sqlite_url, tmp_path, "measured")
    plain, reports = train(sqlite_url, tmp_path, "plain", record_row_metrics=False)
    assert all(report.measures is None for report in reports)
    for name, weight in measured.policy.state_dict().items():
        assert torch.equal(weight, plain.policy.state_dict()[name])
    assert ask(sqlite_url, blame, 1, trainer="plain").rows[0].measured == {}


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_tokens_are_recorded_where_that_is_asked_for(
    layout: str, sqlite_url: str, tmp_path: Path
) -> None:
    anyio.run(prepared, sqlite_url, ALGORITHM())
    train(sqlite_url, tmp_path, layout=layout, max_steps=1, record_token_metrics=True)
    eaten: StepContents = ask(sqlite_url, blame, 1)
    for row in eaten.rows:
        table = ask(sqlite_url, tokens, row.uid)
        scores = policy().scores({"input_ids": torch.from_numpy(table.ids[None].copy())})
        trained = table.columns["trained_logprob"]
        np.testing.assert_allclose(trained, scores.logprob[0].detach(), rtol=1e-4, atol=1e-5)
        ratio = np.exp(table.columns["trained_logprob"] - table.columns["logprob"])[table.mask]
        np.testing.assert_allclose(table.columns["ratio"][table.mask], ratio, rtol=1e-4)
        assert row.measured["ratio_mean"] == pytest.approx(ratio.mean(), rel=1e-4)
        assert not table.columns["weight"][~table.mask].any()
        gap = table.columns["gap"][table.mask]
        assert row.measured["gap_mean"] == pytest.approx(np.abs(gap).mean(), rel=1e-4)
        clipped = table.columns["clipped"]
        assert row.measured["clipped"] == pytest.approx(clipped[table.mask].mean())
        for name in ("clipped", "ratio", "gap"):  # nobody compares what is not trained
            assert np.isnan(table.columns[name][~table.mask]).all()
    assert verified(sqlite_url).ok


def test_ranks_put_their_rows_together(sqlite_url: str) -> None:
    anyio.run(prepared, sqlite_url, ALGORITHM())
    with open_train_stream(
        sqlite_url, experiment="run", strategy="grpo", groups_per_step=2, tokens_per_microbatch=24
    ) as stream:
        step = next(stream)
    meters = [StepMeter(step, tokens=True) for _ in range(3)]
    assert len(step.microbatches) > 1
    for number, batch in enumerate(step.microbatches):
        for meter in (meters[0], meters[1 + number % 2]):
            scores = policy().scores(batch)
            loss = (scores.logprob * batch["action_mask"]).sum()
            meter.weigh(torch.autograd.grad(loss, scores.logprob)[0])
            meter.add(batch, scores)

    alone = meters[0].measures({}, Processes())
    ranks = RankOfTwo.pair()
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda meter, rank: meter.measures({}, rank), meters[1:], ranks))
    for one in found:
        for name, values in alone.rows.items():
            np.testing.assert_allclose(values, one.rows[name], rtol=1e-6)
        for name, some in alone.tokens.items():
            assert all(map(torch.equal, some, one.tokens[name]))


def test_verify_finds_measures_of_other_rows(sqlite_url: str) -> None:
    anyio.run(prepared, sqlite_url, ALGORITHM())
    with open_train_stream(
        sqlite_url, experiment="run", strategy="grpo", groups_per_step=2
    ) as stream:
        step = next(stream)
        stream.measure(StepMeasures(1, {"kl": np.zeros(2, np.float32)}))
        stream.commit(step)
    report = verified(sqlite_url)
    assert [problem.what for problem in report.problems] == [
        "2 rows of step 1 were measured, it has 6"
    ]


def test_verify_finds_measures_that_were_changed(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    anyio.run(prepared, sqlite_url, ALGORITHM())
    digest = "trinity_buffer.pipeline.train.step.content_digest"
    with open_train_stream(
        sqlite_url, experiment="run", strategy="grpo", groups_per_step=2
    ) as stream:
        step = next(stream)
        stream.measure(StepMeasures(1, {"kl": np.zeros(6, np.float32)}))
        monkeypatch.setattr(digest, lambda _: b"another content!")
        stream.commit(step)
    (problem,) = verified(sqlite_url).problems
    assert "its event says " + b"another content!".hex() in problem.what
