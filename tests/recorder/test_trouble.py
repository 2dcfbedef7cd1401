"""The recorder when something goes wrong: broken answers, odd requests, turns that come late."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import httpx2
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tests.explorer.vllm_dialect import served
from tests.recorder.test_recorder import HELLO, recording, reward, stored

LOGPROB = {"token": "?", "logprob": -0.5}


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
        answer: to a request without a stream.
        chunks: to one with; a text is sent as it is.
        status: of an answer.
        headers: of an answer.
    """

    def __init__(self) -> None:
        self.answer: Any = whole(choice())
        self.chunks: list[Any] = [piece("stop"), "[DONE]"]
        self.status = 200
        self.headers: dict[str, str] = {}

    async def chat(self, request: Request) -> Response:
        """Answer."""
        if (await request.json()).get("stream"):
            return StreamingResponse(self._lines(), media_type="text/event-stream")
        # Not JSONResponse, which refuses NaN.
        body = json.dumps(self.answer)
        return Response(body, self.status, self.headers, media_type="application/json")

    async def _lines(self) -> AsyncIterator[bytes]:
        for one in self.chunks:
            text = one if isinstance(one, str) else json.dumps(one)
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


async def chat(url: str, rollout: str, **body: Any) -> Any:
    """Ask once, in ``rollout``."""
    async with httpx2.AsyncClient() as http:
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
