"""The syntax trees of all code of ours, which take seconds to make: once for all tests of them."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "trinity_buffer"
OUTSIDE = ("migrations", "tools", "benchmarks", "tests")
"""The folders with code that is no part of the package."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def trees() -> dict[str, ast.Module]:
    """Return the tree of each file by its path.

    A million objects that nobody throws away: looking for garbage among them takes as long as
    making them, and again in each test that follows.
    """
    files = sorted(f for folder in (PACKAGE, *OUTSIDE) for f in (ROOT / folder).rglob("*.py"))
    assert len(files) > 10
    gc.disable()
    made = {f.relative_to(ROOT).as_posix(): ast.parse(f.read_bytes()) for f in files}
    gc.freeze()
    gc.enable()
    return made
