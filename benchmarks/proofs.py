"""Which recorded figures are older than the code that they are about? A line for each.

python -m benchmarks.proofs                            # the stale ones, and how stale
python -m benchmarks.proofs --run --only torture       # run these again; the next call goes on

A figure is stale when a file that its command imports has changed since. What is not known of an
older one is said to be unknown. A figure that was run again is recorded at once, and is fresh.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import performance
from benchmarks.imports import digest_of, entry_of, imported_by

ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, Any]
NAMED = ("command", "seed", "commit", "machine")


@dataclass(frozen=True, slots=True)
class Record:
    """A file with a recorded result a line.

    Attributes:
        file: below the folder of the repository.
        figure: what a result is about; of several about the same, the last one counts.
        command: what records a result again.
        page: what writes the page with the results again, if recording does not.
    """

    file: str
    figure: Callable[[Row], str]
    command: Callable[[Row], str]
    page: str | None = None


def _learning_command(row: Row) -> str:
    """Return the command of a result; the first ones were recorded without."""
    plain = f"python benchmarks/learning.py --algorithm {row['algorithm']} --seeds {row['seed']}"
    return f"{plain} --again"


def _torture_figure(row: Row) -> str:
    """Return the command without its seed: another seed tells the same again."""
    return re.sub(r"^python -m benchmarks\.| --seed \d+", "", row["command"])


RECORDS = (
    Record(
        "docs/proofs/learning.jsonl",
        lambda row: f"learning {row['algorithm']}, seed {row['seed']}",
        _learning_command,
        "python benchmarks/learning.py --report",
    ),
    Record(
        "docs/proofs/learning_hf.jsonl",
        lambda row: f"learning of a model of transformers, seed {row['seed']}",
        lambda row: str(row["command"]),
    ),
    Record("docs/proofs/torture.jsonl", _torture_figure, lambda row: f"{row['command']} --record"),
    Record(
        "docs/proofs/performance.jsonl",
        performance.figure,
        lambda row: str(row["command"]),
        "python -m benchmarks.performance",
    ),
    Record(
        "docs/proofs/gpu.jsonl", lambda row: f"on a GPU, {row['what']}", lambda row: row["command"]
    ),
)


@dataclass(frozen=True, slots=True)
class Age:
    """How old a figure is.

    Attributes:
        figure: what it is about.
        command: what records it again.
        page: what then writes the page with it again.
        commit: of the code that was measured, or None if it is unknown.
        date: when it was recorded, or None.
        unknown: those of command, seed, commit and machine that its record does not name.
        changed: files that its command imports and that have changed since; None: unknown.
        commits: how many commits since have changed them; None: unknown.
    """

    figure: str
    command: str
    page: str | None
    commit: str | None
    date: str | None
    unknown: tuple[str, ...]
    changed: tuple[str, ...] | None
    commits: int | None

    @property
    def stale(self) -> bool:
        """Whether code that it is about has changed, or may have."""
        return self.changed is None or bool(self.changed)

    def told(self) -> str:
        """Return a line for a reader."""
        where = f"{self.commit or 'commit unknown'}, {self.date or 'date unknown'}"
        lacking = f"; its record names no {', no '.join(self.unknown)}" if self.unknown else ""
        if self.changed is None:
            return f"stale  {self.figure} ({where}): what has changed since is unknown{lacking}"
        if not self.changed:
            return f"fresh  {self.figure} ({where}){lacking}"
        some = ", ".join(self.changed[:2]) + (", ..." if len(self.changed) > 2 else "")
        number = f"{len(self.changed)} files changed in {self.commits} commits"
        return f"stale  {self.figure} ({where}): {number}, {some}{lacking}"


class _Code(NamedTuple):
    files: tuple[str, ...]
    digest: str


class _Changes(NamedTuple):
    files: tuple[str, ...] | None
    commits: int | None


UNKNOWN = _Changes(None, None)


def ages(root: Path = ROOT) -> list[Age]:
    """Return how old each figure that is recorded under ``root`` is, record after record."""
    code = cache(partial(_code, root))  # many figures have one command's code, or one commit
    since = cache(partial(_since, root))
    found = []
    for record in RECORDS:
        for figure, row in _newest(record, root).items():
            command = record.command(row)
            changes = _changes(row, code(entry_of(command, root)), since)
            unknown = tuple(name for name in NAMED if row.get(name) in (None, ""))
            commit, date = row.get("commit") or None, row.get("date")
            found.append(Age(figure, command, record.page, commit, date, unknown, *changes))
    return found


def _newest(record: Record, root: Path) -> dict[str, Row]:
    path = root / record.file
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {record.figure(row): row for row in rows}


def _changes(row: Row, now: _Code, since: Callable[..., _Changes]) -> _Changes:
    """Return which of the files that were measured are others now."""
    if row.get("code") == now.digest:
        return _Changes((), 0)
    found = since(row.get("commit") or row.get("noted"), now.files)
    # Another digest and no other file: it was measured with changes that were never committed.
    return UNKNOWN if row.get("code") and not found.files else found


def _code(root: Path, entry: tuple[str, ...]) -> _Code:
    files = imported_by(entry, root)
    return _Code(tuple(files), digest_of(files, root))


def _since(root: Path, commit: str | None, files: tuple[str, ...]) -> _Changes:
    """Return which files differ from those of ``commit``, and in how many commits they changed."""
    if not commit:
        return UNKNOWN
    differing = _git(root, "diff", "--name-only", commit, "--", *files)
    count = _git(root, "rev-list", "--count", f"{commit}..HEAD", "--", *files)
    if differing is None or count is None:  # no such commit, or no checkout
        return UNKNOWN
    return _Changes(tuple(differing.splitlines()), int(count))


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(root), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def run_again(root: Path, wanted: Callable[[Age], bool]) -> int:
    """Run the commands of stale figures, one after the other, each once; return the exit code.

    It ends with the first that fails. What was recorded until then is fresh, and is not run by the
    next call.
    """
    done: set[str] = set()
    pages: list[str] = []
    code = 0
    while not code:
        left = [age for age in ages(root) if age.stale and wanted(age) and age.command not in done]
        if not left:
            break
        done.add(left[0].command)
        code = _run(left[0].command, root)
        pages += [left[0].page] if left[0].page and left[0].page not in pages else []
    return max([code, *(_run(page, root) for page in pages)])


def _run(command: str, root: Path) -> int:
    print(f"runs {command}", flush=True)
    program, *arguments = shlex.split(command)
    python = [sys.executable] if program == "python" else [program]
    return subprocess.run([*python, *arguments], cwd=root, check=False).returncode


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Do what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--run", action="store_true", help="run the stale ones again")
    parser.add_argument("--only", default="", help="figures with this in their name")
    parser.add_argument("--all", action="store_true", help="list the fresh ones too")
    asked = parser.parse_args(arguments)

    def wanted(age: Age) -> bool:
        return asked.only in age.figure

    code = run_again(root, wanted) if asked.run else 0
    found = [age for age in ages(root) if wanted(age)]
    for age in found:
        if age.stale or asked.all:
            print(age.told())
    stale = sum(age.stale for age in found)
    print(f"{stale} of {len(found)} figures are stale" + "; --run runs them again" * bool(stale))
    return code


if __name__ == "__main__":
    sys.exit(main())
