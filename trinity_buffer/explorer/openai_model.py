"""A model behind an inference server: what a rollout talks to, with ids and log-probs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, Self

from trinity_buffer.errors import InferenceServerError, InvalidArgumentError
from trinity_buffer.explorer.chat_format import ChatFormat
from trinity_buffer.explorer.conversation import Completion
from trinity_buffer.explorer.server import (
    ASKED_FOR_CHAT,
    ASKED_FOR_TEXT,
    ServedWeights,
    Server,
    changes,
    completion_of,
    generated,
    pinned,
    require_sampled,
    require_texts,
    require_whole,
)

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]


class OpenAIModel:
    """Asks vLLM by the OpenAI dialect, or SGLang by ``/generate``; close it, or enter it.

    Each `Completion` says which weights made it, and what its log-probs mean. By default vLLM's are
    those before temperature, top-p, penalties and the like, which are the log-probs of what was
    sampled only if all of these are neutral. So they are set to neutral values unless ``sampling``
    says otherwise, whatever the model's generation_config says.

    Args:
        url: of the server, such as ``http://127.0.0.1:8000/v1``.
        model: its name there; None: the only one.
        dialect: ``"vllm"``, or ``"sglang"``, which needs a tokenizer for all but token ids.
        tokenizer: of transformers, or its folder; for SGLang.
        logprobs_mode: what the server was started with (vLLM's ``--logprobs-mode``).
        require_ids: refuse an answer without ids and log-probs, which cannot be trained.
        sampling: keys of every request, such as ``temperature``, ``top_p``, ``max_tokens``,
            ``stop``; further ``api_key`` and ``timeout_s`` of a `Server`. With ``require_ids``,
            keys that could restrict the choice of tokens are refused.

    Raises:
        InvalidArgumentError: log-probs would not be those of what is sampled.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        dialect: Literal["vllm", "sglang"] = "vllm",
        tokenizer: Any = None,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        require_ids: bool = True,
        **sampling: Any,
    ) -> None:
        options = {k: sampling.pop(k) for k in ("api_key", "timeout_s") if k in sampling}
        self.server = Server(url, **options)
        self.name = model
        self._dialect = dialect
        self._logprobs_mode = logprobs_mode
        self._require_ids = require_ids
        self._sampling = pinned(sampling)
        self._marks: dict[str, Any] = {
            "logprobs_mode": logprobs_mode,
            "sampling": changes(self._sampling),
        }
        if isinstance(tokenizer, str):
            from trinity_buffer.explorer.local_model import load_tokenizer  # noqa: PLC0415 - torch

            tokenizer = load_tokenizer(tokenizer)
        self._tokenizer = tokenizer
        self._weights = ServedWeights(self.server)
        if require_ids:
            require_sampled(self._sampling, logprobs_mode)
            if (choices := sampling.get("n") or 1) != 1:
                raise InvalidArgumentError(
                    f"n={choices!r:.40}: a call returns one answer; call it so often"
                )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
    ) -> Completion:
        """Return what the model says next in a conversation.

        Raises:
            InferenceServerError: no answer, or one without ids and log-probs.
        """
        if self._dialect == "sglang":
            ids, text = self._format.prompt(messages, tools)
            made = await self.complete(ids, max_tokens=max_tokens)
            return replace(self._format.read(made, tools), prompt_text=text)
        if self._require_ids:
            require_texts(messages)
        body = {"messages": [dict(message) for message in messages], **ASKED_FOR_CHAT}
        if tools:
            body["tools"] = [dict(tool) for tool in tools]
        return await self._asked("/v1/chat/completions", body, max_tokens)

    async def complete(
        self, prompt: str | Sequence[int], *, max_tokens: int | None = None
    ) -> Completion:
        """Return how the model continues ``prompt``, a text or token ids.

        Raises:
            InferenceServerError: no answer, or one without ids and log-probs.
        """
        ids_or_text: Any = prompt if isinstance(prompt, str) else list(prompt)
        if self._dialect != "sglang":
            body = {"prompt": ids_or_text, **ASKED_FOR_TEXT}
            return await self._asked("/v1/completions", body, max_tokens)
        if isinstance(ids_or_text, str):
            ids_or_text = list(self._require_tokenizer().encode(ids_or_text))
        sampling = {**self._sampling}
        usual = sampling.pop("max_tokens", None)
        if (most := usual if max_tokens is None else max_tokens) is not None:
            sampling["max_new_tokens"] = most
        body = {"input_ids": ids_or_text, "sampling_params": sampling, "return_logprob": True}
        answer = await self.server.post("/generate", body)
        made = replace(generated(answer, ids_or_text), **self._marks)
        if self._require_ids:
            require_whole(answer, [made], self.server.root)
        return made

    async def close(self) -> None:
        """Close the connections."""
        await self.server.close()

    async def _asked(
        self, path: str, body: Mapping[str, Any], max_tokens: int | None
    ) -> Completion:
        """Return the answer of vLLM, which says what weights made it, if it may be trained."""
        if self.name is None:
            served = await self.server.get("/v1/models") or {}
            names = [str(model["id"]) for model in served.get("data", [])]
            if len(names) != 1:
                raise InvalidArgumentError(
                    f"{self.server.root} serves {', '.join(names) or 'no model'}: say model=NAME"
                )
            (self.name,) = names
        limit = {} if max_tokens is None else {"max_tokens": max_tokens}
        asked = {"model": self.name, **self._sampling, **limit, **body}
        if self._require_ids:
            require_sampled(asked, self._logprobs_mode)
        before = await self._weights.now()
        answer = await self.server.post(path, asked)
        choices = answer.get("choices") or []
        if not choices:
            raise InferenceServerError(f"the server answered without a choice: {str(answer)[:300]}")
        made = completion_of(answer, choices[0])
        if self._require_ids:
            require_whole(answer, [made], self.server.root)
        (made,) = await self._weights.stamped([made], before, **self._marks)
        return made

    @cached_property
    def _format(self) -> ChatFormat:
        tokenizer = self._require_tokenizer()
        end = tokenizer.eos_token_id
        return ChatFormat(tokenizer, [] if end is None else [end])

    def _require_tokenizer(self) -> Any:
        if self._tokenizer is None:
            raise InvalidArgumentError(
                "SGLang's /generate takes token ids: give OpenAIModel a tokenizer="
            )
        return self._tokenizer
