"""Scores of given tokens: those of the naive way, in any layout and in chunks of any size."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import pad_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

import trinity_buffer as tb
from tests.trainer.qwen import SHAPE, qwen2, qwen3
from trinity_buffer.algorithm.advantage_fn.token_scores import expected_entropy_change
from trinity_buffer.demo.policy import PolicyConfig, TransformerPolicy
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.trainer.last_hidden import OutputHead
from trinity_buffer.trainer.policy import TokenScores
from trinity_buffer.trainer.token_scores import (
    TORCH,
    ChunkMath,
    _add_product,
    chunk_columns,
    entropy_changes,
    head_scores,
)

LENGTHS = (5, 1, 12, 3)
WORDS = 600  # chunks of 256, 256 and 88


def demo() -> TransformerPolicy:
    return TransformerPolicy(PolicyConfig(WORDS, width=16, max_length=12))


def made(family: str, **changes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(
            **(SHAPE | {"vocab_size": WORDS} | changes)
        )
        model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config)
        return model

    return make


def wide2(**changes: Any) -> Any:
    return qwen2(vocab_size=WORDS, **changes)


def wide3() -> Any:
    return qwen3(vocab_size=WORDS)


FAMILIES = [
    wide2,
    wide3,
    demo,
    lambda: wide2(use_sliding_window=True, sliding_window=4, max_window_layers=0),
    made("Gemma2", final_logit_softcapping=0.5, head_dim=4),
    made("Cohere", logit_scale=3.0),
    made("Granite", logits_scaling=0.3),
    made("Phi"),
]
FAMILY = pytest.mark.parametrize(
    "make", FAMILIES, ids=["qwen2", "qwen3", "demo", "window", "gemma2", "cohere", "granite", "phi"]
)


def rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, WORDS, (length,), generator=generator) for length in LENGTHS]


def padded() -> dict[str, Tensor]:
    there = pad_sequence([torch.ones(size, dtype=torch.bool) for size in LENGTHS], True)
    return {"input_ids": pad_sequence(rows(), True), "attention_mask": there}


def packed() -> dict[str, Any]:
    return {
        "input_ids": torch.cat(rows()),
        "position_ids": torch.cat([torch.arange(size) for size in LENGTHS]),
        "attention_mask": torch.ones(sum(LENGTHS), dtype=torch.bool),
        "cu_seqlens": torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32),
        "max_seqlen": max(LENGTHS),
    }


def heat() -> list[Tensor]:
    """Return a temperature of each token."""
    return list(torch.linspace(0.5, 2.0, sum(LENGTHS)).split(LENGTHS))


def with_heat(batch: dict[str, Any]) -> dict[str, Any]:
    packed = "cu_seqlens" in batch
    return {
        **batch,
        "temperature": torch.cat(heat()) if packed else pad_sequence(heat(), True, 1.0),
    }


def naive(model: Any, *, hot: bool = False) -> list[tuple[Tensor, Tensor]]:
    """Return log-probs and entropies row by row, from all logits."""
    found = []
    for ids, temperature in zip(rows(), heat(), strict=True):
        logits = model(ids[None])
        logits = (logits if isinstance(logits, Tensor) else logits.logits)[0].double()[:-1]
        every = (logits / temperature[1:, None] if hot else logits).log_softmax(-1)
        logprob = every.gather(1, ids[1:, None]).squeeze(1)
        entropy = -(every.exp() * every).sum(1)
        found.append((logprob, entropy))
    return found


def flat(scores: TokenScores, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    there = batch["attention_mask"]
    assert all(one[~there].eq(0).all() for one in scores)
    return scores.logprob[there], scores.entropy[there]


def expected(model: Any, *, hot: bool = False) -> tuple[Tensor, Tensor]:
    pairs = [[nn.functional.pad(one, (1, 0)) for one in row] for row in naive(model, hot=hot)]
    return torch.cat([row[0] for row in pairs]), torch.cat([row[1] for row in pairs])


def gradients(model: nn.Module, scores: tuple[Tensor, Tensor]) -> list[Tensor]:
    model.zero_grad()
    weights = torch.linspace(-1, 1, len(scores[0]), dtype=scores[0].dtype)
    ((scores[0] * weights).sum() + (scores[1].square() * weights.flip(0)).sum()).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@FAMILY
@pytest.mark.parametrize("hot", [False, True])
@pytest.mark.parametrize("layout", [padded, packed])
def test_scores_and_gradients_are_those_of_all_logits_in_float64(
    make: Callable[[], nn.Module], layout: Callable[[], dict[str, Any]], *, hot: bool
) -> None:
    model = make().double()
    wanted = expected(model, hot=hot)
    batch = with_heat(layout()) if hot else layout()
    for chunk_logits in (1, 2**24):  # three chunks, and all at once
        found = flat(tb.token_scores(model, batch, chunk_logits=chunk_logits), batch)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)  # their norms are in float32
        torch.testing.assert_close(
            gradients(model, found),
            gradients(model, expected(model, hot=hot)),
            rtol=1e-5,
            atol=1e-6,
        )


@pytest.mark.long
@pytest.mark.parametrize("in_place", [True, False])
def test_a_compiled_model_scores_the_same_without_being_compiled_for_each_batch(
    in_place: bool,
) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def counting(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    model, other = wide2(), wide2()
    other.load_state_dict(model.state_dict())
    compiled: Any = other
    if in_place:
        other.compile(backend=counting, fullgraph=True)
    else:
        compiled = torch.compile(other, backend=counting, fullgraph=True)
    for rows in range(2, 6):
        batch = {name: tensor[:rows, : 13 - rows] for name, tensor in padded().items()}
        plain, found = tb.token_scores(model, batch), tb.token_scores(compiled, batch)
        assert torch.equal(found.logprob, plain.logprob)
        assert torch.equal(found.entropy, plain.entropy)
    assert 1 <= len(graphs) <= 2


@pytest.mark.long
@pytest.mark.parametrize("in_place", [True, False])
def test_a_model_that_was_compiled_and_used_before_is_refused_with_the_remedy(
    in_place: bool,
) -> None:
    torch.compiler.reset()
    model = wide2()
    compiled: Any = model
    if in_place:
        model.compile(backend="eager")
    else:
        compiled = torch.compile(model, backend="eager")
    compiled(input_ids=padded()["input_ids"], use_cache=False)
    with pytest.raises(InvalidArgumentError, match=r"Qwen2ForCausalLM was compiled and called"):
        tb.token_scores(compiled, padded())
    if not in_place:
        assert tb.token_scores(model, padded()).logprob.abs().sum() > 0
    torch.compiler.reset()
    assert tb.token_scores(compiled, padded()).logprob.abs().sum() > 0


@pytest.mark.parametrize("make", [wide2, wide3])
def test_padded_and_packed_are_one_gradient_in_float32(make: Callable[[], nn.Module]) -> None:
    model, both = make(), []
    for batch in (padded(), packed()):
        scores = flat(tb.token_scores(model, batch, chunk_logits=1), batch)
        both.append((scores, gradients(model, scores)))
    torch.testing.assert_close(both[0][0], both[1][0], rtol=0, atol=1e-5)
    largest = max(float(g.abs().max()) for g in both[0][1])
    for one, other in zip(both[0][1], both[1][1], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * largest)


def test_sums_of_a_model_in_bfloat16_are_in_float32() -> None:
    model, batch = wide2().bfloat16(), padded()
    found = flat(tb.token_scores(model, batch, chunk_logits=1), batch)
    assert all(one.dtype == torch.float32 for one in found)
    torch.testing.assert_close(found, tuple(x.float() for x in expected(model)), rtol=0, atol=1e-5)
    assert {g.dtype for g in gradients(model, found)} == {torch.bfloat16}


@pytest.mark.parametrize("size", [1, 4])
def test_rows_without_a_predicted_token_score_zero(size: int) -> None:
    model = wide2()
    ids, nothing = torch.zeros(2, size, dtype=torch.long), torch.zeros(2, size, dtype=torch.bool)
    scores = tb.token_scores(model, {"input_ids": ids, "attention_mask": nothing})
    assert scores.logprob.eq(0).all()
    assert scores.entropy.eq(0).all()
    scores.logprob.sum().backward()
    assert all(p.grad is None or p.grad.eq(0).all() for p in model.parameters())


@pytest.mark.parametrize("there", [[0, 1, 1, 1], [1, 1, 0, 1]])
def test_rows_that_are_padded_on_the_left_are_refused(there: list[int]) -> None:
    batch = {"input_ids": torch.tensor([[3, 4, 5, 6]] * 2)}
    batch["attention_mask"] = torch.tensor([[1, 1, 1, 0], there])
    for scores in (tb.token_scores, entropy_changes):
        with pytest.raises(InvalidArgumentError, match="a token follows padding"):
            scores(wide2(), batch)


def test_frozen_weights_get_no_gradient() -> None:
    model, batch = wide2(), padded()
    model.lm_head.requires_grad_(requires_grad=False)
    tb.token_scores(model, batch).logprob.sum().backward()
    assert model.lm_head.weight.grad is None
    assert float(model.model.norm.weight.grad.abs().sum()) > 0


@FAMILY
@pytest.mark.parametrize("hot", [False, True])
@pytest.mark.parametrize("layout", [padded, packed])
def test_entropy_changes_are_those_of_all_logits(
    make: Callable[[], nn.Module], layout: Callable[[], dict[str, Any]], *, hot: bool
) -> None:
    model = make().double()
    batch = with_heat(layout()) if hot else layout()
    wanted = []
    for ids, temperature in zip(rows(), heat(), strict=True):
        logits = model(ids[None])
        logits = (logits if isinstance(logits, Tensor) else logits.logits)[0].double()
        if hot:  # that of a token divides the logits before it
            logits = logits / nn.functional.pad(temperature[1:], (0, 1), value=1.0)[:, None]
        wanted.append(nn.functional.pad(expected_entropy_change(logits)[:-1], (1, 0)))
    for chunk_logits in (1, 2**24):
        found = entropy_changes(model, batch, chunk_logits=chunk_logits)
        assert found[~batch["attention_mask"]].eq(0).all()
        found = found[batch["attention_mask"]]
        torch.testing.assert_close(found, torch.cat(wanted), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("read", [("logprob",), ("entropy",), ("logprob", "entropy")])
def test_a_loss_may_read_one_of_both(read: tuple[str, ...]) -> None:
    model, batch = wide2().double(), padded()
    expected_ones = TokenScores(*expected(model))
    found = TokenScores(*flat(tb.token_scores(model, batch, chunk_logits=1), batch))
    both = []
    for scores in (found, expected_ones):
        model.zero_grad()
        sum(getattr(scores, name).square().sum() for name in read).backward()
        both.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for one, other in zip(*both, strict=True):  # norms are in float32
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * float(other.abs().max()))


class _Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor has that an operation returns."""

    numbers = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.numbers = max(self.numbers, found.numel() if isinstance(found, Tensor) else 0)
        return found


