"""A tracker is given each committed step once, in order, beside the run or after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import anyio
import pytest
from typing_extensions import override

from tests.handles import Experiment, Store
from tests.sample_run import SampleRun, record_sample_run, rollout
from trinity_buffer import inspector, open_store, run_strategy
from trinity_buffer.errors import InvalidArgumentError, UnknownNameError
from trinity_buffer.inspector import tracking
from trinity_buffer.inspector.source import now
from trinity_buffer.inspector.tracking import Tracker, numbers_of, track
from trinity_buffer.integrations.trackers import tracker_of


class Kept(Tracker):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, dict[str, float]]] = []
        self._more = anyio.Event()

    @override
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.steps.append((step, dict(metrics)))
        self._more.set()
        self._more = anyio.Event()

    @override
    def close(self) -> None:
        raise AssertionError("who made it closes it")

    async def given(self, count: int) -> None:
        """Return once it has been given so many steps."""
        with anyio.fail_after(60):
            while len(self.steps) < count:
                await self._more.wait()

    @property
    def numbers(self) -> list[int]:
        return [step for step, _ in self.steps]


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> SampleRun:
    """A store that no test changes."""
    folder = tmp_path_factory.mktemp("sample")
    return anyio.run(record_sample_run, f"sqlite:///{folder / 'store.db'}", folder / "run")


@pytest.mark.parametrize("page", [1, 256])
async def test_every_committed_step_is_given_once(
    sample: SampleRun, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "PAGE_STEPS", page)
    kept = Kept()
    async with open_store(sample.url, read_only=True) as store:
        experiment = await store.experiment(sample.name)
        assert await track(experiment, kept) == 2  # the third was handed out, not committed
        lines = await inspector.steps(now(experiment), after=0)
        assert kept.numbers == [1, 2]
        assert [metrics["batch/reward"] for _, metrics in kept.steps] == [
            line.reward for line in lines[:2]
        ]
        assert [metrics["batch/rows"] for _, metrics in kept.steps] == [
            line.rows for line in lines[:2]
        ]
        assert await track(experiment, kept, after=1) == 2
        assert kept.numbers == [1, 2, 2]
        with pytest.raises(InvalidArgumentError, match="after=-1"):
            await track(experiment, kept, after=-1)
        with pytest.raises(UnknownNameError, match="no trainer 'nobody'"):
            await track(experiment, kept, trainer="nobody")


async def test_of_two_trainers_the_one_that_is_named_is_tracked(tmp_path: Path) -> None:
    async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        experiment = await annotated(store)
        await train(experiment, 3)
        await train(experiment, 1, consumer="second")
        for name, steps in (("trainer", [1, 2, 3]), ("second", [1]), (None, [1, 2, 3])):
            kept = Kept()
            assert await track(experiment, kept, trainer=name) == steps[-1]
            assert kept.numbers == steps


async def test_what_is_no_finite_number_is_left_out(sample: SampleRun) -> None:
    async with open_store(sample.url, read_only=True) as store:
        (line, *_) = await inspector.steps(now(await store.experiment(sample.name)))
    measured = {"loss": 0.5, "broken": float("nan"), "skipped": "non_finite", "batch/rows": -1}
    numbers = numbers_of(replace(line, metrics=measured))
    assert numbers == {
        "loss": 0.5,
        "batch/reward": line.reward,
        "batch/staleness": line.staleness,
        "batch/oldest": line.oldest,
        "batch/rows": line.rows,  # what the log knows, nobody else says
        "batch/groups": line.groups,
        "batch/tokens": line.tokens,
        "batch/trained_tokens": line.trained_tokens,
        "batch/seconds": line.seconds,
    }


async def test_a_rewound_trainer_is_followed_through_its_steps_anew(tmp_path: Path) -> None:
    url, kept = f"sqlite:///{tmp_path / 'store.db'}", Kept()
    async with open_store(url) as store, anyio.create_task_group() as tasks:
        experiment = await annotated(store)
        await train(experiment, 2)
        tasks.start_soon(partial(track, experiment, kept, follow=True))
        await kept.given(2)
        await train(experiment, 3, resume_from=0)
        await kept.given(5)
        await experiment.finish("done")
    assert kept.numbers == [1, 2, 1, 2, 3]
    assert [metrics["loss"] for _, metrics in kept.steps] == [1.0, 2.0, 1.0, 2.0, 3.0]


class Slow(Kept):
    """While it takes the first step, another thread trains on, and rewinds."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url

    @override
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if not self.steps:
            thread = Thread(target=anyio.run, args=(self._go_on,))
            thread.start()
            thread.join()
        super().log(metrics, step)

    async def _go_on(self) -> None:
        async with open_store(self._url) as store:
            experiment = await store.experiment("sort")
            await train(experiment, 2)
            await train(experiment, 3, resume_from=0)
            await experiment.finish("done")


async def test_who_lags_behind_a_rewind_is_given_each_step_of_either_line_once(
    tmp_path: Path,
) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    kept = Slow(url)
    async with open_store(url) as store:
        experiment = await annotated(store)
        await train(experiment, 1)
        assert await track(experiment, kept, follow=True) == 3
    assert kept.numbers == [1, 1, 2, 3]


async def annotated(store: Store) -> Experiment:
    """Return an experiment of three groups."""
    experiment = await store.experiment("sort", config={"rollouts_per_group": 2, "model": {}})
    writer = experiment.writer("e0")
    await writer.plan("b0", [0, 1, 2], 2)
    await writer.write([rollout("b0", task, run, run) for task in range(3) for run in (0, 1)])
    await run_strategy(experiment, "grpo")
    return experiment


@pytest.mark.parametrize(
    ("trainer", "named"), [(None, "a trainer"), ("trainer", "trainer 'trainer'")]
)
async def test_a_follower_may_begin_before_the_trainer(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    trainer: str | None,
    named: str,
) -> None:
    said = (
        f"track waits for {named} in 'sort', where there is none: start it "
        "(`trinity-buffer train`), or name another one"
    )
    monkeypatch.setenv("TRINITY_BUFFER_WAIT_REPORT_S", "0.01")
    kept = Kept()
    async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        experiment = await store.experiment("sort", config={"rollouts_per_group": 2, "model": {}})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(track, experiment, kept, trainer=trainer, follow=True))
            with anyio.fail_after(60):
                while "track waits for" not in caplog.text:
                    await anyio.sleep(0.001)
            assert said in caplog.messages
            await annotated(store)
            await train(experiment, 2)
            await kept.given(2)
            await experiment.finish("done")
        assert kept.numbers == [1, 2]
        with pytest.raises(UnknownNameError, match="no trainer 'nobody'"):
            await track(experiment, kept, trainer="nobody", follow=True)


async def train(experiment: Experiment, steps: int, **given: Any) -> None:
    options = {"strategy": "grpo", "groups_per_step": 1} | given
    async with experiment.train_stream(**options) as stream:
        async for step in stream:
            await stream.commit(step, metrics={"loss": float(step.step)})
            if step.step == steps:
                return


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("tensorbord:runs/tb", "did you mean 'tensorboard'"),
        ("trackio", "give name:place"),
        ("tensorboard:runs/tb", "pip install 'trinity-buffer[tensorboard]'"),
    ],
)
def test_a_target_that_is_none_is_refused(target: str, said: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        tracker_of(target)
    assert said in str(refused.value)
