"""What was recorded is trained and replayed from the command line, as any other run."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from tests.cli.calling import Cli
from tests.cli.conftest import cli
from tests.explorer.vllm_dialect import VLLM, served
from tests.recorder.test_recorder import HELLO, client, recording, reward
from trinity_buffer import open_store
from trinity_buffer.cli.main import run_command
from trinity_buffer.demo.tiny_model import make_tiny_model

__all__ = ["cli"]  # the fixture


async def talk(store: Path, upstream: str) -> None:
    """Let an agent attempt two tasks, twice each."""
    async with recording(f"sqlite:///{store}", upstream) as url:
        for task in range(2):
            for run in range(2):
                async with client(f"{url}/rollouts/{task}/{run}") as agent:
                    asked: Any = {"model": "tiny", "messages": HELLO}
                    await agent.chat.completions.create(**asked)
                assert (await reward(url, f"{task}/{run}", float(run))).status_code == 200


@pytest.mark.long
def test_what_was_recorded_is_trained_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tiny_model(tmp_path / "model", width=16, layers=1, heads=2)
    with served(VLLM(tmp_path / "model").app()) as upstream:
        anyio.run(talk, tmp_path / "agent.db", upstream)
    file = tmp_path / "run.toml"
    file.write_text(
        'store = "agent.db"\nexperiment = "agent"\nmodel = "model"\n'
        "rollouts_per_group = 2\ngroups_per_step = 2\n"
    )
    for command in ("annotate", "train", "replay"):
        argv = ["trinity-buffer", command, "--config", str(file)]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as end:
            run_command()
        assert not end.value.code, capsys.readouterr().err
    assert "steps 1 to 1: weights bit-identical" in capsys.readouterr().out


@contextmanager
def at_work(command: list[str], folder: Path) -> Iterator[str]:
    """Yield the URL of a recorder that a command starts."""
    whole = [str(Path(sys.executable).with_name(command[0])), *command[1:]]
    with subprocess.Popen(whole, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            said = process.stdout.readline()
            found = re.search(r"into recorded: (http://.*)/v1$", said.strip())
            assert found, said
            yield found[1]
        finally:
            process.send_signal(signal.SIGINT)


def recorder(upstream: str, store: Path, *options: str) -> AbstractContextManager[str]:
    """Return the command ``record`` at work."""
    command = ["trinity-buffer", "record", "--upstream", upstream, "--store", str(store)]
    return at_work([*command, "--port", "0", *options], store.parent)


@pytest.mark.long
def test_what_the_command_recorded_is_trained_with_a_file_that_names_a_model(
    tmp_path: Path, cli: Cli
) -> None:
    make_tiny_model(tmp_path / "model", width=16, layers=1, heads=2)
    file, store, kept = tmp_path / "run.toml", tmp_path / "agent.db", tmp_path / "agent.acks"
    file.write_text('model = "model"\n')
    with (
        served(VLLM(tmp_path / "model").app()) as upstream,
        recorder(upstream, store, "--rollouts-per-group", "2") as url,
        httpx2.Client(timeout=60) as http,
    ):
        for place in ("0/0", "0/1"):
            at = f"{url}/rollouts/{place}/v1"
            assert http.post(f"{at}/chat/completions", json={"messages": HELLO}).is_success
        (waiting,) = cli("doctor", "--store", store, "--json").json[0]["stuck"]
        assert waiting["what"] == "2 rollouts of 'recorded' without a reward"
        assert "POST /v1/rollouts/TASK/RUN/reward" in waiting["remedy"]
        uids = []
        for run in range(2):
            told = http.post(f"{url}/v1/rollouts/0/{run}/reward", json={"reward": run})
            uids += told.json()["uids"]
    kept.write_text("".join(f"{uid}\n" for uid in uids))
    assert "recorded.turns" not in cli("doctor", "--store", store).out
    for command in (["annotate"], ["train", "--config", file], ["steps"]):
        ended = cli(*command, "--store", store)
        assert ended.code == 0, ended
    assert "steps 1 to 1: weights bit-identical" in cli("replay", "--store", store).out
    checked = cli("verify", "--store", store, "--acknowledged", kept)
    assert (checked.code, "compared with 2 acknowledged uids" in checked.out) == (0, True)


@pytest.mark.long
def test_a_recorded_task_is_decided_when_nothing_of_it_was_closed_for_a_while(
    tmp_path: Path, cli: Cli
) -> None:
    async def close(url: str, runs: range) -> None:
        async with httpx2.AsyncClient(verify=False, timeout=60) as http:
            for run in runs:
                at = f"{url}/rollouts/t/{run}/v1/chat/completions"
                assert (await http.post(at, json={"messages": HELLO})).is_success
                assert (await reward(url, f"t/{run}", float(run))).status_code == 200

    async def record(runs: range, **config: Any) -> None:
        async with recording(url, upstream, config=config) as recorder:
            await close(recorder, runs)

    store = tmp_path / "agent.db"
    url = f"sqlite:///{store}"
    make_tiny_model(tmp_path / "model", width=16, layers=1, heads=2)
    with served(VLLM(tmp_path / "model").app()) as upstream:
        anyio.run(lambda: record(range(3), idle_s=0.5))
        words = ["annotate", "--store", store, "--experiment", "agent"]
        told = cli(*words, "--strategy", "grpo")
        assert "3 annotated, 0 rejected, 0 waiting" in told.out
        # A number that is given at a restart holds from then on, for sets that begin then.
        anyio.run(lambda: record(range(3, 4), rollouts_per_group=4))
    told = cli(*words, "--strategy", "opmd", "--name", "four")
    assert "4 annotated, 0 rejected, 0 waiting" in told.out
    config = cli("stats", "--store", store, "--experiment", "agent", "--config").out
    assert ('"idle_s": 0.5' in config, '"rollouts_per_group": 4' in config) == (True, True)


def test_an_empty_token_is_no_token(tmp_path: Path, cli: Cli) -> None:
    store = tmp_path / "no" / "agent.db"
    for host in ("127.0.0.1", "0.0.0.0"):
        words = ["record", "--upstream", "http://127.0.0.1:9", "--store", store]
        told = cli(*words, "--host", host, "--token", "")
        assert (told.code, "--token is empty" in told.err) == (2, True)
    assert not store.parent.exists()


def test_a_recorder_keeps_the_turns_of_what_is_asked_for(tmp_path: Path, cli: Cli) -> None:
    async def make() -> None:
        async with open_store(f"sqlite:///{tmp_path / 'two.db'}") as store:
            for name in ("one", "one.turns"):
                await store.experiment(name, config={})
        async with open_store(f"sqlite:///{tmp_path / 'three.db'}") as store:
            for name in ("one", "one.turns", "other"):
                await store.experiment(name, config={})

    anyio.run(make)
    assert cli("events", "--store", tmp_path / "two.db").code == 0
    assert "several experiments" in cli("events", "--store", tmp_path / "three.db").err


PAGE = (Path(__file__).parents[2] / "docs" / "own_rollout.md").read_text()
AGENT = """#!/usr/bin/env python
from openai import OpenAI

