"""Trinity's ``algorithm.key_mapper``: tensors in the words of a training framework."""

from __future__ import annotations

from collections.abc import Mapping

from trinity_buffer.algorithm.policy_loss_fn.policy_loss_fn import BACKEND_NAMES

__all__ = ["ALL_MAPPERS", "KeyMapper"]


class KeyMapper:
    """Names of tensors, there and back; an unknown name stays as it is.

    Args:
        to_trinity_map: the framework's name -> ours.
    """

    def __init__(self, to_trinity_map: Mapping[str, str]) -> None:
        self.to_trinity_map = dict(to_trinity_map)
        self.from_trinity_map = {ours: theirs for theirs, ours in to_trinity_map.items()}

    def to_trinity(self, key: str) -> str:
        """Return our name of a tensor."""
        return self.to_trinity_map.get(key, key)

    def from_trinity(self, key: str) -> str:
        """Return the framework's name of a tensor."""
        return self.from_trinity_map.get(key, key)


ALL_MAPPERS = {
    backend: KeyMapper({theirs: ours for ours, theirs in names.items()})
    for backend, names in BACKEND_NAMES.items()
}
