"""The inspector shows a run as it was at a position, and stays there."""

from __future__ import annotations

import html
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager

import pytest
from starlette.testclient import TestClient

from tests.handles import Experiment
from tests.web.test_report import Page
from tests.web.test_serve import PAGES, number
from trinity_buffer.inspector.source import Source, as_of
from trinity_buffer.web import app


@pytest.mark.parametrize("path", PAGES)
def test_a_page_as_it_was_leads_to_pages_as_they_were(
    client: TestClient, told: str, path: str
) -> None:
    """At the first commit: what came later is not there, and no link leads there but one."""
    first = number(told, "select min(committed_at) from step")
    answer = client.get("/sort/at", params={"position": first})
    assert answer.url.path == f"/sort/@{first}/"
    answer = client.get(f"/sort/@{first}/{path}")
    assert answer.status_code == 200, answer.text
    assert f"at position {first} of the log" in answer.text
    assert "data-live" not in answer.text
    assert "data-follow" not in answer.text
    links = {
        html.unescape(one)
        for one in re.findall(r'href="([^"]+)', answer.text)
        if one.startswith("/sort/")
    }
    out = {one for one in links if not re.match(rf"/sort/@{first}/", one)}
    assert all(re.fullmatch(r"/sort/(@[0-9]+/)?", one) for one in out), out
    now = client.get(f"/sort/@{number(told, 'select max(position) from event')}/{path}")
    assert now.status_code == 200


def test_an_overview_as_it_was_counts_what_there_was(client: TestClient, told: str) -> None:
    sealed = number(told, "select sealed_at from batch where batch = 'b0'")
    text = " ".join(Page(client.get(f"/sort/@{sealed}/").text).text.split())
    assert re.search(r"recorded experiences 16\b", text), text
    assert "What is stuck" not in text
    unknown = client.get("/sort/@5/steps/1")
    assert unknown.status_code == 404
    assert "as of position 5: " in unknown.text
    assert 'href="/sort/@5/groups"' in unknown.text
    answer = client.get("/sort/@999999/")
    assert (answer.status_code, "goes from 1 to" in answer.text) == (400, True)
    assert client.get("/sort/at", params={"position": "x"}).status_code == 400


def test_a_position_is_opened_once_for_pages_that_follow_one_another(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To open one folds the log up to there; only the last few are kept."""
    opened: list[int] = []

    def noted(experiment: Experiment, position: int | None) -> AbstractAsyncContextManager[Source]:
        if position is not None:
            opened.append(position)
        return as_of(experiment, position)

    monkeypatch.setattr(app, "as_of", noted)
    for position in (5, 6, 5, 7, 8, 5, 9, 6):
        for path in ("", "groups"):
            answer = client.get(f"/sort/@{position}/{path}")
            assert answer.status_code == 200
            assert f"at position {position} of the log" in answer.text
    assert opened == [5, 6, 7, 8, 9, 6]


def test_pages_of_many_positions_may_be_asked_for_at_once(client: TestClient) -> None:
    with ThreadPoolExecutor(24) as browsers:
        for _ in range(4):
            paths = [f"/sort/@{position}/" for position in range(3, 27)]
            assert {answer.status_code for answer in browsers.map(client.get, paths)} == {200}
