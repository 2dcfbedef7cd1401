"""The configuration of a run: defaults, then a TOML or YAML file, then dotted overrides.

The resolved configuration is the first event of the experiment, and every process of the run reads
it from there.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from typing_extensions import override

from trinity_buffer.algorithm import Algorithm, build
from trinity_buffer.algorithm.registry import is_path
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.identity import problem_of_name
from trinity_buffer.pipeline.store import Store
from trinity_buffer.pipeline.write.planning import Admission
from trinity_buffer.trainer.requirements import require, strategy_of
from trinity_buffer.user_code import look_in

YAML = (".yaml", ".yml")
"""Endings of YAML files; any other file is TOML."""

PLACES = ("store", "experiment")
"""Keys of a file that say where the run is, which is not part of its configuration."""

OWN = frozenset({"tokenizer", "rollout", "tasks", "evaluate", "folder"})
"""Keys of a run of the user's own, beside ``model``, which may be a section of the demo's."""

LARGEST = 3.4028234663852886e38
"""The largest 32-bit float: policies are computed in that type."""


def _checked_name(name: str) -> str:
    problem = problem_of_name(name)
    if problem is not None:
        raise ValueError(f"the name {problem}")
    return name


def _checked_device(device: str) -> str:
    if not re.fullmatch("cpu(:0)?|cuda(:[0-9]+)?", device):
        raise ValueError("must be cpu, cuda, or one GPU of this machine, such as cuda:1")
    return device


Name = Annotated[str, AfterValidator(_checked_name)]
"""A text that may be a name."""

Device = Annotated[str, AfterValidator(_checked_device)]
"""Where a trainer computes, as torch writes it."""


class Section(BaseModel):
    """A group of keys of the configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def check_value(cls, value: Any, info: ValidationInfo) -> Any:
        """Raise ValueError for a boolean in place of a number, or a table that JSON cannot hold."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        kinds = {annotation, *get_args(annotation)}
        # pydantic would take True for 1.
        if isinstance(value, bool) and bool not in kinds and kinds & {int, float}:
            raise ValueError("Input should be a number")
        if get_origin(annotation) is dict and isinstance(value, Mapping):
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise ValueError(f"must hold texts and finite numbers alone ({error})") from error
        return value


class TaskConfig(Section):
    """What the policy learns in the demo."""

    name: Literal["sort", "guess"] = "sort"
    """the task of the demo"""
    digits: int = Field(3, ge=1, le=1000)
    """sort: number of digits"""
    numbers: int = Field(8, ge=2, le=10000)
    """guess: the hidden number is below this"""
    turns: int = Field(4, ge=1, le=1000)
    """guess: maximum number of guesses in a run"""


class ModelConfig(Section):
    """The policy of the demo: a small transformer, random at first."""

    width: int = Field(64, ge=8, le=4096)
    """embedding size"""
    layers: int = Field(2, ge=1, le=128)
    """transformer blocks"""
    heads: int = Field(4, ge=1, le=4096)
    """attention heads per layer"""

    @override
    def model_post_init(self, context: Any) -> None:
        """Raise InvalidArgumentError unless the heads divide the width."""
        if self.width % self.heads:
            raise InvalidArgumentError(
                f"width={self.width} must be a multiple of heads={self.heads}"
            )


class OptimizerConfig(Section):
    """AdamW."""

    learning_rate: float = Field(1e-3, gt=0, le=1e20)
    """the highest learning rate"""
    warmup_steps: int = Field(0, ge=0)
    """linear warm-up from 0 over this many steps"""
    decay_steps: int | None = Field(None, ge=1)
    """linear decay over this many steps, counted from step 1; null: none"""
    lowest_rate: float = Field(0.1, ge=0, le=1)
    """the rate never decays below this fraction of the highest"""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's betas"""
    weight_decay: float = Field(0.0, ge=0, le=1e6)
    """AdamW's decoupled weight decay"""
    max_gradient_norm: float = Field(1.0, gt=0)
    """gradients are clipped to this norm"""
    entropy_coef: float | None = Field(None, ge=0)
    """coefficient of the entropy bonus; null: the algorithm's"""
    critic_learning_rate: float = Field(1e-3, gt=0, le=1e20)
    """of the critic, if the algorithm has one"""
    value_clip_range: float | None = Field(None, gt=0)
    """clip range of the critic's loss; null: none"""

    @override
    def model_post_init(self, context: Any) -> None:
        """Raise InvalidArgumentError for moving averages that never forget, or diverge."""
        if not all(0 <= beta < 1 for beta in self.betas):
            raise InvalidArgumentError(f"betas={self.betas}: each must be from 0 to below 1")


