"""Reading what is in a state of an annotation set, or what a gradient step was trained on."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trinity_buffer
from tests.handles import Experiment, StepMeasures
from tests.sample_run import record_sample_run, rollout
from tests.whole_stores import experiences_of
from trinity_buffer import inspector, open_store, run_strategy
from trinity_buffer.errors import InvalidArgumentError, UnknownNameError
from trinity_buffer.inspector import now, tokens
from trinity_buffer.inspector.tracking import track
from trinity_buffer.web.pages import shades_of


async def uids(experiment: Experiment, **wanted: Any) -> list[str]:
    return [one.eid.uid async for one in experiment.read(families=["light"], **wanted)]


async def test_what_is_read_is_in_the_state_or_the_step(store_url: str, tmp_path: Path) -> None:
    sample = await record_sample_run(store_url, tmp_path / "run")
    async with open_store(sample.url) as store:
        experiment = await store.experiment(sample.name)
        everything = await uids(experiment)
        annotated = await uids(experiment, annotation_set="varied")
        rejected = await uids(experiment, annotation_set="varied", state="rejected")
        waiting = await uids(experiment, annotation_set="varied", state="waiting")
        assert rejected == [f"b0/3/{run}/0/" for run in range(4)]
        assert waiting == ["b1/0/1/0/"]
        assert sorted(annotated + rejected + waiting) == sorted(everything)
        assert await uids(experiment, annotation_set="grpo", state="unseen") == []
        new = (await experiment.writer("e0").write([rollout("b1", 0, 2, 1.0)])).uids
        assert await uids(experiment, annotation_set="grpo", state="unseen") == list(new)
        assert await uids(experiment, trained_in=2) == [f"b0/1/{run}/0/" for run in range(4)]
        assert await uids(experiment, trained_in=2, run=3) == ["b0/1/3/0/"]
        with pytest.raises(UnknownNameError, match="never handed step 9"):
            await uids(experiment, trained_in=9)
        with pytest.raises(UnknownNameError, match="there: grpo, varied"):
            await uids(experiment, annotation_set="nonsense")
        with pytest.raises(InvalidArgumentError, match="annotation_set="):
            await uids(experiment, state="waiting")
        with pytest.raises(InvalidArgumentError, match="state='nope': accepted are unseen"):
            await uids(experiment, annotation_set="grpo", state="nope")


async def test_tokens_name_the_policy_that_said_each(store_url: str) -> None:
    """As a server tells whose weights it changed in the middle of a rollout."""
    parts = [
        {"begin": 4, "end": 6, "version": "10"},
        {"begin": 6, "end": 7, "version": "11"},
        {"begin": 7, "end": 8, "version": "main"},
        {"begin": 7, "end": 8, "version": "11", "later_version": "12"},  # whose it is, nobody knows
        {"begin": 5, "end": 8, "version": "9" * 400},
        "nonsense",
    ]
    given = rollout("b0", 0, 1, 1.0)
    given.info["weight_segments"] = parts
    async with open_store(store_url) as store:
        experiment = await store.experiment("sort", config={})
        await experiment.writer("e0").write([given, rollout("b0", 0, 0, 1.0)])
        table = await tokens(now(experiment), given.eid.uid)
        plain = await tokens(now(experiment), "b0/0/0/0/")
    versions = table.columns["policy_version"]
    assert versions[4:7].tolist() == [10, 10, 11]
    assert np.isnan(versions[:4]).all()
    assert np.isnan(versions[7:]).all()
    assert "policy_version" not in plain.columns
    assert shades_of(table, "policy_version") == [0, 0, 0, 0, 2, 2, 5, 0]


async def test_tokens_show_the_last_step_that_took_a_copy(store_url: str) -> None:
    async with open_store(store_url) as store:
        experiment = await store.experiment("run", config={"rollouts_per_group": 2})
        await experiment.writer("e0").write(
            [rollout("b", task, run, float(task and run)) for task in (0, 1) for run in (0, 1)]
        )
        await experiment.writer("e0").seal("b", 4)
        await run_strategy(experiment, ["duplicate_informative", "grpo"], name="copied")
        async with experiment.train_stream(strategy="copied", groups_per_step=1) as stream:
            async for step in stream:
                rows = await experiences_of(experiment, step.manifest)
                scored = [torch.full((len(row.tokens),), -float(step.step)) for row in rows]
                own = {"kl": np.zeros(len(rows), np.float32)}
                stream.measure(StepMeasures(step.step, own, {}, {"logprob": scored}))
                await stream.commit(step, checkpoint=None)
        shown = await inspector.show(now(experiment), "b/1/0/0/")
        table = await tokens(now(experiment), "b/1/0/0/")
    assert [step.step for step in shown.sets[0].steps] == [1, 2]
    assert set(table.columns["trained_logprob"].tolist()) == {-2.0}


def test_the_inspector_is_found_by_its_former_name_with_a_warning() -> None:
    former = import_module("trinity_buffer.inspect")
    assert former is trinity_buffer.inspect
    with pytest.warns(DeprecationWarning, match=r"trinity_buffer\.inspect is now .*\.inspector"):
        assert former.show is inspector.show
    with pytest.warns(DeprecationWarning, match="inspector.tracking"):
        assert import_module("trinity_buffer.inspect.tracking").track is track
    with pytest.warns(DeprecationWarning, match="now"), pytest.raises(AttributeError):
        _ = former.not_there
    # A checkout that was updated in place may still have the folder's compiled files.
    assert not list((Path(trinity_buffer.__file__).parent / "inspect").glob("*.py"))
