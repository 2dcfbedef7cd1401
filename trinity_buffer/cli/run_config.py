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
    Name,
    Section,
    refuse_unknown,
    require_computable,
    said,
)
from trinity_buffer.cli.run_file import OWN, PLACES, parsed, place_of
from trinity_buffer.errors import InvalidArgumentError


class TaskConfig(Section):
    """What the policy practises on."""

    name: Literal["sort", "guess"] = Field("sort", description="what is practised")
    digits: int = Field(3, ge=1, le=1000, description="sort: how many digits")
    numbers: int = Field(8, ge=2, le=10000, description="guess: the hidden number is below this")
    turns: int = Field(4, ge=1, le=1000, description="guess: how many guesses a run may take")


class ModelConfig(Section):
    """The policy: a small transformer, random at first."""

    width: int = Field(64, ge=8, le=4096, description="of a token's vector")
    layers: int = Field(2, ge=1, le=128, description="blocks of attention")
    heads: int = Field(4, ge=1, le=4096, description="of attention, in each layer")

    @override
    def model_post_init(self, context: Any) -> None:
        """Refuse a width that the heads cannot share."""
        if self.width % self.heads:
            raise InvalidArgumentError(
                f"width={self.width} must be a multiple of heads={self.heads}"
            )


class OptimizerConfig(Section):
    """AdamW."""

    learning_rate: float = Field(1e-3, gt=0, le=1e20, description="the highest")
    warmup_steps: int = Field(0, ge=0, description="it rises from 0 over so many steps")
    decay_steps: int | None = Field(
        None, ge=1, description="it falls over so many, counted from the first of the run"
    )
    lowest_rate: float = Field(0.1, ge=0, le=1, description="to this fraction of itself")
    betas: tuple[float, float] = Field((0.9, 0.999), description="decay of the two averages")
    weight_decay: float = Field(0.0, ge=0, le=1e6, description="per step, times the learning rate")
    max_gradient_norm: float = Field(1.0, gt=0, description="gradients are scaled down to it")
    entropy_coef: float | None = Field(
        None, ge=0, description="of the entropy bonus; by default what the algorithm says"
    )
    critic_learning_rate: float = Field(
        1e-3, gt=0, le=1e20, description="where the algorithm has a critic"
    )
    value_clip_range: float | None = Field(None, gt=0, description="of the critic's loss")

    @override
    def model_post_init(self, context: Any) -> None:
        """Refuse averages that never forget."""
        if not all(0 <= beta < 1 for beta in self.betas):
            raise InvalidArgumentError(f"betas={self.betas}: each must be from 0 to below 1")


class LossConfig(Section):
    """The policy loss, by its registered name, with constructor arguments."""

    name: str | None = Field(None, description="by default the algorithm's")
    args: dict[str, Any] = Field(default_factory=dict, description="of its constructor")


class EvaluationConfig(Section):
    """Greedy answers to fresh problems, by the trainer, between steps."""

    every_steps: int = Field(10, ge=1, description="between two evaluations")
    problems: int = Field(
        256, ge=1, description="that are answered each time; `evaluate` of one's own has its own"
    )
    target_accuracy: float | None = Field(
        None, description="at which the trainer ends; with --follow, the experiment too"
    )


class ExploringConfig(Section):
    """How explorers go through the tasks of one's own rollouts."""

    epochs: int = Field(1, ge=1, description="how often the whole list is gone through")
    concurrency: int = Field(32, ge=1, description="rollouts at the same time, of one explorer")
    timeout_s: float | None = Field(None, gt=0, description="that one rollout may take")
    attempts: int = Field(
        3, ge=1, description="at a rollout that loses a connection or takes longer than `timeout_s`"
    )
    on_failure: Literal["raise", "leave_out"] = Field(
        "raise", description="what becomes of a rollout whose last attempt failed"
    )
    max_tokens: int = Field(256, ge=1, description="of a completion, where the rollout says none")


OF_RECORDED_DATA = ("sft", "cpt", "dpo")
"""Algorithms that train on rows that stand alone: nobody planned them, and no group is awaited."""


