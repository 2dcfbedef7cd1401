"""The page about training has a row for every tensor that a stream hands out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import anyio
import pytest
import torch

from tests.contract.making import opened
from tests.trainer.data import prepared
from trinity_buffer import open_train_stream, run_strategy
from trinity_buffer.algorithm import build
from trinity_buffer.experience import EID, CustomField, Experience
from trinity_buffer.trainer.requirements import strategy_of, stream_options

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
TABLE = PAGE.split("\n## What a micro-batch holds", 1)[1].split("\n## ", 1)[0]
FORMS = {
    key: form
    for keys, form in re.findall(r"^\| (`[^|]*) \| ([^|]*) \|", TABLE, re.MULTILINE)
    for key in re.findall(r"`(\w+)`", keys)
}


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("name", ["grpo", "mix"])
def test_every_tensor_has_its_row(
    name: str, layout: Literal["padded", "packed"], new_sqlite_url: str
) -> None:
    algorithm = build(name)
    anyio.run(prepared, new_sqlite_url, algorithm)
    with open_train_stream(
        new_sqlite_url,
        experiment="run",
        strategy=strategy_of(algorithm),
        layout=layout,
        groups_per_step=2,
        expert_experiment="expert" if name == "mix" else None,
        **stream_options(algorithm),
    ) as stream:
        microbatch = next(stream).microbatches[0]
    assert microbatch.keys() - FORMS.keys() == set()
    wrong = [
        key
        for key, value in microbatch.items()
        if key != "max_seqlen" and str(value.dtype).removeprefix("torch.") not in FORMS[key]
    ]
    assert wrong == []
    assert ("cu_seqlens" in microbatch) == (layout == "packed")


async def test_what_is_stored_and_not_handed_out_is_named(new_sqlite_url: str) -> None:
    """Below the table; and of the rewards, where they lie."""
    routed = torch.ones((5, 2, 1), dtype=torch.uint8)
    custom = CustomField("score", "own_score", torch.float32)
    async with opened(new_sqlite_url, rollouts_per_group=2) as experiment:
        given = [
            Experience(
                eid=EID("b", 0, run),
                tokens=[1, 2, 3, 4, 5, 6],
                prompt_length=2,
                logprobs=[-0.5] * 4,
                action_mask=[True, True, True, False],
                reward=run + 1.0,
                info={"score": 0.5},
                custom_fields=[custom],
                routed_experts=routed,
                multi_modal_inputs={"pixels": torch.ones(3)},
            )
            for run in range(2)
        ]
        await experiment.writer("e0").write(given)
        await run_strategy(experiment, "grpo")
        read = [one async for one in experiment.read()]
        assert [one.custom_fields for one in read] == [[custom]] * 2
        assert all(str(one.routed_experts) == str(routed) for one in read)
        async with experiment.train_stream(strategy="grpo", groups_per_step=1) as stream:
            (microbatch,) = (await anext(stream)).microbatches
    assert {"own_score", "score", "routed_experts", "custom_fields"} & microbatch.keys() == set()
    assert [list(one) for one in microbatch.multi_modal_inputs] == [["pixels"]] * 2
    assert microbatch["token_level_rewards"].tolist() == [[0] * 5 + [run + 1.0] for run in range(2)]
    said = " ".join(TABLE.split())
    assert "`microbatch.multi_modal_inputs` is no key" in said
    assert "`custom_fields` and `routed_experts` of an experience are stored" in said
    assert "lies on its last token in `token_level_rewards`" in said
    assert "no micro-batch has the column" in " ".join(str(CustomField.__doc__).split())
