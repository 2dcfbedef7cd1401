"""The processes of a data-parallel trainer, one per rank, and what they tell and write together.

Of a model that ranks hold in parts (FSDP2), each rank writes a share of the tensors, whole, as
transformers writes a large model: files ``model-00001-of-00002.safetensors`` and an index that
names the file of each tensor. So any other number of ranks reads them, one process and an inference
server too, and no rank holds more than one whole tensor beside its share.

What is written is first copied into the processor's memory, beside what a GPU computes. A copy from
a GPU runs on a stream of its own and into page-locked memory. This thread does not wait for it;
what the GPU computes next does, since it may change what is copied.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from trinity_buffer.codec.objects import ObjectPacker, unpack_object
from trinity_buffer.errors import LeaseLostError
from trinity_buffer.pipeline.encoding import raw_tensor, tensor_of
from trinity_buffer.trainer.policy import Trainable

T = TypeVar("T")


def unwrapped(model: Any) -> Any:
    """Return the model inside a `DistributedDataParallel` and `torch.compile`, else itself."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    inner = getattr(inner, "_orig_mod", inner)
    return inner if inner is model else unwrapped(inner)


def is_sharded(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a `DTensor`, of which this rank holds a part."""
    return hasattr(tensor, "full_tensor")


def resharded(model: Any) -> None:
    """Let each rank hold its part alone of a model that FSDP2 shards.

    After a forward pass without a backward one it holds the whole weights of the outermost module.
    """
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()


def whole(weight: Tensor) -> Tensor:
    """Return all of a weight that ranks may hold parts of; its gradient is averaged over them.

    Every rank must call it, and go backward through it.
    """
    if not is_sharded(weight):
        return weight
    mesh: Any = weight.device_mesh  # type: ignore[attr-defined]  # of a DTensor
    partial = import_module("torch.distributed.tensor").Partial()
    weights: Tensor = weight.full_tensor(grad_placements=[partial] * mesh.ndim)  # type: ignore[attr-defined]  # as above
    if weights.requires_grad:
        weights.register_hook(lambda gradient: gradient / mesh.size())
    return weights


class Processes:
    """The ranks of a trainer, as it asks for them: here, a trainer on its own.

    Attributes:
        rank: this process, from 0.
        world_size: how many there are.
    """

    rank: int = 0
    world_size: int = 1

    def sum(self, value: Tensor) -> Tensor:
        """Return ``value`` summed over all ranks; every rank must call it, in the same order."""
        return value

    def gather(self, value: T) -> list[T]:
        """Return ``value`` of each rank; every rank must call it, in the same order."""
        return [value]

    def average_gradients(self, model: Trainable, weights: Sequence[Tensor]) -> None:
        """Replace the gradients of ``weights``, which are ``model``'s, by their mean over ranks."""


def processes_here() -> Processes:
    """Return the ranks of the process group, where there is one, else this process alone."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return TorchProcesses()
    return Processes()


@contextmanager
def _all_ranks_there() -> Iterator[None]:
    """Say it in our words if an exchange inside the context fails."""
    try:
        yield
    except RuntimeError as error:  # all that torch.distributed raises of the kind
        raise LeaseLostError(
            f"rank {torch.distributed.get_rank()} could not exchange numbers with the others, one "
            f"of which is gone or hangs ({str(error).strip():.200}): start all ranks again; they "
            "resume from the last commit"
        ) from error


class TorchProcesses(Processes):
    """A process group of `torch.distributed`, initialised by the program that starts the ranks.

    Args:
        group: None: the default one.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.rank = torch.distributed.get_rank()
        self.world_size = torch.distributed.get_world_size()

    @override
    def sum(self, value: Tensor) -> Tensor:
        """Return ``value`` summed over all ranks."""
        total = self._movable(value.clone())
        with _all_ranks_there():
            torch.distributed.all_reduce(total, group=self._group)
        return total.to(value.device)

    @override
    def gather(self, value: T) -> list[T]:
        """Return ``value`` of each rank, of any type that a field of an experience may hold."""
        # Not as torch.distributed sends objects: it pickles them.
        packed = bytearray(ObjectPacker(raw_tensor).pack(value, "what ranks exchange"))
        own = torch.frombuffer(packed, dtype=torch.uint8)
        # Collectives need one shape: lengths first, then bytes padded to the longest.
        lengths = [int(size) for size in self._gathered(torch.tensor([len(own)]))]
        padded = self._gathered(pad(own, (0, max(lengths) - len(own))))
        pairs = zip(padded, lengths, strict=True)
        return [unpack_object(sent[:size].numpy().tobytes(), tensor_of) for sent, size in pairs]

    def _gathered(self, own: Tensor) -> list[Tensor]:
        own = self._movable(own)
        gathered = [torch.empty_like(own) for _ in range(self.world_size)]
        with _all_ranks_there():
            torch.distributed.all_gather(gathered, own, group=self._group)
        return [of_rank.cpu() for of_rank in gathered]

    def _movable(self, value: Tensor) -> Tensor:
        """Return ``value`` where the group can exchange it: NCCL moves tensors of GPUs alone."""
        is_nccl = torch.distributed.get_backend(self._group) == "nccl"
        return value.cuda() if is_nccl else value

    @override
    def average_gradients(self, model: Trainable, weights: Sequence[Tensor]) -> None:
        """Replace the gradients of ``weights`` by their mean over all ranks.

        Of a model that averages them itself (DDP, FSDP2) they stay as they are.
        """
        wrapped = isinstance(getattr(model, "model", model), DistributedDataParallel)
        if wrapped or any(map(is_sharded, model.parameters())):
            return
        weights = [weight for weight in weights if weight.requires_grad]
        # A rank whose rows reach no weight still takes part: its gradient is 0.
        own = [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]
        # Apart from the gradients: with another length, their sums would have other last bits.
        reached = self.sum(own[0].new_tensor([w.grad is not None for w in weights]))
        joined = self.sum(torch.cat([gradient.flatten() for gradient in own])) / self.world_size
        means = joined.split([w.numel() for w in weights])
        for place, (weight, mean) in enumerate(zip(weights, means, strict=True)):
            # What no rank's rows reach has none: an optimizer would let it decay.
            if weight.grad is not None or reached[place] > 0:
                weight.grad = mean.view_as(weight).to(weight.dtype)


_logger = logging.getLogger(__name__)

_ALIGNED_TO = 64
SMALLEST_BLOCK = 64 << 20
LARGEST_BLOCK = 1 << 30


class Gpus:
    """What the copies ask of torch about the GPUs of this machine; a test has others."""

    def holds(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is on a GPU."""
        return tensor.is_cuda

    def pinned(self, size: int) -> Tensor:
        """Return ``size`` bytes of page-locked memory.

        Raises:
            RuntimeError: there is no more of it.
        """
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def release(self) -> None:
        """Give page-locked memory that is not used any more back to the system."""
        # Older versions of torch have no such function, and keep it for the next to ask.
        getattr(torch.accelerator, "empty_host_cache", lambda: None)()

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

    def __init__(self, *, copied: bool, gpu: Gpus | None = None) -> None:
        self.copied = copied
        self._gpu = Gpus() if gpu is None else gpu
        self._streams: dict[torch.device, Any] = {}
        self._blocks: list[Tensor] = []
        self._block = self._used = 0
        self._is_pinned = True

    def begin(self) -> None:
        """Begin a checkpoint; what was taken for the one before is not read any more."""
        self._block = self._used = 0

    def take(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return copies of ``tensors`` in the processor's memory; read them after `wait`.

        Between now and `hold` nothing may change a tensor where it lies. It may be forgotten.
        """
        taken: list[Tensor] = []
        pairs: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        for tensor in tensors:
            if not self._gpu.holds(tensor):
                here = tensor.detach().cpu().contiguous()
                is_same = here.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
                taken.append(here.clone() if self.copied and is_same else here)
                continue
            source = tensor.detach().contiguous()
            room = self._room(source.numel() * source.element_size())
            taken.append(room.view(source.dtype).view(source.shape))
            pairs.setdefault(source.device, []).append((source, taken[-1]))
        for device, of_device in pairs.items():
            if device not in self._streams:
                self._streams[device] = self._gpu.new_stream(device)
            stream = self._streams[device]
            stream.wait_stream(self._gpu.current_stream(device))
            self._gpu.copy(of_device, stream)
        return taken

    def hold(self) -> None:
        """Let what each GPU is asked to compute from now on wait until all is copied."""
        for device, stream in self._streams.items():
            self._gpu.current_stream(device).wait_stream(stream)

    def wait(self) -> None:
        """Return when all is copied; in any thread."""
        for stream in self._streams.values():
            stream.synchronize()

    def close(self) -> None:
        """Release the memory; what was taken is not read any more."""
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
        least = max(size, min(max(allocated, SMALLEST_BLOCK), LARGEST_BLOCK))
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


Named = Mapping[str, Tensor]
"""Tensors by their names."""

INDEX = "{stem}.safetensors.index.json"
FILE_BYTES = 1 << 30
MOST_FILES = 8
"""Of a rank, and of one kind."""


def files_of(tensors: Named, ranks: int) -> int:
    """Return into how many files ``ranks`` write ``tensors``, each rank as many.

    A file is written by one thread, and several are written faster than one.

    Args:
        tensors: name -> a tensor, whose shape is that of the whole.
        ranks: their number.
    """
    of_a_rank = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) // ranks
    return ranks * min(MOST_FILES, 1 + of_a_rank // FILE_BYTES)


def owners_of(tensors: Named, files: int) -> dict[str, int]:
    """Return for each name the file it is in: files of about one size, on every rank alike.

    Args:
        tensors: name -> a tensor, whose shape is that of the whole.
        files: their number.
    """
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    loads, owners = [0] * files, {}
    # The largest first, each to the file with the least: all ranks compute the same shares.
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        file = loads.index(min(loads))
        loads[file] += sizes[name]
        owners[name] = file
    return owners


def whole_tensors(tensors: Named, names: Sequence[str], copies: HostCopies) -> dict[str, Tensor]:
    """Return those of ``tensors`` that ``names`` lists, whole, as ``copies`` takes them.

    Every rank must call it with the same names; they are gathered one after the other.

    Args:
        tensors: name -> a tensor, or this rank's part of it.
        names: some of them.
        copies: in the processor's memory.
    """
    gathered, wanted = {}, frozenset(names)
    for name, tensor in tensors.items():
        if not is_sharded(tensor):
            continue
        full: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]  # of a DTensor
        if name in wanted:
            (gathered[name],) = copies.take([full])
            copies.wait()  # then the memory of this one is there for the next
    whole = {name: tensors[name] for name in names if name not in gathered}
    return gathered | dict(zip(whole, copies.take([*whole.values()]), strict=True))


def part_like(whole: Tensor, held: Tensor) -> Tensor:
    """Return this rank's part of ``whole``, laid out as ``held``, without communication."""
    if not is_sharded(held):
        return whole
    distribute: Any = torch.distributed.tensor.distribute_tensor
    mesh, placements = held.device_mesh, held.placements  # type: ignore[attr-defined]  # of a DTensor
    part: Tensor = distribute(whole.to(held.device), mesh, placements, src_data_rank=None)
    return part


def write_share(
    folder: Path, stem: str, tensors: Named, owners: Mapping[str, int], number: int, count: int
) -> list[Path]:
    """Write one of ``count`` files of ``tensors``; with the first, the index too.

    Args:
        tensors: whole, those of this file among them.
        owners: name -> number of the file it is in.

    Returns:
        the files that were written.
    """
    file = folder / _file_of(stem, number, count)
    own = {name: tensor for name, tensor in tensors.items() if owners[name] == number}
    save_file(own, file, metadata={"format": "pt"})
    if number or count == 1:
        return [file]
    places = {name: _file_of(stem, owner, count) for name, owner in owners.items()}
    index = folder / INDEX.format(stem=stem)
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}, indent=1, sort_keys=True))
    return [file, index]


