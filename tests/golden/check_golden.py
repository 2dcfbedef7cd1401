#!/usr/bin/env python
"""Check the package `trinity_buffer` against golden vectors made from the real Trinity-RFT code.

    check_golden.py [--data DIR] [--family GLOB] [--case GLOB] [-v] [--json]

Prints a table family x class. Exit status: 0 all passed, 1 at least one failure, 2 package or data
could not be loaded. README.md says what is demanded where the reference is wrong.

CONTRACT - what the checker relies on

trinity_buffer.experience
    EID(batch=, task=, run=, step=, suffix=) with .uid "b/t/r/s/suffix", .tid "b/t", .rid "b/t/r",
    .sid "b/t/s".
    Experience(eid=, tokens=, prompt_length=, action_mask=, logprobs=, reward=, info=, chosen=,
    rejected=, ...): keyword names and inference rules of the reference (no action_mask: ones over
    the response; chosen + rejected: mask None). `info` is a plain dict that survives every copy
    the package makes; `advantages` and `returns` default to None.
trinity_buffer.algorithm
    ADD_STRATEGY ADVANTAGE_FN POLICY_LOSS_FN KL_FN ENTROPY_LOSS_FN SAMPLE_STRATEGY ALGORITHM_TYPE:
    .get(name) -> class.
    group_by(experiences, "task"|"run"|"step") -> ordered mapping id -> list (others: ValueError).
    aggregate_loss(values, mask, loss_agg_mode, normalizer=None), masked_mean(values, mask,
    axis=None) [masked_sum, masked_var, masked_whiten].
trinity_buffer.algorithm.compat.reference_kwargs(kind, name) -> dict
    Constructor kwargs that reproduce the reference's deviations, {} if there are none; kind:
    add_strategy | advantage_fn | policy_loss_fn | kl_fn | entropy_loss_fn. The checker calls
    cls(**{**reference_kwargs(kind, name), **case_kwargs}); the defaults are free to be *correct*.
AddStrategy
    cls(writer, **kw); await .add(experiences, step) -> (count, metrics); writer: async
    write_async(list), one call per group (step_wise_grpo: per run) in order of first appearance;
    nothing is written if the input is invalid.
    step_wise_grpo: calculate_group_advantage({rid: exp}) -> ({rid: float}, metrics) and
    broadcast_advantages({rid: [exp]}, scores) -> {rid: [exp]}.
Group advantages
    cls(**kw).process(experiences) -> (experiences, metrics), in the reference's (regrouped) order.
Trainer side
    cls(**kw)(batch) -> (batch, metrics); batch: MutableMapping[str, Tensor | list], verl key names
    (uid: list of str); results in batch["advantages"], batch["returns"] (clipb, clipv:
    "response_mask" too).
Policy losses
    cls(backend="verl", **kw)(logprob=, **{old_log_probs, ref_log_prob, response_mask, advantages,
    expert_mask, step}) -> (scalar loss, metrics); instance.select_keys -> the verl names it takes,
    and only those are passed.
KL
    cls(adaptive=, kl_coef=, target_kl=, horizon=), .kl_coef; calculate_kl(logprob, ref_logprob,
    old_logprob=None) -> Tensor; calculate_kl_loss(logprob, ref_logprob, response_mask,
    loss_agg_mode, old_logprob=None) -> (loss, metrics); apply_kl_penalty_to_reward(batch) ->
    (batch, metrics); update_kl_coef(current_kl: float | Tensor, batch_size).
Entropy
    cls(entropy_coef)(entropy, action_mask, expert_mask=None, loss_agg_mode="token-mean") ->
    (loss, metrics).
Errors
    What the reference refuses on purpose: same type or ValueError, from constructor or call.
    Invalid input on which it merely crashes: ValueError that names the culprit.

All but AddStrategy and ALGORITHM_TYPE: classmethod default_args() -> dict. ALGORITHM_TYPE classes:
the flags of the reference. Metrics map names to numbers; further names are allowed. A gradient that
is None equals zeros; the float dtype of results is free, values match within the file's tolerance.
"""

