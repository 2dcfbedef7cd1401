"""The page about training has a row for every tensor that a stream hands out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import anyio
import pytest

from tests.trainer.data import prepared
from trinity_buffer.algorithm import build
from trinity_buffer.pipeline.sync_stream import open_train_stream
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
    name: str, layout: Literal["padded", "packed"], sqlite_url: str
) -> None:
    algorithm = build(name)
    anyio.run(prepared, sqlite_url, algorithm)
    with open_train_stream(
        sqlite_url,
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
