"""The configuration of a run: defaults, then a TOML or YAML file, then dotted overrides.

The resolved configuration is the first event of the experiment, and what every process of the run
reads from there.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError
from typing_extensions import override

from trinity_buffer.cli.config_checks import (
    Device,
    Name,
    Section,
    refuse_unknown,
    require_computable,
    said,
)
from trinity_buffer.cli.run_file import OWN, PLACES, parsed, place_of
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.pipeline.writing.planning import Admission


class TaskConfig(Section):
    """What the policy practises on."""

    name: Literal["sort", "guess"] = Field("sort", description="the task of the demo")
    digits: int = Field(3, ge=1, le=1000, description="sort: number of digits")
    numbers: int = Field(8, ge=2, le=10000, description="guess: the hidden number is below this")
    turns: int = Field(4, ge=1, le=1000, description="guess: maximum number of guesses in a run")


class ModelConfig(Section):
    """The policy: a small transformer, random at first."""

    width: int = Field(64, ge=8, le=4096, description="embedding size")
    layers: int = Field(2, ge=1, le=128, description="transformer blocks")
    heads: int = Field(4, ge=1, le=4096, description="attention heads per layer")

    @override
    def model_post_init(self, context: Any) -> None:
        """Refuse a width that the heads cannot share."""
        if self.width % self.heads:
            raise InvalidArgumentError(
                f"width={self.width} must be a multiple of heads={self.heads}"
            )


class OptimizerConfig(Section):
    """AdamW."""

    learning_rate: float = Field(1e-3, gt=0, le=1e20, description="the highest learning rate")
    warmup_steps: int = Field(0, ge=0, description="linear warm-up from 0 over this many steps")
    decay_steps: int | None = Field(
        None, ge=1, description="linear decay over this many steps, counted from step 1; null: none"
    )
    lowest_rate: float = Field(
        0.1, ge=0, le=1, description="the rate never decays below this fraction of the highest"
    )
    betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW's betas")
    weight_decay: float = Field(0.0, ge=0, le=1e6, description="AdamW's decoupled weight decay")
    max_gradient_norm: float = Field(1.0, gt=0, description="gradients are clipped to this norm")
    entropy_coef: float | None = Field(
        None, ge=0, description="coefficient of the entropy bonus; null: the algorithm's"
    )
    critic_learning_rate: float = Field(
        1e-3, gt=0, le=1e20, description="of the critic, if the algorithm has one"
    )
    value_clip_range: float | None = Field(
        None, gt=0, description="clip range of the critic's loss; null: none"
    )

    @override
    def model_post_init(self, context: Any) -> None:
        """Refuse averages that never forget."""
        if not all(0 <= beta < 1 for beta in self.betas):
            raise InvalidArgumentError(f"betas={self.betas}: each must be from 0 to below 1")


class LossConfig(Section):
    """The policy loss, by its registered name, with constructor arguments."""

    name: str | None = Field(None, description="policy loss; null: the algorithm's")
    args: dict[str, Any] = Field(default_factory=dict, description="arguments of its constructor")


class EvaluationConfig(Section):
    """Greedy answers to fresh problems, by the trainer, between steps."""

    every_steps: int = Field(10, ge=1, description="interval between evaluations")
    problems: int = Field(256, ge=1, description="per evaluation, unless you give `evaluate`")
    target_accuracy: float | None = Field(
        None, description="accuracy at which the trainer ends (with --follow, the run)"
    )


class ExploringConfig(Section):
    """How explorers go through the tasks of one's own rollouts."""

    epochs: int = Field(1, ge=1, description="passes over the whole list of tasks")
    concurrency: int = Field(32, ge=1, description="concurrent rollouts of one explorer")
    timeout_s: float | None = Field(None, gt=0, description="time limit of one rollout; null: none")
    attempts: int = Field(
        3,
        ge=1,
        description="tries of a rollout that loses its connection, exceeds `timeout_s`, or returns "
        "what the store refuses",
    )
    on_failure: Literal["raise", "leave_out"] = Field(
        "raise",
        description="when the last attempt fails: end, or seal the batch without the rollout",
    )
    max_tokens: int = Field(256, ge=1, description="default limit of a completion")