class RunConfig(Section):
    """Everything that the processes of one run must agree on."""

    task: TaskConfig = TaskConfig()
    model: ModelConfig | str = Field(
        ModelConfig(), description="folder of a causal language model of transformers"
    )
    tokenizer: str | None = Field(
        None, description="folder of a tokenizer, by which tokens are shown; null: the model's"
    )
    rollout: str | None = Field(
        None, description="async `module:function` that attempts a task, for a model of one's own"
    )
    tasks: str | None = Field(
        None, description="`module:name` of a list, or of a function that returns one"
    )
    evaluate: str | None = Field(
        None, description="async `module:function` from a model of one's own to its accuracy"
    )
    server: str | None = Field(
        None,
        description="URL of the inference server for rollouts; null: each explorer samples itself",
    )
    dialect: Literal["vllm", "sglang"] = Field("vllm", description="of the server")
    folder: str | None = Field(
        None,
        description="of model, tokenizer, rollout, tasks and evaluate; by default that of the file",
    )
    exploring: ExploringConfig = ExploringConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    seed: int = Field(
        0,
        gt=-(1 << 62),
        lt=1 << 62,
        description="of weights, problems and rollouts; rollouts of one's own draw at random",
    )
    algorithm: str = Field("grpo", description="registered name, see `trinity-buffer algorithms`")
    algorithm_args: dict[str, Any] = Field(
        default_factory=dict, description="parts and arguments, as of algorithm.build"
    )
    strategy: str | None = Field(
        None,
        description="by default the algorithm's; several, filters first: `reward_variance+grpo`",
    )
    strategy_args: dict[str, Any] = Field(
        default_factory=dict, description="of its constructor; of several: name -> arguments"
    )
    reference: str | None = Field(
        None,
        description="that divergences are measured from: a policy file of the demo, a folder of "
        "one's own model; by default version 0",
    )
    teacher: str | None = Field(
        None, description="to distil: a policy file of the demo, a folder of one's own model"
    )
    expert_experiment: str | None = Field(
        None, description="experiment of this store with an expert's rows"
    )
    recompute_old_logprob: bool = Field(
        False, description="by the trainer before the step, in place of what explorers recorded"
    )
    trainer: Name = Field("trainer", min_length=1, description="name of the trainer consumer")
    groups_per_batch: int = Field(8, ge=1, description="that an explorer plans at once")
    rollouts_per_group: int = Field(
        8, ge=1, le=1 << 20, description="runs of one task; of `sft`, `cpt` and `dpo` by default 1"
    )
    deadline_s: float | None = Field(
        None,
        gt=0,
        le=1e9,
        description="after its first rollout a group is closed as it is; null: never",
    )
    incomplete: Literal["keep", "reject"] = Field(
        "keep", description="a group that was closed before its planned rollouts were stored"
    )
    groups_per_step: int = Field(16, ge=1, description="of one gradient step")
    max_waiting_groups: int | None = Field(
        None, ge=1, description="for the trainer, before explorers wait; null: no bound"
    )
    max_staleness: int | None = Field(
        2, ge=0, description="before explorers wait for new weights; null: no bound"
    )
    commit_every_steps: int = Field(1, ge=1, description="with a checkpoint and new weights")
    async_checkpoints: bool = Field(
        default=False, description="written while the training goes on; the commit follows"
    )
    record_facts: bool = Field(
        default=True, description="with each commit, what its steps measured of each row"
    )
    record_tokens: bool = Field(default=False, description="and of each token: 16 bytes")
    max_steps: int | None = Field(
        None,
        ge=1,
        description="after which the trainer ends; with --follow, the experiment too; "
        "null: no bound",
    )
    max_skipped_steps: int = Field(
        3, ge=1, description="in a row, of a loss or gradient that is not finite; then it ends"
    )
    max_rejected_steps: int = Field(
        6, ge=1, description="in a row, rejected as invalid or damaged; then the role ends"
    )
    lease_ttl_s: float = Field(
        30.0, gt=0, le=1e9, description="a trainer that is silent for so long may be replaced"
    )
    tokens_per_microbatch: int | None = Field(
        None, ge=1, description="that are computed at once; null: a step is one micro-batch"
    )
    max_tokens: int | None = Field(
        None, ge=1, description="of an experience, else it is rejected; null: no bound"
    )
    layout: Literal["padded", "packed"] = Field("padded", description="of a micro-batch's rows")

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
        if self.max_staleness is not None and self.commit_every_steps > max(self.max_staleness, 1):
            raise InvalidArgumentError(
                f"commit_every_steps={self.commit_every_steps} with max_staleness="
                f"{self.max_staleness}: explorers would wait for a commit that waits for them; "
                f"commit at least every {max(self.max_staleness, 1)} steps"
            )


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
