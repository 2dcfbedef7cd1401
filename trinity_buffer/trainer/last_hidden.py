"""The last hidden states of a causal language model, and the head that makes logits of them.

Nothing here imports transformers: whoever has such a model has imported it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable
from weakref import WeakSet

import torch
from torch import Tensor, nn
from typing_extensions import override

from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.trainer.parallel import unwrapped, whole


class OutputHead(NamedTuple):
    """A linear layer from hidden states to logits z, and what follows it.

    Attributes:
        weight: ``[vocabulary, D]``.
        bias: ``[vocabulary]``, or None.
        scale: z is multiplied with it.
        softcap: z then becomes softcap tanh(z / softcap); None: it stays.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None


@runtime_checkable
class HiddenModel(Protocol):
    """A model that says its hidden states itself."""

    def last_hidden(self, microbatch: Mapping[str, Any]) -> tuple[Tensor, OutputHead]:
        """Return the last hidden states, the shape of ``input_ids`` and ``[D]``, and the head."""
        ...


def last_hidden(model: Any, microbatch: Mapping[str, Any]) -> tuple[Tensor, OutputHead]:
    """Return the last hidden states of a micro-batch, and the head; see `HiddenModel`.

    Raises:
        InvalidArgumentError: not a causal language model with a linear output head.
    """
    if isinstance(model, HiddenModel):
        return model.last_hidden(microbatch)
    layer, head = _head_of(unwrapped(model))
    # What the head is given, taken at its door: what lies around the model (an adapter, a wrapper
    # of data-parallel ranks) is called as ever. The head itself gets one token, for `_require_own`.
    seen: list[Tensor] = []

    def keep(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor]:
        seen.append(given[0])
        return (given[0][:, :1],)

    handle = layer.register_forward_pre_hook(keep)
    try:
        said = model(**_inputs(model, microbatch))
    finally:
        handle.remove()
    (hidden,) = seen
    _require_own(model, said.logits, hidden, head)
    if hasattr(unwrapped(model), "reshard"):  # FSDP2 begins to go backward at what a model says
        hidden = _Beside.apply(hidden, said.logits)  # type: ignore[no-untyped-call]  # of torch
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


def _inputs(model: Any, microbatch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a model of transformers.

    Padding needs no mask: it is on the right, and what follows a token changes nothing of it.
    Packed sequences are told apart by their positions, which begin anew; attention of variable
    length takes the limits.
    """
    ids, limits = microbatch["input_ids"], microbatch.get("cu_seqlens")
    if limits is None:
        return {"input_ids": ids, "use_cache": False}
    positions = microbatch["position_ids"]
    given = {"input_ids": ids[None], "position_ids": positions[None], "use_cache": False}
    if "flash" in str(getattr(unwrapped(model).config, "_attn_implementation", None)):
        longest = microbatch["max_seqlen"]
        given |= {"cu_seq_lens_q": limits, "cu_seq_lens_k": limits}
        given |= {"max_length_q": longest, "max_length_k": longest}
    return given


_CHECKED: WeakSet[nn.Module] = WeakSet()


@torch.no_grad()
def _require_own(model: nn.Module, logits: Tensor, hidden: Tensor, head: OutputHead) -> None:
    """Return if the model's own logits of a first token are those of ``head``; asked once."""
    if model in _CHECKED:
        return
    with torch.autocast(hidden.device.type, enabled=False):
        ours = hidden[:, :1].float() @ head.weight.float().T
        ours = ours if head.bias is None else ours + head.bias.float()
        ours = ours * head.scale
        ours = ours if head.softcap is None else head.softcap * torch.tanh(ours / head.softcap)
    theirs = logits.float()
    near = 0.02 * float(theirs.abs().nan_to_num().max())
    if not torch.allclose(ours, theirs, rtol=0.02, atol=near + 1e-6, equal_nan=True):
        raise InvalidArgumentError(
            f"the logits of {type(model).__name__} are not those of its output head: it changes "
            "them in a way that is not known here; give it a method `last_hidden`"
        )
    _CHECKED.add(model)
