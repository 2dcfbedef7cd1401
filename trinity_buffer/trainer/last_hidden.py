"""The last hidden states of a causal language model, and the head that makes logits of them.

Nothing here imports transformers: a caller with such a model has imported it.

That rows of a micro-batch do not change each other, and that its logits are those of its output
head, is asked of the model itself, on a few tokens: no list of names would stay true. Two rows are
scored twice, among other rows each time. Both passes have one shape, so that what a row computes is
the same to the last bit, or nearly so, unless it reads its neighbours.

Packed rows on a GPU get torch's attention of variable length. Without the package flash-attn,
transformers makes a mask of T x T tokens of packed rows; torch has a kernel that takes where the
rows end. It is registered with transformers under a name of ours, and a model has that name only
while it computes packed rows. The backward pass of the kernel is deterministic under
``torch.use_deterministic_algorithms(True)``; with ``warn_only=True``, or without, it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from inspect import signature
from logging import getLogger
from math import isclose
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from typing_extensions import override

from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.lazy import extra
from trinity_buffer.trainer.parallel import unwrapped, whole
from trinity_buffer.trainer.policy import in_eval_mode

Batch = Mapping[str, Any]
"""A micro-batch of a trainer, or what is like one."""

Options = Mapping[str, Any]
"""What a layer asks of its attention, by the names of transformers."""

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
        return f"attention of variable length needs compute capability 8.0, not {capability}"
    # The backward pass of wider heads needs the shared memory of these.
    widest = 256 if capability in {(8, 0), (9, 0), (10, 0)} else 192
    return Kernel(varlen.varlen_attn, frozenset({torch.bfloat16, torch.float16}), widest)


class _Use(NamedTuple):
    """How a model uses the kernel.

    Attributes:
        kind: of the device.
        recomputed: what computes its layers anew -> the same with the kernel.
    """

    kind: str
    recomputed: dict[Callable[..., Any], Callable[..., Any]]


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
    _USES[model] = _Use(device.type, {})
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
    _logger.warning(
        "%s attends to packed rows through a dense mask, whose time and memory grow with the "
        'square of the tokens of a micro-batch: %s; open the stream with layout="padded", or load '
        'the model with attn_implementation="flash_attention_2", which needs flash-attn',
        name_of(model),
        why,
    )


@contextmanager
def attending(model: Any, microbatch: Batch) -> Iterator[None]:
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


def limits_of(microbatch: Batch, implementation: str | None) -> dict[str, Any]:
    """Return the limits of packed rows, as arguments of attention of variable length."""
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
            each = (-1, -1, repeats, -1)
            states[1:] = [part.unsqueeze(2).expand(each).flatten(1, 2) for part in states[1:]]
        limits, longest = asked["cu_seq_lens_q"].to(torch.int32), asked["max_length_q"]
        options = _options(takes, asked, query.shape[-1])
        attended = kernel.attend(*states, limits, limits, longest, longest, **options)
        return attended.unsqueeze(0), None

    return attend


def _options(takes: frozenset[str], asked: Options, width: int) -> dict[str, Any]:
    """Return the options of a layer with such heads, of those that a kernel ``takes``.

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
    kernel: Kernel, module: nn.Module, states: Sequence[Tensor], mask: Tensor | None, asked: Options
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


_LARGEST_LOGIT = 100.0
"""What the head is tried out with: a cap shows, however small the logits of the model are."""


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


