"""What a rollout may do to `tb.explore`: be cancelled, and return what others return, too."""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import pytest
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import trinity_buffer as tb
from tests.explorer.test_exploring import SMALL, TASKS, all_runs, answer, experience, runs, sealed
from tests.explorer.vllm_dialect import served
from trinity_buffer.errors import (
    InferenceServerError,
    InvalidArgumentError,
    InvalidExperienceError,
    TrainingError,
)
from trinity_buffer.explorer.explore import BatchReport
from trinity_buffer.explorer.server import Server


async def explore(url: str, rollout: Any, **options: Any) -> Any:
    async with tb.open_store(url) as store:
        experiment = await store.experiment("run", config={})
        given: dict[str, Any] = {"tasks": TASKS, "model": None, **SMALL, **options}
        await tb.explore(experiment, actor="e0", rollout=rollout, **given)
        stored = [one async for one in experiment.read()]
        assert await runs(experiment) == all_runs()
        return stored


@pytest.mark.parametrize("concurrency", [1, 8])
async def test_a_rollout_that_is_cancelled_from_within_ends_it_with_its_name(
    sqlite_url: str, concurrency: int
) -> None:
    async def cancelled(task: str, model: object) -> list[tb.Experience]:
        if task == "bee":
            shared = asyncio.ensure_future(asyncio.sleep(60))
            asyncio.get_running_loop().call_soon(shared.cancel)
            await shared
        return [experience()]

    with pytest.raises(TrainingError, match=r"rollout epoch0-0/1/[01] was cancelled from within"):
        await explore(sqlite_url, cancelled, concurrency=concurrency)
    await explore(sqlite_url, answer)  # what is missing is made


async def test_explore_is_cancelled_from_outside_without_an_error(sqlite_url: str) -> None:
    begun = asyncio.Event()

    async def hangs(task: str, model: object) -> list[tb.Experience]:
        begun.set()
        await asyncio.sleep(60)
        return []

    exploring = asyncio.ensure_future(explore(sqlite_url, hangs))
    await begun.wait()
    exploring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await exploring


async def test_rollouts_may_share_a_mapping_and_return_the_same_object(sqlite_url: str) -> None:
    class Versioned:
        def load(self, uri: str) -> Versioned:
            return self

    shared = experience()
    shared.info = {"source": "cache"}

    async def cached(task: str, model: object) -> list[tb.Experience]:
        await asyncio.sleep(0)
        return [shared]

    stored = await explore(sqlite_url, cached, model=Versioned())
    assert shared.info == {"source": "cache"}
    assert [one.info["source"] for one in stored] == ["cache"] * len(stored)
    assert {one.info["model_version"] for one in stored} == {0}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_batches", 0), ("max_batches", "1"), ("concurrency", "8"), ("attempts", True)),
        *(("timeout_s", "5"), ("timeout_s", math.nan), ("timeout_s", 0), ("retry_delay_s", -1)),
        *(("retry_on", OSError), ("retry_on", ("OSError",)), ("report", 5)),
        ("rollouts_per_group", None),
    ],
)
async def test_an_option_that_cannot_be_is_refused_first(
    sqlite_url: str, name: str, value: object
) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape(f"{name}={value!r}: it must be")):
        await explore(sqlite_url, answer, **{name: value})


def changed(**fields: Any) -> tb.Experience:
    made = experience()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


REFUSED: dict[str, Callable[[], tb.Experience]] = {
    "a reward that is no number": lambda: experience(math.nan),
    "72 MiB of pixels": lambda: changed(
        multi_modal_inputs={"pixel_values": torch.zeros(18, 1024, 1024)}
    ),
    "log-probs of another length": lambda: changed(logprobs=torch.zeros(1)),
    "a token below zero": lambda: changed(tokens=torch.tensor([1, -2, 3])),
    "an info that cannot be stored": lambda: changed(info={"seen": object()}),
    "an info that contains itself": lambda: changed(info=contains_itself()),
}


def contains_itself() -> dict[str, Any]:
    info: dict[str, Any] = {}
    info["info"] = info
    return info


class Refused:
    """A rollout whose runs of one task the store refuses, as often as it is said."""

    def __init__(self, make: Callable[[], tb.Experience], times: int) -> None:
        self.make = make
        self.times = times
        self.calls: Counter[str] = Counter()

    async def __call__(self, task: str, model: object) -> list[tb.Experience]:
        self.calls[task] += 1
        await anyio.lowlevel.checkpoint()
        if task == "bee" and self.calls[task] <= self.times:
            return [experience(), self.make()]
        return [experience()]


