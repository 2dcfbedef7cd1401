"""One view of a trainer's batch, whatever its names and layout, and the way back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from trinity_buffer.algorithm.functional import mask_of_rows
from trinity_buffer.algorithm.group_scores import Over
from trinity_buffer.errors import InvalidArgumentError

VERL_NAMES = {
    "action_mask": "response_mask",
    "old_logprob": "old_log_probs",
    "rollout_logprob": "rollout_log_probs",
    "ref_logprob": "ref_log_prob",
    "teacher_logprob": "teacher_logprobs",
    "entropy": "entropys",
    "group_index": "uid",
}
"""Our name of a column -> verl's, where they differ."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a trainer-side advantage function found; tensors are padded ``[B, T]``.

    Attributes:
        advantages: 0 at masked tokens, unless the reference is reproduced.
        returns: what a critic is to predict.
        metrics: numbers to log, 0-d tensors or floats.
        action_mask: the mask that replaces the batch's, or None.
    """

    advantages: Tensor
    returns: Tensor
    metrics: dict[str, Any] = field(default_factory=dict)
    action_mask: Tensor | None = None


class Rows:
    """What an advantage function sees of a batch: padded columns, groups, and the sum over ranks.

    Args:
        batch: under verl's names or ours, padded or packed, or verl's ``DataProto``.
        reduce: sums a tensor over data-parallel ranks.

    Attributes:
        mask: the action tokens of the policy itself, without those of an expert's rows.
    """

    def __init__(self, batch: Any, reduce: Callable[[Tensor], Tensor] | None = None) -> None:
        self._batch = as_mapping(batch)
        self._reduce = reduce
        self._verl = "response_mask" in self._batch
        boundaries = self._batch.get("cu_seqlens")
        self._lengths: list[int] | None = None if boundaries is None else boundaries.diff().tolist()
        self.mask = self.raw("action_mask") != 0
        expert = self._batch.get("expert_mask")
        if expert is not None:  # the policy did not say these tokens
            by_token = len(expert) != len(self.mask)  # packed
            expert = self.raw("expert_mask") != 0 if by_token else expert
            self.mask &= ~mask_of_rows(expert, self.mask)

    def __getitem__(self, name: str) -> Tensor:
        """Return the per-token column ``name``, shape ``(B, T)``, 0 where the mask is."""
        return self.raw(name).where(self.mask, 0.0)

    def raw(self, name: str) -> Tensor:
        """Return the per-token column ``name``, shape ``(B, T)``, in at least float32."""
        column: Tensor = self.column(name)
        # Values of a critic may have 16 bits, and rewards be whole numbers; results have not.
        column = column.to(torch.promote_types(column.dtype, torch.float32))
        if self._lengths is None:
            return column
        # pad_sequence refuses an empty list, and a rank may have no rows in a step.
        if not self._lengths:
            return column.new_zeros(0, 1)
        return torch.nn.utils.rnn.pad_sequence(list(column.split(self._lengths)), batch_first=True)

    def column(self, name: str) -> Any:
        """Return the column ``name`` as it stands in the batch.

        Raises:
            InvalidArgumentError: the batch lacks it; the message says what it holds.
        """
        key = self._named(name)
        if key not in self._batch:
            held = ", ".join(sorted(self._batch))
            raise InvalidArgumentError(
                f"the batch has no {key!r}, which these advantages need (it holds {held})"
            )
        return self._batch[key]

    def store(self, result: Result) -> None:
        """Put ``result`` into the batch, in the batch's own layout."""
        columns = {"advantages": result.advantages, "returns": result.returns}
        if result.action_mask is not None:
            columns["action_mask"] = result.action_mask
        for name, value in columns.items():
            if self._lengths is not None:
                pairs = zip(value, self._lengths, strict=True)
                parts = [row[:length] for row, length in pairs]
                value = torch.cat(parts) if parts else value.flatten()
            self._batch[self._named(name)] = value

    def _named(self, name: str) -> str:
        return VERL_NAMES.get(name, name) if self._verl else name

    def scores(self) -> Tensor:
        """Return the sum of all token-level rewards of each row, float64, shape ``(B,)``."""
        # All tokens, not the action tokens: an environment may pay on a token of its own.
        return self.raw("token_level_rewards").to(torch.float64).sum(-1)

    def groups(self) -> list[list[int]]:
        """Return the row numbers of each group, in order of first appearance."""
        column = self.column("group_index")
        names = column.tolist() if isinstance(column, Tensor) else list(column)
        rows_of: dict[Any, list[int]] = {}
        for row, name in enumerate(names):
            rows_of.setdefault(name, []).append(row)
        return list(rows_of.values())

    def runs(self) -> list[int] | None:
        """Return the run of each row, where the batch says it."""
        column = self._batch.get("run_index")
        return None if column is None else [int(run) for run in column.tolist()]

    def weights(self, over: Over) -> Tensor | None:
        """Return 1 divided by the number of rows of its run for each row, ``(B, 1)``.

        None where each row is a run, or counts for one.
        """
        names = self.runs() if over == "runs" else None
        if names is None or len(set(names)) == len(names):
            return None
        counts = Counter(names)
        weights = torch.tensor([1.0 / counts[name] for name in names], dtype=torch.float64)
        return weights.unsqueeze(-1).to(self.mask.device)

    def total(self, value: Tensor) -> Tensor:
        """Return ``value`` summed over the data-parallel ranks."""
        return value if self._reduce is None else self._reduce(value)

    def moments(
        self,
        values: Tensor,
        mask: Tensor | None = None,
        *,
        ddof: int = 0,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return count, mean and variance of ``values`` under ``mask``, over all ranks, 0-d.

        The variance is 0 where there are not more than ``ddof`` values. Each row counts by its
        weight ``(B, 1)``, if there are some.
        """
        chosen = self.mask if mask is None else mask
        # float64: a variance is a small difference of large sums.
        masked = values.to(torch.float64).where(chosen, 0.0)
        if weights is None:
            weights = masked.new_ones(())
        count = self.total((chosen * weights).sum())
        # Two passes, two exchanges: the one-pass formula loses the digits of a small variance.
        mean = self.total((masked * weights).sum()) / count.clamp(min=1.0)
        apart = (masked - mean).square().where(chosen, 0.0)
        squares = self.total((apart * weights).sum())
        return count, mean, (squares / (count - ddof).clamp(min=1.0)).where(count > ddof, 0.0)


class ProtoBatch(MutableMapping[str, Any]):
    """A view of a ``DataProto`` of verl: its tensors, then its other columns."""

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
    mapping: MutableMapping[str, Any] = ProtoBatch(batch) if proto else batch
    return mapping
