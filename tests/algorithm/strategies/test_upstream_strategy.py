"""A strategy written for Trinity-RFT runs here with only its import lines changed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.algorithm.strategies.rollouts import PlainWriter, rollout, scores
from tests.registries import restored
from trinity_buffer.algorithm import ADD_STRATEGY
from trinity_buffer.algorithm.add_strategy import AddStrategy, StepWiseGRPOStrategy, compose
from trinity_buffer.experience import Experience
from trinity_buffer.writer import StagedWriter

SOURCE = Path(__file__).parent / "upstream" / "step_wise_add_strategy.txt"
IMPORTS = {
    "from trinity.algorithm.add_strategy.add_strategy import (":
        "from trinity_buffer.algorithm.add_strategy.add_strategy import (",
    "from trinity.buffer import BufferWriter": "from trinity_buffer import BufferWriter",
    "from trinity.common.experience import Experience": "from trinity_buffer import Experience",
    "from trinity.utils.monitor import gather_metrics": "from trinity_buffer import gather_metrics",
}  # fmt: skip


@pytest.fixture
def ported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield the strategy class of the ported file; its registration ends with the test."""
    lines = SOURCE.read_text().splitlines()
    changed = [line for line in lines if line in IMPORTS]
    assert changed == [line for line in lines if "trinity." in line.lower() and "import" in line]
    path = tmp_path / "ported_strategy.py"
    path.write_text("\n".join(IMPORTS.get(line, line) for line in lines))
    spec = importlib.util.spec_from_file_location("ported_strategy", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "ported_strategy", module)
    with restored(ADD_STRATEGY):
        spec.loader.exec_module(module)
        yield module.StepWiseGRPOStrategy


def steps() -> list[Experience]:
    """Return three runs of two tasks, of different lengths."""
    return [
        rollout(task, run, (3 * task + 2 * run + step) % 4 / 3, step=step, mask=(1, 0, 1))
        for task in range(2)
        for run in range(3)
        for step in range(run + 1)
    ]


async def test_it_registers_itself_and_computes_what_ours_does(ported: Any) -> None:
    registered: Any = ADD_STRATEGY.get("step_wise_grpo")
    assert registered is ported
    assert AddStrategy in ported.__mro__
    theirs, ours = steps(), steps()
    writer = PlainWriter()
    count, metrics = await ported(writer, enable_step_norm=True, something_else=1).add(theirs, 1)
    expected = PlainWriter()
    strategy = StepWiseGRPOStrategy(expected, enable_step_norm=True)
    expected_count, expected_metrics = await strategy.add(ours, 1)
    assert count == expected_count
    assert metrics == pytest.approx(expected_metrics, rel=1e-5)
    assert scores(theirs) == pytest.approx(scores(ours), rel=1e-5)
    assert [[e.eid for e in w] for w in writer.writes] == [
        [e.eid for e in w] for w in expected.writes
    ]


async def test_it_composes_with_a_filter_of_ours(ported: Any) -> None:
    writer = StagedWriter()
    count, _ = await compose(writer, ["outcome_gate", ported]).add(steps(), 1)
    assert count == sum(len(some) for some in writer.groups) == 12


def test_what_it_does_not_declare_is_assumed(ported: Any) -> None:
    assert ported.unit_for(epsilon=1e-3) == "group"
    assert ported.families_for() == ("light", "tokens", "text")
    assert ported.default_args() == {"epsilon": 1e-6, "enable_step_norm": False}