@pytest.mark.parametrize("why", REFUSED)
async def test_a_run_that_the_store_refuses_is_left_out_and_all_others_are_stored(
    why: str, store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    rollout = Refused(REFUSED[why], times=99)
    reports: list[BatchReport] = []
    async with tb.open_store(store_url) as store:
        experiment = await store.experiment("run", config={})
        await tb.explore(
            experiment, actor="e0", tasks=TASKS, rollout=rollout, model=None, attempts=2,
            on_failure="leave_out", report=reports.append, **SMALL,
        )  # fmt: skip
        left_out = {"epoch0-0/1/0", "epoch0-0/1/1"}
        assert await runs(experiment) == Counter(set(all_runs()) - left_out)
        assert await sealed(experiment) == {"epoch0-0": 2, "epoch0-1": 4, "epoch0-2": 2}
    assert rollout.calls == Counter(dict.fromkeys(TASKS, 2)) + Counter({"bee": 2})
    assert {report.batch: report.left_out for report in reports} == {
        "epoch0-0": 2,
        "epoch0-1": 0,
        "epoch0-2": 0,
    }
    told = sorted(message for message in caplog.messages if "is left out" in message)
    for message, rid in zip(told, sorted(left_out), strict=True):
        assert message.startswith(
            f"rollout {rid} is left out after 2 attempts: InvalidExperienceError: experience {rid}/"
        )


async def test_a_run_that_the_store_refuses_once_is_made_again(store_url: str) -> None:
    rollout = Refused(REFUSED["a reward that is no number"], times=2)
    async with tb.open_store(store_url) as store:
        experiment = await store.experiment("run", config={})
        await tb.explore(experiment, actor="e0", tasks=TASKS, rollout=rollout, model=None, **SMALL)
        assert await runs(experiment) == all_runs()


@pytest.mark.parametrize(("options", "calls"), [({"attempts": 2}, 2), ({"retry_on": ()}, 1)])
async def test_a_run_that_the_store_refuses_ends_it_by_default_with_its_name(
    options: dict[str, Any], calls: int, sqlite_url: str
) -> None:
    rollout = Refused(REFUSED["a reward that is no number"], times=99)
    with pytest.raises(
        InvalidExperienceError, match=r"experience epoch0-0/1/0/1/: reward"
    ) as caught:
        await explore(sqlite_url, rollout, concurrency=1, **options)
    assert caught.value.__notes__ == ["in the rollout epoch0-0/1/0"]
    assert rollout.calls["bee"] == calls
    await explore(sqlite_url, answer)  # what is missing is made


class Refusing:
    """A server that answers a task with the status that is its name, once."""

    def __init__(self) -> None:
        self.asked: Counter[int] = Counter()

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/v1/completions", self.answer, methods=["POST"])])

    async def answer(self, request: Request) -> Response:
        status = int((await request.json())["prompt"])
        self.asked[status] += 1
        error = {"error": {"message": "refused"}}
        return JSONResponse(error, status_code=status if self.asked[status] == 1 else 200)


async def explore_refusing(url: str, status: int, on_failure: str) -> tuple[Counter[int], int]:
    """Return how often a server was asked that refuses with ``status``, and how many runs came."""
    refusing = Refusing()
    with served(refusing.app()) as server_url:
        async with Server(server_url) as server, tb.open_store(url) as store:
            experiment = await store.experiment("run", config={})

            async def rollout(task: int, model: object) -> list[tb.Experience]:
                await server.post("/v1/completions", {"prompt": str(task)})
                return [experience()]

            await tb.explore(
                experiment, actor="e0", tasks=[status, 200], rollout=rollout, model=None,
                on_failure=on_failure, rollouts_per_group=1, retry_delay_s=0.0,
            )  # fmt: skip
            return refusing.asked, (await runs(experiment)).total()


@pytest.mark.parametrize(
    ("status", "asked", "stored"),
    [(400, 1, 1), (413, 1, 1), (422, 1, 1), (408, 2, 2), (429, 2, 2), (500, 2, 2), (503, 2, 2)],
)
async def test_a_request_that_a_server_refuses_is_not_sent_again(
    status: int, asked: int, stored: int, sqlite_url: str
) -> None:
    counts, count = await explore_refusing(sqlite_url, status, "leave_out")
    assert (counts, count) == (Counter({status: asked, 200: 1}), stored)


@pytest.mark.parametrize(
    ("status", "on_failure"),
    [(400, "raise"), (401, "leave_out"), (403, "leave_out"), (404, "leave_out")],
)
async def test_what_a_server_refuses_to_every_rollout_ends_it(
    status: int, on_failure: str, sqlite_url: str
) -> None:
    with pytest.raises(InferenceServerError, match=f"{status} .*refused"):
        await explore_refusing(sqlite_url, status, on_failure)
