"""The fields of several experiences, column by column: what checks and encoding both look at."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from trinity_buffer.experience import FAMILIES, Experience
from trinity_buffer.pipeline.tensor_columns import GivenTensors, tensors_given
from trinity_buffer.sampling import SEGMENTS

_NAMES = (
    *("eid", "experience_type", "prompt_length", "reward"),
    *(field for fields in FAMILIES.values() for field in fields),
)
_every = attrgetter(*_NAMES)
_address = attrgetter("batch", "task", "run", "step", "suffix")


class Fields:
    """Columns of ``experiences``, each attribute of which is looked up once.

    Raises:
        AttributeError: a field of one of them was not loaded.
    """

    def __init__(self, experiences: Sequence[Experience]) -> None:
        self.experiences = experiences
        columns = zip(*map(_every, experiences), strict=True) if experiences else [()] * len(_NAMES)
        self._of: dict[str, tuple[Any, ...]] = dict(zip(_NAMES, columns, strict=True))
        self._kinds: dict[str, frozenset[type]] = {}
        self._tensors: dict[str, GivenTensors] = {}
        self._addresses: tuple[tuple[Any, ...], ...] | None = None
        self._said: dict[str, list[Any]] = {}

    def __len__(self) -> int:
        return len(self.experiences)

    def __getitem__(self, name: str) -> tuple[Any, ...]:
        return self._of[name]

    def kinds(self, name: str) -> frozenset[type]:
        """Return the types of one field."""
        if name not in self._kinds:
            self._kinds[name] = frozenset(map(type, self._of[name]))
        return self._kinds[name]

    def tensors(self, name: str) -> GivenTensors:
        """Return the tensors of a field that holds nothing else but None."""
        if name not in self._tensors:
            self._tensors[name] = tensors_given(self._of[name])
        return self._tensors[name]

    @property
    def addresses(self) -> tuple[tuple[Any, ...], ...]:
        """Batches, tasks, runs, steps and suffixes of the EIDs."""
        if self._addresses is None:
            columns = zip(*map(_address, self._of["eid"]), strict=True)
            self._addresses = tuple(columns) if self.experiences else ((),) * 5
        return self._addresses

    @property
    def versions(self) -> list[Any]:
        """What each ``info`` says of the policy version, as it stands there."""
        return self._in_info("model_version")

    @property
    def reasons(self) -> list[Any]:
        """Why each generation ended, as ``info`` says it, else ``truncate_status``."""
        if "reasons" not in self._said:
            pairs = zip(self._in_info("finish_reason"), self._of["truncate_status"], strict=True)
            self._said["reasons"] = [said or status for said, status in pairs]
        return self._said["reasons"]

    @property
    def segments(self) -> list[Any]:
        """What each ``info`` says of how it was sampled, see `trinity_buffer.sampling`."""
        return self._in_info(SEGMENTS)

    def _in_info(self, key: str) -> list[Any]:
        if key not in self._said:
            self._said[key] = [info.get(key) for info in self._of["info"]]
        return self._said[key]
