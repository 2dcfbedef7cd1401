"""What the main flows cost in Python: functions, files and calls of the package, in all threads.

The time of a write or a step is spread over many small functions, so one that is added shows in no
profile. These bounds show it. A flow that needs more has to say why it is worth that.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import pytest
import torch

import trinity_buffer as tb

PACKAGE = str(Path(tb.__file__).parent)
INLINE = ("<genexpr>", "<listcomp>", "<lambda>", "<dictcomp>", "<setcomp>")
RUNS = 8


class Most(NamedTuple):
    functions: int
    files: int
    calls: int


WRITE = Most(105, 15, 400)
ANNOTATE = Most(160, 24, 600)
TRAIN = Most(160, 24, 350)


class Calls:
    """Counts calls of the package, between `begin` and `end`."""

    def __init__(self) -> None:
        self.of: Counter[CodeType] = Counter()
        self.counts = False

    def __call__(self, frame: FrameType, event: str, _arg: object) -> None:
        code = frame.f_code
        if not self.counts or event != "call" or code.co_name in INLINE:
            return
        if code.co_filename.startswith(PACKAGE):
            self.of[code] += 1

    @contextmanager
    def counted(self) -> Iterator[None]:
        self.counts = True
        try:
            yield
        finally:
            self.counts = False

    def require(self, most: Most, times: int = 1) -> None:
        """Fail if the flow, which ran so many times, costs more."""
        files = {code.co_filename for code in self.of}
        costs = Most(len(self.of), len(files), sum(self.of.values()) // times)
        names = [f"{n} {code.co_qualname}" for code, n in self.of.most_common(40)]
        self.of.clear()
        # A flow that was not seen at all would pass every bound.
        assert costs.functions > most.functions // 2, f"{costs}: most of the flow was not counted"
        assert all(cost <= bound for cost, bound in zip(costs, most, strict=True)), (costs, names)


@pytest.fixture
def calls() -> Iterator[Calls]:
    counter: Any = Calls()
    before = sys.getprofile()
    threading.setprofile(counter)  # of the threads that begin from now on
    sys.setprofile(counter)
    yield counter
    sys.setprofile(before)
    threading.setprofile(None)


def rollouts(batch: str) -> list[tb.Experience]:
    return [
        tb.Experience(
            eid=tb.EID(batch, task, run),
            tokens=torch.arange(40) + task,
            prompt_length=8,
            logprobs=-torch.rand(32),
            reward=float((run + task) % 2),
        )
        for task in range(8)
        for run in range(RUNS)
    ]


async def written_and_annotated(url: str, calls: Calls) -> None:
    config = {"rollouts_per_group": RUNS, "groups_per_step": 8}
    async with tb.open_store(url) as store:
        experiment = await store.experiment("flows", config=config)
        writer = experiment.writer("explorer")
        for number in range(2):
            await writer.write(rollouts(f"first-{number}"))
        with calls.counted():
            await writer.write(rollouts("counted"))
        calls.require(WRITE)
        await tb.run_strategy(experiment, "grpo")
        for number in range(3):
            await writer.write(rollouts(f"later-{number}"))
        with calls.counted():
            await tb.run_strategy(experiment, "grpo")
        calls.require(ANNOTATE)


def test_the_main_flows_run_few_functions(tmp_path: Path, calls: Calls) -> None:
    url = f"sqlite:///{tmp_path}/flows.db"
    asyncio.run(written_and_annotated(url, calls))
    stream_options: Any = {"experiment": "flows", "strategy": "grpo", "prefetch": 1}
    with tb.open_train_stream(url, **stream_options) as stream:
        steps = iter(stream)
        for number in range(4):
            if number < 2:
                stream.commit(next(steps))
                continue
            with calls.counted():
                step = next(steps)
                for microbatch in step.microbatches:
                    microbatch["advantages"]
                stream.commit(step)
        calls.require(TRAIN, times=2)
