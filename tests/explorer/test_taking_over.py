"""A batch whose explorer is gone is finished by another one that is told to."""

from __future__ import annotations

import os
from functools import partial
from signal import SIGKILL
from typing import Any

import anyio
import pytest

import trinity_buffer as tb
from tests.contract.making import living, opened
from tests.explorer.test_exploring import SMALL, TASKS, Rollouts, answer, experience, runs, sealed
from tests.handles import Experiment, Transaction
from tests.raw_store import note_presence, sql, this_host
from trinity_buffer.pipeline.coordination import waiting
from trinity_buffer.pipeline.coordination.waiting import Presence
from trinity_buffer.store import counts, writer_queries

WHOLE = {"epoch0-0": 4, "epoch0-1": 4, "epoch0-2": 2}


async def die_in_the_first_batch(experiment: Experiment) -> None:
    """Leave a batch planned by ``e0``, one run of it stored, and no such process."""
    async with living(experiment, "e0"):
        writer = experiment.writer("e0")
        await writer.plan("epoch0-0", [0, 1], 2)
        row = experience()
        row.eid = tb.EID("epoch0-0", 0, 1, 0)
        await writer.write([row])
    await experiment.database.write(sql("DELETE FROM presence"))


@pytest.mark.parametrize("take_over", [True, False])
async def test_another_explorer_makes_what_a_dead_one_left(
    store_url: str, *, take_over: bool
) -> None:
    async with opened(store_url) as experiment:
        await die_in_the_first_batch(experiment)
        rollouts = Rollouts()
        await tb.explore(
            experiment,
            actor="e1",
            tasks=TASKS,
            rollout=rollouts,
            model=None,
            take_over=take_over,
            **SMALL,
        )
        left = {} if take_over else {"epoch0-0": 4}
        assert await sealed(experiment) == {k: n for k, n in WHOLE.items() if k not in left}
        assert rollouts.calls["ant"] == (1 if take_over else 0)  # the other run is stored
        stored = await runs(experiment)
        assert set(stored.values()) == {1}
        assert len(stored) == (10 if take_over else 7)


async def test_a_batch_of_an_explorer_that_is_there_is_left_to_it(store_url: str) -> None:
    async with opened(store_url) as experiment:
        await die_in_the_first_batch(experiment)
        async with living(experiment, "e0"):
            options = {"take_over": True, **SMALL}
            await tb.explore(
                experiment, actor="e1", tasks=TASKS, rollout=answer, model=None, **options
            )
        assert "epoch0-0" not in await sealed(experiment)


async def test_two_explorers_take_a_batch_over_once(store_url: str) -> None:
    async with opened(store_url) as experiment, opened(store_url) as other:
        await die_in_the_first_batch(experiment)
        rollouts = Rollouts()
        async with anyio.create_task_group() as group:
            for actor, of in (("e1", experiment), ("e2", other)):
                call = partial(
                    tb.explore, of, actor=actor, tasks=TASKS, rollout=rollouts, model=None
                )
                group.start_soon(partial(call, take_over=True, **SMALL))
        assert await sealed(experiment) == WHOLE
        assert sum(rollouts.calls.values()) == 9


async def says(experiment: Experiment, name: str, pid: int, host: str) -> None:
    """Say that a process explores under this name."""
    await note_presence(experiment, "explorer", name, pid, host)


@pytest.mark.parametrize("how", ["seals", "dies"])
@pytest.mark.long
async def test_an_explorer_that_comes_back_waits_for_who_took_its_batch_over(
    store_url: str, how: str
) -> None:
    """Else both would make the same runs, and one of them would be refused."""
    async with opened(store_url) as experiment, opened(store_url) as other:
        await die_in_the_first_batch(experiment)
        rollouts = Rollouts()
        explore = partial(tb.explore, actor="e0", tasks=TASKS, rollout=rollouts, model=None)
        with anyio.fail_after(60):
            async with living(other, "e0") as pid, anyio.create_task_group() as tasks:
                await says(other, "e1", pid, this_host())
                tasks.start_soon(partial(explore, experiment, **SMALL))
                with anyio.move_on_after(0.5) as waited:
                    await other.until_finished()
                assert waited.cancelled_caught
                assert not rollouts.calls
                if how == "seals":
                    await other.writer("e1").seal("epoch0-0", 1)
                else:
                    os.kill(pid, SIGKILL)
        left = {} if how == "dies" else {"epoch0-0": 1}
        assert await sealed(experiment) == WHOLE | left


