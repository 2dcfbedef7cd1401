"""Verdicts on strategies and group advantages where the reference is wrong, or drew lots."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.golden.cases import Case
from tests.golden.comparing import advantage_slack, exps_diff, flat, metrics_diff, num_diff, src
from tests.golden.runners import run
from tests.golden.verdicts import either, plain, refused, unexpected


def check_nonfinite_reward(case: Case) -> list[str]:
    """Refused, or the groups without the bad reward are as in the reference."""
    out, bad = (
        run(case),
        {i for g in case.groups().values() if not np.isfinite(case.rewards(g)).all() for i in g},
    )
    if out.error:
        return refused(out, "reward")
    want = {src(e): e for e in flat(case.outputs) if src(e) not in bad and not e.get("copy")}
    got = {
        src(e): e for e in flat(out.value) if src(e) in want and e.eid.uid == want[src(e)]["uid"]
    }
    return exps_diff(
        case,
        [want[i] for i in sorted(want)],
        [got[i] for i in sorted(got)],
        "groups without the bad reward",
    )


def check_ill_conditioned_filter(case: Case) -> list[str]:
    """Groups of equal rewards may be kept or dropped, the others must match."""
    out = run(case)
    equal = {i for g in case.groups().values() if len(set(case.rewards(g))) == 1 for i in g}
    if out.error:
        return unexpected(out)
    expected, actual = (
        [e for e in flat(x) if src(e) not in equal] for x in (case.outputs, out.value)
    )
    return exps_diff(case, expected, actual, "unequal groups")


def check_duplicate_informative(case: Case) -> list[str]:
    """All informative groups once, then whole copies of them, evenly, up to the input size."""
    strict = "bug:task_id_collision" in case.tags or case.id.endswith("str_tasks_degenerate")
    out, groups, thr = (
        run(case, compat=not strict),
        case.groups(),
        case.kwargs.get("variance_threshold", 0.0),
    )
    if out.error:
        return unexpected(out)
    owner, total = {i: t for t, g in groups.items() for i in g}, len(case.specs)
    informative = {
        t
        for t, g in groups.items()
        if np.var(case.rewards(g)) > thr and len(set(case.rewards(g))) > 1
    }
    optional = {t for t, g in groups.items() if "ill_conditioned" in case.tags and len(g) > 1}
    written, uid = (
        flat(out.value),
        ["{batch}/{task}/{run}/{step}/{suffix}".format(**s["eid"]) for s in case.specs],
    )
    first, extra = ([e for e in written if (e.eid.uid == uid[src(e)]) is x] for x in (True, False))
    chosen = {owner[src(e)] for e in first}
    if not informative <= chosen <= informative | optional or sorted(map(src, first)) != sorted(
        i for t in chosen for i in groups[t]
    ):
        return [
            f"originals written: groups {sorted(chosen)}, informative are {sorted(informative)}"
        ]
    if out.value["count"] != len(written) or (
        chosen and not total <= len(written) < total + max(len(groups[t]) for t in chosen)
    ):
        return [f"count {out.value['count']}, {len(written)} experiences written, target {total}"]
    if any(
        e.advantages is not None
        or [e.reward, list(e.tokens)] != [case.specs[src(e)][k] for k in ("reward", "tokens")]
        for e in written
    ):
        return ["tokens / reward / advantages changed (this strategy only filters)"]
    copies, tids, diffs = copied_groups(extra, owner, groups, chosen)
    if strict and (len(set(tids)) < len(tids) or not groups.keys().isdisjoint(tids)):
        diffs.append(f"task ids of copies collide: {tids} vs {sorted(groups)}")
    if chosen and max(copies.values()) - min(copies.values()) > 1:
        diffs.append(f"copies are not even: {dict(copies)}")
    return diffs


def copied_groups(
    extra: list[Any], owner: dict[int, Any], groups: dict[Any, list[int]], chosen: Any
) -> tuple[Counter[Any], list[str], list[str]]:
    """Return how often each group was copied, the copies' task ids, and what is not whole."""
    pos, copies = 0, Counter(dict.fromkeys(chosen, 0))
    tids: list[str] = []
    while pos < len(extra):
        t = owner[src(extra[pos])]
        block = extra[pos : pos + len(groups[t])]
        pos, copies[t] = pos + len(block), copies[t] + 1
        tids.append(block[0].eid.tid)
        if len({e.eid.tid for e in block}) != 1 or (
            sorted(map(src, block)) != groups[t] and pos < len(extra)
        ):
            return copies, tids, [f"copy {len(tids)} is not the whole group {t} under one task id"]
    return copies, tids, []