def hidden_and_logits(
    model: Any, layer: nn.Module, microbatch: Batch, to_head: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the hidden states before a model's head, and the logits, of a micro-batch.

    Args:
        model: what lies around it (an adapter, a wrapper of data-parallel ranks) is called as ever.
        layer: its head, at whose door the hidden states are taken.
        microbatch: of a trainer.
        to_head: returns what the head gets in their place, and makes the logits of.

    Raises:
        InvalidArgumentError: the model passes the door by.
    """
    seen: list[Tensor] = []

    def keep(_: nn.Module, states: tuple[Tensor, ...]) -> tuple[Tensor]:
        seen.append(states[0])
        return (to_head(states[0]),)

    handle = layer.register_forward_pre_hook(keep)
    try:
        logits = _logits_of(model, microbatch)
    except UnfitAttentionError as error:
        withdraw(unwrapped(model), str(error))
        logits = _logits_of(model, microbatch)
    finally:
        handle.remove()
    if not seen:
        raise InvalidArgumentError(
            f"the {name_of(model)} was compiled and called before it was scored, and what was "
            "compiled then shows no hidden states: score the model as it was before torch.compile, "
            "which has the same weights, or call torch.compiler.reset() before you score"
        )
    return seen[0], logits


def _logits_of(model: Any, microbatch: Batch) -> Tensor:
    """Return the logits of a model of transformers for a micro-batch.

    Padding needs no mask: it is on the right, and what follows a token changes nothing of it.
    Packed sequences are told apart by their positions, which begin anew; attention of variable
    length takes the limits.
    """
    inputs = {"input_ids": microbatch["input_ids"], "use_cache": False}
    with attending(model, microbatch):
        if "cu_seqlens" in microbatch:
            positions = microbatch["position_ids"][None]
            inputs |= {"input_ids": inputs["input_ids"][None], "position_ids": positions}
            attention = getattr(unwrapped(model).config, "_attn_implementation", None)
            inputs |= limits_of(microbatch, attention)
        logits: Tensor = model(**inputs).logits
    return logits


_Pair: TypeAlias = "list[tuple[dict[str, Any], slice]]"
"""Two micro-batches, and where one and the same row is in each."""

_TRIED_OUT: WeakKeyDictionary[nn.Module, set[tuple[bool, str]]] = WeakKeyDictionary()
"""Models, and in which layouts: packed or not, and the kind of device."""


def require_known(model: Any, layer: nn.Module, head: OutputHead, microbatch: Batch) -> None:
    """Refuse a model whose rows change each other, or whose head is not what it seems.

    Every rank of a sharded model must call it.

    Args:
        model: of transformers; it is tried out when it first scores in this layout.
        layer: its head.
        head: what is known of it.
        microbatch: about to be scored.

    Raises:
        InvalidArgumentError: names the model, and what to do.
    """
    inner = unwrapped(model)
    _require_short(inner, microbatch)
    tried = _TRIED_OUT.setdefault(inner, set())
    layout = "cu_seqlens" in microbatch, microbatch["input_ids"].device.type
    if layout in tried:
        return
    # Not the wrapper of DDP, which would exchange buffers; and nothing is compiled for this shape.
    with torch.no_grad(), in_eval_mode(inner), torch.compiler.set_stance("force_eager"):
        _require_apart(inner, layer, head, microbatch)
    tried.add(layout)


def _require_apart(model: Any, layer: nn.Module, head: OutputHead, microbatch: Batch) -> None:
    """Raise unless a row scores the same among other rows, and the head is what it seems."""
    packed, device = "cu_seqlens" in microbatch, microbatch["input_ids"].device
    width = min(8, getattr(model.config.get_text_config(), "max_position_embeddings", None) or 8)
    long = torch.arange(3, 3 + width, device=device) % len(head.weight)
    pair = list(_pair(long, packed=packed))
    try:
        rows = _scored(model, layer, pair)
    except TypeError as error:
        raise InvalidArgumentError(
            f"{name_of(model)} takes no {'packed' if packed else 'padded'} rows: {error}"
        ) from error
    if packed and offer(model, device):
        rows = _scored_by_limits(model, layer, pair, rows)
    off, allowed = difference(*rows), noise_of(rows[0])
    if off > allowed:
        remedy = (
            "it does not tell packed rows apart by their position_ids: open the stream with "
            'layout="padded"'
            if packed
            else "it reads its padding or its neighbours, and can be trained on single rows alone"
        )
        raise InvalidArgumentError(
            f"{name_of(model)} scores a row otherwise when other rows are beside it (its hidden "
            f"states differ by {off:.1g} of their size): {remedy}"
        )
    _require_own(model, layer, head, pair[-1][0])


def _scored(model: Any, layer: nn.Module, pair: _Pair) -> list[Tensor]:
    """Return the hidden states of the row that is in both micro-batches."""
    of_row = []
    for batch, place in pair:
        states, _ = hidden_and_logits(model, layer, batch, lambda states: states[:, :1])
        of_row.append(states.flatten(0, -2)[place])
    return of_row


def _scored_by_limits(model: Any, layer: nn.Module, pair: _Pair, own: list[Tensor]) -> list[Tensor]:
    """Return the hidden states as packed rows will have them: of the kernel, if they are ``own``.

    Kernels round differently, by some bits more than one kernel with itself.
    """
    try:
        by_kernel = _scored(model, layer, pair)
    except (RuntimeError, TypeError, ValueError) as error:  # whatever model or kernel refuses
        withdraw(model, f"with torch's attention of variable length it fails ({error})")
        return own
    off = max(difference(*both) for both in zip(own, by_kernel, strict=True))
    if off <= 5 * noise_of(own[0]):
        return by_kernel
    apart = f"its hidden states differ by {off:.1g} of their size"
    withdraw(model, f"with torch's attention of variable length {apart}")
    return own


def _pair(long: Tensor, *, packed: bool) -> Iterator[tuple[dict[str, Any], slice]]:
    """Yield two micro-batches of one shape, and where one and the same row is in each.

    First it stands behind ``long``, or beside it; then it comes first, or last.
    """
    row, other = long[2:].roll(1), long.flip(0)
    if packed:
        yield _packed([long, row]), slice(len(long), None)
        yield _packed([row, other]), slice(len(row))
        return
    padding = long[:2]
    yield {"input_ids": torch.stack([torch.cat([row, padding]), long])}, slice(len(row))
    padded = {"input_ids": torch.stack([other, torch.cat([row, padding.flip(0)])])}
    yield padded, slice(len(other), len(other) + len(row))


def _packed(rows: list[Tensor]) -> dict[str, Any]:
    device, sizes = rows[0].device, [len(row) for row in rows]
    return {
        "input_ids": torch.cat(rows),
        "position_ids": torch.cat([torch.arange(size, device=device) for size in sizes]),
        "cu_seqlens": torch.tensor([0, *sizes], device=device).cumsum(0).to(torch.int32),
        "max_seqlen": max(sizes),
    }


def difference(row: Tensor, other: Tensor) -> float:
    """Return how far two tensors are apart, as a part of their size; NaN where one is."""
    size = row.double().norm().clamp_min(torch.finfo(torch.float32).tiny)
    return float((row.double() - other.double()).norm() / size)


def noise_of(values: Tensor) -> float:
    """Return the `difference` that rounding alone may make of equal rows.

    Norms of a model in float64 are computed in float32. In 16 bits an expert may be chosen or not
    by the last bit.
    """
    kind = values.device.type
    exact = values.dtype in {torch.float32, torch.float64} and not torch.is_autocast_enabled(kind)
    return 2e-5 if exact else 1e-2


def _require_own(model: Any, layer: nn.Module, head: OutputHead, batch: Batch) -> None:
    """Refuse a model whose own logits are not those of ``head``, large ones included."""
    tried: list[tuple[Tensor, Tensor]] = []

    def enlarge(states: Tensor) -> Tensor:
        raw = _logits(states, head._replace(softcap=None)).abs().amax()
        size = states.abs().amax()
        tiny = torch.finfo(torch.float32).tiny
        factor = min(_LARGEST_LOGIT / float(raw + tiny), 1e4 / float(size + tiny))
        large = states * factor
        tried.append((large, _logits(large, head)))
        return large

    _, theirs = hidden_and_logits(model, layer, batch, enlarge)
    ((large, ours),) = tried
    off = difference(ours, theirs)
    # A half-precision head rounds its logits once or twice.
    if off > max(noise_of(large), 5e-4):
        raise InvalidArgumentError(
            f"the logits of {name_of(model)} are not those of its output head (they differ by "
            f"{off:.1g} of their size): it changes them in a way that is not known here; give it "
            "a method `last_hidden`"
        )


def _logits(states: Tensor, head: OutputHead) -> Tensor:
    """Return the logits of ``head`` in float32."""
    with torch.autocast(states.device.type, enabled=False):
        logits = states.float() @ head.weight.float().T
        logits = logits if head.bias is None else logits + head.bias.float()
        logits = logits * head.scale
        if head.softcap is None:
            return logits
        return head.softcap * torch.tanh(logits / head.softcap)


def name_of(model: Any) -> str:
    """Return the class name of the model of transformers inside wrappers and adapters."""
    inner = unwrapped(model)
    base = getattr(inner, "get_base_model", lambda: inner)()
    return type(base).__name__


def _require_short(model: Any, microbatch: Batch) -> None:
    """Raise unless no row is so long that it changes how its neighbours are computed.

    Raises:
        InvalidArgumentError: names the model and its limit.
    """
    ids, limits = microbatch["input_ids"], microbatch.get("cu_seqlens")
    rows = len(ids) if limits is None else len(limits) - 1
    width = ids.shape[-1] if limits is None else int(microbatch["max_seqlen"])
    config = model.config.get_text_config()
    for kind, limit in _scaled_rope(config):
        if width > limit and (rows > 1 or "dynamic" in kind):
            raise InvalidArgumentError(
                f"the positions of {name_of(model)} (rope_type {kind!r}) are computed from the "
                f"longest row: one of more than {limit} tokens, as of {width} here, changes all "
                f"rows beside it; open the stream with max_tokens={limit}"
            )
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk and limits is not None and rows > 1 and ids.numel() > chunk:
        raise InvalidArgumentError(
            f"{name_of(model)} attends within chunks of {chunk} tokens, counted from the first of "
            'all packed rows: open the stream with layout="padded"'
        )


def _scaled_rope(config: Any) -> Iterator[tuple[str, int]]:
    """Yield each kind of rotary positions that reads the longest row, and from which length on."""
    ropes = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for rope in [ropes, *ropes.values()]:  # of all layers, or by kind of layer
        if not isinstance(rope, Mapping):
            continue
        kind = str(rope.get("rope_type") or rope.get("type"))
        if kind == "longrope" or "dynamic" in kind:
            known = rope.get("original_max_position_embeddings")
            named = getattr(config, "original_max_position_embeddings", None)
            yield kind, int(known or named or config.max_position_embeddings)


@runtime_checkable
class HiddenModel(Protocol):
    """A model that says its hidden states itself."""

    def last_hidden(self, microbatch: Batch) -> tuple[Tensor, OutputHead]:
        """Return the last hidden states, the shape of ``input_ids`` and ``[D]``, and the head."""


def last_hidden(model: Any, microbatch: Batch) -> tuple[Tensor, OutputHead]:
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
    layer = getattr(model, "get_output_embeddings", lambda: None)()
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
    bias: Tensor | None = layer.bias
    bias = None if bias is None else whole(bias)
    return layer, OutputHead(whole(layer.weight), bias, scale, cap)
