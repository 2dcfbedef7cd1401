"""The recorder: an unchanged client talks through it, and what passes is stored and trainable."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx2
import openai
import pytest
import torch
import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.explorer.vllm_dialect import VLLM, served
from trinity_buffer import open_store
from trinity_buffer.demo.tiny_model import make_tiny_model
from trinity_buffer.experience import Experience
from trinity_buffer.explorer.local_model import LocalModel
from trinity_buffer.explorer.server import Server
from trinity_buffer.recorder.app import Recorder
from trinity_buffer.recorder.recording import Recording
from trinity_buffer.trainer.token_scores import token_scores

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model(folder, width=16, layers=1, heads=2)
    return folder


@pytest.fixture
def vllm(tiny: Path) -> VLLM:
    return VLLM(tiny)


@pytest.fixture
def upstream(vllm: VLLM) -> Iterator[str]:
    with served(vllm.app()) as url:
        yield url


@asynccontextmanager
async def recording(
    store_url: str, upstream: str, *, config: Any = None, **settings: Any
) -> AsyncIterator[str]:
    """Yield the URL of a recorder before ``upstream``."""
    config = {"rollouts_per_group": 2} if config is None else config
    async with open_store(store_url) as store, Server(upstream) as behind:
        kept = await Recording.begin(store, "agent", actor="r0", config=config)
        recorder = Recorder(behind, kept, **settings)
        # Whoever connects before the server has begun waits in the socket's queue.
        with socket.create_server(("127.0.0.1", 0)) as listening:
            app = recorder.app()
            server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on"))
            async with anyio.create_task_group() as group:
                group.start_soon(server.serve, [listening])
                yield f"http://127.0.0.1:{listening.getsockname()[1]}"
                server.should_exit = True


async def stored(store_url: str, name: str = "agent") -> list[Experience]:
    """Return what any other process would find."""
    async with open_store(store_url) as store:
        experiment = await store.experiment(name)
        return [one async for one in experiment.read()]


def plain_http(**options: Any) -> httpx2.AsyncClient:
    """Return a client without certificates, which take longer to load than a request takes."""
    return httpx2.AsyncClient(verify=False, **options)


def client(url: str, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, **options)


async def reward(url: str, rollout: str, value: float | None, what: str = "reward") -> Any:
    async with plain_http() as http:
        body = {} if value is None else {"reward": value}
        return await http.post(f"{url}/v1/rollouts/{rollout}/{what}", json=body)


async def test_a_conversation_is_one_experience_that_a_trainer_scores_the_same(
    store_url: str, upstream: str, vllm: VLLM
) -> None:
    async with recording(store_url, upstream) as url:
        async with client(f"{url}/rollouts/t0/1") as agent:
            asked: Any = {"model": "tiny", "max_tokens": 3}
            first = await agent.chat.completions.create(messages=HELLO, **asked)
            said = {"role": "assistant", "content": first.choices[0].message.content}
            more = [*HELLO, said, {"role": "user", "content": "more"}]
            second = await agent.chat.completions.create(messages=more, **asked)
        assert await stored(store_url) == []  # its reward is not known yet
        assert len(await stored(store_url, "agent.turns")) == 2
        closed = await reward(url, "t0/1", 0.5)
    *_, made = await stored(store_url)
    assert closed.json()["uids"][-1] == made.eid.uid == f"recorded/t0/1/{made.eid.step}/"
    assert made.reward == 0.5
    assert made.messages is not None
    assert made.messages[-1]["content"] == second.choices[0].message.content
    scored = token_scores(vllm.model.model, {"input_ids": made.tokens[None]}).logprob[0]
    at = made.prompt_length
    assert made.action_mask is not None
    assert made.logprobs is not None
    mask = made.action_mask
    torch.testing.assert_close(scored[at:][mask], made.logprobs[mask], atol=1e-5, rtol=0)


async def test_each_row_holds_the_conversation_that_its_tokens_are_of(
    store_url: str, upstream: str
) -> None:
    helper = [{"role": "system", "content": "You search."}, {"role": "user", "content": "a wall"}]
    look = {"type": "function", "function": {"name": "look"}}
    asks: list[dict[str, Any]] = [
        {"messages": HELLO, "tools": [look]},
        {"messages": helper},
        {"messages": [*HELLO, *HELLO], "tools": [look]},
    ]
    async with recording(store_url, upstream) as url, plain_http() as http:
        for body in asks:
            at = f"{url}/rollouts/t/0/v1/chat/completions"
            assert (await http.post(at, json=body)).is_success
        assert (await reward(url, "t/0", 1.0)).is_success
    turns, rows = await stored(store_url, "agent.turns"), await stored(store_url)
    assert [row.tokens.tolist() for row in rows] == [turn.tokens.tolist() for turn in turns]
    assert [row.messages for row in rows] == [turn.messages for turn in turns]
    assert [row.tools for row in rows] == [[look], None, [look]]


@pytest.mark.parametrize("stream", [False, True])
async def test_each_turn_says_which_weights_made_it(
    store_url: str, upstream: str, vllm: VLLM, stream: bool
) -> None:
    def change() -> None:
        vllm.version = "8"

    asked: Any = {"model": "tiny", "messages": HELLO, "stream": stream}
    vllm.version = "7"
    async with recording(store_url, upstream) as url, plain_http(timeout=60) as http:
        at = f"{url}/rollouts/t/0/v1/chat/completions"
        assert (await http.post(at, json=asked)).is_success
        vllm.before_answer.append(change)
        assert (await http.post(at, json=asked)).is_success
        assert (await reward(url, "t/0", 1.0)).status_code == 200
    first, second = await stored(store_url)  # the same was asked twice
    assert [one.policy_version for one in (first, second)] == [7, 7]
    ((was,), (became,)) = (one.info["weight_segments"] for one in (first, second))
    assert (was["version"], "later_version" in was, len(was["checksum"])) == ("7", False, 64)
    assert (became["version"], became["later_version"]) == ("7", "8")


@pytest.mark.parametrize("status", [404, 401])
async def test_an_upstream_that_names_no_weights_is_named_once(
    sqlite_url: str, tiny: Path, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    app = VLLM(tiny, has_dev_mode=False).app()

    async def refuse(_: Request) -> Response:
        return Response(status_code=status)

    app.router.routes.append(Route("/weight_info", refuse))
    async with plain_http(timeout=60) as http:
        with served(app) as upstream:
            async with recording(sqlite_url, upstream) as url:
                for _ in range(2):
                    at = f"{url}/rollouts/t/0/v1/chat/completions"
                    assert (await http.post(at, json={"messages": HELLO})).is_success
                assert (await reward(url, "t/0", 1.0)).status_code == 200
    assert caplog.text.count(f"{upstream} does not say which weights it answers with") == 1
    assert {one.policy_version for one in await stored(sqlite_url)} == {None}


async def test_a_server_that_names_its_weights_after_a_restart_is_asked_again(
    sqlite_url: str,
    tiny: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trinity_buffer.explorer.server.ASK_AGAIN_S", 0.0)
    app = VLLM(tiny, has_dev_mode=False).app()
    weights: dict[str, str] = {}

    async def info(_: Request) -> Response:
        return JSONResponse(weights)

    app.router.routes.append(Route("/weight_info", info))
    with served(app) as upstream:
        async with recording(sqlite_url, upstream) as url, plain_http(timeout=60) as http:
            asks = partial(http.post, json={"messages": HELLO})
            async with anyio.create_task_group() as group:  # at once, and one warning
                for run in range(3):
                    group.start_soon(asks, f"{url}/rollouts/t/{run}/v1/chat/completions")
            weights["weight_version"] = "7"
            assert (await asks(f"{url}/rollouts/t/3/v1/chat/completions")).is_success
            for run in range(4):
                assert (await reward(url, f"t/{run}", 1.0)).status_code == 200
    assert caplog.text.count("does not say which weights it answers with") == 1
    versions = {one.eid.run: one.policy_version for one in await stored(sqlite_url)}
    assert versions == {0: None, 1: None, 2: None, 3: 7}


async def test_a_client_gets_what_it_has_asked_for_and_no_more(
    store_url: str, upstream: str
) -> None:
    async with recording(store_url, upstream) as url, plain_http() as http:
        plain = await http.post(f"{url}/v1/chat/completions", json={"messages": HELLO})
        assert set(plain.json()["choices"][0]) == {"index", "finish_reason", "message"}
        assert "prompt_token_ids" not in plain.json()
        asks = {"messages": HELLO, "logprobs": True, "return_token_ids": True}
        whole = await http.post(f"{url}/v1/chat/completions", json=asks)
        assert {"logprobs", "token_ids"} <= set(whole.json()["choices"][0])
        assert plain.headers["x-trinity-rollout"] != whole.headers["x-trinity-rollout"]


async def test_sampling_is_not_left_to_the_defaults_of_the_server(
    store_url: str, upstream: str, vllm: VLLM
) -> None:
    async with recording(store_url, upstream) as url, plain_http() as http:
        for said in ({"temperature": None, "logit_bias": None}, {"top_k": 0}):
            asks = {"messages": HELLO, **said}
            assert (await http.post(f"{url}/v1/chat/completions", json=asks)).is_success
    first, second = vllm.asked
    assert (first["temperature"], first["top_p"], first["repetition_penalty"]) == (1, 1, 1)
    assert (first["min_p"], first["presence_penalty"], first["frequency_penalty"]) == (0, 0, 0)
    assert (first["top_k"], second["top_k"]) == (-1, 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_temperature_of_each_turn_is_recorded_so_that_a_trainer_scores_at_it(
    store_url: str, upstream: str, vllm: VLLM, tiny: Path, *, stream: bool
) -> None:
    messages: list[dict[str, Any]] = [*HELLO]
    said = {"logprobs_mode": "processed_logprobs"}
    for temperature in (0.5, 1.0, 2.0):  # a recorder after the other, as after kill -9
        vllm.model = LocalModel(tiny, temperature=temperature, max_tokens=8)
        async with recording(store_url, upstream, **said) as url, plain_http() as http:
            asks = {"messages": messages, "temperature": temperature, "stream": stream}
            at = f"{url}/rollouts/t0/0/v1/chat/completions"
            assert (await http.post(at, json=asks)).is_success
            turn = (await stored(store_url, "agent.turns"))[-1]
            messages = [*(turn.messages or ()), {"role": "user", "content": "more"}]
            if temperature == 2.0:
                assert (await reward(url, "t0/0", 0.5)).is_success
    seen = set()
    for made in await stored(store_url):
        heat = torch.ones(len(made.tokens))
        for segment in made.info.get("sampling_segments", ()):
            assert segment["logprobs_mode"] == "processed_logprobs"
            heat[segment["begin"] : segment["end"]] = segment["temperature"]
        batch = {"input_ids": made.tokens[None], "temperature": heat[None]}
        scored = token_scores(vllm.model.model, batch).logprob[0, made.prompt_length :]
        assert made.logprobs is not None
        mask = made.action_mask
        torch.testing.assert_close(scored[mask], made.logprobs[mask], atol=1e-5, rtol=0)
        seen |= {*heat[made.prompt_length :][mask].tolist()}
    assert seen == {0.5, 1.0, 2.0}


@pytest.mark.parametrize("tools", [[], [{"type": "function", "function": {"name": "look"}}]])
async def test_a_stream_brings_the_same_and_is_recorded(
    store_url: str, upstream: str, vllm: VLLM, tools: list[Any]
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    vllm.calls = {"tool_calls": [call]} if tools else {}
    asked: Any = {"model": "tiny", "messages": HELLO, "stream": True}
    asked["stream_options"] = {"include_usage": True}
    async with (
        recording(store_url, upstream) as url,
        client(url, default_headers={"X-Trinity-Rollout": "t/0"}) as agent,
    ):
        chunks = [
            chunk
            async for chunk in await agent.chat.completions.create(
                **asked, **({"tools": tools} if tools else {})
            )
        ]
    last = chunks.pop()
    (turn,) = await stored(store_url, "agent.turns")
    assert (last.choices, last.usage and last.usage.total_tokens) == ([], turn.length)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert turn.messages is not None
    assert text == turn.messages[-1]["content"]
    assert chunks[-1].choices[0].finish_reason
    assert all(chunk.choices[0].logprobs is None for chunk in chunks)
    assert turn.logprobs is not None
    if tools:
        assert turn.messages[-1]["tool_calls"] == [call]
        assert [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ()]


@pytest.mark.parametrize("in_parts", [False, True])
async def test_of_several_choices_each_is_a_run_and_the_chosen_one_goes_on(
    store_url: str, upstream: str, *, in_parts: bool
) -> None:
    async with recording(store_url, upstream) as url:
        async with client(f"{url}/rollouts/t/4") as agent:
            asked: Any = {"model": "tiny"}
            answer = await agent.chat.completions.create(messages=HELLO, n=3, **asked)
            texts = [choice.message.content for choice in answer.choices]
            parts = [{"type": "text", "text": f"{texts[1]}\n"}]
            chosen: Any = {"role": "assistant", "content": parts if in_parts else texts[1]}
            await agent.chat.completions.create(messages=[*HELLO, chosen, *HELLO], **asked)
        for run in (4, 5, 6):
            assert (await reward(url, f"t/{run}", run)).status_code == 200
    turns = await stored(store_url, "agent.turns")
    assert sorted(one.eid.run for one in turns) == [4, 5, 5, 6]
    assert {one.eid.run: one.reward for one in await stored(store_url)} == {4: 4, 5: 5, 6: 6}


async def test_of_choices_that_only_call_tools_the_chosen_one_goes_on(
    store_url: str, upstream: str, vllm: VLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = vllm._choice

    def calling(body: dict[str, Any], index: int, made: Any) -> dict[str, Any]:
        function = {"name": "look", "arguments": json.dumps({"at": index})}
        call = {"id": "c", "type": "function", "function": function}
        choice = original(body, index, made)
        choice["message"] |= {"content": None, "tool_calls": [call]}
        return choice

    monkeypatch.setattr(vllm, "_choice", calling)
    async with recording(store_url, upstream) as url, client(f"{url}/rollouts/t/4") as agent:
        tools: Any = [{"type": "function", "function": {"name": "look"}}]
        asked: Any = {"model": "tiny", "tools": tools}
        answer = await agent.chat.completions.create(messages=HELLO, n=3, **asked)
        chosen = answer.choices[1].message.model_dump(exclude_none=True)
        told = {"role": "tool", "tool_call_id": "c", "content": "a wall"}
        await agent.chat.completions.create(messages=[*HELLO, chosen, told], **asked)
    turns = await stored(store_url, "agent.turns")
    assert sorted(one.eid.run for one in turns) == [4, 5, 5, 6]


async def test_the_chosen_one_goes_on_after_the_recorder_was_started_again(
    store_url: str, upstream: str
) -> None:
    asked: Any = {"model": "tiny"}
    async with recording(store_url, upstream) as url, client(f"{url}/rollouts/t/4") as agent:
        answer = await agent.chat.completions.create(messages=HELLO, n=3, **asked)
        texts = [choice.message.content for choice in answer.choices]
        assert len(set(texts)) == 3
        assert (await reward(url, "t/4", 4)).status_code == 200
    async with recording(store_url, upstream) as url, client(f"{url}/rollouts/t/4") as agent:
        chosen = {"role": "assistant", "content": texts[2]}
        await agent.chat.completions.create(messages=[*HELLO, chosen, *HELLO], **asked)
    turns = await stored(store_url, "agent.turns")
    assert sorted(one.eid.run for one in turns) == [4, 5, 6, 6]


@pytest.mark.long
async def test_a_recorder_that_was_killed_is_followed_by_one_that_knows(
    store_url: str, upstream: str
) -> None:
    asked: Any = {"model": "tiny", "messages": HELLO}
    for _ in range(2):
        async with recording(store_url, upstream) as url, client(f"{url}/rollouts/t/0") as agent:
            await agent.chat.completions.create(**asked)
    async with recording(store_url, upstream) as url, client(f"{url}/rollouts/t/0") as agent:
        first = await reward(url, "t/0", 1.0)
        with pytest.raises(openai.ConflictError, match="is closed"):
            await agent.chat.completions.create(**asked)
    async with recording(store_url, upstream) as url, client(f"{url}/rollouts/t/0") as agent:
        again = await reward(url, "t/0", 1.0, "seal")
        other = await reward(url, "t/0", 2.0)
        with pytest.raises(openai.ConflictError, match="is closed"):
            await agent.chat.completions.create(**asked)
    assert len(first.json()["uids"]) == 2  # the same was asked twice: two prompts, two answers
    assert (again.status_code, again.json()["duplicates"]) == (200, 2)
    assert other.status_code == 409
    assert "rollout recorded/t/0 is closed with another reward" in other.text
    assert len(await stored(store_url, "agent.turns")) == 2


async def test_who_is_too_many_is_told_to_come_again(
    store_url: str, upstream: str, vllm: VLLM
) -> None:
    asked: Any = {"model": "tiny", "messages": HELLO}
    answers: list[Any] = []
    async with (
        recording(store_url, upstream, max_in_flight=1) as url,
        plain_http(timeout=60) as http,
        anyio.create_task_group() as group,
    ):
        await http.post(f"{upstream}/pause")

        async def ask() -> None:
            answers.append(await http.post(f"{url}/v1/chat/completions", json=asked))
            if len(answers) == 1:  # the one that was not let in
                await http.post(f"{upstream}/resume")

        group.start_soon(ask)
        group.start_soon(ask)
    assert [answer.status_code for answer in answers] == [429, 200]
    assert answers[0].headers["retry-after"] == "1"
    assert len(await stored(store_url, "agent.turns")) == 1


async def test_what_cannot_be_recorded_is_not_answered(
    store_url: str, upstream: str, vllm: VLLM
) -> None:
    async with recording(store_url, upstream) as url, plain_http() as http:
        at = f"{url}/v1/chat/completions"
        hot = await http.post(at, json={"messages": HELLO, "temperature": 0.3})
        assert (hot.status_code, "`record --logprobs-mode" in hot.text) == (400, True)
        for bent in ({"logit_bias": {"7": -100}}, {"min_tokens": 4}, {"use_beam_search": True}):
            assert (await http.post(at, json={"messages": HELLO, **bent})).status_code == 400
        assert (await http.post(at, content=b"{")).status_code == 400
        screen = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
        seen = [*HELLO, {"role": "user", "content": [{"type": "text", "text": "?"}, screen]}]
        shown = await http.post(at, json={"messages": seen})
        assert (shown.status_code, "messages[1] holds a part 'image_url'" in shown.text) == (
            400,
            True,
        )
        assert "send it to the inference server itself" in shown.text
        assert (await reward(url, "nobody/0", 1.0)).status_code == 400
        vllm.forgets = {"token_ids"}
        bare = await http.post(at, json={"messages": HELLO})
        said = bare.json()["error"]["message"]
        assert bare.status_code == 502
        assert "must return prompt_token_ids, and token_ids and logprobs with each choice" in said
        assert ("require_ids" in said, "0.10.2" in said) == (False, True)
    assert await stored(store_url, "agent.turns") == []


async def test_only_who_has_the_token_is_answered(store_url: str, upstream: str) -> None:
    async with recording(store_url, upstream, token="secret") as url, plain_http() as http:
        at, body = f"{url}/v1/chat/completions", {"messages": HELLO}
        assert (await http.post(at, json=body)).status_code == 401
        assert (await reward(url, "t/0", 1.0)).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert (await http.post(at, json=body, headers=headers)).status_code == 200


async def test_an_answer_may_leave_before_it_is_durable(store_url: str, upstream: str) -> None:
    async with recording(store_url, upstream, ack="before") as url, plain_http() as http:
        body = {"messages": HELLO}
        assert (await http.post(f"{url}/rollouts/t/0/v1/chat/completions", json=body)).is_success
    assert len(await stored(store_url, "agent.turns")) == 1  # it ends with what it has to write


async def test_a_batch_is_sealed_with_what_is_stored(store_url: str, upstream: str) -> None:
    async with recording(store_url, upstream) as url, plain_http() as http:
        body = {"messages": HELLO}
        await http.post(f"{url}/rollouts/b1/t/0/v1/chat/completions", json=body)
        await reward(url, "b1/t/0", 1.0)
        sealed = await http.post(f"{url}/v1/batches/b1/seal")
    assert sealed.json() == {"expected": 1}


async def test_a_reward_behind_the_seal_of_its_batch_is_refused(
    store_url: str, upstream: str
) -> None:
    async with recording(store_url, upstream) as url, plain_http() as http:
        for run in range(2):
            at = f"{url}/rollouts/b1/t/{run}/v1/chat/completions"
            await http.post(at, json={"messages": HELLO})
        await reward(url, "b1/t/0", 1.0)
        assert (await http.post(f"{url}/v1/batches/b1/seal")).json() == {"expected": 1}
        for _ in range(2):
            late = await reward(url, "b1/t/1", 1.0)
            assert (late.status_code, "send rewards before the seal" in late.text) == (409, True)
        assert (await reward(url, "b1/t/0", 1.0)).status_code == 200  # the same again


@pytest.mark.parametrize("place", ["v1/rollouts/t/0", "rollouts/t/0", "rollouts/t/0/v1"])
@pytest.mark.parametrize("what", ["reward", "seal"])
async def test_a_rollout_is_closed_behind_each_form_of_its_url(
    sqlite_url: str, upstream: str, place: str, what: str
) -> None:
    async with recording(sqlite_url, upstream) as url, plain_http() as http:
        await http.post(f"{url}/rollouts/t/0/v1/chat/completions", json={"messages": HELLO})
        closed = await http.post(f"{url}/{place}/{what}", json={"reward": 1.0})
    assert closed.json()["uids"] == ["recorded/t/0/0/"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/rollouts/t/0/rewards", 404),
        ("GET", "/", 404),
        ("GET", "/v1/rollouts/t/0/reward", 405),
    ],
)
async def test_a_path_that_is_not_there_is_told_which_are(
    sqlite_url: str, upstream: str, method: str, path: str, status: int
) -> None:
    async with recording(sqlite_url, upstream) as url, plain_http() as http:
        answer = await http.request(method, f"{url}{path}")
    said = answer.json()["error"]["message"]
    assert answer.status_code == status
    assert said.startswith(f"there is no {method} {path}: there are POST /v1/chat/completions")
    assert "POST /v1/rollouts/TASK/RUN/reward" in said


async def test_a_reward_must_be_a_number(store_url: str, upstream: str) -> None:
    async with recording(store_url, upstream) as url, plain_http() as http:
        for body in ({"reward": "good"}, ["good"], {"reward": True}, {"reward": 10**400}):
            answer = await http.post(f"{url}/v1/rollouts/t/0/reward", json=body)
            assert (answer.status_code, "must be a number" in answer.text) == (400, True)


@pytest.mark.parametrize(
    ("rollout", "body"),
    [
        ("t/0", b"\xff\xfe{"),
        ("t/0", b'{"messages": "hello"}'),
        ("t/0", b'{"messages": ["hello"]}'),
        (f"t/{10**20}", b'{"messages": [{"role": "user", "content": "hello"}]}'),
    ],
)
async def test_a_request_that_makes_no_sense_is_told_so(
    store_url: str, upstream: str, rollout: str, body: bytes
) -> None:
    async with recording(store_url, upstream) as url, plain_http() as http:
        path = f"{url}/rollouts/{rollout}/v1/chat/completions"
        answer = await http.post(path, content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
