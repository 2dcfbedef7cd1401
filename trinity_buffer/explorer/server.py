"""An inference server, as JSON over HTTP, and the model behind it that a rollout talks to.

Its answers, with ids and log-probs, are read into completions: those of vLLM's OpenAI dialect, and
of SGLang's own. Weights that a trainer publishes are pushed to it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NoReturn, Self, get_args

import anyio
import anyio.to_thread

from trinity_buffer.algorithm.arguments import one_of, require
from trinity_buffer.errors import InferenceServerError, InvalidArgumentError, RefusedRequestError
from trinity_buffer.explorer import conversation
from trinity_buffer.explorer.conversation import Completion, Messages, Tools, understanding
from trinity_buffer.explorer.explore import use_newest
from trinity_buffer.explorer.local_model import load_tokenizer, prompt_ids
from trinity_buffer.lazy import extra
from trinity_buffer.pipeline.coordination.waiting import task_group
from trinity_buffer.pipeline.store import Experiment, PublishedPolicy
from trinity_buffer.pipeline.train.checkpoint import being_read, require_digest
from trinity_buffer.sampling import NEUTRAL, not_neutral

_LOG = logging.getLogger(__name__)

ASK_AGAIN_S = 10.0
"""So long a server that does not name its weights is not asked for them again."""

WAIT_AND_ASK_AGAIN = (408, 429)
"""Statuses 4xx that blame the server's load, not the request."""

Dialect = Literal["vllm", "sglang"]

VERSION_AT: dict[Dialect, tuple[str, ...]] = {
    "vllm": ("/weight_info",),
    "sglang": ("/model_info", "/get_model_info"),
}
"""Where a server names its weights; the newest place first."""


