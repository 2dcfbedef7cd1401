"""The configuration of a run: all settings that its processes share.

A file, or the first event of an experiment, states them; an experiment that is made in Python takes
the same keys.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta
from typing_extensions import override

from trinity_buffer import options
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.identity import closest, problem_of_name
from trinity_buffer.pipeline.coordination.waiting import MAX_REJECTED_STEPS, STALLED_AFTER_S


@dataclass(frozen=True, kw_only=True)
class TaskConfig(options.Options):
    """What the policy learns in the demo."""

    name: Literal["sort", "guess"] = "sort"
    """the task of the demo"""
    digits: Annotated[int, Meta(ge=1, le=1000, description="an integer from 1 to 1000")] = 3
    """sort: number of digits"""
    numbers: Annotated[int, Meta(ge=2, le=10000, description="an integer from 2 to 10000")] = 8
    """guess: the hidden number is below this"""
    turns: Annotated[int, Meta(ge=1, le=1000, description="an integer from 1 to 1000")] = 4
    """guess: maximum number of guesses in a run"""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(options.Options):
    """The policy of the demo: a small transformer, random at first."""

    width: Annotated[int, Meta(ge=8, le=4096, description="an integer from 8 to 4096")] = 64
    """embedding size"""
    layers: Annotated[int, Meta(ge=1, le=128, description="an integer from 1 to 128")] = 2
    """transformer blocks"""
    heads: Annotated[int, Meta(ge=1, le=4096, description="an integer from 1 to 4096")] = 4
    """attention heads per layer"""

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % self.heads:
            raise InvalidArgumentError(
                f"width={self.width} must be a multiple of heads={self.heads}"
            )


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions(options.Options):
    """AdamW, and the schedule of its rate."""

    learning_rate: Annotated[float, Meta(ge=0, le=1e20, description="a number from 0 to 1e+20")] = (
        1e-3
    )
    """the highest learning rate"""
    warmup_steps: options.Natural = 0
    """linear warm-up from 0 over this many steps"""
    decay_steps: options.Count | None = None
    """linear decay over this many steps, counted from step 1; null: none"""
    min_lr_ratio: options.Share = 0.1
    """the rate never decays below this fraction of the highest"""
    betas: tuple[options.Beta, options.Beta] = (0.9, 0.999)
    """AdamW's betas"""
    weight_decay: Annotated[float, Meta(ge=0, le=1e6, description="a number from 0 to 1e+06")] = 0.0
    """AdamW's decoupled weight decay"""
    max_gradient_norm: options.Above0 = 1.0
    """gradients are clipped to this norm"""
    critic_learning_rate: options.Rate = 1e-3
    """of the critic, if the algorithm has one"""
    value_clip_range: options.Above0 | None = None
    """clip range of the critic's loss; null: none"""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(OptimizerOptions):
    """The optimizer, and the bonus for entropy."""

    learning_rate: options.Rate = OptimizerOptions.learning_rate
    entropy_coef: options.AtLeast0 | None = None
    """coefficient of the entropy bonus; null: the algorithm's"""


@dataclass(frozen=True, kw_only=True)
class LossConfig(options.Options):
    """The policy loss, by its registered name, with constructor arguments."""

    name: str | None = None
    """policy loss; null: the algorithm's"""
    args: dict[str, Any] = field(default_factory=dict)
    """arguments of its constructor"""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(options.Options):
    """Greedy answers to fresh problems, by the trainer between steps."""

    every_steps: options.Count = 10
    """interval between evaluations"""
    num_eval_samples: options.Count = 256
    """per evaluation, unless you give `evaluate`"""
    target_accuracy: options.Number | None = None
    """accuracy at which the trainer ends (with --follow, the run)"""


@dataclass(frozen=True, kw_only=True)
class RolloutOptions(options.Options):
    """How explorers go through the tasks of the user's own rollouts."""

    epochs: options.Count = 1
    """passes over the whole list of tasks"""
    concurrency: options.Count = 32
    """concurrent rollouts of one explorer; a kill of the process loses at most this many"""
    timeout_s: options.Above0 | None = None
    """time limit of one attempt at a rollout, after which it is a TimeoutError; null: none"""
    attempts: options.Count = 3
    """tries of a rollout that loses its connection, exceeds `timeout_s`, or returns what the
    store refuses"""
    on_failure: Literal["raise", "leave_out"] = "raise"
    """when the last attempt fails: end, and go on with what is missing when started again; or
    seal the batch without the rollout, and warn"""