class LossConfig(Section):
    """The policy loss, by its registered name, with constructor arguments."""

    name: str | None = None
    """policy loss; null: the algorithm's"""
    args: dict[str, Any] = Field(default_factory=dict)
    """arguments of its constructor"""


class EvaluationConfig(Section):
    """Greedy answers to fresh problems, by the trainer between steps."""

    every_steps: int = Field(10, ge=1)
    """interval between evaluations"""
    problems: int = Field(256, ge=1)
    """per evaluation, unless you give `evaluate`"""
    target_accuracy: float | None = None
    """accuracy at which the trainer ends (with --follow, the run)"""


class ExploringConfig(Section):
    """How explorers go through the tasks of the user's own rollouts."""

    epochs: int = Field(1, ge=1)
    """passes over the whole list of tasks"""
    concurrency: int = Field(32, ge=1)
    """concurrent rollouts of one explorer"""
    timeout_s: float | None = Field(None, gt=0)
    """time limit of one rollout; null: none"""
    attempts: int = Field(3, ge=1)
    """tries of a rollout that loses its connection, exceeds `timeout_s`, or returns what the
    store refuses"""
    on_failure: Literal["raise", "leave_out"] = "raise"
    """when the last attempt fails: end, or seal the batch without the rollout"""
    max_tokens: int = Field(256, ge=1)
    """default limit of a completion"""


OF_RECORDED_DATA = ("sft", "cpt", "dpo")
"""Algorithms that train on single rows, which nothing plans and no group waits for."""


class RunConfig(Section):
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
    dialect: Literal["vllm", "sglang"] = "vllm"
    """API of the server"""
    folder: str | None = None
    """of model, tokenizer, rollout, tasks and evaluate; null: that of the file"""
    exploring: ExploringConfig = ExploringConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    seed: int = Field(0, gt=-(1 << 62), lt=1 << 62)
    """seed of weights, problems and rollouts; your own rollouts are not seeded"""
    algorithm: str = "grpo"
    """registered name, see `trinity-buffer algorithms`"""
    algorithm_args: dict[str, Any] = Field(default_factory=dict)
    """parts and arguments, as for `algorithm.build`"""
    strategy: str | None = None
    """null: the algorithm's; several, filters first: `reward_variance+grpo`"""
    strategy_args: dict[str, Any] = Field(default_factory=dict)
    """arguments of its constructor; for several: name -> arguments"""
    reference: str | None = None
    """reference policy: a policy file of the demo, or a folder of your own model;
    null: version 0"""
    teacher: str | None = None
    """to distil from: a policy file of the demo, or a folder of your own model"""
    expert_experiment: str | None = None
    """experiment of this store that holds an expert's rows"""
    recompute_old_logprob: bool = False
    """compute it in the trainer before each step; false: as recorded"""
    trainer: Name = Field("trainer", min_length=1)
    """name of the trainer consumer"""
    groups_per_batch: int = Field(8, ge=1)
    """groups that an explorer plans at once"""
    rollouts_per_group: int = Field(8, ge=1, le=1 << 20)
    """runs of each task; `sft`, `cpt` and `dpo` default to 1"""
    deadline_s: float | None = Field(None, gt=0, le=1e9)
    """closes a batch this long after its plan, whatever is stored; null: never"""
    idle_s: float | None = Field(None, gt=0, le=1e9)
    """closes a group whose number of runs is not known this long after its last one; null: never"""
    incomplete: Literal["keep", "reject"] = "keep"
    """what to do with a group that lacks planned rollouts when it closes, or refused ones"""
    groups_per_step: int = Field(16, ge=1)
    """groups per gradient step"""
    max_waiting_groups: int | None = Field(None, ge=1)
    """explorers wait while so many await the trainer; null: none"""
    max_staleness: int | None = Field(2, ge=0)
    """explorers wait for new weights beyond this; null: no bound"""
    commit_every_steps: int = Field(1, ge=1)
    """interval of commits (checkpoints)"""
    async_checkpoints: bool | None = None
    """write checkpoints in the background; the commit follows; null: those of a model of
    transformers on a GPU"""
    record_facts: bool = True
    """record with each commit what its steps measured of each row"""
    record_tokens: bool = False
    """and of each token: 16 bytes"""
    device: Device = "cpu"
    """where the trainer computes: `cpu`, `cuda`, `cuda:1`; of several ranks on a machine, `cuda`
    is a GPU for each"""
    deterministic: bool = True
    """ask torch for deterministic algorithms, so that a replay gives the same bits"""
    max_steps: int | None = Field(None, ge=1)
    """the trainer ends after this step (with --follow, the run); null: no bound"""
    max_skipped_steps: int = Field(3, ge=1)
    """skipped in a row, as not finite, before the trainer ends"""
    max_rejected_steps: int = Field(6, ge=1)
    """rejected in a row as invalid or damaged before the process ends"""
    lease_ttl_s: float = Field(30.0, gt=0, le=1e9)
    """a trainer or strategy silent for this long may be replaced"""
    stalled_after_s: float | None = Field(1800.0, gt=0, le=1e9)
    """all end, with exit code 3, once nothing has moved for this long; null: never"""
    tokens_per_microbatch: int | None = Field(None, ge=1)
    """token budget of a micro-batch; null: a step is one micro-batch"""
    max_tokens: int | None = Field(None, ge=1)
    """longer experiences are rejected; null: none"""
    layout: Literal["padded", "packed"] = "padded"
    """layout of a micro-batch's rows"""

    @override
    def model_post_init(self, context: Any) -> None:
        """Raise InvalidArgumentError for a run that would wait forever, or lacks a part."""
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
"""Sections that are merged key by key. ``loss`` is not: its ``args`` belong to its ``name``."""


