"""Our adapters against other people's real packages, each in an environment of its own.

python -m benchmarks.outside                 # all
python -m benchmarks.outside --list          # what there is, and what of it is installed
python -m benchmarks.outside trl --record    # one; append the result to docs/outside.jsonl
python -m benchmarks.outside playwright --record   # and take the pictures of the documents anew

A folder below tests/outside is one package: `requirements.lock` says what is installed beside it,
the tests run in that environment. It is made on first use in .venv-outside and made anew when the
lock changes. What cannot be installed has failed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.provenance import provenance

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ROOT / "tests" / "outside"
ENVIRONMENTS = ROOT / ".venv-outside"
RESULTS = ROOT / "docs" / "outside.jsonl"
LIMIT_S = 1800


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the tests of one package said.

    Attributes:
        ok: whether all passed, and there were some.
        said: pytest's last line, or why it never ran.
    """

    package: str
    version: str | None
    ok: bool
    said: str


def packages() -> list[str]:
    """Return the names of the packages that there are tests with."""
    return sorted(lock.parent.name for lock in FOLDERS.glob("*/requirements.lock"))


def run(package: str, pictures: Path | None = None) -> Outcome:
    """Return what the tests with ``package`` say, in its own environment.

    Args:
        package: the name of its folder.
        pictures: the folder where tests leave pictures, None: one of their own.
    """
    folder, version = FOLDERS / package, _version(package)
    try:
        python = _environment(folder)
    except subprocess.CalledProcessError as error:
        return Outcome(package, version, ok=False, said=f"cannot be installed: {error}")
    options = ["-q", "-p", "no:cacheprovider", "-c", "/dev/null", f"--rootdir={folder}"]
    done = subprocess.run(
        [python, "-m", "pytest", *options, f"--confcutdir={folder}", folder],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env=os.environ | ({} if pictures is None else {"PICTURES": str(pictures)}),
    )
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()]
    if done.returncode:
        print(done.stdout[-8000:], file=sys.stderr)
    skipped = re.search(r"\bskipped\b", lines[-1]) is not None
    return Outcome(package, version, ok=done.returncode == 0 and not skipped, said=lines[-1])


def _version(package: str) -> str | None:
    """Return which version of the package its lock names."""
    lock = (FOLDERS / package / "requirements.lock").read_text()
    pinned = re.search(rf"^{package}==(\S+)", lock, re.MULTILINE)
    return pinned[1] if pinned else None


def _is_installed(folder: Path) -> bool:
    """Return whether the folder's environment is of its lock."""
    ready = ENVIRONMENTS / folder.name / ".ready"
    return ready.is_file() and ready.read_text() == _digest(folder)


def _digest(folder: Path) -> str:
    return hashlib.sha256((folder / "requirements.lock").read_bytes()).hexdigest()


def _environment(folder: Path) -> Path:
    """Return the interpreter of the folder's environment, made if there is none for its lock."""
    place = ENVIRONMENTS / folder.name
    python, ready = place / "bin" / "python", place / ".ready"
    lock = folder / "requirements.lock"
    if _is_installed(folder):
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


def main() -> None:
    """Run what is asked for; exit with 1 if anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("package", nargs="*", choices=[*packages(), []], default=[])
    parser.add_argument(
        "--record", action="store_true", help="append results to docs/outside.jsonl"
    )
    parser.add_argument("--list", action="store_true", help="run nothing")
    asked = parser.parse_args()
    if asked.list:
        for name in asked.package or packages():
            state = "installed" if _is_installed(FOLDERS / name) else "not installed"
            print(f"{name} {_version(name)}: {state}")
        return
    failed = False
    for name in asked.package or packages():
        outcome = run(name, RESULTS.parent if asked.record else None)
        failed |= not outcome.ok
        state = "passed" if outcome.ok else "FAILED"
        print(f"{name} {outcome.version}: {state}: {outcome.said}", flush=True)
        if asked.record:
            origin = provenance(f"python -m benchmarks.outside {name}", seed=None)
            found = {"package": name, "version": outcome.version, "ok": outcome.ok}
            with RESULTS.open("a") as file:
                file.write(json.dumps({**origin, **found, "said": outcome.said}) + "\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