OF_RECORDED_DATA = ("sft", "cpt", "dpo")
"""Algorithms that train on rows that stand alone: nobody planned them, and no group is awaited."""


class RunConfig(Section):
    """Everything that the processes of one run must agree on."""

    task: TaskConfig = TaskConfig()
    model: ModelConfig | str = Field(
        ModelConfig(), description="folder of a causal language model of transformers"
    )
    tokenizer: str | None = Field(
        None, description="folder of a tokenizer, to show tokens as text; null: the model's"
    )
    rollout: str | None = Field(
        None, description="async `module:function` that attempts one task, for your own model"
    )
    tasks: str | None = Field(
        None, description="`module:name` of a list, or of a function that returns one"
    )
    evaluate: str | None = Field(
        None, description="async `module:function` that returns the accuracy of your own model"
    )
    server: str | None = Field(
        None,
        description="URL of the inference server for rollouts; null: each explorer samples itself",
    )
    dialect: Literal["vllm", "sglang"] = Field("vllm", description="API of the server")
    folder: str | None = Field(
        None,
        description="of model, tokenizer, rollout, tasks and evaluate; null: that of the file",
    )
    exploring: ExploringConfig = ExploringConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    seed: int = Field(
        0,
        gt=-(1 << 62),
        lt=1 << 62,
        description="seed of weights, problems and rollouts; your own rollouts are not seeded",
    )
    algorithm: str = Field("grpo", description="registered name, see `trinity-buffer algorithms`")
    algorithm_args: dict[str, Any] = Field(
        default_factory=dict, description="parts and arguments, as for `algorithm.build`"
    )
    strategy: str | None = Field(
        None,
        description="null: the algorithm's; several, filters first: `reward_variance+grpo`",
    )
    strategy_args: dict[str, Any] = Field(
        default_factory=dict,
        description="arguments of its constructor; for several: name -> arguments",
    )
    reference: str | None = Field(
        None,
        description="reference policy: a policy file of the demo, or a folder of your own model; "
        "null: version 0",
    )
    teacher: str | None = Field(
        None, description="to distil from: a policy file of the demo, or a folder of your own model"
    )
    expert_experiment: str | None = Field(
        None, description="experiment of this store that holds an expert's rows"
    )
    recompute_old_logprob: bool = Field(
        False, description="compute it in the trainer before each step; false: as recorded"
    )
    trainer: Name = Field("trainer", min_length=1, description="name of the trainer consumer")
    groups_per_batch: int = Field(8, ge=1, description="groups that an explorer plans at once")
    rollouts_per_group: int = Field(
        8, ge=1, le=1 << 20, description="runs of each task; `sft`, `cpt` and `dpo` default to 1"
    )
    deadline_s: float | None = Field(
        None,
        gt=0,
        le=1e9,
        description="closes a batch this long after its plan, whatever is stored; null: never",
    )
    idle_s: float | None = Field(
        None,
        gt=0,
        le=1e9,
        description="closes a group whose number of runs is not known this long after its last one;"
        " null: never",
    )
    incomplete: Literal["keep", "reject"] = Field(
        "keep",
        description="what to do with a group that lacks planned rollouts when it closes, or "
        "refused ones",
    )
    groups_per_step: int = Field(16, ge=1, description="groups per gradient step")
    max_waiting_groups: int | None = Field(
        None, ge=1, description="explorers wait while so many await the trainer; null: none"
    )
    max_staleness: int | None = Field(
        2, ge=0, description="explorers wait for new weights beyond this; null: no bound"
    )
    commit_every_steps: int = Field(1, ge=1, description="interval of commits (checkpoints)")
    async_checkpoints: bool | None = Field(
        None,
        description="write checkpoints in the background; the commit follows; null: those of a "
        "model of transformers on a GPU",
    )
    record_facts: bool = Field(
        default=True, description="record with each commit what its steps measured of each row"
    )
    record_tokens: bool = Field(default=False, description="and of each token: 16 bytes")
    device: Device = Field(
        "cpu",
        description="where the trainer computes: `cpu`, `cuda`, `cuda:1`; of several ranks on a "
        "machine, `cuda` is a GPU for each",
    )
    deterministic: bool = Field(
        default=True,
        description="ask torch for deterministic algorithms, so that a replay gives the same bits",
    )
    max_steps: int | None = Field(
        None,
        ge=1,
        description="the trainer ends after this step (with --follow, the run); null: no bound",
    )
    max_skipped_steps: int = Field(
        3, ge=1, description="skipped in a row, as not finite, before the trainer ends"
    )
    max_rejected_steps: int = Field(
        6, ge=1, description="rejected in a row as invalid or damaged before the process ends"
    )
    lease_ttl_s: float = Field(
        30.0, gt=0, le=1e9, description="a trainer or strategy silent for this long may be replaced"
    )
    stalled_after_s: float | None = Field(
        1800.0,
        gt=0,
        le=1e9,
        description="all end, with exit code 3, once nothing has moved for this long; null: never",
    )
    tokens_per_microbatch: int | None = Field(
        None, ge=1, description="token budget of a micro-batch; null: a step is one micro-batch"
    )
    max_tokens: int | None = Field(
        None, ge=1, description="longer experiences are rejected; null: none"
    )
    layout: Literal["padded", "packed"] = Field(
        "padded", description="layout of a micro-batch's rows"
    )

    @override
    def model_post_init(self, context: Any) -> None:
        """Refuse a commit that would be waited for in vain, and half a run of one's own."""
        if self.rollout is not None and not (self.tasks and isinstance(self.model, str)):
            raise InvalidArgumentError(
                f"rollout={self.rollout!r} needs tasks, and a model of your own: give all three "
                "(`trinity-buffer init FOLDER` writes an example)"
            )
        own = ("tasks", "evaluate", "server", "dialect", "exploring", "max_tokens")
        idle = [key for key in own if getattr(self, key) != type(self).model_fields[key].default]
        if idle and not isinstance(self.model, str):
            raise InvalidArgumentError(
                f"{idle[0]}={getattr(self, idle[0])} is read by a run of your own alone: give it "
                "a model of your own too"
            )
        rules = Admission(max_staleness=self.max_staleness)
        rules.require_commits(self.commit_every_steps, "commit_every_steps")


