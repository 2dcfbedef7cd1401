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

import trinity_buffer as tb
from tests.sample_run import SampleRun, record_sample_run, rollout
from tests.trainer.test_mixing import MIXED, filled

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> SampleRun:
    folder = tmp_path_factory.mktemp("sample")
    return anyio.run(record_sample_run, f"sqlite:///{folder / 'store.db'}", folder / "run")


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


def digest_of(sample: SampleRun) -> str:
    return hashlib.sha256(Path(sample.url.removeprefix("sqlite:///")).read_bytes()).hexdigest()


def test_inspect_store_says_what_is_in_here(run: Run, sample: SampleRun) -> None:
    before = digest_of(sample)
    done = run("inspect_store.py", sample.url, "--rollouts", 2)
    assert done.returncode == 0, done.stderr
    assert "experiment sort" in done.stdout
    assert "6 ExperiencesRecorded" in done.stdout
    rollouts = [line for line in done.stdout.splitlines() if "reward" in line and "b0/" in line]
    assert len(rollouts) == 2
    assert digest_of(sample) == before


def test_plot_run_draws_the_three_curves(run: Run, sample: SampleRun, tmp_path: Path) -> None:
    picture = tmp_path / "run.png"
    done = run("plot_run.py", sample.url, picture)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3 steps, last reward 0.500")
    assert picture.read_bytes().startswith(b"\x89PNG")
    nobody = run("plot_run.py", sample.url, picture, "--trainer", "nobody")
    assert nobody.returncode == 1
    assert "no gradient step of 'nobody'" in nobody.stderr


def test_replay_run_gives_the_recorded_batches_to_another_loss(run: Run, sample: SampleRun) -> None:
    before = digest_of(sample)
    done = run("replay_run.py", sample.url, "--experiment", "sort")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[:4] for line in lines] == [
        ["step", "1", "4", "rows"],
        ["step", "2", "4", "rows"],
    ]
    digests = [line.split()[-1] for line in lines]
    assert digests == [digest.hex()[:12] for digest in sample.manifests]
    assert digest_of(sample) == before


def test_what_is_stuck_names_the_group_that_lacks_runs(run: Run, sample: SampleRun) -> None:
    done = run("what_is_stuck.py", sample.url)
    assert "b1/0: waiting; 3 missing" in done.stdout
    assert "step 3: 4 rows handed out, not committed" in done.stdout


def test_worst_rollouts_begin_with_the_lowest_advantage(run: Run, sample: SampleRun) -> None:
    lines = run("worst_rollouts.py", sample.url, 2, "--rollouts", 2).stdout.splitlines()
    assert lines[0].startswith("b0/1/0/0/  advantage -0.866")
    assert lines[1] == "  '1 and 0'"


def test_another_reward_and_another_strategy_stand_beside_the_first(
    run: Run, tmp_path: Path
) -> None:
    own = anyio.run(record_sample_run, f"sqlite:///{tmp_path / 'store.db'}", tmp_path / "run")
    done = run("rescore.py", own.url)
    assert "17 rollouts scored\n16 annotated" in done.stdout
    done = run("compare_strategies.py", own.url, "grpo", "opmd")
    assert "16 with an advantage in both sets" in done.stdout


def test_a_group_becomes_a_test_that_passes(run: Run, sample: SampleRun, tmp_path: Path) -> None:
    case = tmp_path / "test_group.py"
    assert "as it was recorded" in run("group_as_test.py", sample.url, "--output", case).stdout
    runpy.run_path(str(case))["test_this_group_gets_the_advantages_that_were_recorded"](tmp_path)


def test_a_group_becomes_a_test_of_the_strategy_that_annotated_it(run: Run, tmp_path: Path) -> None:
    async def told(url: str) -> None:
        async with tb.open_store(url) as store:
            experiment = await store.experiment("run", config={"rollouts_per_group": 2})
            await experiment.writer("e").write([rollout("b", 0, n, float(n)) for n in range(2)])
            await tb.run_strategy(experiment, "opmd", {"opmd_baseline": "logavgexp", "tau": 2.0})

    anyio.run(told, f"sqlite:///{tmp_path / 'opmd.db'}")
    case = tmp_path / "test_group.py"
    assert run("group_as_test.py", tmp_path / "opmd.db", "--output", case).returncode == 0
    assert "['opmd']" in case.read_text()
    runpy.run_path(str(case))["test_this_group_gets_the_advantages_that_were_recorded"](tmp_path)


def test_a_mixed_run_is_drawn_by_its_own_rows(run: Run, tmp_path: Path) -> None:
    async def mixed(url: str) -> None:
        async with tb.open_store(url) as store:
            experiment = await filled(store)
            async with experiment.train_stream(**MIXED) as stream:
                await stream.commit(await anext(stream))

    anyio.run(mixed, f"sqlite:///{tmp_path / 'mixed.db'}")
    done = run("plot_run.py", tmp_path / "mixed.db", tmp_path / "p.png", "--experiment", "run")
    assert "steps, last reward" in done.stdout, done.stderr


TOOLS_OF_A_STORE: dict[str, list[object]] = {
    "compare_strategies.py": ["grpo", "opmd"],
    "group_as_test.py": [],
    "inspect_store.py": [],
    "plot_run.py": ["p.png"],
    "replay_run.py": ["--experiment", "nobody"],
    "rescore.py": [],
    "what_is_stuck.py": [],
    "worst_rollouts.py": [1],
}
OF_NO_EXPERIMENT = TOOLS_OF_A_STORE.keys() - {"inspect_store.py", "what_is_stuck.py"}


@pytest.mark.parametrize("tool", TOOLS_OF_A_STORE)
def test_a_tool_says_that_there_is_no_store(run: Run, tmp_path: Path, tool: str) -> None:
    done = run(tool, tmp_path / "none.db", *TOOLS_OF_A_STORE[tool])
    assert done.returncode == 1
    assert "no store" in done.stderr
    assert not (tmp_path / "none.db").exists()


@pytest.mark.parametrize("tool", sorted(OF_NO_EXPERIMENT))
def test_a_tool_says_that_there_is_no_experiment(run: Run, tmp_path: Path, tool: str) -> None:
    anyio.run(_made, f"sqlite:///{tmp_path / 'empty.db'}")
    done = run(tool, tmp_path / "empty.db", *TOOLS_OF_A_STORE[tool])
    assert done.returncode == 1
    assert "no experiment" in done.stderr


@pytest.mark.parametrize(
    ("tool", "says"),
    [
        ("group_as_test.py", "no group of 'run' in"),
        ("plot_run.py", "no gradient step of 'trainer'"),
        ("replay_run.py", "no experiment 'nobody'"),
        ("worst_rollouts.py", "no trainer in 'run'"),
    ],
)
def test_a_tool_says_what_an_untrained_experiment_lacks(
    run: Run, tmp_path: Path, tool: str, says: str
) -> None:
    anyio.run(_made, f"sqlite:///{tmp_path / 'young.db'}", "run")
    done = run(tool, tmp_path / "young.db", *TOOLS_OF_A_STORE[tool])
    assert done.returncode == 1
    assert says in done.stderr


async def _made(url: str, *names: str) -> None:
    async with tb.open_store(url) as store:
        for name in names:
            await store.experiment(name, config={})
