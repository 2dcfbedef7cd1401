"""A recorded figure is stale when code that its command imports has changed, and is run again."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import performance, proofs
from benchmarks.imports import digest_of, entry_of, files_of

BENCH = """\
import json, sys
from typing import TYPE_CHECKING
import package
if TYPE_CHECKING:
    from package import hints
def main() -> None:
    from package.deep import store
    row = {"op": sys.argv[1], "case": "all", "backend": "sqlite", "command": "python -m bench.fast "
           + sys.argv[1], "seed": 0, "machine": {"cores": 2}, "commit": None, "code": sys.argv[2]}
    with open("docs/proofs/performance.jsonl", "a") as file:
        file.write(json.dumps(row) + "\\n")
main()
"""
FILES = {
    "bench/fast.py": BENCH,
    "package/__init__.py": 'HOMES = {"verify": "package.lazy:verify"}\n',
    "package/lazy.py": "",
    "package/hints.py": "",
    "package/deep/__init__.py": "",
    "package/deep/store.py": "import os\n",
    "package/apart.py": "import package.lazy\n",
    "docs/proofs/performance.jsonl": "",
    # In place of ours, which would write the pages of this repository while others read them.
    "benchmarks/performance.py": 'print("tables written")\n',
    ".gitignore": "docs/\n",
}
IMPORTED = [
    "bench/fast.py",
    "package/__init__.py",
    "package/deep/__init__.py",
    "package/deep/store.py",
    "package/lazy.py",
]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit and no figure."""
    for name, value in (("NAME", "a"), ("EMAIL", "a@b")):
        monkeypatch.setenv(f"GIT_AUTHOR_{name}", value)
        monkeypatch.setenv(f"GIT_COMMITTER_{name}", value)
    for file, text in FILES.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def commit(root: Path) -> str:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--allow-empty", "--message", "change")
    return git(root, "rev-parse", "--short", "HEAD")


def note(root: Path, **more: Any) -> None:
    """Record a figure of the code as it is now."""
    row: Mapping[str, Any] = {
        "op": "write",
        "case": "all",
        "backend": "sqlite",
        "command": "python -m bench.fast write",
        "seed": 0,
        "commit": git(root, "rev-parse", "HEAD"),
        "machine": {"cores": 2},
        **more,
    }
    with (root / "docs" / "proofs" / "performance.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def change(root: Path, file: str) -> None:
    (root / file).write_text((root / file).read_text() + "# changed\n")


def test_the_files_of_a_command_are_what_it_imports_at_run_time(root: Path) -> None:
    assert files_of("python -m bench.fast write", root) == IMPORTED
    assert files_of("nice python bench/fast.py write", root) == IMPORTED


def test_a_command_that_runs_nothing_of_the_repository_is_refused(root: Path) -> None:
    with pytest.raises(ValueError, match="'make torture' runs no module"):
        files_of("make torture", root)


@pytest.mark.parametrize("file", IMPORTED)
def test_a_figure_is_stale_once_a_file_that_it_imports_changes(root: Path, file: str) -> None:
    note(root)
    (age,) = proofs.ages(root)
    assert not age.stale
    change(root, file)
    (age,) = proofs.ages(root)
    assert (age.changed, age.commits) == ((file,), 0)  # nothing is committed yet
    commit(root)
    (age,) = proofs.ages(root)
    assert (age.changed, age.commits) == ((file,), 1)
    assert f"1 files changed in 1 commits, {file}" in age.told()


@pytest.mark.parametrize("file", ["package/apart.py", "package/hints.py"])
def test_a_figure_stays_fresh_when_other_files_change(root: Path, file: str) -> None:
    note(root)
    change(root, file)
    commit(root)
    assert [age.stale for age in proofs.ages(root)] == [False]


def test_the_digest_of_the_code_counts_where_the_commit_is_gone(root: Path) -> None:
    """As after a rebase: the commit has another name, the code is the same."""
    code = digest_of(IMPORTED, root)
    note(root, commit="0123456", code=code)
    assert [age.stale for age in proofs.ages(root)] == [False]
    change(root, "package/lazy.py")
    (age,) = proofs.ages(root)
    assert age.stale
    assert "what has changed since is unknown" in age.told()


def test_what_a_record_does_not_name_is_told_as_unknown(root: Path) -> None:
    note(root, commit=None, machine=None)
    (age,) = proofs.ages(root)
    assert age.stale
    assert "commit unknown, date unknown" in age.told()
    assert "its record names no commit, no machine" in age.told()


def test_the_last_result_of_a_figure_counts(root: Path) -> None:
    note(root)
    change(root, "package/lazy.py")
    commit(root)
    note(root)
    assert [age.stale for age in proofs.ages(root)] == [False]


def test_stale_figures_are_run_again_and_a_failure_is_gone_on_from(
    root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = digest_of(IMPORTED, root)
    for name in ("write", "stream", "latency"):
        note(root, op=name, commit=None, command=f"python -m bench.fast {name} {code}")
    note(root, op="broken", commit=None, command="python -m bench.fast")
    assert proofs.main(["--run", "--only", "write"], root) == 0
    assert [age.figure for age in proofs.ages(root) if not age.stale] == ["write, all, sqlite"]
    assert proofs.main(["--run"], root) == 1  # of the three that are left, the last one fails
    said = capfd.readouterr().out
    assert said.count("runs python -m bench.fast write ") == 1
    assert said.count("tables written") == 2, "once for each command"
    assert said.endswith("1 of 4 figures are stale; --run runs them again\n")
    assert "stale  broken, all, sqlite" in said


def test_each_recorded_figure_names_a_command_of_this_repository() -> None:
    for record in proofs.RECORDS:
        rows = [json.loads(line) for line in (proofs.ROOT / record.file).read_text().splitlines()]
        assert rows or record.file == "docs/proofs/gpu.jsonl"  # its first figures are still to come
        assert all(record.figure(row) for row in rows)
        assert all(entry_of(record.command(row), proofs.ROOT) for row in rows)


def test_a_result_that_does_not_say_what_it_is_about_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(performance, "RECORD", tmp_path / "performance.jsonl")
    with pytest.raises(KeyError, match="case"):
        performance.record({"op": "watch", "backend": "sqlite"})
    assert not performance.RECORD.exists()


def test_the_tables_of_the_pages_are_those_that_the_record_makes() -> None:
    newest = performance.newest_rows()
    assert performance.speeds(newest) in performance.PAGE.read_text()
    assert performance.peers(newest) in performance.PAGE.read_text()
    assert performance.growth(newest) in performance.PAGE.read_text()
    assert performance.verifying(newest) in performance.LOOKS.read_text()
