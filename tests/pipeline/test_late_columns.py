"""Columns that are made when somebody looks at them are those that are made with the step."""

from __future__ import annotations

import copy
import pickle
import random
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tests.conftest import Resize
from tests.handles import MicroBatch
from tests.pipeline.test_rows_to_batches import LAYOUTS, written
from trinity_buffer import open_train_stream
from trinity_buffer.codec.segments import decode_segment
from trinity_buffer.errors import TrainingError
from trinity_buffer.options import Layout
from trinity_buffer.pipeline.load import columns
from trinity_buffer.pipeline.train.collate import LazyColumns
from trinity_buffer.pipeline.train.microbatch import Lazy, LazyTensors

Change = Callable[[list[MicroBatch]], list[MicroBatch]]
COPIES: dict[str, Change] = {
    "as they are": lambda batches: batches,
    "deep copies": copy.deepcopy,
    "sent": lambda batches: pickle.loads(pickle.dumps(batches)),
}


def served(url: str, layout: Layout, budget: int | None, name: str) -> list[MicroBatch]:
    """Return all micro-batches, as they come to a new trainer."""
    with open_train_stream(
        url,
        experiment="e",
        strategy="grpo",
        consumer=name,
        groups_per_step=5,
        layout=layout,
        tokens_per_microbatch=budget,
    ) as stream:
        return [batch for step in stream for batch in step.microbatches]


@pytest.mark.parametrize("change", COPIES.values(), ids=list(COPIES))
@pytest.mark.parametrize(("layout", "budget"), LAYOUTS)
async def test_every_column_is_the_same_in_whatever_order_they_are_looked_at(
    sqlite_url: str, resize: Resize, layout: Layout, budget: int | None, change: Change
) -> None:
    await written(sqlite_url)
    ahead = served(sqlite_url, layout, budget, "ahead")
    resize(bytes_made_ahead=0)
    for seed in range(4):
        late = change(served(sqlite_url, layout, budget, f"late-{seed}"))
        looked_at = [(n, name) for n, batch in enumerate(late) for name in batch]
        assert looked_at == [(n, name) for n, batch in enumerate(ahead) for name in batch]
        random.Random(seed).shuffle(looked_at)
        for number, name in looked_at:
            require_equal(late[number][name], ahead[number][name], name)
        for batch in late:
            assert batch["old_logprob"] is batch["rollout_logprob"]


def require_equal(found: Any, expected: Any, name: str) -> None:
    """Require the same bits, type and shape."""
    if not isinstance(expected, torch.Tensor):
        assert found == expected, name
        return
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), name
    assert found.contiguous().numpy().tobytes() == expected.contiguous().numpy().tobytes(), name


@pytest.mark.parametrize(("layout", "budget"), LAYOUTS)
async def test_what_a_trainer_writes_into_one_column_reaches_no_other(
    sqlite_url: str, resize: Resize, layout: Layout, budget: int | None
) -> None:
    await written(sqlite_url)
    ahead = served(sqlite_url, layout, budget, "ahead")
    resize(bytes_made_ahead=0)
    for before, batch in zip(ahead, served(sqlite_url, layout, budget, "late"), strict=True):
        for name in ("input_ids", "action_mask", "attention_mask", "old_logprob"):
            batch[name].fill_(0)
        for name in ("advantages", "returns", "token_level_rewards"):
            require_equal(batch[name], before[name], name)


