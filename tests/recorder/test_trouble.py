"""The recorder when something goes wrong: broken answers, odd requests, turns that come late."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import httpx2
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tests.explorer.test_openai_model import RESTRICTING
from tests.explorer.vllm_dialect import served
from tests.recorder.test_recorder import HELLO, plain_http, recording, reward, stored
from trinity_buffer.errors import StoreUnavailableError
from trinity_buffer.pipeline.write.writer import SQLWriter

LOGPROB = {"token": "?", "logprob": -0.5}
LOGPROBS = {"content": [LOGPROB]}


def choice(text: str = "ok", **other: Any) -> dict[str, Any]:
    """Return a sound choice, but for what ``other`` says."""
    message = {"role": "assistant", "content": text}
    sound = {"index": 0, "finish_reason": "stop", "message": message, "token_ids": [4, 5]}
    return {**sound, "logprobs": {"content": [LOGPROB] * 2}, **other}


def whole(*choices: Any) -> dict[str, Any]:
    """Return an answer."""
    return {"object": "chat.completion", "prompt_token_ids": [1, 2], "choices": list(choices)}


def piece(finish_reason: str | None = None, **other: Any) -> dict[str, Any]:
    """Return a chunk of a streamed answer."""
    return whole(choice(delta={"content": "go "}, finish_reason=finish_reason, **other))


class Scripted:
    """An upstream that answers what it is told to.

    Attributes:
        answer: to a request without a stream; bytes are sent as they are.
        chunks: to one with; a text is sent as it is.
        status: of an answer.
        headers: of an answer.
        delay_s: until it answers.
        asked: how often it was.
        body: what it was asked last.
    """

    def __init__(self) -> None:
        self.answer: Any = whole(choice())
        self.chunks: list[Any] = [piece("stop"), "[DONE]"]
        self.status = 200
        self.headers: dict[str, str] = {}
        self.delay_s = 0.0
        self.asked = 0
        self.body: dict[str, Any] = {}

    async def chat(self, request: Request) -> Response:
        """Answer."""
        self.asked += 1
        self.body = await request.json()
        await anyio.sleep(self.delay_s)
        if self.body.get("stream") and self.status < 400:
            return StreamingResponse(self._lines(), media_type="text/event-stream")
        # Not JSONResponse, which refuses NaN.
        body = self.answer if isinstance(self.answer, bytes) else json.dumps(self.answer)
        return Response(body, self.status, self.headers, media_type="application/json")

    async def _lines(self) -> AsyncIterator[bytes]:
        for one in self.chunks:
            text = one if isinstance(one, str) else json.dumps(one, ensure_ascii=False)
            yield f"data: {text}\n\n".encode()


@pytest.fixture
def scripted() -> Scripted:
    return Scripted()


@pytest.fixture
def upstream(scripted: Scripted) -> Iterator[str]:
    with served(
        Starlette(routes=[Route("/v1/chat/completions", scripted.chat, methods=["POST"])])
    ) as url:
        yield url


async def chat(url: str, rollout: str, *, patience_s: float = 30.0, **body: Any) -> Any:
    """Ask once, in ``rollout``."""
    async with plain_http(timeout=patience_s) as http:
        at = f"{url}/rollouts/{rollout}/v1/chat/completions"
        return await http.post(at, json={"messages": HELLO, **body})


async def test_a_rollout_is_closed_behind_the_turns_that_have_left_already(
    store_url: str, upstream: str
) -> None:
    async with recording(store_url, upstream, ack="before") as url:

        async def agent(task: int) -> None:
            for run in range(4):
                rollout = f"{task}/{run}"
                for _ in range(2):
                    assert (await chat(url, rollout)).status_code == 200
                assert len((await reward(url, rollout, 1.0)).json()["uids"]) == 2
                assert (await chat(url, rollout)).status_code == 409  # and nobody else is told

        async with anyio.create_task_group() as group:
            for task in range(3):
                group.start_soon(agent, task)
        assert (await chat(url, "another/0")).status_code == 200
    assert len(await stored(store_url, "agent.turns")) == 3 * 4 * 2 + 1


async def test_a_turn_that_was_lost_is_told_to_its_rollout_alone(
    store_url: str, upstream: str, scripted: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    unstorable = {"content": [{"token": "?", "logprob": float("nan")}] * 2}
    async with recording(store_url, upstream, ack="before") as url:
        scripted.answer = whole(choice(logprobs=unstorable))
        assert (await chat(url, "t/0")).status_code == 200
        scripted.answer = whole(choice())
        assert (await chat(url, "t/1")).status_code == 200
        for told in (await reward(url, "t/0", 1.0), await chat(url, "t/0")):
            assert (told.status_code, "lacks a turn" in told.text) == (409, True)
        assert (await reward(url, "t/1", 1.0)).status_code == 200
    assert "recorded/t/0: a turn that was answered is lost" in caplog.text


async def test_a_turn_that_is_stored_though_its_server_was_lost_is_counted(
    store_url: str, upstream: str, scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = SQLWriter.write

    async def losing_the_server(writer: SQLWriter, experiences: Any) -> Any:
        await original(writer, experiences)
        raise StoreUnavailableError("the connection was lost during a commit")

    async with recording(store_url, upstream) as url:
        assert (await chat(url, "t/0")).status_code == 200
        with monkeypatch.context() as patch:
            patch.setattr(SQLWriter, "write", losing_the_server)
            assert (await chat(url, "t/0")).status_code == 503
        scripted.answer = whole(choice("and now?"))
        assert (await chat(url, "t/0")).status_code == 200
        assert (await reward(url, "t/0", 1.0)).status_code == 200
    texts = [turn.response_text for turn in await stored(store_url, "agent.turns")]
    assert texts == ["ok", "ok", "and now?"]


async def test_of_several_choices_all_are_stored_or_none(
    store_url: str, upstream: str, scripted: Scripted
) -> None:
    async with recording(store_url, upstream) as url:
        assert (await chat(url, "t/1")).status_code == 200
        assert (await reward(url, "t/1", 1.0)).status_code == 200
        scripted.answer = whole(choice(), choice(index=1))
        assert (await chat(url, "t/0", n=2)).status_code == 409
        assert (await reward(url, "t/0", 1.0)).status_code == 400  # nothing was said in it
    assert len(await stored(store_url, "agent.turns")) == 1


async def test_a_turn_goes_to_another_run_only_where_one_request_made_both(
    store_url: str, upstream: str, scripted: Scripted
) -> None:
    goes_on = [*HELLO, {"role": "assistant", "content": "Yes."}, *HELLO]
    async with recording(store_url, upstream) as url:
        for run, text in ((0, "Yes. "), (1, "Yes.")):
            scripted.answer = whole(choice(text))
            await chat(url, f"t/{run}")
        branch = await chat(url, "t/0", messages=goes_on)
        scripted.answer = whole(choice("No."), choice("Yes.", index=1))
        await chat(url, "u/3", n=2)
        scripted.answer = whole(choice("Yes."))
        await chat(url, "u/5")
        chosen = await chat(url, "u/3", messages=goes_on)
    async with recording(store_url, upstream) as url:  # and of one that knows it from the store
        again = [await chat(url, f"{task}/0", messages=goes_on) for task in "tu"]
        again.append(await chat(url, "u/3", messages=goes_on))
    went = [answer.headers["x-trinity-rollout"][9:] for answer in (branch, chosen, *again)]
    assert went == ["t/0", "u/4", "t/0", "u/0", "u/4"]


async def test_a_turn_that_is_asked_for_again_goes_on_with_its_own_run(
    store_url: str, upstream: str, scripted: Scripted
) -> None:
    """A client does so whose answer was lost, or who could not read it."""
    calls = [
        {"id": "c", "type": "function", "function": {"name": "go", "arguments": arguments}}
        for arguments in ('{"by": 1.0}', '{"by":1}')  # as JavaScript writes it anew
    ]
    first, anew = ({"role": "assistant", "content": "", "tool_calls": [call]} for call in calls)
    goes_on = [*HELLO, first, *HELLO]
    scripted.answer = whole(choice("No."), choice(index=1, message=first))
    async with recording(store_url, upstream) as url:
        await chat(url, "t/0", n=2)
        scripted.answer = whole(choice("{"))
        went = [await chat(url, "t/0", messages=goes_on)]
    goes_on = [*HELLO, anew, *HELLO]
    async with recording(store_url, upstream) as url:  # and of one that knows it from the store
        went += [await chat(url, "t/0", messages=goes_on) for _ in range(2)]
    assert [answer.headers["x-trinity-rollout"][9:] for answer in went] == ["t/1"] * 3


@pytest.mark.parametrize(
    "chunks",
    [
        [piece(), {"error": {"message": "EngineDeadError", "code": 500}}, "[DONE]"],
        [piece()],
        [piece(), "[DONE]"],
        [piece("stop")],
        [piece(), piece("stop", index=1), "[DONE]"],
        [piece(), "5", "[DONE]"],
        [piece(), "null", "[DONE]"],
        [piece(), whole(None), piece("stop"), "[DONE]"],
        [piece(logprobs={"content": [{}, {}]}), piece("stop"), "[DONE]"],
        [piece(token_ids="ab"), piece("stop"), "[DONE]"],
    ],
    ids=range(10),
)
async def test_a_stream_that_breaks_off_is_told_and_no_turn(
    sqlite_url: str, upstream: str, scripted: Scripted, chunks: list[Any]
) -> None:
    scripted.chunks = chunks
    async with recording(sqlite_url, upstream) as url:
        *_, last = (await chat(url, "t/0", stream=True)).text.strip().split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "InferenceServerError"
        assert (await reward(url, "t/0", 1.0)).status_code == 400  # nothing was said in it
        scripted.chunks = [{**piece("stop"), "error": None}, "[DONE]"]
        assert (await chat(url, "t/0", stream=True)).text.endswith("data: [DONE]\n\n")
    assert len(await stored(sqlite_url, "agent.turns")) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_rollout_may_have_a_name_in_any_script(
    sqlite_url: str, upstream: str, scripted: Scripted, stream: bool
) -> None:
    async with recording(sqlite_url, upstream) as url:
        answer = await chat(url, "題/0", stream=stream)
        assert (answer.status_code, answer.headers["x-trinity-rollout"]) == (200, "recorded/題/0")
        async with plain_http(headers={b"x-trinity-rollout": "題/0".encode()}) as http:
            await http.post(f"{url}/v1/chat/completions", json={"messages": HELLO})
    assert [turn.eid.rid for turn in await stored(sqlite_url, "agent.turns")] == [
        "recorded/題/0"
    ] * 2


async def test_a_stream_may_hold_what_ends_lines_elsewhere(
    sqlite_url: str, upstream: str, scripted: Scripted
) -> None:
    text = "a\u2028b\x85c\u2029"
    scripted.chunks = [piece("stop"), "[DONE]"]
    scripted.chunks[0]["choices"][0]["delta"]["content"] = text
    async with recording(sqlite_url, upstream) as url:
        (said,) = lines(await chat(url, "t/0", stream=True))
    assert said["choices"][0]["delta"]["content"] == text
    (turn,) = await stored(sqlite_url, "agent.turns")
    assert turn.response_text == text


@pytest.mark.parametrize(
    "answer",
    [
        [],
        None,
        5,
        whole(),
        whole(None),
        whole(choice(finish_reason=None)),
        whole(choice(logprobs={"content": [{}, {}]})),
        whole(choice(logprobs={"content": [{"logprob": None}] * 2})),
        whole(choice(token_ids=["a", "b"])),
        whole(choice(token_ids=[2**70, 1])),
        whole(choice(message={"role": "assistant", "content": "", "tool_calls": "x"})),
        whole(choice(message={"role": "assistant", "tool_calls": [{"function": "x"}]})),
    ],
    ids=range(12),
)
async def test_an_answer_that_is_none_is_told_as_the_upstreams_fault(
    sqlite_url: str, upstream: str, scripted: Scripted, answer: Any
) -> None:
    scripted.answer = answer
    async with recording(sqlite_url, upstream) as url:
        told = await chat(url, "t/0")
    assert (told.status_code, upstream in told.json()["error"]["message"]) == (502, True)
    assert await stored(sqlite_url, "agent.turns") == []


def lines(answer: Any) -> list[Any]:
    """Return what a stream says, without its end."""
    *said, end = answer.text.strip().split("\n\n")
    assert end == "data: [DONE]"
    return [json.loads(one.removeprefix("data: ")) for one in said]


def usage(tokens: int) -> dict[str, Any]:
    return {"usage": {"completion_tokens": tokens}}


async def test_an_answer_that_lacks_sampled_tokens_is_no_turn(
    store_url: str, upstream: str, scripted: Scripted
) -> None:
    both = "sampled 3 tokens (completion_tokens) and answered with 2 token ids"
    async with recording(store_url, upstream) as url:
        scripted.answer = {**whole(choice()), **usage(3)}
        told = await chat(url, "t/0")
        assert (told.status_code, both in told.text) == (502, True)
        for ends in ([{**piece("stop"), **usage(3)}], [piece("stop"), {**whole(), **usage(3)}]):
            scripted.chunks = [*ends, "[DONE]"]
            *_, last = (await chat(url, "t/0", stream=True)).text.strip().split("\n\n")
            assert both in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert (await reward(url, "t/0", 1.0)).status_code == 400  # nothing was said in it
    assert await stored(store_url, "agent.turns") == []


async def test_of_several_choices_all_tokens_are_counted(
    sqlite_url: str, upstream: str, scripted: Scripted
) -> None:
    many = whole(choice(), choice(index=1))
    async with recording(sqlite_url, upstream) as url:
        for sampled, status in ((2, 502), (3, 502), (4, 200)):
            scripted.answer = {**many, **usage(sampled)}
            assert (await chat(url, "t/0", n=2)).status_code == status
    assert len(await stored(sqlite_url, "agent.turns")) == 2


NO_LOGPROB = {"token": "?", "logprob": -9999.0}
"""What vLLM writes for a token whose log-prob it does not have."""


@pytest.mark.parametrize(
    "logprobs",
    [None, *({"content": each} for each in ([LOGPROB], [LOGPROB] * 3, [LOGPROB, NO_LOGPROB]))],
)
async def test_ids_need_a_log_prob_each(
    sqlite_url: str, upstream: str, scripted: Scripted, logprobs: Any
) -> None:
    async with recording(sqlite_url, upstream) as url:
        scripted.answer = whole(choice(logprobs=logprobs))
        assert (await chat(url, "t/0")).status_code == 502
        scripted.chunks = [piece("stop", logprobs=logprobs), "[DONE]"]
        assert "2 ids and" in (await chat(url, "t/0", stream=True)).text
    assert await stored(sqlite_url, "agent.turns") == []


@pytest.mark.parametrize("stream", [False, True])
async def test_an_aborted_answer_is_no_turn(
    sqlite_url: str, upstream: str, scripted: Scripted, *, stream: bool
) -> None:
    scripted.answer = whole(choice(finish_reason="abort"))
    scripted.chunks = [piece("abort"), "[DONE]"]
    async with recording(sqlite_url, upstream) as url:
        told = await chat(url, "t/0", stream=stream)
        assert "aborted its answer: ask again" in told.text
        assert (await reward(url, "t/0", 1.0)).status_code == 400


async def test_the_usage_of_a_stream_goes_to_who_asked_for_it(
    sqlite_url: str, upstream: str, scripted: Scripted
) -> None:
    scripted.chunks = [{**piece(), **usage(2)}, piece("stop"), {**whole(), **usage(4)}, "[DONE]"]
    options = {"continuous_usage_stats": True}
    async with recording(sqlite_url, upstream) as url:
        for asks in ({}, {"stream_options": options}, {"stream_options": None}):
            chunks = lines(await chat(url, "t/0", stream=True, **asks))
            assert [(len(one["choices"]), "usage" in one) for one in chunks] == [(1, False)] * 2
        options["include_usage"] = True
        *_, last = lines(await chat(url, "t/0", stream=True, stream_options=options))
        assert (last["choices"], last["usage"]) == ([], {"completion_tokens": 4})
        wrong = await chat(url, "t/0", stream=True, stream_options=[1])
        assert (wrong.status_code, "stream_options" in wrong.text) == (400, True)


async def test_an_upstream_that_counts_no_tokens_is_named_once(
    sqlite_url: str, upstream: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with recording(sqlite_url, upstream) as url:
        for _ in range(2):
            assert (await chat(url, "t/0")).status_code == 200
    assert caplog.text.count(f"{upstream} does not say how many tokens it sampled") == 1


async def test_what_a_client_leaves_null_is_not_asked_for(
    sqlite_url: str, upstream: str, scripted: Scripted
) -> None:
    """With `top_logprobs` null, which is not its default, vLLM answers without log-probs."""
    nulls: dict[str, Any] = dict.fromkeys(
        ("logprobs", "top_logprobs", "temperature", "stop", "tools", "n")
    )
    async with recording(sqlite_url, upstream) as url:
        assert (await chat(url, "t/0", **nulls)).status_code == 200
    assert scripted.body["logprobs"] is True
    assert None not in scripted.body.values()


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.long
async def test_what_restricts_sampling_is_refused_by_name(
    sqlite_url: str, upstream: str, scripted: Scripted, mode: str
) -> None:
    async with recording(sqlite_url, upstream, logprobs_mode=mode) as url:
        refused = [option for option in RESTRICTING if "tools" not in option]
        for option in refused:
            (key,) = option
            told = await chat(url, "t/0", **option)
            said = told.json()["error"]["message"]
            assert (told.status_code, said.startswith(f"{key}: ")) == (400, True)
            assert "leave it out" in said
            assert "send it to the inference server itself" in said
            nothing: dict[str, Any] = {key: None}
            assert (await chat(url, f"{key}/0", **nothing)).status_code == 200
        assert scripted.asked == len(refused)


async def test_what_leaves_the_choice_to_the_model_passes(
    sqlite_url: str, upstream: str, scripted: Scripted
) -> None:
    options: list[dict[str, Any]] = [
        {"response_format": {"type": "text"}, "tool_choice": "auto", "parallel_tool_calls": False},
        {"stop": ["."], "stop_token_ids": [3], "max_completion_tokens": 8, "seed": 1, "n": 1},
        {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
        {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        {"tools": [{"type": "function", "function": {"name": "look", "strict": False}}]},
        {"top_logprobs": 2, "logprobs": True, "use_beam_search": False, "logit_bias": {}},
    ]
    async with recording(sqlite_url, upstream) as url:
        for option in options:
            assert (await chat(url, "t/0", **option)).status_code == 200
    assert scripted.asked == len(options)


async def test_tools_are_never_forced_into_their_schema(
    sqlite_url: str, upstream: str, scripted: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    """Some agents ask for ``strict`` of every tool: the model is asked all the same, without it."""
    tools = [
        {"type": "function", "function": {"name": "look", "strict": True, "parameters": {}}},
        {"type": "function", "strict": True, "function": {"name": "walk"}},
    ]
    async with recording(sqlite_url, upstream) as url:
        for _ in range(2):
            assert (await chat(url, "t/0", tools=tools)).status_code == 200
    assert scripted.body["tools"] == [
        {"type": "function", "function": {"name": "look", "parameters": {}}},
        {"type": "function", "function": {"name": "walk"}},
    ]
    assert caplog.text.count("asked for without it") <= 1


async def test_a_request_of_the_wrong_form_is_refused_before_it_is_passed_on(
    sqlite_url: str, upstream: str, scripted: Scripted
) -> None:
    calls: list[Any] = ["x", [5], [{"function": "x"}]]
    wrong: list[dict[str, Any]] = [{"tools": 5}, {"tools": [5]}]
    wrong += [{"messages": [{"role": "assistant", "tool_calls": one}]} for one in calls]
    wrong += [{"prompt": ["a", "b"]}, {"prompt": [[1], [2]]}]
    async with recording(sqlite_url, upstream) as url:
        told = [await chat(url, "t/0", **body) for body in wrong]
        told += [await chat(url, name) for name in (f"t/{'9' * 5000}", "t%2Fx/0", f"{'t' * 300}/0")]
    assert [one.status_code for one in told] == [400] * 10
    assert all(len(one.json()["error"]["message"]) < 200 for one in told)
    assert scripted.asked == 0


@pytest.mark.parametrize("stream", [b"false", b"true"])
@pytest.mark.parametrize(
    "body",
    [
        b'{"stream": STREAM, "messages": [{"role": "user", "content": "\\ud83d"}]}',
        b'{"stream": STREAM, "n": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b"\xff",
        b"",
    ],
    ids=range(5),
)
async def test_what_no_server_could_be_sent_is_no_json(
    sqlite_url: str, upstream: str, scripted: Scripted, body: bytes, stream: bytes
) -> None:
    async with recording(sqlite_url, upstream) as url, plain_http() as http:
        told = await http.post(
            f"{url}/rollouts/t/0/v1/chat/completions", content=body.replace(b"STREAM", stream)
        )
    assert told.status_code == 400
    assert "no JSON" in told.json()["error"]["message"]
    assert scripted.asked == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_upstream_refuses_is_passed_on_with_its_status(
    sqlite_url: str, upstream: str, scripted: Scripted, *, stream: bool
) -> None:
    async with recording(sqlite_url, upstream, max_in_flight=1) as url:
        scripted.status, scripted.headers = 429, {"retry-after": "7"}
        told = await chat(url, "t/0", stream=stream)
        assert (told.status_code, told.headers["retry-after"]) == (429, "7")
        scripted.status, scripted.headers = 400, {}
        scripted.answer = {"error": {"message": "too long", "code": "context_length_exceeded"}}
        told = await chat(url, "t/0", stream=stream)
        assert (told.status_code, told.json()) == (400, scripted.answer)
        scripted.status, scripted.answer = 413, b"<html>too large"
        told = await chat(url, "t/0", stream=stream)
        assert told.status_code == 413
        assert "413 <html>too large" in told.json()["error"]["message"]
        scripted.status, scripted.answer = 200, whole(choice())
        assert (await chat(url, "t/0", stream=stream)).status_code == 200
    assert len(await stored(sqlite_url, "agent.turns")) == 1


async def test_a_turn_that_is_stored_is_answered_whatever_is_in_it(
    sqlite_url: str, upstream: str, scripted: Scripted
) -> None:
    top = [{"token": "x", "logprob": float("-inf")}]
    content = [{**LOGPROB, "top_logprobs": top}] * 2
    scripted.answer = whole(choice("half of \ud83d", logprobs={"content": content}))
    async with recording(sqlite_url, upstream) as url:
        told = await chat(url, "t/0", logprobs=True, top_logprobs=1)
    (said,) = told.json()["choices"]
    assert (said["message"]["content"], said["logprobs"]["content"]) == ("half of \ud83d", content)
    assert len(await stored(sqlite_url, "agent.turns")) == 1


async def test_a_reward_under_another_key_closes_nothing(sqlite_url: str, upstream: str) -> None:
    async with recording(sqlite_url, upstream) as url, plain_http() as http:
        await chat(url, "t/0")
        for body in ({"score": 1.0}, {}):
            told = await http.post(f"{url}/v1/rollouts/t/0/reward", json=body)
            assert (told.status_code, "no key 'reward'" in told.text) == (400, True)
        assert (await reward(url, "t/0", 1.0)).status_code == 200
    (made,) = await stored(sqlite_url)
    assert made.reward == 1.0


async def test_an_answer_that_nobody_waited_for_is_no_turn(
    sqlite_url: str, upstream: str, scripted: Scripted
) -> None:
    async with recording(sqlite_url, upstream) as url:
        scripted.delay_s = 0.5
        with pytest.raises(httpx2.TimeoutException):
            await chat(url, "t/0", patience_s=0.2)
        scripted.delay_s = 0
        assert (await chat(url, "t/0")).status_code == 200
        await anyio.sleep(0.6)
        assert len((await reward(url, "t/0", 1.0)).json()["uids"]) == 1


async def test_a_client_that_leaves_amid_its_request_is_no_error_of_the_recorder(
    sqlite_url: str, upstream: str, capfd: pytest.CaptureFixture[str]
) -> None:
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 99\r\n\r\n{"
    async with recording(sqlite_url, upstream, max_in_flight=1) as url:
        async with await anyio.connect_tcp("127.0.0.1", int(url.rpartition(":")[2])) as leaving:
            await leaving.send(head.encode())
        with anyio.fail_after(20):
            while (await chat(url, "t/0")).status_code == 429:  # it may be in flight still
                await anyio.sleep(0.01)
    assert "Traceback" not in "".join(capfd.readouterr())


class Endless:
    """An upstream that never ends an answer by itself.

    Attributes:
        asked: set when it is asked.
        left: set when the one who asked has gone.
    """

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.left = threading.Event()

    async def chat(self, request: Request) -> Response:
        """Answer until the client goes."""
        streams = (await request.json()).get("stream")
        self.asked.set()
        if streams:
            return StreamingResponse(self._lines(), media_type="text/event-stream")
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.left.set()
        return Response()

    async def _lines(self) -> AsyncIterator[bytes]:
        try:
            yield f"data: {json.dumps(piece())}\n\n".encode()
            await anyio.sleep_forever()
        finally:
            self.left.set()


@pytest.mark.parametrize(
    "body",
    [{}, {"stream": True}, {"stream": True, "tools": [{"type": "function", "function": {}}]}],
    ids=["whole", "stream", "stream with tools"],
)
async def test_a_client_that_leaves_stops_the_generation(
    sqlite_url: str, body: dict[str, Any]
) -> None:
    endless = Endless()
    routes = [Route("/v1/chat/completions", endless.chat, methods=["POST"])]
    with served(Starlette(routes=routes)) as upstream:
        async with recording(sqlite_url, upstream) as url:
            async with anyio.create_task_group() as group:
                group.start_soon(partial(chat, url, "t/0", **body))
                assert await anyio.to_thread.run_sync(endless.asked.wait, 20)
                group.cancel_scope.cancel()
            assert await anyio.to_thread.run_sync(endless.left.wait, 20)
            assert (await reward(url, "t/0", 1.0)).status_code == 400  # nothing was said in it


async def test_a_closed_rollout_is_told_so_before_anything_is_generated(
    store_url: str, upstream: str, scripted: Scripted
) -> None:
    async with recording(store_url, upstream) as url:
        for run in (1, 3):
            assert (await chat(url, f"t/{run}")).status_code == 200
            assert (await reward(url, f"t/{run}", 1.0)).status_code == 200
        for rollout, body in (
            ("t/1", {}),
            ("t/1", {"stream": True}),
            ("t/0", {"n": 2}),
            ("t/2", {"n": 2}),
        ):
            told = await chat(url, rollout, **body)
            assert (told.status_code, "is closed" in told.text) == (409, True)
        assert scripted.asked == 2
    async with recording(store_url, upstream) as url:  # and one that knows it from the store
        assert (await chat(url, "t/1", stream=True)).status_code == 409
        assert (await chat(url, "t/0", n=1)).status_code == 200
    assert scripted.asked == 3


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
async def test_the_reasoning_is_kept_in_the_messages(
    store_url: str, upstream: str, scripted: Scripted, key: str
) -> None:
    said = {"role": "assistant", "content": "4", key: "two and two"}
    scripted.answer = whole(choice(message=said))
    scripted.chunks = [
        whole(choice(delta={key: "two "}, finish_reason=None, token_ids=[4], logprobs=LOGPROBS)),
        whole(choice(delta={key: "and two"}, finish_reason=None, token_ids=[5], logprobs=LOGPROBS)),
        whole(choice(delta={"content": "4"}, token_ids=[6], logprobs=LOGPROBS)),
        "[DONE]",
    ]
    async with recording(store_url, upstream) as url:
        assert (await chat(url, "t/0")).json()["choices"][0]["message"] == said
        assert (await chat(url, "t/1", stream=True)).text.endswith("data: [DONE]\n\n")
    async with recording(store_url, upstream) as url:  # which knows the turns from the store
        for run in range(2):
            assert (await reward(url, f"t/{run}", 1.0)).status_code == 200
    made = await stored(store_url)
    assert [one.messages and one.messages[-1] for one in made] == [said, said]


POSTS = (
    "/rollouts/t/0/v1/chat/completions",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/rollouts/t/0/reward",
    "/rollouts/t/0/v1/seal",
    "/v1/batches/recorded/seal",
)
FORM = "application/x-www-form-urlencoded"


@pytest.mark.parametrize("token", [None, "secret"])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://attacker.example", "content-type": "text/plain"}, 403),
        ({"origin": "http://attacker.example"}, 403),
        ({"origin": "http://localhost:1"}, 403),
        ({"origin": "null", "content-type": "application/json"}, 403),
        ({"content-type": "text/plain;charset=UTF-8"}, 415),
        ({"content-type": FORM}, 415),
        ({"content-type": "multipart/form-data; boundary=x"}, 415),
    ],
)
async def test_a_page_of_a_browser_can_make_a_recorder_do_nothing(
    sqlite_url: str,
    upstream: str,
    scripted: Scripted,
    headers: dict[str, str],
    status: int,
    token: str | None,
) -> None:
    known = {"authorization": "Bearer secret"}
    body = json.dumps({"messages": HELLO, "reward": 1_000_000}).encode()
    async with (
        recording(sqlite_url, upstream, token=token) as url,
        plain_http(headers=known) as http,
    ):
        for path in POSTS:
            told = await http.post(f"{url}{path}", content=body, headers=headers)
            assert (told.status_code, told.json()["error"]["type"]) == (status, "recorder")
    assert scripted.asked == 0
    assert await stored(sqlite_url) == []


@pytest.mark.parametrize("host", ["attacker.example", "localhost.attacker.example:80", "[::1", ""])
async def test_a_foreign_name_that_leads_to_this_machine_is_not_answered(
    sqlite_url: str, upstream: str, scripted: Scripted, host: str
) -> None:
    headers = {"host": host, "origin": f"http://{host}"}
    async with recording(sqlite_url, upstream) as url, plain_http() as http:
        for path in POSTS:
            told = await http.post(f"{url}{path}", json={"messages": HELLO}, headers=headers)
            assert (told.status_code, "--token" in told.text) == (421, True)
        assert (await http.get(f"{url}/v1/models", headers=headers)).status_code == 421
    assert scripted.asked == 0


@pytest.mark.parametrize("host", ["127.0.0.1:8400", "localhost", "LOCALHOST:1", "[::1]:8400"])
async def test_this_machine_is_answered_under_each_of_its_names(
    sqlite_url: str, upstream: str, host: str
) -> None:
    headers = {"host": host, "content-type": "Application/JSON; charset=utf-8"}
    body = json.dumps({"messages": HELLO}).encode()
    async with recording(sqlite_url, upstream) as url, plain_http() as http:
        told = await http.post(f"{url}{POSTS[0]}", content=body, headers=headers)
    assert told.status_code == 200


async def test_with_a_token_any_name_of_the_machine_is_answered(
    sqlite_url: str, upstream: str
) -> None:
    headers = {"host": "trainer-3.example:8400", "authorization": "Bearer secret"}
    async with (
        recording(sqlite_url, upstream, token="secret") as url,
        plain_http(headers=headers) as http,
    ):
        assert (await http.post(f"{url}{POSTS[0]}", json={"messages": HELLO})).is_success
