"""The inspector in a real Chromium: pages open, follow a run and say nothing to the console.

`PICTURES` names the folder for the pictures of the documents.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import anyio
import pytest
import torch
from playwright.sync_api import Browser, Page, expect, sync_playwright

import trinity_buffer as tb
from trinity_buffer.demo.tiny_model import make_tiny_model

COMMAND = Path(sys.executable).with_name("trinity-buffer")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SIZE = {"width": 1100, "height": 720}
NAME = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
HOSTILE = f"{NAME}\x1b[31m\u202e"
LIVE_MS = 120_000
PATIENCE_MS = 60_000
"""A page of a busy machine may take so long; nothing waits for it to pass."""
expect.set_options(timeout=PATIENCE_MS)


@dataclass(frozen=True, slots=True)
class Demo:
    """A demo that is running, and where its store is shown."""

    process: subprocess.Popen[bytes]
    url: str
    base: str


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = shutil.which("chromium")
    assert found is not None, "apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page whose console, failures and refused answers are all empty at the end of the test."""
    context = browser.new_context(viewport=SIZE)
    page, wrong = context.new_page(), []
    page.set_default_timeout(PATIENCE_MS)
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: wrong.append(dialog.message))
    page.on("response", lambda a: wrong.append(f"{a.status} {a.url}") if a.status >= 400 else None)
    yield page
    context.close()
    assert wrong == []