def _file_of(stem: str, number: int, count: int) -> str:
    if count == 1:
        return f"{stem}.safetensors"
    return f"{stem}-{number + 1:05d}-of-{count:05d}.safetensors"


class Tensors(Mapping[str, Tensor]):
    """The tensors of a file, or of those that an index names, each read when it is asked for."""

    def __init__(self, handles: Mapping[str, Any]) -> None:
        self._handles = handles

    def without(self, prefix: str) -> Tensors:
        """Return those whose names do not begin so."""
        return Tensors({n: h for n, h in self._handles.items() if not n.startswith(prefix)})

    @override
    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._handles[name].get_tensor(name)
        return tensor

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._handles)

    @override
    def __len__(self) -> int:
        return len(self._handles)


@contextmanager
def opened_files(files: Iterable[Path]) -> Iterator[Tensors]:
    """Open the tensors of several files.

    Raises:
        OSError, SafetensorError: a file is missing or broken.
    """
    with ExitStack() as stack:
        handles = [stack.enter_context(safe_open(file, "pt")) for file in files]
        yield Tensors({name: file for file in handles for name in file.keys()})  # noqa: SIM118 - no dict


@contextmanager
def opened(folder: Path, stem: str) -> Iterator[Tensors]:
    """Open the tensors of ``stem``, however many ranks wrote them.

    Raises:
        OSError, SafetensorError: a file is missing or broken.
        ValueError, KeyError: the index is broken.
    """
    index, names = folder / INDEX.format(stem=stem), {f"{stem}.safetensors"}
    if index.exists():
        names = set(json.loads(index.read_text())["weight_map"].values())
    with opened_files(folder / name for name in sorted(names)) as tensors:
        yield tensors