def check_grpo_duplicates(case: Case) -> list[str]:
    """The surviving groups match; then a whole copy of one of them per skipped group."""
    out, keep = run(case), [e for e in case.outputs["returned"] if not e.get("copy")]
    if out.error:
        return unexpected(out)
    extra, diffs = (
        out.value["returned"][len(keep) :],
        metrics_diff(case, case.outputs["metrics"], out.value["metrics"]),
    )
    diffs += exps_diff(case, keep, out.value["returned"][: len(keep)], "surviving groups")
    adv = {src(e): e["advantages"] for e in keep}
    valid, pos, copies = [g for g in case.groups().values() if g[0] in adv], 0, 0
    while pos < len(extra):
        pos, copies = (
            pos
            + next(
                (len(g) for g in valid if g == [src(e) for e in extra[pos : pos + len(g)]]),
                len(extra) + 1,
            ),
            copies + 1,
        )
    want = len(case.groups()) - len(valid) if valid else 0
    diffs += [
        d
        for e in extra
        if src(e) in adv
        for d in num_diff("copy.advantages", adv[src(e)], e.advantages, 1e-4, 1e-5)
    ]
    return diffs + (
        []
        if (copies, pos) == (want, len(extra))
        else [f"copies are not {want} whole surviving groups: {[src(e) for e in extra]}"]
    )


def fits_one(
    case: Case, out: SimpleNamespace, options: Callable[[list[int]], Iterable[Any]]
) -> list[str]:
    """The scores of every group equal one of its options, times the mask."""
    got, slack = {src(e): e for e in flat(out.value)}, advantage_slack(case)
    for tid, idx in case.groups().items():
        if not any(
            all(
                not num_diff(
                    "", float(x) * got[i].action_mask, getattr(got[i], f), 1e-4, 1e-5 + slack[i]
                )
                for i, x in zip(idx, scores, strict=False)
                for f in ("advantages", "returns")
            )
            for scores in options(idx)
        ):
            return [
                f"group {tid}: rewards {case.rewards(idx).tolist()} -> "
                f"advantages {[got[i].advantages.tolist() for i in idx]}"
            ]
    return []


def spread(name: str, values: list[Any]) -> dict[str, Any]:
    return {
        f"group_advantages/{name}/{k}": f(values)
        for k, f in (("mean", np.mean), ("max", max), ("min", min))
        if values
    }


def check_rec(case: Case) -> list[str]:
    """Where the reference crashes or draws lots: the formula.

    Single member: A = r, or 0; balance: some choice of the (neg - pos) surplus negatives has A = 0,
    mean and population std over the rest.
    """
    out, eps, norm = (
        run(case),
        case.kwargs.get("epsilon", 1e-6),
        case.kwargs.get("std_normalize", False),
    )
    if out.error or list(map(src, out.value["returned"])) != [
        i for g in case.groups().values() for i in g
    ]:
        return unexpected(out) or ["returned: not the input regrouped by task"]
    fracs, ill = [], "ill_conditioned" in case.tags

    def options(idx: list[int]) -> Any:
        r, n = case.rewards(idx), len(idx)
        pos = r >= np.float64(r.astype(np.float32).mean()) - 1e-7
        surplus = (
            max(0, n - 2 * int(pos.sum())) if case.kwargs.get("drop") == "balance" and n > 1 else 0
        )
        fracs.append(surplus / n)
        found = [r, np.zeros(n)] if n == 1 else [np.zeros(n)] * ill
        for drop in itertools.combinations(np.flatnonzero(~pos), surplus):
            k = ~np.isin(np.arange(n), drop)
            mean, std = (r[k].mean(), r[k].std()) if k.sum() > 1 else (0.0, 1.0)
            found.append(np.where(k, (r - mean) / (std + eps if norm else 1.0), 0.0))
        return found

    diffs = fits_one(case, out, options)
    return diffs or metrics_diff(
        case, {} if ill else spread("drop_balance", fracs), out.value["metrics"]
    )


def check_rank_ties(case: Case) -> list[str]:
    """Equal likelihoods: any order of the tied ranks, or their average, is right."""
    out, p, eps = run(case), case.kwargs.get("rank_penalty", 0.25), case.kwargs.get("epsilon", 1e-6)

    def options(idx: list[int]) -> Any:
        r, n = case.rewards(idx), len(idx)
        for ranks in [*itertools.permutations(range(n)), [(n - 1) / 2] * n]:
            r2 = r * (1 - np.asarray(ranks) / n * p)
            yield ((r if case.family == "advantage_grouped" else r2) - r2.mean()) / (
                r2.std(ddof=1) + eps
            )

    return either(lambda: plain(case, out), lambda: unexpected(out) or fits_one(case, out, options))


def check_opmd_add_metrics(case: Case) -> list[str]:
    """The reference loses its group_baseline metric; its mean, max and min must be there."""
    tau, rewards = case.kwargs.get("tau", 1.0), [case.rewards(g) for g in case.groups().values()]
    mean = case.kwargs.get("opmd_baseline", "mean") == "mean"
    base = [
        0.0
        if len(r) == 1
        else r.mean()
        if mean
        else tau * (np.logaddexp.reduce(r / tau) - math.log(len(r)))
        for r in rewards
    ]
    return plain(case.expect(**{**case.outputs, "metrics": spread("group_baseline", base)}))
