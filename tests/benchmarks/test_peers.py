"""Other people's stores are compared with ours: in turns, and a store that fails has no figure."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from multiprocessing import Barrier
from pathlib import Path

import pytest
from typing_extensions import override

from benchmarks import performance
from benchmarks.environments import ROOT
from benchmarks.imports import imported_by
from benchmarks.peers import comparison
from benchmarks.peers.__main__ import main
from benchmarks.peers.catalogue import OURS, STORES, Store
from benchmarks.peers.comparison import MeasurementError, figures, rounds
from benchmarks.peers.measurement import Measured
from benchmarks.peers.protocol import Job, StoreClient
from benchmarks.peers.roles import PLAYED, WrongRowsError
from benchmarks.peers.rollouts import Batch, padded, rollouts, scores

FOREIGN = {name: store for name, store in STORES.items() if store.lock is not None}
SMALL = ["--peers", "files", "--repetitions", "1", "--experiences", "512"]


@pytest.mark.long
def test_a_small_comparison_has_a_figure_for_each_operation_and_store(warm_python: str) -> None:
    command = [warm_python, "-m", "benchmarks.peers", *SMALL]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = {row["case"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert len(found) == 7  # five rates, two shares of the delays
    assert all(row["ours"] > 0 and row["limit"] > 0 for row in found.values())
    assert found["write to delivered at 200/s, p99: plain files"]["experiences"] == 512
    assert {row["seed"] for row in found.values()} == {0}


def test_a_ratio_is_of_one_round_and_not_of_medians() -> None:
    ours = [Measured(100.0), Measured(400.0), Measured(300.0)]
    other = [Measured(50.0), Measured(800.0), Measured(100.0)]
    (figure,) = figures("write", STORES["files"], "sqlite", ours, other)
    assert (figure.ours, figure.limit, figure.unit) == (300, 100, "experiences/s")
    assert (figure.ratio, figure.ratio_low, figure.ratio_high) == (2.0, 0.5, 3.0)


def test_of_a_latency_there_are_two_figures() -> None:
    some = [Measured(200.0, 9.125, 30.0)]
    found = list(figures("latency", STORES["reverb"], "sqlite", some, some))
    assert [figure.case.partition(", ")[2] for figure in found] == ["p50: Reverb", "p99: Reverb"]
    assert [(figure.ours, figure.unit) for figure in found] == [(9.12, "ms"), (30.0, "ms")]


def test_another_store_begins_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[str] = []

    def measured(job: Job, python: str) -> Measured:
        began.append(python)
        if python == "b":
            raise MeasurementError("the process ended with 1")
        return Measured(1.0)

    monkeypatch.setattr(comparison, "measured_by", measured)
    pythons = {OURS: "a", "files": "b", "reverb": "c"}
    assert list(rounds(comparison.OPERATIONS["write"], pythons, 2)) == [OURS, "reverb"]
    assert began == ["a", "b", "c", "c", "a"]


@pytest.mark.long
def test_a_process_that_fails_is_told_with_its_last_words() -> None:
    with pytest.raises(MeasurementError, match=r"exit code 1\n[^$]*ModuleNotFoundError"):
        comparison.measured_by(Job("benchmarks.peers.stores.nowhere", "write", 256), sys.executable)


class Repeating(StoreClient):
    """Hands out rows from each of ``firsts`` on."""

    def __init__(self, *firsts: int) -> None:
        self._firsts = list(firsts)

    @override
    def read(self, rows: int) -> Batch:
        given = rollouts(rows, first=self._firsts.pop(0))
        advantages = scores([one.reward for one in given])
        both = zip(given, advantages, strict=True)
        return padded((one.tokens, one.logprobs, one.mask, value, 0.0) for one, value in both)


def test_a_trainer_notices_what_it_was_given_twice() -> None:
    job = Job("", "read", 32, per_read=16)
    span = PLAYED["trainer"](Repeating(16, 0), 0, job, Barrier(1))
    assert (span.rows, span.first_rows) == (32, 16)
    assert span.began < span.first_ended < span.ended
    with pytest.raises(WrongRowsError, match="rows came that are repeated"):
        PLAYED["trainer"](Repeating(16, 16), 0, job, Barrier(1))


@pytest.mark.long
def test_what_cannot_be_installed_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "absent").mkdir()
    (tmp_path / "absent" / "requirements.lock").write_text("absent @ file:///nowhere\n")
    absent = Store("absent", "benchmarks.peers.stores.absent", tmp_path / "absent", "absent")
    monkeypatch.setitem(STORES, "files", absent)
    monkeypatch.setattr("benchmarks.environments.ENVIRONMENTS", tmp_path)
    monkeypatch.setattr("benchmarks.environments.ROOT", tmp_path)
    monkeypatch.setattr("benchmarks.peers.__main__.rounds", lambda *_: {})
    assert main(SMALL) == 1
    assert "files: FAILED: cannot be installed: Command" in capsys.readouterr().err


@pytest.mark.parametrize("name", FOREIGN)
def test_the_lock_of_a_store_names_its_version(name: str) -> None:
    assert STORES[name].version


@pytest.mark.parametrize("name", FOREIGN)
def test_what_runs_in_other_environments_needs_nothing_of_ours(name: str) -> None:
    entry = [f"{STORES[name].module.replace('.', '/')}.py", "benchmarks/peers/measurement.py"]
    files = imported_by(entry, ROOT)
    assert files
    assert [file for file in files if not file.startswith("benchmarks/")] == []


def test_the_table_has_a_line_for_each_figure() -> None:
    ours, other = [Measured(200.0, 9.5, 19.0)], [Measured(200.0, 19.0, 76.0)]
    found = map(asdict, figures("latency", STORES["reverb"], "sqlite", ours, other))
    of = {"version": "0.14.0", "date": "2026-11-24", "commit": "1234567"}
    newest = {("peers", row["case"]): row | of for row in found} | {("write", "all"): of}
    *_, p50, p99 = performance.peers(newest).splitlines()
    case = "write to delivered at 200/s"
    assert p50.startswith(f"| {case}, p50: Reverb 0.14.0 | 9.5 ms | 19 ms | 0.5 (0.5–0.5) | 2026-")
    assert p99.startswith(f"| {case}, p99: Reverb 0.14.0 | 19 ms | 76 ms | 0.25 (0.25–0.25) | ")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["--experiences", "100"], "--experiences 100: give a multiple of 512"),
        (["--peers", "redis"], "no redis: there are bare_sqlite, files, "),
        (["--only", "crash"], "no crash: there are write, read, uncommitted, pass, latency"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    given: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(given)
    assert why in capsys.readouterr().err
