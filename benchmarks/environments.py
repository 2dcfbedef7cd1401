"""Environments with other people's packages, each made of a folder's ``requirements.lock``.

They lie in .venv-outside. One is made on first use, and made anew when its lock changes.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = ROOT / ".venv-outside"


def environment(folder: Path) -> Path:
    """Return the interpreter of the folder's environment, made if there is none for its lock.

    Raises:
        CalledProcessError: it cannot be made; pip has said why.
    """
    place = ENVIRONMENTS / folder.name
    python, ready = place / "bin" / "python", place / ".ready"
    lock = folder / "requirements.lock"
    if is_installed(folder):
        return python
    print(f"{folder.name}: installing {lock.relative_to(ROOT)}", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
    pip: list[str | Path] = [
        python,
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--quiet",
    ]
    subprocess.run([*pip, "--no-deps", "-r", lock], check=True)
    subprocess.run([*pip, "--no-deps", "--editable", ROOT], check=True)
    ready.write_text(_digest(folder))
    return python


def is_installed(folder: Path) -> bool:
    """Return whether the folder's environment is of its lock."""
    ready = ENVIRONMENTS / folder.name / ".ready"
    return ready.is_file() and ready.read_text() == _digest(folder)


def locked_version(folder: Path, package: str) -> str | None:
    """Return which version of a package the folder's lock names."""
    lock = (folder / "requirements.lock").read_text()
    pinned = re.search(rf"^{package}==(\S+)", lock, re.MULTILINE)
    return pinned[1] if pinned else None


def _digest(folder: Path) -> str:
    return hashlib.sha256((folder / "requirements.lock").read_bytes()).hexdigest()
