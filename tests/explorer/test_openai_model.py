"""The client of inference servers, over real HTTP against a server that speaks their dialects."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.contract.making import group, opened
from tests.explorer.vllm_dialect import VLLM, served
from trinity_buffer import run_strategy
from trinity_buffer.demo.tiny_model import make_tiny_model
from trinity_buffer.errors import (
    InferenceServerError,
    InvalidArgumentError,
    RefusedRequestError,
)
from trinity_buffer.explorer import server as servers
from trinity_buffer.explorer.conversation import Completion, Conversation
from trinity_buffer.explorer.local_model import LocalModel
from trinity_buffer.explorer.server import (
    OpenAIModel,
    PushReport,
    Server,
    push_weights,
    sync_weights,
)
from trinity_buffer.pipeline.store import PublishedPolicy
from trinity_buffer.trainer.token_scores import token_scores

REAL = os.environ.get("TRINITY_BUFFER_VLLM")
"""URL of a vLLM with VLLM_SERVER_DEV_MODE=1, for the one test that wants a real one."""


@pytest.fixture
def vllm(tiny: Path) -> VLLM:
    return VLLM(tiny)


@pytest.fixture
def url(vllm: VLLM) -> Iterator[str]:
    with served(vllm.app()) as url:
        yield url


def asking(url: str, **options: Any) -> OpenAIModel:
    return OpenAIModel(f"{url}/v1", **options)


def scores_of(model: Any, said: Completion) -> torch.Tensor:
    ids = torch.tensor([[*said.prompt_ids, *said.token_ids]])
    return token_scores(model, {"input_ids": ids}).logprob[0, len(said.prompt_ids) :]


ASKED = ("v1/completions", "generate")
HELLO = [{"role": "user", "content": "hello"}]
NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""What a request says of sampling: a model's generation_config may say another."""


RESTRICTING: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {}}},
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"guided_choice": ["yes", "no"]},
    {"guided_json": {}},
    {"tool_choice": "required"},
    {"tool_choice": {"type": "function", "function": {"name": "look"}}},
    {"tools": [{"type": "function", "function": {"name": "look", "strict": True}}]},
    {"function_call": {"name": "look"}},
    {"logits_processors": ["mine.Greedy"]},
    {"vllm_xargs": {"processor": 1}},
    {"thinking_token_budget": 16},
    {"watermarking": True},
    {"use_beam_search": True},
    {"length_penalty": 0.5},
    {"best_of": 4},
    {"echo": True},
    {"suffix": "}"},
    {"prompt_embeds": "AAAA"},
    {"kv_transfer_params": {"do_remote_prefill": True}},
    {"json_schema": "{}"},
    {"regex": "[0-9]"},
    {"ebnf": "root ::= 'a'"},
    {"custom_params": {}},
    {"made_up_tomorrow": 0},
]
"""Options that could restrict what is sampled, or choose from it, in any log-prob mode."""


async def test_ids_and_log_probs_come_with_what_was_said(url: str, vllm: VLLM) -> None:
    async with asking(url) as model:
        said = [await model.chat(HELLO), await model.complete("hel"), await model.complete([9, 8])]
    tokenizer = vllm.model.tokenizer
    assert tokenizer.decode(said[0].prompt_ids) == "<|user|>hello<|end|><|assistant|>"
    assert [list(one.prompt_ids) for one in said[1:]] == [tokenizer.encode("hel"), [9, 8]]
    for one in said:
        assert one.logprobs is not None
        torch.testing.assert_close(
            scores_of(vllm.model.model, one), torch.tensor(one.logprobs), atol=1e-5, rtol=0
        )
    assert len(vllm.asked) == 3
    assert all({key: body[key] for key in NEUTRAL} == NEUTRAL for body in vllm.asked)


