"""Batches of other trainers as mappings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor
from typing_extensions import override


class ProtoBatch(MutableMapping[str, Any]):
    """A view of a ``DataProto`` of verl: its tensors, and behind them what is none."""

    def __init__(self, proto: Any) -> None:
        self._parts = (proto.batch, proto.non_tensor_batch)

    @override
    def __getitem__(self, key: str) -> Any:
        for part in self._parts:
            if key in part.keys():  # noqa: SIM118 - a TensorDict knows no `in`
                return part[key]
        raise KeyError(key)

    @override
    def __setitem__(self, key: str, value: Any) -> None:
        self._parts[0 if isinstance(value, Tensor) else 1][key] = value

    @override
    def __delitem__(self, key: str) -> None:
        for part in self._parts:
            if key in part.keys():  # noqa: SIM118 - likewise
                del part[key]

    @override
    def __iter__(self) -> Iterator[str]:
        for part in self._parts:
            yield from part.keys()

    @override
    def __len__(self) -> int:
        return sum(len(part.keys()) for part in self._parts)


def as_mapping(batch: Any) -> MutableMapping[str, Any]:
    """Return ``batch`` as a mapping: itself, or a view of a ``DataProto`` that changes it."""
    proto = not isinstance(batch, Mapping) and hasattr(batch, "non_tensor_batch")
    found: MutableMapping[str, Any] = ProtoBatch(batch) if proto else batch
    return found
