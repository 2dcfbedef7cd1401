"""Verdicts on batches and losses where the reference is wrong."""

from __future__ import annotations

import torch

from tests.golden.cases import Case
from tests.golden.comparing import compare, num_diff
from tests.golden.runners import call_loss, grads, leaf, package, run
from tests.golden.verdicts import either, finite, plain, refused, unexpected


def check_whiten_degenerate(case: Case) -> list[str]:
    """Fewer than two valid tokens: refused, or finite there."""
    out = run(case)
    return (
        refused(out)
        if out.error
        else finite("advantages", out.value["advantages"][case.inputs["response_mask"].bool()])
    )


def check_jsd(case: Case) -> list[str]:
    """The reference's sampled-token JSD has the wrong sign.

    Default constructor: finite, 0 at masked tokens, never positive where the student is *more*
    confident than the teacher. A compat option, if offered, must match.
    """

    def sane() -> list[str]:
        out, m = run(case, compat=False), case.inputs["response_mask"].bool()
        if out.error:
            return unexpected(out)
        a, gap = (
            out.value["advantages"],
            case.inputs["old_log_probs"] - case.inputs["teacher_logprobs"],
        )
        diffs = finite("advantages", a, out.value["returns"]) + [
            f"metrics/{k}: missing"
            for k in case.outputs["metrics"]
            if k not in out.value["metrics"]
        ]
        return (
            diffs
            + num_diff("advantages at masked tokens", None, a, 0, 0, keep=~m)
            + ["advantages: positive for tokens on which the student is more confident"]
            * bool((a[m & (gap > 1e-6)] > 1e-7).any())
        )

    if (
        case.kwargs.get("lambda_coef", 0.5) == 1
    ):  # reverse KL weighted the wrong way round: either is accepted
        return either(lambda: plain(case), sane)
    return sane() + (plain(case) if package().reference_kwargs("advantage_fn", "jsd") else [])


def check_masked_garbage(case: Case) -> list[str]:
    """NaN / Inf at masked positions: loss and metrics match, gradient finite and 0 there."""
    out = run(case)
    return unexpected(out) or finite("grad_logprob", out.value["grad_logprob"]) + compare(
        case, out.value, nan="zero"
    )


def check_clip_boundary(case: Case) -> list[str]:
    """Ratio exactly on a limit: match, or gradient equal off the limits and loss bounded."""
    out, x = run(case), case.inputs
    strict = plain(case, out)
    if not strict or out.error or "old_logprob" not in x:
        return strict
    bound = (
        4 * len(x["logprob"]) * float(x["advantages"].abs().max() * (4 + x["logprob"].abs().max()))
    )
    far = abs(float(out.value["loss"].detach()) - float(case.outputs["loss"])) > bound
    inner = (x["logprob"] - x["old_logprob"]).abs() < 1e-12
    return (
        num_diff(
            "grad_logprob off the limits",
            case.outputs["grad_logprob"],
            out.value["grad_logprob"],
            case.rtol,
            case.atol,
            keep=inner,
        )
        + strict[:far]
    )


def check_rec_gspo_weight(case: Case) -> list[str]:
    """The reference crashes (sequence ratio undefined).

    Right: weight A by exp(masked mean log-ratio) of its row; since that ratio is positive this
    equals weight="none" on the scaled advantages.
    """
    x, m = case.inputs, case.inputs["action_mask"].to(case.inputs["logprob"].dtype)
    d = torch.where(m != 0, x["logprob"] - x["old_logprob"], torch.zeros_like(m))
    seq = torch.exp((d * m).sum(-1, keepdim=True) / (m.sum(-1, keepdim=True) + 1e-8))
    loss, metrics, lp = call_loss(
        "rec", {**case.kwargs, "weight": "none"}, {**x, "advantages": x["advantages"] * seq}
    )
    return plain(case.expect(loss=loss.detach(), metrics=metrics, grad_logprob=grads(loss, lp)[0]))


