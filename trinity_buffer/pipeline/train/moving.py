"""Moves the columns of a micro-batch to the device, once, and only if they are read.

A GPU copies from pinned memory while it computes. The columns that were read in earlier steps go
there in a single copy from one reusable piece of memory; the others follow when first read.
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

from trinity_buffer.limits import sizes
from trinity_buffer.pipeline.load.blocks import Array
from trinity_buffer.pipeline.train.microbatch import Lazy, LazyTensors

Column: TypeAlias = "Array | Callable[[], Array] | Lazy"
"""A column, a function that makes it when first read, or one that is on the device already."""


_OUR_REFERENCES = 3
"""References to an unused piece: by the deque, the loop, and the call of `sys.getrefcount`."""


def aligned(size: int) -> int:
    """Return ``size`` rounded up to where the next column may begin."""
    return size + -size % 64


class StepMemory:
    """Reuses memory, in one piece for all columns of a step.

    Touching fresh memory costs more than writing to it: the kernel has to find, clear and map each
    page. So pieces are kept, and handed out again once no array or tensor refers to them. Not for
    concurrent use by threads.

    Args:
        allocate: returns fresh bytes; None: ordinary memory.
    """

    def __init__(self, allocate: Callable[[int], Array] | None = None) -> None:
        self._allocate = allocate or partial(np.empty, dtype=np.uint8)
        self._pieces: deque[Array] = deque(maxlen=sizes().pieces_kept)

    def take(self, size: int) -> Array:
        """Return ``size`` uninitialized bytes."""
        for piece in self._pieces:
            fits = size <= len(piece) <= 4 * size
            if fits and sys.getrefcount(piece) <= _OUR_REFERENCES:
                return piece[:size]
        new = self._allocate(size + size // 8)  # slack: sizes of steps differ a little
        self._pieces.append(new)
        return new[:size]

    def columns(self, number: int, dtypes: Mapping[str, type[np.generic]]) -> dict[str, Array]:
        """Return columns of ``number`` uninitialized elements, all in one piece."""
        begins, size = dict[str, int](), 0
        for name, dtype in dtypes.items():
            begins[name] = size
            size += number * np.dtype(dtype).itemsize
            size += -size % 64
        piece = self.take(size)
        return {
            name: piece[begin : begin + number * np.dtype(dtypes[name]).itemsize].view(dtypes[name])
            for name, begin in begins.items()
        }


class Event(Protocol):
    """The end of a copy."""

    def query(self) -> bool:
        """Return whether it is done."""
        ...

    def synchronize(self) -> None:
        """Wait until it is done."""
        ...


class Transfers(Protocol):
    """The interface to a device that copies while it computes."""

    def pinned(self, size: int) -> Array:
        """Return ``size`` bytes of memory that the device can read directly."""
        ...

    def send(self, source: Array) -> tuple[Tensor, Event]:
        """Start copying bytes to the device; return the copy there, and the event of its end."""
        ...

    def receive(self, there: Tensor, done: Event) -> None:
        """Make this thread's next work on the device wait for a copy, and own its memory."""
        ...


class CudaTransfers:
    """Copies on a separate CUDA stream.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device=device)

    def pinned(self, size: int) -> Array:
        """Return pinned memory."""
        memory: Array = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True).numpy()
        return memory

    def send(self, source: Array) -> tuple[Tensor, Event]:
        """Copy into memory of the copy stream, so that it need not wait for any computation."""
        with torch.cuda.stream(self._stream):
            there = torch.empty(len(source), dtype=torch.uint8, device=self._device)
            there.copy_(torch.from_numpy(source), non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        return there, done

    def receive(self, there: Tensor, done: Any) -> None:
        """Make the current stream wait, and keep the memory from reuse until its work is done."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(done)
        there.record_stream(current)


def transfers_of(device: torch.device) -> Transfers | None:
    """Return the transfers of a device, or None if it does not copy while it computes."""
    return CudaTransfers(device) if device.type == "cuda" else None


class _Sent(NamedTuple):
    """Columns on the device, valid once the copy is done."""

    columns: Mapping[str, Tensor]
    there: Tensor
    done: Event


class Mover:
    """Moves the columns of one rank's micro-batches to their device.

    The stream makes the next step while threads of the trainer read this one, so calls may be
    concurrent.

    Args:
        device: the target device.
    """

    def __init__(self, device: str) -> None:
        self._named = device
        self._is_here = device == "cpu"
        # Always moved ahead: an error has to name its rows even when the device has no memory left.
        self._looked_at = {"sample_index"}
        self._under_way: deque[tuple[Event, Array]] = deque()
        self._lock = Lock()

    @cached_property
    def device(self) -> torch.device:
        """The target device, with its index."""
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
        """Return the columns of a micro-batch as tensors or lazy ones."""
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
        """Return a column on the device, ready for any stream."""
        there = torch.from_numpy(column)
        if self._is_here or self._transfers is None:
            return there.to(self.device)
        sent = self._send({"": there})
        tensor = self._received("", sent)
        sent.done.synchronize()  # the column may be used on any stream
        return tensor

    def inputs(self, tensors: Mapping[str, Tensor]) -> Any:
        """Move a row's tensors that are not columns, such as pixels."""
        if self._is_here:
            return dict(tensors)
        late = {n: Lazy(partial(self._sent_and_received, value)) for n, value in tensors.items()}
        return LazyTensors(late)

    def positions(self, shape: tuple[int, ...]) -> Lazy:
        """Return the positions ``0, 1, …`` in each row, made on the device."""
        return Lazy(lambda: torch.arange(shape[1], device=self.device).expand(shape))

    def _made(self, name: str, make: Callable[[], Array]) -> Tensor:
        """Make a column now; `torch.compile` does not trace it."""
        made = torch.from_numpy(_untraced(make)())
        return made if self._is_here else self._moved(name, made)

    def _moved(self, name: str, column: Tensor) -> Tensor:
        """Move a column that is read for the first time."""
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
        """Start copying columns to the device in one piece."""
        assert self._transfers is not None
        begins, size = dict[str, int](), 0
        for name, column in columns.items():
            begins[name] = size
            size = aligned(size + column.nbytes)
        with self._lock:
            while self._under_way and self._under_way[0][0].query():
                self._under_way.popleft()
            # Small pieces get one common size, so that each can reuse the memory of another.
            source = self._memory.take(max(size, _SMALL))[:size]
            whole = torch.from_numpy(source)
            for name, column in columns.items():
                _place(whole, begins[name], column).copy_(column)
            there, done = self._transfers.send(source)
            # Keep a reference until the copy is done, or the memory would be handed out again.
            self._under_way.append((done, source))
        placed = {name: _place(there, begins[name], column) for name, column in columns.items()}
        return _Sent(placed, there, done)


_SMALL = 64 * 1024


def _place(whole: Tensor, begin: int, column: Tensor) -> Tensor:
    """Return the column that lies at ``begin`` in the bytes of ``whole``."""
    return whole[begin : begin + column.nbytes].view(column.dtype).view(column.shape)


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that `torch.compile` does not trace."""
    if (
        "torch._dynamo" in sys.modules
    ):  # importing it takes a second, and without it nothing is compiled
        untraced: Callable[..., Any] = torch.compiler.disable(function)
        return untraced
    return function
