"""A short torture on each backend; `make torture` is the long one."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.torture.kinds import KINDS
from tests.torture.plan import Plan

ROOT = Path(__file__).parents[2]
SLOTS = {
    "e0": "explorer", "e1": "explorer", "g0": "strategy", "o0": "strategy", "s0": "trainer",
    "r0": "reader",
}  # fmt: skip

# What every round guarantees; on a machine that lets us mount a small disk, a full one too.
PROCESSES = {
    "kill", "explorer killed for good", "kill at a crash point", "pause", "lease taken over",
    "clock wrong", "clock jumped", "world size changed", "write sent again",
    "write sent twice at once", "changed write sent", "poison row", "bit flipped",
}  # fmt: skip
GUARANTEED = {
    "sqlite": PROCESSES | {"database full", "file replaced"},
    "postgresql": PROCESSES
    | {"backend terminated", "backend killed", "server killed", "server restarted"},
}


def started(*words: str, folder: Path | None = None, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.torture", *words]
    environment = {**os.environ, "TMPDIR": str(folder or tempfile.gettempdir())}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **options)


def tortured(*words: str, folder: Path | None = None) -> tuple[int, str, str]:
    """Return exit code, output and what was said of a torture."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = started(*words, folder=folder, **pipes)
    said = process.communicate()
    return process.returncode, *said


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder for temporary files that the user of PostgreSQL may enter; pytest's is closed."""
    folder = Path(tempfile.mkdtemp(prefix="trinity-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


# Some fifteen seconds each, with the start, the end and the proof.
@pytest.mark.long
@pytest.mark.parametrize("store", ["sqlite", "postgresql"])
def test_whatever_goes_wrong_nothing_is_lost_doubled_or_skipped(store: str) -> None:
    words = ("--store", store, "--seed", "1", "--rounds", "1", "--round-seconds", "2", "--json")
    code, output, said = tortured(*words)

    assert code == 0, said
    report = json.loads(output)
    assert report["problems"] == []
    assert [report[name] for name in ("lost", "duplicated", "skipped", "different")] == [0] * 4
    assert report["replayed"] >= 4
    assert set(report["faults"]) - {"disk full"} == GUARANTEED[store]


def test_a_seed_is_a_plan() -> None:
    def planned(seed: int, number: int) -> list[object]:
        plan = Plan(seed, number, "postgresql")
        births = [plan.lives(name, role) for name, role in SLOTS.items()]
        lives = [next(lives) for lives in births for _ in range(5)]
        return [plan.first_faults(SLOTS), plan.first_lives(SLOTS), plan.faults(SLOTS, 20), lives]

    assert planned(1, 2) == planned(1, 2)
    assert len({str(planned(*which)) for which in ((1, 2), (1, 3), (2, 2))}) == 3


@pytest.mark.parametrize("site", ["sqlite", "postgresql"])
def test_every_kind_that_is_missed_is_planned_unless_it_is_left_out(site: str) -> None:
    whole = Plan(1, 2, site)
    assert {kind.name for kind in whole.kinds()} == GUARANTEED[site]
    for left_out in GUARANTEED[site]:
        plan = Plan(1, 2, site, frozenset({left_out}))
        firsts = {f.kind for f in plan.first_faults(SLOTS)}
        firsts |= {kind.name for kind, _ in plan.first_lives(SLOTS)}
        inflicted = {f.kind for f in plan.faults(SLOTS, 60)}
        assert left_out in {kind.name for kind in plan.kinds()}
        assert left_out not in {kind.name for kind in plan.comes()} | firsts | inflicted
        assert inflicted == {kind.name for kind in plan.inflicted() if kind.weight}


@pytest.mark.long
@pytest.mark.parametrize("store", ["sqlite", "postgresql"])
@pytest.mark.parametrize("half", [0, 1])
def test_each_kind_that_never_took_effect_fails_the_run(
    store: str, half: int, open_folder: Path
) -> None:
    """Half of the kinds do not come; those, and no others, are missed."""
    left_out = [kind.name for kind in KINDS][half::2]
    without = [word for name in left_out for word in ("--without", name)]
    words = ("--store", store, *without, "--rounds", "1", "--round-seconds", "0", "--json")
    code, output, said = tortured(*words, folder=open_folder)

    missed = [name for name in left_out if name in GUARANTEED[store] | {"disk full"}]
    if "no small disk" in said:  # the torture has said that it cannot guarantee this one
        missed = [name for name in missed if name != "disk full"]
    problems = [f"round 0: {name}: never took effect" for name in missed]
    assert output, said  # else it broke off
    assert json.loads(output)["problems"] == problems, said
    assert code == 1


@pytest.mark.long
@pytest.mark.parametrize(("store", "file"), [("sqlite", "store.db"), ("postgresql", "store.sql")])
def test_a_failed_round_leaves_its_store_and_says_how_to_run_it_again(
    store: str, file: str, open_folder: Path
) -> None:
    words = ("--store", store, "--seed", "7", "--first-round", "5", "--round-seconds", "0")
    left_out = sorted({kind.name for kind in KINDS} - {"kill"})  # which would take minutes
    without = [word for kind in left_out for word in ("--without", kind)]
    code, _, said = tortured(*words, *without, folder=open_folder)
    assert code == 1, said
    (left,) = open_folder.glob("trinity-torture-*/5")
    assert f"its store too: {left}" in said
    assert (left / file).stat().st_size > 10_000
    assert {"effects", "acks", "e0.log", "r0.read"} <= {path.name for path in left.iterdir()}

    (again,) = (line for line in said.splitlines() if line.startswith("again: "))
    python, *command = shlex.split(again.removeprefix("again: "))
    assert (python, command[:2]) == ("python", ["-m", "benchmarks.torture"])
    code, output, said = tortured(*command[2:], "--json", folder=open_folder)
    assert output, said
    report = json.loads(output)
    assert code == 1, said
    assert (report["store"].split()[0], report["seed"], report["rounds"]) == (store, 7, 1)
    assert "round 5: bit flipped: never took effect" in report["problems"]
    others = [p for p in report["problems"] if not p.endswith(": never took effect")]
    assert others == [], said


def is_alive_below(process: psutil.Process, torture: int) -> bool:
    """Return whether it is a process of the torture's forkserver that has not ended meanwhile."""
    try:
        alive = process.ppid() != torture and process.status() != psutil.STATUS_ZOMBIE
        return alive and "forkserver" in str(process.cmdline())
    except psutil.NoSuchProcess:
        return False


@pytest.mark.long
@pytest.mark.parametrize("store", ["sqlite", "postgresql"])
def test_who_kills_a_torture_leaves_no_process_and_no_disk(store: str, open_folder: Path) -> None:
    words = ("--store", store, "--rounds", "1", "--verbose")
    process = started(*words, folder=open_folder, stderr=subprocess.PIPE)
    assert process.stderr is not None
    assert " s  " in process.stderr.readline()  # the first fault
    try:
        born = psutil.Process(process.pid).children(recursive=True)
        forked = [p for p in born if is_alive_below(p, process.pid)]
        forked[0].suspend()  # who is stopped never hears that anybody has ended
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stderr.close()

    assert len(born) > 9
    assert psutil.wait_procs(born, timeout=300)[1] == []
    assert str(open_folder) not in Path("/proc/self/mounts").read_text()
