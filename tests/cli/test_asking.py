"""Commands that ask, check and mend: what they print, and how they end."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from tests.cli.calling import Cli
from tests.pipeline.planting import delete_event, unguarded
from tests.raw_store import sql
from tests.sample_run import SampleRun, record_sample_run
from trinity_buffer import open_store


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> SampleRun:
    """A store that no test changes."""
    folder = tmp_path_factory.mktemp("sample")
    return anyio.run(record_sample_run, f"sqlite:///{folder / 'store.db'}", folder / "run")


@pytest.fixture
def own_sample_run(new_sqlite_url: str, tmp_path: Path) -> SampleRun:
    """A store for one test alone."""
    return anyio.run(record_sample_run, new_sqlite_url, tmp_path / "run")


def test_stats_say_what_is_there(cli: Cli, sample: SampleRun) -> None:
    told = cli("stats", "--store", sample.url)
    assert told.code == 0
    assert "SQLite 3." in told.out
    assert "20 planned = 17 stored + 3 missing" in told.out
    assert re.search(r"grpo +18 +0 +1 +16 +16 +late 1", told.out)
    (found,) = cli("stats", "--store", sample.url, "--json").json
    (one,) = found["experiments"]
    assert one["experiences"] == 18
    assert one["head"] == sum(one["events"].values()) == 27
    assert one["trainers"][0]["committed"] == 2
    assert one["trainers"][0]["counts"]["ready"] == 4


@pytest.mark.long
def test_stats_of_a_server_are_the_same(cli: Cli, postgres_url: str, tmp_path: Path) -> None:
    sample = anyio.run(record_sample_run, postgres_url, tmp_path / "run")
    (found,) = cli("stats", "--store", sample.url, "--json").json
    assert found["version"].startswith("PostgreSQL ")
    assert found["size_bytes"] > 0
    assert found["experiments"][0]["plans"] == {"planned": 20, "stored": 17}
    assert cli("verify", "--store", sample.url, "--quick").code == 0


def test_events_are_the_last_ones_or_those_after_a_position(cli: Cli, sample: SampleRun) -> None:
    last = cli("events", "--store", sample.url, "--limit", 3, "--json").json
    assert [event["position"] for event in last] == [25, 26, 27]
    first = cli("events", "--store", sample.url, "--after", 0, "--limit", 2, "--json").json
    assert [event["kind"] for event in first] == ["ExperimentCreated", "BatchPlanned"]
    kinds = cli("events", "--store", sample.url, "--kind", "StepsCommitted", "--json").json
    assert [event["summary"][:6] for event in kinds] == ["step 1", "step 2"]
    assert "4 tasks × 4 rollouts" in cli("events", "--store", sample.url, "--after", 1).out


def test_following_events_ends_with_the_experiment(cli: Cli, own_sample_run: SampleRun) -> None:
    async def finish() -> None:
        async with open_store(own_sample_run.url) as store:
            await (await store.experiment("sort")).finish("done")

    anyio.run(finish)
    found = cli("events", "--store", own_sample_run.url, "--follow", "--after", 20, "--json")
    assert found.code == 0
    assert found.json[-1]["kind"] == "ExperimentFinished"


def test_groups_show_rewards_advantages_and_fates(cli: Cli, sample: SampleRun) -> None:
    found = cli("groups", "--store", sample.url, "--json").json
    by_name = {(group["batch"], group["task"]): group for group in found}
    assert by_name["b1", 0]["state"] == "waiting; 3 missing"
    trained = by_name["b0", 1]
    assert [run["reward"] for run in trained["runs"]] == [0.0, 1.0, 0.0, 1.0]
    assert trained["runs"][1]["advantage"] == pytest.approx(0.866, abs=1e-3)
    assert trained["state"] == "trained in step 2 of trainer"
    varied = cli("groups", "--store", sample.url, "--set", "varied", "--batch", "b0", "--json").json
    assert {group["batch"] for group in varied} == {"b0"}
    assert [group["task"] for group in varied] == [0, 3, 2, 1]  # of task 0 one came late
    assert varied[1]["state"] == "rejected: zero_variance"
    assert len(cli("groups", "--store", sample.url, "--limit", 2, "--json").json) == 2
    assert "b0" in cli("groups", "--store", sample.url).out


def test_what_no_trainer_reads_is_not_ready(cli: Cli, sample: SampleRun) -> None:
    known = {
        name: {run["state"] for one in found for run in one["runs"]}
        for name in ("grpo", "varied")
        for found in [cli("groups", "--set", name, "--store", sample.url, "--json").json]
    }
    assert "ready" in known["grpo"]
    assert "annotated" in known["varied"]
    assert "ready" not in known["varied"]


def test_show_tells_where_an_experience_was_trained_or_why_not(cli: Cli, sample: SampleRun) -> None:
    (found,) = cli("show", "b0/1/2/0/", "--store", sample.url, "--json").json
    assert found["tensors"]["tokens"]["shape"] == [9]
    assert found["objects"]["response_text"] == "1 and 2"
    assert found["sets"][0]["steps"] == [
        {
            "trainer": "trainer",
            "step": 2,
            "committed": True,
            "reason": None,
            "measured": {},
            "experiment": "",
        }
    ]
    (late,) = cli("show", "b0/0/0/0/a1", "--store", sample.url, "--json").json
    assert late["refused"] == "late"
    text = cli("show", "b0/3/1/0", "--store", sample.url).out
    assert "set varied: rejected: zero_variance" in text
    assert "× mask" in text


def test_verify_ends_with_the_two_numbers(cli: Cli, own_sample_run: SampleRun) -> None:
    proof = (
        "--acknowledged",
        own_sample_run.acknowledged,
        "--checkpoint",
        own_sample_run.checkpoint,
    )
    told = cli("verify", "--store", own_sample_run.url, *proof)
    assert told.code == 0
    assert told.out.splitlines()[-2:] == ["everything holds", "lost 0, duplicated 0"]
    quick = cli("verify", "--store", own_sample_run.url, *proof, "--quick").out.splitlines()[-2]
    assert quick.startswith("what was looked at holds: a quick look opens no segment")
    last = 10  # the event that recorded b1/0/1/0/
    anyio.run(delete_event, own_sample_run.url, last)
    told = cli("verify", "--store", own_sample_run.url, *proof, "--quick")
    assert told.code == 1
    assert "lost: experience b1/0/1/0/" in told.out
    assert told.out.splitlines()[-2:] == ["FAILED", "lost 1, duplicated 0"]
    (found,) = cli("verify", "--store", own_sample_run.url, *proof, "--json").json
    assert (found["ok"], found["lost"], found["duplicated"]) == (False, 1, 0)


def test_verify_tells_files_of_another_experiment_from_lost_rows(
    cli: Cli, sample: SampleRun, tmp_path: Path
) -> None:
    lines = (f"e7-{batch}/0/0/0/\t{'ab' * 16}\t{batch:064x}\n" for batch in range(99))
    (tmp_path / "e7.ack").write_text("".join(lines))
    told = cli("verify", "--store", sample.url, "--quick", "--acknowledged", tmp_path)
    assert told.code == 1
    assert "none of their heads is in this log: they are of another experiment" in told.out
    assert "lost 99, duplicated 0" in told.out


def test_verify_claims_only_what_it_measured(cli: Cli, sample: SampleRun, tmp_path: Path) -> None:
    told = cli("verify", "--store", sample.url, "--quick")
    said = "lost, duplicated: not measured: give --acknowledged and --checkpoint"
    assert (told.code, told.out.splitlines()[-1]) == (0, said)
    told = cli("verify", "--store", sample.url, "--quick", "--acknowledged", sample.acknowledged)
    *_, last = told.out.splitlines()
    assert re.fullmatch(r"lost 0 of \d+ acknowledged, else not measured: give --checkpoint", last)
    told = cli("verify", "--store", sample.url, "--quick", "--acknowledged", tmp_path)
    assert "compared with no acknowledged uids\n" in told.out
    assert told.out.endswith(": --acknowledged holds no uids; give --checkpoint\n")
    (found,) = cli("verify", "--store", sample.url, "--quick", "--json").json
    assert (found["measured"], found["head"] in told.out) == (False, True)
    assert cli("verify", "--store", sample.url, "--head", found["head"]).code == 0
    told = cli("verify", "--store", sample.url, "--head", "0" * 64)
    assert (told.code, "no event has it" in told.out) == (1, True)


def test_a_folder_of_checkpoints_is_told_with_the_newest_of_them(
    cli: Cli, sample: SampleRun, tmp_path: Path
) -> None:
    for step in (9, 10):
        shutil.copytree(sample.checkpoint, tmp_path / f"step-{step:08}")
    told = cli("verify", "--store", sample.url, "--checkpoint", tmp_path)
    assert told.code == 2
    assert told.err.endswith(f" (did you mean {tmp_path}/step-00000010?)\n")


def test_rebuild_says_what_it_mended(cli: Cli, own_sample_run: SampleRun) -> None:
    wrong = sql("UPDATE experience SET reward = 9.0 WHERE task = '2'")
    anyio.run(unguarded, own_sample_run.url, wrong)
    assert cli("verify", "--store", own_sample_run.url).code == 1
    assert "mended: experience 4" in cli("rebuild", "--store", own_sample_run.url).out
    assert cli("rebuild", "--store", own_sample_run.url, "--json").json == [
        {"events": 27, "mended": {}}
    ]
    assert cli("verify", "--store", own_sample_run.url).code == 0


def test_migrate_says_when_there_is_nothing_to_do(cli: Cli, sample: SampleRun) -> None:
    assert "is up to date" in cli("migrate", "--store", sample.url).out
    (found,) = cli("migrate", "--store", sample.url, "--json").json
    assert found["before"] == found["after"]


def test_algorithms_are_listed(cli: Cli) -> None:
    found = cli("algorithms", "--json").json
    names = {(one["kind"], one["name"]) for one in found}
    assert {("add_strategy", "grpo"), ("policy_loss_fn", "ppo"), ("kl_fn", "k3")} <= names
    printed = cli("algorithms").out
    assert "trinity_buffer.algorithm" in printed
    # What a recipe changes is told, not what the part says of itself.
    (dapo,) = [one for one in found if one["name"] == "dapo"]
    assert dapo["arguments"]["policy_loss_fn"]["args"]["clip_range_high"] == 0.28
    assert "clip_range_high=0.28" in printed
    (ppo,) = [one for one in found if (one["kind"], one["name"]) == ("policy_loss_fn", "ppo")]
    assert ppo["arguments"]["clip_range"] == 0.2


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ("stats", "--store", "/nowhere/a.db"),
            "/nowhere/a.db: there is no store to read, nor is there its folder",
        ),
        (("show", "nonsense"), "is not a uid"),
        (("show", "b9/0/0/0/"), "holds no experience 'b9/0/0/0/'"),
        (("events", "--kind", "Nonsense"), "no event is a 'Nonsense'"),
        (("groups", "--set", "nonsense"), "no annotation set 'nonsense'"),
        (("groups", "--experiment", "nonsense"), "holds no experiment 'nonsense'"),
        (("verify", "--acknowledged", "/nowhere"), "no such file or folder"),
        (("verify", "--checkpoint", "/nowhere"), "manifests.json"),
        (("search", ""), "text is empty, and every text holds that: say what to look for"),
        (("replay", "--steps", "5:1"), "--steps 5:1: it ends before it begins: write it as A:B"),
        (("stats", "--nonsense"), "No such option"),
        (("nonsense",), "No such command"),
        (("migrate", "--store", "mysql://a/b"), "a store cannot live in"),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(
    cli: Cli, sample: SampleRun, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], said: str
) -> None:
    monkeypatch.setenv("TRINITY_BUFFER_STORE", sample.url)
    ended = cli(*args)
    assert ended.code == 2
    assert said in ended.err
    assert "Traceback" not in ended.err
    if ended.err.startswith("error: "):
        assert len(ended.err.splitlines()) == 1


def test_the_newest_store_under_runs_is_meant(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    missing = cli("stats")
    assert missing.code == 2
    assert "say --store" in missing.err
    (tmp_path / "runs").mkdir()
    for age, name in enumerate(("new", "old")):
        anyio.run(record_sample_run, f"sqlite:///runs/{name}.db", tmp_path / name)
        os.utime(tmp_path / "runs" / f"{name}.db", (1_000_000 - age, 1_000_000 - age))
    ended = cli("stats", "--json")
    assert ended.json[0]["url"] == "sqlite:///runs/new.db"
    assert ended.err == "store: runs/new.db, the newest of 2\n"
    assert cli("diff", "grpo", "varied").err.count("the newest of 2") == 1
    assert cli("doctor").out.splitlines()[0] == "store: sqlite:///runs/new.db"
    (tmp_path / "runs" / "old.db").unlink()
    assert cli("stats").err == ""


def test_one_of_several_experiments_has_to_be_named(
    cli: Cli, own_sample_run: SampleRun, tmp_path: Path
) -> None:
    anyio.run(record_sample_run, own_sample_run.url, tmp_path / "other", "other")
    ended = cli("groups", "--store", own_sample_run.url)
    assert ended.code == 2
    assert "say which with --experiment: sort, other" in ended.err
    named = cli("groups", "--store", own_sample_run.url, "--experiment", "other", "--json")
    assert len(named.json) == 5
    (found,) = cli("stats", "--store", own_sample_run.url, "--json").json
    assert [one["name"] for one in found["experiments"]] == ["sort", "other"]


@pytest.mark.parametrize(
    "command", ["stats", "events", "groups", "show", "verify", "rebuild", "migrate", "algorithms"]
)
def test_help_shows_an_example(cli: Cli, command: str) -> None:
    ended = cli(command, "--help")
    assert ended.code == 0
    assert f"Example: trinity-buffer {command}" in " ".join(ended.out.split())


def test_help_says_which_commands_print_an_object_per_line(cli: Cli) -> None:
    said = {one: " ".join(cli(one, "--help").out.split()) for one in ("groups", "search", "stats")}
    told = {one: "one object per line." in text for one, text in said.items()}
    assert told == {"groups": True, "search": True, "stats": False}


ASKING = (
    ("stats",),
    ("events", "--limit", "2"),
    ("groups",),
    ("show", "b0/1/2/0/"),
    ("verify",),
    ("rebuild",),
    ("migrate",),
    ("compact", "--keep-steps", "1000", "--delete"),
    ("restore",),
)

ASK_AND_LIST_MODULES = """
import json, sys
from trinity_buffer.cli.main import run_command
for command in json.loads(sys.argv[1]):
    sys.argv = ["trinity-buffer", *command]
    try:
        run_command()
    except SystemExit as end:
        assert not end.code, command
    loaded = [name for name in ("torch", "matplotlib", "safetensors") if name in sys.modules]
    assert not loaded, (command, loaded)
    print("asked", command[0])
"""


@pytest.mark.long
def test_who_only_asks_does_not_wait_for_torch(own_sample_run: SampleRun) -> None:
    """One process for all: what a command imports stays until the next is asked."""
    commands = json.dumps([[*args, "--store", own_sample_run.url] for args in ASKING])
    done = subprocess.run(
        [sys.executable, "-c", ASK_AND_LIST_MODULES, commands],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("asked ")]
    assert said == [args[0] for args in ASKING]


@pytest.mark.long
def test_a_process_ends_with_the_code_of_its_command_and_with_all_that_it_said(
    tmp_path: Path,
) -> None:
    def run(*args: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "trinity_buffer", *map(str, args)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    refused = run("stats", "--store", tmp_path / "nowhere.db")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.endswith("there is no store to read\n")
    told = run("algorithms", "--json")
    assert (told.returncode, told.stderr) == (0, "")
    assert len([json.loads(line) for line in told.stdout.splitlines()]) > 50


def test_ctrl_c_ends_following_without_a_word(sample: SampleRun) -> None:
    command = [sys.executable, "-m", "trinity_buffer", "events", "--follow", "--after", "26"]
    with subprocess.Popen(
        [*command, "--store", sample.url], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert "SegmentsArchived" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, "", "")