def parsed(path: Path) -> dict[str, Any]:
    """Return the table in a TOML or YAML file.

    Raises:
        InvalidArgumentError: it does not exist, or cannot be read.
    """
    try:
        text = path.read_text("utf-8-sig")  # editors of Windows begin a file with a BOM
        table = _yaml(text) if path.suffix in YAML else tomllib.loads(text)
    except OSError as error:
        raise InvalidArgumentError(f"configuration {path}: {error.strerror}") from error
    except RecursionError as error:
        raise InvalidArgumentError(f"configuration {path}: it is nested too deeply") from error
    except ValueError as error:
        known = path.suffix in (".toml", *YAML)
        read_as = "" if known else f" (read as TOML; YAML ends with {' or '.join(YAML)})"
        raise InvalidArgumentError(f"configuration {path}: {error}{read_as}") from error
    if not isinstance(table, dict):
        raise InvalidArgumentError(f"configuration {path}: it holds no table")
    return table


def _yaml(text: str) -> Any:
    import yaml  # noqa: PLC0415 - few configurations are YAML

    try:
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:  # its text would quote the file, and a password in it
        mark = error.problem_mark
        place = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        raise ValueError(f"{error.problem}{place}") from None
    except yaml.YAMLError as error:
        raise ValueError("it holds a character that YAML does not allow") from error


def store_in(path: Path) -> str | None:
    """Return the store that a file names: a URL, or a path relative to the folder of the file.

    Raises:
        InvalidArgumentError: the file has an unknown key, which may have meant the store.
    """
    refuse_unknown(parsed(path), f"configuration {path}: ", PLACES)
    store = _text(path, "store")
    if store is None or "://" in store:
        return store
    return str(path.parent / Path(store).expanduser())


def experiment_in(path: Path) -> str | None:
    """Return the experiment that a file names."""
    return _text(path, "experiment")


def _text(path: Path, key: str) -> str | None:
    value = parsed(path).get(key)
    if value is not None and not (isinstance(value, str) and value and "\0" not in value):
        raise InvalidArgumentError(
            f"configuration {path}: {key}={value!r}: it must be a text, without NUL"
        )
    return value


