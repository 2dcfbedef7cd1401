"""Whatever the door lets in comes back equal, and what it refuses leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from trinity_buffer import open_store
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.experience import EID, FAMILIES, CustomField, Experience

_numbers = count()

ODD: list[Callable[[], Any]] = [
    lambda: None,
    lambda: 5,
    lambda: -1.5,
    lambda: float("nan"),
    lambda: True,
    lambda: "text",
    lambda: "\ud800\x00",
    lambda: b"bytes",
    list,
    lambda: [1, [2, ("a", None)]],
    lambda: ({"role": "user"},),
    lambda: [{"role": "user", "content": "x", 7: 1 << 80}],
    dict,
    lambda: {"a": {"b": [1.5, None]}, 3: b"x"},
    lambda: {1.5: "no key"},
    lambda: {"model_version": 3, "finish_reason": "stop\n"},
    lambda: {"model_version": 2.5},
    lambda: {"a": object()},
    lambda: {"a": torch.zeros(3, device="meta")},
    lambda: {"a": torch.arange(3), "b": np.float32(1.5), "c": np.arange(4).reshape(2, 2)},
    lambda: [CustomField("a", "b", torch.float32)],
    lambda: [CustomField("a", "b", "float32")],  # type: ignore[arg-type]
    lambda: torch.arange(4),
    lambda: torch.zeros(4, dtype=torch.complex64),
    lambda: torch.zeros(2, 2),
    lambda: torch.zeros(()),
    lambda: torch.zeros(4, device="meta"),
    lambda: torch.eye(4).to_sparse(),
    lambda: torch.tensor([1.0, float("inf"), 0.0, 0.0]),
    lambda: torch.tensor([0.5, 0.25, 1.0, 2.0], dtype=torch.bfloat16),
    lambda: torch.zeros([1] * 65),
    lambda: np.arange(4),
    lambda: {"pixels": torch.ones(2, 3, 4), "empty": torch.zeros(0, 5)},
    lambda: {"pixels": torch.eye(3).to_sparse()},
    lambda: {7: torch.ones(2)},
]
FIELDS = sorted(
    {field for fields in FAMILIES.values() for field in fields} | {"reward", "prompt_length"}
)
keys = st.one_of(
    st.integers(),
    st.text(max_size=5),
    st.sampled_from(["a\nb", "/", "", 1.5, None, True, "\x1b", b"x"]),
)


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal, types, dtypes and shapes included; NaN equals NaN."""
    if isinstance(a, Tensor):
        raw = a.detach().contiguous().view(-1), b.detach().contiguous().view(-1)
        return a.dtype == b.dtype and a.shape == b.shape and raw[0].equal(raw[1])
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        pairs = zip(a, b, strict=False)
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in pairs)
    return type(a) is type(b) and (a == b or (a != a and b != b))


def differences(written: Experience, read: Experience) -> list[str]:
    fields = ("eid", "experience_type", "policy_version", "finish_reason", "length", *FIELDS)
    return [name for name in fields if not same(getattr(written, name), getattr(read, name))]


@pytest.mark.parametrize("schema", ["experience", pytest.param("dpo", marks=pytest.mark.long)])
@settings(
    max_examples=min(80, settings().max_examples),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    changes=st.dictionaries(st.sampled_from(FIELDS), st.sampled_from(ODD), max_size=3),
    batch=keys,
    task=keys,
    others=st.integers(0, 2),
    quarantine=st.booleans(),
)
def test_what_is_accepted_reads_back_equal(
    tmp_path: Path,
    schema: str,
    changes: dict[str, Callable[[], Any]],
    batch: Any,
    task: Any,
    others: int,
    quarantine: bool,
) -> None:
    number = next(_numbers)

    def made(run: int) -> Experience:
        pair: Any = {"chosen": [4, 5], "rejected": [6]} if schema == "dpo" else {}
        eid = EID(batch, task, run, 0, "")
        return Experience(eid=eid, tokens=[1, 2, 3, 4, 5, 6], prompt_length=2, reward=0.5, **pair)

    odd = made(0)
    for field, value in changes.items():
        setattr(odd, field, value())
    written = [odd, *(made(run + 1) for run in range(others))]

    async def through() -> None:
        async with open_store(str(tmp_path / "a.db")) as store:
            experiment = await store.experiment(f"run {number}", config={"schema": schema})
            writer = experiment.writer("e0", on_invalid="quarantine" if quarantine else "raise")
            refused: list[str] = []
            receipt = None
            try:
                receipt = await writer.write(written)
            except InvalidArgumentError as error:
                refused.append(str(error))
            if receipt is None:
                assert "experience " in refused[0], "it names the experience"
                return
            found = [one async for one in experiment.read(include_refused=True)]
            assert [one.damaged for one in found] == [None] * len(written)
            assert [one.eid for one in found] == [one.eid for one in written]
            sound = list(zip(written, found, strict=True))[1 if receipt.rejected else 0 :]
            assert [differences(*pair) for pair in sound] == [[]] * len(sound)

    anyio.run(through)
