"""Each tool runs as its docstring says, on a small store, and leaves it as it was."""

from __future__ import annotations

import hashlib
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import anyio
import pytest

from tests.stories import Story, tell

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("story")
    return anyio.run(tell, f"sqlite:///{folder / 'store.db'}", folder / "run")


class Ended(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Ended]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a tool as a file, in this process, which has imported everything already."""

    def as_file(tool: str, *args: object) -> Ended:
        monkeypatch.setattr(sys, "argv", [tool, *map(str, args)])
        code: object = 0
        try:
            runpy.run_path(str(TOOLS / tool), run_name="__main__")
        except SystemExit as end:  # with a text: Python prints it, and ends with 1
            code = end.code
        said = capsys.readouterr()
        if isinstance(code, str):
            return Ended(1, said.out, said.err + code)
        return Ended(int(str(code or 0)), said.out, said.err)

    return as_file


def digest_of(story: Story) -> str:
    return hashlib.sha256(Path(story.url.removeprefix("sqlite:///")).read_bytes()).hexdigest()


def test_inspect_store_says_what_is_in_here(run: Run, story: Story) -> None:
    before = digest_of(story)
    done = run("inspect_store.py", story.url, "--rollouts", 2)
    assert done.returncode == 0, done.stderr
    assert "experiment sort" in done.stdout
    assert "6 ExperiencesRecorded" in done.stdout
    rollouts = [line for line in done.stdout.splitlines() if "reward" in line and "b0/" in line]
    assert len(rollouts) == 2
    assert digest_of(story) == before


def test_plot_run_draws_the_three_curves(run: Run, story: Story, tmp_path: Path) -> None:
    picture = tmp_path / "run.png"
    done = run("plot_run.py", story.url, picture)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3 steps, last reward 0.500")
    assert picture.read_bytes().startswith(b"\x89PNG")
    nobody = run("plot_run.py", story.url, picture, "--trainer", "nobody")
    assert nobody.returncode == 1
    assert "no gradient step of 'nobody'" in nobody.stderr


def test_replay_run_gives_the_recorded_batches_to_another_loss(run: Run, story: Story) -> None:
    before = digest_of(story)
    done = run("replay_run.py", story.url, "--experiment", "sort")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[:4] for line in lines] == [
        ["step", "1", "4", "rows"],
        ["step", "2", "4", "rows"],
    ]
    digests = [line.split()[-1] for line in lines]
    assert digests == [digest.hex()[:12] for digest in story.manifests]
    assert digest_of(story) == before


def test_what_is_stuck_names_the_group_that_lacks_runs(run: Run, story: Story) -> None:
    done = run("what_is_stuck.py", story.url)
    assert "b1/0: waiting; 3 missing" in done.stdout
    assert "step 3: 4 rows handed out, not committed" in done.stdout


def test_worst_rollouts_begin_with_the_lowest_advantage(run: Run, story: Story) -> None:
    lines = run("worst_rollouts.py", story.url, 2, "--rollouts", 2).stdout.splitlines()
    assert lines[0].startswith("b0/1/0/0/  advantage -0.866")
    assert lines[1] == "  '1 and 0'"


def test_another_reward_and_another_strategy_stand_beside_the_first(
    run: Run, tmp_path: Path
) -> None:
    own = anyio.run(tell, f"sqlite:///{tmp_path / 'store.db'}", tmp_path / "run")
    done = run("rescore.py", own.url)
    assert "17 rollouts scored\n16 annotated" in done.stdout
    done = run("compare_strategies.py", own.url, "grpo", "opmd")
    assert "16 with an advantage in both sets" in done.stdout


def test_a_group_becomes_a_test_that_passes(run: Run, story: Story, tmp_path: Path) -> None:
    case = tmp_path / "test_group.py"
    assert "as it was recorded" in run("group_as_test.py", story.url, "--output", case).stdout
    runpy.run_path(str(case))["test_grpo_gives_this_group_the_advantages_that_were_recorded"]()
