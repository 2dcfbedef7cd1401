"""Two runs in one store leave each other's files alone; what a process prints ends none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from tests.cli.calling import Cli
from trinity_buffer import open_store

SMALL = (
    *("task.digits=1", "model.width=8", "model.layers=1", "model.heads=1", "groups_per_step=1"),
    *("groups_per_batch=1", "rollouts_per_group=2", "evaluation.every_steps=1000"),
    *("evaluation.num_eval_samples=1", "max_staleness=null"),
)
SETS = [word for one in SMALL for word in ("--set", one)]


def test_a_run_keeps_its_checkpoints_beside_another_in_the_same_store(
    cli: Cli, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    for name, batches in (("short", 1), ("long", 4)):
        place = ("--store", url, "--experiment", name)
        assert cli("explore", *place, "--actor", "e0", "--batches", batches, *SETS).code == 0
        assert cli("annotate", *place).code == 0
        assert cli("train", *place).code == 0

    async def last_checkpoints() -> list[str | None]:
        async with open_store(url, read_only=True) as store:
            names = ("short", "long")
            return [await (await store.experiment(n)).last_checkpoint("trainer") for n in names]

    found = anyio.run(last_checkpoints)
    assert all(one is not None and Path(one).is_dir() for one in found)
    assert cli("train", "--store", url, "--experiment", "short").code == 0


def test_a_trainer_keeps_its_checkpoints_beside_another_of_its_experiment(
    cli: Cli, tmp_path: Path
) -> None:
    place = ("--store", tmp_path / "store.db")
    assert cli("explore", *place, "--actor", "e0", "--batches", 2, *SETS).code == 0
    assert cli("annotate", *place).code == 0
    assert cli("train", *place).code == 0
    assert cli("train", *place, "--set", "trainer=other").code == 0
    again = cli("train", *place, "--set", "trainer=trainer")
    assert again.code == 0, again.err
    assert "resumes after step 2" in again.out


@pytest.mark.parametrize("name", [".", "..", "跑" * 100])
def test_any_name_of_an_experiment_has_a_folder_of_its_own(
    cli: Cli, tmp_path: Path, name: str
) -> None:
    store = tmp_path / "runs" / "store.db"
    for experiment in ("first", name):
        place = ("--store", store, "--experiment", experiment)
        assert cli("explore", *place, "--actor", "e0", "--batches", 1, *SETS).code == 0
        assert cli("annotate", *place).code == 0
        ended = cli("train", *place)
        assert ended.code == 0, ended.err
    steps = [*store.with_suffix(".checkpoints").rglob("step-*")]
    assert len({step.parent for step in steps}) == 2


def test_stores_whose_names_differ_behind_a_dot_keep_their_checkpoints(
    cli: Cli, tmp_path: Path
) -> None:
    named = f"sqlite:///{tmp_path}/lr0.3.db?timeout=5"
    for store in (tmp_path / "lr0.1", tmp_path / "lr0.2", named):
        assert cli("explore", "--store", store, "--actor", "e0", "--batches", 1, *SETS).code == 0
        assert cli("annotate", "--store", store).code == 0
        assert cli("train", "--store", store).code == 0
    checkpoints = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("step-*")]
    assert sorted(checkpoints) == [f"lr0.{n}.checkpoints/step-00000001" for n in (1, 2, 3)]


@pytest.mark.long
def test_demos_whose_names_differ_behind_a_dot_lose_nothing(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("lr0.1", "lr0.2"):
        ended = cli("demo", "--name", name, *SETS, "--set", "max_steps=2")
        assert (ended.code, ended.out.splitlines()[-1]) == (0, "lost 0, duplicated 0")


def test_an_explorer_that_has_all_its_batches_says_so(cli: Cli, tmp_path: Path) -> None:
    words = ("explore", "--store", tmp_path / "store.db", "--actor", "e0", "--batches", 1, *SETS)
    assert cli(*words).code == 0
    again = cli(*words)
    assert again.code == 0
    assert "e0 had nothing to explore: --batches 1 counts what it has planned before" in again.out


def test_a_trainer_of_a_run_that_is_finished_says_so(cli: Cli, tmp_path: Path) -> None:
    place = ("--store", tmp_path / "store.db")
    for words in (("explore", "--actor", "e0", "--batches", 1, *SETS), ("annotate",), ("train",)):
        assert cli(*words, *place).code == 0
    for _ in range(2):
        told = cli("train", *place, "--follow", "--set", "max_steps=1")
        assert told.code == 0
        last = told.out.splitlines()[-1]
        assert " is finished: " in last
        assert last.endswith("step 1")


def test_an_algorithm_of_another_set_is_refused_before_it_is_recorded(
    cli: Cli, tmp_path: Path
) -> None:
    place = ("--store", tmp_path / "store.db")
    assert cli("explore", *place, "--actor", "e0", "--batches", 1, *SETS).code == 0
    assert cli("annotate", *place).code == 0
    assert cli("train", *place).code == 0
    refused = cli("train", *place, "--set", "algorithm=rloo")
    assert refused.code == 2
    assert "trains on 'grpo', and algorithm=rloo would read 'recorded'" in refused.err
    assert cli("train", *place).code == 0


@pytest.mark.parametrize("follow", [(), ("--follow",)])
def test_a_run_of_which_every_step_was_skipped_has_failed(
    cli: Cli, tmp_path: Path, follow: tuple[str, ...]
) -> None:
    place = ("--store", tmp_path / "store.db")
    broken = ("--set", "optimizer.entropy_coef=1e38", "--set", "max_steps=1")
    assert cli("explore", *place, "--actor", "e0", "--batches", 1, *SETS, *broken).code == 0
    assert cli("annotate", *place).code == 0
    ended = cli("train", *place, *follow)
    assert "skipped: non_finite" in ended.out
    assert ended.code == 1
    assert "1 step of run changed nothing: loss or gradient norm were not finite" in ended.err
    assert "ExperimentFinished" not in cli("events", *place).out


def test_an_expert_must_hold_solutions(cli: Cli, tmp_path: Path) -> None:
    place = ("--store", tmp_path / "store.db", "--actor", "e0", "--batches", 1, *SETS)
    mix = ("--set", "algorithm=mix", "--set", "expert_experiment=expert", "--experiment", "run")
    assert cli("explore", *place, "--experiment", "expert").code == 0
    refused = cli("explore", *place, *mix)
    assert refused.code == 2
    assert "expert_experiment='expert' is of the schema 'experience'" in refused.err


def test_an_expert_without_rows_is_refused_where_nobody_waits(cli: Cli, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"

    async def make() -> None:
        async with open_store(url) as store:
            await store.experiment("expert", config={"schema": "sft"})

    anyio.run(make)
    mix = ("--set", "algorithm=mix", "--set", "expert_experiment=expert")
    place = ("--store", url, "--experiment", "run")
    assert cli("explore", *place, "--actor", "e0", "--batches", 1, *SETS, *mix).code == 0
    refused = cli("train", *place)
    assert refused.code == 2
    assert "expert_experiment='expert' holds no rows yet" in refused.err


def test_a_path_in_a_file_is_seen_from_its_folder(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "run.toml").write_text('store = "r.db"\nreference = "p.safetensors"\n')
    (tmp_path / "runs" / "p.safetensors").write_text("no policy")
    monkeypatch.chdir(tmp_path)
    refused = cli("explore", "--config", "runs/run.toml", "--actor", "e0")
    assert refused.code == 2
    assert f"reference={tmp_path}/runs/p.safetensors: " in refused.err


@pytest.mark.long
@pytest.mark.parametrize(("shut", "code"), [(">&-", 0), ("2>&-", 0), ("<&-", 0), (">/dev/full", 1)])
def test_a_stream_that_is_shut_is_no_traceback(tmp_path: Path, shut: str, code: int) -> None:
    command = f"exec '{sys.executable}' -m trinity_buffer algorithms {shut}"
    ended = subprocess.run(
        command, cwd=tmp_path, shell=True, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, "Traceback" in ended.stderr) == (code, False), ended.stderr


def test_a_terminal_of_ascii_shows_what_it_can(tmp_path: Path) -> None:
    words = ("stats", "--store", "läden.db")
    ended = subprocess.run(
        [sys.executable, "-m", "trinity_buffer", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert "l\\xe4den.db" in ended.stderr
