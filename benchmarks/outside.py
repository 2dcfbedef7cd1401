"""Our adapters against other people's real packages, each in an environment of its own.

python -m benchmarks.outside                 # all
python -m benchmarks.outside --list          # what there is, and what of it is installed
python -m benchmarks.outside trl --record    # one; append the result to docs/proofs/outside.jsonl
python -m benchmarks.outside playwright --record   # and take the pictures of the documents anew

A folder below tests/outside is one package: `requirements.lock` says what is installed beside it,
the tests run in that environment. It is made on first use in .venv-outside and made anew when the
lock changes. What cannot be installed has failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.environments import ROOT, environment, is_installed, locked_version
from benchmarks.provenance import provenance

FOLDERS = ROOT / "tests" / "outside"
RESULTS = ROOT / "docs" / "proofs" / "outside.jsonl"
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
    folder = FOLDERS / package
    version = locked_version(folder, package)
    try:
        python = environment(folder)
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


def main() -> None:
    """Run what is asked for; exit with 1 if anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("package", nargs="*", choices=[*packages(), []], default=[])
    parser.add_argument(
        "--record", action="store_true", help="append results to docs/proofs/outside.jsonl"
    )
    parser.add_argument("--list", action="store_true", help="run nothing")
    asked = parser.parse_args()
    if asked.list:
        for name in asked.package or packages():
            folder = FOLDERS / name
            state = "installed" if is_installed(folder) else "not installed"
            print(f"{name} {locked_version(folder, name)}: {state}")
        return
    failed = False
    for name in asked.package or packages():
        outcome = run(name, RESULTS.parents[1] if asked.record else None)
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
