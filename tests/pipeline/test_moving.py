"""Columns are moved to their device once, as they are looked at, out of memory that is used again.

A device that copies when it likes stands in for a GPU: bytes are there when somebody waits for
them, and are what their source holds then.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.conftest import Resize
from tests.handles import MicroBatch
from tests.pipeline.test_late_columns import require_equal
from tests.pipeline.test_rows_to_batches import written
from trinity_buffer import open_train_stream
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.options import Layout
from trinity_buffer.pipeline.load.columns import Array
from trinity_buffer.pipeline.train import microbatch
from trinity_buffer.pipeline.train.microbatch import LazyTensors, Mover


@dataclass(slots=True, eq=False)
class Copy:
    """One copy under way, and its end.

    Attributes:
        address: of its source, which nothing but the mover keeps.
    """

    device: SlowDevice
    address: int
    there: Tensor
    done: bool = False

    def query(self) -> bool:
        """Return whether it is done."""
        return self.done

    def synchronize(self) -> None:
        """Copy this one, and all before it: they are on one stream."""
        with self.device.lock:  # once: the source may be used again as soon as that is done
            for one in self.device.copies[: self.device.copies.index(self) + 1]:
                if not one.done:
                    source = bytearray(ctypes.string_at(one.address, len(one.there)) or b"-")
                    one.there.copy_(torch.frombuffer(source, dtype=torch.uint8)[: len(one.there)])
                    one.done = True


@dataclass(slots=True)
class SlowDevice:
    """A device that copies as late as it may; threads may wait for it at the same time."""

    copies: list[Copy] = field(default_factory=list)
    allocated: list[bytearray] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    lock: Any = field(default_factory=Lock)

    def pinned(self, size: int) -> Array:
        """Return memory that stays, whatever becomes of the array."""
        self.allocated.append(bytearray(size))
        return np.frombuffer(self.allocated[-1], np.uint8)

    def send(self, source: Array) -> tuple[Tensor, Any]:
        """Begin a copy."""
        address = int(source.__array_interface__["data"][0])
        found = Copy(self, address, torch.full((len(source),), 77, dtype=torch.uint8))
        self.copies.append(found)
        return found.there, found

    def receive(self, there: Tensor, done: Any) -> None:
        """Wait for a copy."""
        assert done.there is there
        self.received.append(self.copies.index(done))
        done.synchronize()

    @property
    def addresses(self) -> list[int]:
        """Where the sources of the copies lie."""
        return [one.address for one in self.copies]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowDevice:
    """Let every device but the CPU be a slow one, such as that without numbers."""
    found = SlowDevice()
    monkeypatch.setattr(microbatch, "transfers_of", lambda _: found)
    return found


def columns() -> dict[str, Array]:
    return {
        "mask": np.array([True, False, True]),
        "ids": np.arange(6, dtype=np.int64).reshape(2, 3),
        "none": np.zeros((0, 1), np.float32),
        "scores": np.linspace(0, 1, 5, dtype=np.float32),
    }


def read(found: Mapping[str, Any], *names: str) -> None:
    for name in names or found:
        require_equal(LazyTensors(dict(found))[name], torch.from_numpy(columns()[name]), name)


def test_a_column_is_moved_when_it_is_looked_at_and_no_other_is(slow: SlowDevice) -> None:
    found = Mover("meta").columns(columns())
    assert slow.copies == []
    read(found, "ids")
    assert len(slow.copies) == 1
    read(found, "ids")
    assert len(slow.copies) == 1


def test_what_was_looked_at_before_is_moved_ahead_in_one_copy(slow: SlowDevice) -> None:
    mover = Mover("meta")
    read(mover.columns(columns()), "ids", "scores", "mask")
    assert len(slow.copies) == 3
    found = mover.columns(columns())
    assert len(slow.copies) == 4
    assert slow.received == [0, 1, 2]
    read(found, "mask")
    assert slow.received[3:] == [3]
    read(found)
    assert slow.received[3:] == [3, 3, 4, 3]
    size = len(slow.copies[3].there)
    assert size == 64 + 64 + 64
    assert len(slow.copies) == 5  # of the one that nobody had looked at


def test_the_places_of_rows_are_there_before_an_error_has_to_name_one(slow: SlowDevice) -> None:
    found = Mover("meta").columns({"sample_index": np.arange(3, dtype=np.int32)} | columns())
    assert len(slow.copies) == 1
    assert LazyTensors(found)["sample_index"].tolist() == [0, 1, 2]
    assert len(slow.copies) == 1


def test_columns_begin_where_any_dtype_may(slow: SlowDevice) -> None:
    mover = Mover("meta")
    read(mover.columns(columns()))
    found = LazyTensors(mover.columns(columns()))
    assert [found[n].storage_offset() * found[n].itemsize for n in found] == [0, 64, 128, 128]


def test_memory_is_used_again_when_its_copy_is_done_and_not_before(slow: SlowDevice) -> None:
    mover = Mover("meta")
    late = mover.columns({"a": np.full(9, 1, np.uint8)})
    assert LazyTensors(late)["a"].tolist() == [1] * 9
    ahead = [mover.columns({"a": np.full(9, n, np.uint8)}) for n in range(2, 5)]
    addresses = slow.addresses
    assert addresses[1] == addresses[0]  # that copy was done
    assert len(set(addresses[1:])) == 3
    assert [one.done for one in slow.copies] == [True, False, False, False]
    assert [LazyTensors(one)["a"].tolist() for one in ahead] == [[n] * 9 for n in range(2, 5)]
    mover.columns({"a": np.full(9, 5, np.uint8)})
    assert slow.addresses[-1] in addresses


def test_small_columns_of_any_size_share_their_memory(slow: SlowDevice) -> None:
    mover = Mover("meta")
    for size in (1, 60_000, 9, 0, 3000):
        late = mover.columns({"a": np.arange(size, dtype=np.uint8)})
        assert len(LazyTensors(late)["a"]) == size
    assert len(set(slow.addresses)) == 1


def test_boundaries_are_there_when_they_are_returned(slow: SlowDevice) -> None:
    limits = Mover("meta").now(np.array([0, 2, 5], np.int32))
    assert limits.tolist() == [0, 2, 5]
    assert slow.copies[0].done
    assert slow.received == [0]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_was_first_looked_at_without_gradients_is_trained_on_like_any_other(
    slow: SlowDevice, device: str
) -> None:
    mover = Mover(device)
    ids = np.arange(4)
    batch = LazyTensors(mover.columns({"late": lambda: ids, "ids": ids}))
    with torch.inference_mode():
        assert len(batch["late"]) == len(batch["ids"]) == 4
        places = mover.positions((2, 3)).value
    weight = torch.ones(4, 2, requires_grad=True)
    for name in batch:
        torch.nn.functional.embedding(batch[name], weight).sum().backward()
    assert not places.is_inference()
    assert weight.grad is not None


def test_what_is_made_late_is_made_and_moved_once(slow: SlowDevice) -> None:
    calls = []

    def make() -> Array:
        calls.append(1)
        return np.ones(3, np.float32)

    mover = Mover("meta")
    for _ in range(2):
        found = LazyTensors(mover.columns({"a": make}))
        assert found["a"].tolist() == found["a"].tolist() == [1, 1, 1]
    assert len(calls) == len(slow.copies) == 2


@pytest.mark.long  # torch imports its compiler
def test_a_compiled_function_may_be_the_first_to_look(slow: SlowDevice) -> None:
    def total(batch: LazyTensors) -> Tensor:
        found: Tensor = batch["ids"].sum() + batch["scores"].sum()
        return found

    mover = Mover("meta")
    compiled: Callable[[LazyTensors], Tensor] = torch.compile(total, backend="eager")
    for _ in range(2):
        assert float(compiled(LazyTensors(mover.columns(columns())))) == 17.5
    assert len(slow.copies) == 3


def test_pixels_are_moved_when_they_are_looked_at(slow: SlowDevice) -> None:
    pixels = {"pixels": torch.rand(3, 4).bfloat16().T, "scale": torch.tensor(2.0)}
    found = Mover("meta").inputs(pixels)
    assert slow.copies == []
    assert set(found) == {"pixels", "scale"}
    assert found
    assert all(torch.equal(found[name], pixels[name]) for name in pixels)


def test_other_devices_get_what_is_looked_at_and_the_cpu_copies_nothing() -> None:
    late = LazyTensors(Mover("meta").columns(columns()))
    assert late["ids"].device.type == "meta"
    assert Mover("meta").now(np.zeros(2)).device.type == "meta"
    here, mover = columns(), Mover("cpu")
    for name, tensor in mover.columns(dict(here)).items():
        assert np.shares_memory(tensor.numpy(), here[name]) or not here[name].size
    assert np.shares_memory(mover.now(here["scores"]).numpy(), here["scores"])


def served(url: str, layout: Layout, device: str, name: str) -> list[MicroBatch]:
    """Return micro-batches that were looked at as a loss does, each before the next step is."""
    found = []
    with open_train_stream(
        url,
        experiment="e",
        strategy="grpo",
        consumer=name,
        groups_per_step=5,
        layout=layout,
        tokens_per_microbatch=4096,
        device=device,
    ) as stream:
        for step in stream:
            for batch in step.microbatches:
                for column in ("input_ids", "action_mask", "old_logprob", "advantages"):
                    batch[column].sum()
                found.append(batch)
    return found


@pytest.mark.parametrize("ahead", [None, 0], ids=["made ahead", "made late"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
async def test_a_stream_serves_the_same_bits_on_a_device(
    sqlite_url: str, resize: Resize, slow: SlowDevice, layout: Layout, ahead: int | None
) -> None:
    await written(sqlite_url)
    if ahead is not None:
        resize(bytes_made_ahead=ahead)
    here, there = (served(sqlite_url, layout, d, d) for d in ("cpu", "meta"))
    assert len(here) == len(there) > 2
    for mine, other in zip(here, there, strict=True):
        assert list(mine) == list(other)
        assert other["old_logprob"] is other["rollout_logprob"]
        for name in set(mine) - ({"position_ids"} if layout == "padded" else set()):
            require_equal(other[name], mine[name], name)
        for one, two in zip(mine.multi_modal_inputs, other.multi_modal_inputs, strict=True):
            assert one.keys() == two.keys()
            assert all(torch.equal(one[name], two[name]) for name in one)
        assert (other.layout.cu_seqlens is None) == (layout == "padded")
    assert len(slow.allocated) < len(slow.copies) / 2


async def test_columns_that_no_step_looked_at_are_not_moved(
    sqlite_url: str, slow: SlowDevice
) -> None:
    await written(sqlite_url)
    batches = served(sqlite_url, "padded", "meta", "a")
    moved = sum(len(one.there) for one in slow.copies)
    read = sum(
        batch[name].nbytes
        for batch in batches
        for name in ("input_ids", "action_mask", "old_logprob", "advantages")
    )
    assert moved <= read + 64 * 5 * len(batches)
    assert torch.equal(copy.deepcopy(batches[0])["group_index"], batches[0]["group_index"])


def test_a_gpu_copies_beside_its_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(device))
    assert isinstance(microbatch.transfers_of(torch.device("cuda:1")), microbatch.CudaTransfers)
    assert made == [torch.device("cuda:1")]
    assert microbatch.transfers_of(torch.device("mps")) is None


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu"])
def test_a_device_that_torch_does_not_see_is_refused(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"torch.{kind}.device_count", lambda: 0)
    with pytest.raises(InvalidArgumentError, match=r"sees no such GPU .* device='cpu'"):
        Mover(kind)