@pytest.mark.parametrize("require_ids", [True, False])
async def test_a_text_is_no_conversation_and_a_generator_of_messages_is(
    url: str, vllm: VLLM, *, require_ids: bool
) -> None:
    async with asking(url, require_ids=require_ids) as model:
        with pytest.raises(InvalidArgumentError, match=r"^messages='hi': .*list of messages.*}]$"):
            await model.chat("hi")  # type: ignore[arg-type]  # what the test is about
        said = await model.chat(message for message in HELLO)  # type: ignore[arg-type]  # likewise
    assert said.prompt_ids == vllm.model.tokenizer.encode("<|user|>hello<|end|><|assistant|>")


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
@pytest.mark.parametrize(
    "answer",
    [
        {"choices": [{"token_ids": [4], "logprobs": {"token_logprobs": [None]}}]},
        {"choices": [{"token_ids": [4], "logprobs": {"content": [{"logprob": None}]}}]},
        {"choices": ["ok"], "meta_info": {"output_token_logprobs": [[None, 4, None]]}},
        ["ok"],
    ],
    ids=["null", "null in a chat", "a text", "a list"],
)
async def test_an_answer_that_cannot_be_read_may_be_asked_for_again(
    dialect: Any, answer: Any
) -> None:
    async def complete(request: Request) -> Response:
        return JSONResponse(answer)

    routes = [Route(f"/{path}", complete, methods=["POST"]) for path in ASKED]
    with served(Starlette(routes=routes)) as url:
        async with asking(url, model="m", dialect=dialect, require_ids=False) as model:
            if dialect == "sglang" and "meta_info" not in answer and isinstance(answer, dict):
                assert (await model.complete([1])).logprobs is None
                return
            with pytest.raises(InferenceServerError, match="no whole completion"):
                await model.complete([1])


async def test_a_server_without_checksums_tells_none() -> None:
    async def check(request: Request) -> Response:
        return JSONResponse({})

    app = Starlette(routes=[Route("/weight_checker", check, methods=["POST"])])
    with served(app) as url:
        async with Server(url) as server:
            assert await server.weight_checksum() is None


async def test_what_is_asked_for_wins_over_the_neutral_values(url: str, vllm: VLLM) -> None:
    options = {"top_k": 20, "repetition_penalty": 1.05, "temperature": None}
    async with asking(url, logprobs_mode="processed_logprobs", **options) as model:
        await model.chat(HELLO)
    said = {"top_k": 20, "repetition_penalty": 1.05}
    assert {key: vllm.asked[0][key] for key in NEUTRAL} == {**NEUTRAL, **said}


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_pictures_are_refused_and_parts_that_are_texts_are_not(
    dialect: Any, url: str, vllm: VLLM, tiny: Path
) -> None:
    async with asking(url, dialect=dialect, tokenizer=str(tiny)) as model:
        said = await model.chat([{"role": "user", "content": "hello"}])
        parts = [{"type": "text", "text": "hello"}]
        with pytest.raises(InvalidArgumentError, match="'image_url', which is no text"):
            await model.chat([{"role": "user", "content": [*parts, PICTURE]}])
        assert len(vllm.asked) == 1
        again = await model.chat([{"role": "user", "content": parts}])
    if dialect == "sglang":  # vLLM itself templates the others
        assert list(again.prompt_ids) == list(said.prompt_ids)


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_the_options_that_change_probabilities_come_with_what_was_said(
    dialect: Any, url: str, tiny: Path
) -> None:
    given: dict[str, Any] = {"dialect": dialect, "tokenizer": str(tiny)}
    options: dict[str, Any] = {"temperature": 0.7, "top_p": 1, "max_tokens": 3, "stop": ["x"]}
    async with asking(url, logprobs_mode="processed_logprobs", **given, **options) as model:
        for said in (await model.chat(HELLO), await model.complete([9, 8])):
            assert (said.sampling, said.logprobs_mode) == (
                {"temperature": 0.7},
                "processed_logprobs",
            )
    async with asking(url, **given) as model:
        assert not (await model.chat(HELLO)).sampling


async def test_sglang_is_asked_by_generate(url: str, vllm: VLLM, tiny: Path) -> None:
    async with asking(url, dialect="sglang", tokenizer=str(tiny), max_tokens=3) as model:
        said = await model.chat(HELLO)
    assert said.logprobs is not None
    assert len(said.token_ids) == 3
    assert said.weight_version == "0"
    expected = scores_of(vllm.model.model, said)
    torch.testing.assert_close(expected, torch.tensor(said.logprobs), atol=1e-5, rtol=0)
    assert vllm.asked[0]["sampling_params"] == {**NEUTRAL, "max_new_tokens": 3}


@pytest.mark.parametrize("key", ["token_ids", "prompt_token_ids", "logprobs"])
async def test_an_answer_that_cannot_be_trained_is_refused(url: str, vllm: VLLM, key: str) -> None:
    vllm.forgets = {key}
    async with asking(url) as model:
        with pytest.raises(InferenceServerError, match="text is never tokenised again"):
            await model.chat(HELLO)
    async with asking(url, require_ids=False) as model:
        assert (await model.chat(HELLO)).finish_reason