def test_no_tensor_of_tokens_times_vocabulary_lives() -> None:
    model = qwen2(vocab_size=4000)
    batch = {"input_ids": torch.randint(0, 4000, (16, 60))}
    with _Largest() as largest:  # type: ignore[no-untyped-call]  # torch has no types for it
        scores = tb.token_scores(model, batch, chunk_logits=2**18)
        (scores.logprob + scores.entropy).sum().backward()
    # 944 tokens, in chunks of 256; the weights of the head are smaller: 4000 x 16 = 64,000.
    assert largest.numbers == 944 * 256

    with _Largest() as largest:  # type: ignore[no-untyped-call]  # as above
        entropy_changes(model, batch, chunk_logits=2**18)
    assert largest.numbers == 944 * 256


class _Peak(TorchDispatchMode):
    """Counts the bytes of what lives: of tensors that operations returned under it."""

    now = peak = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                self._see(tensor.untyped_storage())
        return found

    def _see(self, storage: torch.UntypedStorage) -> None:
        if not hasattr(storage, "counted"):
            storage.counted = True  # type: ignore[attr-defined]
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, storage.nbytes())

    def _forget(self, size: int) -> None:
        self.now -= size


def beyond_gradients(
    shape: tuple[int, int, int], how: ChunkMath, dtype: torch.dtype = torch.bfloat16
) -> int:
    """Return the most bytes beyond inputs and gradients, by tensors that have a shape alone."""
    tokens, words, width = shape
    with FakeTensorMode(), _Peak() as counted:  # type: ignore[no-untyped-call]  # as above
        hidden = torch.empty(tokens, width, dtype=dtype, requires_grad=True)
        weight = torch.empty(words, width, dtype=dtype, requires_grad=True)
        targets = torch.empty(tokens, dtype=torch.long)
        begin = counted.peak = counted.now
        scores = head_scores(hidden, OutputHead(weight), targets, chunk_math=how)
        (scores[0].sum() + scores[1].sum()).backward()
        gradients_of = counted.now - begin
        assert gradients_of >= hidden.nbytes + weight.nbytes
        beyond: int = counted.peak - begin - gradients_of
    return beyond


