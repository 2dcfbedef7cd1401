"""The tables of strategies, advantages and algorithm types hold what the registries hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trinity_buffer.algorithm import (
    ADD_STRATEGY,
    ADVANTAGE_FN,
    ALGORITHM_TYPE,
    SAMPLE_STRATEGY,
    Registry,
)
from trinity_buffer.algorithm.building import build

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms_strategies.md").read_text()
SECTIONS: dict[str, Registry[Any]] = {
    "## Strategies": ADD_STRATEGY,
    "## Advantage functions": ADVANTAGE_FN,
    "## Sample strategies": SAMPLE_STRATEGY,
    "## Algorithm types": ALGORITHM_TYPE,
}


def first_cells(title: str) -> list[str]:
    """Return what stands in the first column of the tables of one section."""
    section = PAGE.split(f"\n{title}", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    return [name.strip(" `") for row in rows for name in row.split("|")[1].split(",")]


@pytest.mark.parametrize("title", SECTIONS)
def test_every_registered_name_has_its_row(title: str) -> None:
    assert sorted(first_cells(title)) == sorted(SECTIONS[title].names())


@pytest.mark.parametrize("name", ALGORITHM_TYPE.names())
def test_the_row_of_an_algorithm_says_what_is_built(name: str) -> None:
    start = f"| `{name}` | `{ALGORITHM_TYPE.get(name).__name__}`"
    (row,) = [line for line in PAGE.splitlines() if line.startswith(start)]
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    kind, built = ALGORITHM_TYPE.get(name), build(name)
    flags = [kind.use_critic, kind.use_reference, kind.compute_advantage_in_trainer]
    letters = zip("CRTB", [*flags, kind.can_balance_batch], strict=True)
    assert cells[2] == " ".join(letter if flag else "-" for letter, flag in letters)
    assert cells[3] == kind.schema
    assert cells[4] == ", ".join(choice.name for choice in built.strategies)
    assert cells[5] == (kind.recipe.advantage_fn or "")
    assert cells[6].split(",")[0] == built.choices["policy_loss_fn"].name
    assert cells[7] == built.choices["kl_loss_fn"].name
    assert cells[8] == built.choices["entropy_loss_fn"].name
    assert cells[9] == str(built.rollouts_per_group)
