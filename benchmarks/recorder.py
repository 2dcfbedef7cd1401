"""What the recorder adds to an answer: the same load with it and without, in turns.

python -m benchmarks.recorder --minutes 10 --rate 100 --conversations 500

A scripted upstream answers after a second, with 256 tokens and their log-probs; generator,
recorder and store run beside it. Each slice is a line of the results file, and a run that was cut
short goes on with the slices that it lacks. At the end, what was answered is compared with what is
stored.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from trinity_buffer.pipeline.store import open_store

TOKENS = 256
SLICE_S = 15.0
DELAY_S = 1.0


def scripted() -> Starlette:
    """Return an upstream that says the same to everybody, a second later."""
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": "word " * TOKENS},
        "token_ids": list(range(TOKENS)),
        "logprobs": {"content": [{"token": "word", "logprob": -0.5} for _ in range(TOKENS)]},
    }
    answer = {"id": "x", "object": "chat.completion", "choices": [choice]}
    counts = {"usage": {"completion_tokens": TOKENS}}
    body = json.dumps({**answer, **counts, "prompt_token_ids": list(range(64))}).encode()

    async def chat(_: Request) -> Response:
        await anyio.sleep(DELAY_S)  # what is measured against
        return Response(body, media_type="application/json")

    return Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


@contextmanager
def running(*words: str, port: int) -> Iterator[str]:
    """Yield the URL of a process that listens on ``port``, until the body ends."""
    process = subprocess.Popen([sys.executable, "-m", *words])
    try:
        while process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


async def load(url: str, rate: float, conversations: int, begin: int) -> dict[str, Any]:
    """Ask for `SLICE_S` at an even rate; return the seconds of each answer, and the refusals."""
    took: list[float] = []
    statuses: dict[int, int] = {}
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    body = {"messages": [{"role": "user", "content": "go on"}], "logprobs": True}

    async with httpx2.AsyncClient(timeout=60, limits=limits) as http:

        async def ask(number: int) -> None:
            headers = {"X-Trinity-Rollout": f"c{number % conversations}/0"}
            start = time.perf_counter()
            answer = await http.post(f"{url}/v1/chat/completions", json=body, headers=headers)
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            if answer.is_success:
                took.append(time.perf_counter() - start)

        start = time.perf_counter()
        async with anyio.create_task_group() as group:
            for number in range(int(rate * SLICE_S)):
                await anyio.sleep(max(0.0, start + number / rate - time.perf_counter()))
                group.start_soon(ask, begin + number)
    return {"seconds": took, "statuses": statuses}


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Return median and 99th percentile, in milliseconds."""
    cuts = statistics.quantiles(seconds, n=100)
    return {"p50_ms": round(cuts[49] * 1e3, 1), "p99_ms": round(cuts[98] * 1e3, 1)}


async def turns_in(store: Path) -> int:
    """Return how many turns a store holds."""
    async with open_store(f"sqlite:///{store}", read_only=True) as opened:
        turns = await opened.experiment("recorded.turns")
        return sum([1 async for _ in turns.read(families=("light",))])


def report(slices: list[dict[str, Any]], stored: int) -> str:
    """Return the figures of all slices."""
    seconds: dict[str, list[float]] = {"direct": [], "recorded": []}
    for one in slices:
        seconds[one["way"]] += one["seconds"]
    found = {way: quantiles(values) for way, values in seconds.items()}
    added = {
        key: round(found["recorded"][key] - found["direct"][key], 1) for key in found["direct"]
    }
    answered = len(seconds["recorded"])
    counts = [pair for one in slices for pair in one["statuses"].items()]
    refused = sum(count for status, count in counts if str(status) == "429")
    kept = f"answered {answered}, stored {stored}, refused {refused}"
    return json.dumps({**found, "added": added}) + f"\n{kept}"


def main() -> None:
    """Run the slices that are lacking, then say what all of them gave."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=100.0, help="answers a second")
    parser.add_argument("--conversations", type=int, default=500)
    parser.add_argument("--results", type=Path, default=Path("runs/recorder.jsonl"))
    parser.add_argument("--upstream", type=int, help="be the scripted upstream on this port")
    options = parser.parse_args()
    if options.upstream:
        uvicorn.run(scripted(), port=options.upstream, log_level="warning", access_log=False)
        return
    options.results.parent.mkdir(parents=True, exist_ok=True)
    store = options.results.with_suffix(".db").resolve()
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    slices = [json.loads(line) for line in lines]
    behind, before = free_port(), free_port()
    upstream = ("benchmarks.recorder", "--upstream", str(behind))
    with running(*upstream, port=behind) as direct:
        recorder = ("trinity_buffer", "record", "--upstream", direct, "--store", str(store))
        with running(*recorder, "--port", str(before), port=before) as recorded:
            while len(slices) * SLICE_S < options.minutes * 60:
                way = ("direct", "recorded")[len(slices) % 2]
                url = {"direct": direct, "recorded": recorded}[way]
                begin = len(slices) * int(options.rate * SLICE_S)
                made = anyio.run(load, url, options.rate, options.conversations, begin)
                slices.append({"way": way, **made})
                with options.results.open("a") as file:
                    file.write(json.dumps(slices[-1]) + "\n")
                print(way, quantiles(made["seconds"]), made["statuses"], flush=True)
    print(report(slices, anyio.run(turns_in, store)))


if __name__ == "__main__":
    main()
