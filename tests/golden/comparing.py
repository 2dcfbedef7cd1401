"""Expected against actual: differences in words, [] if there are none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from tests.golden.cases import Case

ULP32 = 2.0**-23


def to_np(x: Any) -> np.ndarray:
    return np.asarray(
        x.detach().cpu().numpy() if isinstance(x, torch.Tensor) else x, dtype=np.float64
    )


def num_diff(
    path: str,
    expected: Any,
    actual: Any,
    rtol: float,
    atol: float,
    nan: str = "match",
    keep: Any = None,
) -> list[str]:
    """Return [] or one readable difference.

    Expected inf: inf, or huge with the same sign. Expected NaN: NaN ("match"), 0 ("zero") or
    anything ("free"). None on either side: zeros. keep: the positions that are compared.
    """
    e = to_np(np.zeros_like(to_np(actual)) if expected is None else expected)
    a = np.zeros_like(e) if actual is None else to_np(actual)
    if e.shape != a.shape and not e.size == a.size == 1:
        return [f"{path}: shape {a.shape} != {e.shape}"]
    e, a = e.reshape(-1), a.reshape(-1)
    scale = np.abs(e[np.isfinite(e)]).max(
        initial=0.0
    )  # cancellation noise is relative to the largest element
    with np.errstate(all="ignore"):
        ok = np.abs(a - e) <= atol + rtol * np.abs(e) + (0.05 * rtol * scale if e.size > 1 else 0.0)
        ok |= np.isinf(e) & (np.sign(a) == np.sign(e)) & (np.abs(a) >= 1e8)
    ok |= np.isnan(e) & {"match": np.isnan(a), "zero": np.abs(a) <= atol, "free": True}[nan]
    if keep is not None:
        ok |= ~np.asarray(keep, dtype=bool).reshape(-1)
    return [
        f"{path}[flat {i}]: {a[i]:.9g} != {e[i]:.9g} ({int((~ok).sum())} of {e.size} differ)"
        for i in np.flatnonzero(~ok)[:1]
    ]


def metrics_diff(
    case: Case, expected: Any, actual: Any, skip: Callable[[str], bool] = lambda k: False
) -> list[str]:
    r, out = np.abs(case.rewards(range(len(case.specs or [])))), []
    atol = case.mtol["atol"] + 8 * ULP32 * float(
        r[np.isfinite(r)].max(initial=0.0)
    )  # rounding of float32 group statistics
    for k, v in ((k, v) for k, v in expected.items() if not skip(k)):
        out += (
            num_diff(f"metrics/{k}", v, actual[k], case.mtol["rtol"], atol)
            if k in actual
            else [f"metrics/{k}: missing (expected {v})"]
        )
    return out


def advantage_slack(case: Case) -> dict[int, float]:
    """Return how far float32 rounding of the rewards may move each experience's advantage."""
    reg, kw, ill = case.registry or "step_wise_grpo", case.kwargs, "ill_conditioned" in case.tags
    eps, penalty = (
        kw.get("epsilon", 1e-6),
        kw.get("rank_penalty", 0.25 if reg == "correct_bias" else 0) or 0,
    )

    def stats(
        idx: Iterable[int],
    ) -> (
        np.ndarray
    ):  # rewards that enter the statistics: of the last step of each run for step-wise GRPO
        if reg == "step_wise_grpo":
            idx = {
                tuple(case.specs[i]["eid"][k] for k in ("batch", "task", "run")): i for i in idx
            }.values()
        r = case.rewards(idx).astype(np.float32).astype(np.float64)
        return np.asarray(r[np.isfinite(r)])

    out = {}
    for idx in case.groups().values():
        r = stats(idx)
        t, whole = 8 * ULP32 * float(np.abs(r).max(initial=0.0)), stats(range(len(case.specs)))
        whole = whole if kw.get("std_cal_level") == "batch" else r
        if reg == "gigpo":
            t = 4e-6
        elif len(r) > 1 and (
            reg in ("grpo", "correct_bias", "step_wise_grpo") or kw.get("std_normalize")
        ):
            s = max(
                float(np.std(whole, ddof=1)), 0.05 * penalty * float(np.abs(r).max())
            )  # ranks spread the rewards
            t = (
                0.0
                if s == 0 and not ill
                else min(t / (s + eps) if s + eps > 0 else math.inf, 2 * math.sqrt(len(whole)))
            )
        out.update(dict.fromkeys(idx, t))
    return out


