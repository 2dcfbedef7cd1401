"""From a case to what the package makes of it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.golden.cases import Case
from tests.golden.comparing import src
from trinity_buffer.experience import Experience

AGG_MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
VERL_NAMES = {
    "old_logprob": "old_log_probs",
    "ref_logprob": "ref_log_prob",
    "action_mask": "response_mask",
}


OUTCOMES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a part may raise: compared like any other outcome."""


Runner = Callable[[Case, bool, list[list[Any]]], dict[str, Any]]


class Skip(Exception):  # noqa: N818 - no error: the case is left out
    """The case cannot be expressed through the contract."""


class NotProvidedError(Exception):
    """The package lacks something the contract demands."""


class Package:
    def __init__(self) -> None:
        self.algo, exp, compat = (
            importlib.import_module("trinity_buffer." + m)
            for m in ("algorithm", "experience", "algorithm.compat")
        )
        self.EID, self.Experience, self.reference_kwargs = (
            exp.EID,
            exp.Experience,
            compat.reference_kwargs,
        )

    def cls(self, registry: str, name: str) -> Any:
        try:
            found = getattr(self.algo, registry).get(name)
        except OUTCOMES as e:
            raise NotProvidedError(f"{registry}.get({name!r}): {type(e).__name__}: {e}") from e
        if found is None:
            raise NotProvidedError(f"{registry}.get({name!r}) is None")
        return found

    def make(
        self,
        registry: str,
        name: str,
        kwargs: dict[str, Any],
        *args: Any,
        compat: bool = True,
        **fixed: Any,
    ) -> Any:
        extra = self.reference_kwargs(registry.lower(), name) if compat else {}
        return self.cls(registry, name)(*args, **fixed, **{**extra, **kwargs})

    def experiences(self, specs: Sequence[dict[str, Any]]) -> list[Experience]:
        def tensor(s: dict[str, Any], key: str, dtype: str) -> Tensor | None:
            return None if s.get(key) is None else torch.tensor(s[key], dtype=getattr(torch, dtype))

        return [
            self.Experience(
                eid=self.EID(**s["eid"]),
                tokens=torch.tensor(s.get("tokens", [1, 2]), dtype=torch.int32),
                reward=s.get("reward"),
                prompt_length=s.get("prompt_length", 1),
                action_mask=tensor(s, "action_mask", s.get("action_mask_dtype", "bool")),
                logprobs=tensor(s, "logprobs", "float32"),
                info={**s.get("info", {}), "__idx__": i},
                **{k: tensor(s, k, "int32") for k in ("chosen", "rejected") if k in s},
            )
            for i, s in enumerate(specs)
        ]


@cache
def package() -> Package:
    """Return the package under test."""
    return Package()


def leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_(True)


def grads(loss: Tensor, *leaves: Tensor) -> list[Tensor | None]:
    if loss.requires_grad:
        loss.backward()
    return [x.grad for x in leaves]


def clone(inputs: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, torch.Tensor) else list(v) for k, v in inputs.items()}


def call_loss(
    name: str,
    kwargs: dict[str, Any],
    inputs: dict[str, Any],
    compat: bool = True,
    logprob: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any], Tensor]:
    """Return loss, metrics and leaf logprob; the call uses the verl names of select_keys."""
    lp = leaf(inputs["logprob"]) if logprob is None else logprob
    fn = package().make("POLICY_LOSS_FN", name, kwargs, compat=compat, backend="verl")
    batch = {VERL_NAMES.get(k, k): v for k, v in inputs.items() if k != "logprob"}
    return (*fn(logprob=lp, **{k: batch[k] for k in fn.select_keys if k in batch}), lp)


def run_add_strategy(case: Case, compat: bool, writes: list[list[Any]]) -> dict[str, Any]:
    async def write_async(exps: list[Experience]) -> None:
        writes.append(list(exps))

    strategy = package().make(
        "ADD_STRATEGY",
        case.registry,
        case.kwargs,
        SimpleNamespace(write_async=write_async),
        compat=compat,
    )
    count, metrics = asyncio.run(strategy.add(package().experiences(case.specs), step=1))
    return {"count": int(count), "writes": writes, "metrics": metrics}


def run_group_by(case: Case, compat: bool, writes: list[list[Any]]) -> dict[str, Any]:
    groups = package().algo.group_by(package().experiences(case.specs), case.kwargs["id_type"])
    return {"groups": [[k, [src(e) for e in v]] for k, v in groups.items()]}


