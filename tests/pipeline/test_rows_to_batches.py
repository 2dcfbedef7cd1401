"""What a trainer is served, element by element against what was written, in every layout."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import Resize
from tests.handles import MicroBatch
from trinity_buffer import open_store, open_train_stream, run_strategy
from trinity_buffer.algorithm.layout import Totals
from trinity_buffer.experience import EID, Experience
from trinity_buffer.options import Layout
from trinity_buffer.pipeline.load import reading
from trinity_buffer.pipeline.load.columns import Array
from trinity_buffer.pipeline.train.collate import LazyColumns, Part
from trinity_buffer.pipeline.train.microbatch import StepMemory

TASKS, RUNS = 16, 4
LAYOUTS = [("padded", None), ("padded", 4096), ("packed", None), ("packed", 4096)]


def ragged(task: int, run: int) -> Experience:
    """Return a rollout of 1 to 2,048 response tokens; some have a mask, pixels, odd dtypes."""
    generator = torch.Generator().manual_seed(100 * task + run)
    prompt = int(torch.randint(1, 64, (), generator=generator))
    length = 1 + int(2047 * torch.rand((), generator=generator) ** 3)
    logprobs = -torch.rand(length, generator=generator)
    mask = torch.rand(length, generator=generator) < 0.7
    mask[0] = True
    pixels = torch.rand((3, 4 + run), generator=generator).to(torch.bfloat16)
    return Experience(
        eid=EID("b", task, run),
        tokens=torch.randint(
            0, 151_000, (prompt + length,), generator=generator, dtype=torch.int32
        ),
        prompt_length=prompt,
        logprobs=logprobs.to(torch.bfloat16) if run == 1 else logprobs,
        action_mask=mask if run % 2 else None,
        reward=float(torch.rand((), generator=generator)),
        token_level_reward=torch.rand(length, generator=generator) if run == 2 else None,
        multi_modal_inputs={"pixels": pixels} if task % 2 else None,
        info={"model_version": task},
    )


async def written(url: str) -> dict[tuple[Any, int], Experience]:
    """Write 64 ragged rollouts in calls of 10, annotate them, and return them by (task, run)."""
    every = [ragged(task, run) for task in range(TASKS) for run in range(RUNS)]
    async with open_store(url) as store:
        experiment = await store.experiment("e", config={"rollouts_per_group": RUNS})
        writer = experiment.writer(actor="explorer")
        for start in range(0, len(every), 10):
            await writer.write(every[start : start + 10])
        await run_strategy(experiment, "grpo", {"epsilon": 1e-6})
    return {(one.eid.task, one.eid.run): one for one in every}


def advantage(experience: Experience, every: dict[tuple[Any, int], Experience]) -> float:
    """Return what GRPO says, from its definition."""
    rewards = np.array(
        [every[experience.eid.task, run].reward for run in range(RUNS)], dtype=np.float64
    )
    return float((experience.reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-6))


def rows_of(batch: MicroBatch) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the columns of each row without its padding; padding must be zeros."""
    of_tokens = ("input_ids", "position_ids", "attention_mask", "action_mask")
    of_responses = ("rollout_logprob", "advantages", "returns", "token_level_rewards")
    names = (*of_tokens, *of_responses)
    if "cu_seqlens" in batch:
        ends = batch["cu_seqlens"].tolist()
        assert batch["max_seqlen"] == max(np.diff(ends))
        for a, z in pairwise(ends):
            yield {name: batch[name][a:z] for name in names}
        return
    for row, there in enumerate(batch["attention_mask"]):
        length = int(there.sum())
        assert not there[length:].any()
        for name in names:
            if name != "position_ids":
                assert not batch[name][row, length:].any(), name
        yield {name: batch[name][row, :length] for name in names}


