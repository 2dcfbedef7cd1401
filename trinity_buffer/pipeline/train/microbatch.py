"""Micro-batches: tensors by name for one forward and backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from trinity_buffer.algorithm.layout import BatchLayout
from trinity_buffer.errors import TrainingError


class Lazy:
    """A value that is made when it is first read.

    Args:
        make: makes the value; released afterwards.
    """

    __slots__ = ("_made", "_make")

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make: Callable[[], Any] | None = make
        self._made: list[Any] = []

    @property
    def value(self) -> Any:
        """The value."""
        make = self._make
        if make is not None:
            # Autograd cannot save tensors that were made in inference mode.
            with torch.inference_mode(False):  # noqa: FBT003 - torch.compile takes no keyword
                self._made.append(make())
            del self._made[1:]  # threads that race all get the first value
            self._make = None
        return self._made[0]


class LazyTensors(MutableMapping[str, Any]):
    """Tensors by name, some of which are made when they are first read.

    Args:
        held: tensors, lazy values and other values.
    """

    __slots__ = ("_held",)

    def __init__(self, held: Mapping[str, Any]) -> None:
        self._held = dict(held)

    @override
    def __getitem__(self, name: str) -> Any:
        value = self._held[name]
        if isinstance(value, Lazy):
            value = self._held[name] = value.value
        return value

    @override
    def __setitem__(self, name: str, value: Any) -> None:
        self._held[name] = value

    @override
    def __delitem__(self, name: str) -> None:
        del self._held[name]

    @override
    def __contains__(self, name: object) -> bool:
        return name in self._held  # without making it

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    @override
    def __len__(self) -> int:
        return len(self._held)

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
        multi_modal_inputs: one mapping per row, name -> tensor.
        policy_versions: one per row, None if unknown.
        unrecorded: ``usual`` or ``expert`` -> uid of a row of the step without log-probabilities,
            if other rows have them.
        unscorable: uid of a row of the step -> the sampling option that no trainer can score, such
            as ``top_p=0.9``.
        read_zeros: called when ``advantages`` are read that were never computed; None: they were.
    """

    tensors: MutableMapping[str, Any]
    layout: BatchLayout
    multi_modal_inputs: list[dict[str, Tensor]] = field(default_factory=list)
    policy_versions: list[int | None] = field(default_factory=list)
    unrecorded: Mapping[str, str] = field(default_factory=dict)
    unscorable: Mapping[str, str] = field(default_factory=dict)
    read_zeros: Callable[[], None] | None = None

    @override
    def __getitem__(self, key: str) -> Any:
        if self.read_zeros is not None and key == "advantages":
            self.read_zeros()
        return self.tensors[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.tensors[key] = value
        if key == "advantages":
            self.read_zeros = None

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
                temperature, or cannot be scored; see `require_scorable`.
        """
        self.require_scorable()
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
