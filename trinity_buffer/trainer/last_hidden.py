"""The last hidden states of a causal language model, and the head that makes logits of them.

Nothing here imports transformers: whoever has such a model has imported it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from typing_extensions import override

from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.trainer.parallel import unwrapped, whole
from trinity_buffer.trainer.trying_out import OutputHead, hidden_and_logits, require_known

__all__ = ["HiddenModel", "OutputHead", "last_hidden"]


@runtime_checkable
class HiddenModel(Protocol):
    """A model that says its hidden states itself."""

    def last_hidden(self, microbatch: Mapping[str, Any]) -> tuple[Tensor, OutputHead]:
        """Return the last hidden states, the shape of ``input_ids`` and ``[D]``, and the head."""
        ...


def last_hidden(model: Any, microbatch: Mapping[str, Any]) -> tuple[Tensor, OutputHead]:
    """Return the last hidden states of a micro-batch, and the head; see `HiddenModel`.

    A model of transformers is tried out first, once in each layout (`require_known`).

    Raises:
        InvalidArgumentError: not a causal language model with a linear output head; its rows would
            change each other; or it was compiled, and used, before it was scored.
    """
    if isinstance(model, HiddenModel):
        return model.last_hidden(microbatch)
    if any(getattr(microbatch, "multi_modal_inputs", ())):
        raise InvalidArgumentError(
            f"rows have multi_modal_inputs, such as pixels, and {type(unwrapped(model)).__name__} "
            "is given token ids alone: leave such rows out, or give it a method `last_hidden` that "
            "reads them"
        )
    layer, head = _head_of(unwrapped(model))
    require_known(model, layer, head, microbatch)
    hidden, logits = hidden_and_logits(model, layer, microbatch, lambda states: states[:, :1])
    if hasattr(unwrapped(model), "reshard"):  # FSDP2 begins to go backward at what a model says
        hidden = _Beside.apply(hidden, logits)  # type: ignore[no-untyped-call]  # of torch
    return hidden.view(*microbatch["input_ids"].shape, -1), head


class _Beside(torch.autograd.Function):
    """Hidden states as they are; the backward pass goes through the logits too, with zeros."""

    @staticmethod
    @override
    def forward(ctx: Any, hidden: Tensor, logits: Tensor) -> Tensor:
        ctx.logits = (logits.shape, logits.dtype, logits.device)
        return hidden.view_as(hidden)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype, device = ctx.logits
        return gradient, torch.zeros(shape, dtype=dtype, device=device)


def _head_of(model: Any) -> tuple[nn.Linear, OutputHead]:
    """Return the output layer, and what is known of it."""
    find = getattr(model, "get_output_embeddings", None)
    layer = None if find is None else find()
    # A subclass, such as an adapter's, computes something else.
    if type(layer) is not nn.Linear:
        raise InvalidArgumentError(
            f"{type(model).__name__} has no plain linear output head, but "
            f"{type(layer).__name__}: give a causal language model of transformers (leave its "
            "output head out of an adapter's modules), or a model that has `last_hidden`"
        )
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0
    scale /= getattr(config, "logits_scaling", None) or 1.0
    cap = getattr(config, "final_logit_softcapping", None)
    return layer, OutputHead(whole(layer.weight), _whole_bias(layer), scale, cap)


def _whole_bias(layer: nn.Linear) -> Tensor | None:
    bias: Tensor | None = layer.bias
    return None if bias is None else whole(bias)
