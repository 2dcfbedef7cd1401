"""Packed rows of a model of transformers on a GPU: torch's attention of variable length.

Without the package flash-attn, transformers makes a mask of T x T tokens of packed rows. torch has
a kernel that takes where the rows end. It is registered with transformers under a name of ours, and
a model has that name only while it computes packed rows.

The backward pass of the kernel is deterministic under ``torch.use_deterministic_algorithms(True)``;
with ``warn_only=True``, or without, it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from inspect import signature
from logging import getLogger
from math import isclose
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from trinity_buffer.lazy import extra
from trinity_buffer.trainer.parallel import unwrapped

NAME = "trinity_buffer_varlen"
"""What transformers calls the attention."""

_NO_MASK = (1, 1, 1, 0)
"""The shape of the mask that models hand on as it is. Any other attention fails with it: a model
that computed a layer anew in the backward pass, with the attention that it has then, would
otherwise mix the rows without a word."""

_CHECKPOINT, _IMPLEMENTATION = "_gradient_checkpointing_func", "_attn_implementation_internal"
"""Attributes of transformers: what calls a layer, and calls it again; the name of an attention."""

_logger = getLogger(__name__)


class UnfitAttentionError(Exception):
    """The kernel does not compute the attention that a model asks for."""


class Kernel(NamedTuple):
    """Attention of variable length.

    Attributes:
        attend: takes the arguments of ``torch.nn.attention.varlen.varlen_attn``.
        dtypes: of its inputs.
        widest_head: elements of a head.
    """

    attend: Callable[..., Tensor]
    dtypes: frozenset[torch.dtype]
    widest_head: int


def kernel_of(device: torch.device) -> Kernel | str | None:
    """Return the kernel of a device, or why it has none; None where dense masks are as good."""
    if device.type != "cuda":
        return None
    try:
        varlen = import_module("torch.nn.attention.varlen")
    except ImportError:
        return f"torch {torch.__version__} has no attention of variable length, 2.10 and later have"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return (
            f"torch's attention of variable length needs compute capability 8.0, not {capability}"
        )
    # The backward pass of wider heads needs the shared memory of these.
    widest = 256 if capability in {(8, 0), (9, 0), (10, 0)} else 192
    return Kernel(varlen.varlen_attn, frozenset({torch.bfloat16, torch.float16}), widest)


@dataclass(slots=True)
class _Use:
    """How a model uses the kernel.

    Attributes:
        kind: of the device.
        recomputed: what computes its layers anew -> the same with the kernel.
    """

    kind: str
    recomputed: dict[Callable[..., Any], Callable[..., Any]] = field(default_factory=dict)


_USES: WeakKeyDictionary[nn.Module, _Use | None] = WeakKeyDictionary()
"""Models that were offered the kernel; None: they do not use it."""


def offer(model: Any, device: torch.device) -> bool:
    """Let ``model`` compute packed rows with the kernel, if nothing is known against it.

    What is against it is said in a warning, once for each model.
    """
    kernel, own = kernel_of(device), getattr(model.config, "_attn_implementation", None)
    if kernel is None or own not in {"sdpa", "eager"}:  # others make no dense mask
        return False
    why = kernel if isinstance(kernel, str) else _unsupported(model, own)
    if isinstance(kernel, str) or why is not None:
        withdraw(model, str(why))
        return False
    extra("transformers", "hf").AttentionInterface.register(NAME, attention_of(kernel))
    _USES[model] = _Use(device.type)
    return True


def _unsupported(model: Any, own: str) -> str | None:
    """Return why a model keeps its own attention, None if it need not."""
    if own == "eager":
        return "its attention is 'eager', as it was loaded or as caps and sinks of scores need"
    named = ("_supports_attention_backend", "_supports_flash_attn")
    if not all(getattr(model, name, False) for name in named):
        return "it does not support other attention in transformers (AttentionInterface)"
    if any("CheckpointWrapper" in type(module).__name__ for module in model.modules()):
        return (
            "its activations are computed anew by a checkpoint_wrapper, not by "
            "gradient_checkpointing_enable()"
        )
    return None


def withdraw(model: Any, why: str) -> None:
    """Let ``model`` compute packed rows with its own attention, and warn of the cost."""
    if model in _USES and _USES[model] is None:
        return
    _USES[model] = None
    base = getattr(model, "get_base_model", lambda: model)()
    _logger.warning(
        "%s attends to packed rows through a dense mask, whose time and memory grow with the "
        'square of the tokens of a micro-batch: %s; open the stream with layout="padded", or load '
        'the model with attn_implementation="flash_attention_2", which needs flash-attn',
        type(base).__name__,
        why,
    )


@contextmanager
def attending(model: Any, microbatch: Mapping[str, Any]) -> Iterator[None]:
    """Let ``model`` have the kernel within, if it uses it and the micro-batch is packed."""
    inner = unwrapped(model)
    use = _USES.get(inner) if "cu_seqlens" in microbatch else None
    if use is None or use.kind != microbatch["input_ids"].device.type:
        yield
        return
    configs = {id(own): own for m in inner.modules() if (own := vars(m).get("config")) is not None}
    with ExitStack() as stack:
        for layer in inner.modules():
            held = vars(layer)
            if (own := held.get(_CHECKPOINT)) is None:
                continue
            # One object for each, or torch.compile would compile anew at every call.
            anew = use.recomputed.setdefault(own, _recomputed(own, list(configs.values())))
            stack.callback(held.__setitem__, _CHECKPOINT, own)
            held[_CHECKPOINT] = anew
        stack.enter_context(_named(configs.values()))
        yield


@contextmanager
def _named(configs: Iterable[Any]) -> Iterator[None]:
    """Let the models of ``configs`` have the kernel within in place of scaled_dot_product."""
    ours = [config for config in configs if getattr(config, "_attn_implementation", None) == "sdpa"]
    try:
        for config in ours:
            # Not by set_attn_implementation, which would look at all modules again.
            vars(config)[_IMPLEMENTATION] = NAME
        yield
    finally:
        for config in ours:
            vars(config)[_IMPLEMENTATION] = "sdpa"


def _recomputed(checkpoint: Callable[..., Any], configs: list[Any]) -> Callable[..., Any]:
    """Return a ``checkpoint`` whose functions have the kernel in the backward pass, too.

    Args:
        checkpoint: calls a function, and calls it again in the backward pass, when the model has
            its own attention.
        configs: of the model.
    """

    def checkpointed(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():  # the name is looked up once
            return checkpoint(function, *args, **options)

        def compute(*inputs: Any) -> Any:
            with _named(configs):
                return function(*inputs)

        return checkpoint(compute, *args, **options)

    return checkpointed


def limits_of(microbatch: Mapping[str, Any], implementation: str | None) -> dict[str, Any]:
    """Return what attention of variable length is given of packed rows, and other is not."""
    if implementation != NAME and "flash" not in str(implementation):
        return {}
    limits, longest = microbatch["cu_seqlens"], microbatch["max_seqlen"]
    arguments = {"cu_seq_lens_q": limits, "cu_seq_lens_k": limits}
    arguments |= {"max_length_q": longest, "max_length_k": longest}
    if implementation == NAME:
        arguments["attention_mask"] = limits.new_zeros(_NO_MASK, dtype=torch.bool)
    return arguments


def attention_of(kernel: Kernel) -> Callable[..., tuple[Tensor, None]]:
    """Return attention as transformers calls it; torch's kernel differs from release to release."""
    takes = frozenset(signature(kernel.attend).parameters)

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **asked: Any,
    ) -> tuple[Tensor, None]:
        kind = query.device.type
        if torch.is_autocast_enabled(kind):  # which changes no operator that it does not know
            dtype = torch.get_autocast_dtype(kind)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        _require_fit(kernel, module, (query, key, value), attention_mask, asked)
        # [1, heads, T, D] -> [T, heads, D]
        states = [part.squeeze(0).transpose(0, 1) for part in (query, key, value)]
        if "enable_gqa" not in takes and query.shape[1] != key.shape[1]:
            repeats = query.shape[1] // key.shape[1]
            states[1:] = [
                part.unsqueeze(2).expand(-1, -1, repeats, -1).flatten(1, 2) for part in states[1:]
            ]
        limits, longest = asked["cu_seq_lens_q"].to(torch.int32), asked["max_length_q"]
        options = _options(takes, asked, query.shape[-1])
        attended = kernel.attend(*states, limits, limits, longest, longest, **options)
        return attended.unsqueeze(0), None

    return attend