async def test_an_answer_to_a_part_of_a_prompt_is_refused(url: str, vllm: VLLM, tiny: Path) -> None:
    vllm.cuts = 2
    async with asking(url, dialect="sglang", tokenizer=str(tiny)) as model:
        assert (await model.complete([1, 2])).prompt_ids == [1, 2]
        with pytest.raises(RefusedRequestError, match="answered to 2 of 3 prompt tokens"):
            await model.complete([1, 2, 3])


async def test_an_answer_that_lacks_sampled_tokens_is_refused(
    url: str, vllm: VLLM, tiny: Path
) -> None:
    vllm.drops, endless = 1, vllm.model  # it says as much as it may
    for source in (endless.tokenizer, endless.model.config, endless.model.generation_config):
        source.eos_token_id = None
    vllm.model = LocalModel(endless.model, endless.tokenizer, max_tokens=8)
    both = r"sampled 3 tokens .* answered with 2 token ids"
    async with asking(url, max_tokens=3) as model:
        with pytest.raises(InferenceServerError, match=both):
            await model.chat(HELLO)
        with pytest.raises(InferenceServerError, match=both):
            await model.complete([1])
    async with asking(url, dialect="sglang", tokenizer=str(tiny), max_tokens=3) as model:
        with pytest.raises(InferenceServerError, match=both):
            await model.complete([1])
    async with asking(url, max_tokens=3, require_ids=False) as model:
        assert len((await model.complete([1])).token_ids) == 2


async def test_a_server_that_counts_no_tokens_is_named_once(
    url: str, vllm: VLLM, caplog: pytest.LogCaptureFixture
) -> None:
    vllm.forgets = {"usage"}
    async with asking(url) as model:
        for _ in range(2):
            assert (await model.complete([1])).token_ids
    assert caplog.text.count(f"{url} does not say how many tokens it sampled") == 1


@pytest.mark.parametrize(
    "bent",
    [
        {"temperature": 0.7},
        {"top_p": 0.9},
        {"top_k": 20},
        {"min_p": 0.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"repetition_penalty": 1.05},
        {"logit_bias": {"7": -100}},
        {"min_tokens": 4},
        {"min_new_tokens": 4},
        {"bad_words": ["no"]},
        {"allowed_token_ids": [1, 2]},
    ],
)
def test_log_probs_of_another_distribution_are_refused(bent: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="--logprobs-mode processed_logprobs"):
        OpenAIModel("http://nobody", **bent)
    OpenAIModel("http://nobody", logprobs_mode="processed_logprobs", **bent)
    nothing: dict[str, Any] = dict.fromkeys(bent)
    OpenAIModel("http://nobody", **nothing)


