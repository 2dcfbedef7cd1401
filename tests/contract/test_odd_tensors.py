"""Tensors that few have: of bytes that are no booleans, without elements, changed meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.contract.making import opened
from tests.raw_store import encode_experiences
from trinity_buffer import run_strategy, verify
from trinity_buffer.experience import EID, Experience
from trinity_buffer.pipeline.encoding import TORCH_DTYPES

MANY = 40_000
"""Elements of a tensor whose bytes are not joined with those of others."""

"""Of bfloat16."""

BYTES = torch.tensor([0, 255, 2, 1, 0], dtype=torch.uint8)


def odd(run: int, **fields: Any) -> Experience:
    """Return an experience of five tokens of a response, with some ``fields`` of its own."""
    said: dict[str, Any] = {"tokens": list(range(7)), "prompt_length": 2, "reward": float(run)}
    return Experience(
        eid=EID("b", 0, run),
        logprobs=torch.full((5,), -0.5),
        info={"model_version": 0},
        **said | fields,
    )


async def test_bytes_that_are_viewed_as_booleans_are_true_or_false(store_url: str) -> None:
    mask = BYTES.view(torch.bool)
    plain = BYTES != 0
    pixels = [{"seen": mask}, {"seen": mask}]
    async with opened(store_url, rollouts_per_group=2) as experiment:
        first = [odd(run, action_mask=mask, multi_modal_inputs=pixels[run]) for run in range(2)]
        receipt = await experiment.writer("e0").write(first)
        again = await experiment.writer("e0").write(
            [odd(run, action_mask=plain, multi_modal_inputs={"seen": plain}) for run in range(2)]
        )
        await run_strategy(experiment, "grpo")
        async with experiment.train_stream(strategy="grpo", groups_per_step=1) as stream:
            step = await anext(stream)
            assert step.microbatches[0]["action_mask"][:, 2:].tolist() == [plain.tolist()] * 2
            seen = [inputs["seen"].tolist() for inputs in step.microbatches[0].multi_modal_inputs]
            assert seen == [plain.tolist()] * 2
            await stream.commit(step)
        alone = await experiment.writer("e0").write([odd(2, action_mask=mask)])
        assert (receipt.written, again.duplicates, alone.written) == (2, 2, 1)
        assert (await verify(experiment)).problems == ()


async def test_a_tensor_without_elements_reaches_the_trainer(store_url: str) -> None:
    shapes = [(3, 0, 2), (0, 4)]
    async with opened(store_url, rollouts_per_group=2) as experiment:
        inputs = [{"pixels": torch.zeros(shape)} for shape in shapes]
        some = [odd(run, multi_modal_inputs=inputs[run]) for run in range(2)]
        await experiment.writer("e0").write(some)
        await run_strategy(experiment, "grpo")
        async with experiment.train_stream(strategy="grpo", groups_per_step=1) as stream:
            step = await anext(stream)
            found = step.microbatches[0].multi_modal_inputs
            assert [tuple(one["pixels"].shape) for one in found] == shapes


def test_what_was_encoded_does_not_change_with_the_tensors() -> None:
    """Whoever gave up a write may use its memory again while it is committed."""
    tokens = torch.zeros(MANY, dtype=torch.int32)
    pixels, logprobs = torch.zeros(2, MANY), torch.zeros(MANY - 2, dtype=torch.float16)
    one = odd(0, tokens=tokens, multi_modal_inputs={"pixels": pixels})
    one.logprobs = logprobs
    one.action_mask = torch.ones(MANY - 2, dtype=torch.bool)
    families = encode_experiences([one]).families
    before = {family: b"".join(blob) for family, blob in families.items()}
    for tensor in (tokens, pixels, logprobs, one.action_mask):
        tensor.fill_(7)
    assert {family: b"".join(blob) for family, blob in families.items()} == before


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "uint8"])
async def test_a_mask_of_any_dtype_selects_what_has_advantages(dtype: str, sqlite_url: str) -> None:
    """They are stored as one number, of at least float32, for each row; NumPy has no bfloat16."""
    mask = torch.tensor([1, 0, 1, 1, 0]).to(TORCH_DTYPES[dtype])
    async with opened(sqlite_url, rollouts_per_group=2) as experiment:
        await experiment.writer("e0").write([odd(run, action_mask=mask) for run in range(2)])
        await run_strategy(experiment, "grpo")
        async with experiment.train_stream(strategy="grpo", groups_per_step=1) as stream:
            (microbatch,) = (await anext(stream)).microbatches
    expected = mask.float() * 0.5**0.5
    for name in ("advantages", "returns"):
        assert_close(microbatch[name][:, 2:], torch.stack([-expected, expected]), rtol=2e-6, atol=0)