@pytest.mark.long
def test_16k_tokens_of_152k_words_take_less_than_300_mb() -> None:
    assert 100e6 < beyond_gradients((2**14, 152_064, 2048), TORCH) < 300e6


KERNELS = ChunkMath(lambda sums, _: sums, lambda *_: None, lambda *_: Tensor(), fused=True)
"""What the Triton kernels allocate, which is nothing."""


def test_16k_tokens_of_152k_words_take_less_than_700_mb_with_kernels() -> None:
    assert 500e6 < beyond_gradients((2**14, 151_936, 2048), KERNELS) < 700e6


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "shape",
    [(15_276, 151_936, 1024), (131_072, 151_936, 4096), (2**22, 32_000, 64), (1, 50_257, 8)],
)
def test_kernels_take_a_chunk_and_the_gradient_of_the_hidden_states(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    tokens, words, width = shape
    chunk = max(2**29, tokens * min(256, words) * dtype.itemsize)
    # The gradient is summed in float32; a CPU holds a product beside it; and each token's numbers.
    bound = chunk + (4 + dtype.itemsize) * tokens * width + 100 * tokens + 1000
    assert beyond_gradients(shape, KERNELS, dtype) < bound


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_chunks_are_whole_or_multiples_of_256_columns(
    dtype: torch.dtype, device: str, *, fused: bool
) -> None:
    sizes = (0, 1, 255, 15_276, 16_384, 16_385, 2**20)
    vocabularies = (1, 37, 255, 256, 257, 32_000, 50_257, 151_936)
    for tokens, words, bound in product(sizes, vocabularies, (None, 1, 1000, 2**20, 2**26)):
        hidden = torch.empty(tokens, 8, dtype=dtype, device=device)
        columns = chunk_columns(hidden, words, bound, fused=fused)
        assert columns == words or columns % 256 == 0
        assert 0 < columns <= words
        assert bound is None or columns <= 256 or columns * tokens <= bound


def test_a_chunk_is_what_it_was_on_a_cpu() -> None:
    """Where a vocabulary was one chunk it still is: other chunks have other last bits."""
    for tokens, words in ((16, 60), (2**14, 1024), (2**13 + 1, 2047), (0, 151_936)):
        assert chunk_columns(torch.empty(tokens, 1), words, None, fused=False) == words
    assert chunk_columns(torch.empty(2**13 + 1, 1), 2048, None, fused=False) == 1792


class _Outs(TorchDispatchMode):
    """Notes where products of matrices are put."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.outs: list[Tensor] = []

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.outs += [kwargs["out"]] if kwargs and "out" in kwargs else []
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("chunk_logits", "columns"), [(None, [599]), (1, [256, 256, 87])])
def test_rows_of_products_begin_at_multiples_of_256_but_on_a_cpu(
    chunk_logits: int | None, columns: list[int]
) -> None:
    for device in ("meta", "cpu"):
        hidden, weight = torch.ones(5, 8, device=device), torch.ones(599, 8, device=device)
        targets = torch.zeros(5, device=device, dtype=torch.long)
        with _Outs() as noted:
            head_scores(hidden, OutputHead(weight), targets, chunk_logits)
        assert [out.shape[1] for out in noted.outs] == columns
        aligned = {out.stride(0) % 256 for out in noted.outs} == {0}
        assert aligned == (device == "meta" or columns[0] == 256)


class _NoRoom(TorchDispatchMode):
    """A device that has no memory for larger tensors."""

    def __init__(self, numbers: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.numbers = numbers

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.new_empty.default and math.prod(args[1]) > self.numbers:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return func(*args, **(kwargs or {}))


def test_chunks_are_smaller_where_memory_is_short_and_it_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, batch = wide2().double(), padded()
    wanted = tb.token_scores(model, batch)
    with _NoRoom(17 * 300):
        found = tb.token_scores(model, batch)
    torch.testing.assert_close(found, wanted)
    assert [record.getMessage() for record in caplog.records] == [
        "cpu has no memory for the logits of 17 tokens x 600 columns, which log-probabilities take "
        "at a time: it is 256 columns now, which is slower and has other last bits"
    ]
    with _NoRoom(17 * 255), pytest.raises(torch.OutOfMemoryError):
        tb.token_scores(model, batch)


class _Products(TorchDispatchMode):
    """Counts products of matrices."""

    count = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in {torch.ops.aten.mm, torch.ops.aten.addmm}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("of_hidden", "of_weight"), [(True, True), (True, False), (False, True)])
def test_each_chunk_takes_a_product_and_one_more_with_each_gradient(
    *, of_hidden: bool, of_weight: bool
) -> None:
    hidden = torch.randn(5, 8, requires_grad=of_hidden)
    weight = torch.randn(WORDS, 8, requires_grad=of_weight)
    targets = torch.arange(5)
    with _Products() as counted:  # type: ignore[no-untyped-call]  # as above
        logprob, _ = head_scores(hidden, OutputHead(weight), targets, 1)
        assert counted.count == 3
        logprob.sum().backward()
    assert counted.count == 3 * (2 + of_hidden + of_weight)
    assert (hidden.grad is not None, weight.grad is not None) == (of_hidden, of_weight)


def test_scores_are_the_same_under_autocast() -> None:
    """The head computes in the type of what it is given, forward and backward."""
    both = []
    for enabled in (False, True):
        torch.manual_seed(0)
        hidden = torch.randn(5, 8, requires_grad=True)
        weight = torch.randn(WORDS, 8, requires_grad=True)
        bias = torch.randn(WORDS, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            scores = head_scores(hidden, OutputHead(weight, bias), torch.arange(5), 1)
            (scores[0] + scores[1]).sum().backward()
        both.append((*scores, hidden.grad, weight.grad, bias.grad))
    for one, other in zip(*both, strict=True):
        assert torch.equal(one, other)


def test_scores_without_a_gradient_keep_nothing() -> None:
    with torch.no_grad(), _Peak() as counted:  # type: ignore[no-untyped-call]  # as above
        hidden, weight = torch.randn(50, 8, requires_grad=True), torch.randn(WORDS, 8)
        targets = torch.arange(50)
        before = counted.now
        scores = head_scores(hidden, OutputHead(weight), targets)
    assert all(one.grad_fn is None for one in scores)
    assert counted.now - before == sum(one.nbytes for one in scores)


def test_an_adapter_on_the_head_is_refused_with_the_remedy() -> None:
    class Adapted(nn.Linear):
        pass

    model = wide2()
    model.lm_head = Adapted(16, WORDS, bias=False)
    with pytest.raises(InvalidArgumentError, match="no plain linear output head, but Adapted"):
        tb.token_scores(model, padded())


def test_logits_that_are_changed_behind_the_head_are_refused() -> None:
    class Bent(type(qwen2())):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            said = super().forward(*args, **kwargs)
            said.logits = said.logits * 2
            return said

    model = wide2()
    model.__class__ = Bent
    with pytest.raises(InvalidArgumentError, match="logits of Bent are not those of its output"):
        tb.token_scores(model, padded())


def test_no_chunk_is_an_error() -> None:
    with pytest.raises(InvalidArgumentError, match="chunk_logits=0"):
        tb.token_scores(wide2(), padded(), chunk_logits=0)


@pytest.mark.parametrize(("version", "fused"), [("2.9.1+cu130", 0), ("2.11.0+cu130", 2)])
def test_products_of_16_bits_are_added_in_a_gpu_only_where_torch_takes_a_sum_of_32(
    version: str, fused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)(version))
    calls = []

    def addmm(total: Tensor, *_: Tensor, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        assert (out is total, out_dtype) == (True, torch.float32)
        calls.append(total)
        return out

    monkeypatch.setattr(torch, "addmm", addmm)
    with FakeTensorMode():
        one = torch.ones(3, 4, dtype=torch.bfloat16, device="cuda")
        for _ in range(2):
            _add_product(torch.zeros(3, 3, device="cuda"), one, one.T)
    assert len(calls) == fused