messages = [dict(role="user", content="hello")]
OpenAI().chat.completions.create(model="tiny", messages=messages)
"""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("curl") is None, reason="the recipe needs curl")
def test_the_recipe_of_the_page_annotates_its_runs(tmp_path: Path) -> None:
    """As it is printed, but for the server and the port."""
    recipe = {
        name: textwrap.dedent(block)
        for name, block in re.findall(r"```sh (recorder|agent)\n(.*?)```", PAGE, re.DOTALL)
    }
    make_tiny_model(tmp_path / "model", width=16, layers=1, heads=2)
    (tmp_path / "agent").write_text(AGENT)
    (tmp_path / "agent").chmod(0o755)
    with served(VLLM(tmp_path / "model").app()) as upstream:
        command = recipe["recorder"].replace("http://host:8000", upstream).split()
        with at_work([*command, "--port", "0"], tmp_path) as url:
            bash = ["bash", "-euo", "pipefail", "-c", recipe["agent"]]
            bash[-1] = bash[-1].replace("http://127.0.0.1:8400", url)
            ended = subprocess.run(
                bash,
                cwd=tmp_path,
                env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
                capture_output=True,
                text=True,
                check=False,
            )
    assert ended.returncode == 0, ended.stderr
    assert "3 annotated, 0 rejected" in ended.stdout.splitlines()[-1]
