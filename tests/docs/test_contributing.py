"""CONTRIBUTING.md sends nobody to a file that is not there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_path_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = {path for path in re.findall(r"`([\w./]+(?:/|\.\w+))`", text) if "NAME" not in path}
    places = (ROOT, ROOT / "trinity_buffer")
    assert len(named) > 15
    assert [path for path in sorted(named) if not any((at / path).exists() for at in places)] == []