async def test_an_explorer_makes_its_batch_though_its_last_process_seems_to_live(
    store_url: str,
) -> None:
    """A container that is started again is another machine, and the dead one was just heard of."""
    async with opened(store_url) as experiment:
        await die_in_the_first_batch(experiment)
        await says(experiment, "e0", 1, "pod#before")
        with anyio.fail_after(60):
            await tb.explore(
                experiment, actor="e0", tasks=TASKS, rollout=answer, model=None, **SMALL
            )
        assert await sealed(experiment) == WHOLE


async def test_an_heir_takes_nothing_from_an_explorer_that_is_back(store_url: str) -> None:
    async with opened(store_url) as experiment:
        await die_in_the_first_batch(experiment)
        heir = experiment.writer("e1")
        assert await heir.take_over() == ["epoch0-0"]
        async with living(experiment, "e0"):
            await experiment.writer("e0").plan("epoch0-1", [2, 3], 2)
            assert await heir.take_over() == []


async def test_what_was_taken_over_is_said_to_be_alive_until_its_maker_ends(store_url: str) -> None:
    async with opened(store_url) as experiment:
        await die_in_the_first_batch(experiment)
        first, second = experiment.writer("e1"), experiment.writer("e2")
        async with anyio.create_task_group() as group:
            group.start_soon(first.stay_present)
            assert await first.take_over() == ["epoch0-0"]
            assert await second.take_over() == []
            group.cancel_scope.cancel()
        assert await second.take_over() == ["epoch0-0"]


async def test_however_many_batches_the_dead_left_none_counts_and_all_are_taken_over(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, asked = writer_queries.runs_of, list[Any]()

    def asking(tx: Transaction, experiment: int, keys: Any) -> Any:
        asked.append(keys)
        return original(tx, experiment, keys)

    monkeypatch.setattr(writer_queries, "runs_of", asking)
    number = counts.BATCHES_LOOKED_AT + 6
    async with opened(store_url) as experiment:
        for batch in range(number):
            await experiment.writer(f"pod-{batch}").plan(f"b{batch}", [0], 1)
        await experiment.database.write(sql("DELETE FROM presence"))
        async with opened(store_url, max_queued_groups=4) as bounded:
            with anyio.fail_after(60):
                assert await bounded.writer("e0").plan("new", [0], 1)
        assert len(asked) < number / 2  # all others wait meanwhile
        assert len(await experiment.writer("e1").take_over()) == number


async def test_an_explorer_takes_over_one_more_name_while_it_says_that_the_others_are_there(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, later = Presence.seen, anyio.Event()
    monkeypatch.setattr(waiting, "SEEN_EVERY_S", 0.01)
    async with opened(store_url) as experiment:
        for batch in ("b0", "b1"):
            await experiment.writer(f"of-{batch}").plan(batch, [0], 1)
        await experiment.database.write(sql("DELETE FROM presence"))
        heir = experiment.writer("e0")

        async def seen_meanwhile(presence: Presence, *, at_once: bool = False) -> None:
            await seen(presence, at_once=at_once)
            if presence.name == "of-b0":
                assert await heir.take_over(["b1"]) == ["b1"]
            elif presence.name == "of-b1":
                later.set()

        assert await heir.take_over(["b0"]) == ["b0"]
        monkeypatch.setattr(Presence, "seen", seen_meanwhile)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(heir.stay_present)
            await later.wait()
            tasks.cancel_scope.cancel()