async def test_what_was_stored_is_let_go_of_with_the_last_column_that_is_made_of_it(
    sqlite_url: str, resize: Resize, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[tuple[str, Any]] = []

    def decoded(blob: bytes) -> Any:
        segment = decode_segment(blob)
        columns = [(name, c.data) for name, some in segment.columns.items() for c in some]
        stored.extend((name, weakref.ref(data)) for name, data in columns)
        return segment

    def held() -> set[str]:
        return {name for name, data in stored if data() is not None}

    monkeypatch.setattr(columns, "decode_segment", decoded)
    await written(sqlite_url)
    assert served(sqlite_url, "padded", None, "ahead")
    assert "tokens" in {name for name, _ in stored}
    assert held() == set()
    resize(bytes_made_ahead=0)
    late = served(sqlite_url, "padded", None, "late")
    assert held() >= {"tokens", "logprobs", "action_mask", "advantages"}
    assert all(batch["input_ids"].any() for batch in late)
    assert not held() & {"tokens", "logprobs"}  # of one blob: both are made
    for name in ("advantages", "action_mask", "token_level_rewards"):
        assert all(batch[name].any() for batch in late)
    assert held() == {"action_mask", "advantages", "returns"}  # returns are still to be made
    assert all(batch["returns"].any() for batch in late)
    assert held() == set()
    assert all(batch["old_logprob"].any() for batch in late)


def test_a_late_value_is_made_once_under_all_of_its_names() -> None:
    made = []

    def make() -> np.ndarray[Any, Any]:
        made.append(np.zeros(3))
        return made[-1]

    late = Lazy(make)
    tensors = LazyTensors({"a": late, "b": late})
    assert not made
    assert tensors["a"] is tensors["b"] is tensors["a"] is made[0]
    assert len(made) == 1


def test_a_step_that_is_printed_makes_and_shows_no_tensor() -> None:
    make = Mock()
    shown = repr(LazyTensors({"a": Lazy(make), "b": torch.zeros(1000)}))
    make.assert_not_called()
    assert "tensor(" not in shown


def test_threads_that_look_at_once_get_one_value() -> None:
    both_make = threading.Barrier(2)

    def make() -> object:
        both_make.wait(10)
        return object()

    tensors = LazyTensors({"a": Lazy(make)})
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(tensors.__getitem__, ("a", "a"))
    assert first is second is tensors["a"]


async def test_what_the_trainer_computes_itself_is_not_made_to_be_dropped(
    sqlite_url: str, resize: Resize, monkeypatch: pytest.MonkeyPatch
) -> None:
    await written(sqlite_url)
    resize(bytes_made_ahead=0)
    monkeypatch.setattr(LazyColumns, "part", refuse)
    with open_train_stream(
        sqlite_url, experiment="e", strategy="grpo", groups_per_step=5, recompute_old_logprob=True
    ) as stream:
        batches = [batch for step in stream for batch in step.microbatches]
    assert all("rollout_logprob" in batch and "old_logprob" not in batch for batch in batches)


def refuse(*_: object) -> None:
    raise AssertionError("nobody has looked at a column")


async def test_a_column_whose_making_was_ended_is_not_said_to_be_absent(
    sqlite_url: str, resize: Resize, monkeypatch: pytest.MonkeyPatch
) -> None:
    await written(sqlite_url)
    resize(bytes_made_ahead=0)
    batch = served(sqlite_url, "padded", None, "late")[0]
    with monkeypatch.context() as patch:
        patch.setattr(np, "frombuffer", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            batch["input_ids"]
    for look in (batch.__getitem__, batch.get):  # of a KeyError, `get` would make None
        for name in ("input_ids", "rollout_logprob"):
            with pytest.raises(TrainingError, match=f"{name} of a step cannot be made"):
                look(name)
    assert batch["action_mask"].any(), "what is stored apart is there"


def read_by_a_loss(batch: MicroBatch) -> torch.Tensor:
    weights = batch["advantages"] * batch["action_mask"] * batch["old_logprob"]
    found: torch.Tensor = (weights + batch["input_ids"] + batch["returns"]).sum()
    return found


@pytest.mark.long
async def test_a_compiled_function_may_be_the_first_to_look(
    sqlite_url: str, resize: Resize
) -> None:
    await written(sqlite_url)
    ahead = served(sqlite_url, "padded", 4096, "ahead")
    resize(bytes_made_ahead=0)
    late = served(sqlite_url, "padded", 4096, "late")
    compiled: Callable[[MicroBatch], torch.Tensor] = torch.compile(read_by_a_loss, backend="eager")
    found = [compiled(batch) for batch in late]
    assert found == [read_by_a_loss(batch) for batch in ahead]
