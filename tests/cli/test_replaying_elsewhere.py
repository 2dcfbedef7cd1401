"""A replay in another environment than the run's: what is said, compared and tolerated."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from trinity_buffer import open_store
from trinity_buffer.cli import roles
from trinity_buffer.cli.main import app
from trinity_buffer.cli.run_config import resolved
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.trainer.determinism import largest_difference
from trinity_buffer.trainer.trainer import TrainerSettings

CONFIG = {
    "task": {"digits": 1},
    "model": {"width": 8, "layers": 1, "heads": 1},
    "groups_per_batch": 2,
    "groups_per_step": 2,
    "max_staleness": None,
    "evaluation": {"every_steps": 1000, "num_eval_samples": 1},
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store in which one run has trained two steps, with another torch and two threads."""
    url = f"sqlite:///{tmp_path / 'run.db'}"

    async def explored() -> None:
        async with open_store(url) as store:
            await store.experiment("run", config=asdict(resolved(CONFIG)))
        await roles.explore(
            url, "run", actor="e0", acknowledgements=None, max_batches=2, say=lambda _: None
        )
        await roles.annotate(url, "run", strategy=None, name=None, args=None, follow=False)

    anyio.run(explored)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(torch, "__version__", "2.0")
        elsewhere.setattr(roles, "use_one_thread", lambda: torch.set_num_threads(2))
        roles.train(url, "run", checkpoints=tmp_path / "c", follow=False, say=lambda _: None)
    torch.set_num_threads(1)
    return url


@pytest.fixture
def _other_bits(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the run, let steps come out a little otherwise, as those of another library do."""
    del run
    rate_at = TrainerSettings.rate_at
    monkeypatch.setattr(TrainerSettings, "rate_at", lambda self, step: rate_at(self, step) * 1.001)


def replayed(url: str, *words: str) -> Result:
    return CliRunner().invoke(app, ["replay", "--store", url, *words], catch_exceptions=False)


def report(url: str, *words: str) -> tuple[int, dict[str, Any]]:
    done = replayed(url, *words, "--json")
    return done.exit_code, json.loads(done.stdout)


@pytest.mark.long
def test_it_restores_the_threads_and_says_what_differs_before_the_first_step(
    run: str, caplog: pytest.LogCaptureFixture
) -> None:
    code, told = report(run)
    assert (code, told["identical"]) == (0, True)
    assert told["differences"] == {"torch": ["2.0", torch.__version__]}
    (said,) = caplog.messages
    assert said.startswith(f"step 1 was trained with torch 2.0 (here {torch.__version__}): do not")
    assert torch.get_num_threads() == 1


@pytest.mark.long
@pytest.mark.usefixtures("_other_bits")
def test_without_a_tolerance_bits_are_compared_and_the_largest_difference_is_told(run: str) -> None:
    done = replayed(run)
    *_, last = done.stdout.splitlines()
    assert (done.exit_code, "weights DIFFERENT" in done.stdout) == (1, True)
    assert last.startswith("largest relative difference ")
    assert ", in " in last
    code, told = report(run)
    assert (code, told["identical"], told["within"]) == (1, False, None)
    assert 0 < told["largest_difference"] < 0.01
    assert told["tensor"]


@pytest.mark.long
@pytest.mark.usefixtures("_other_bits")
@pytest.mark.parametrize(("tolerance", "code"), [("0.01", 0), ("1e-9", 1)])
def test_a_tolerance_decides_and_its_last_line_says_so(run: str, tolerance: str, code: int) -> None:
    done = replayed(run, "--tolerance", tolerance)
    *_, last = done.stdout.splitlines()
    verdict = "within 0.01" if code == 0 else "above 1e-09"
    assert (done.exit_code, last.endswith(f": {verdict}")) == (code, True), last
    found, told = report(run, "--tolerance", tolerance)
    assert (found, told["identical"], told["within"]) == (code, False, code == 0)


def test_the_same_bits_are_within_any_tolerance(run: str) -> None:
    code, told = report(run, "--tolerance", "0")
    assert (code, told["identical"], told["within"]) == (0, True, True)
    assert told["largest_difference"] == 0


def test_what_replays_otherwise_is_compared_where_a_tolerance_is_given(run: str) -> None:
    changed = ("--set", "optimizer.learning_rate=0.5")
    code, told = report(run, *changed)
    assert (code, told["identical"], told["tensor"]) == (0, None, None)
    code, told = report(run, *changed, "--tolerance", "1e-3")
    assert (code, told["identical"], told["within"]) == (1, None, False)


@pytest.mark.usefixtures("_other_bits")
def test_without_recorded_weights_on_the_disk_it_says_so(run: str, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "c")
    done = replayed(run, "--tolerance", "0.01")
    *_, last = done.stdout.splitlines()
    assert done.exit_code == 1
    assert last.startswith("largest relative difference unknown: the recorded weights are not on")


@pytest.mark.long
def test_what_replays_otherwise_and_cannot_be_compared_is_within_no_tolerance(
    run: str, tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / "c")
    changed = ("--set", "optimizer.learning_rate=0.5", "--tolerance", "0.01")
    code, told = report(run, *changed)
    assert (code, told["identical"], told["within"]) == (1, None, None)
    assert report(run, "--tolerance", "0.01")[0] == 0  # the bits are the same


def test_a_tolerance_is_a_number(run: str) -> None:
    with pytest.raises(InvalidArgumentError, match="--tolerance nan: give a number"):
        replayed(run, "--tolerance", "nan")


def test_a_tensor_that_one_side_lacks_or_that_is_no_number_is_infinitely_far(
    tmp_path: Path,
) -> None:
    eight = torch.float8_e4m3fn
    one = {
        "8": torch.ones(2).to(eight),
        "a": torch.ones(2),
        "b": torch.zeros(2),
        "e": torch.zeros(0),
    }
    for name, other, apart in (
        ("same", one, (0.0, "8")),
        ("lacks", {n: one[n] for n in "8ae"}, (torch.inf, "b")),
        ("shape", one | {"a": torch.ones(3)}, (torch.inf, "a")),
        ("nan", one | {"a": torch.tensor([1, torch.nan])}, (torch.inf, "a")),
        ("8 bits", one | {"8": torch.tensor([1, 2]).to(eight)}, (1.0, "8")),
        ("half", one | {"a": torch.tensor([1, 1.5])}, (0.5, "a")),
    ):
        for file, tensors in ((tmp_path / "then", one), (tmp_path / name, other)):
            file.mkdir(exist_ok=True)
            save_file(tensors, file / "model.safetensors")
        assert largest_difference(tmp_path / "then", tmp_path / name) == apart


@pytest.mark.parametrize(("asked", "threads"), [("2", 2), (None, 1)])
def test_as_many_threads_compute_as_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, threads: int
) -> None:
    """Torch takes the number when it starts; without one, processes of a run share the cores."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    torch.set_num_threads(2)
    try:
        roles.use_one_thread()
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(1)
