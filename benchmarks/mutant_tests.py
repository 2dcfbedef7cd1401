"""Which tests are run against a mutant, and in which order: a plugin of pytest for `mutants`.

mutmut runs all tests that call a mutant's function, in any order: of a function that every test
calls, all tests, for minutes. Here those come first that call the fewest functions besides, and
after ``BUDGET_S`` no further test begins: a mutant that is alive then counts as a survivor, though
a test that was not run might have found it.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, takewhile
from pathlib import Path

import pytest

BUDGET_S = 60.0
STATS = "mutmut-stats.json"
ORDER = "test-order.json"
Order = dict[str, tuple[int, float]]
"""By the name of a test: how many functions it calls, and how many seconds it takes."""


def write_order(folder: Path) -> None:
    """Write down what mutmut has learnt in ``folder`` about each test, small enough to be read."""
    stats = json.loads((folder / STATS).read_text())
    called = Counter(
        test for tests in stats["tests_by_mangled_function_name"].values() for test in tests
    )
    order = {test: (called[test], took) for test, took in stats["duration_by_test"].items()}
    (folder / ORDER).write_text(json.dumps(order))


def chosen(tests: Sequence[str], order: Order, budget_s: float = BUDGET_S) -> list[str]:
    """Return the tests to run, the narrowest first, of which all but the last end in the budget."""
    ordered = sorted(tests, key=lambda test: order.get(test, (0, 0.0)))
    begins = accumulate((order.get(test, (0, 0.0))[1] for test in ordered), initial=0.0)
    within = takewhile(lambda pair: pair[1] < budget_s, zip(ordered, begins, strict=False))
    return [test for test, _ in within]


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose among the tests that mutmut names; all run where it learns which call what."""
    if os.environ.get("MUTANT_UNDER_TEST") != "stats" and Path(ORDER).exists():
        order = json.loads(Path(ORDER).read_text())
        config.args[:] = chosen(config.args, order)