@dataclass(frozen=True, kw_only=True)
class ExplorerConfig(RolloutOptions):
    """How explorers go through the tasks, and what a completion may be."""

    max_tokens: options.Count = 256
    """default limit of a completion"""


@dataclass(frozen=True, kw_only=True)
class BatchOptions(options.Options):
    """What an explorer plans at once."""

    groups_per_batch: options.Count = 8
    """groups that an explorer plans, and later seals, at once"""
    rollouts_per_group: options.Runs = 8
    """runs of each task; `sft`, `cpt` and `dpo` default to 1"""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(options.Options):
    """What a trainer does beside its gradient steps, and when it ends."""

    commit_every_steps: options.Count = 1
    """interval of commits (checkpoints)"""
    async_checkpoints: bool | None = None
    """write checkpoints in a thread, from a copy in CPU memory; the commit follows when all is on
    the disk. null: those of a model of transformers on a GPU; of another policy the copy takes a
    second one on the GPU"""
    record_row_metrics: bool = True
    """record with each commit what its steps measured of each row"""
    record_token_metrics: bool = False
    """and of each token: 16 bytes"""
    deterministic: bool = True
    """ask torch for deterministic algorithms, so that a replay gives the same bits; an operation
    that has no deterministic form is an error"""
    max_steps: options.Count | None = None
    """the trainer ends after this step (with --follow, the run); null: no bound"""
    max_skipped_steps: options.Count | None = 3
    """skipped in a row, as not finite, before the trainer ends; null: never"""
    recompute_old_logprob: bool = False
    """compute it in the trainer before each step; false: as recorded"""


@dataclass(frozen=True, kw_only=True)
class RunConfig(
    TrainingOptions,
    options.StepOptions,
    options.AdmissionOptions,
    options.GroupingRules,
    BatchOptions,
):
    """All settings that the processes of a run share."""

    task: TaskConfig = TaskConfig()
    model: ModelConfig | str = ModelConfig()
    """folder of a causal language model of transformers"""
    tokenizer: str | None = None
    """folder of a tokenizer, to show tokens as text; null: the model's"""
    rollout: str | None = None
    """async `module:function` that attempts one task, for your own model"""
    tasks: str | None = None
    """`module:name` of a list, or of a function that returns one"""
    evaluate: str | None = None
    """async `module:function` that returns the accuracy of your own model"""
    server: str | None = None
    """URL of the inference server for rollouts; null: each explorer samples itself"""
    server_type: Literal["vllm", "sglang"] = "vllm"
    """API of the server"""
    folder: str | None = None
    """of model, tokenizer, rollout, tasks and evaluate; null: that of the file"""
    explorer: ExplorerConfig = ExplorerConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    seed: Annotated[
        int, Meta(gt=-(1 << 62), lt=1 << 62, description="an integer of at most 62 bits")
    ] = 0
    """seed of weights, problems and rollouts; your own rollouts are not seeded"""
    algorithm: str = "grpo"
    """registered name, see `trinity-buffer algorithms`"""
    algorithm_args: dict[str, Any] = field(default_factory=dict)
    """parts and arguments, as for `algorithm.build`"""
    strategy: str | None = None
    """null: the algorithm's; several, filters first: `reward_variance+grpo`"""
    strategy_args: dict[str, Any] = field(default_factory=dict)
    """arguments of its constructor; for several: name -> arguments"""
    reference: str | None = None
    """reference policy: a policy file of the demo, or a folder of your own model;
    null: version 0"""
    teacher: str | None = None
    """to distil from: a policy file of the demo, or a folder of your own model"""
    expert_experiment: str | None = None
    """experiment of this store that holds an expert's rows"""
    rollouts_per_group: options.Runs = 8
    groups_per_step: options.Count = 16
    max_staleness: options.Natural | None = 2
    device: options.Device = "cpu"
    """where the trainer computes: `cpu`, `cuda`, `cuda:1`; of several ranks on a machine, `cuda`
    is a GPU for each"""
    max_rejected_steps: options.Count = MAX_REJECTED_STEPS
    """rejected in a row as invalid or damaged before the process ends"""
    stalled_after_s: options.Seconds | None = STALLED_AFTER_S
    """all end, with exit code 3, once nothing has moved for this long; null: never"""
    max_tokens: options.Count | None = None
    """longer experiences are rejected; null: none"""

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if (problem := problem_of_name(self.trainer)) is not None:
            raise InvalidArgumentError(
                f"trainer={options.excerpt(self.trainer)}: the name {problem}"
            )


