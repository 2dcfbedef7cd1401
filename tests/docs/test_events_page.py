"""The page of events has each kind, with fields that it has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec import structs

from trinity_buffer.events import ExperienceColumns, Recorded

PAGE = (Path(__file__).parents[2] / "docs" / "events.md").read_text()
KINDS = {kind.__name__: kind for kind in get_args(Recorded)}
ROWS = dict(
    re.findall(r"^\| `(\w+)` \| [^|]* \| (.*) \|$", PAGE.split("\n## ", 1)[0], re.MULTILINE)
)
VALUES = {"late", "invalid", "non_finite"}


def keys_of(kind: Any) -> set[str]:
    return {field.encode_name for field in structs.fields(kind)}


def test_every_kind_has_its_row() -> None:
    assert ROWS.keys() == KINDS.keys()


@pytest.mark.parametrize("name", ROWS)
def test_the_row_of_a_kind_names_its_fields(name: str) -> None:
    named = set(re.findall(r"`([a-z_]+)`", ROWS[name]))
    assert named - keys_of(KINDS[name]) - keys_of(ExperienceColumns) - VALUES == set()
