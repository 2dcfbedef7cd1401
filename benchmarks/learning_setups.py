"""With what each algorithm learns the demo's task, and what it has to reach."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from trinity_buffer.demo.tasks import GuessNumber, SortDigits, Task

Data = Literal["rollouts", "solutions", "pairs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One algorithm, the numbers of its run, and its threshold.

    Attributes:
        family: whose curves are drawn together.
        task: ``"sort"`` (3 digits) or ``"guess"`` (a number below 8 in 4 turns).
        data: ``"rollouts"`` of the policy itself from random weights, or recorded: ``"solutions"``
            (prompts with answers), ``"pairs"`` (the answer, and a wrong one).
        teacher: a policy trained on solutions is distilled.
        expert: an expert's experiment with solutions is mixed in.
        args: of `trinity_buffer.algorithm.build`.
        groups_per_step: of both kinds, where an expert's are mixed in.
        threshold: greedy accuracy on fresh problems.
        max_steps: gradient steps within which it is reached.
    """

    family: str
    task: Literal["sort", "guess"] = "sort"
    data: Data = "rollouts"
    teacher: bool = False
    expert: bool = False
    args: dict[str, Any] = field(default_factory=dict)
    groups_per_step: int = 32
    rollouts_per_group: int = 8
    learning_rate: float = 1e-3
    critic_learning_rate: float = 2e-3
    warmup_steps: int = 10
    threshold: float = 0.9
    max_steps: int = 240
    evaluate_every: int = 10

    @property
    def digest(self) -> str:
        """What tells results of this setup from those of another."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

    def small(self) -> Setup:
        """Return the same with two small steps, which teach nothing but run everything.

        Its digest is another one, so that its results are never taken for those of this setup.
        """
        return replace(self, groups_per_step=3, max_steps=2, evaluate_every=1)

    def make_task(self) -> Task:
        """Return the task."""
        return SortDigits(digits=3) if self.task == "sort" else GuessNumber(numbers=8, turns=4)


def _entropy(coefficient: float, **more: Any) -> dict[str, Any]:
    return {"entropy_loss_fn_args": {"entropy_coef": coefficient}, **more}


_GROUPS = Setup(family="group-relative", args=_entropy(0.02))
_CLIPS = replace(_GROUPS, family="other ratios and clips")
_REINFORCE = replace(_GROUPS, family="REINFORCE and mirror descent")
_STEPS = Setup(
    family="several turns",
    task="guess",
    groups_per_step=16,
    rollouts_per_group=16,
    max_steps=320,
    args=_entropy(0.1),
)
_BONUS = {"entropy_loss_fn": "default", **_entropy(0.02)}
_RECORDED = Setup(family="recorded data", data="solutions", groups_per_step=128, max_steps=100)
_TEACHER = Setup(family="distillation", teacher=True)
_EXPERT = Setup(
    family="expert data",
    expert=True,
    groups_per_step=48,
    args=_entropy(0.02, sample_strategy_args={"expert_data_ratio": 1 / 3}),
)

SETUPS: dict[str, Setup] = {
    "sft": _RECORDED,
    "cpt": _RECORDED,
    "dpo": replace(
        _RECORDED,
        data="pairs",
        max_steps=150,
        args={"policy_loss_fn_args": {"beta": 0.5}},
    ),
    "ppo": replace(_REINFORCE, family="group-relative"),
    "grpo": _GROUPS,
    "grpo_verl": _GROUPS,
    "dapo": _GROUPS,
    "rloo": _REINFORCE,
    "reinforceplusplus": _REINFORCE,
    "opmd": _REINFORCE,
    "asymre": replace(_REINFORCE, args=_BONUS),
    "sppo": replace(_REINFORCE, args=_BONUS),
    "rec": _REINFORCE,
    "raft": replace(_REINFORCE, args=_BONUS),
    "topr": _CLIPS,
    "cispo": _CLIPS,
    "gspo": _CLIPS,
    "sapo": _CLIPS,
    "mix": _EXPERT,
    "mix_chord": _EXPERT,
    "multi_step_grpo": _STEPS,
    "gigpo": _STEPS,
    "on_policy_distill": _TEACHER,
    "jsd": _TEACHER,
}
"""Every algorithm type of the registry."""
