"""Processes of this machine: which machine it is, who lives on it, and who is still the same.

Two processes can look at each other where their numbers mean the same. A container has numbers of
its own, so that a name alone does not tell a machine.
"""

from __future__ import annotations

import os
import socket
from hashlib import sha256
from pathlib import Path

PROC = Path("/proc")
"""What Linux tells of processes. Where it is missing, as on macOS, less is known of each."""

_SECOND_US = 1_000_000
_ENDED = ("Z", "X")  # states of what is still listed, but has ended


def this_host() -> str:
    """Return what is stored of this machine: ``name#digest``, or its name where there is no /proc.

    The digest is of the boot and of the namespace in which a process number means a process.
    """
    name = socket.gethostname()
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        namespace = (PROC / "self/ns/pid").stat().st_ino
    except OSError:
        return name
    return f"{name}#{sha256(f'{boot}:{namespace}'.encode()).hexdigest()[:8]}"


def is_this_host(host: str) -> bool:
    """Return whether process numbers that were stored with ``host`` are those of this machine.

    Older versions stored the name alone: it is taken at its word.
    """
    return host in (this_host(), socket.gethostname())


def lives(pid: int, start: str = "") -> bool:
    """Return whether a process has the number ``pid``, and, where known, ``start`` as its start."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # somebody else's, and alive
        pass
    state, found = _told_of(pid)
    return state not in _ENDED and (not start or not found or start == found)


def is_paused(pid: int) -> bool:
    """Return whether the process ``pid`` was stopped (``kill -STOP``), where that can be told."""
    return _told_of(pid)[0] == "T"


def start_of(pid: int) -> str:
    """Return when a process started, in ticks since boot; "" where nothing tells."""
    return _told_of(pid)[1]


def has_ended(pid: int, seen_us: int) -> bool:
    """Return whether the process that had the number ``pid`` at ``seen_us`` is certainly gone."""
    if not lives(pid):
        return True
    ticks = start_of(pid)
    if not ticks:
        return False
    started_us = _boot_us() + int(ticks) * _SECOND_US // os.sysconf("SC_CLK_TCK")
    return started_us > seen_us + 2 * _SECOND_US  # the boot time is told in whole seconds


def _told_of(pid: int) -> tuple[str, str]:
    """Return (state, start) of a process, both "" where nothing tells."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def _boot_us() -> int:
    for line in (PROC / "stat").read_text().splitlines():
        if line.startswith("btime "):
            return int(line.split()[1]) * _SECOND_US
    return 0
