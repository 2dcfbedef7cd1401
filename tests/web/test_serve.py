"""The inspector: every page says what plain SQL says, follows a run, and asks who is there."""

from __future__ import annotations

import html
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

import anyio
import httpx2
import pytest
import uvicorn
from pysqlite3 import dbapi2
from starlette.testclient import TestClient
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.raw_store import take_lease
from tests.sample_run import record_sample_run, rollout
from tests.small_sizes import resized
from tests.web.conftest import BASE
from tests.web.test_report import NAME, Page, hostile_run
from trinity_buffer import open_store
from trinity_buffer.web.app import inspector

UID = "b0/1/1/0/"
PAGES = {
    "": "select count(*) from experience",
    "steps": "select max(step) from step",
    "steps/1": "select count(*) from delivery where step = 1",
    "groups": "select rollouts_per_group from batch where batch = 'b0'",
    f"rollout?uid={UID}": "select length from experience where batch='b0' and task='1' and run=1",
    "rejected": "select count(*) from rejection where reason = 'zero_variance'",
    "staleness": "select count(*) from delivery where step = 2",
    "diff?first=grpo&second=varied": "select count(*) from experience where refused is null",
    "search?text=1+and+1": "select run from experience where batch='b0' and task='1' and run=1",
    "events": "select max(position) from event",
}
"""Page -> a number that it shows, as SQL."""
SAMPLE = re.compile(r'(\w+)(?:\{(\w+="(?:[^"\\\n]|\\.)*"(?:,\w+="(?:[^"\\\n]|\\.)*")*)\})? (\S+)')


def number(url: str, query: str) -> int:
    connection = dbapi2.connect(url.removeprefix("sqlite:///"))
    try:
        return int(connection.execute(query).fetchone()[0])
    finally:
        connection.close()


@pytest.mark.parametrize("path", PAGES)
def test_a_page_shows_what_sql_says(client: TestClient, told: str, path: str) -> None:
    answer = client.get(f"/sort/{path}")
    assert answer.status_code == 200, answer.text
    text = " ".join(Page(answer.text).text.split())
    assert re.search(rf"\b{number(told, PAGES[path])}\b", text), text


def test_every_kind_of_link_leads_to_a_page(client: TestClient) -> None:
    asked, todo = set(), ["/"]
    while todo:
        path = todo.pop()
        if (kind := kind_of(path)) in asked:
            continue
        asked.add(kind)
        answer = client.get(path)
        assert answer.status_code == 200, f"{path}: {answer.text}"
        if answer.headers["content-type"].startswith("text/html"):
            todo += map(html.unescape, re.findall(r'(?:href|src)="([^"#]+)', answer.text))
    assert {"/-/static/inspector.css", "/-/static/inspector.js", "/sort/steps/N trainer"} <= asked


def kind_of(link: str) -> str:
    """Return a link without its values."""
    path, _, query = link.partition("?")
    return " ".join([re.sub(r"\d+", "N", path), *re.findall(r"(\w+)=", query)])


