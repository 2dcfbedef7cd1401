"""The rows of a step as experiences: in their order, with the advantages that it trains on."""

from __future__ import annotations

import torch

import trinity_buffer as tb
from tests.whole_stores import experiences_of


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