def run_step_wise_methods(case: Case, compat: bool, writes: list[list[Any]]) -> dict[str, Any]:
    st = package().make(
        "ADD_STRATEGY", "step_wise_grpo", case.kwargs, SimpleNamespace(), compat=compat
    )
    runs = dict(package().algo.group_by(package().experiences(case.specs), "run"))
    scores, metrics = st.calculate_group_advantage({k: v[-1] for k, v in runs.items()})
    return {
        "scores": dict(scores),
        "metrics": metrics,
        "runs": dict(st.broadcast_advantages(runs, scores)),
    }


def run_advantage_grouped(case: Case, compat: bool, writes: list[list[Any]]) -> dict[str, Any]:
    returned, metrics = (
        package()
        .make("ADVANTAGE_FN", case.registry, case.kwargs, compat=compat)
        .process(package().experiences(case.specs))
    )
    return {"returned": list(returned), "metrics": metrics}


def run_advantage_trainer(case: Case, compat: bool, writes: list[list[Any]]) -> dict[str, Any]:
    batch, metrics = package().make("ADVANTAGE_FN", case.registry, case.kwargs, compat=compat)(
        clone(case.inputs)
    )
    return {**{k: batch[k] for k in ("advantages", "returns", "response_mask")}, "metrics": metrics}


def run_policy_loss(case: Case, compat: bool, writes: list[list[Any]]) -> dict[str, Any]:
    if "logprob" not in case.inputs:  # the reference already refused the constructor
        package().make("POLICY_LOSS_FN", case.registry, case.kwargs, compat=compat, backend="verl")
        return {}
    loss, metrics, lp = call_loss(case.registry, case.kwargs, case.inputs, compat)
    return {"loss": loss, "metrics": metrics, "grad_logprob": grads(loss, lp)[0]}


def run_policy_loss_units(case: Case, compat: bool, writes: list[list[Any]]) -> dict[str, Any]:
    """Run the mu schedule through mix_chord; sft_phi and sapo cover phi and the soft gate."""
    if case.label != "mu_schedule_function":
        raise Skip
    x = torch.full((2, 1), -0.5, dtype=torch.float64)
    inp = {
        "logprob": x,
        "old_logprob": x,
        "action_mask": x < 0,
        "advantages": x,
        "expert_mask": torch.tensor([True, False]),
    }
    return {
        "mu": [
            call_loss(
                "mix_chord",
                {"clip_range": 0.2, **case.kwargs},
                {**inp, "step": torch.tensor([i, i])},
                compat,
            )[1]["mu"]
            for i in case.inputs["global_step"]
        ]
    }


def run_kl_fn(case: Case, compat: bool, writes: list[list[Any]]) -> dict[str, Any]:
    fn, x = package().make("KL_FN", case.registry, case.kwargs, compat=compat), case.inputs
    if case.method == "apply_kl_penalty_to_reward":
        batch, metrics = fn.apply_kl_penalty_to_reward(clone(x))
        return {
            "token_level_rewards": batch["token_level_rewards"],
            "metrics": metrics,
            "kl_coef_after": fn.kl_coef,
        }
    if case.method == "update_kl_coef":
        kl = (
            torch.tensor(x["current_kl"], dtype=torch.float64)
            if x["current_kl_is_tensor"]
            else x["current_kl"]
        )
        fn.update_kl_coef(kl, x["batch_size"])
        return {"kl_coef_after": float(fn.kl_coef)}
    if case.method is None:  # constructor only
        return {}
    lp = leaf(x["logprob"])
    args = {"logprob": lp, "ref_logprob": x["ref_logprob"], "old_logprob": x.get("old_logprob")}
    if case.method == "calculate_kl":
        kl = fn.calculate_kl(**args)
        return {"kl": kl, "grad_logprob_of_sum": grads(kl.sum(), lp)[0]}
    loss, metrics = fn.calculate_kl_loss(
        **args, response_mask=x["response_mask"], **case.call_kwargs
    )
    return {"loss": loss, "metrics": metrics, "grad_logprob": grads(loss, lp)[0]}


def run_entropy(case: Case, compat: bool, writes: list[list[Any]]) -> dict[str, Any]:
    en = leaf(case.inputs["entropy"])
    fn = package().make("ENTROPY_LOSS_FN", case.registry, case.kwargs, compat=compat)
    loss, metrics = fn(**{**case.inputs, "entropy": en}, **case.call_kwargs)
    return {"loss": loss, "metrics": metrics, "grad_entropy": grads(loss, en)[0]}


