"""The Triton kernels of the output head without a GPU: interpreted, and compiled.

What neither shows: how fast they are, what cuBLAS makes of the products between them, and the last
bits of a GPU's exponential and division.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.trainer.interpreted_kernels import CASES, FAR
from trinity_buffer.trainer import token_scores
from trinity_buffer.trainer.token_scores import TORCH, ChunkMath

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")


def printed(module: str, **environment: str) -> Any:
    """Return what a module prints as JSON, in a process where Triton was not imported yet."""
    done = subprocess.run(
        [sys.executable, "-m", module],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "0", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def apart() -> dict[str, dict[str, float]]:
    """Return by how much interpreted kernels and torch differ, case by case."""
    differences: dict[str, dict[str, float]] = printed(
        "tests.trainer.interpreted_kernels", TRITON_INTERPRET="1"
    )
    return differences


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernels_say_what_torch_says(
    name: str, apart: dict[str, dict[str, float]]
) -> None:
    case, found = CASES[name], apart[name]
    exact = case.dtype == case.head_dtype == torch.float32
    for part, difference in found.items():
        summed = {"logprob": 1e-6, "entropy": 1e-6, "change": 3e-6}  # a change is a difference
        bound = summed.get(part, 1e-6 if exact else 5e-3)
        assert difference <= bound, (part, difference)
    assert found.keys() >= {"logprob", "entropy", "change", "of hidden", "of weight"}
    assert ("of bias" in found) == case.biased


@pytest.mark.long
def test_rows_may_lie_beyond_what_32_bits_count(apart: dict[str, dict[str, float]]) -> None:
    assert max(apart[FAR].values()) <= 1e-3  # of numbers in bfloat16


@pytest.mark.long
def test_each_kernel_is_compiled_for_an_h100(tmp_path: Path) -> None:
    kernels = printed("tests.trainer.compiled_kernels", TRITON_CACHE_DIR=str(tmp_path))
    assert len(kernels) == 3 * 3 * 2
    for name, made in kernels.items():
        assert made["loads of 16 bytes"] > 0, name
        assert (made["stores of 16 bytes"] > 0) == name.startswith("gradient"), name
        assert made["uses of local memory"] == 0, name


@pytest.mark.parametrize(
    "hidden",
    [pytest.param("", marks=pytest.mark.long, id="no GPU"), pytest.param("triton", id="no Triton")],
)
def test_torch_takes_over_where_the_kernels_do_not_run_and_says_why_once(
    hidden: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if hidden:
        monkeypatch.setitem(sys.modules, "triton", None)
        monkeypatch.delitem(sys.modules, "trinity_buffer.trainer.head_kernels", raising=False)
    reason = "import of triton halted" if hidden else "0 active drivers"
    token_scores.math_of_gpu.cache_clear()
    token_scores.warn_of_torch.cache_clear()
    with caplog.at_level(logging.WARNING):
        for dtype in (torch.float32, torch.bfloat16, torch.float32):
            assert token_scores.math_of_gpu(torch.device("cpu"), dtype) is TORCH
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("log-probabilities are computed by torch alone, which takes about")
    assert f"do not run on cpu: {reason}" in message


def test_a_gpu_that_is_full_does_not_choose_torch_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    full = [torch.OutOfMemoryError("CUDA out of memory")]
    kernels = ModuleType("trinity_buffer.trainer.head_kernels")
    fused = TORCH._replace(fused=True)

    def checked(*_: object) -> ChunkMath:
        if full:
            raise full.pop()
        return fused

    monkeypatch.setitem(vars(kernels), "checked", checked)
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    token_scores.math_of_gpu.cache_clear()
    with pytest.raises(torch.OutOfMemoryError):
        token_scores.math_of_gpu(torch.device("cpu"), torch.float32)
    assert token_scores.math_of_gpu(torch.device("cpu"), torch.float32) is fused
    token_scores.math_of_gpu.cache_clear()