def _options(takes: frozenset[str], asked: Mapping[str, Any], width: int) -> dict[str, Any]:
    """Return what a kernel that ``takes`` these arguments is told of a layer with such heads.

    In torch 2.10 it takes ``is_causal``, from 2.11 on ``scale`` and ``window_size``, from 2.12 on
    ``enable_gqa``.
    """
    options: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in takes else {}
    scale, window = asked.get("scaling"), asked.get("sliding_window")
    if "scale" in takes:
        options["scale"] = scale
    elif scale is not None and not isclose(scale, width**-0.5, rel_tol=1e-6):
        raise UnfitAttentionError(f"torch {torch.__version__} scales by the width of heads alone")
    if "window_size" in takes:
        # A window of transformers counts the token itself.
        options["window_size"] = (-1 if window is None else window - 1, 0)
    elif window is None:
        options["is_causal"] = True
    else:
        raise UnfitAttentionError(f"torch {torch.__version__} has no sliding windows there")
    return options


def _require_fit(
    kernel: Kernel,
    module: nn.Module,
    states: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    asked: Mapping[str, Any],
) -> None:
    """Raise unless the kernel computes what a layer asks for."""
    query, _, value = states
    dtypes, width = {part.dtype for part in states}, query.shape[-1]
    causal = asked.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    beside = [n for n in ("softcap", "s_aux", "position_bias") if asked.get(n) is not None]
    names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
    reasons = {
        "its layers are not given where rows end": asked.get("cu_seq_lens_q") is None,
        "its layers are given a mask of their own": mask is None or tuple(mask.shape) != _NO_MASK,
        "its layers attend to later tokens": not causal,
        f"its attention has {' and '.join(beside)}": bool(beside),
        "its attention has dropout in training": bool(asked.get("dropout")),
        f"it attends in {names}, and torch's kernel in bfloat16 or float16": (
            len(dtypes) > 1 or not dtypes <= kernel.dtypes
        ),
        f"its heads have {width} elements, and torch's kernel takes multiples of 8 up to "
        f"{kernel.widest_head}, keys and values alike": (
            width % 8 != 0 or width > kernel.widest_head or value.shape[-1] != width
        ),
    }
    for why, holds in reasons.items():
        if holds:
            raise UnfitAttentionError(why)