def run_aggregate(case: Case, compat: bool, writes: list[list[Any]]) -> dict[str, Any]:
    v, m, out = case.inputs["values"], case.inputs["mask"], {}
    for mode in AGG_MODES:
        x = leaf(v)
        loss = package().algo.aggregate_loss(x, m, mode)
        out[mode] = {"loss": loss, "grad_values": grads(loss, x)[0]}
    out["seq-mean-token-sum-norm/normalizer=10"] = {
        "loss": package().algo.aggregate_loss(v, m, AGG_MODES[3], normalizer=10)
    }
    for key, name, arg in [
        (k, *k.partition("/")[::2]) for k in case.outputs if k.startswith("masked_")
    ]:
        if name == "masked_mean" or hasattr(package().algo, name):
            kw = {k: json.loads(x.lower()) for k, x in [arg.split("=")]} if arg else {}
            with contextlib.suppress(ValueError):  # refused: absent
                out[key] = getattr(package().algo, name)(v, m, **kw)
    return out


def run_api(case: Case, compat: bool, writes: list[list[Any]]) -> dict[str, Any]:
    kind, _, name = case.id.partition("/")
    if kind == "key_mapper":  # exercised through the losses
        raise Skip
    if kind == "algorithm":
        return {
            "flags": {
                k: getattr(package().cls("ALGORITHM_TYPE", name), k)
                for k in case.outputs["flags"]
                if k != "use_rollout"
            }
        }
    cls = package().cls(kind.upper(), name)
    keys = cls(backend="verl", **cls.default_args()).select_keys if kind == "policy_loss_fn" else []
    return {"default_args": cls.default_args(), "select_keys": keys}


def run_combined(case: Case, compat: bool, writes: list[list[Any]]) -> dict[str, Any]:
    """Build the actor loss of a preset from three registries: pg - coef * H + coef * KL."""
    k, x, mode = case.kwargs, case.inputs, case.kwargs["loss_agg_mode"]
    lp, en = leaf(x["logprob"]), leaf(x["entropy"])
    loss, m, _ = call_loss(
        k["policy_loss_fn"],
        k["policy_loss_fn_args"],
        {a: b for a, b in x.items() if a != "entropy"},
        compat,
        lp,
    )
    metrics = dict(m)
    if k["entropy_loss_fn"] != "none":
        h, m = package().make(
            "ENTROPY_LOSS_FN", k["entropy_loss_fn"], k["entropy_loss_fn_args"], compat=compat
        )(
            entropy=en,
            action_mask=x["action_mask"],
            expert_mask=x["expert_mask"],
            loss_agg_mode=mode,
        )
        loss, metrics = loss - h, {**metrics, **m}
    if k["kl_loss_fn"] != "none":
        kl, m = (
            package()
            .make("KL_FN", k["kl_loss_fn"], k["kl_loss_fn_args"], compat=compat)
            .calculate_kl_loss(
                logprob=lp,
                ref_logprob=x["ref_logprob"],
                response_mask=x["action_mask"],
                loss_agg_mode=mode,
                old_logprob=x["old_logprob"],
            )
        )
        loss, metrics = loss + kl, {**metrics, **m}
    metrics = {"final_loss": loss.detach(), **{f"actor/{a}": b for a, b in metrics.items()}}
    g = grads(loss, lp, en)
    return {"loss": loss, "metrics": metrics, "grad_logprob": g[0], "grad_entropy": g[1]}


RUNNERS: dict[str, Runner] = {
    "add_strategy": run_add_strategy,
    "group_by": run_group_by,
    "step_wise_methods": run_step_wise_methods,
    "advantage_grouped": run_advantage_grouped,
    "advantage_trainer": run_advantage_trainer,
    "kl_fn": run_kl_fn,
    "policy_loss_units": run_policy_loss_units,
    "entropy_loss_fn": run_entropy,
    "aggregate": run_aggregate,
    "api": run_api,
    "combined_loss": run_combined,
}


def runner_of(family: str) -> Runner | None:
    return RUNNERS.get(family) or (run_policy_loss if family.startswith("policy_loss_") else None)


def run(case: Case, compat: bool = True) -> SimpleNamespace:
    """Return value (outputs), error (or None) and writes, also those before the error."""
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    out = SimpleNamespace(value={}, error=None, writes=[])
    runner = runner_of(case.family)
    assert runner is not None, f"no runner for {case.family}"
    try:
        out.value = runner(case, compat, out.writes)
    except (Skip, NotProvidedError):
        raise
    except OUTCOMES as e:
        out.error = e
    return out