SECTIONS = frozenset({"task", "model", "optimizer", "evaluation", "exploring"})
"""Of independent keys; ``loss.args`` belong to ``loss.name`` and are replaced with it."""


def read_file(path: Path) -> dict[str, Any]:
    """Return the configuration in a TOML or YAML file.

    Raises:
        InvalidArgumentError: it is not there, cannot be read, or has a key that nothing reads.
    """
    found = {key: value for key, value in parsed(path).items() if key not in PLACES}
    refuse_unknown(found, RunConfig, f"configuration {path}: ")
    if isinstance(found.get("model"), str) or OWN & found.keys():
        found["folder"] = str(place_of(path, "folder", str(found.get("folder", ""))))
    for key in ("reference", "teacher"):
        if isinstance(found.get(key), str):
            place = place_of(path, key, found[key])
            found[key] = str(place) if place.exists() else found[key]
    return found


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``changes``; a section keeps the keys that ``changes`` leaves out."""
    result = {**base, **changes}
    for key, value in changes.items():
        if key in SECTIONS and isinstance(value, Mapping) and isinstance(base.get(key), Mapping):
            result[key] = {**base[key], **value}
    return result


def overridden(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return ``values`` with overrides like ``optimizer.learning_rate=3e-4`` applied.

    Another ``algorithm`` or ``loss.name`` leaves the arguments of the loss before it behind.

    Raises:
        InvalidArgumentError: an override without ``=``, or of a key inside a plain value.
    """
    result = dict(values)
    for given in sorted(overrides, key=_leaves_the_loss):
        key, equals, text = given.partition("=")
        if not equals:
            raise InvalidArgumentError(f"override {given!r}: write it as section.key=value")
        *sections, last = key.split(".")
        table = result
        for section in sections:
            inner = table.get(section) or {}
            if not isinstance(inner, Mapping):
                raise InvalidArgumentError(
                    f"override {given!r}: {section!r} is {inner!r}, which has no keys"
                )
            table[section] = dict(inner)
            table = table[section]
        value = _value_of(text)
        loss = result.get("loss") or {}
        changes = not _leaves_the_loss(given) and table.get(last) != value
        if changes and isinstance(loss, Mapping):  # else it is refused with all the rest
            name = loss.get("name")
            if key == "loss.name" or name is None:  # else the arguments are of that loss
                result["loss"] = {"name": name}
            table = result if key == "algorithm" else result["loss"]
        table[last] = value
    return result