def check_row(
    row: dict[str, torch.Tensor], wrote: Experience, every: dict[tuple[Any, int], Experience]
) -> None:
    """Compare a row with what was written, element by element."""
    prompt, mask = wrote.prompt_length, wrote.action_mask
    assert mask is not None
    assert wrote.logprobs is not None
    zeros = torch.zeros(prompt)
    assert torch.equal(row["input_ids"], wrote.tokens.long())
    assert row["position_ids"].tolist() == list(range(len(wrote.tokens)))
    assert row["attention_mask"].all()
    assert torch.equal(row["action_mask"], torch.cat([zeros.bool(), mask]))
    assert torch.equal(row["rollout_logprob"], torch.cat([zeros, wrote.logprobs.float()]))
    expected = torch.cat([zeros, advantage(wrote, every) * mask.float()])
    torch.testing.assert_close(row["advantages"], expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(row["returns"], row["advantages"])
    rewards = torch.zeros(len(wrote.tokens))
    if wrote.token_level_reward is not None:
        rewards[prompt:] = wrote.token_level_reward
    else:
        rewards[-1] = wrote.reward or 0.0
    assert torch.equal(row["token_level_rewards"], rewards)


@pytest.mark.parametrize(("layout", "budget"), LAYOUTS)
async def test_every_element_arrives_as_it_was_written(
    store_url: str, layout: Layout, budget: int | None
) -> None:
    every = await written(store_url)
    by_tokens = {tuple(one.tokens.tolist()): one for one in every.values()}
    seen = []
    with open_train_stream(
        store_url,
        experiment="e",
        strategy="grpo",
        groups_per_step=5,
        layout=layout,
        tokens_per_microbatch=budget,
    ) as stream:
        for step in stream:
            for batch in step.microbatches:
                rows = list(rows_of(batch))
                assert len(rows) == len(batch["group_index"]) == len(batch.policy_versions)
                for place, row in enumerate(rows):
                    wrote = by_tokens[tuple(row["input_ids"].tolist())]
                    check_row(row, wrote, every)
                    assert batch.policy_versions[place] == wrote.policy_version
                    check_pixels(batch.multi_modal_inputs[place], wrote)
                    seen.append((wrote.eid.task, wrote.eid.run))
    assert sorted(seen) == sorted(every)


async def test_the_denominators_are_those_of_the_masks(store_url: str) -> None:
    made = [ragged(task, run) for task in range(2) for run in range(RUNS)]
    for silent in made[1:3]:
        silent.action_mask = torch.zeros(
            len(silent.tokens) - silent.prompt_length, dtype=torch.bool
        )
    async with open_store(store_url) as store:
        experiment = await store.experiment("e", config={"rollouts_per_group": RUNS})
        await experiment.writer(actor="explorer").write(made)
        await run_strategy(experiment, "grpo", {"epsilon": 1e-6})
        async with experiment.train_stream(strategy="grpo", groups_per_step=2) as stream:
            (batch,) = (await anext(stream)).microbatches
    counted = Totals.count(batch["action_mask"], group_index=batch["group_index"])
    assert batch.layout.total == counted
    assert (counted.sequences, counted.active_sequences, counted.groups) == (8, 6, 2)


def check_pixels(inputs: Mapping[str, torch.Tensor], wrote: Experience) -> None:
    """Compare a multi-modal column, dtype included."""
    expected = wrote.multi_modal_inputs or {}
    assert inputs.keys() == expected.keys()
    for name, pixels in expected.items():
        assert inputs[name].dtype == pixels.dtype
        assert torch.equal(inputs[name], pixels)


@pytest.mark.parametrize(("layout", "budget"), LAYOUTS)
async def test_what_few_losses_read_is_made_when_somebody_looks_at_it(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch, layout: Layout, budget: int | None
) -> None:
    made: Counter[tuple[LazyColumns, str]] = Counter()

    def counted(self: LazyColumns, name: str, of: Part) -> Array:
        made[self, name] += 1
        return part(self, name, of)

    part = LazyColumns.part
    monkeypatch.setattr(LazyColumns, "part", counted)
    await written(sqlite_url)
    with open_train_stream(
        sqlite_url,
        experiment="e",
        strategy="grpo",
        groups_per_step=5,
        layout=layout,
        tokens_per_microbatch=budget,
    ) as stream:
        batches = next(iter(stream)).microbatches
        names = [name for batch in batches for name in batch if "returns" in batch]
        assert names.count("returns") == len(batches)
        assert all(batch["old_logprob"].any() and batch["advantages"].any() for batch in batches)
        assert not made
        for batch in batches:
            batch["action_mask"].fill_(0)  # returns are of the mask as it was
        sent = pickle.loads(pickle.dumps(batches))
        for batch, there in zip(batches, sent, strict=True):
            assert torch.equal(batch["returns"], batch["advantages"])
            assert torch.equal(there["returns"], batch["returns"])
            assert batch["returns"] is dict(batch)["returns"]
            batch["returns"] += 1
            assert (batch["returns"] == batch["advantages"] + 1).all()
    late = 1 if layout == "padded" else 2  # the returns; packed, where tokens are, too
    assert list(made.values()) == [len(batches)] * late


@pytest.mark.parametrize(("bytes_kept", "times"), [(16 << 20, 1), (0, 3)])
async def test_a_segment_is_read_once_for_all_the_steps_that_its_rows_go_to(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch, resize: Resize, bytes_kept: int, times: int
) -> None:
    read: Counter[bytes] = Counter()
    read_segments = reading.read_segments

    def counted(s: Any, keys: Sequence[bytes], families: Sequence[str]) -> Any:
        read.update([*keys])
        return read_segments(s, keys, families)

    await written(sqlite_url)  # whose strategy reads segments too
    monkeypatch.setattr(reading, "read_segments", counted)
    resize(bytes_kept=bytes_kept)
    with open_train_stream(
        sqlite_url, experiment="e", strategy="grpo", groups_per_step=1
    ) as stream:
        steps = sum(1 for _ in stream)
    assert steps > 3
    assert max(read.values()) >= times
    assert times > 1 or set(read.values()) == {1}


def test_memory_is_used_again_only_when_no_tensor_looks_at_it() -> None:
    memory = StepMemory()
    held = torch.from_numpy(memory.take(1000).view(np.float32))
    held.fill_(1)
    other = memory.take(1000)
    assert not np.shares_memory(held.numpy(), other)
    part = held[3:7]
    del held
    assert not np.shares_memory(part.numpy(), memory.take(1000))
    where = part.data_ptr() - 3 * 4
    del part
    assert memory.take(900).ctypes.data == where
