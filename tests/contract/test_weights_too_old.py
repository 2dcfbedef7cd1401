"""A plan for weights that no wait makes young enough."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import pytest

from tests.contract.making import group, kinds, opened
from tests.handles import Experiment
from tests.whole_stores import recorded_end
from trinity_buffer import run_strategy
from trinity_buffer.errors import InvalidArgumentError, StoreUnavailableError
from trinity_buffer.explorer.explore import Weights
from trinity_buffer.store import trainer_queries, writer_queries


@pytest.mark.parametrize(("own", "behind"), [(5, 2), (0, 7)])
async def test_weights_that_can_never_be_admitted_are_refused(
    store_url: str, own: int, behind: int
) -> None:
    async with opened(store_url, max_staleness=1) as experiment:
        await experiment.publish_policy(7, "weights-7")
        writer = experiment.writer("e0")
        with pytest.raises(
            InvalidArgumentError, match=rf"policy_version={own} is {behind} behind .* version 7 "
        ):
            await writer.plan("b", [0], 1, policy_version=own)
        assert "BatchPlanned" not in await kinds(experiment)
        assert await writer.plan("b", [0], 1, policy_version=6)


async def test_weights_that_grow_too_old_while_they_wait_are_refused(store_url: str) -> None:
    async with opened(store_url, max_staleness=0) as experiment, opened(store_url) as other:
        await experiment.writer("e0").plan("b", [0], 1, policy_version=0)
        with anyio.move_on_after(1) as waited:  # for a commit: these weights are young enough
            await experiment.writer("e0").plan("c", [0], 1, policy_version=0)
        assert waited.cancelled_caught
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(other.publish_policy, 1, "weights-1")
            with pytest.raises(InvalidArgumentError, match="load the weights of version 1"):
                await experiment.writer("e0").plan("c", [0], 1, policy_version=0)


@pytest.mark.parametrize(
    ("bound", "own", "said"),
    [
        (None, 0, "has committed step 2, and the newest published weights are those of version 0:"),
        (2, 0, "step 3, .* of version 0, so that max_staleness=2 cannot hold: commit(step, "),
        (2, None, "step 3, .* of version 0, so that max_staleness=2 cannot hold: commit(step, "),
        (None, None, ""),  # who generates with what is not known
    ],
)
async def test_an_explorer_says_once_that_steps_are_committed_and_no_weights_come(
    store_url: str, caplog: pytest.LogCaptureFixture, bound: int | None, own: int | None, said: str
) -> None:
    async with opened(store_url, max_staleness=bound, rollouts_per_group=4) as experiment:
        writer, spoken = experiment.writer("e0"), list[str]()
        for step in range(5):
            await writer.plan(f"b{step}", [0], 4, policy_version=own)
            spoken = [line for line in caplog.messages if "published weights" in line]
            due = said and step > max(bound or 0, 1)
            assert len(spoken) == bool(due), step
            await writer.write(group(batch=f"b{step}"))
            await run_strategy(experiment, "grpo")
            async with experiment.train_stream(strategy="grpo", groups_per_step=1) as stream:
                await stream.commit(await anext(stream))
    assert all(re.search(said.replace("(", r"\("), line) for line in spoken)


async def test_published_weights_need_no_word(
    store_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(store_url, max_staleness=1, rollouts_per_group=4) as experiment:
        writer = experiment.writer("e0")
        for step in range(4):
            await writer.plan(f"b{step}", [0], 4, policy_version=step)
            await writer.write(group(batch=f"b{step}"))
            await run_strategy(experiment, "grpo")
            async with experiment.train_stream(strategy="grpo", groups_per_step=1) as stream:
                (weights := tmp_path / f"step-{step}").write_text(str(step))
                await stream.commit(await anext(stream), weights)
    assert "published weights" not in caplog.text


async def _published_by(experiment: Experiment, consumer: str, folder: Path, steps: int) -> None:
    """Train and publish a few steps as another trainer of the same experiment."""
    options: dict[str, Any] = {"strategy": "grpo", "groups_per_step": 1, "consumer": consumer}
    async with experiment.train_stream(**options) as stream:
        for _ in range(steps):
            step = await anext(stream)
            (weights := folder / f"{consumer}-{step.step}").write_text(consumer)
            await stream.commit(step, weights)


@pytest.mark.parametrize("configured", ["trainer", "ablation", None])
async def test_explorers_follow_the_trainer_that_the_configuration_names(
    configured: str | None, store_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    named = configured or "trainer"
    async with opened(
        store_url, rollouts_per_group=4, trainer=configured, max_staleness=9
    ) as experiment:
        for batch in range(4):
            await experiment.writer("e0").plan(f"b{batch}", [0], 4, policy_version=0)
            await experiment.writer("e0").write(group(batch=f"b{batch}"))
        await run_strategy(experiment, "grpo")
        (other,) = {"trainer", "ablation"} - {named}
        await _published_by(experiment, other, tmp_path, 1)
        found = await experiment.newest_policy()
        assert found is not None
        assert found.uri.endswith(f"{other}-1")  # there is no other one yet
        await _published_by(experiment, named, tmp_path, 2)
        await _published_by(experiment, other, tmp_path, 3)
        found = await experiment.newest_policy()
        assert found is not None
        assert (found.version, Path(found.uri).name) == (2, f"{named}-2")
        backlog = await experiment.database.read(trainer_queries.backlog, experiment.key, named)
        assert (backlog.published, backlog.committed_step) == (2, 2)
        for consumer, last in ((named, 2), (other, 4)):  # a replay compares with its own
            end = await recorded_end(experiment, consumer, None)
            assert (end.step, end.digest) == (last, None)
        said = [line for line in caplog.messages if "pass over" in line]
        assert said == [
            f"trainer {other!r}: explorers follow trainer {named!r}, and pass over the weights "
            f"that this one publishes: to have it followed, set trainer={other!r} in the "
            "experiment's configuration"
        ]
        await experiment.publish_policy(5, "by-hand")
        found = await experiment.newest_policy()
        assert found is not None
        assert found.uri == "by-hand"


async def test_an_explorer_at_work_follows_a_trainer_that_is_named_later(
    store_url: str, tmp_path: Path
) -> None:
    loaded = dict[str, anyio.Event]()

    class Model:
        def load(self, uri: str) -> Model:
            anyio.from_thread.run_sync(loaded[Path(uri).name].set)
            return self

    async with opened(store_url, rollouts_per_group=4, trainer="first") as experiment:
        await experiment.writer("e0").write(group())
        await run_strategy(experiment, "grpo")
        for trainer in ("first", "second"):
            loaded[f"{trainer}-1"] = anyio.Event()
            await _published_by(experiment, trainer, tmp_path, 1)
        weights = Weights(experiment, Model())
        await weights.load_newest()
        assert [event.is_set() for event in loaded.values()] == [True, False]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(weights.follow)
            async with opened(store_url, trainer="second"):
                pass
            with anyio.fail_after(30):
                await loaded["second-1"].wait()
            tasks.cancel_scope.cancel()


async def test_a_trainer_of_another_name_is_followed_where_the_configured_one_is_not_there(
    store_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(store_url, rollouts_per_group=4) as experiment:
        await experiment.publish_policy(0, "by-hand")
        for batch in range(2):
            await experiment.writer("e0").plan(f"b{batch}", [0], 4)
            await experiment.writer("e0").write(group(batch=f"b{batch}"))
        await run_strategy(experiment, "grpo")
        await _published_by(experiment, "mine", tmp_path, 2)
        found = await experiment.newest_policy()
        assert found is not None
        assert found.uri.endswith("mine-2")
    assert [line for line in caplog.messages if "pass over" in line] == []


async def test_a_commit_whose_weights_cannot_be_asked_for_is_reported_as_made(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable(*_: object) -> None:
        raise StoreUnavailableError("the server went away after the commit")

    (weights := tmp_path / "weights").write_text("1")
    async with opened(sqlite_url, rollouts_per_group=4) as experiment:
        await experiment.writer("e0").write(group())
        await run_strategy(experiment, "grpo")
        async with experiment.train_stream(strategy="grpo", groups_per_step=1) as stream:
            step = await anext(stream)
            monkeypatch.setattr(writer_queries, "newest_policy", unavailable)
            await stream.commit(step, weights)
            await stream.commit(step, weights)
        assert (await kinds(experiment)).count("StepsCommitted") == 1
