"""Train again, annotate again, let go: the commands that use what was recorded."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import anyio
import pytest
from typer.testing import CliRunner

from trinity_buffer import open_store
from trinity_buffer.cli import roles
from trinity_buffer.cli.main import app
from trinity_buffer.cli.run_config import resolved
from trinity_buffer.errors import TrinityBufferError

CONFIG = {
    "task": {"digits": 1},
    "model": {"width": 8, "layers": 1, "heads": 1},
    "groups_per_batch": 2,
    "rollouts_per_group": 8,
    "groups_per_step": 2,
    "max_staleness": None,
    "evaluation": {"every_steps": 1000, "num_eval_samples": 1},
}


@pytest.fixture
def run(tmp_path: Path) -> str:
    """A store in which one run has explored four batches and trained four steps."""
    url = f"sqlite:///{tmp_path / 'run.db'}"

    async def explored() -> None:
        async with open_store(url) as store:
            await store.experiment("run", config=asdict(resolved(CONFIG)))
        await roles.explore(
            url, "run", actor="e0", acknowledgements=None, max_batches=4, say=lambda _: None
        )
        await roles.annotate(url, "run", strategy=None, name=None, args=None, follow=False)

    anyio.run(explored)
    checkpoints = tmp_path / "checkpoints"
    roles.train(
        url, "run", checkpoints=checkpoints, follow=False, resume_from=None, say=lambda _: None
    )
    return url


def command(*words: str) -> tuple[int, Any, str]:
    """Return exit code, parsed output and, if it failed, the sentence that says why."""
    done = CliRunner().invoke(app, [*words, "--json"])
    if isinstance(done.exception, TrinityBufferError):  # `main` makes a sentence and a 2 of it
        return 2, None, str(done.exception)
    return done.exit_code, json.loads(done.stdout), ""


def test_a_replay_gives_the_same_weights_and_another_rate_gives_others(run: str) -> None:
    code, same, _ = command("replay", "--store", run)
    assert (code, same["identical"], same["first"], same["last"]) == (0, True, 1, 4)
    assert same["digest"] == same["recorded"]

    code, other, _ = command("replay", "--store", run, "--set", "optimizer.learning_rate=0.01")
    assert (code, other["identical"]) == (0, None)
    assert other["digest"] != same["digest"]


def test_a_replay_from_a_checkpoint_begins_after_it(run: str, tmp_path: Path) -> None:
    third = sorted((tmp_path / "checkpoints").glob("step-*"))[-2]
    code, tail, _ = command("replay", "--store", run, "--from-checkpoint", str(third))
    assert (code, tail["identical"], tail["first"], tail["last"]) == (0, True, 4, 4)

    code, _, said = command("replay", "--store", run, "--steps", "3:4")
    assert code == 2
    assert "--from-checkpoint" in said


def test_training_goes_on_without_rows_that_were_deleted_if_it_is_told_to(
    run: str, tmp_path: Path
) -> None:
    assert command("compact", "--store", run, "--keep-steps", "0", "--delete")[0] == 0
    words = ["train", "--store", run, "--checkpoints", str(tmp_path / "checkpoints")]
    refused = CliRunner().invoke(app, [*words, "--resume-from", "3"])
    assert "step 4 of trainer 'trainer'" in str(refused.exception)
    assert "--drop-damaged-rows" in str(refused.exception)
    done = CliRunner().invoke(app, [*words, "--drop-damaged-rows"])
    assert done.exit_code == 0, done.exception
    assert "step 4: loss 0.0000, reward -, staleness -, 0 rows" in done.stdout
    last = str(max((tmp_path / "checkpoints").glob("step-*")))
    assert command("verify", "--store", run, "--checkpoint", last)[0] == 0


@pytest.mark.parametrize("words", [("3",), ("1", "--set", "max_steps=4")])
def test_a_restart_by_torchrun_goes_on_from_the_last_commit(
    words: Sequence[str], run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rewind was asked for when the ranks were started first; the step may be gone since."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    asked = ["train", "--store", run, "--checkpoints", str(tmp_path / "checkpoints")]
    done = CliRunner().invoke(app, [*asked, "--resume-from", *words])
    assert done.exit_code == 0, done.exception
    assert f"--resume-from {words[0]} is not repeated" in done.stdout
    assert "resumes after step 4" in done.stdout


def test_training_goes_on_without_a_row_that_it_is_told_to_drop(run: str, tmp_path: Path) -> None:
    _, fourth, _ = command("blame", "4", "--store", run)
    uid = fourth["rows"][0]["uid"]
    words = ["train", "--store", run, "--checkpoints", str(tmp_path / "checkpoints")]
    refused = CliRunner().invoke(app, [*words, "--drop", uid])
    assert "was trained in step 4" in str(refused.exception)
    refused = CliRunner().invoke(app, [*words, "--drop", "e9-0/0/0/0/"])
    assert "no row e9-0/0/0/0/" in str(refused.exception)
    done = CliRunner().invoke(app, [*words, "--resume-from", "3", "--drop", uid])
    assert done.exit_code == 0, done.exception
    _, again, _ = command("blame", "4", "--store", run)
    assert [row["uid"] for row in again["rows"]] == [row["uid"] for row in fourth["rows"][1:]]
    last = str(max((tmp_path / "checkpoints").glob("step-*")))
    assert command("verify", "--store", run, "--checkpoint", last)[0] == 0


def test_a_second_set_stands_beside_the_first_and_old_tensors_leave(
    run: str, tmp_path: Path
) -> None:
    words = ("--store", run, "--strategy", "opmd", "--set", "tau=2.0", "--name", "opmd-2")
    code, added, _ = command("reannotate", *words)
    assert (code, added["annotated"], added["set"]) == (0, 64, "opmd-2")
    code, _, said = command("reannotate", *words[:4], "--name", "grpo")
    assert code == 2
    assert "name=" in said

    archive = str(tmp_path / "archive")
    code, gone, _ = command("compact", "--store", run, "--keep-steps", "1", "--archive", archive)
    assert (code, gone["segments"]) == (0, 3)
    code, same, _ = command("replay", "--store", run)
    assert (code, same["identical"]) == (0, True), "an archive is read as the store is"
    back = CliRunner().invoke(app, ["restore", "--store", run])
    assert re.search(r"^3 segments \(.* MB\) are in the store again$", back.stdout, re.MULTILINE)
    again = ["compact", "--store", run, "--keep-steps", "1", "--archive", archive]
    moved = CliRunner().invoke(app, again)
    assert re.search(r"^3 segments \(.* MB\) left the store to 1 file$", moved.stdout, re.MULTILINE)
    nothing = CliRunner().invoke(app, ["compact", *again[1:3], "--keep-steps", "9", *again[5:]])
    assert nothing.stdout.startswith("0 segments (0.0 MB) left the store; ")
    assert "committed more than 9 steps ago by each trainer" in nothing.stdout.replace("\n", " ")
    assert command("verify", "--store", run)[0] == 0
    for file in Path(archive).iterdir():
        file.unlink()
    code, _, said = command("replay", "--store", run)
    assert code == 2
    assert "put it back" in said
