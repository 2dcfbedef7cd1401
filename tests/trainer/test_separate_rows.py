"""Rows of a micro-batch that change each other, and heads that do more than is known: refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import trinity_buffer as tb
from tests.trainer.qwen import SHAPE, qwen2, qwen3
from tests.trainer.wrapped import batch_of
from trinity_buffer.errors import InvalidArgumentError

SMALL: dict[str, Any] = SHAPE | {"vocab_size": 64, "hidden_size": 32}
FOUR_LAYERS: dict[str, Any] = SMALL | {
    "num_hidden_layers": 4,
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 16,
    "out_hidden_size": 32,
}
RUN_INTO_EACH_OTHER: dict[str, dict[str, Any]] = {
    "GptOssForCausalLM": SMALL | {"head_dim": 8, "num_local_experts": 4},
    "Qwen3_5ForCausalLM": FOUR_LAYERS,
    "Qwen3NextForCausalLM": FOUR_LAYERS | EXPERTS | {"shared_expert_intermediate_size": 16},
    "Qwen2_5_VLForConditionalGeneration": {
        "text_config": SMALL | {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
        "vision_config": VISION,
    },
    "OPTForCausalLM": {
        "vocab_size": 64,
        "hidden_size": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 32,
    },
    "MambaForCausalLM": {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "state_size": 4,
    },
    "JambaForCausalLM": SMALL
    | {
        "num_experts": 2,
        "mamba_d_state": 4,
        "use_mamba_kernels": False,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
    "BloomForCausalLM": {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "RwkvForCausalLM": {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2},
}
STAY_APART: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": SMALL | {"head_dim": 8},
    "Qwen3MoeForCausalLM": SMALL | EXPERTS | {"head_dim": 8, "num_hidden_layers": 6},
    "MixtralForCausalLM": SMALL | {"num_local_experts": 4},
    "Gemma2ForCausalLM": SMALL | {"head_dim": 8},
    "GPT2LMHeadModel": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4},
}


def made(family: str, config: dict[str, Any]) -> Any:
    """Return a model of this class with random weights; skip where transformers has none."""
    cls = getattr(transformers, family, None)
    if cls is None:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    torch.manual_seed(0)
    return cls(cls.config_class(**config)).eval()


def rows(*sizes: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 37, (size,), generator=generator) for size in sizes]


def scores(model: Any, made: list[Tensor], layout: str) -> Tensor:
    batch = batch_of(made, layout)
    batch.pop("attention_mask", None)
    return tb.token_scores(model, batch).logprob


@pytest.mark.parametrize("sizes", [(9,), (5, 9)], ids=["one row", "two rows"])
@pytest.mark.parametrize("family", RUN_INTO_EACH_OTHER)
def test_a_model_whose_packed_rows_run_into_each_other_is_refused_by_name(
    family: str, sizes: tuple[int, ...]
) -> None:
    model = made(family, RUN_INTO_EACH_OTHER[family])
    with pytest.raises(InvalidArgumentError, match=rf"^{family} .* packed .*layout=\"padded\""):
        scores(model, rows(*sizes), "packed")
    padded = scores(model, rows(9, 5), "padded")
    alone = scores(model, rows(9, 5)[1:], "padded")
    torch.testing.assert_close(padded[1, :5], alone[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", STAY_APART)
def test_a_model_that_keeps_rows_apart_is_scored_in_each_layout(
    family: str, dtype: torch.dtype
) -> None:
    model = made(family, STAY_APART[family]).to(dtype)
    packed, padded = (scores(model, rows(5, 9), layout) for layout in ("packed", "padded"))
    near = 0.05 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(packed, torch.cat([padded[0, :5], padded[1]]), rtol=0, atol=near)


@pytest.mark.parametrize("family", ["GptOssForCausalLM", "MambaForCausalLM", "OPTForCausalLM"])
def test_rounding_to_16_bits_hides_no_rows_that_run_into_each_other(family: str) -> None:
    model = made(family, RUN_INTO_EACH_OTHER[family]).bfloat16()
    with pytest.raises(InvalidArgumentError, match="not tell packed rows apart"):
        scores(model, rows(5), "packed")


def leaking(share: float) -> Any:
    """Return a model whose every token takes ``share`` of the mean over all that lie before it."""
    model = qwen2()

    def mix(_: nn.Module, __: Any, states: Tensor) -> Tensor:
        flat = states.flatten(0, 1)
        mean = flat.cumsum(0) / torch.arange(1, len(flat) + 1).unsqueeze(1)
        return states + share * mean.view_as(states)

    model.model.layers[0].mlp.register_forward_hook(mix)
    for weight in model.parameters():
        weight.data.mul_(3 if weight.dim() > 1 else 1)
    return model


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_leak_of_a_hundredth_of_a_nat_is_seen(layout: str) -> None:
    model, both = leaking(0.3), torch.stack(rows(9, 9))

    @torch.no_grad()
    def logprob(ids: Tensor) -> Tensor:
        logits: Tensor = model(ids).logits
        return logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])

    leak = float((logprob(both)[1] - logprob(both[1:])[0]).abs().max())
    assert 0.005 < leak < 0.015
    with pytest.raises(InvalidArgumentError, match="Qwen2ForCausalLM scores a row otherwise"):
        scores(model, rows(5, 9), layout)


def rotary(kind: str, **more: Any) -> Any:
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **more}
    return qwen3(rope_parameters=rope, max_position_embeddings=16, head_dim=8)


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_row_that_changes_the_positions_of_its_neighbours_is_refused(
    kind: str, layout: str
) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4} if kind == "longrope" else {}
    model = rotary(kind, original_max_position_embeddings=16, **factors)
    scores(model, rows(16, 5), layout)
    with pytest.raises(
        InvalidArgumentError, match=rf"Qwen3ForCausalLM \(rope_type '{kind}'\).*max_tokens=16"
    ):
        scores(model, rows(17, 5), layout)
    if kind == "longrope":
        scores(model, rows(17), layout)
    else:  # the next shorter row would be computed as this one
        with pytest.raises(InvalidArgumentError, match="max_tokens=16"):
            scores(model, rows(17), layout)


def test_packed_rows_that_chunks_of_attention_would_cut_are_refused() -> None:
    shape = SMALL | {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 64}
    model = made("Llama4ForCausalLM", shape | {"attention_chunk_size": 16})
    scores(model, rows(8, 8), "packed")
    with pytest.raises(InvalidArgumentError, match=r"within chunks of 16 tokens.*padded"):
        scores(model, rows(8, 9), "packed")
    scores(model, rows(8, 9), "padded")


HEADS: dict[str, Callable[[Tensor], Tensor]] = {
    "cap": lambda z: 50 * torch.tanh(z / 50),
    "scale": lambda z: z * 1.02,
    "later tokens": lambda z: torch.cat([z[:, :1], z[:, 1:] * 1.05], 1),
    "missing words": lambda z: z.index_fill(-1, torch.tensor([30]), -torch.inf),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", HEADS)
def test_what_a_model_does_to_its_logits_is_seen_however_small_they_are(
    change: str, dtype: torch.dtype
) -> None:
    class Bent(type(qwen2())):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            said = super().forward(*args, **kwargs)
            said.logits = HEADS[change](said.logits)
            return said

    model = qwen2()
    model.__class__ = Bent
    with pytest.raises(InvalidArgumentError, match="logits of Bent are not those of its output"):
        scores(model.to(dtype), rows(5), "padded")


def test_a_model_is_tried_out_once_in_each_layout_and_keeps_its_mode() -> None:
    model, calls = qwen3(), []
    model.train()
    model.model.layers[1].eval()
    model.model.register_forward_hook(lambda *_: calls.append(model.model.layers[0].training))
    for layout in ("padded", "packed"):
        calls.clear()
        for _ in range(2):
            scores(model, rows(5, 9), layout)
        assert calls == [False, False, False, True, True]
    assert not model.model.layers[1].training
