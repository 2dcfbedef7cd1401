"""A causal language model of transformers, sampled from in this very process."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trinity_buffer.algorithm.arguments import require
from trinity_buffer.errors import CheckpointError, InvalidArgumentError
from trinity_buffer.explorer.conversation import ChatFormat, Completion, Messages, Tools, decoded
from trinity_buffer.lazy import extra
from trinity_buffer.pipeline.train.step import settle_cublas
from trinity_buffer.sampling import LEAST_TEMPERATURE


@dataclass(eq=False, slots=True)
class _Asked:
    """A prompt that waits for its completion, which has tokens once it is made, or an error."""

    prompt: list[int]
    max_tokens: int
    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    error: InvalidArgumentError | None = None

    @property
    def waits(self) -> bool:
        """Whether it was not answered yet."""
        return not self.tokens and self.error is None


class LocalModel:
    """Samples from a causal language model of transformers: what a rollout talks to.

    Calls that wait at the same time are answered in one batch, off the event loop. For large
    models an inference server is faster: see `OpenAIModel`, which is called in the same way.

    Args:
        model: of transformers, or the folder to load it from.
        tokenizer: likewise; None: from the folder of the model.
        temperature: of what is sampled, recorded with it; 0 takes the likeliest token, which no
            trainer takes for a sample.
        max_tokens: of a completion, where a call does not say.
        max_rows: completions that are sampled at once.

    Raises:
        InvalidArgumentError: there is no such model, or no such temperature or limit.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        temperature: float = 1.0,
        max_tokens: int = 256,
        max_rows: int = 256,
    ) -> None:
        if temperature != 0 and not LEAST_TEMPERATURE <= temperature < math.inf:
            raise InvalidArgumentError(
                f"temperature={temperature}: {LEAST_TEMPERATURE} or more, or 0 for the likeliest "
                "tokens"
            )
        for name, value in (("max_tokens", max_tokens), ("max_rows", max_rows)):
            _require_count(name, value)
        if isinstance(tokenizer, str | Path):
            tokenizer = load_tokenizer(tokenizer)
        if isinstance(model, str | Path):
            tokenizer = load_tokenizer(model) if tokenizer is None else tokenizer
            model = load_causal_lm(model)
        settle_cublas()  # a trainer in this process may come later
        self.model = model.eval()
        self.tokenizer = tokenizer
        self._temperature = temperature
        self._max_tokens = max_tokens
        self._max_rows = max_rows
        self._ends = _ends_of(model, tokenizer)
        self._format = ChatFormat(tokenizer, self._ends)
        self._waiting: list[_Asked] = []
        self._turn = anyio.Lock()

    def load(self, uri: str) -> Self:
        """Return such a model with the weights that were published at ``uri``.

        Raises:
            CheckpointError: they are not there.
        """
        try:
            model = load_causal_lm(uri).to(self.model.device)
        except InvalidArgumentError as error:
            raise CheckpointError(str(error)) from error
        options: dict[str, Any] = {"temperature": self._temperature, "max_tokens": self._max_tokens}
        # Checkpoints hold no generation_config, which may name further ends.
        model.generation_config = getattr(self.model, "generation_config", None)
        return type(self)(model, self.tokenizer, max_rows=self._max_rows, **options)

    async def chat(
        self, messages: Messages, *, tools: Tools = (), max_tokens: int | None = None
    ) -> Completion:
        """Return the model's next turn in a conversation, by its chat template.

        Tools that it calls are in ``tool_calls``; what of its text cannot be read as a call stays
        text. Messages of `Completion.message` keep the tokens that were sampled, unless the
        template writes earlier messages otherwise than before.

        Raises:
            InvalidArgumentError: the template cannot write such messages, or they hold more than
                texts.
        """
        ids, text = self._format.prompt(messages, tools)
        made = await self.complete(ids, max_tokens=max_tokens)
        return replace(self._format.read(made, tools), prompt_text=text)

    async def complete(
        self, prompt: str | Sequence[int], *, max_tokens: int | None = None
    ) -> Completion:
        """Return how the model continues ``prompt``, a text or token ids.

        Raises:
            InvalidArgumentError: the prompt is empty, or holds a token that the model lacks.
        """
        ids = prompt_ids(self.tokenizer, prompt) if isinstance(prompt, str) else list(prompt)
        embeddings = getattr(self.model, "get_input_embeddings", lambda: None)()
        size = getattr(embeddings, "num_embeddings", math.inf)
        require(bool(ids), "prompt", prompt, "hold a token, such as the tokenizer's bos_token")
        for token in (token for token in ids if not 0 <= token < size):
            raise InvalidArgumentError(  # on a GPU it would end the process
                f"the prompt holds {token}: it must hold tokens of the model, 0 to {size - 1}. "
                "Give the model its own tokenizer, or call its resize_token_embeddings first"
            )
        most = self._max_tokens if max_tokens is None else max_tokens
        _require_count("max_tokens", most)
        asked = _Asked(ids, most)
        self._waiting.append(asked)
        try:
            await anyio.lowlevel.checkpoint()  # who asks at the same time is answered together
            async with self._turn:
                if asked.waits:
                    batch = [other for other in self._waiting if other.waits]
                    await anyio.to_thread.run_sync(self._answer, batch[: self._max_rows])
        finally:
            self._waiting.remove(asked)
        if asked.error is not None:
            raise asked.error
        return Completion(
            prompt_ids=ids,
            token_ids=asked.tokens,
            logprobs=asked.logprobs,
            text=decoded(self.tokenizer, asked.tokens, skip_special_tokens=True),
            finish_reason="stop" if asked.tokens[-1] in self._ends else "length",
            sampling=None if self._temperature == 1 else {"temperature": self._temperature},
        )

    def _answer(self, batch: Sequence[_Asked]) -> None:
        """Sample for each of ``batch``; by itself, where one of them cannot be answered."""
        try:
            with _evaluated(self.model):
                made = self._sampled(batch)
        except InvalidArgumentError as error:
            for asked in batch if len(batch) > 1 else ():
                self._answer([asked])
            if len(batch) == 1:
                batch[0].error = error
            return
        for asked, (tokens, logprobs) in zip(batch, made, strict=True):
            asked.tokens, asked.logprobs = tokens, logprobs

    @torch.inference_mode()
    def _sampled(self, batch: Sequence[_Asked]) -> list[tuple[list[int], list[float]]]:
        """Return the tokens of each of ``batch`` until it has ended, and their log-probs."""
        # Left-padded: the last position of every row is then the one to sample from.
        pad = partial(pad_sequence, batch_first=True, padding_side="left")
        prompts = [torch.tensor(asked.prompt, dtype=torch.long) for asked in batch]
        ids = pad(prompts).to(self.model.device)
        mask = pad([torch.ones_like(prompt) for prompt in prompts]).to(self.model.device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        cache = None
        made: list[tuple[list[int], list[float]]] = [([], []) for _ in batch]
        unfinished = set(range(len(batch)))
        while unfinished:
            kept = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
            try:
                out = self.model(input_ids=ids, attention_mask=mask, position_ids=positions, **kept)
            except IndexError as error:  # of a table of positions, as GPT-2 has one
                raise InvalidArgumentError(
                    f"the model has no position {int(positions.max())}: give it shorter prompts, "
                    "or a smaller max_tokens"
                ) from error
            cache = out.past_key_values
            drawn, scores = self._drawn(out.logits[:, -1].float())
            pairs = list(zip(drawn.tolist(), scores.tolist(), strict=True))
            for row in sorted(unfinished):
                tokens, logprobs = made[row]
                tokens.append(pairs[row][0])
                logprobs.append(pairs[row][1])
                if tokens[-1] in self._ends or len(tokens) >= batch[row].max_tokens:
                    unfinished.remove(row)
            ids = drawn[:, None]
            mask = torch.cat([mask, mask.new_ones(len(batch), 1)], 1)
            positions = positions[:, -1:] + 1
        return made

    def _drawn(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return a token of each row of ``[B, V]``, and its log-prob."""
        # At temperature 0 the log-probs are those at 1, which is what a trainer would score.
        logprobs = (logits / (self._temperature or 1.0)).log_softmax(-1)
        if self._temperature:
            tokens = torch.multinomial(logprobs.exp(), 1)[:, 0]
        else:
            tokens = logprobs.argmax(-1)
        return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


@contextmanager
def _evaluated(model: Any) -> Iterator[None]:
    """Compute without dropout and with a cache, though a loop may train the model in between."""
    trained = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in trained:
            module.training = True


def _require_count(name: str, value: Any) -> None:
    is_count = isinstance(value, int | np.integer) and not isinstance(value, bool) and value >= 1
    require(bool(is_count), name, value, "be an integer, at least 1")


def load_causal_lm(path: str | Path) -> Any:
    """Return the model in the folder ``path``, in the precision of its weights.

    Raises:
        InvalidArgumentError: there is none, or transformers is not installed.
    """
    return _loaded("AutoModelForCausalLM", path)


def load_tokenizer(path: str | Path) -> Any:
    """Return the tokenizer in the folder ``path``.

    Raises:
        InvalidArgumentError: there is none, or transformers is not installed.
    """
    tokenizer = _loaded("AutoTokenizer", path)
    # transformers makes one of config.json alone, where there are no files of a tokenizer.
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise InvalidArgumentError(
            f"model {str(path)!r}: its tokenizer knows no tokens; save it into the folder of the "
            "model (tokenizer.json and tokenizer_config.json)"
        )
    return tokenizer


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a prompt in plain text, behind those that begin texts in ``tokenizer``.

    They are not there twice where the text begins with them, and what ends texts is left out.
    """
    try:
        ids, letter = (list(tokenizer.encode(t, add_special_tokens=False)) for t in (text, "a"))
    except TypeError:  # no tokenizer of transformers
        return list(tokenizer.encode(text))
    whole = list(tokenizer.encode("a"))
    at = next((n for n in range(len(whole)) if whole[n : n + len(letter)] == letter), 0)
    return ids if ids[:at] == whole[:at] else whole[:at] + ids


def _loaded(kind: str, path: str | Path) -> Any:
    transformers = extra("transformers", "hf")
    try:
        return getattr(transformers, kind).from_pretrained(str(path))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        why = str(error).strip().splitlines() or [type(error).__name__]
        raise InvalidArgumentError(
            f"model {str(path)!r}: {kind} finds nothing to load there ({why[0]})"
        ) from error


def _ends_of(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the tokens after which a completion ends."""
    ends: set[int] = set()
    generation = getattr(model, "generation_config", None)  # gpt-oss ends a call by it alone
    for source in (tokenizer, model.config, generation):
        token = getattr(source, "eos_token_id", None)
        ends.update(token if isinstance(token, list | tuple) else [] if token is None else [token])
    return frozenset(ends)
