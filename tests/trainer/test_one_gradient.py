"""However a step is cut, its gradient is one: padded, packed, in pieces, on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from tests.trainer.data import prepared
from tests.trainer.forked_ranks import said_by
from tests.trainer.gradients import gradient, train
from tests.trainer.rank_process import OF_ONE_GROUP, TRAINED, main
from trinity_buffer.algorithm import ALGORITHM_TYPE, build

CUTS: dict[str, dict[str, Any]] = {
    "padded": {"layout": "padded"},
    "packed": {"layout": "packed"},
    "padded in pieces": {"layout": "padded", "tokens_per_microbatch": 40},
    "packed in pieces": {"layout": "packed", "tokens_per_microbatch": 40},
}
ON_TWO_RANKS = [
    pytest.param(("grpo", "dpo"), id="some"),
    pytest.param(
        ("ppo", "rloo", "reinforceplusplus", "sft", "mix", "mix_chord", "gspo"),
        marks=pytest.mark.long,  # a quarter of a minute
        id="others",
    ),
]
EXACT = ("grpo", "dpo", "sft", "mix")
OF_EACH_KIND = ("ppo", "rloo", "reinforceplusplus", "mix_chord", "gspo", "jsd")


def assert_one(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert expected.abs().max() > 0
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize(
    "name",
    [
        name if name in OF_EACH_KIND else pytest.param(name, marks=pytest.mark.long)
        for name in ALGORITHM_TYPE.names()
    ],
)
def test_a_step_has_one_gradient_however_it_is_cut(name: str, sqlite_url: str) -> None:
    algorithm = build(name)
    anyio.run(prepared, sqlite_url, algorithm)
    whole, *cuts = [
        gradient(sqlite_url, algorithm, cut, **options) for cut, options in CUTS.items()
    ]
    for cut in cuts:
        assert_one(cut, whole, 1e-6)


@pytest.mark.parametrize("name", EXACT)
def test_in_float64_it_is_one_to_the_last_digits(name: str, sqlite_url: str) -> None:
    algorithm = build(name)
    anyio.run(prepared, sqlite_url, algorithm)
    whole, *cuts = [
        gradient(sqlite_url, algorithm, cut, dtype=torch.float64, **options)
        for cut, options in CUTS.items()
    ]
    for cut in cuts:
        assert_one(cut, whole, 1e-12)


@pytest.mark.long
@pytest.mark.parametrize("names", ON_TWO_RANKS)
def test_two_ranks_have_the_gradient_of_one(names: tuple[str, ...], tmp_path: Path) -> None:
    urls = {name: f"sqlite:///{tmp_path}/{name}.db" for name in names}
    for name, url in urls.items():
        anyio.run(prepared, url, build(name))
    given = [(str(tmp_path), str(rank), ",".join(urls)) for rank in range(2)]
    said = said_by(main, given, tmp_path)
    assert [one[0] for one in said] == ["0", "0"], said
    for name, url in urls.items():
        alone = gradient(url, build(name), "alone")
        for rank in range(2):
            assert_one(torch.load(tmp_path / f"{name}-{rank}.pt"), alone, 1e-6)
    for name in OF_ONE_GROUP.intersection(names):
        alone = gradient(urls[name], build(name), "one-group", groups=1)
        for rank in range(2):
            assert_one(torch.load(tmp_path / f"{name}-few-{rank}.pt"), alone, 1e-6)
    for name in TRAINED.intersection(names):
        _, reports = train(
            urls[name], build(name), tmp_path / "a", max_steps=2, consumer="alone-run"
        )
        (weights, norms), (others, _) = (
            torch.load(tmp_path / f"{name}-run-{rank}.pt") for rank in range(2)
        )
        assert all(torch.equal(weight, others[key]) for key, weight in weights.items())
        assert norms.tolist() == pytest.approx([r.gradient_norm for r in reports], rel=1e-4)
