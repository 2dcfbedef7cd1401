"""Where a figure comes from: command, seed, commit, code and machine."""

from __future__ import annotations

import os
import platform
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pysqlite3
import torch

from benchmarks.imports import digest_of, files_of
from benchmarks.measuring import commit

ROOT = Path(__file__).resolve().parents[1]


def provenance(command: str, seed: int | None = 0) -> dict[str, Any]:
    """Return the fields by which a recorded figure tells where it comes from.

    Args:
        command: what records the figure again.
        seed: of what is random in it; None: it is not fixed.

    Returns:
        ``date``, ``command``, ``seed``, ``commit``, ``code`` (a digest of the files that the
        command imports, as they are now, committed or not) and ``machine``.
    """
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "command": command,
        "seed": seed,
        "commit": commit(),
        "code": digest_of(files_of(command, ROOT), ROOT),
        "machine": machine(),
    }


def machine() -> dict[str, Any]:
    """Return what figures depend on beside the code."""
    return {
        "cores": os.cpu_count(),
        "cpu": _cpu(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "sqlite": pysqlite3.sqlite_version,
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    names = re.findall(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return names[0] if names else platform.machine()
