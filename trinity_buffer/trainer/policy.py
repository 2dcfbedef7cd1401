"""What a trainer asks of its models; nothing here knows how they are made."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether no number of ``tensors`` is NaN or infinite, with one look at each device.

    Of a tensor that ranks hold in parts, this rank's part is looked at.
    """
    # An optimizer keeps its count of steps on the processor, and the rest beside the weights.
    held: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        values: Tensor = getattr(tensor, "to_local", tensor.detach)().detach()
        if values.is_complex():
            values = torch.view_as_real(values)  # of a finite one the absolute value may overflow
        if not values.numel() or not values.is_floating_point():
            continue
        if values.element_size() == 1:
            values = values.float()  # torch computes no norm of numbers of 8 bits
        held.setdefault(values.device, []).append(values)
    # The largest number is NaN if one is. A few kernels for all tensors, where a check of each
    # would take a thousand, and hold a GPU up for as long as a small step.
    largest = [torch.nn.utils.get_total_norm(own, math.inf) for own in held.values()]
    return all(math.isfinite(number) for number in map(float, largest))


@contextmanager
def in_eval_mode(*models: Any) -> Iterator[None]:
    """Compute without dropout inside the context; afterwards each module has its own mode again.

    Args:
        models: modules, objects with a method ``modules()``, or objects that hold modules as their
            attributes; None is passed over.
    """
    modules = {module for model in models for module in _modules_of(model) if module.training}
    try:
        for module in modules:
            module.training = False  # not eval(), which a module may override to do more
        yield
    finally:
        for module in modules:
            module.training = True


def _modules_of(model: Any) -> Iterator[nn.Module]:
    find = getattr(model, "modules", None)
    if find is not None:
        yield from find()
        return
    for held in getattr(model, "__dict__", {}).values():
        if isinstance(held, nn.Module):
            yield from held.modules()


class TokenScores(NamedTuple):
    """What a policy says of given tokens, aligned with them; float32, the shape of ``input_ids``.

    Attributes:
        logprob: element t is that of token t, from the logits at t - 1; 0 at the first token.
        entropy: of the distribution that token t was drawn from, in nats; 0 at the first token.
    """

    logprob: Tensor
    entropy: Tensor


class Trainable(Protocol):
    """A model with weights that a checkpoint keeps."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the weights."""

    def save(self, path: str | Path) -> None:
        """Write the weights to ``path``: a file, or a new folder."""

    def restore(self, path: str | Path) -> None:
        """Take the weights that `save` wrote to ``path``.

        Raises:
            CheckpointError: there is no such file, or of another model, or it is not finite.
        """


class Critic(Trainable, Protocol):
    """A model that predicts returns."""

    def values(
        self, input_ids: Tensor, *, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None
    ) -> Tensor:
        """Return the value of the state in which each token was said, the shape of ``input_ids``.

        As a log-probability, that of token t comes from what precedes it; the first token of a
        sequence has none, its value is 0.

        Args:
            input_ids: ``[B, T]`` right-padded, or ``[T_total]`` with ``cu_seqlens``.
            cu_seqlens: ``[N + 1]`` boundaries of packed sequences.
            max_seqlen: length of the longest of them.
        """


class Policy(Trainable, Protocol):
    """The model that is trained, or one that it is compared with.

    An attribute ``takes`` names what its `scores` reads that few rows bring: ``"temperature"``,
    ``"multi_modal_inputs"``. Rows that bring more than it takes are refused.
    """

    @property
    def file_name(self) -> str:
        """What `save` writes is called so in a checkpoint."""

    def scores(self, microbatch: Mapping[str, Any]) -> TokenScores:
        """Return log-probability and entropy of every token of a micro-batch.

        Args:
            microbatch: see `token_scores`; both results are 0 at padding and at the first token of
                a sequence.
        """


AnyPolicy = TypeVar("AnyPolicy", bound=Policy)
