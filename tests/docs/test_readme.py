"""The examples of the README run as they are printed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.crash.forking import fork_children
from tests.doors.workshop import call
from trinity_buffer.demo.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
EXAMPLE, OWN = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
ASKED = re.findall(
    r"`trinity-buffer ([^`]*)`", "".join(re.findall(r"\n\| wh.*|\n\| did.*", README))
)


@pytest.mark.long
def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXAMPLE], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^(\d+) tensor", done.stdout, re.MULTILINE) == ["1", "2"]
    # Rewards 0, 1, 0, 1: mean 1/2, deviation 0.577; on the two response tokens of each row.
    assert done.stdout.count("0.8660,  0.8660]") == 4
    assert done.stdout.count("-0.8660, -0.8660]") == 4


def test_every_page_is_listed_and_every_link_leads_somewhere() -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        index = (page.parent / "index.md").read_text()
        assert page.name == "index.md" or f"({page.name})" in index, f"{page.name} is not listed"
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link} leads nowhere"


def started(folder: Path, role: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "own.py", role]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)


def killed_after(process: subprocess.Popen[str], lines: int) -> list[str]:
    """Kill -9 a process that has printed so many lines; return those."""
    assert process.stdout is not None
    said = [process.stdout.readline() for _ in range(lines)]
    process.kill()
    process.communicate()
    return said


def ended(process: subprocess.Popen[str]) -> list[str]:
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return said.splitlines()


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(at.relative_to(folder)): at.read_bytes() for at in folder.rglob("*.*")}


@pytest.mark.long
def test_the_program_is_killed_goes_on_and_replays_to_the_same_bits(tmp_path: Path) -> None:
    """Explorer and trainer die twice each; three epochs, to save time."""
    assert OWN.count(chr(10)) <= 60
    make_tiny_model(tmp_path / "own" / "model")
    (tmp_path / "own.py").write_text(OWN.replace('"epochs": 10', '"epochs": 3'))
    explorer = started(tmp_path, "explore")
    assert explorer.stdout is not None
    explorer.stdout.readline()
    trained = killed_after(started(tmp_path, "train"), 3)
    killed_after(explorer, 1)
    explorer = started(tmp_path, "explore")
    trained += killed_after(started(tmp_path, "train"), 4)
    killed_after(explorer, 1)
    explorer = started(tmp_path, "explore")
    trained += ended(started(tmp_path, "train"))
    ended(explorer)
    steps = [int(step) for step in re.findall(r"step (\d+)", "".join(trained))]
    assert sorted(set(steps)) == list(range(1, 25))
    assert len(ended(started(tmp_path, "replay"))) == 24
    assert files_of(tmp_path / "checkpoints") == files_of(tmp_path / "replayed")


SMALL_DEMO = (
    "--set max_steps=41 --set evaluation.target_accuracy=null --set evaluation.num_eval_samples=8 "
    "--set groups_per_step=4 --set groups_per_batch=1 --set rollouts_per_group=4 "
    "--set model.width=8 --set model.layers=1 --set model.heads=1"
)
"""As many steps and events as the questions speak of, in a few seconds."""


@pytest.mark.long
def test_the_questions_are_answered_by_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRINITY_BUFFER_STORE", raising=False)
    fork_children(monkeypatch)

    def told(command: str) -> str:
        code, said = call(f"trinity-buffer {command}")
        assert code == 0, said
        return said

    told(f"demo {SMALL_DEMO}")
    answers = {}
    uid = json.loads(told("groups --limit 1 --json"))["runs"][0]["uid"]
    for command in ASKED:
        answers[command.split()[0]] = told(command.replace("UID", uid))
    assert list(answers) == [
        *("blame", "groups", "why", "staleness", "reannotate", "diff", "doctor", "stats")
    ]
    assert answers["blame"].startswith("step 40 of trainer")
    assert "ratio_mean" in answers["blame"]  # not loss_share: rewards may be equal by chance
    assert uid in answers["groups"]
    assert f"{uid}" in answers["why"]
    assert re.search(r"^ +40  committed +e[01] ", answers["staleness"], re.MULTILINE)
    assert answers["diff"].startswith("grpo / opmd")
    assert "no difference" not in answers["diff"]
    assert "nothing is stuck" in answers["doctor"]
    assert re.search("^events +500,", answers["stats"], re.MULTILINE)