class Server:
    """Talks JSON with an inference server; close it, or enter it as a context.

    Args:
        url: with or without the ``/v1`` at its end; control endpoints are beside that.
        api_key: sent as a bearer token.
        timeout_s: of one answer.

    Raises:
        InvalidArgumentError: ``url`` is not one.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise InvalidArgumentError(f"{url!r} is no URL of a server: write http://HOST:PORT/v1")
        self.root = url.rstrip("/").removesuffix("/v1")
        self._httpx = extra("httpx2", "server")
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        # No pool limit: who calls has a limit of rollouts, and two would wait for each other.
        # Servers close an idle connection after five seconds: not while we take it up again.
        limits = self._httpx.Limits(max_connections=None, keepalive_expiry=2.0)
        timeout = self._httpx.Timeout(timeout_s, connect=10.0)
        self._client = self._httpx.AsyncClient(headers=headers, timeout=timeout, limits=limits)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def post(self, path: str, body: Mapping[str, Any] | None = None, **query: str) -> Any:
        """Return the answer to a POST of ``body`` to ``path``.

        Raises:
            InferenceServerError: it cannot be reached, or refuses (see `RefusedRequestError`).
        """
        return _answer_of(await self._sent("POST", path, body or {}, **query))

    async def get(self, path: str) -> Any:
        """Return the answer to a GET of ``path``; None where there is no such path.

        Raises:
            InferenceServerError: it cannot be reached, or refuses.
        """
        # Servers differ in their control endpoints: one that is not there is an answer.
        answer = await self._sent("GET", path)
        return None if answer.status_code == 404 else _answer_of(answer)

    async def _sent(self, method: str, path: str, body: Any = None, **query: str) -> Any:
        url = f"{self.root}{path}"
        try:
            return await self._client.request(method, url, json=body, params=query or None)
        except (self._httpx.HTTPError, OSError) as error:
            raise self._unreachable(url, error) from error

    def _unreachable(self, url: str, error: Exception) -> InferenceServerError:
        message = f"{url}: {type(error).__name__} {error}".rstrip()
        return InferenceServerError(f"{message}; is the server up?")

    async def passed(self, path: str, body: Mapping[str, Any]) -> tuple[int, Any, dict[str, str]]:
        """Return status, answer and ``Retry-After`` of a POST, whatever the status is.

        Raises:
            InferenceServerError: it cannot be reached, or an answer that it gives is no JSON.
        """
        return _passed(await self._sent("POST", path, body))

    async def chunks(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any]:
        """Yield what `passed` returns, without an answer if that is streamed; then its chunks.

        Raises:
            InferenceServerError: it cannot be reached, or breaks off before ``[DONE]``.
        """
        url = f"{self.root}{path}"
        is_done = False
        try:
            async with self._client.stream("POST", url, json=dict(body)) as answer:
                if answer.is_error:
                    await answer.aread()
                    yield _passed(answer)
                    return
                yield answer.status_code, None, {}
                async for line in _lines_of(answer):
                    data = line.removeprefix(b"data: ")
                    is_done = is_done or data == b"[DONE]"
                    if data not in (line, b"[DONE]"):
                        yield json.loads(data)
        except (self._httpx.HTTPError, OSError, ValueError) as error:
            raise self._unreachable(url, error) from error
        if not is_done:
            raise InferenceServerError(f"{url}: its stream ended before [DONE]: ask again")

    async def weight_version(self, dialect: Dialect = "vllm") -> str | None:
        """Return the name of the weights that the server holds now; None: it does not tell.

        vLLM tells with ``VLLM_SERVER_DEV_MODE=1``.
        """
        for path in VERSION_AT[dialect]:
            answer = await self.get(path)
            version = answer.get("weight_version") if isinstance(answer, Mapping) else None
            if version is not None:
                return str(version)
        return None

    async def weight_checksum(self) -> str | None:
        """Return a digest of the checksums that vLLM computes of its weights; None: it does not."""
        try:
            answer = await self.post("/weight_checker", {"action": "checksum"})
        except InferenceServerError:
            return None
        checksums = answer.get("checksums") if isinstance(answer, Mapping) else None
        if not checksums:
            return None
        return hashlib.sha256(json.dumps(checksums, sort_keys=True).encode()).hexdigest()

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


class ServedWeights:
    """Whose weights a server of vLLM's answers with, request by request.

    Args:
        server: which is asked.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._checksums: dict[str, str | None] = {}
        self._silent_until = 0.0

    async def now(self) -> str | None:
        """Return the version of the weights; None: the server does not tell, with one warning.

        It is asked again after `ASK_AGAIN_S`: it may have been restarted in another mode.

        Raises:
            InferenceServerError: the server cannot be reached, or failed.
        """
        if time.monotonic() < self._silent_until:
            return None
        try:
            version = await self._server.weight_version()
        except RefusedRequestError:
            version = None
        if version is None:
            self._silent_until = time.monotonic() + ASK_AGAIN_S
            conversation.warn_once(
                "%s does not say which weights it answers with (/weight_info; vLLM does with "
                "VLLM_SERVER_DEV_MODE=1): recorded without a policy version, its answers never "
                "count as stale",
                self._server.root,
            )
        elif version not in self._checksums:
            self._checksums[version] = None
            self._checksums[version] = await self._server.weight_checksum()
        return version

    async def stamped(
        self, completions: Sequence[Completion], before: str | None, **marks: Any
    ) -> list[Completion]:
        """Return the choices of an answer with the version ``before`` it, and a later one.

        Args:
            marks: further fields of them.
        """
        after = before if before is None else await self.now()
        marks["weight_version"] = before
        marks["later_weight_version"] = None if after == before else after
        marks["weight_checksum"] = None if before is None else self._checksums.get(before)
        return [replace(made, **marks) for made in completions]


def _refusal(url: str, status: int, text: str) -> InferenceServerError:
    """Return the error for a failed request; one refused with 4xx is not sent again."""
    message = f"{url}: {status} {text[:300]}"
    if not 400 <= status < 500 or status in WAIT_AND_ASK_AGAIN:
        return InferenceServerError(message)
    error = RefusedRequestError(message)
    error.status = status
    return error


