"""Micro-batches: tensors by name for one forward and backward pass.

Their columns are moved to the device once, and only if they are read. A GPU copies from pinned
memory while it computes. The columns that were read in earlier steps go there in a single copy from
one reusable piece of memory; the others follow when first read.
"""

from __future__ import annotations

import sys
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from threading import Lock
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from trinity_buffer.algorithm.layout import BatchLayout
from trinity_buffer.errors import InvalidArgumentError, TrainingError
from trinity_buffer.limits import sizes
from trinity_buffer.pipeline.load.columns import Array


@dataclass(slots=True, eq=False)
class Lazy:
    """A value that is made when it is first read.

    Attributes:
        make: makes the value; released afterwards.
    """

    make: Callable[[], Any] | None
    _made: list[Any] = field(default_factory=list, init=False)

    @property
    def value(self) -> Any:
        """The value."""
        if (make := self.make) is not None:
            # Autograd cannot save tensors that were made in inference mode.
            with torch.inference_mode(False):  # noqa: FBT003 - torch.compile takes no keyword
                self._made.append(make())
            del self._made[1:]  # threads that race all get the first value
            self.make = None
        return self._made[0]


class LazyTensors(UserDict[str, Any]):
    """Tensors by name, some of which are made when they are first read: not by ``in`` or ``len``.

    Args:
        held: tensors, lazy values and other values.
    """

    # Not that of a dict, which prints every tensor of a step: on a GPU it waits for each.
    __repr__ = object.__repr__

    def __init__(self, held: dict[str, Any]) -> None:
        self.data = held

    @override
    def __getitem__(self, name: str) -> Any:
        if isinstance(value := self.data[name], Lazy):
            value = self.data[name] = value.value
        return value

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle tensors alone: a lazy value may hold the whole step."""
        return LazyTensors, (dict(self),)


@dataclass(slots=True)
class MicroBatch(Mapping[str, Any]):
    """A mapping of tensors; N rows, padded to ``[N, T]`` or packed to ``[T]``.

    ``input_ids`` and ``position_ids`` int64, ``attention_mask`` and ``action_mask`` bool;
    ``rollout_logprob``, ``old_logprob`` (the same tensor until the trainer recomputes it; both
    absent where no row of the step recorded any), ``advantages``, ``returns`` and
    ``token_level_rewards`` float32; ``logprob_mask`` bool ``[N]`` (which rows recorded theirs)
    where only some did; ``temperature`` float32, one for each token, where some were sampled at
    another one than 1; ``sample_index`` (slot in the manifest), ``group_index`` and ``step`` int32
    ``[N]``; packed also ``cu_seqlens`` int32 ``[N + 1]`` and ``max_seqlen``.

    Attributes:
        tensors: the mapping itself; assign what the trainer computes to it (``values``,
            ``ref_logprob``, ...). Columns that few losses read, and all columns of large steps, are
            made when first read, and moved to another device then unless earlier steps read them.
        layout: sequence boundaries, and the denominators of the whole step.
        multi_modal_inputs: one mapping per row, name -> tensor; rows without any share one.
        policy_versions: one per row, None if unknown.
        unrecorded: ``usual`` or ``expert`` -> uid of a row of the step without log-probabilities,
            if other rows have them.
        unscorable: uid of a row of the step -> the sampling option that no trainer can score, such
            as ``top_p=0.9``.
        unrewarded: uid of a row of the step whose run has no reward; empty if no row has any, None
            if all have one, or ``token_level_rewards`` were assigned.
        read_zeros: called when ``advantages`` are read that were never computed; None: they were.
    """

    tensors: MutableMapping[str, Any]
    layout: BatchLayout
    multi_modal_inputs: list[Mapping[str, Tensor]] = field(default_factory=list)
    policy_versions: list[int | None] = field(default_factory=list)
    unrecorded: Mapping[str, str] = field(default_factory=dict)
    unscorable: Mapping[str, str] = field(default_factory=dict)
    read_zeros: Callable[[], None] | None = None
    unrewarded: str | None = None

    @override
    def __getitem__(self, key: str) -> Any:
        if self.read_zeros is not None and key == "advantages":
            self.read_zeros()
        return self.tensors[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.tensors[key] = value
        if key == "advantages":
            self.read_zeros = None
        if key == "token_level_rewards":
            self.unrewarded = None

    def require_scorable(self, *, compared: bool | None = None) -> None:
        """Raise unless log-probabilities of a trainer can be compared with the recorded ones.

        Args:
            compared: whether they are; None: if ``old_logprob`` is the recorded one.

        Raises:
            TrainingError: names a row of the step, and the option that forbids it.
        """
        if not self.unscorable:
            return
        if compared is None:
            compared = "old_logprob" in self and self["old_logprob"] is self.get("rollout_logprob")
        for uid, option in self.unscorable.items() if compared else ():
            raise TrainingError(
                f"row {uid} was sampled with {option}: no trainer can compute the probabilities "
                "that its tokens had. Sample with no other option than a temperature of 0.01 or "
                "more, and processed log-probs; compare with the trainer's own log-probs alone "
                f"(recompute_old_logprob=True), or go on without the row: drop=[{uid!r}]"
            )

    def require_plain(self, temperature: float) -> None:
        """Raise unless a trainer that knows only tokens and one temperature can train on it.

        Raises:
            TrainingError: rows have other inputs such as pictures, were sampled at another
                temperature, lack log-probabilities that others have, or cannot be scored; see
                `require_scorable`.
        """
        self.require_scorable()
        for uid in self.unrecorded.values():
            raise TrainingError(
                f"row {uid} has no log-probabilities and others of the step have, so that the "
                f"trainer would take zeros for them: go on without it (drop=[{uid!r}]) and ask the "
                "stream for needs=('logprobs',), which rejects such rows of the steps to come"
            )
        if any(self.multi_modal_inputs):
            raise TrainingError(
                "rows of the step have multi_modal_inputs, such as pixels, and the trainer is "
                "given tokens alone: leave such rows out"
            )
        mask = self["action_mask"] != 0
        heat = self.get("temperature")
        trained = mask.new_ones(mask.shape, dtype=torch.float32) if heat is None else heat
        others = trained[mask & (trained - temperature).abs().gt(1e-4 * temperature)]
        if others.numel():
            raise TrainingError(
                f"the trainer divides all logits by temperature={temperature:g}, and rows of the "
                f"step were sampled at {float(others[0]):g}: give the trainer the temperature of "
                "the rows, and sample all at one"
            )

    def drop(self, key: str) -> None:
        """Remove a tensor if present, without making it first as ``pop`` would."""
        if key in self.tensors:
            del self.tensors[key]

    @override
    def __contains__(self, key: object) -> bool:
        return key in self.tensors

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    @override
    def __len__(self) -> int:
        return len(self.tensors)


Column: TypeAlias = "Array | Callable[[], Array] | Lazy"
"""A column, a function that makes it when first read, or one that is on the device already."""


_OUR_REFERENCES = 2
"""References to an unused piece: by the deque, and by the call of `sys.getrefcount`."""


def begins_of(widths: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Return where columns of so many bytes begin in one piece of memory, and its size."""
    begins, size = dict[str, int](), 0
    for name, width in widths.items():
        begins[name] = size
        size += width + -width % 64  # aligned, as vector instructions want it
    return begins, size


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
        self._pieces: deque[Array] = deque(maxlen=sizes.pieces_kept)

    def take(self, size: int) -> Array:
        """Return ``size`` uninitialized bytes."""
        pieces = self._pieces
        for at in range(len(pieces)):
            # Without a variable of ours, of which Python 3.14 counts no reference in a call.
            unused = sys.getrefcount(pieces[at]) <= _OUR_REFERENCES
            if unused and size <= len(pieces[at]) <= 4 * size:
                return pieces[at][:size]
        new = self._allocate(size + size // 8)  # slack: sizes of steps differ a little
        self._pieces.append(new)
        return new[:size]

    def columns(self, number: int, dtypes: Mapping[str, type[np.generic]]) -> dict[str, Array]:
        """Return columns of ``number`` uninitialized elements, all in one piece."""
        widths = {name: number * np.dtype(dtype).itemsize for name, dtype in dtypes.items()}
        begins, size = begins_of(widths)
        piece = self.take(size)
        own = {name: piece[begin : begin + widths[name]] for name, begin in begins.items()}
        return {name: column.view(dtypes[name]) for name, column in own.items()}


class CudaTransfers:
    """Copies to a GPU while it computes, on a stream of its own.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device=device)

    def pinned(self, size: int) -> Array:
        """Return ``size`` bytes of memory that the device can read directly."""
        memory: Array = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True).numpy()
        return memory

    def send(self, source: Array) -> tuple[Tensor, torch.cuda.Event]:
        """Start copying bytes to the device; return the copy there, and the event of its end.

        Into memory of the copy stream, so that it need not wait for any computation.
        """
        with torch.cuda.stream(self._stream):
            there = torch.empty(len(source), dtype=torch.uint8, device=self._device)
            there.copy_(torch.from_numpy(source), non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        return there, done

    def receive(self, there: Tensor, done: torch.cuda.Event) -> None:
        """Make the current stream wait, and keep the memory from reuse until its work is done."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(done)
        there.record_stream(current)


def transfers_of(device: torch.device) -> CudaTransfers | None:
    """Return the transfers of a device, or None if it does not copy while it computes."""
    return CudaTransfers(device) if device.type == "cuda" else None


class _Sent(NamedTuple):
    """Columns on the device, valid once the copy is done."""

    columns: Mapping[str, Tensor]
    there: Tensor
    done: torch.cuda.Event


class Mover:
    """Moves the columns of one rank's micro-batches to their device.

    The stream makes the next step while threads of the trainer read this one, so calls may be
    concurrent.

    Args:
        device: the target device.

    Raises:
        InvalidArgumentError: torch knows no such device, or sees none.
    """

    def __init__(self, device: str) -> None:
        try:
            named = torch.device(device)
        except RuntimeError as error:
            raise InvalidArgumentError(
                f"device={device!r}: torch knows no such device; give cpu, cuda, or one GPU, such "
                "as cuda:1"
            ) from error
        count = getattr(getattr(torch, named.type, None), "device_count", lambda: sys.maxsize)
        if named.type != "cpu" and (named.index or 0) >= count():
            raise InvalidArgumentError(
                f"device={device!r}: torch {torch.__version__} sees no such GPU on this machine; "
                "give device='cpu', or run it where there is one"
            )
        self._named = device
        self._is_here = device == "cpu"
        # Always moved ahead: an error has to name its rows even when the device has no memory left.
        self._looked_at = {"sample_index"}
        self._under_way: deque[tuple[torch.cuda.Event, Array]] = deque()
        self._lock = Lock()

    @cached_property
    def device(self) -> torch.device:
        """The target device, with its index."""
        device = torch.device(self._named)
        if device.type == "cuda" and device.index is None:
            return torch.device("cuda", torch.cuda.current_device())
        return device

    @cached_property
    def _transfers(self) -> CudaTransfers | None:
        return transfers_of(self.device)

    @cached_property
    def _memory(self) -> StepMemory:
        assert self._transfers is not None
        return StepMemory(self._transfers.pinned)

    def columns(self, columns: Mapping[str, Column]) -> dict[str, Any]:
        """Return the columns of a micro-batch as tensors or lazy ones."""
        tensors: dict[str, Any] = {}
        ahead: dict[str, Tensor] = {}
        for name, column in columns.items():
            if isinstance(column, Lazy):
                tensors[name] = column
            elif not isinstance(column, np.ndarray):
                tensors[name] = Lazy(partial(self._made, name, column))
            elif self._is_here:
                tensors[name] = torch.from_numpy(column)
            else:
                there = torch.from_numpy(column)
                tensors[name] = Lazy(partial(self._moved, name, there))
                if name in self._looked_at:
                    ahead[name] = there
        if ahead and self._transfers is not None:
            sent = self._send(ahead)
            tensors |= {name: Lazy(partial(self._received, name, sent)) for name in ahead}
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
        made = torch.from_numpy(_untraced(make))
        return made if self._is_here else self._moved(name, made)

    def _moved(self, name: str, column: Tensor) -> Tensor:
        """Move a column that is read for the first time."""
        self._looked_at.add(name)
        return self._sent_and_received(column)

    def _sent_and_received(self, values: Tensor) -> Tensor:
        if self._transfers is None:
            return values.to(self.device)
        return self._received("", _untraced(self._send, {"": values}))

    def _received(self, name: str, sent: _Sent) -> Tensor:
        assert self._transfers is not None
        _untraced(self._transfers.receive, sent.there, sent.done)
        return sent.columns[name]

    def _send(self, columns: Mapping[str, Tensor]) -> _Sent:
        """Start copying columns to the device in one piece."""
        assert self._transfers is not None
        begins, size = begins_of({name: column.nbytes for name, column in columns.items()})
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


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


_disabled = cache(torch.compiler.disable)
"""To make what `torch.compile` does not trace takes longer than most calls."""


def _untraced(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function; `torch.compile` does not trace it."""
    # Importing it takes a second, and without it nothing is compiled.
    call = _disabled(_call) if "torch._dynamo" in sys.modules else _call
    return call(function, *args)
