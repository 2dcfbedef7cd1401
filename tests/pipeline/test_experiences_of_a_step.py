"""The rows of a step as experiences: in their order, with the advantages that it trains on."""

from __future__ import annotations

import torch
from typing_extensions import override

import trinity_buffer as tb
from tests.whole_stores import experiences_of
from trinity_buffer.algorithm.add_strategy import AddStrategy
from trinity_buffer.algorithm.copies import copy_experience
from trinity_buffer.experience import Experience


async def test_the_experiences_of_a_step_are_the_rows_of_its_micro_batches(store_url: str) -> None:
    async with tb.open_store(store_url) as store:
        experiment = await store.experiment("run", config={"rollouts_per_group": 2})
        rows = [
            tb.Experience(
                eid=tb.EID("b0", task, run, 0),
                tokens=torch.arange(4 + task + run),
                prompt_length=2,
                logprobs=torch.full((2 + task + run,), -1.0),
                reward=float(run),
                info={"task": task},
            )
            for task in range(3)
            for run in range(2)
        ]
        await experiment.writer(actor="explorer-0").write(rows)
        await tb.run_strategy(experiment, "grpo")
        async with experiment.train_stream(
            strategy="grpo", groups_per_step=3, tokens_per_microbatch=12
        ) as stream:
            step = await anext(stream)
            found = await experiences_of(experiment, step.manifest)
        assert len(found) == 6
        place = 0
        for batch in step.microbatches:
            for row in range(len(batch["sample_index"])):
                one, start = found[place], found[place].prompt_length
                length = int(batch["attention_mask"][row].sum())
                assert torch.equal(batch["input_ids"][row, :length], one.tokens.long())
                assert one.advantages is not None
                assert torch.equal(batch["advantages"][row, start:length], one.advantages)
                assert one.info["task"] == len(one.tokens) - 4 - one.eid.run
                place += 1


class Contrary(AddStrategy):
    """Keeps each row, and a copy with the opposite advantage."""

    @override
    async def add(self, experiences: list[Experience], step: int) -> tuple[int, dict[str, float]]:
        for row in experiences:
            opposite = copy_experience(row, task=f"{row.eid.task}~c1", suffix="c1")
            for one, advantage in ((row, 1.0), (opposite, -1.0)):
                one.advantages = one.returns = torch.full((len(row.tokens) - 2,), advantage)
                await self.writer.write_async([one])
        return len(experiences), {}


async def test_a_copy_has_advantages_of_its_own(store_url: str) -> None:
    async with tb.open_store(store_url) as store:
        experiment = await store.experiment("run", config={"rollouts_per_group": 1})
        row = tb.Experience(eid=tb.EID("b0"), tokens=torch.arange(5), prompt_length=2, reward=1.0)
        await experiment.writer(actor="explorer-0").write([row])
        await tb.run_strategy(experiment, Contrary)
        async with experiment.train_stream(strategy="Contrary", groups_per_step=2) as stream:
            step = await anext(stream)
        both = await experiences_of(experiment, step.manifest)
    assert [float(one.advantages.sum()) for one in both if one.advantages is not None] == [3, -3]


async def test_advantages_and_returns_of_a_step_have_memory_of_their_own(store_url: str) -> None:
    async with tb.open_store(store_url) as store:
        experiment = await store.experiment("run", config={"rollouts_per_group": 2})
        rows = [
            tb.Experience(
                eid=tb.EID("b0", 0, run, 0),
                tokens=torch.arange(5),
                prompt_length=2,
                action_mask=[1, 0, 1],
                logprobs=torch.full((3,), -1.0),
                reward=float(run),
            )
            for run in range(2)
        ]
        await experiment.writer(actor="explorer-0").write(rows)
        await tb.run_strategy(experiment, "grpo")
        async with experiment.train_stream(strategy="grpo", groups_per_step=1) as stream:
            step = await anext(stream)
        first, other = await experiences_of(experiment, step.manifest)
        assert first.advantages is not None
        assert first.returns is not None
        assert other.advantages is not None
        assert torch.equal(first.advantages, first.returns)
        assert first.advantages[1] == 0
        kept = other.advantages.clone()
        first.returns[0] = 9.0
        assert first.advantages[0] != 9.0
        assert torch.equal(other.advantages, kept)