async def test_groups_are_paged_once_each(
    store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trinity_buffer.web.pages.PAGE", 2)
    await record_sample_run(store_url, tmp_path / "run")
    found: list[str] = []
    async with serving(store_url) as base, httpx2.AsyncClient(base_url=base) as client:
        path = "/sort/groups"
        while path and len(found) < 20:
            page = (await client.get(path)).text
            found += re.findall(r"</a> / <bdi>(\w+)</bdi></h3>", page)
            older = re.search(r'rel="next" href="([^"]+)"', page)
            path = html.unescape(older[1]) if older else ""
    assert sorted(found) == ["0", "0", "1", "2", "3"]


def test_a_search_that_stops_early_goes_on_with_the_next_row(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "search?text=and"
    whole = re.findall('uid=[^"]*', client.get(f"/sort/{path}").text)
    for name in ("FIRST_S", "SEARCH_S"):
        monkeypatch.setattr(f"trinity_buffer.web.pages.{name}", 0)
    with resized(experiences_per_page=2):
        page = client.get(f"/sort/{path}").text
        seen = re.findall('uid=[^"]*', page)
        for _ in range(50):
            if 'rel="next"' not in page:
                break
            page = client.get(linked(page, "next")).text
            seen += re.findall('uid=[^"]*', page)
    assert len(whole) > 2
    assert seen == whole


@pytest.mark.parametrize(
    "path",
    ["groups", "groups?batch=b0", "rejected?by=varied&reason=zero_variance", "search?text=and"],
)
def test_pages_lead_back_the_way_that_they_led_on(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    for name in ("PAGE", "GROUPS_OF_BATCH"):
        monkeypatch.setattr(f"trinity_buffer.web.pages.{name}", 1)
    seen = [client.get(f"/sort/{path}").text]
    while len(seen) < 4:
        seen.append(client.get(linked(seen[-1], "next")).text)
    assert len({tuple(re.findall('uid=[^"]*', page)) for page in seen}) == len(seen)
    page = seen.pop()
    while seen:
        page = client.get(linked(page, "prev")).text
        assert page == seen.pop()
    assert 'rel="prev"' not in page


def linked(page: str, how: str) -> str:
    """Return where the one link of a kind leads."""
    (found,) = re.findall(rf'rel="{how}" href="([^"]+)"', page)
    return html.unescape(found)


def test_the_lease_of_a_strategy_is_shown_without_steps(sqlite_url: str, tmp_path: Path) -> None:
    async def hold() -> None:
        await record_sample_run(sqlite_url, tmp_path / "run")
        async with open_store(sqlite_url) as store:
            await take_lease(await store.experiment("sort"), "grpo", "me", ttl_s=99)

    anyio.run(hold)
    with TestClient(inspector(sqlite_url), base_url=BASE) as client:
        text = Page(client.get("/sort/").text).text
    assert "lease of grpo" in " ".join(text.split())
    assert "None" not in text


def test_where_no_share_is_recorded_none_is_shown(client: TestClient) -> None:
    assert "share of the loss" not in client.get("/sort/steps/1").text


def test_the_page_of_staleness_says_of_which_steps_it_is(client: TestClient) -> None:
    page = client.get("/sort/staleness").text
    assert "in steps 1 to 3." in page
    assert page.count("not committed") == 1
    heads = "".join(f"<th>{one}</th>" for one in ("mean", "first tenth of the steps", "last tenth"))
    assert heads in page
    cells = ("<bdi>e0</bdi>", 12, 1, 0, 2, 2)  # over all; then in step 1, and in step 3
    assert "".join(f"<td>{one}</td>" for one in cells) in page


def test_a_bar_of_the_histogram_leads_to_its_rows(client: TestClient) -> None:
    page = client.get("/sort/steps/1").text
    bars = re.findall(r'<a href="([^"]+)"><rect [^>]*><title>([^<]*): (\d+)</title>', page)
    assert sum(int(count) for *_, count in bars) == 4
    for link, _, count in bars:
        assert f"{count} rows." in client.get(html.unescape(link)).text


@pytest.mark.parametrize("overlay", ["text", "mask", "advantage", "logprob"])
def test_an_overlay_marks_tokens(client: TestClient, overlay: str) -> None:
    page = client.get("/sort/rollout", params={"uid": UID, "overlay": overlay}).text
    marked = re.findall(r'<tr class="((?:up|down)[1-5])', page)
    assert bool(marked) == (overlay != "text")
    assert (overlay == "text") == ("<h3>response_text</h3>" in page)


def test_a_bar_and_a_lane_lead_to_each_step(client: TestClient) -> None:
    for path in ("/sort/steps", "/sort/steps/2", "/sort/staleness"):
        blocks = re.findall(
            r'<a href="/sort/steps/(\d+)[^>]*><rect class="shade', client.get(path).text
        )
        assert blocks == ["1", "2", "3"]
    assert client.get("/sort/steps/2").text.count("current") == 1


def test_sets_are_compared_for_longer_on_request(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trinity_buffer.web.pages.FIRST_S", 0)
    path = "/sort/diff?first=grpo&second=varied"
    page = client.get(path).text
    longer = re.search(r'href="([^"]+)">compare for longer', page)
    assert longer is not None
    whole = client.get(html.unescape(longer[1]).replace("seconds=0", "seconds=9")).text
    assert "compare for longer" not in whole
    assert "annotated / rejected: zero_variance" in whole


def test_runs_are_compared(store_url: str, tmp_path: Path) -> None:
    for name in ("one", "two"):
        anyio.run(record_sample_run, store_url, tmp_path / name, name)
    with TestClient(inspector(store_url), base_url=BASE) as client:
        page = " ".join(Page(client.get("/one/diff?run=two").text).text.split())
    assert "one and two" in page
    assert "Of each run at most the last 200 steps count" in page
    assert re.search(r"rows (\d+) \1 ", page)


async def test_tokens_have_texts_where_the_experiment_names_a_tokenizer(
    sqlite_url: str, tmp_path: Path
) -> None:
    words = {f"<{at}>": at for at in range(99)}
    Tokenizer(WordLevel(words, unk_token="<0>")).save(str(tmp_path / "tokenizer.json"))
    async with open_store(sqlite_url) as store:
        experiment = await store.experiment("named", config={"tokenizer": str(tmp_path)})
        given = rollout("b0", 0, 0, 1.0)
        await experiment.writer("e0").write([given])
    with TestClient(inspector(sqlite_url), base_url=BASE) as client:
        page = client.get("/named/rollout", params={"uid": "b0/0/0/0/"}).text
    flow = re.search(r'<p class="flow">(.*)</p>', page)
    assert flow is not None
    assert Page(flow[1]).text.split() == [f"<{int(one)}>" for one in given.tokens]


def test_whatever_a_rollout_says_stays_text(sqlite_url: str) -> None:
    anyio.run(hostile_run, sqlite_url)
    uid = f"b/{NAME}/0/0/"
    with TestClient(inspector(sqlite_url), base_url=BASE) as client:
        here = f"/{quote(NAME, safe='')}/"
        for path in ("", "steps", "steps/1", "groups", "rejected", "staleness", "events"):
            page = client.get(here + path)
            assert page.status_code == 200
            assert not {"img", "iframe"} & Page(page.text).tags
            assert page.text.count("<script") == 1
        shown = client.get(f"{here}rollout", params={"uid": uid})
        found = client.get(f"{here}search", params={"text": "alert(1)"})
        for page in (shown, found):
            assert "<script>alert(1)</script>" in Page(page.text).text
            assert page.text.count("<script") == 1
            assert len(page.text) < 200_000
        assert "alert(1)" in client.get("/metrics").text


@pytest.mark.parametrize(
    "name",
    ["-", "-/static", "a/steps", "a/events/stream", ".", "..", "!.", "x.", "run/", "%2F", "ä"],
)
def test_every_name_has_its_pages(sqlite_url: str, name: str) -> None:
    async def make() -> None:
        async with open_store(sqlite_url) as store:
            await store.experiment("a", config={})
            experiment = await store.experiment(name, config={})
            await experiment.writer("e0").write([rollout("b0", 0, 0, 1.0)])

    anyio.run(make)
    with TestClient(inspector(sqlite_url), base_url=BASE) as client:
        listed = re.findall(r'href="([^"]+)"><bdi>(.*?)</bdi>', client.get("/").text)
        here = {html.unescape(known): link for link, known in listed}[name]
        assert not {".", ".."} & set(here.lower().replace("%2e", ".").split("/"))
        for path in ("", "steps", "groups", f"rollout?uid={quote('b0/0/0/0/', safe='')}", "events"):
            page = client.get(html.unescape(here) + path)
            assert page.status_code == 200, page.text
            assert html.escape(name) in page.text.partition("</title>")[0].partition("<title>")[2]
            assert f'href="{here}groups"' in page.text
        bare = client.get(html.unescape(here).rstrip("/"))
        assert html.escape(name) in bare.text.partition("</title>")[0].partition("<title>")[2]


def test_every_answer_forbids_foreign_and_inline_scripts(client: TestClient) -> None:
    for path in ("/sort/", "/-/static/inspector.js", "/metrics", "/sort/steps/99", "/nobody/"):
        policy = client.get(path).headers["content-security-policy"]
        assert policy.startswith("default-src 'self';")
        assert "unsafe" not in policy
    assert not re.search(r'style="|<style|\son\w+="', client.get("/sort/steps").text)


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/nobody/", 404, "holds no experiment"),
        ("/sort/steps/99", 404, "never handed step 99"),
        ("/sort/steps/x", 400, "a whole number"),
        ("/sort/steps?after=99999999999", 400, "a whole number"),
        ("/sort/rollout?uid=none", 400, "is not a uid"),
        ("/sort/rollout?uid=b0/0/%C2%B2/0/", 400, "is not a uid"),
        ("/sort/rejected?by=nobody", 404, "no strategy or trainer"),
        ("/sort/search?text=%00", 400, "NUL"),
    ],
)
def test_what_cannot_be_answered_is_told(
    client: TestClient, path: str, status: int, says: str
) -> None:
    answer = client.get(path)
    assert answer.status_code == status
    assert says in html.unescape(answer.text)


def test_without_its_token_nothing_is_told(told: str) -> None:
    with TestClient(inspector(told, token="s3cret"), base_url="http://far.example") as client:
        for path in ("/", "/sort/", "/metrics", "/-/static/inspector.js", "/sort/events/stream"):
            assert client.get(path).status_code == 401
        assert client.get("/sort/?token=wrong").status_code == 401
        assert client.get("/sort/", headers={"authorization": "Bearer wrong"}).status_code == 401
        own = {"authorization": "Bearer s3cret"}
        assert client.get("/metrics", headers=own).status_code == 200
        entered = client.get("/sort/steps?token=s3cret&after=0")
        assert (entered.status_code, entered.url.query) == (200, b"after=0")
        assert client.get("/sort/").status_code == 200
        assert "s3cret" not in str(dict(client.cookies))


def test_a_token_of_any_letters_opens(told: str) -> None:
    with TestClient(inspector(told, token="päss"), base_url=BASE) as client:
        assert client.get("/metrics", headers={"authorization": "Bearer pass"}).status_code == 401
        own = {"authorization": "Bearer päss".encode()}
        assert client.get("/metrics", headers=own).status_code == 200
        assert client.get("/metrics?token=p%C3%A4ss").status_code == 200
    with TestClient(inspector(told, token="p\udce4ss"), base_url=BASE) as client:
        assert client.get("/metrics?token=pass").status_code == 401


def test_a_foreign_name_for_this_machine_is_refused(told: str) -> None:
    with TestClient(inspector(told), base_url="http://rebound.example") as client:
        assert client.get("/sort/").status_code == 421


def test_metrics_are_what_sql_says(client: TestClient, told: str) -> None:
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found, typed = {}, set()
    for line in answer.text.splitlines():
        if line.startswith("# TYPE "):
            typed.add(line.split()[2])
        if not line.startswith("#"):
            sample = SAMPLE.fullmatch(line)
            assert sample is not None, line
            assert sample[1] in typed
            found[sample[1], sample[2]] = float(sample[3])
    own = 'experiment="sort"'
    experiences = found["trinity_buffer_experiences_total", own]
    assert experiences == number(told, "select count(*) from experience")
    assert found["trinity_buffer_committed_step", f'{own},trainer="trainer"'] == 2
    rejected = found[
        "trinity_buffer_rejected_experiences_total", f'{own},by="varied",reason="zero_variance"'
    ]
    assert rejected == number(told, PAGES["rejected"])
    assert found["trinity_buffer_refused_experiences_total", f'{own},reason="late"'] == 1


@asynccontextmanager
async def serving(url: str) -> AsyncIterator[str]:
    """Yield where the inspector of a store listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        config = uvicorn.Config(inspector(url), log_level="error", lifespan="on")
        server = uvicorn.Server(config)
        async with anyio.create_task_group() as group:
            group.start_soon(server.serve, [listening])
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
            server.should_exit = True


async def test_an_event_is_told_when_it_is_written(store_url: str, tmp_path: Path) -> None:
    await record_sample_run(store_url, tmp_path / "run")
    async with (
        open_store(store_url) as store,
        serving(store_url) as base,
        httpx2.AsyncClient(base_url=base) as client,
    ):
        experiment = await store.experiment("sort")
        after = max([event.position async for event in experiment.events()])
        path = f"/sort/events/stream?after={after}"
        async with client.stream("GET", path) as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == ": hello"
            await experiment.writer("late").write([rollout("b1", 0, 2, 0.5)])
            data = [await anext(lines) for _ in range(3)][2]
            told = json.loads(data.removeprefix("data: "))
            assert (told["position"], told["actor"]) == (after + 1, "late")
            await experiment.finish("enough")
            assert "event: end" in [line async for line in lines]
