"""How the columns of a micro-batch get to the device: once, and only if somebody looks at them.

A GPU copies from pinned memory while it computes. All columns of a micro-batch that were looked at
in steps before go there in one copy, out of one piece of memory that is used again when the copy is
done; others follow when they are first looked at.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from threading import Lock
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from trinity_buffer.pipeline.load.blocks import Array
from trinity_buffer.pipeline.train.buffers import StepMemory, aligned
from trinity_buffer.pipeline.train.microbatch import Lazy, LazyTensors

Column: TypeAlias = "Array | Callable[[], Array] | Lazy"
"""A column, what makes it when it is first looked at, or one that lies on the device already."""


class Event(Protocol):
    """The end of a copy."""

    def query(self) -> bool:
        """Return whether it is done."""
        ...

    def synchronize(self) -> None:
        """Wait until it is done."""
        ...


class Transfers(Protocol):
    """What a device that copies beside its computing is asked for."""

    def pinned(self, size: int) -> Array:
        """Return ``size`` bytes of memory that the device reads itself."""
        ...

    def send(self, source: Array) -> tuple[Tensor, Event]:
        """Begin to copy bytes to the device; return them there, and the end of the copy."""
        ...

    def receive(self, there: Tensor, done: Event) -> None:
        """Let what this thread asks of the device next wait for a copy, and own its memory."""
        ...


class CudaTransfers:
    """Copies on a stream of their own.

    Args:
        device: one GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device=device)

    def pinned(self, size: int) -> Array:
        """Return pinned memory."""
        memory: Array = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True).numpy()
        return memory

    def send(self, source: Array) -> tuple[Tensor, Event]:
        """Copy into memory of the stream, so that nothing that is computed is waited for."""
        with torch.cuda.stream(self._stream):
            there = torch.empty(len(source), dtype=torch.uint8, device=self._device)
            there.copy_(torch.from_numpy(source), non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        return there, done

    def receive(self, there: Tensor, done: Any) -> None:
        """Let the current stream wait, and the allocator not reuse the memory before its work."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(done)
        there.record_stream(current)


def transfers_of(device: torch.device) -> Transfers | None:
    """Return how a device is copied to beside its computing; None: it is not."""
    return CudaTransfers(device) if device.type == "cuda" else None


class _Sent(NamedTuple):
    """Columns that lie on the device when the copy is done."""

    columns: Mapping[str, Tensor]
    there: Tensor
    done: Event


class Mover:
    """Moves the columns of one rank's micro-batches to their device.

    The stream makes the next step while the trainer's threads look at this one: they may call it at
    the same time.

    Args:
        device: where the columns are put.
    """

    def __init__(self, device: str) -> None:
        self._named = device
        self._is_here = device == "cpu"
        # An error names the row of its micro-batch, and may be that there is no memory left there.
        self._looked_at = {"sample_index"}
        self._under_way: deque[tuple[Event, Array]] = deque()
        self._lock = Lock()

    @cached_property
    def device(self) -> torch.device:
        """Where the columns are put, by its number."""
        device = torch.device(self._named)
        if device.type == "cuda" and device.index is None:
            return torch.device("cuda", torch.cuda.current_device())
        return device

    @cached_property
    def _transfers(self) -> Transfers | None:
        return transfers_of(self.device)

    @cached_property
    def _memory(self) -> StepMemory:
        assert self._transfers is not None
        return StepMemory(self._transfers.pinned)

    def columns(self, columns: Mapping[str, Column]) -> dict[str, Any]:
        """Return the columns of a micro-batch as tensors, or what makes each of them."""
        tensors: dict[str, Any] = {}
        ahead: dict[str, Array] = {}
        for name, column in columns.items():
            if isinstance(column, Lazy):
                tensors[name] = column
            elif not isinstance(column, np.ndarray):
                tensors[name] = Lazy(partial(self._made, name, column))
            elif self._is_here:
                tensors[name] = torch.from_numpy(column)
            else:
                tensors[name] = Lazy(partial(self._moved, name, torch.from_numpy(column)))
                if name in self._looked_at:
                    ahead[name] = column
        if ahead and self._transfers is not None:
            sent = self._send({name: torch.from_numpy(column) for name, column in ahead.items()})
            for name in ahead:
                tensors[name] = Lazy(partial(self._received, name, sent))
        return tensors

    def now(self, column: Array) -> Tensor:
        """Return a column that is on the device, for whatever is asked of it next."""
        there = torch.from_numpy(column)
        if self._is_here or self._transfers is None:
            return there.to(self.device)
        sent = self._send({"": there})
        tensor = self._received("", sent)
        sent.done.synchronize()  # whatever the stream that asks
        return tensor

    def inputs(self, tensors: Mapping[str, Tensor]) -> Any:
        """Return tensors of a row that are no columns, such as pixels, by name."""
        if self._is_here:
            return dict(tensors)
        late = {n: Lazy(partial(self._sent_and_received, value)) for n, value in tensors.items()}
        return LazyTensors(late)

    def positions(self, shape: tuple[int, ...]) -> Lazy:
        """Return the places ``0, 1, …`` in each row, made on the device."""
        return Lazy(lambda: torch.arange(shape[1], device=self.device).expand(shape))

    def _made(self, name: str, make: Callable[[], Array]) -> Tensor:
        """Return a column that is made now; `torch.compile` does not look into its making."""
        made = torch.from_numpy(_untraced(make)())
        return made if self._is_here else self._moved(name, made)

    def _moved(self, name: str, column: Tensor) -> Tensor:
        """Return a column that is looked at for the first time."""
        self._looked_at.add(name)
        return self._sent_and_received(column)

    def _sent_and_received(self, values: Tensor) -> Tensor:
        if self._transfers is None:
            return values.to(self.device)
        sent: _Sent = _untraced(self._send)({"": values})
        return self._received("", sent)

    def _received(self, name: str, sent: _Sent) -> Tensor:
        assert self._transfers is not None
        _untraced(self._transfers.receive)(sent.there, sent.done)
        return sent.columns[name]

    def _send(self, columns: Mapping[str, Tensor]) -> _Sent:
        """Begin to copy columns to the device, all in one piece."""
        assert self._transfers is not None
        begins, size = dict[str, int](), 0
        for name, column in columns.items():
            begins[name] = size
            size = aligned(size + column.nbytes)
        with self._lock:
            while self._under_way and self._under_way[0][0].query():
                self._under_way.popleft()
            # Small ones are all of one size, so that each fits where another was.
            source = self._memory.take(max(size, _SMALL))[:size]
            whole = torch.from_numpy(source)
            for name, column in columns.items():
                _place(whole, begins[name], column).copy_(column)
            there, done = self._transfers.send(source)
            # It is looked at as long as it is read, so that the memory is not given out again.
            self._under_way.append((done, source))
        placed = {name: _place(there, begins[name], column) for name, column in columns.items()}
        return _Sent(placed, there, done)


_SMALL = 64 * 1024


def _place(whole: Tensor, begin: int, column: Tensor) -> Tensor:
    """Return the part of some bytes where a column lies, as that column."""
    return whole[begin : begin + column.nbytes].view(column.dtype).view(column.shape)


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that `torch.compile` does not look into."""
    if "torch._dynamo" in sys.modules:  # else nothing is compiled; to import it takes a second
        untraced: Callable[..., Any] = torch.compiler.disable(function)
        return untraced
    return function
