"""The page of the configuration holds every key of the classes, as they say it."""

from __future__ import annotations

from pathlib import Path

from tools.configuration_page import page

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_what_the_classes_say() -> None:
    remedy = "run: python tools/configuration_page.py > docs/configuration.md"
    assert PAGE.read_text() == page(), remedy


def test_every_key_says_what_it_means() -> None:
    rows = [line.split(" | ") for line in page().splitlines() if line.startswith("| `")]
    assert len(rows) > 40
    assert [row[0] for row in rows if not row[-1].strip(" |")] == []
