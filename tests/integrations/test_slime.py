"""slime's data source over the store; slime itself is on no package index, its `Sample` is here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest
import torch

import trinity_buffer as tb
from tests.trainer.test_damaged_steps import harmed
from trinity_buffer.errors import InvalidArgumentError, TrainingError

GROUPS, RUNS, PER_STEP, ROLLOUTS = 40, 3, 2, 20


@dataclass
class Sample:
    """The fields of `slime.utils.types.Sample` that training reads."""

    class Status(Enum):
        COMPLETED = "completed"
        TRUNCATED = "truncated"

    group_index: int | None = None
    index: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    status: Status = Status.COMPLETED
    metadata: dict[str, Any] = field(default_factory=dict)
    multimodal_inputs: dict[str, Any] | None = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    train_metadata: dict[str, Any] | None = None
    rollout_routed_experts: Any = None


@pytest.fixture
def slime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    types = ModuleType("slime.utils.types")
    types.Sample = Sample  # type: ignore[attr-defined]
    for name in ("slime", "slime.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "slime.utils.types", types)
    from trinity_buffer.integrations import slime  # noqa: PLC0415 - needs the names above

    yield slime
    monkeypatch.delitem(sys.modules, "trinity_buffer.integrations.slime")


def group(number: int) -> list[Sample]:
    draw = torch.Generator().manual_seed(number)
    made = []
    for run in range(RUNS):
        size = 2 + (number + run) % 3
        made.append(
            Sample(
                group_index=number,
                index=number * RUNS + run,
                prompt="how many?",
                tokens=torch.randint(0, 64, (3 + size,), generator=draw).tolist(),
                response="so many",
                response_length=size,
                label="4",
                reward=float(torch.rand((), generator=draw)),
                loss_mask=[1] * (size - 1) + [run % 2],
                weight_versions=["3", "4"][: 1 + number % 2],
                remove_sample=run == 1,
                teacher_log_probs=[-0.25] * size if number % 2 else None,
                train_metadata={"loss": "sft"} if run else None,
                rollout_log_probs=(-torch.rand(size, generator=draw)).tolist(),
                status=Sample.Status.TRUNCATED if run == 0 else Sample.Status.COMPLETED,
                metadata={"from": number},
            )
        )
    return made


def test_samples_with_pictures_are_refused(slime: Any, tmp_path: Path) -> None:
    given = group(0)
    given[2].multimodal_inputs = {"images": ["pixels"]}
    source = slime.StoreDataSource(args(tmp_path))
    with pytest.raises(InvalidArgumentError, match="sample 2 has multimodal inputs"):
        source.add_samples([given])
    source.close()


def args(folder: Path) -> SimpleNamespace:
    return SimpleNamespace(
        store_url=f"sqlite:///{folder}/run.db",
        store_experiment="run",
        store_options={"lease_ttl_s": 1},
        rollout_batch_size=PER_STEP,
        save=str(folder / "saved"),
    )


def test_what_was_added_comes_back_once_also_after_a_restart(slime: Any, tmp_path: Path) -> None:
    given = [group(number) for number in range(GROUPS)]
    first = slime.StoreDataSource(args(tmp_path))
    first.add_samples(given)
    first.add_samples(given[:3])
    assert len(first) == GROUPS
    seen = []
    for rollout in range(7):
        seen += slime.stored_rollout(first.args, rollout, first)
        if rollout % 2:
            folder = tmp_path / "saved" / f"iter_{rollout:07d}"
            folder.mkdir(parents=True)
            (folder / "weights").write_text(str(rollout))
            first.save(rollout)
    first.close()

    again = slime.StoreDataSource(args(tmp_path))
    again.load(5)  # rollout 6 is in no checkpoint
    del seen[6 * PER_STEP :]
    for rollout in range(6, ROLLOUTS):
        seen += slime.stored_rollout(again.args, rollout, again)
    again.save(ROLLOUTS - 1)
    again.close()
    assert seen == given

    with tb.open_replay_stream(f"sqlite:///{tmp_path}/run.db", experiment="run") as replay:
        rows = [row for step in replay for row in step.manifest.experiences]
    assert len(rows) == len(set(rows)) == GROUPS * RUNS
    uris = anyio.run(published, f"sqlite:///{tmp_path}/run.db")
    assert [Path(uri).name for uri in uris] == [f"iter_{rollout:07d}" for rollout in (1, 3, 5)]


def test_rows_are_trained_at_the_temperature_that_sampled_them(slime: Any, tmp_path: Path) -> None:
    at_first = args(tmp_path)
    del at_first.store_options["lease_ttl_s"]
    at_first.rollout_temperature = 0.7
    source = slime.StoreDataSource(at_first)
    source.add_samples([group(number) for number in range(2 * PER_STEP)])
    assert len(source.get_samples(PER_STEP)) == PER_STEP
    source.close()
    with tb.open_train_stream(
        f"sqlite:///{tmp_path}/run.db", experiment="run", strategy="grpo", consumer="ours"
    ) as ours:
        heat = next(iter(ours)).microbatches[0]["temperature"]
    assert sorted(set(heat.flatten().tolist())) == [pytest.approx(0.7), 1]
    later = args(tmp_path)
    later.rollout_temperature = 1.0
    source = slime.StoreDataSource(later)
    with pytest.raises(TrainingError, match=r"row group-0/.* at temperature 0\.7, .* logits by 1:"):
        source.get_samples(PER_STEP)
    source.close()


def test_rows_that_were_sampled_at_1_are_trained_at_no_other(slime: Any, tmp_path: Path) -> None:
    source = slime.StoreDataSource(args(tmp_path))
    source.args.rollout_temperature = 1.0
    source.add_samples([group(number) for number in range(2 * PER_STEP)])
    assert len(source.get_samples(PER_STEP)) == PER_STEP
    source.args.rollout_temperature = 0.7
    with pytest.raises(TrainingError, match=r"row group-2/.* at temperature 1, .* logits by 0\.7:"):
        source.get_samples(PER_STEP)
    source.close()


def test_a_removed_sample_is_trained_by_nobody_else_either(slime: Any, tmp_path: Path) -> None:
    given = group(0)
    for one in given:
        one.rollout_routed_experts = np.full((len(one.tokens) - 1, 2, 1), one.index, np.int32)
    source = slime.StoreDataSource(args(tmp_path))
    source.add_samples([given])
    (taken,) = source.get_samples(1)
    source.close()
    for one, sample in zip(given, taken, strict=True):
        assert (one.remove_sample, one.loss_mask) == (sample.remove_sample, sample.loss_mask)
        np.testing.assert_array_equal(one.rollout_routed_experts, sample.rollout_routed_experts)
    with tb.open_train_stream(
        f"sqlite:///{tmp_path}/run.db", experiment="run", strategy="grpo", consumer="ours"
    ) as ours:
        (microbatch,) = next(iter(ours)).microbatches
    trained = microbatch["action_mask"].any(1).tolist()
    assert trained == [not one.remove_sample for one in given] == [True, False, True]


def test_rows_that_say_no_temperature_are_handed_out_as_before(slime: Any, tmp_path: Path) -> None:
    source = slime.StoreDataSource(args(tmp_path))
    source.add_samples([group(number) for number in range(PER_STEP)])
    source.args.rollout_temperature = 0.7
    assert len(source.get_samples(PER_STEP)) == PER_STEP
    source.close()


def test_what_slimes_trainer_reads_beside_tokens_comes_back(slime: Any, tmp_path: Path) -> None:
    source = slime.StoreDataSource(args(tmp_path))
    source.add_samples([group(number) for number in range(PER_STEP)])
    one, removed, _ = source.get_samples(PER_STEP)[1]
    assert (one.weight_versions, one.remove_sample, one.train_metadata) == (["3", "4"], False, None)
    assert (removed.remove_sample, removed.train_metadata) == (True, {"loss": "sft"})
    assert removed.teacher_log_probs == [-0.25] * removed.response_length
    source.close()


async def published(url: str) -> list[str]:
    async with tb.open_store(url) as store:
        experiment = await store.experiment("run")
        return [e.body["uri"] async for e in experiment.events(kinds=["PolicyPublished"])]


def test_groups_stay_whole_where_rows_are_sorted_by_length(slime: Any, tmp_path: Path) -> None:
    given = [group(number) for number in range(PER_STEP)]
    chosen = args(tmp_path)
    chosen.store_options["tokens_per_microbatch"] = 12
    source = slime.StoreDataSource(chosen)
    source.add_samples(given)
    assert source.get_samples(PER_STEP) == given
    source.close()


def test_a_rollout_of_which_every_row_was_dropped_is_passed_over(
    slime: Any, tmp_path: Path
) -> None:
    given = [group(number) for number in range(3 * PER_STEP)]
    chosen = args(tmp_path)
    chosen.store_options["damaged_rows"] = "drop"
    first = slime.StoreDataSource(chosen)
    first.add_samples(given)
    assert first.get_samples(PER_STEP) == given[:PER_STEP]
    first.get_samples(PER_STEP)
    first.close()
    uids = [f"group-{number}/group-{number}/0/0/" for number in (PER_STEP, PER_STEP + 1)]
    anyio.run(harmed, chosen.store_url, *uids)
    again = slime.StoreDataSource(chosen)
    again.load(0)  # rollout 0 is in the weights
    assert again.get_samples(PER_STEP) == given[2 * PER_STEP :]
    again.save(1)
    again.close()
    with tb.open_replay_stream(chosen.store_url, experiment="run") as replay:
        assert [step.rows for step in replay] == [PER_STEP * RUNS, 0, PER_STEP * RUNS]


def test_a_group_that_is_sampled_anew_leaves_what_is_stored(slime: Any, tmp_path: Path) -> None:
    """After a crash before the first checkpoint slime numbers its groups from 0 again."""
    given = [group(number) for number in range(PER_STEP)]
    first = slime.StoreDataSource(args(tmp_path))
    first.add_samples(given)
    first.close()
    anew = [group(number) for number in range(2 * PER_STEP)]
    for one in anew[0] + anew[1]:
        one.tokens[-1] = (one.tokens[-1] + 1) % 64
    del anew[1][-1]  # one of its rollouts was aborted
    again = slime.StoreDataSource(args(tmp_path))
    again.add_samples(anew)
    assert again.get_samples(PER_STEP) == given
    assert again.get_samples(PER_STEP) == anew[PER_STEP:]
    again.close()


def test_a_sample_without_a_group_is_refused_before_anything_is_written(
    slime: Any, tmp_path: Path
) -> None:
    source = slime.StoreDataSource(args(tmp_path))
    given = [group(0), group(1)]
    given[1][0].group_index = None
    with pytest.raises(InvalidArgumentError, match="group_index=None"):
        source.add_samples(given)
    assert len(source) == 0
    source.close()


LEFT_OPEN = """
import sys
from types import ModuleType, SimpleNamespace
for name in ("slime", "slime.utils", "slime.utils.types"):
    sys.modules[name] = ModuleType(name)
sys.modules["slime.utils.types"].Sample = object
from trinity_buffer.integrations.slime import StoreDataSource
left = StoreDataSource(SimpleNamespace(store_url=sys.argv[1], store_experiment="run"))
"""


@pytest.mark.long
def test_a_process_ends_that_leaves_its_source_open(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/run.db"
    subprocess.run([sys.executable, "-c", LEFT_OPEN, url], check=True, timeout=120)
    assert (tmp_path / "run.db").exists()


def test_an_evaluation_is_refused_with_the_remedy(slime: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="--eval-function-path"):
        slime.stored_rollout(args(tmp_path), 0, None, evaluation=True)
