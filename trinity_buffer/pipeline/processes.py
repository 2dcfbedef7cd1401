"""Processes of this machine: when they started, and whether they are still the same."""

from __future__ import annotations

import os
from pathlib import Path

_SECOND_US = 1_000_000


def start_of(pid: int) -> str:
    """Return when a process started, in ticks since boot; "" if there is none, or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


def has_ended(pid: int, seen_us: int) -> bool:
    """Return whether the process that had the number ``pid`` at ``seen_us`` is certainly gone."""
    ticks = start_of(pid)
    if not ticks:
        return True
    started_us = _boot_us() + int(ticks) * _SECOND_US // os.sysconf("SC_CLK_TCK")
    return started_us > seen_us + 2 * _SECOND_US  # the boot time is told in whole seconds


def _boot_us() -> int:
    for line in Path("/proc/stat").read_text().splitlines():
        if line.startswith("btime "):
            return int(line.split()[1]) * _SECOND_US
    return 0
