"""Packed rows attend by their limits, where there is a kernel; else through a mask, said once.

torch's kernel runs on GPUs alone: here, a loop over the rows stands in its place.
"""

from __future__ import annotations

import copy
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper

import trinity_buffer as tb
from tests.trainer.qwen import SHAPE, qwen3
from tests.trainer.qwen import qwen2 as narrow
from tests.trainer.wrapped import batch_of, gradients, loss, rows_of
from trinity_buffer.trainer import last_hidden
from trinity_buffer.trainer.last_hidden import NAME, Kernel, attention_of, kernel_of

qwen2 = partial(narrow, hidden_size=32)  # heads of 8 elements
EXACT = frozenset({torch.float32, torch.float64})
CALLS: list[dict[str, Any]] = []


def attend(states: list[Tensor], limits: Tensor, window: tuple[int, int], scale: Any) -> Tensor:
    """Return causal attention of each row, ``[T, heads, D]``."""
    found = []
    for begin, end in limits.unfold(0, 2, 1).tolist():
        query, key, value = (part[begin:end].transpose(0, 1) for part in states)
        places = torch.arange(end - begin)
        back = places[:, None] - places
        seen = (back >= 0) & ((window[0] < 0) | (back <= window[0]))
        row = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, scale=scale, enable_gqa=True
        )
        found.append(row.transpose(0, 1))
    return torch.cat(found)


def newest(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    limits: Tensor,
    *others: Any,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """Attend as torch 2.12 and 2.13 are asked to."""
    assert enable_gqa
    assert window_size[1] == 0
    CALLS.append({"dtype": query.dtype, "longest": others[1], "window": window_size})
    return attend([query, key, value], limits, window_size, scale)


def traced(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    limits: Tensor,
    *others: Any,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """Attend by a mask that torch.compile can follow."""
    assert window_size == (-1, 0)
    assert len(others) == 3
    places = torch.arange(len(query))
    row = torch.bucketize(places, limits, right=True)
    seen = (row[:, None] == row) & (places[:, None] >= places)
    query, key, value = (part.transpose(0, 1)[None] for part in (query, key, value))
    found: Tensor = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=seen, scale=scale, enable_gqa=enable_gqa
    )
    return found[0].transpose(0, 1)


def windowed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    limits: Tensor,
    *others: Any,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Attend as torch 2.11 is asked to."""
    assert query.shape == key.shape == value.shape
    CALLS.append({"longest": others[1]})
    return attend([query, key, value], limits, window_size, scale)


def oldest(
    query: Tensor, key: Tensor, value: Tensor, limits: Tensor, *others: Any, is_causal: bool = False
) -> Tensor:
    """Attend as torch 2.10 is asked to."""
    assert is_causal
    assert query.shape == key.shape == value.shape
    CALLS.append({"longest": others[1]})
    return attend([query, key, value], limits, (-1, 0), None)


Use = Callable[..., None]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Use]:
    """Let the CPU have a kernel."""

    def let(
        kernel: Callable[..., Tensor] = newest,
        dtypes: frozenset[torch.dtype] = EXACT,
        widest_head: int = 256,
    ) -> None:
        there = Kernel(kernel, dtypes, widest_head)
        monkeypatch.setattr(last_hidden, "kernel_of", lambda _: there)

    CALLS.clear()
    yield let
    CALLS.clear()


def graded(model: Any, layout: str = "packed", *numbers: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the gradients of the rows."""
    model.zero_grad()
    found = loss(model, rows_of(*(numbers or range(4))), layout)
    found.backward()
    return found.detach(), gradients(model)


def compute_anew(model: Any, *, reentrant: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # releases differ in the name
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})