def _passed(response: Any) -> tuple[int, Any, dict[str, str]]:
    after = response.headers.get("retry-after")
    headers = {} if after is None else {"retry-after": after}
    try:
        answer = response.json() if response.is_error else _json_of(response)
    except ValueError:  # of a proxy before it, say
        answer = {"error": {"message": f"{response.status_code} {response.text[:300]}"}}
    return response.status_code, answer, headers


def _answer_of(response: Any) -> Any:
    if response.is_error:
        raise _refusal(str(response.url), response.status_code, response.text)
    return _json_of(response)


async def _lines_of(response: Any) -> AsyncGenerator[bytes]:
    """Yield the lines of a stream; httpx would cut the texts in them at U+2028 and its like too."""
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r")
    yield rest


def _json_of(response: Any) -> Any:
    try:
        return response.json()
    except ValueError as error:
        raise InferenceServerError(f"{response.url}: its answer is no JSON ({error})") from error


ASKED_FOR_CHAT = {"logprobs": True, "return_token_ids": True}
"""Keys of a chat request that make vLLM answer with ids and log-probs."""

ASKED_FOR_TEXT = {"logprobs": 1, "return_token_ids": True}
"""The same for ``/completions``."""

PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
PINNED = ("temperature", "top_p", "top_k", "min_p", *PENALTIES)
"""Options that a server may take from the model's generation_config where a request lacks them."""

