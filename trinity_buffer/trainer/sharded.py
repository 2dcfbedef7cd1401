"""Files of a model that ranks hold in parts (FSDP2): whole tensors, written by all, read by any.

Each rank writes a share of the tensors, whole, as transformers writes a large model: files
``model-00001-of-00002.safetensors`` and an index that names the file of each tensor. So any other
number of ranks reads them, one process and an inference server too, and nobody holds more than one
whole tensor beside its share.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from typing_extensions import override

from trinity_buffer.trainer.host_copies import HostCopies
from trinity_buffer.trainer.parallel import is_sharded

INDEX = "{stem}.safetensors.index.json"


def owners_of(tensors: Mapping[str, Tensor], count: int) -> dict[str, int]:
    """Return for each name the rank that writes it: shares of about one size, on every rank alike.

    Args:
        tensors: name -> a tensor, whose shape is that of the whole.
        count: of the ranks.
    """
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    loads, found = [0] * count, {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = loads.index(min(loads))
        loads[rank] += sizes[name]
        found[name] = rank
    return found


def whole_tensors(
    tensors: Mapping[str, Tensor], kept: Sequence[str], copies: HostCopies
) -> dict[str, Tensor]:
    """Return those of ``tensors`` that are ``kept``, whole, as ``copies`` takes them.

    Every rank must call it with the same names; they are gathered one after the other.

    Args:
        tensors: name -> a tensor, or this rank's part of it.
        kept: some of the names.
        copies: in the processor's memory.
    """
    found, wanted = {}, frozenset(kept)
    for name, tensor in tensors.items():
        if not is_sharded(tensor):
            continue
        full: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]  # of a DTensor
        if name in wanted:
            (found[name],) = copies.take([full])
            copies.wait()  # then the memory of this one is there for the next
    whole = {name: tensors[name] for name in kept if name not in found}
    return found | dict(zip(whole, copies.take([*whole.values()]), strict=True))


def part_like(whole: Tensor, held: Tensor) -> Tensor:
    """Return what this rank holds of ``whole``, laid out as ``held``; nobody is asked."""
    if not is_sharded(held):
        return whole
    distribute: Any = torch.distributed.tensor.distribute_tensor
    mesh, placements = held.device_mesh, held.placements  # type: ignore[attr-defined]  # of a DTensor
    found: Tensor = distribute(whole.to(held.device), mesh, placements, src_data_rank=None)
    return found


def write_share(
    folder: Path,
    stem: str,
    tensors: Mapping[str, Tensor],
    owners: Mapping[str, int],
    rank: int,
    count: int,
) -> list[Path]:
    """Write the tensors of ``rank``, whole as they are given; rank 0 writes the index too.

    Returns:
        the files that this rank wrote.
    """
    file = folder / _file_of(stem, rank, count)
    save_file(dict(tensors), file, metadata={"format": "pt"})
    if rank or count == 1:
        return [file]
    places = {name: _file_of(stem, owner, count) for name, owner in owners.items()}
    index = folder / INDEX.format(stem=stem)
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}, indent=1, sort_keys=True))
    return [file, index]


def _file_of(stem: str, rank: int, count: int) -> str:
    if count == 1:
        return f"{stem}.safetensors"
    return f"{stem}-{rank + 1:05d}-of-{count:05d}.safetensors"


class Tensors(Mapping[str, Tensor]):
    """The tensors of a file, or of those that an index names, each read when it is asked for."""

    def __init__(self, handles: Mapping[str, Any]) -> None:
        self._handles = handles

    def without(self, prefix: str) -> Tensors:
        """Return those whose names do not begin so."""
        return Tensors({n: one for n, one in self._handles.items() if not n.startswith(prefix)})

    @override
    def __getitem__(self, name: str) -> Tensor:
        found: Tensor = self._handles[name].get_tensor(name)
        return found

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._handles)

    @override
    def __len__(self) -> int:
        return len(self._handles)


@contextmanager
def opened(folder: Path, stem: str) -> Iterator[Tensors]:
    """Open the tensors of ``stem``, however many ranks wrote them.

    Raises:
        OSError, SafetensorError: a file is missing, or is none.
        ValueError, KeyError: the index is none.
    """
    index = folder / INDEX.format(stem=stem)
    single = f"{stem}.safetensors"
    with ExitStack() as stack:

        def open_file(name: str) -> Any:
            return stack.enter_context(safe_open(folder / name, "pt"))

        if not index.exists():
            handle = open_file(single)
            yield Tensors(dict.fromkeys(handle.keys(), handle))
            return
        places: dict[str, str] = json.loads(index.read_text())["weight_map"]
        handles = {file: open_file(file) for file in sorted(set(places.values()))}
        yield Tensors({name: handles[file] for name, file in places.items()})