def require_near(model: Any, found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert model.config._attn_implementation == "sdpa"


def spoken(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "packed rows" in record.message]


@pytest.mark.parametrize("kernel", [newest, windowed, oldest])
@pytest.mark.parametrize("make", [qwen2, qwen3], ids=["qwen2", "qwen3"])
def test_packed_rows_have_the_scores_and_gradients_of_rows_alone_and_of_a_mask(
    make: Callable[[], Any],
    kernel: Callable[..., Tensor],
    use: Use,
    caplog: pytest.LogCaptureFixture,
) -> None:
    masked = graded(make())
    assert not CALLS
    model = make()
    parts = [graded(model, "padded", number) for number in range(4)]
    alone = sum(part[0] for part in parts)
    summed = {name: sum(part[1][name] for part in parts) for name in parts[0][1]}
    use(kernel)
    found = graded(model)
    assert CALLS
    require_near(model, found, masked)
    require_near(model, found, (alone, summed))
    assert spoken(caplog) == []


def test_padded_rows_have_the_attention_of_the_model(use: Use) -> None:
    use()
    model, seen = qwen3(), []
    model.model.layers[0].self_attn.register_forward_hook(
        lambda module, *_: seen.append(module.config._attn_implementation)
    )
    graded(model, "padded")
    assert set(seen) == {"sdpa"}
    assert not CALLS
    seen.clear()
    graded(model)
    assert seen[-1] == NAME
    assert CALLS[-1]["longest"] == 12


def test_layers_that_are_computed_anew_have_the_kernel_then_too(use: Use) -> None:
    expected = graded(qwen3().train())
    for reentrant in (False, True):
        model = qwen3().train()
        compute_anew(model, reentrant=reentrant)
        own = model.model.layers[0]._gradient_checkpointing_func
        use()
        graded(model)
        CALLS.clear()
        require_near(model, graded(model), expected)
        assert len(CALLS) == 2 * len(model.model.layers)
        assert model.model.layers[0]._gradient_checkpointing_func is own


def test_a_layer_that_is_computed_anew_without_the_kernel_mixes_no_rows(use: Use) -> None:
    use()
    model = qwen3()
    scores = tb.token_scores(model, batch_of(rows_of(0, 1), "packed")).logprob
    layer = model.model.layers[0]
    own = layer.forward
    layer.forward = lambda *args, **kwargs: torch.utils.checkpoint.checkpoint(
        own, *args, use_reentrant=False, **kwargs
    )
    again = tb.token_scores(model, batch_of(rows_of(0, 1), "packed")).logprob
    assert torch.equal(again, scores)
    with pytest.raises(RuntimeError):
        again.sum().backward()


def test_windows_are_those_of_the_model(use: Use, caplog: pytest.LogCaptureFixture) -> None:
    model = qwen2(use_sliding_window=True, sliding_window=4, max_window_layers=0)
    expected = graded(copy.deepcopy(model))
    use()
    require_near(model, graded(model), expected)
    assert CALLS[-1]["window"] == (3, 0)
    assert spoken(caplog) == []


def test_the_attention_of_the_model_is_put_back_after_an_error(use: Use) -> None:
    use()
    model = qwen3()
    graded(model)

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        graded(model)
    handle.remove()
    assert model.config._attn_implementation == "sdpa"
    assert model.model.layers[0].self_attn.config._attn_implementation == "sdpa"
    graded(model)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks by an old name
def test_a_copy_of_a_model_and_its_adapter_attend_by_limits(use: Use) -> None:
    peft = pytest.importorskip("peft")
    use()
    adapted = peft.get_peft_model(qwen3(), peft.LoraConfig(target_modules=["q_proj"]))
    for model in (adapted, copy.deepcopy(adapted)):
        CALLS.clear()
        graded(model)
        assert len(CALLS) >= 2


@pytest.mark.long
@pytest.mark.parametrize("anew", [False, True], ids=["plain", "computed anew"])
def test_a_compiled_model_attends_by_limits(use: Use, anew: bool) -> None:
    expected = graded(qwen3().train())
    use(traced)
    torch.compiler.reset()
    graphs: list[str] = []

    def counting(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph.print_readable(print_output=False))
        return graph.forward

    model = qwen3().train()
    if anew:
        compute_anew(model, reentrant=False)
    compiled = torch.compile(model, backend=counting, fullgraph=True)
    found = torch.zeros(())
    for _ in range(3):
        model.zero_grad()
        found = loss(compiled, rows_of(0, 1, 2, 3), "packed")
        found.backward()
        require_near(model, (found.detach(), gradients(model)), expected)
    assert len(graphs) == 1
    assert "bucketize" in graphs[0]
    torch.testing.assert_close(loss(compiled, rows_of(0, 1, 2, 3), "padded"), found)
    assert "bucketize" not in graphs[-1]


def test_autocast_decides_the_dtype(use: Use, caplog: pytest.LogCaptureFixture) -> None:
    use(dtypes=frozenset({torch.bfloat16}))
    model = qwen3()
    with torch.autocast("cpu", torch.bfloat16):
        scores = tb.token_scores(model, batch_of(rows_of(0, 1), "packed")).logprob
        padded = tb.token_scores(model, batch_of(rows_of(0, 1), "padded")).logprob
    assert {call["dtype"] for call in CALLS} == {torch.bfloat16}
    assert spoken(caplog) == []
    torch.testing.assert_close(scores[:5], padded[0, :5], rtol=0, atol=0.05)


def windows_without_windows(use: Use) -> Any:
    use(oldest)
    return qwen2(use_sliding_window=True, sliding_window=4, max_window_layers=0)


def scaled_otherwise(use: Use) -> Any:
    use(oldest)
    model = qwen3()
    for layer in model.model.layers:
        vars(layer.self_attn)["scaling"] = 1.0
    return model


def in_float32(use: Use) -> Any:
    use(dtypes=frozenset({torch.bfloat16, torch.float16}))
    return qwen3()


def with_wide_heads(use: Use) -> Any:
    use(widest_head=4)
    return qwen3()


def with_odd_heads(use: Use) -> Any:
    use()
    return qwen3(head_dim=6)


def eager(use: Use) -> Any:
    use()
    return qwen3(attn_implementation="eager")


def both_ways(use: Use) -> Any:
    use()
    model = qwen3()
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    return model


def capped(use: Use) -> Any:
    use()
    torch.manual_seed(0)
    config = transformers.Gemma2Config(**SHAPE | {"head_dim": 8})
    return transformers.Gemma2ForCausalLM(config)


def with_sinks(use: Use) -> Any:
    use()
    model = qwen3()
    for layer in model.model.layers:
        layer.self_attn.forward = partial(layer.self_attn.forward, s_aux=torch.zeros(4))
    return model


def wrapped_layers(use: Use) -> Any:
    use()
    model = qwen3()
    checkpoint_wrapper.apply_activation_checkpointing(
        model, check_fn=lambda module: module in list(model.model.layers)
    )
    return model


def of_a_kernel_that_fails(use: Use) -> Any:
    def fail(*_: Any, window_size: Any, scale: Any) -> Tensor:
        raise RuntimeError("no kernel image")

    use(fail)
    return qwen3()


def of_a_kernel_that_mixes_rows(use: Use) -> Any:
    def mix(*args: Any, window_size: Any, scale: Any) -> Tensor:
        return attend(list(args[:3]), torch.tensor([0, len(args[0])]), window_size, scale)

    use(mix)
    model = qwen3()
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight.data.mul_(20)
    return model


def unsupported(use: Use) -> Any:
    use()
    model = qwen3()
    vars(model)["_supports_attention_backend"] = False
    return model


REASONS: dict[Callable[[Use], Any], str] = {
    windows_without_windows: "has no sliding windows",
    scaled_otherwise: "scales by the width",
    in_float32: "attends in float32",
    with_wide_heads: "heads have 8 elements",
    with_odd_heads: "heads have 6 elements",
    eager: "attention is 'eager'",
    capped: "attention (is 'eager'|has softcap)",  # by the release of transformers
    with_sinks: "attention has s_aux",
    both_ways: "attend to later tokens",
    wrapped_layers: "checkpoint_wrapper",
    of_a_kernel_that_fails: r"it fails \(no kernel image\)",
    of_a_kernel_that_mixes_rows: "hidden states differ by",
    unsupported: "AttentionInterface",
}


@pytest.mark.parametrize("make", REASONS, ids=lambda make: make.__name__)
def test_what_the_kernel_cannot_do_is_said_once_and_done_through_a_mask(
    make: Callable[[Use], Any], use: Use, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    model = make(use)
    found = [tb.token_scores(model, batch_of(rows_of(0, 1), "packed")) for _ in range(2)]
    found[0].logprob.sum().backward()
    (warning,) = spoken(caplog)
    assert type(model).__name__ in warning
    assert 'layout="padded"' in warning
    assert re.search(REASONS[make], warning), warning
    if make is not both_ways:
        alone = tb.token_scores(model, batch_of(rows_of(1), "padded")).logprob[0]
        torch.testing.assert_close(found[1].logprob[5:], alone, rtol=1e-4, atol=1e-5)


def test_dropout_that_begins_with_training_is_said_then(
    use: Use, caplog: pytest.LogCaptureFixture
) -> None:
    use()
    model = qwen3(attention_dropout=0.5).train()
    for _ in range(2):
        graded(model)
    (warning,) = spoken(caplog)
    assert "dropout" in warning


def test_a_device_without_a_kernel_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(last_hidden, "kernel_of", lambda _: "torch 2.9 has none")
    graded(qwen3())
    (warning,) = spoken(caplog)
    assert "torch 2.9 has none" in warning


def test_a_gpu_has_the_kernel_of_torch_and_a_cpu_needs_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert kernel_of(torch.device("cpu")) is None
    pytest.importorskip("torch.nn.attention.varlen")  # of torch 2.10
    for capability, expected in (((9, 0), 256), ((8, 6), 192), ((7, 5), None)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        there = kernel_of(torch.device("cuda"))
        if expected is None:
            assert isinstance(there, str)
            assert "(7, 5)" in there
        else:
            assert isinstance(there, Kernel)
            assert there.widest_head == expected
            assert torch.float32 not in there.dtypes


def test_the_kernel_of_torch_takes_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    kernel = kernel_of(torch.device("cuda"))
    assert isinstance(kernel, Kernel)
    attend = attention_of(kernel)
    with FakeTensorMode():  # shapes alone
        query, key, value = (
            torch.zeros(1, heads, 9, 64, dtype=torch.bfloat16, requires_grad=True)
            for heads in (16, 8, 8)
        )
        mask = torch.zeros(1, 1, 1, 0, dtype=torch.bool)
        asked = {"cu_seq_lens_q": torch.zeros(3, dtype=torch.int32), "max_length_q": 5}
        found, weights = attend(nn.Identity(), query, key, value, mask, scaling=0.5, **asked)
        found.sum().backward()
    assert weights is None
    assert found.shape == (1, 9, 16, 64)
    grads = [part.grad for part in (query, key, value)]
    assert [grad.shape for grad in grads if grad is not None] == [
        (1, 16, 9, 64),
        (1, 8, 9, 64),
        (1, 8, 9, 64),
    ]