def read_file(path: Path) -> dict[str, Any]:
    """Return the configuration in a TOML or YAML file.

    Raises:
        InvalidArgumentError: it does not exist, cannot be read, or has an unknown key.
    """
    values = {key: value for key, value in parsed(path).items() if key not in PLACES}
    refuse_unknown(values, f"configuration {path}: ")
    if isinstance(values.get("model"), str) or OWN & values.keys():
        values["folder"] = str(_path_in(path, "folder", str(values.get("folder", ""))))
    for key in ("reference", "teacher"):
        if isinstance(values.get(key), str):
            place = _path_in(path, key, values[key])
            # What does not exist there may still be relative to the current folder.
            values[key] = str(place) if place.exists() else values[key]
    return values


def _path_in(path: Path, key: str, text: str) -> Path:
    """Return the file or folder that a key of the file ``path`` names, relative to its folder."""
    try:
        place = (path.parent / text).resolve()
        with suppress(FileNotFoundError):
            place.lstat()
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: links in a circle
        wrong = error.strerror if isinstance(error, OSError) else error
        raise InvalidArgumentError(f"configuration {path}: {key}={text!r:.100}: {wrong}") from error
    else:
        return place


def is_folder(path: Path) -> bool:
    """Return whether there is such a folder; False too for a text that cannot be a path."""
    try:
        return path.is_dir()
    except OSError:
        return False


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``changes``; a section keeps the keys that ``changes`` leaves out."""
    result = {**base, **changes}
    for key, value in changes.items():
        if key in SECTIONS and isinstance(value, Mapping) and isinstance(base.get(key), Mapping):
            result[key] = {**base[key], **value}
    return result


def overridden(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return ``values`` with overrides like ``optimizer.learning_rate=3e-4`` applied.

    Another ``algorithm`` or ``loss.name`` drops the arguments of the previous loss.

    Raises:
        InvalidArgumentError: an override without ``=``, or of a key inside a plain value.
    """
    result = dict(values)
    # Those that change the loss come first, or they would drop arguments that are set here too.
    for override_ in sorted(overrides, key=_keeps_the_loss):
        key, equals, text = override_.partition("=")
        if not equals:
            raise InvalidArgumentError(f"override {override_!r}: write it as section.key=value")
        *sections, last = key.split(".")
        table = result
        for section in sections:
            inner = table.get(section) or {}
            if not isinstance(inner, Mapping):
                raise InvalidArgumentError(
                    f"override {override_!r}: {section!r} is {inner!r}, which has no keys"
                )
            table[section] = dict(inner)
            table = table[section]
        value = _value_of(text)
        loss = result.get("loss") or {}
        changes = not _keeps_the_loss(override_) and table.get(last) != value
        if changes and isinstance(loss, Mapping):  # anything else `resolved` refuses
            name = loss.get("name")
            if key == "loss.name" or name is None:  # else the arguments are of that loss
                result["loss"] = {"name": name}
            table = result if key == "algorithm" else result["loss"]
        table[last] = value
    return result


def _keeps_the_loss(override_: str) -> bool:
    return override_.partition("=")[0] not in ("algorithm", "loss.name")


