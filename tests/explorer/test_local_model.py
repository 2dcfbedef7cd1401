"""What a local model says, and that its trainer would score it the same."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

from tests.explorer.vllm_dialect import VLLM, served
from trinity_buffer.demo.tiny_model import make_tiny_model
from trinity_buffer.errors import CheckpointError, InvalidArgumentError
from trinity_buffer.explorer.conversation import Completion, Conversation, as_texts
from trinity_buffer.explorer.local_model import LocalModel
from trinity_buffer.explorer.server import OpenAIModel
from trinity_buffer.trainer.causal_lm import CausalLM
from trinity_buffer.trainer.token_scores import token_scores


async def answers(model: LocalModel, prompts: list[str], max_tokens: int = 6) -> list[Completion]:
    """Ask all at once."""
    said: dict[int, Completion] = {}

    async def ask(number: int, prompt: str) -> None:
        message = {"role": "user", "content": prompt}
        said[number] = await model.chat([message], max_tokens=max_tokens)

    async with anyio.create_task_group() as group:
        for number, prompt in enumerate(prompts):
            group.start_soon(ask, number, prompt)
    return [said[number] for number in range(len(prompts))]


PROMPTS = ["a", "", "longer than the others", "é"]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
async def test_recorded_log_probs_are_what_a_trainer_scores(temperature: float, tiny: Path) -> None:
    model = LocalModel(tiny, temperature=temperature)
    torch.manual_seed(3)
    for said in await answers(model, PROMPTS):
        assert said.sampling == (None if temperature == 1 else {"temperature": temperature})
        ids = torch.tensor([[*said.prompt_ids, *said.token_ids]])
        batch = {"input_ids": ids, "temperature": torch.full(ids.shape, temperature)}
        scored = token_scores(model.model, batch).logprob[0, len(said.prompt_ids) :]
        assert said.logprobs is not None
        torch.testing.assert_close(scored, torch.tensor(said.logprobs), atol=1e-5, rtol=0)


async def test_who_asks_together_hears_what_each_would_hear_alone(tiny: Path) -> None:
    model = LocalModel(tiny, temperature=0)
    together = await answers(model, PROMPTS)
    alone = [(await answers(model, [prompt]))[0] for prompt in PROMPTS]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    few = LocalModel(model.model, model.tokenizer, temperature=0, max_rows=3)
    assert [c.token_ids for c in await answers(few, PROMPTS)] == [c.token_ids for c in alone]


async def test_who_leaves_while_all_are_answered_takes_nobody_along(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, begun, has_left = LocalModel(tiny), threading.Event(), threading.Event()
    drawn = model._drawn

    def held(logits: torch.Tensor) -> Any:
        begun.set()
        assert has_left.wait(30)
        return drawn(logits)

    monkeypatch.setattr(model, "_drawn", held)
    said: list[Completion] = []

    async def ask(scope: anyio.CancelScope) -> None:
        with scope:
            said.append(await model.complete("x", max_tokens=2))

    async with anyio.create_task_group() as group:
        leaving = anyio.CancelScope()
        group.start_soon(ask, anyio.CancelScope())
        group.start_soon(ask, leaving)
        await anyio.to_thread.run_sync(begun.wait, 30)
        leaving.cancel()
        await anyio.sleep(0.05)
        has_left.set()
    assert len(said) == 1
    assert len((await model.complete("x")).token_ids) > 0


async def test_a_completion_ends_with_the_token_that_ends_it(tiny: Path) -> None:
    model = LocalModel(tiny, temperature=0)
    end = model.tokenizer.eos_token_id
    with torch.no_grad():  # a head that says nothing else
        model.model.lm_head.weight[:] = 0
        model.model.lm_head.weight[end] = model.model.model.norm.weight
        model.model.model.embed_tokens.weight[:] = 1
    (said,) = await answers(model, ["x"])
    assert (said.token_ids, said.finish_reason, said.text) == ([end], "stop", "")


async def test_a_model_with_other_weights_keeps_its_tokenizer(tiny: Path, tmp_path: Path) -> None:
    model = LocalModel(tiny, temperature=0)
    other = tmp_path / "weights"
    make_tiny_model(tmp_path / "made", seed=1, width=16, layers=1, heads=2)
    LocalModel(tmp_path / "made").model.save_pretrained(other)  # as a trainer publishes it
    loaded = model.load(str(other))
    assert (await answers(loaded, PROMPTS)) != (await answers(model, PROMPTS))
    with pytest.raises(CheckpointError, match="nothing to load there"):
        model.load(str(tmp_path / "gone"))


def test_a_model_with_other_weights_computes_where_the_first_one_did(tiny: Path) -> None:
    model = LocalModel(tiny)
    model.model.to("meta")
    assert model.load(str(tiny)).model.device.type == "meta"


async def test_a_model_with_other_weights_ends_where_the_first_one_did(
    tiny: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny, tmp_path / "tiny")
    GenerationConfig(eos_token_id=[5, 6]).save_pretrained(tmp_path / "tiny")
    model = LocalModel(tmp_path / "tiny")
    CausalLM(model.model).save(tmp_path / "published")
    loaded = model.load(str(tmp_path / "published"))
    with torch.no_grad():  # a head that says one thing
        loaded.model.lm_head.weight[:] = 0
        loaded.model.lm_head.weight[6] = 1e3
        loaded.model.model.norm.weight[:] = 1
        loaded.model.model.embed_tokens.weight[:] = 1
    (said,) = await answers(loaded, ["x"])
    assert (said.token_ids, said.finish_reason) == ([6], "stop")


async def test_pictures_are_refused(tiny: Path) -> None:
    model = LocalModel(tiny)
    text, picture = {"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}
    said = await model.chat([{"role": "user", "content": [text]}])
    assert said.prompt_ids == (await model.chat([{"role": "user", "content": "a"}])).prompt_ids
    with pytest.raises(InvalidArgumentError, match=r"messages\[0\] holds a part 'image_url'"):
        await model.chat([{"role": "user", "content": [text, picture]}])


@pytest.mark.parametrize(("prompt", "wrong"), [([5, 1000], "1000"), ([5, -1], "-1")])
async def test_a_prompt_of_other_tokens_than_the_models_is_refused(
    prompt: list[int], wrong: str, tiny: Path
) -> None:
    model = LocalModel(tiny)
    with pytest.raises(InvalidArgumentError, match=f"holds {wrong}: .* 0 to 260.*own tokenizer"):
        await model.complete(prompt)


@pytest.mark.parametrize("messages", ["hi", ["hi"], {"role": "user", "content": "hi"}])
async def test_what_is_no_prompt_is_refused(messages: Any, tiny: Path) -> None:
    model = LocalModel(tiny)
    with pytest.raises(InvalidArgumentError, match=r"prompt must hold a token, .* bos_token"):
        await model.complete("")
    with pytest.raises(InvalidArgumentError, match="begins with a list of messages, such as"):
        await model.chat(messages)
    async with OpenAIModel("http://127.0.0.1:9", model="m") as served_model:
        with pytest.raises(InvalidArgumentError, match="begins with a list of messages, such as"):
            await served_model.chat(messages)


def test_messages_may_come_one_by_one() -> None:
    said = [{"role": "user", "content": "a"}]
    assert as_texts(iter(said)) == Conversation(iter(said)).messages == said  # type: ignore[arg-type]


class Letters:
    """A tokenizer that is none of transformers."""

    eos_token_id = None

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 32 for letter in text]

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return " ".join(map(str, ids))


async def test_positions_that_a_model_lacks_are_named() -> None:
    """A tokenizer of another kind begins texts as it does."""
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 1, "bos_token_id": None, "eos_token_id": None}
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, **sizes))
    model = LocalModel(gpt2, Letters(), max_tokens=4)
    assert (await model.complete("abcd")).prompt_ids == [1, 2, 3, 4]
    asked = [model.complete(prompt) for prompt in ("abcd", "abcdef", "abcd")]
    first, wrong, last = await asyncio.gather(*asked, return_exceptions=True)
    assert str(wrong).startswith("the model has no position 8: give it shorter prompts")
    for said in (first, last):  # at the same time, and not to blame
        assert isinstance(said, Completion)
        assert len(said.token_ids) == 4


async def test_a_model_that_is_trained_between_calls_says_nothing_with_dropout() -> None:
    """Nor without a cache, as one that checkpoints its activations."""
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 1, "bos_token_id": None, "eos_token_id": None}
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, embd_pdrop=0.5, **sizes))
    model = LocalModel(gpt2, Letters(), max_tokens=4)
    gpt2.train()
    gpt2.transformer.wte.eval()
    said = await model.complete("abcd")
    assert [name for name, own in gpt2.named_modules() if not own.training] == ["transformer.wte"]
    gpt2.eval()
    scored = token_scores(gpt2, {"input_ids": torch.tensor([[*said.prompt_ids, *said.token_ids]])})
    assert said.logprobs is not None
    torch.testing.assert_close(scored.logprob[0, 4:], torch.tensor(said.logprobs))


@pytest.mark.parametrize("temperature", [-1.0, 0.001, math.inf])
def test_a_temperature_that_servers_do_not_sample_at_is_refused(
    temperature: float, tiny: Path
) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"temperature={temperature}: 0.01 or more"):
        LocalModel(tiny, temperature=temperature)


@pytest.mark.parametrize("text", ["hel", "<|user|>hel"])
@pytest.mark.parametrize("where", ["here", "sglang"])
async def test_a_prompt_in_plain_text_begins_as_its_tokenizer_begins_texts(
    tiny: Path, tmp_path: Path, text: str, where: str
) -> None:
    """Once, where the text has that token already, and without one that ends texts."""
    special = [("<|user|>", 258), ("<|end|>", 256)]
    added = TemplateProcessing(single="<|user|> $A <|end|>", special_tokens=special)
    folder = shutil.copytree(tiny, tmp_path / "tiny")
    file = folder / "tokenizer.json"
    held = {**json.loads(file.read_text()), "post_processor": json.loads(added.__getstate__())}
    file.write_text(json.dumps(held))
    if where == "here":
        said = await LocalModel(folder).complete(text, max_tokens=1)
        assert list(said.prompt_ids) == [258, *map(ord, "hel")]
        return
    vllm = VLLM(tiny)
    with served(vllm.app()) as url:
        async with OpenAIModel(url, dialect="sglang", tokenizer=str(folder)) as asked:
            await asked.complete(text)
    assert vllm.asked[0]["input_ids"] == [258, *map(ord, "hel")]


async def test_a_limit_may_be_an_integer_of_numpy(tiny: Path) -> None:
    limits: Any = {"max_rows": np.int64(2), "max_tokens": np.int32(1)}
    assert len((await LocalModel(tiny, **limits).complete("a")).token_ids) == 1


@pytest.mark.parametrize("limit", [0, -1, True, 2.5, math.nan])
@pytest.mark.parametrize("name", ["max_tokens", "max_rows"])
async def test_a_limit_is_a_number_of_at_least_1(name: str, limit: Any, tiny: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{name} must be an integer, at least 1"):
        LocalModel(tiny, **{name: limit})
    with pytest.raises(InvalidArgumentError, match="max_tokens must be an integer, at least 1"):
        await LocalModel(tiny).complete("a", max_tokens=limit)
