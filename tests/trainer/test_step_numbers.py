"""What ranks report and commit of a step: the numbers that one process would have."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import anyio
import pytest
import torch

from tests.handles import MicroBatch
from tests.trainer.data import prepared
from tests.trainer.forked_ranks import said_by
from tests.trainer.numbers_rank import NOT_FINITE, STEPS, main, trained
from tests.trainer.two_ranks import RankOfTwo
from trinity_buffer import inspector, open_store
from trinity_buffer.algorithm import build
from trinity_buffer.algorithm.layout import BatchLayout
from trinity_buffer.errors import CheckpointError
from trinity_buffer.inspector.source import now
from trinity_buffer.trainer.checkpoint import on_each
from trinity_buffer.trainer.models import Number, combined, numbers_of_step

T = TypeVar("T")
CHOICES: dict[str, dict[str, Any]] = {
    "grpo": {"kl_loss_fn": "k2", "kl_loss_fn_args": {"kl_coef": 0.1}},
    "ppo": {"kl_penalty_fn": "k1", "kl_penalty_fn_args": {"kl_coef": 0.1}},
    "dpo": {},
    "mix": {"advantage_fn": "grpo_verl", "kl_penalty_fn": "k1"},
    "gspo": {},
    "jsd": {},
}


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", CHOICES)
def test_any_number_of_ranks_reports_and_commits_what_one_process_would(
    name: str, ranks: int, tmp_path: Path
) -> None:
    """Two groups a step: the third rank has no rows. One step is not finite, on one rank."""
    algorithm = build(name, **CHOICES[name])
    anyio.run(prepared, f"sqlite:///{tmp_path}/run.db", algorithm)
    chosen = (str(ranks), name, json.dumps(CHOICES[name]))
    given = [(str(tmp_path), str(rank), *chosen) for rank in range(ranks)]
    said = said_by(main, given, tmp_path)
    assert [one[0] for one in said] == ["0"] * ranks, said
    alone = trained(tmp_path, 0, 1, algorithm)
    assert len(alone) == STEPS
    assert [step["skipped"] for step in alone].index(1.0) == NOT_FINITE - 1
    for rank in range(ranks):
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        for found, wanted in zip(told, alone, strict=True):
            assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6, nan_ok=True)
    lines = anyio.run(committed, f"sqlite:///{tmp_path}/run.db", f"ranks-{ranks}")
    for line, step in zip(lines[:STEPS], alone, strict=True):
        assert line.keys() >= {"loss", "gradient_norm"} or step["skipped"]
        assert line == pytest.approx(
            {n: step[n] if n in step else step[f"measured/{n}"] for n in line}, rel=1e-5, abs=1e-6
        )


async def committed(url: str, trainer: str) -> list[dict[str, float]]:
    async with open_store(url) as store:
        source = now(await store.experiment("run"))
        return [dict(one.metrics) for one in await inspector.steps(source, trainer=trainer)]


def of_tokens(number: int) -> MicroBatch:
    mask = torch.ones(1, number, dtype=torch.bool)
    tensors = {"action_mask": mask, "sample_index": torch.zeros(1, dtype=torch.int32)}
    return MicroBatch(tensors, BatchLayout.of_step(mask))


def test_micro_batches_count_by_their_tokens_or_rows_and_losses_add_up() -> None:
    names = ("kl_loss", "ratio", "drift", "gap/max", "gap_min")
    parts = [dict.fromkeys(names, 1.0), dict.fromkeys(names, 3.0)]
    found = combined(parts, [of_tokens(3), of_tokens(1)], ["drift"])
    assert [float(found[name].value) for name in names] == [4.0, 1.5, 2.0, 3.0, 1.0]


def test_ranks_that_have_other_names_agree_on_all() -> None:
    """Also where a name comes later, and where a number is NaN."""
    first = [
        {"loss": Number(1.0), "a": Number(1.0, 1), "x_max": Number(5.0, 1)},
        {"b": Number(4.0, 2), "loss": Number(3.0), "x_max": Number(math.nan, 1)},
    ]
    later = [
        {"c": Number(1.0, 1), "loss": Number(math.nan)},
        {"a": Number(2.0, 0), "c": Number(4.0, 2)},
    ]
    ranks = RankOfTwo.pair()
    one, other = of_both(lambda at: numbers_of_step(ranks[at], [torch.zeros(())], first[at]))
    assert one == other == (True, {"loss": 2.0, "a": 1.0, "b": 4.0, "x_max": 5.0})
    bad = torch.tensor([0.0, math.inf])
    one, other = of_both(lambda at: numbers_of_step(ranks[at], [bad[at]], later[at]))
    assert one[0] is other[0] is False
    for _, numbers in (one, other):
        assert numbers == pytest.approx({"a": 2, "c": 3, "loss": math.nan}, nan_ok=True)


def test_a_rank_that_fails_without_a_word_fails_the_others() -> None:
    ranks = RankOfTwo.pair()

    def failing() -> None:
        raise OSError

    def tried(at: int) -> Exception | None:
        try:
            on_each(ranks[at], failing if at else lambda: None)
        except (CheckpointError, OSError) as error:
            return error
        return None

    one, other = of_both(tried)
    assert isinstance(one, CheckpointError)
    assert "as rank 1 failed: OSError()" in str(one)
    assert isinstance(other, OSError)


def of_both(act: Callable[[int], T]) -> list[T]:
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(act, range(2)))
