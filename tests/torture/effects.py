"""Which faults took effect: a line for each, written by whoever saw it happen."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path


def note(folder: Path, kind: str) -> None:
    """Add a line to the file of a round, whole and at once: the writer may die right behind it."""
    descriptor = os.open(folder / "effects", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(descriptor, f"{kind}\n".encode())
    os.close(descriptor)


def seen(folder: Path) -> Counter[str]:
    """Return how often each kind took effect in the round of ``folder``."""
    file = folder / "effects"
    return Counter(file.read_text().splitlines() if file.exists() else ())
