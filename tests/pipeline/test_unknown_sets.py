"""A trainer on an annotation set that nobody has made."""

from __future__ import annotations

import logging

import anyio
import pytest

from tests.contract.making import group, kinds, opened
from tests.handles import Experiment
from tests.raw_store import contents
from trinity_buffer import run_strategy
from trinity_buffer.errors import UnknownNameError

REFUSED = r"no annotation set 'grp' \(there: grpo; did you mean 'grpo'\?\).*trinity-buffer annotate"


async def annotated(experiment: Experiment, name: str = "grpo") -> None:
    """Write a group, and annotate it under a name."""
    await experiment.writer("e0").write(group())
    await run_strategy(experiment, "grpo", name=name)


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"follow": True, "wait_for_set": False}])
async def test_it_is_refused_where_it_does_not_wait_and_registers_nothing(
    store_url: str, options: dict[str, bool]
) -> None:
    async with opened(store_url, rollouts_per_group=4) as experiment:
        await annotated(experiment)
        before = await contents(store_url)
        with pytest.raises(UnknownNameError, match=REFUSED):
            async with experiment.train_stream(strategy="grp", **options):
                pass
        assert await contents(store_url) == before


async def test_it_waits_aloud_and_goes_on_when_somebody_annotates(
    store_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINITY_BUFFER_WAIT_REPORT_S", "0.01")
    async with opened(store_url, rollouts_per_group=4) as experiment:
        await annotated(experiment)
        with caplog.at_level(logging.WARNING):
            async with experiment.train_stream(strategy="grp", follow=True) as stream:
                states = given_to_wait(experiment, monkeypatch)
                while REFUSED_ALOUD not in caplog.text:
                    await anyio.sleep(0.001)
                assert (await kinds(experiment)).count("ConsumerRegistered") == 1
                assert stream.resume is None
                await annotated(experiment, "grp")
                step = await anext(stream)
                await stream.commit(step)
    assert len(step.manifest.experiences) == 4
    assert states
    assert None not in states  # else it would ask again and again


def given_to_wait(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return the list of the states after which somebody waits for a commit, as they come."""
    changes = experiment.database.changes
    found: list[object] = []
    changed = changes.changed

    async def noted(state: tuple[int, int], timeout_s: float | None = None) -> None:
        found.append(state)
        await changed(state, timeout_s)

    monkeypatch.setattr(changes, "changed", noted)
    return found


REFUSED_ALOUD = "trainer 'trainer' waits: experiment 'run' has no annotation set 'grp' (there: grpo"


async def test_an_end_without_the_set_is_an_error_and_no_empty_stream(store_url: str) -> None:
    async with opened(store_url, rollouts_per_group=4) as experiment:
        await annotated(experiment)
        async with experiment.train_stream(strategy="grp", follow=True) as stream:
            await experiment.finish("enough")
            with pytest.raises(UnknownNameError, match=r"was finished: .*'grp'"):
                await anext(stream)
        assert (await kinds(experiment)).count("ConsumerRegistered") == 1