def src(exp: Any) -> int:
    return int(exp["src"] if isinstance(exp, dict) else exp.info["__idx__"])


def flat(outputs: Any) -> list[Any]:
    """All experiences of an outcome, golden or actual."""
    return (
        list(outputs["returned"])
        if "returned" in outputs
        else [e for w in outputs["writes"] for e in w]
    )


def exps_diff(case: Case, expected: Any, actual: Any, path: str, nan: str = "match") -> list[str]:
    """Ordered lists of experiences: same source experience, same uid, same advantages / returns."""
    if len(expected) != len(actual):
        return [f"{path}: {len(actual)} experiences, expected {len(expected)}"]
    slack = advantage_slack(case)
    for j, (e, a) in enumerate(zip(expected, actual, strict=True)):
        if (src(a), a.eid.uid) != (src(e), e["uid"]):
            return [
                f"{path}[{j}]: is input #{src(a)} ({a.eid.uid}), expected #{src(e)} ({e['uid']})"
            ]
        for f, v, w in [(f, e[f], getattr(a, f)) for f in ("advantages", "returns")]:
            d = (
                []
                if v is None is w
                else num_diff(f"{path}[{j}].{f}", v, w, case.rtol, case.atol + slack[src(e)], nan)
            )
            if d or (v is None) != (w is None):
                return d or [f"{path}[{j}].{f}: is {'' if w is None else 'not '}None"]
    return []


def writes_diff(case: Case, expected: Any, actual: Any, nan: str) -> list[str]:
    """Same calls of write_async, in the same order, with the same experiences."""
    if len(expected) != len(actual):
        return [f"writes: {len(actual)} write_async calls, expected {len(expected)}"]
    pairs = enumerate(zip(expected, actual, strict=True))
    return [d for i, (x, y) in pairs for d in exps_diff(case, x, y, f"writes[{i}]", nan)]


def mapping_diff(case: Case, key: str, expected: Any, actual: Any) -> list[str]:
    """Same keys in the same order, with the same values."""
    diffs = [] if list(expected) == list(actual) else [f"{key}: {list(actual)} != {list(expected)}"]
    for x in set(expected) & set(actual):
        values, path = (expected[x], actual[x]), f"{key}/{x}"
        if key == "runs":
            diffs += exps_diff(case, *values, path)
        else:
            diffs += num_diff(path, *values, case.rtol, case.atol)
    return diffs


def output_diff(
    case: Case, key: str, expected: Any, actual: Any, nan: str, skip: Callable[[str], bool]
) -> list[str]:
    """One of the outputs, compared as its name says."""
    match key:
        case "groups" | "count":
            return [] if expected == actual else [f"{key}: {actual!r} != {expected!r}"]
        case "metrics":
            return metrics_diff(case, expected, actual, skip)
        case "writes":
            return writes_diff(case, expected, actual, nan)
        case "returned":
            return exps_diff(case, expected, actual, key, nan)
    if isinstance(expected, dict):
        return mapping_diff(case, key, expected, actual)
    return num_diff(key, expected, actual, case.rtol, case.atol, nan)


def compare(
    case: Case,
    out: dict[str, Any],
    nan: str = "match",
    skip: Callable[[str], bool] = lambda k: False,
) -> list[str]:
    """Golden outputs against the package's outputs, as far as the runner returns them."""
    return [
        difference
        for key, expected in case.outputs.items()
        if key in out
        for difference in output_diff(case, key, expected, out[key], nan, skip)
    ]