def check_mix_chord_missing_kind(case: Case) -> list[str]:
    """A micro-batch without usual (or expert) rows: that part contributes 0.

    The reference may return NaN. Its metrics are 0 or absent. The other part comes from the
    package's own ppo / sft losses.
    """
    x, kw, ex, lp = (
        case.inputs,
        case.kwargs,
        case.inputs["expert_mask"],
        leaf(case.inputs["logprob"]),
    )
    mu, mode, ng = (
        case.outputs["metrics"]["mu"],
        kw.get("loss_agg_mode", "token-mean"),
        kw.get("ngpus_trainer", 1),
    )
    mini, micro = kw.get("ppo_mini_batch_size", 1), kw.get("ppo_micro_batch_size_per_gpu", 1)
    weight = mini // ng / len(lp) if kw.get("use_dynamic_bsz") else mini // micro
    sft = "sft_phi" if kw.get("enable_phi_function", True) else "sft"
    name, args, share, size, gone = (
        (sft, {}, mu, "expert", "usual/")
        if ex.all()
        else ("ppo", {"clip_range": kw["clip_range"]}, 1 - mu, "usual", "expert/")
    )
    part = call_loss(
        name,
        {**args, "loss_agg_mode": mode},
        {k: v for k, v in x.items() if k not in ("expert_mask", "step")},
        logprob=lp,
    )[0]
    want = share * part * len(lp) * weight / (kw.get(f"train_batch_size_{size}", 1) // ng)
    metrics = {
        k: v
        for k, v in {**case.outputs["metrics"], "loss": want.detach()}.items()
        if not k.startswith(gone)
    }
    out = run(case)
    return plain(
        case.expect(loss=want.detach(), grad_logprob=grads(want, lp)[0], metrics=metrics), out
    ) + [
        f"metrics/{k}: {v}"
        for k, v in out.value.get("metrics", {}).items()
        if k.startswith(gone) and v != 0
    ]


def adapted(case: Case, kl: float, rows: int) -> float:
    k = case.kwargs
    change = min(max(kl / k["target_kl"] - 1, -0.2), 0.2) * rows / k["horizon"]
    return float(k["kl_coef"] * (1 + change))


def check_adaptive_penalty(case: Case) -> list[str]:
    """Adaptive coefficient in the reward penalty: formula, with the package's own calculate_kl."""
    k, x, m = case.kwargs, case.inputs, case.inputs["response_mask"].float()
    kl = (
        package()
        .make("KL_FN", case.registry, k)
        .calculate_kl(x["old_log_probs"], x["ref_log_prob"])
        * m
    )
    now = float((kl.sum(-1) / (m.sum(-1) + 1e-8)).mean())
    return plain(
        case.expect(
            token_level_rewards=x["token_level_scores"] - k["kl_coef"] * kl,
            kl_coef_after=adapted(case, now, len(m)),
            metrics={"kl": now, "kl_coef": k["kl_coef"]},
        )
    )


def check_missing_reference(case: Case) -> list[str]:
    """Without a reference: rewards = scores and kl 0, or refused, naming ref_log_prob."""
    out = run(case)
    case.expect(
        token_level_rewards=case.inputs["token_level_scores"], metrics={"kl": 0.0, "kl_coef": 0.0}
    )
    return either(lambda: plain(case, out), lambda: refused(out, "ref_log_?prob"))


def check_aggregate(case: Case) -> list[str]:
    """Optional functions if exported; masked_whiten at valid tokens if others hold NaN."""
    out, m, diffs = run(case), case.inputs["mask"].bool(), []
    for k, e in list(case.outputs.items()):
        if isinstance(e, dict) and "raises" in e:
            diffs += [f"{k}: no error, expected ValueError"] * (k in out.value)
            del case.outputs[k]
        elif (
            k.startswith("masked_")
            and k not in out.value
            and hasattr(package().algo, k.partition("/")[0])
        ):
            diffs += [f"{k}: raised ValueError"]
        elif (
            k.startswith("masked_whiten")
            and k in out.value
            and "edge:nonfinite_at_masked" in case.tags
        ):
            case.outputs[k], out.value[k] = e[m], out.value[k][m]
    return unexpected(out) or diffs + compare(case, out.value)


def check_api(case: Case) -> list[str]:
    """default_args may have more entries; five flags."""
    out, e, diffs = run(case), case.outputs, []
    if out.error:
        return unexpected(out)
    entries = [
        (what, k, v) for what in ("default_args", "flags") for k, v in e.get(what, {}).items()
    ]
    for what, k, v in entries:
        a = out.value[what].get(k, "<missing>") if k != "use_rollout" else v
        diffs += [] if a == v else [f"{what}/{k}: {a!r} != {v!r}"]
    keys, expected = out.value.get("select_keys", []), e.get("select_keys_verl", [])
    return diffs + ([] if set(keys) == set(expected) else [f"select_keys: {keys} != {expected}"])