# ruff: noqa: E402, T201 - a command, which finds its folder before it imports

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":  # started as a file: the folder that holds `tests` is not on the path
    sys.path.insert(0, str(HERE.parents[1]))

from tests.golden.cases import Case, load_families
from tests.golden.expectations import judge
from tests.golden.runners import OUTCOMES, NotProvidedError, Skip, package, runner_of

Row = dict[str, Any]


def covered(family: str) -> bool:
    """Return whether there is a runner for this family."""
    return runner_of(family) is not None


def verdict(case: Case) -> tuple[list[str], str] | None:
    """Return the differences and the expectation that judged, None for a case left out."""
    try:
        return judge(case)
    except Skip:
        return None
    except (NotProvidedError, *OUTCOMES) as error:  # or a result of an unexpected shape
        return [f"cannot be checked: {type(error).__name__}: {error}"], "?"


def check_all(
    folder: Path, family: str, case_glob: str
) -> tuple[dict[tuple[str, str], Row], Counter[str]]:
    """Return a row per (family, class), and how often each expectation judged."""
    rows: dict[tuple[str, str], Row] = {}
    used: Counter[str] = Counter()
    for name, cases in load_families(folder, family, covered):
        for case in (c for c in cases if fnmatch.fnmatch(c.id, case_glob)):
            empty: Row = {"passed": 0, "failed": 0, "skipped": 0, "failures": []}
            row = rows.setdefault((name, case.label), empty)
            found = verdict(case)
            if found is None:
                row["skipped"] += 1
                continue
            differences, expectation = found
            used[expectation] += 1
            row["failed" if differences else "passed"] += 1
            if differences:
                failure = {"case": case.id, "expectation": expectation, "differences": differences}
                row["failures"].append(failure)
    return rows, used


def main(argv: Sequence[str] | None = None) -> int:
    """Check what the arguments select, print the table, return the exit status."""
    parser = argparse.ArgumentParser(description="Check trinity_buffer against golden vectors.")
    parser.add_argument("--data", type=Path, default=HERE, help="folder of .json / .json.gz files")
    for what in ("family", "case"):
        parser.add_argument(f"--{what}", default="*", metavar="GLOB", help=f"glob on {what} names")
    parser.add_argument("-v", action="store_true", help="print every difference")
    parser.add_argument("--json", action="store_true", help="machine readable report")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    try:
        package()
    except ImportError as error:
        print(f"cannot load trinity_buffer: {error}", file=sys.stderr)
        return 2
    rows, used = check_all(args.data, args.family, args.case)
    if not rows:
        print(f"no cases found in {args.data}", file=sys.stderr)
        return 2
    total = {k: sum(r[k] for r in rows.values()) for k in ("passed", "failed", "skipped")}
    if args.json:
        listed = [{"family": f, "class": c, **row} for (f, c), row in rows.items()]
        print(json.dumps({"total": total, "expectations": used, "rows": listed}, indent=1))
    else:
        report(rows, total, verbose=args.v)
    return int(total["failed"] > 0)


def report(rows: dict[tuple[str, str], Row], total: Row, *, verbose: bool) -> None:
    """Print the table; if ``verbose``, every difference too."""
    print(f"{'family':33}{'class':22}{'passed':>7}{'failed':>7}{'skipped':>8}  first difference")
    for (family, label), row in rows.items():
        failures = row["failures"]
        first = f"{failures[0]['case']}: {failures[0]['differences'][0]}" if failures else ""
        counts = f"{row['passed']:7}{row['failed']:7}{row['skipped']:8}"
        print(f"{family:33}{label[-20:]:22}{counts}  {first[:150]}")
        for failure in failures if verbose else []:
            print(f"    FAIL {failure['case']}  ({failure['expectation']})")
            print("        ", *failure["differences"], sep="\n         ")
    print(f"{'total':55}{total['passed']:7}{total['failed']:7}{total['skipped']:8}")


if __name__ == "__main__":
    sys.exit(main())
