"""Golden cases: their files, and what is in them."""

from __future__ import annotations

import fnmatch
import gzip
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _num(x: Any) -> Any:
    if isinstance(x, list):
        return [_num(i) for i in x]
    return SPECIAL.get(x, x) if isinstance(x, str) else x


def decode(v: Any) -> Any:
    """Return JSON as Python: {"__tensor__": dtype, ...} as a tensor, "NaN" as a float."""
    if isinstance(v, dict) and "__tensor__" in v:
        return torch.tensor(_num(v["data"]), dtype=getattr(torch, v["__tensor__"])).reshape(
            v["shape"]
        )
    if isinstance(v, dict):
        return {k: decode(x) for k, x in v.items()}
    return [decode(x) for x in v] if isinstance(v, list) else _num(v)


class Case:
    """One golden case with decoded inputs / outputs."""

    def __init__(self, family: str, raw: dict[str, Any], tolerances: dict[str, Any]) -> None:
        self.outputs: Any
        self.family, self.raw, self.id, self.raises = family, raw, raw["id"], raw.get("raises")
        self.registry, self.tags, self.method = (
            raw.get("registry", ""),
            set(raw.get("tags", [])),
            raw.get("method"),
        )
        self.label = self.registry or raw.get("cls") or raw.get("fn") or "-"
        self.kwargs, self.call_kwargs, self.inputs, self.outputs = (
            decode(raw.get(k, {})) for k in ("kwargs", "call_kwargs", "inputs", "outputs")
        )
        self.specs, self.mtol = self.inputs.get("experiences"), tolerances["metric"]
        f64 = any(
            isinstance(v, torch.Tensor) and v.dtype == torch.float64 for v in self.inputs.values()
        )
        # The reference computes these group statistics in float32 whatever the input.
        f64 = f64 and self.registry not in ("grpo_verl", "opmd_verl", "asymre_verl", "rloo")
        self.rtol, self.atol = (
            tolerances["float64" if f64 else "float32"][k] for k in ("rtol", "atol")
        )

    def groups(self) -> dict[str, list[int]]:
        """Return task id -> positions of its experiences, in order of first appearance."""
        out: dict[str, list[int]] = {}
        for i, s in enumerate(self.specs):
            out.setdefault(f"{s['eid']['batch']}/{s['eid']['task']}", []).append(i)
        return out

    def rewards(self, idx: Any) -> Any:
        """Return the rewards at these positions as float64, NaN for None."""
        return np.array([self.specs[i]["reward"] for i in idx], dtype=np.float64)

    def expect(self, **outputs: Any) -> Case:
        """Set the right outputs, where the reference is wrong or crashes."""
        self.raises, self.outputs = None, outputs
        return self


def load_families(
    folder: Path, family: str, covered: Callable[[str], bool]
) -> Iterator[tuple[str, list[Case]]]:
    """Yield the name and the cases of every covered family of ``folder`` whose name matches."""
    paths = {path.name.split(".json")[0]: path for path in folder.glob("*.json*")}
    for name, path in sorted(paths.items()):
        if covered(name) and fnmatch.fnmatch(name, family):
            with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
                doc = json.load(file)
            yield name, [Case(name, case, doc["tolerances"]) for case in doc["cases"]]
