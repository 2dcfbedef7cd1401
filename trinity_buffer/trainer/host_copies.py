"""Copies of what a checkpoint keeps, in the processor's memory, made beside what a GPU computes.

A copy from a GPU runs on a stream of its own and into page-locked memory. This thread does not wait
for it; what the GPU computes next does, since it may change what is copied.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

_logger = logging.getLogger(__name__)

_ALIGNED_TO = 64
_SMALLEST_BLOCK = 64 << 20
_LARGEST_BLOCK = 1 << 30


class Gpu(Protocol):
    """What the copies ask of torch where there is a GPU; a test has another one."""

    def holds(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is on a GPU."""
        ...

    def pinned(self, size: int) -> Tensor:
        """Return ``size`` bytes of page-locked memory.

        Raises:
            RuntimeError: there is no more of it.
        """
        ...

    def release(self) -> None:
        """Give page-locked memory that is not used any more back to the system."""
        ...

    def new_stream(self, device: torch.device) -> Any:
        """Return a new stream of ``device``."""
        ...

    def current_stream(self, device: torch.device) -> Any:
        """Return the stream on which ``device`` computes."""
        ...

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], stream: Any) -> None:
        """Begin to copy each source to its target on ``stream``; the sources may be forgotten."""
        ...


class Cuda:
    """The GPUs of this machine."""

    def holds(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is on a GPU."""
        return tensor.is_cuda

    def pinned(self, size: int) -> Tensor:
        """Return ``size`` bytes of page-locked memory."""
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def release(self) -> None:
        """Give page-locked memory that is not used any more back to the system."""
        empty = getattr(torch.accelerator, "empty_host_cache", None)
        if empty is not None:  # older versions of torch keep it for the next who asks
            empty()

    def new_stream(self, device: torch.device) -> Any:
        """Return a new stream of ``device``."""
        return torch.cuda.Stream(device)

    def current_stream(self, device: torch.device) -> Any:
        """Return the stream on which ``device`` computes."""
        return torch.cuda.current_stream(device)

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], stream: Any) -> None:
        """Begin to copy each source to its target on ``stream``; the sources may be forgotten."""
        with torch.cuda.stream(stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
                source.record_stream(stream)  # its memory stays its own until that is done


class HostCopies:
    """Copies tensors into memory of the processor that is used again for the next checkpoint.

    One checkpoint at a time: `begin`, `take` tensors, `wait`, and then read what was taken.

    Args:
        copied: the tensors may change while what was taken is read. A GPU's are copied anyway.
        gpu: for tests.
    """

    def __init__(self, *, copied: bool, gpu: Gpu | None = None) -> None:
        self.copied = copied
        self._gpu = Cuda() if gpu is None else gpu
        self._streams: dict[torch.device, Any] = {}
        self._blocks: list[Tensor] = []
        self._block = self._used = 0
        self._is_pinned = True

    def begin(self) -> None:
        """Begin a checkpoint: nobody reads what was taken before any more."""
        self._block = self._used = 0

    def take(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return what ``tensors`` hold now, in the processor's memory; to be read after `wait`.

        Between now and `hold` nothing may change a tensor where it lies. It may be forgotten.
        """
        found: list[Tensor] = []
        pairs: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        for tensor in tensors:
            if not self._gpu.holds(tensor):
                found.append(self._here(tensor))
                continue
            source = tensor.detach().contiguous()
            room = self._room(source.numel() * source.element_size())
            found.append(room.view(source.dtype).view(source.shape))
            pairs.setdefault(source.device, []).append((source, found[-1]))
        for device, of_device in pairs.items():
            if device not in self._streams:
                self._streams[device] = self._gpu.new_stream(device)
            stream = self._streams[device]
            stream.wait_stream(self._gpu.current_stream(device))
            self._gpu.copy(of_device, stream)
        return found

    def _here(self, tensor: Tensor) -> Tensor:
        here = tensor.detach().cpu().contiguous()
        is_same = here.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        return here.clone() if self.copied and is_same else here

    def hold(self) -> None:
        """Let what each GPU is asked to compute from now on wait until all is copied."""
        for device, stream in self._streams.items():
            self._gpu.current_stream(device).wait_stream(stream)

    def wait(self) -> None:
        """Return when all is copied; in any thread."""
        for stream in self._streams.values():
            stream.synchronize()

    def close(self) -> None:
        """Give the memory back; nobody reads what was taken any more."""
        self.wait()
        if self._blocks:
            self._blocks.clear()
            self._gpu.release()

    def _room(self, size: int) -> Tensor:
        """Return ``size`` bytes that no other tensor of this checkpoint has."""
        blocks, begin = self._blocks, self._used
        while self._block < len(blocks) and begin + size > len(blocks[self._block]):
            self._block, begin = self._block + 1, 0
        if self._block == len(blocks):
            blocks.append(self._new_block(size))
        self._used = begin + size + -size % _ALIGNED_TO
        return blocks[self._block][begin : begin + size]

    def _new_block(self, size: int) -> Tensor:
        """Return memory for a tensor of ``size`` bytes, and for others after it."""
        allocated = sum(map(len, self._blocks))
        least = max(size, min(max(allocated, _SMALLEST_BLOCK), _LARGEST_BLOCK))
        rounded = 1 << (least - 1).bit_length()  # as torch does, which would waste the rest
        if self._is_pinned:
            try:
                return self._gpu.pinned(rounded)
            except RuntimeError as error:
                self._is_pinned = False
                _logger.warning(
                    "checkpoints are copied into memory that is not page-locked, which takes "
                    "several times as long and holds the training up: %s",
                    str(error).strip().partition("\n")[0],
                )
        return torch.empty(rounded, dtype=torch.uint8, device="cpu")