CONFIG = options.option_types(RunConfig)
"""Key of a run's configuration -> the type of its value."""

SECTIONS: dict[str, type[options.Options]] = {
    name: section
    for name, kind in CONFIG.items()
    if (section := options.section_of(kind)) is not None
}
"""Key that holds, or may hold, a table -> the options in it."""

EXTRA = "extra"
"""The key for the user's own values; nothing here reads it."""

_READ = (
    *("groups_per_batch", "rollouts_per_group", "groups_per_step", "max_queued_groups"),
    *("max_rejected_steps", "tokens_per_microbatch", "max_staleness", "trainer"),
    *("lease_ttl_s", "stalled_after_s"),
)
"""What the pipeline reads of a configuration; None counts as unset, or as never."""


def require_values(experiment: str, config: Mapping[str, Any]) -> None:
    """Raise unless the values of ``config`` that the pipeline reads are valid.

    Raises:
        InvalidArgumentError: names the key, its value and the accepted values.
    """
    values = {key: config[key] for key in _READ if config.get(key) is not None}
    try:
        options.values_of(RunConfig, values)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"experiment {experiment!r}: {error}") from error
    if "/" in (trainer := values.get("trainer", "")):  # which older versions have recorded
        raise InvalidArgumentError(
            f"experiment {experiment!r}: trainer={options.excerpt(trainer)}: it must be a text "
            "without a slash"
        )


def refuse_unknown(
    values: Mapping[str, Any], where: str, beside: Collection[str] = (), remedy: str = ""
) -> None:
    """Raise InvalidArgumentError for unknown keys, or a plain value in place of a section.

    Args:
        values: to check; each key must be one of the configuration.
        where: what the message begins with.
        beside: further keys that are allowed.
        remedy: what the message ends with.
    """
    unknown: dict[str, list[str]] = {}  # what to do -> keys
    problems = []
    for key, value in values.items():
        section = SECTIONS.get(key)
        if key in beside:
            continue
        if key not in CONFIG:
            unknown.setdefault(_meant(key, "", [*CONFIG, *beside]), []).append(repr(str(key)))
        elif section is not None and isinstance(value, Mapping):
            names = options.option_types(section)
            for name in (name for name in value if name not in names):
                meant = _meant(name, f"{key}.", names)
                unknown.setdefault(meant, []).append(repr(f"{key}.{name}"))
        elif section is CONFIG[key]:
            listed = ", ".join(sorted(options.option_types(section)))
            problems.append(f"{key}={options.excerpt(value)}: must be a table of {listed}")
    if unknown:
        keys = " Nor ".join(f"{', '.join(of)}; {meant}" for meant, of in unknown.items())
        problems.insert(0, f"there is no key {keys}{remedy}")
    if problems:
        raise InvalidArgumentError(where + " ".join(problems))


def _meant(key: object, prefix: str, known: Collection[str]) -> str:
    """Return which key of a section was probably meant by an unknown one, or which there are.

    A key of the same name in another section is a better guess than a similar name in this one.
    """
    inner = (f"{name}.{k}" for name, of in SECTIONS.items() for k in options.option_types(of))
    meant = [path for path in (*CONFIG, *inner) if path.rpartition(".")[2] == key]
    if (close := closest(str(key), known)) is not None:
        meant.append(prefix + close)
    return f"did you mean {meant[0]!r}?" if meant else f"there are: {', '.join(sorted(known))}."
