"""What is demanded where matching the reference would mean demanding a bug."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable
from typing import Any

from tests.golden.cases import Case
from tests.golden.runners import run
from tests.golden.verdicts import either, finite, plain, refused, unexpected
from tests.golden.verdicts_of_groups import (
    check_duplicate_informative,
    check_grpo_duplicates,
    check_ill_conditioned_filter,
    check_nonfinite_reward,
    check_opmd_add_metrics,
    check_rank_ties,
    check_rec,
)
from tests.golden.verdicts_of_losses import (
    adapted,
    check_adaptive_penalty,
    check_aggregate,
    check_api,
    check_clip_boundary,
    check_jsd,
    check_masked_garbage,
    check_missing_reference,
    check_mix_chord_missing_kind,
    check_rec_gspo_weight,
    check_whiten_degenerate,
)


def _nan(c: Case) -> bool:
    return any(
        '"NaN"' in json.dumps(c.raw.get("outputs", {}).get(k))
        for k in ("writes", "returned", "loss")
    )


def _single(c: Case) -> bool:
    return any(len(g) == 1 for g in c.groups().values())


def _or_refused(pattern: str = "", **kw: Any) -> Callable[[Case], list[str]]:
    return lambda c: either(lambda: plain(c, **kw), lambda: refused(run(c), pattern))


Expectation = tuple[str, str, str, Callable[[Case], Any] | None, Callable[[Case], list[str]], str]

EXPS, LOSS, TRAINER = "add_strategy advantage_grouped", "policy_loss_*", "advantage_trainer"
# Cases in which matching the reference would mean demanding a bug, a random draw or a rounding
# accident: name, families, classes (globs), further condition, verdict, what is demanded. The first
# match decides, others must match (`plain`).
EXPECTATIONS: list[Expectation] = [
    (
        "none_reward",
        EXPS,
        "*",
        lambda c: c.raises and any(x["reward"] is None for x in c.specs),
        lambda c: refused(run(c), "reward"),
        "ValueError naming reward, nothing written",
    ),
    (
        "no_mask_or_logprobs",
        EXPS,
        "*",
        lambda c: c.raises and c.id.endswith(("dpo_no_action_mask", "no_logprobs")),
        lambda c: refused(run(c), "mask|log_?prob"),
        "ValueError naming the mask or the logprobs, nothing written",
    ),
    (
        "nonfinite_reward",
        EXPS,
        "*",
        lambda c: "edge:nonfinite" in c.tags,
        check_nonfinite_reward,
        "other groups match, or ValueError naming reward",
    ),
    (
        "ill_conditioned_filter",
        EXPS,
        "*",
        lambda c: (
            "ill_conditioned" in c.tags
            and (c.registry == "reward_variance" or c.kwargs.get("std_threshold") is not None)
        ),
        check_ill_conditioned_filter,
        "groups of equal rewards may be kept or dropped",
    ),
    (
        "duplicate_informative",
        EXPS,
        "duplicate_informative",
        None,
        check_duplicate_informative,
        "invariants, not draws; unique task ids by default",
    ),
    (
        "grpo_duplicates",
        EXPS,
        "grpo",
        lambda c: c.kwargs.get("duplicate_experiences") and "std_threshold" in c.kwargs,
        check_grpo_duplicates,
        "invariants, not draws",
    ),
    (
        "rec_single_or_drop",
        EXPS,
        "rec",
        lambda c: c.kwargs.get("drop") == "balance" or ("drop" not in c.kwargs and _single(c)),
        check_rec,
        "formula; single member A = r or 0; any choice of dropped negatives",
    ),
    (
        "opmd_add_metrics",
        "add_strategy",
        "opmd",
        lambda c: not c.raises,
        check_opmd_add_metrics,
        "group_baseline metric present",
    ),
    (
        "rank_ties",
        EXPS,
        "*",
        lambda c: (
            "rank_ties" in c.tags and (c.registry == "correct_bias" or c.kwargs.get("rank_penalty"))
        ),
        check_rank_ties,
        "any order of tied ranks",
    ),
    (
        "zero_std_eps0",
        EXPS,
        "*",
        _nan,
        lambda c: plain(c, nan="zero"),
        "epsilon 0 and equal rewards: 0 instead of NaN",
    ),
    (
        "asymre_single_metric",
        EXPS,
        "asymre",
        lambda c: not c.raises and _single(c),
        lambda c: plain(c, skip=lambda k: "reward_mean" in k),
        "reward_mean not compared if a group has one member",
    ),
    (
        "opmd_unknown_baseline",
        EXPS,
        "opmd",
        lambda c: c.kwargs.get("opmd_baseline") == "anything_else",
        _or_refused("baseline"),
        "logavgexp as the reference, or ValueError",
    ),
    (
        "whiten_degenerate",
        TRAINER,
        "*",
        lambda c: c.raises and "mask" in c.raises["message"],
        check_whiten_degenerate,
        "fewer than two valid tokens: ValueError or finite",
    ),
    (
        "jsd_sign",
        TRAINER,
        "jsd",
        lambda c: c.kwargs.get("lambda_coef", 0.5) > 0,
        check_jsd,
        "lambda > 0: sign, mask, finiteness instead of values",
    ),
    (
        "clip_frac_no_tokens",
        TRAINER,
        "clip[bv]",
        None,
        lambda c: plain(
            c, skip=lambda k: k.startswith("frac_clipped_") and c.outputs["metrics"][k] == 1.0
        ),
        "frac_clipped_pos/neg free where 1.0",
    ),
    ("aggregate", "aggregate", "*", None, check_aggregate, "optional helpers only if exported"),
    (
        "garbage_at_masked",
        LOSS + " kl_fn",
        "*",
        lambda c: "edge:nonfinite_at_masked" in c.tags and not c.raises,
        check_masked_garbage,
        "gradient finite and 0 at masked positions",
    ),
    (
        "clip_boundary",
        LOSS,
        "*",
        lambda c: "edge:clip_boundary" in c.tags and not c.raises,
        check_clip_boundary,
        "match, else bounded",
    ),
    (
        "rec_gspo_weight",
        LOSS,
        "rec",
        lambda c: c.raises and c.raises["type"] == "UnboundLocalError",
        check_rec_gspo_weight,
        "sequence ratio defined for every clip_mode",
    ),
    (
        "mix_chord_missing_kind",
        LOSS,
        "mix_chord",
        lambda c: not c.raises and len(set(c.inputs["expert_mask"].tolist())) == 1,
        check_mix_chord_missing_kind,
        "missing kind contributes 0, its metrics are 0 or absent",
    ),
    (
        "mix_entropy_all_expert",
        "entropy_loss_fn",
        "mix",
        _nan,
        lambda c: plain(c.expect(loss=0.0, metrics={"entropy_loss": 0.0}, grad_entropy=None)),
        "0 instead of NaN",
    ),
    (
        "mix_zero_division",
        LOSS,
        "mix",
        lambda c: c.raises and c.raises["type"] == "ZeroDivisionError",
        lambda c: either(
            lambda: refused(run(c)),
            lambda: unexpected(run(c)) or finite("loss", run(c).value["loss"]),
        ),
        "ValueError, or a finite loss",
    ),
    (
        "sft_phi_cutoff_0",
        LOSS,
        "sft_phi",
        lambda c: c.kwargs.get("cutoff_prob") == 0.0,
        lambda c: refused(run(c), "cutoff"),
        "ValueError naming cutoff",
    ),
    (
        "dpo_odd_batch",
        LOSS + " combined_loss",
        "dpo",
        lambda c: len(c.inputs["logprob"]) % 2,
        _or_refused(),
        "as the reference, or ValueError",
    ),
    (
        "adaptive_kl_float",
        "kl_fn",
        "*",
        lambda c: c.raises and c.method == "update_kl_coef",
        lambda c: plain(
            c.expect(kl_coef_after=adapted(c, c.inputs["current_kl"], c.inputs["batch_size"]))
        ),
        "coef *= 1 + clip(kl / target - 1, -.2, .2) * rows / horizon",
    ),
    (
        "adaptive_kl_penalty",
        "kl_fn",
        "*",
        lambda c: c.raises and c.id.endswith("/adaptive"),
        check_adaptive_penalty,
        "the same formula",
    ),
    (
        "kl_missing_reference",
        "kl_fn",
        "*",
        lambda c: c.raises and c.id.endswith("/no_ref"),
        check_missing_reference,
        "no penalty, or ValueError naming ref_log_prob",
    ),
    (
        "kl_none_bad_agg",
        "kl_fn",
        "none",
        lambda c: "token-sum/" in c.id,
        _or_refused(),
        "0, or ValueError",
    ),
    (
        "kl_overflow",
        "kl_fn",
        "*",
        lambda c: "edge:overflow" in c.tags,
        lambda c: plain(c, nan="free"),
        "inf or huge; NaN gradients are free",
    ),
    (
        "api",
        "api",
        "*",
        None,
        check_api,
        "default_args may have more entries; five flags; select_keys as a set",
    ),
]


def applies(
    case: Case, families: str, classes: str, condition: Callable[[Case], Any] | None
) -> bool:
    """Return whether an expectation is about this case."""
    return bool(
        any(fnmatch.fnmatch(case.family, family) for family in families.split())
        and fnmatch.fnmatch(case.label, classes)
        and (condition is None or condition(case))
    )


def judge(case: Case) -> tuple[list[str], str]:
    """Return the differences, and the name of the expectation that found them."""
    for name, families, classes, condition, check, _ in EXPECTATIONS:
        if applies(case, families, classes, condition):
            return check(case), name
    return plain(case), "match"