FREE = frozenset(
    {
        # what the prompt is: its ids come with the answer
        *("model", "messages", "prompt", "tools", "documents", "chat_template"),
        *("chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
        *("verbosity", "reasoning_effort", "add_special_tokens"),
        *("truncate_prompt_tokens", "truncation_side"),
        # where an answer ends, and how many there are
        *("max_tokens", "max_completion_tokens", "max_new_tokens", "n", "seed", "sampling_seed"),
        *("stop", "stop_token_ids", "stop_regex", "ignore_eos", "repetition_detection"),
        # what is returned of it
        *("stream", "stream_options", "stream_interval", "logprobs", "top_logprobs"),
        *("prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids", "include_reasoning"),
        *("return_prompt_text", "parallel_tool_calls", "include_stop_str_in_output"),
        *("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"),
        # whose it is, and when its turn comes
        *("user", "metadata", "store", "service_tier", "safety_identifier", "priority"),
        *("request_id", "session_id", "cache_salt", "prompt_cache_key", "prompt_cache_retention"),
        *("prompt_cache_options",),
    }
)
"""Keys of a request that leave the choice of each token to the model, whatever their value is."""

ALLOWED: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "modalities": (["text"],),
    "echo": (False,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "watermarking": (False,),
}
"""Keys that may have these values; any other would restrict what is sampled, or choose from it."""

NO_LOGPROB = -9999.0
"""What vLLM writes in a chat for the log-prob of a token for which it has none."""

LEAVE_OUT = "pass require_ids=False if nothing of this shall be trained"
"""What one may do in Python about what cannot be trained."""


def completion_of(answer: Mapping[str, Any], choice: Mapping[str, Any]) -> Completion:
    """Return a choice of an answer, to a chat or to a text; what it lacks is empty."""
    message, logprobs = choice.get("message") or {}, choice.get("logprobs") or {}
    sampled = logprobs.get("token_logprobs")
    if (content := logprobs.get("content")) is not None:
        sampled = [token["logprob"] for token in content]
    return Completion(
        prompt_ids=choice.get("prompt_token_ids") or answer.get("prompt_token_ids") or (),
        token_ids=choice.get("token_ids") or (),
        logprobs=None if sampled is None else list(map(float, sampled)),
        text=message.get("content") or choice.get("text") or "",
        tool_calls=message.get("tool_calls") or (),
        reasoning=conversation.reasoning_in(message),
        finish_reason=choice.get("finish_reason"),
    )


def generated(answer: Mapping[str, Any], prompt: Sequence[int], before: str | None) -> Completion:
    """Return an answer of SGLang's ``/generate``, which names the weights at its end alone."""
    meta = answer.get("meta_info") or {}
    pairs = meta.get("output_token_logprobs")
    reason = meta.get("finish_reason")
    after = None if meta.get("weight_version") is None else str(meta["weight_version"])
    version = after and (before or after)
    return Completion(
        prompt_ids=prompt,
        token_ids=answer.get("output_ids") or (),
        logprobs=None if pairs is None else [float(pair[0]) for pair in pairs],
        text=answer.get("text") or "",
        finish_reason=reason.get("type") if isinstance(reason, Mapping) else reason,
        weight_version=version,
        later_weight_version=None if after == version else after,
    )


def require_whole(
    answer: Mapping[str, Any],
    completions: Sequence[Completion],
    url: str,
    remedy: str = LEAVE_OUT,
    without_ids: str = LEAVE_OUT,
) -> None:
    """Raise unless the choices of an answer hold all ids that were sampled, each with a log-prob.

    One that was aborted is none. What parses reasoning and tool calls in a server may drop tokens
    of a stream. Of a server that says no number of sampled tokens, a warning tells once.

    Raises:
        InferenceServerError: they do not; the message ends with a ``remedy``, or with the one for
            answers ``without_ids``.
    """
    sampled = 0
    for completion in completions:
        ids, logprobs = len(completion.token_ids), completion.logprobs
        if completion.finish_reason == "abort":  # the model has not said its last word
            raise InferenceServerError(f"{url} aborted its answer: ask again")
        known = [value for value in logprobs or () if value != NO_LOGPROB]
        if not (completion.prompt_ids and ids and len(known) == len(logprobs or ()) == ids):
            listed = "no" if logprobs is None else len(known)
            raise InferenceServerError(
                f"{url} answered with {len(completion.prompt_ids)} prompt ids, {ids} ids and "
                f"{listed} log-probs: to train on it, all must be there, and text is never "
                f"tokenised again. vLLM returns them from 0.10.2 on; {without_ids}"
            )
        sampled += ids
    usage = answer.get("usage") or answer.get("meta_info")
    counted = usage.get("completion_tokens") if isinstance(usage, Mapping) else None
    if counted is None:
        conversation.warn_once(
            "%s does not say how many tokens it sampled (usage.completion_tokens): should its "
            "answers lack token ids, that cannot be noticed",
            url,
        )
    elif counted != sampled:
        raise InferenceServerError(
            f"{url} sampled {counted!r:.40} tokens (completion_tokens) and answered with {sampled} "
            "token ids, which is not what the model said. A stream may lose tokens where the "
            f"server parses reasoning or tool calls: ask without stream. {remedy}"
        )


def pinned(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return sampling options that leave no default to the server; None counts as not given."""
    explicit = {key: value for key, value in sampling.items() if value is not None}
    return {**{key: NEUTRAL[key][0] for key in PINNED}, **explicit}


def require_sampled(sampling: Mapping[str, Any], mode: str, remedy: str = LEAVE_OUT) -> None:
    """Raise unless the server's log-probs are those of what it samples.

    Raises:
        InvalidArgumentError: with these options they are not, in the log-prob ``mode``, or it is
            not known; where no mode would help, the message ends with the ``remedy``.
    """
    for key, value in sampling.items():
        if key not in FREE and key not in NEUTRAL and value not in ALLOWED.get(key, ()):
            _refuse(f"{key}: {value!r:.80}", ALLOWED.get(key, ()), remedy)
    for tool in sampling.get("tools") or ():
        if any(isinstance(part, Mapping) and part.get("strict") for part in (tool, *tool.values())):
            _refuse(f"tools: strict=True of {tool!r:.80}", (), remedy)
    # Options that change probabilities are right only with log-probs taken after them.
    bent = {k: v for k, v in changes(sampling).items() if k in NEUTRAL}
    if bent and mode != "processed_logprobs":
        listed = ", ".join(f"{key}={value!r:.80}" for key, value in bent.items())
        raise InvalidArgumentError(
            f"{listed}: a server with --logprobs-mode {mode} answers with log-probs before that, "
            "not with those of what is sampled. Leave it out, or start the server with "
            "--logprobs-mode processed_logprobs and say so here: "
            "logprobs_mode='processed_logprobs' (`record --logprobs-mode processed_logprobs`); of "
            "such options, trainers score a temperature and refuse the others"
        )


def require_texts(messages: Messages, remedy: str = LEAVE_OUT) -> None:
    """Raise unless ``messages`` hold nothing but texts.

    Raises:
        InvalidArgumentError: they hold a picture, say, which no trainer would see; the message ends
            with the ``remedy``.
    """
    try:
        conversation.as_texts(messages)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{error}. Leave it out, or {remedy}") from error


def changes(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return those keys of a request that change the probabilities of tokens, with their values."""
    own = {k: v for k, v in sampling.items() if k not in FREE and v not in ALLOWED.get(k, ())}
    return not_neutral(own)


def _refuse(option: str, allowed: tuple[Any, ...], remedy: str) -> NoReturn:
    instead = "".join(f" or say {value!r}" for value in allowed)
    raise InvalidArgumentError(
        f"{option} may restrict what is sampled, or choose from it, which log-probs of no "
        f"--logprobs-mode show: leave it out{instead}, or {remedy}"
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
        InvalidArgumentError: there is no such dialect; or log-probs would not be those of what is
            sampled.
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
        one_of("dialect", dialect, VERSION_AT)
        one_of("logprobs_mode", logprobs_mode, get_args(LogprobsMode))
        # By other names a server may not know the limit, or prefer it to that of a call.
        for name in ("max_completion_tokens", "max_new_tokens"):
            require(sampling.get(name) is None, name, sampling.get(name), "be called max_tokens")
        options = {k: sampling.pop(k) for k in ("api_key", "timeout_s") if k in sampling}
        self.server = Server(url, **options)
        self.name = model
        self._dialect = dialect
        self._logprobs_mode = logprobs_mode
        self._require_ids = require_ids
        self._sampling = pinned(sampling)
        self._marks: dict[str, Any] = {"sampling": changes(self._sampling)}
        self._marks["logprobs_mode"] = logprobs_mode
        self._tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self._weights = ServedWeights(self.server)
        if require_ids:
            require_sampled(self._sampling, logprobs_mode)
            if (choices := sampling.get("n") or 1) != 1:
                raise InvalidArgumentError(f"n={choices!r:.40}: one answer a call: call it n times")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def chat(
        self, messages: Messages, *, tools: Tools = (), max_tokens: int | None = None
    ) -> Completion:
        """Return the model's next turn in a conversation.

        Raises:
            InferenceServerError: no answer, or one without ids and log-probs.
            InvalidArgumentError: ``messages`` are none.
        """
        messages = conversation.require_messages(messages)
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
            ids_or_text = prompt_ids(self._require_tokenizer(), ids_or_text)
        sampling = {**self._sampling}
        usual = sampling.pop("max_tokens", None)
        if (most := usual if max_tokens is None else max_tokens) is not None:
            sampling["max_new_tokens"] = most
        body = {"input_ids": ids_or_text, "sampling_params": sampling, "return_logprob": True}
        before = await self.server.weight_version("sglang")
        answer = await self.server.post("/generate", body)
        with understanding(self.server.root):
            made = replace(generated(answer, ids_or_text, before), **self._marks)
            seen = (answer.get("meta_info") or {}).get("prompt_tokens", len(ids_or_text))
        if self._require_ids:
            require_whole(answer, [made], self.server.root)
            if seen != len(ids_or_text):  # the log-probs are not those behind the whole prompt
                raise RefusedRequestError(
                    f"{self.server.root} answered to {seen} of {len(ids_or_text)} prompt tokens "
                    "(--allow-auto-truncate): shorten the prompt, or give the server more context"
                )
        return made

    async def close(self) -> None:
        """Close the connections."""
        await self.server.close()

    async def _asked(self, path: str, body: dict[str, Any], max_tokens: int | None) -> Completion:
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
        with understanding(self.server.root):
            choices = answer.get("choices") or []
            if not choices:
                raise InferenceServerError(f"{self.server.root}: no choice in {str(answer)[:300]}")
            made = completion_of(answer, choices[0])
        if self._require_ids:
            require_whole(answer, [made], self.server.root)
        (made,) = await self._weights.stamped([made], before, **self._marks)
        return made

    @cached_property
    def _format(self) -> conversation.ChatFormat:
        tokenizer = self._require_tokenizer()
        end = tokenizer.eos_token_id
        return conversation.ChatFormat(tokenizer, [] if end is None else [end])

    def _require_tokenizer(self) -> Any:
        if self._tokenizer is None:
            raise InvalidArgumentError(
                "SGLang's /generate takes token ids: give OpenAIModel a tokenizer="
            )
        return self._tokenizer


PauseMode = Literal["wait", "keep", "abort"]

LOOKED_AT_EVERY_S = 5.0
"""How often a server is asked whether it still holds the weights: a restarted one does not."""


@dataclass(frozen=True, slots=True)
class PushReport:
    """What is said of weights that a server has taken.

    Attributes:
        checksum: of the server's own checksums of its weights; None: it tells none.
    """

    url: str
    version: int
    checksum: str | None


async def push_weights(
    server: Server, policy: PublishedPolicy, *, dialect: Dialect = "vllm", mode: PauseMode = "wait"
) -> PushReport:
    """Have ``server`` load the weights of ``policy`` and call them by its version.

    The server reads the folder itself, so it must see the same path. One that fails on the way, or
    names other weights, is not resumed: nothing is sampled from unknown weights. Cancelled, it ends
    what it has begun.

    Args:
        mode: what becomes of requests under way: ``"wait"`` lets them end, ``"abort"`` ends them,
            ``"keep"`` goes on with them under the new weights.

    Raises:
        CheckpointError: the weights are not there any more, or are others.
        InferenceServerError: the server refuses, or names other weights afterwards.
    """
    path, version = Path(policy.uri), str(policy.version)
    with being_read(path):
        if policy.digest:
            await anyio.to_thread.run_sync(require_digest, path, policy.digest)
        try:
            into = _into_sglang if dialect == "sglang" else _into_vllm
            async with task_group() as group:  # no shield holds Ctrl-C back in the main task
                group.start_soon(_uncancelled, into, server, str(path), version, mode)
        except InferenceServerError as error:
            raise InferenceServerError(
                f"{error} (while it took policy {version}; if it was paused it stays so until "
                "weights are pushed again)"
            ) from error
    checksum = None if dialect == "sglang" else await server.weight_checksum()
    return PushReport(server.root, policy.version, checksum)


async def _uncancelled(push: Callable[..., Awaitable[None]], *arguments: Any) -> None:
    # Given up half-way, the server would stay paused, and all that ask it would wait.
    with anyio.CancelScope(shield=True):
        await push(*arguments)


async def _into_vllm(server: Server, path: str, version: str, mode: PauseMode) -> None:
    # Paused until the version is confirmed: no token is sampled from half-loaded weights.
    await server.post("/pause", mode=mode)
    reload = {"method": "reload_weights", "kwargs": {"weights_path": path}}
    await server.post("/collective_rpc", reload)
    await server.post("/update_weight_version", {"new_version": version})
    await _require_version(server, version, "vllm")
    await server.post("/resume")


async def _into_sglang(server: Server, path: str, version: str, mode: PauseMode) -> None:
    # Not paused, it lets all requests end before it loads; no way of pausing it does. To keep them
    # is `retract`: with `in_place` its cache cannot be flushed, on which it ends.
    if mode != "wait":
        await server.post("/pause_generation", {"mode": "retract" if mode == "keep" else "abort"})
    try:
        await _load_into_sglang(server, path, version)
    except InferenceServerError:
        if mode == "wait":
            await server.post("/pause_generation", {"mode": "abort"})
        raise
    await server.post("/continue_generation")


async def _load_into_sglang(server: Server, path: str, version: str) -> None:
    weights = {"model_path": path, "weight_version": version}
    answer = await server.post("/update_weights_from_disk", weights)
    if not answer.get("success"):
        raise InferenceServerError(f"{server.root} did not load {path}: {answer.get('message')}")
    await _require_version(server, version, "sglang")


async def _require_version(server: Server, version: str, dialect: Dialect) -> None:
    """Refuse a server with weights of another version; SGLang may name none."""
    held = await server.weight_version(dialect)
    if held != version and not (held is None and dialect == "sglang"):
        raise InferenceServerError(f"{server.root} holds weights {held!r} instead of {version!r}")


async def sync_weights(
    experiment: Experiment,
    servers: Sequence[Server],
    *,
    dialect: Dialect = "vllm",
    mode: PauseMode = "wait",
    follow: bool = False,
    report: Callable[[PushReport], None] = lambda _: None,
) -> int:
    """Push the newest published policy to every server; return its version, 0 if there is none.

    With ``follow`` go on with whatever is published, until the experiment is finished, and push
    again to a server that names other weights, as one does that was restarted, or that was away.

    Raises:
        CheckpointError, InferenceServerError: see `push_weights`; with ``follow`` a server that
            does not answer at all is waited for.
    """
    changes = experiment.database.changes
    pushed: PublishedPolicy | None = None
    pusher = _Pusher(dialect, mode, report, waits=follow)
    due = 0.0
    while True:
        state = await changes.state()
        is_last = not follow or await experiment.is_finished()
        pushed = await use_newest(experiment, pushed, partial(pusher.push, servers))
        if is_last:
            return 0 if pushed is None else pushed.version
        if pushed is not None and time.monotonic() >= due:
            behind = [server for server in servers if await pusher.holds_others(server, pushed)]
            await use_newest(experiment, None, partial(pusher.push, behind))
            due = time.monotonic() + LOOKED_AT_EVERY_S
        await changes.changed(state, LOOKED_AT_EVERY_S)


@dataclass(slots=True)
class _Pusher:
    """Pushes weights to servers, and knows which of them were away.

    Args:
        waits: a server that is away is pushed to later; otherwise that is an error.
    """

    dialect: Dialect
    mode: PauseMode
    report: Callable[[PushReport], None]
    waits: bool
    away: set[Server] = field(default_factory=set)

    async def push(self, servers: Sequence[Server], policy: PublishedPolicy) -> None:
        """Push ``policy`` to ``servers``, one after the other: the rest go on sampling."""
        for server in servers:
            try:
                pushed = await push_weights(server, policy, dialect=self.dialect, mode=self.mode)
            except InferenceServerError as error:
                if not self.waits or (await self._looked_at(server))[0]:
                    raise
                if server not in self.away:
                    _LOG.warning("%s; it is given the newest weights when it is there again", error)
                self.away.add(server)
            else:
                self.away.discard(server)
                self.report(pushed)

    async def holds_others(self, server: Server, pushed: PublishedPolicy) -> bool:
        """Return whether a server is to be pushed to again: it was away, or names other weights."""
        is_there, held = await self._looked_at(server)
        return is_there and (server in self.away or held not in (None, str(pushed.version)))

    async def _looked_at(self, server: Server) -> tuple[bool, str | None]:
        """Return whether a server answers, as a refusal does, and what weights it names."""
        try:
            return True, await server.weight_version(self.dialect)
        except RefusedRequestError:
            return True, None
        except InferenceServerError:
            return False, None