def _value_of(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:  # not TOML, or a number of thousands of digits
        return None if text in ("none", "null") else text
    except RecursionError as error:
        raise InvalidArgumentError("--set: a value is nested too deeply") from error


def resolved(values: Mapping[str, Any]) -> RunConfig:
    """Return the configuration.

    Raises:
        InvalidArgumentError: an unknown key or an impossible value; the message names the key and
            what is accepted.
    """
    refuse_unknown(values, "")
    # Their rows have no siblings to be compared with, so a group is one row.
    alone = {"rollouts_per_group": 1} if values.get("algorithm") in OF_RECORDED_DATA else {}
    try:
        config = RunConfig.model_validate({**alone, **values})
    except ValidationError as error:
        problems = filter(None, map(_problem, error.errors()))
        raise InvalidArgumentError("; ".join(problems)) from error
    require_computable(config.model_dump())
    return config


def _problem(error: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a key; a check of several keys names them in its own message.

    None: ``model`` may be a section or a text, and this is about the one that was not given.
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
    return f"{place}={_excerpt(error['input'])}: {message}" if place else str(message)


def require_computable(value: Any, key: str = "") -> None:
    """Raise InvalidArgumentError unless numbers fit int64 or float32, and texts hold no NUL."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            require_computable(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for place, inner in enumerate(value):
            require_computable(inner, f"{key}[{place}]")
    elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise InvalidArgumentError(
            f"{key}={_excerpt(value)}: an integer has at most 64 bits, from {-(1 << 63)} to "
            f"{(1 << 63) - 1}"
        )
    elif isinstance(value, float) and abs(value) > LARGEST:
        raise InvalidArgumentError(
            f"{key}={value}: the largest number that can be computed with is {LARGEST:.4e}"
        )
    elif isinstance(value, str) and "\0" in value:
        raise InvalidArgumentError(f"{key}={_excerpt(value)}: NUL has no place in a text")


def _excerpt(value: Any) -> str:
    try:
        return f"{value!r:.100}"
    except ValueError:  # Python refuses to print such a number
        return "a number of thousands of digits"


def refuse_unknown(values: Mapping[str, Any], where: str, beside: Sequence[str] = ()) -> None:
    """Raise InvalidArgumentError for an unknown key, or a plain value in place of a section.

    Args:
        values: to check; each key must be one of the configuration.
        where: what the message begins with.
        beside: further keys that are allowed.
    """
    for key, value in values.items():
        if key in beside:
            continue
        if key not in RunConfig.model_fields:
            raise InvalidArgumentError(f"{where}{_no_key(key, '', RunConfig, beside)}")
        annotation = RunConfig.model_fields[key].annotation
        inner = section_of(annotation)
        if inner is not None and isinstance(value, Mapping):
            name = next((name for name in value if name not in inner.model_fields), None)
            if name is not None:
                raise InvalidArgumentError(f"{where}{_no_key(name, f'{key}.', inner)}")
        elif inner is annotation and inner is not None:
            names = ", ".join(sorted(inner.model_fields))
            raise InvalidArgumentError(
                f"{where}{key}={_excerpt(value)}: must be a table of {names}"
            )


def _no_key(key: object, prefix: str, section: type[BaseModel], beside: Sequence[str] = ()) -> str:
    """Return a message about an unknown key of a section, and the key that was probably meant.

    A key of the same name in another section is a better guess than a similar name in this one.
    """
    here = [*section.model_fields, *beside]
    paths = list(RunConfig.model_fields)
    for name, field in RunConfig.model_fields.items():
        inner = section_of(field.annotation)
        paths += [] if inner is None else [f"{name}.{one}" for one in inner.model_fields]
    meant = [path for path in paths if path.rpartition(".")[2] == key]
    meant += [prefix + name for name in difflib.get_close_matches(str(key), here, n=1)]
    hint = f"did you mean {meant[0]!r}?" if meant else f"there are: {', '.join(sorted(here))}"
    return f"there is no key {prefix + str(key)!r}; {hint}"


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section that a key holds, or may hold; None if it only holds plain values."""
    kinds = get_args(annotation) or (annotation,)
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)


def of_experiment(config: Mapping[str, Any]) -> RunConfig:
    """Return the configuration that an experiment recorded, with defaults for missing keys.

    Raises:
        InvalidArgumentError: a known key has an impossible value.
    """
    return resolved({key: value for key, value in config.items() if key in RunConfig.model_fields})


def require_model(experiment: str, config: Mapping[str, Any], *, explores: bool = False) -> None:
    """Raise InvalidArgumentError unless the configuration of an experiment names a model.

    One that was made in Python or by a recorder does not.
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


def require_parts_of(
    config: RunConfig,
    *,
    schema: str = "experience",
    columns: Collection[str] | None = None,
    experiments: Collection[str] | None = None,
) -> None:
    """Raise InvalidArgumentError unless a run has what its algorithm needs.

    Args:
        config: of the run.
        schema: of its data.
        columns: of the stored rows; None: of those that our explorers will record.
        experiments: of the store; None if it does not exist yet.
    """
    algorithm = algorithm_of(config)
    if "rollouts_per_group" in config.algorithm_args:
        raise InvalidArgumentError(
            "algorithm_args.rollouts_per_group: say rollouts_per_group, which the explorers read"
        )
    if config.trainer == strategy_of(algorithm):
        raise InvalidArgumentError(
            f"trainer={config.trainer!r} is the name of the strategy's annotation set: give the "
            "trainer another"
        )
    correction = algorithm.choices["importance_correction"].name
    if correction != "none" and not config.recompute_old_logprob:
        raise InvalidArgumentError(
            f"importance_correction={correction!r} needs recompute_old_logprob=true: it compares "
            "the trainer's log-probabilities with those of the rollouts"
        )
    require(
        algorithm,
        schema=schema,
        columns=columns,
        rollouts_per_group=config.rollouts_per_group,
        teacher=config.teacher is not None,
        expert=config.expert_experiment,
        experiments=experiments,
    )


def algorithm_of(config: RunConfig) -> Algorithm:
    """Return the algorithm of a run.

    Of two settings the more specific one wins: a key of its own (``strategy``, ``strategy_args``,
    ``loss``, ``optimizer.entropy_coef``), then ``algorithm_args``, then the algorithm's recipe.
    ``rollouts_per_group`` is a key only, because explorers read it.

    Raises:
        UnknownNameError: a name that is not registered.
        InvalidArgumentError: an unknown argument; the message says what is accepted.
    """
    user: dict[str, Any] = dict(config.algorithm_args)
    user["rollouts_per_group"] = config.rollouts_per_group
    # Arguments belong to the part that they were written for: another part drops them.
    if config.strategy is not None:
        user["add_strategy"] = config.strategy.split("+")
        user.pop("add_strategy_args", None)
    if config.strategy_args:
        user["add_strategy_args"] = config.strategy_args
    if config.loss.name is not None and config.loss.name != user.get("policy_loss_fn"):
        user["policy_loss_fn"] = config.loss.name
        user.pop("policy_loss_fn_args", None)
    if config.loss.args:
        user["policy_loss_fn_args"] = {**user.get("policy_loss_fn_args", {}), **config.loss.args}
    coefficient = config.optimizer.entropy_coef
    if coefficient is not None:
        # A coefficient asks for a bonus, even if the algorithm's recipe has none.
        own = build(config.algorithm).choices["entropy_loss_fn"].name
        if own == "none" and coefficient:
            user.setdefault("entropy_loss_fn", "default")
        if user.get("entropy_loss_fn", own) != "none":
            args = user.get("entropy_loss_fn_args", {})
            user["entropy_loss_fn_args"] = {**args, "entropy_coef": coefficient}
    look_for(user.values(), config.folder)
    return build(config.algorithm, **user)


def look_for(names: Iterable[object], folder: str | None) -> None:
    """Make classes importable that are named by path: from the current folder and the run's.

    Without such a name the folders stay off sys.path: a file in them may shadow another module.
    """
    listed = [entry for name in names for entry in (name if isinstance(name, list) else [name])]
    if any(isinstance(entry, str) and is_path(entry) for entry in listed):
        look_in()
        look_in(folder)


def parts_of(algorithm: Algorithm) -> dict[str, object]:
    """Return the classes of an algorithm's parts, by what messages call them."""
    chosen = [("add_strategy", choice) for choice in algorithm.strategies]
    chosen += algorithm.choices.items()
    return {f"{part} {choice.name!r}": choice.cls for part, choice in chosen}


def recorded(config: RunConfig) -> dict[str, Any]:
    """Return what an experiment of this run records: its configuration, and the data's schema."""
    return config.model_dump() | {"schema": algorithm_of(config).type.schema}


async def require_expert(store: Store, name: str, config: RunConfig, *, rows: bool = False) -> None:
    """Raise InvalidArgumentError if the expert's experiment exists and is not one of solutions.

    Args:
        store: of both.
        name: of the run.
        config: of the run.
        rows: it must already hold some, because this run will not wait for them.
    """
    expert = config.expert_experiment
    if expert is None or expert not in await store.experiments():
        return
    if expert == name:
        raise InvalidArgumentError(
            f"expert_experiment={expert!r} is the run itself: its rows are not an expert's; record "
            "solutions in another experiment of the schema 'sft', and name that"
        )
    opened = await store.experiment(expert)
    schema = opened.config.get("schema", "experience")
    if schema != "sft":
        raise InvalidArgumentError(
            f"expert_experiment={expert!r} is of the schema {schema!r}: an expert's solutions are "
            "of 'sft'; record them in an experiment of that schema, and name it"
        )
    if rows and not await opened.columns():
        raise InvalidArgumentError(
            f"expert_experiment={expert!r} holds no rows yet: record the expert's solutions first, "
            "or wait for them with --follow"
        )
