"""No name that users and their scripts rely on goes away unnoticed."""

from __future__ import annotations

import json
from pathlib import Path

from tests.public_names import public_names

KEPT = Path(__file__).parent / "public_names.json"
GONE: dict[str, str] = {}
"""``list: name`` -> why it may go; the changelog says it too."""


def test_every_name_of_the_first_release_is_still_there() -> None:
    kept: dict[str, list[str]] = json.loads(KEPT.read_text())
    today = public_names()
    gone = {
        f"{of}: {name}"
        for of, names in kept.items()
        for name in set(names).difference(today.get(of, ()))
    }
    assert gone == set(GONE)