@contextmanager
def served(url: str) -> Iterator[str]:
    """Yield where `trinity-buffer serve` shows the store at ``url``."""
    command = [COMMAND, "serve", "--store", url, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        found = re.search(r"http://\S+", server.stdout.readline())
        assert found is not None
        try:
            yield found[0].rstrip("/")
        finally:
            server.send_signal(signal.SIGINT)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    folder = tmp_path_factory.mktemp("demo")
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen([COMMAND, "demo"], cwd=folder, stdout=said, stderr=said)
    url = f"sqlite:///{folder}/runs/demo.db"
    begun = [COMMAND, "events", "--store", url, "--json"]
    while process.poll() is None and b"StepsCommitted" not in _said(begun):
        pass  # each question takes about a second
    with served(url) as base:
        yield Demo(process, url, base)
    assert process.wait(LIVE_MS / 1000) == 0, (folder / "said").read_text()


def _said(command: list[str | Path]) -> bytes:
    return subprocess.run(command, capture_output=True, check=False).stdout


def picture(page: Page, name: str, *, whole: bool = False) -> None:
    if folder := os.environ.get("PICTURES"):
        page.screenshot(path=Path(folder) / f"inspector-{name}.png", full_page=whole)


def press(page: Page, key: str) -> None:
    """Press a key on a page that has its script: it hears nothing before."""
    page.wait_for_load_state()
    page.keyboard.press(key)


def kind_of(link: str) -> str:
    """Return a link without its values."""
    path, _, query = link.partition("?")
    return " ".join([re.sub(r"\d+", "N", path), *re.findall(r"(\w+)=", query)])


def visit_all(page: Page, base: str) -> set[str]:
    """Open a page of every kind that a link leads to; return the kinds."""
    asked: set[str] = set()
    todo = ["/"]
    while todo:
        path = todo.pop()
        if (kind := kind_of(path)) in asked:
            continue
        asked.add(kind)
        page.goto(base + path)
        expect(page.locator("h1")).to_be_visible()
        links = page.locator("main a, nav a").evaluate_all(
            "all => all.map(a => a.getAttribute('href'))"
        )
        todo += [link.partition("#")[0] for link in links]
    return asked


def test_a_page_follows_a_live_run(page: Page, demo: Demo) -> None:
    page.goto(f"{demo.base}/demo/")
    assert demo.process.poll() is None, "the demo ended before it was looked at"
    committed = page.get_by_role("row").filter(has_text="committed by").first
    before = committed.inner_text()
    expect(committed).not_to_have_text(before, timeout=LIVE_MS)
    field = page.get_by_label("As it was at position")
    field.fill("123")
    page.wait_for_timeout(5000)
    expect(field).to_have_value("123")  # though the page follows the run
    page.goto(f"{demo.base}/demo/events")
    newest = page.locator("#events tr").first
    before = newest.inner_text()
    expect(newest).not_to_have_text(before, timeout=LIVE_MS)


def test_each_page_of_a_run_opens(page: Page, demo: Demo) -> None:
    assert demo.process.wait(900) == 0
    kinds = visit_all(page, demo.base)
    here = {kind.split()[0] for kind in kinds}
    wanted = {
        "",
        "steps",
        "steps/N",
        "groups",
        "rollout",
        "rejected",
        "staleness",
        "diff",
        "events",
    }
    assert {f"/demo/{at}{one}" for one in wanted for at in ("", "@N/")} <= here


def test_a_run_is_looked_at_as_it_was(page: Page, demo: Demo) -> None:
    page.goto(f"{demo.base}/demo/events?after=100")
    page.get_by_role("link", name="as it was").last.click()
    page.wait_for_url("**/demo/@101/")
    expect(page.get_by_text("As it was at position 101 of the log.")).to_be_visible()
    press(page, "2")
    page.wait_for_url("**/demo/@101/steps")
    page.get_by_role("link", name="Now").click()
    page.wait_for_url("**/demo/")
    page.get_by_label("As it was at position").fill("300")
    page.get_by_role("button", name="show").click()
    page.wait_for_url("**/demo/@300/")


def test_the_histogram_leads_to_the_token(page: Page, demo: Demo) -> None:
    page.goto(f"{demo.base}/demo/")
    picture(page, "overview")
    press(page, "2")
    expect(page.locator("h1")).to_have_text("Gradient steps")
    picture(page, "steps")
    page.locator("svg.wide a").last.click()
    expect(page.locator("h1")).to_contain_text("Step")
    last = page.locator("h1").text_content()
    press(page, "p")
    expect(page.locator("h1")).not_to_have_text(last)
    picture(page, "step")
    bar = page.locator("figure svg a").filter(has=page.locator("rect:not([height='0.0'])")).first
    count = bar.locator("title").text_content().rpartition(": ")[2]
    bar.click()
    expect(page.get_by_text(f"{count} rows.")).to_be_visible()
    press(page, "j")
    press(page, "Enter")
    page.wait_for_url("**/rollout?*")
    page.get_by_role("link", name="logprob").click()
    page.wait_for_url("**overlay=logprob*")
    assert page.locator("table.tokens tr[class*=down]").count() > 0
    picture(page, "rollout", whole=True)
    press(page, "6")
    expect(page.locator("h1")).to_have_text("What differs")
    press(page, "5")
    expect(page.locator(".lanes svg a").first).to_be_visible()
    picture(page, "staleness")


def test_dark_and_light_are_different(browser: Browser, demo: Demo) -> None:
    colours = set()
    for scheme in ("light", "dark"):
        page = browser.new_page(color_scheme=scheme, viewport=SIZE)
        page.goto(f"{demo.base}/demo/steps")
        colours.add(page.locator("body").evaluate("body => getComputedStyle(body).color"))
        page.close()
    assert len(colours) == 2


async def record_hostile(url: str, model: Path) -> None:
    """Write a run in which every name and text is hostile, and one line has a million letters."""
    line = HOSTILE + "x" * 1_000_000
    said = NAME[:34].encode()
    tokens = torch.tensor(list(said), dtype=torch.int32)
    async with tb.open_store(url) as store:
        config = {"rollouts_per_group": 2, "tokenizer": str(model)}
        experiment = await store.experiment(NAME, config=config)
        writer = experiment.writer(NAME)
        await writer.plan("b", [NAME], 2)
        some = [
            tb.Experience(
                eid=tb.EID("b", NAME, run),
                tokens=tokens,
                prompt_length=4,
                logprobs=-torch.rand(len(tokens) - 4),
                reward=float(run),
                response_text=line,
            )
            for run in range(2)
        ]
        await writer.write(some)
        await tb.run_strategy(experiment, "grpo")
        await tb.run_strategy(experiment, "grpo", {"epsilon": 1.0}, name="other")
        async with experiment.train_stream(strategy="grpo", groups_per_step=1) as stream:
            async for step in stream:
                await stream.commit(step, checkpoint=None)


def test_a_hostile_rollout_stays_text(page: Page, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", seed=0)
    url = f"sqlite:///{tmp_path}/hostile.db"
    with ThreadPoolExecutor(1) as pool:  # playwright has a loop in this thread
        pool.submit(anyio.run, record_hostile, url, tmp_path / "model").result()
    with served(url) as base:
        kinds = visit_all(page, base)
        assert len(kinds) > 15
        here = f"{base}/{quote(NAME, safe='')}"
        page.goto(f"{here}/search?text=window.hacked")
        expect(page.locator("pre").first).to_contain_text("<script>window.hacked")
        page.goto(f"{here}/diff?first=grpo&second=other")
        expect(page.get_by_text("2 have an advantage in both")).to_be_visible()
        page.goto(f"{here}/rollout?uid={quote(f'b/{NAME}/1/0/')}&overlay=advantage")
        expect(page.locator(".flow")).to_have_text(NAME[:34])
        assert page.locator(".flow [class*=up]").count() == 30
        assert page.evaluate("window.hacked") is None
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_report_opens_offline(page: Page, tmp_path: Path, demo: Demo) -> None:
    assert demo.process.wait(900) == 0
    file = tmp_path / "report.html"
    subprocess.run([COMMAND, "report", "--store", demo.url, "-o", file], check=True)
    page.goto(file.as_uri())
    expect(page.locator("svg polyline").first).to_be_visible()