def test_a_dialect_that_there_is_not_is_refused_at_once() -> None:
    with pytest.raises(InvalidArgumentError, match=r"dialect must be one of 'vllm', 'sglang', not"):
        OpenAIModel("http://127.0.0.1:1", dialect="sglan")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "option",
    [{"logprobs_mode": "processed"}, {"max_new_tokens": 3}, {"max_completion_tokens": 3}],
    ids=lambda option: next(iter(option)),
)
def test_what_a_server_would_not_know_is_refused_at_once(option: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{next(iter(option))} must be"):
        OpenAIModel("http://nobody", **option)


def test_neutral_values_are_not_refused() -> None:
    empty: dict[str, Any] = {"logit_bias": {}, "bad_words": [], "allowed_token_ids": []}
    neutral = {**NEUTRAL, **empty, "top_k": 0, "min_tokens": 0, "use_beam_search": False}
    OpenAIModel("http://nobody", **neutral)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("option", RESTRICTING, ids=lambda option: next(iter(option)))
async def test_what_restricts_sampling_is_refused_in_every_mode(
    mode: Any, option: dict[str, Any]
) -> None:
    (key,) = option
    with pytest.raises(InvalidArgumentError, match=rf"{key}: .*leave it out.*require_ids=False"):
        OpenAIModel("http://nobody", logprobs_mode=mode, **option)
    OpenAIModel("http://nobody", require_ids=False, **option)
    nothing: dict[str, Any] = {key: None}
    OpenAIModel("http://nobody", **nothing)


async def test_a_tool_that_is_forced_into_its_schema_is_refused(url: str, vllm: VLLM) -> None:
    tool = {"type": "function", "function": {"name": "look", "strict": True}}
    async with asking(url) as model:
        with pytest.raises(InvalidArgumentError, match=r"tools: strict=True .*'look'"):
            await model.chat(HELLO, tools=[tool])
    assert vllm.asked == []


def test_one_call_returns_one_answer() -> None:
    with pytest.raises(InvalidArgumentError, match="n=4"):
        OpenAIModel("http://nobody", n=4)


async def test_a_server_that_is_not_there_may_be_asked_again(url: str) -> None:
    async with asking("http://127.0.0.1:9") as model:
        with pytest.raises(InferenceServerError, match="is the server up") as caught:
            await model.complete([1])
    assert isinstance(caught.value, OSError)  # which `explore` tries again
    async with asking(url, model="other") as model:
        assert (await model.complete([1])).token_ids


async def test_a_server_without_control_endpoints_tells_no_version(tiny: Path) -> None:
    with served(VLLM(tiny, has_dev_mode=False).app()) as url:
        async with asking(url) as model:
            assert (await model.chat(HELLO)).weight_version is None


async def test_each_turn_says_which_weights_made_it(url: str, vllm: VLLM) -> None:
    talk = Conversation(HELLO)
    async with asking(url, max_tokens=2) as model:
        first = talk.said(await model.chat(talk.messages))
        talk.heard({"role": "user", "content": "more"})
        vllm.version = "1"
        with torch.no_grad():
            vllm.model.model.lm_head.weight += 1
        vllm.before_answer.append(lambda: setattr(vllm, "version", "2"))
        second = talk.said(await model.chat(talk.messages))
    assert first.weight_checksum != second.weight_checksum
    assert (second.weight_version, second.later_weight_version) == ("1", "2")
    *_, made = talk.experiences(1.0)
    segment = made.info["weight_segments"][-1]
    assert made.tokens[segment["begin"] : segment["end"]].tolist() == list(second.token_ids)
    assert (segment["version"], segment["later_version"]) == ("1", "2")
    assert segment["checksum"] == second.weight_checksum
    assert made.info["logprobs_mode"] == "raw_logprobs"


@pytest.fixture
def published(tmp_path: Path) -> PublishedPolicy:
    made = tmp_path / "made"
    make_tiny_model(made, seed=1, width=16, layers=1, heads=2)
    LocalModel(made).model.save_pretrained(tmp_path / "policy")
    return PublishedPolicy(7, str(tmp_path / "policy"), "", 1)


@pytest.mark.parametrize(
    ("dialect", "calls"),
    [
        ("vllm", ["pause?mode=wait", "collective_rpc", "update_weight_version", "resume"]),
        ("sglang", ["update_weights_from_disk", "continue_generation"]),
    ],
)
async def test_weights_are_pushed_when_all_requests_have_ended(
    url: str, vllm: VLLM, published: PublishedPolicy, dialect: Any, calls: list[str]
) -> None:
    before = vllm.model.model.lm_head.weight.clone()
    async with Server(url) as server:
        report = await push_weights(server, published, dialect=dialect)
    assert vllm.said == calls
    assert not torch.equal(vllm.model.model.lm_head.weight, before)
    async with asking(url) as model:
        said = await model.chat(HELLO)
    assert said.weight_version == "7"
    assert report.checksum in (None, said.weight_checksum)


@pytest.mark.parametrize(("mode", "how"), [("keep", "retract"), ("abort", "abort")])
async def test_sglang_mixes_weights_in_an_answer_only_where_it_is_asked_to(
    url: str, vllm: VLLM, published: PublishedPolicy, mode: Any, how: str
) -> None:
    async with Server(url) as server:
        await push_weights(server, published, dialect="sglang", mode=mode)
    resumed = ["update_weights_from_disk", "continue_generation"]
    assert vllm.said == [f"pause_generation={how}", *resumed]


async def test_an_answer_of_sglang_names_the_weights_that_began_it_too(
    url: str, vllm: VLLM, tiny: Path
) -> None:
    """What it says of an answer are the weights at its end."""
    async with asking(url, dialect="sglang", tokenizer=str(tiny)) as model:
        vllm.before_answer.append(lambda: setattr(vllm, "version", "2"))
        said = await model.chat(HELLO)
    talk = Conversation(HELLO)
    talk.said(said)
    assert talk.experiences(1.0)[0].info["model_version"] == 0
    assert (said.weight_version, said.later_weight_version) == ("0", "2")


@pytest.mark.parametrize(
    ("dialect", "resume"), [("vllm", "resume"), ("sglang", "continue_generation")]
)
async def test_a_server_that_names_other_weights_is_not_resumed(
    url: str, vllm: VLLM, published: PublishedPolicy, dialect: Any, resume: str
) -> None:
    vllm.renames = False
    async with Server(url) as server:
        with pytest.raises(InferenceServerError, match=r"holds weights '0' .*stays so"):
            await push_weights(server, published, dialect=dialect)
    assert vllm.said
    assert resume not in vllm.said


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_a_server_that_was_restarted_is_given_the_newest_weights_again(
    url: str,
    vllm: VLLM,
    published: PublishedPolicy,
    dialect: Any,
    sqlite_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(servers, "LOOKED_AT_EVERY_S", 0.01)
    pushed: list[int] = []

    async def restart() -> None:
        vllm.version = "0"

    async with opened(sqlite_url, rollouts_per_group=4) as experiment, Server(url) as server:
        await experiment.writer("e0").write(group())
        await run_strategy(experiment, "grpo")
        async with experiment.train_stream(strategy="grpo") as stream:
            async for step in stream:
                await stream.commit(step, checkpoint=Path(published.uri))

        def note(report: PushReport) -> None:
            pushed.append(report.version)
            tasks.start_soon(restart if len(pushed) < 3 else partial(experiment.finish, "done"))

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                await sync_weights(experiment, [server], dialect=dialect, follow=True, report=note)
    assert pushed == [1, 1, 1]
    assert vllm.version == "1"


async def test_a_server_that_was_away_is_given_the_newest_weights_when_it_is_back(
    vllm: VLLM, published: PublishedPolicy, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not there when they were published: a follower waits for it."""
    monkeypatch.setattr(servers, "LOOKED_AT_EVERY_S", 0.01)
    app, refused = vllm.app(), 0

    async def away_at_first(scope: Any, receive: Any, send: Any) -> None:
        nonlocal refused
        if scope["type"] == "http" and refused < 5:
            refused += 1
            await Response(status_code=503)(scope, receive, send)
        else:
            await app(scope, receive, send)

    with served(away_at_first) as url:
        async with opened(sqlite_url, rollouts_per_group=4) as experiment, Server(url) as server:
            await experiment.publish_policy(1, published.uri)
            with anyio.fail_after(60):
                async with anyio.create_task_group() as tasks:

                    def note(_: PushReport) -> None:
                        tasks.start_soon(partial(experiment.finish, "done"))

                    await sync_weights(experiment, [server], follow=True, report=note)
    assert refused == 5
    assert vllm.version == "1"


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_a_push_that_is_cancelled_leaves_no_server_paused(
    url: str, vllm: VLLM, published: PublishedPolicy, dialect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = vllm.model.load

    def cancel_and_load(path: str) -> LocalModel:
        anyio.from_thread.run_sync(scope.cancel, token=token)
        return original(path)

    monkeypatch.setattr(vllm.model, "load", cancel_and_load)
    token = anyio.lowlevel.current_token()
    async with Server(url) as server:
        with anyio.CancelScope() as scope:
            await push_weights(server, published, dialect=dialect, mode="keep")
    assert scope.cancel_called
    assert vllm.said[-1] == ("resume" if dialect == "vllm" else "continue_generation")
    assert vllm.version == "7"


async def test_a_server_that_could_not_load_stays_paused(
    url: str, vllm: VLLM, published: PublishedPolicy, tmp_path: Path
) -> None:
    (tmp_path / "policy" / "model.safetensors").unlink()
    async with Server(url) as server:
        with pytest.raises(InferenceServerError, match="stays so"):
            await push_weights(server, published)
    assert "resume" not in vllm.said


@pytest.mark.long
@pytest.mark.skipif(REAL is None, reason="TRINITY_BUFFER_VLLM names no server")
async def test_a_real_vllm_answers_with_all_that_is_trained() -> None:
    async with asking(str(REAL).removesuffix("/v1"), max_tokens=8) as model:
        said = await model.chat(HELLO)
        assert said.logprobs is not None
        assert len(said.logprobs) == len(said.token_ids) > 0
        assert said.weight_version is not None
        again = await model.complete(said.prompt_ids)
    assert list(again.prompt_ids) == list(said.prompt_ids)