def _leaves_the_loss(override: str) -> bool:
    """Return whether the policy loss stays what it is; overrides that change it come first."""
    return override.partition("=")[0] not in ("algorithm", "loss.name")


def _value_of(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:  # no TOML, or a number of thousands of digits
        return None if text in ("none", "null") else text
    except RecursionError as error:
        raise InvalidArgumentError("--set: a value is nested too deeply") from error


def resolved(values: Mapping[str, Any]) -> RunConfig:
    """Return the configuration, or say which key is wrong and what is accepted.

    Raises:
        InvalidArgumentError: an unknown key or an impossible value.
    """
    refuse_unknown(values, RunConfig, "")
    alone = {"rollouts_per_group": 1} if values.get("algorithm") in OF_RECORDED_DATA else {}
    try:
        config = RunConfig.model_validate({**alone, **values})
    except ValidationError as error:
        problems = filter(None, map(_problem, error.errors()))
        raise InvalidArgumentError("; ".join(problems)) from error
    require_computable(config.model_dump())
    return config


def _problem(error: Mapping[str, Any]) -> str | None:
    """Return what is wrong with one key; what is wrong with several together names them itself.

    None where a key may hold a section or a text, and this is about the one that was not meant.
    """
    *places, last = error["loc"] or ("",)
    if places == ["model"] and last in ("str", ModelConfig.__name__):
        if (last == "str") == isinstance(error["input"], Mapping):
            return None
        last = ""
    elif places[:2] == ["model", ModelConfig.__name__]:
        places = ["model"]
    place = ".".join(map(str, filter(None, (*places, last))))
    message = error["msg"].removeprefix("Value error, ")
    return f"{place}={said(error['input'])}: {message}" if place else str(message)


def of_experiment(config: Mapping[str, Any]) -> RunConfig:
    """Return the configuration that an experiment recorded, and our defaults beside it.

    Raises:
        InvalidArgumentError: a key of ours has an impossible value.
    """
    return resolved({key: value for key, value in config.items() if key in RunConfig.model_fields})


def require_model(experiment: str, config: Mapping[str, Any], *, explores: bool = False) -> None:
    """Return if the configuration that an experiment recorded names a model.

    Raises:
        InvalidArgumentError: it was made in Python, or by a recorder, which know no model.
    """
    if "model" in config:
        return
    wants = 'model = "FOLDER"'
    if explores:
        wants = "model, rollout and tasks (`trinity-buffer init FOLDER` writes an example)"
    raise InvalidArgumentError(
        f"experiment {experiment!r} names no model: it was made in Python or by `trinity-buffer "
        f"record`. Go on there, or give --config FILE with {wants}"
    )
