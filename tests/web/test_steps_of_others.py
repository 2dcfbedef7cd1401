"""Pages of a step: ordered by what the trainer measured, and of another experiment's trainer."""

from __future__ import annotations

import html
import re

import anyio
import numpy as np
import pytest
from starlette.testclient import TestClient

from tests.handles import StepMeasures
from tests.inspect.test_experts import mixed
from tests.sample_run import rollout
from tests.web.conftest import BASE
from trinity_buffer import open_store, run_strategy
from trinity_buffer.inspector import blame
from trinity_buffer.inspector.source import now
from trinity_buffer.web.app import inspector


def test_rows_are_ordered_by_their_share_of_the_loss(store_url: str) -> None:
    async def train() -> None:
        async with open_store(store_url) as store:
            experiment = await store.experiment("run", config={"rollouts_per_group": 4})
            await experiment.writer("e0").write([rollout("b", 0, run, run / 4) for run in range(4)])
            await run_strategy(experiment, "grpo")
            async with experiment.train_stream(strategy="grpo", groups_per_step=1) as stream:
                async for step in stream:
                    shares = np.array([0.1, 0.4, 0.2, 0.3], np.float32)
                    stream.measure(StepMeasures(step.step, {"loss_share": shares}))
                    await stream.commit(step, checkpoint=None)

    anyio.run(train)
    with TestClient(inspector(store_url), base_url=BASE) as client:
        page = client.get("/run/steps/1").text
        (path,) = re.findall(r'href="([^"]+)">by the share of the loss', page)
        ordered = client.get(html.unescape(path)).text
    assert re.findall(r"<td>(0\.[1-4])</td><td>0</td><td>0</td>", ordered) == [
        *("0.4", "0.3", "0.2", "0.1")
    ]


def test_a_step_of_another_experiments_trainer_is_linked_to_its_page(store_url: str) -> None:
    async def train() -> str:
        async with open_store(store_url) as store:
            await mixed(store, steps=2, consumer="100% own")
            contents = await blame(now(await store.experiment("run")), 1)
            return next(row.uid for row in contents.rows if row.experiment == "expert")

    uid = anyio.run(train)
    with TestClient(inspector(store_url), base_url=BASE) as client:
        page = client.get("/expert/rollout", params={"uid": uid}).text
        (path,) = re.findall(r'href="(/run/steps/[^"]+)"', page)
        assert "Step 1 of <bdi>100% own</bdi>" in client.get(html.unescape(path)).text


def test_a_page_of_steps_without_versions_leads_on(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trinity_buffer.web.pages.PAGE", 1)

    async def train() -> None:
        async with open_store(store_url) as store:
            experiment = await store.experiment("run", config={"rollouts_per_group": 2})
            rows = [rollout("b", task, run, run / 2) for task in range(3) for run in range(2)]
            for row in rows:
                row.info = {} if row.eid.task == 1 else row.info
            await experiment.writer("e0").write(rows)
            await run_strategy(experiment, "grpo")
            async with experiment.train_stream(strategy="grpo", groups_per_step=1) as stream:
                async for step in stream:
                    await stream.commit(step, checkpoint=None)

    anyio.run(train)
    with TestClient(inspector(store_url), base_url=BASE) as client:
        pages = [client.get(f"/run/staleness?after={after}").text for after in range(4)]
        links = [re.findall(r'href="[^"]*staleness\?(?:after=)?(\d*)', page) for page in pages]
    assert {*links[1]} >= {"0", "2"}
    assert [page.count("Of these steps no policy version is known.") for page in pages] == [
        *(0, 1, 0, 0)
    ]
    assert [page.count("No step yet.") for page in pages] == [*(0, 0, 0, 1)]
