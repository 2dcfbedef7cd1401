"""The tables of the two pages about algorithms hold what the registries hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from trinity_buffer.algorithm import (
    ADD_STRATEGY,
    ADVANTAGE_FN,
    ALGORITHM_TYPE,
    ENTROPY_LOSS_FN,
    IMPORTANCE_CORRECTION,
    KL_FN,
    POLICY_LOSS_FN,
    SAMPLE_STRATEGY,
    Registry,
)
from trinity_buffer.algorithm.arguments import declared_arguments
from trinity_buffer.algorithm.building import build

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "algorithms_strategies.md").read_text()
LOSSES = (DOCS / "algorithms.md").read_text()
SECTIONS: dict[str, Registry[Any]] = {
    "## Strategies": ADD_STRATEGY,
    "## Advantage functions": ADVANTAGE_FN,
    "## Sample strategies": SAMPLE_STRATEGY,
    "## Algorithm types": ALGORITHM_TYPE,
    "## Policy losses": POLICY_LOSS_FN,
    "## Importance-sampling correction": IMPORTANCE_CORRECTION,
    "## KL": KL_FN,
    "## Entropy": ENTROPY_LOSS_FN,
}


def rows_of(title: str) -> list[tuple[str, list[str]]]:
    """Return the names in the tables of one section, each with the other cells of its row."""
    section = f"{PAGE}{LOSSES}".split(f"\n{title}", 1)[1].split("\n## ", 1)[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return [
        (name.strip("|` "), cells) for name_cell, *cells in rows for name in name_cell.split(",")
    ]


@pytest.mark.parametrize("title", SECTIONS)
def test_every_registered_name_has_its_row(title: str) -> None:
    assert sorted(name for name, _ in rows_of(title)) == sorted(SECTIONS[title].names())


@pytest.mark.parametrize(("name", "cells"), rows_of("## Strategies"))
def test_the_row_of_a_strategy_says_what_it_reads(name: str, cells: list[str]) -> None:
    kind = ADD_STRATEGY.get(name)
    written, unit, families, *_ = cells
    assert written.strip("`").removeprefix("…") in kind.__name__
    assert unit.split(",")[0] == kind.unit_for()
    assert tuple(families.split(" (")[0].split(", ")) == kind.families_for()


@pytest.mark.parametrize(("name", "cells"), rows_of("## Policy losses"))
def test_the_options_of_a_loss_are_its_arguments(name: str, cells: list[str]) -> None:
    kind = POLICY_LOSS_FN.get(name)
    taken = [*kind.default_args(), *declared_arguments(kind), "clip_range_low", "clip_range_high"]
    options = set(re.findall(r"`([a-z_]+)", cells[1])) - set(POLICY_LOSS_FN.names())
    assert [one for one in options if not any(name.startswith(one) for name in taken)] == []


@pytest.mark.parametrize("name", ALGORITHM_TYPE.names())
def test_the_row_of_an_algorithm_says_what_is_built(name: str) -> None:
    start = f"| `{name}` | `{ALGORITHM_TYPE.get(name).__name__}`"
    (row,) = [line for line in PAGE.splitlines() if line.startswith(start)]
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    kind, built = ALGORITHM_TYPE.get(name), build(name)
    flags = [kind.use_critic, kind.use_reference, kind.compute_advantage_in_trainer]
    letters = zip("CRTB", [*flags, kind.can_balance_batch], strict=True)
    assert cells[2] == "".join(letter if flag else "-" for letter, flag in letters)
    assert cells[3] == kind.schema
    assert cells[4] == ", ".join(choice.name for choice in built.strategies)
    assert cells[5] == (kind.recipe.advantage_fn or "")
    assert cells[6].split(",")[0] == built.choices["policy_loss_fn"].name
    assert cells[7] == built.choices["kl_loss_fn"].name
    assert cells[8] == built.choices["entropy_loss_fn"].name
    assert cells[9] == str(built.rollouts_per_group)
