"""`seal`: a batch that nobody completes is closed by hand."""

from __future__ import annotations

from typing import Any

import anyio

from tests.cli.calling import Cli
from tests.contract.making import group, opened
from tests.pipeline.test_deadlines import abandoned, sealed
from trinity_buffer import run_strategy


def test_a_batch_is_sealed_by_hand_as_it_is(cli: Cli, store_url: str) -> None:
    async def main() -> None:
        async with abandoned(store_url) as experiment:
            await experiment.writer("e0").write(group(batch=7))  # nobody planned it

    async def look() -> dict[Any, tuple[str, int]]:
        async with opened(store_url) as experiment:
            await run_strategy(experiment, "grpo")
            async with experiment.train_stream(strategy="grpo") as stream:
                assert len([step async for step in stream]) == 2
            await experiment.writer("gone").seal("b", 4)  # who comes back is not contradicted
            return await sealed(experiment)

    anyio.run(main)
    assert cli("seal", "b", "--store", store_url).out == "sealed batch b with 4 experiences\n"
    assert cli("seal", "b", "--store", store_url).out == "batch b was sealed before\n"
    (told,) = cli("seal", "7", "--store", store_url, "--json").json
    assert told == {"batch": "7", "experiences": 4}
    refused = cli("seal", "nothing", "--store", store_url)
    assert refused.code == 2
    assert "has no batch 'nothing'" in refused.err
    assert anyio.run(look) == {"b": ("user", 4), 7: ("user", 4)}
