"""What an optimizer keeps, taken apart for a checkpoint: tensors, plain numbers, groups."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from trinity_buffer.errors import CheckpointError
from trinity_buffer.trainer.policy import all_finite
from trinity_buffer.trainer.sharded import part_like

_logger = logging.getLogger(__name__)


class OptimizerState(NamedTuple):
    """The state of an optimizer.

    Attributes:
        tensors: by ``PARAMETER.NAME``, for safetensors.
        numbers: the rest of what it keeps of its parameters, by the same names, for JSON.
        groups: its parameter groups, for JSON.
    """

    tensors: Mapping[str, torch.Tensor]
    numbers: dict[str, float | None]
    groups: list[dict[str, Any]]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> OptimizerState:
        """Return the state of ``optimizer``.

        Raises:
            CheckpointError: it keeps what is neither a tensor nor a number.
        """
        found = optimizer.state_dict()
        name = type(optimizer).__name__
        tensors: dict[str, torch.Tensor] = {}
        numbers: dict[str, float | None] = {}
        for key, value in _entries(found["state"], name):
            if isinstance(value, torch.Tensor):
                tensors[key] = value.detach().contiguous()
            elif value is None or isinstance(value, int | float):
                numbers[key] = value
            else:
                raise _refusal(name, f"state {key!r}", value)
        for number, group in enumerate(found["param_groups"]):
            for key, value in group.items():
                _require_json(name, f"param_groups[{number}][{key!r}]", value)
        return cls(tensors, numbers, found["param_groups"])

    @property
    def is_finite(self) -> bool:
        """Whether no number of the state is NaN or infinite; one look at a device."""
        plain = all(value is None or math.isfinite(value) for value in self.numbers.values())
        return plain and all_finite([*self.tensors.values()])

    def restore(self, optimizer: torch.optim.Optimizer, *, takes_groups: bool = True) -> None:
        """Put the state into ``optimizer``; of weights that ranks hold in parts, this rank's.

        Args:
            takes_groups: its parameter groups take the saved settings, such as the learning rate;
                a warning names those that were others. False: they keep their own.

        Raises:
            CheckpointError: it is the state of another optimizer, or of other groups of weights.
        """
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        self._require_fitting(optimizer, weights)
        state: dict[int, dict[str, Any]] = {}
        for key, value in (*self.tensors.items(), *self.numbers.items()):
            number, _, name = key.partition(".")
            index = int(number)
            if isinstance(value, torch.Tensor) and value.shape == weights[index].shape:
                value = part_like(value, weights[index])
            state.setdefault(index, {})[name] = value
        own = optimizer.state_dict()["param_groups"]
        if takes_groups:
            self._say_what_differs(optimizer, own)
            groups = self.groups
        else:
            pairs = zip(own, self.groups, strict=True)
            groups = [{**group, "params": saved["params"]} for group, saved in pairs]
        optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _require_fitting(
        self, optimizer: torch.optim.Optimizer, weights: Sequence[torch.Tensor]
    ) -> None:
        own = optimizer.param_groups
        sizes = [[len(group["params"]) for group in groups] for groups in (self.groups, own)]
        if sizes[0] != sizes[1]:
            raise _other(optimizer, f"has groups of {sizes[0]} weights, not of {sizes[1]}")
        for saved, group in zip(self.groups, own, strict=True):
            gone, new = saved.keys() - group.keys(), group.keys() - saved.keys()
            if gone and new:  # either alone: another version of torch
                raise _other(optimizer, f"has {', '.join(sorted(gone))}: it is another optimizer")
        for key, value in self.tensors.items():
            weight = weights[int(key.partition(".")[0])]
            if value.dim() == weight.dim() and value.shape != weight.shape:
                shapes = f"{[*value.shape]}, its weight {[*weight.shape]}"
                raise _other(optimizer, f"has its weights in another order ({key} is {shapes})")

    def _say_what_differs(
        self, optimizer: torch.optim.Optimizer, own: Sequence[Mapping[str, Any]]
    ) -> None:
        """Name the settings of ``optimizer`` that those of the checkpoint replace."""
        differing = [
            f"param_groups[{number}][{name!r}] = {value!r} (not {mine!r})"
            for number, (saved, group) in enumerate(zip(self.groups, own, strict=False))
            for name, value in saved.items()
            if name in group and name != "params" and (mine := _as_saved(group[name])) != value
        ]
        if differing:
            _logger.warning(
                "the settings of the given %s are those of the checkpoint: %s; to change them, "
                "assign to optimizer.param_groups once the Trainer is made",
                type(optimizer).__name__,
                ", ".join(differing),
            )


def _as_saved(value: Any) -> Any:
    """Return ``value`` as JSON gives it back: a list for a tuple."""
    return json.loads(json.dumps(value, default=str))


def _entries(state: Mapping[Any, Any], optimizer: str) -> Iterator[tuple[str, Any]]:
    """Yield what is kept of each parameter, as ``PARAMETER.NAME`` and its value."""
    for index, entries in state.items():
        if not isinstance(index, int) or not isinstance(entries, Mapping):
            raise _refusal(optimizer, f"state {index!r}", entries)
        yield from ((f"{index}.{name}", value) for name, value in entries.items())


def _require_json(optimizer: str, place: str, value: Any) -> None:
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise _refusal(optimizer, place, value) from error


def _other(optimizer: torch.optim.Optimizer, what: str) -> CheckpointError:
    return CheckpointError(
        f"the optimizer of the checkpoint is not this {type(optimizer).__name__}: it {what}. Give "
        "the Trainer (optimizer=) the one that it was trained with, of the same groups of weights, "
        "or begin with a fresh one: let a trainer of another name (consumer=) load the weights"
    )


def _refusal(optimizer: str, place: str, value: Any) -> CheckpointError:
    return CheckpointError(
        f"no checkpoint was written: {optimizer} keeps a {type(value).__name__} as {place}; a "
        "checkpoint holds tensors and numbers of each parameter, and JSON of each group"
    )
