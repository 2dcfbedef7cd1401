"""What `/metrics` says of a run that takes steps back."""

from __future__ import annotations

from pathlib import Path

from tests.sample_run import rollout
from trinity_buffer import open_store, run_strategy
from trinity_buffer.web.app import metrics


def _samples(text: str) -> dict[str, float]:
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


async def test_no_counter_falls_when_a_trainer_is_rewound(sqlite_url: str, tmp_path: Path) -> None:
    async with open_store(sqlite_url) as store:
        run = await store.experiment("run", config={"rollouts_per_group": 2})
        made = [rollout("b", task, of, float(of)) for task in range(3) for of in range(2)]
        await run.writer("e0").write(made)
        await run_strategy(run, "grpo")
        async with run.train_stream(strategy="grpo") as stream:
            async for step in stream:
                folder = tmp_path / f"{step.step}"
                folder.mkdir()
                (folder / "weights").write_text("w")
                await stream.commit(step, checkpoint=str(folder))
        told = await metrics(store)
        async with run.train_stream(strategy="grpo", resume_from=1):
            pass
        before, after = _samples(told), _samples(await metrics(store))
    totals = [name for name in before if "_total" in name]
    assert totals
    assert all(after[name] >= before[name] for name in totals)
    committed = 'trinity_buffer_committed_rows{experiment="run",trainer="trainer"}'
    assert (before[committed], after[committed]) == (6, 2)
    assert "# TYPE trinity_buffer_committed_rows gauge" in told
    assert "of the last 20 steps" in told
