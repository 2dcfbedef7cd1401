"""The page about a run: what it says is what is stored, and what a rollout says stays text."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import anyio
import pytest
import torch
from typing_extensions import override

from tests.sample_run import record_sample_run
from trinity_buffer import open_store, run_strategy
from trinity_buffer.experience import EID, Experience
from trinity_buffer.web.charts import histogram, lines
from trinity_buffer.web.report import report

NAME = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
HOSTILE = f"{NAME}\x1b[31m\u202e"


class Page(HTMLParser):
    """The tags and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(page)

    @override
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    @override
    def handle_data(self, data: str) -> None:
        self.text += f"{data} "


async def page_of(url: str, name: str) -> str:
    async with open_store(url, read_only=True) as store:
        return await report(store, name)


async def test_a_page_says_what_is_stored(store_url: str, tmp_path: Path) -> None:
    sample = await record_sample_run(store_url, tmp_path / "run")
    page = Page(await page_of(sample.url, sample.name))
    told = " ".join(page.text.split())
    assert "planned rollouts 20 3 of them missing" in told
    assert "committed by trainer 8 4 ready, 4 leased; step 2" in told
    assert "4 rows in 1 groups, 34 tokens; its commit names its manifest." in told
    assert "varied zero_variance 4" in told
    assert "door late 1" in told


async def hostile_run(url: str) -> None:
    async with open_store(url) as store:
        experiment = await store.experiment(NAME, config={"rollouts_per_group": 2})
        writer = experiment.writer(NAME)
        await writer.plan("b", [NAME], 2)
        some = [
            Experience(
                eid=EID("b", NAME, run),
                tokens=torch.tensor([1, 2, 3]),
                prompt_length=1,
                logprobs=torch.zeros(2),
                reward=float(run),
                response_text=HOSTILE * 40_000,
            )
            for run in range(2)
        ]
        await writer.write(some)
        await run_strategy(experiment, "grpo")
        async with experiment.train_stream(strategy="grpo", groups_per_step=1) as stream:
            async for step in stream:
                await stream.commit(step, checkpoint=None)


def test_what_a_rollout_says_stays_text(sqlite_url: str) -> None:
    anyio.run(hostile_run, sqlite_url)
    source = anyio.run(page_of, sqlite_url, NAME)
    page = Page(source)
    assert not {"script", "img", "iframe", "link"} & page.tags
    assert not [name for name in page.attributes if name.startswith("on") or name == "src"]
    assert "<script>alert(1)</script>" in page.text
    assert len(source) < 200_000


def test_a_page_of_an_empty_run_has_no_charts(sqlite_url: str) -> None:
    async def main() -> str:
        async with open_store(sqlite_url) as store:
            await store.experiment("new", config={})
        return await page_of(sqlite_url, "new")

    assert "No step yet." in anyio.run(main)


def test_a_curve_has_a_gap_where_a_value_is_missing() -> None:
    found = lines("x", [(1, 0.0), (2, None), (3, 1.0)])
    assert found is not None
    assert len(found["runs"]) == 2
    assert [found[name] for name in ("low", "high", "first", "last")] == [0.0, 1.0, 1, 3]
    assert lines("x", [(1, None)]) is None


@pytest.mark.parametrize(
    ("values", "counts"),
    [
        ([], []),
        ([2.0, 2.0], [2]),
        ([0.0, 1.0, 1.0], [1, 2]),
        ([0.0, 0.25, 0.25, 0.26, 0.5, 1.0], [1, 3, 1, 1]),
        ([0.1, 0.7, 0.3], [1, 1, 1]),
    ],
)
def test_every_value_is_in_one_bar_and_within_its_ends(
    values: list[float], counts: list[int]
) -> None:
    bars = histogram(values)
    assert [bar["count"] for bar in bars] == counts
    assert [sum(bar["low"] <= v <= bar["high"] for v in values) for bar in bars] == counts
