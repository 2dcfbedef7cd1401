"""The configuration of a run: defaults, then a TOML or YAML file, then dotted overrides.

The resolved configuration is the first event of the experiment, and every process of the run reads
it from there.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import override

from trinity_buffer import options
from trinity_buffer.algorithm import ADVANTAGE_FN, ALGORITHM_TYPE, Algorithm, build
from trinity_buffer.algorithm.algorithm import PARTS
from trinity_buffer.algorithm.arguments import is_path
from trinity_buffer.algorithm.building import recipe_of
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.pipeline.config import CONFIG, SECTIONS, RunConfig, refuse_unknown
from trinity_buffer.pipeline.store import Store
from trinity_buffer.pipeline.write.planning import Admission
from trinity_buffer.user_code import look_in

YAML = (".yaml", ".yml")
"""Endings of YAML files; any other file is TOML."""

PLACES = ("store", "experiment")
"""Keys of a file that say where the run is, which is not part of its configuration."""

OWN = frozenset({"tokenizer", "rollout", "tasks", "evaluate", "folder"})
"""Keys of a run of the user's own, beside ``model``, which may be a section of the demo's."""

OF_RECORDED_DATA = ("sft", "cpt", "dpo")
"""Algorithms that train on single rows, which nothing plans and no group waits for."""

_MERGED = SECTIONS.keys() - {"loss"}
"""Sections that are merged key by key. The ``args`` of a loss belong to its ``name``."""


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
    return options.renamed(table, source=(f"configuration {path}", text))


def _yaml(text: str) -> Any:
    import yaml  # noqa: PLC0415 - few configurations are YAML

    class OnceOnly(yaml.SafeLoader):
        """Refuses a key that stands twice in a table, as TOML does: the first would be lost."""

        @override
        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            node = super().compose_mapping_node(anchor)
            keys = dict[Any, Any]()
            for key, _ in node.value:
                if keys.setdefault((key.tag, str(key.value)), key) is not key:
                    problem = f"the key {key.value!r:.40} is there twice"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            return node

    try:
        return yaml.load(text, OnceOnly)
    except yaml.MarkedYAMLError as error:  # its text would quote the file, and a password in it
        mark = error.problem_mark
        place = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        raise ValueError(f"{error.problem}{place}") from None
    except yaml.YAMLError as error:
        raise ValueError("it holds a character that YAML does not allow") from error


class RunFile(NamedTuple):
    """What a configuration file holds.

    Attributes:
        store: a URL, or a path relative to the current folder.
        values: the configuration; None: there is no file.
    """

    store: str | None = None
    experiment: str | None = None
    values: dict[str, Any] | None = None


def read_file(path: Path) -> RunFile:
    """Return the content of a TOML or YAML file, its paths resolved.

    Raises:
        InvalidArgumentError: it does not exist, cannot be read, has an unknown key, or a value that
            its key cannot have; the message names the file.
    """
    values, where = parsed(path), f"configuration {path}: "
    refuse_unknown(values, where, PLACES)
    store, experiment = places = [values.pop(key, None) for key in PLACES]
    for key, value in zip(PLACES, places, strict=True):
        if value is not None and not (isinstance(value, str) and value and "\0" not in value):
            raise InvalidArgumentError(f"{where}{key}={value!r}: it must be a text, without NUL")
    if store is not None and "://" not in store:
        store = str(path.parent / Path(store).expanduser())
    try:
        options.values_of(RunConfig, values, strict=False)
        _require_recordable(values)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{where}{error}") from error
    if isinstance(values.get("model"), str) or OWN & values.keys():
        values["folder"] = str(_path_in(path, "folder", str(values.get("folder") or "")))
    for key in ("reference", "teacher"):
        if isinstance(values.get(key), str):
            place = _path_in(path, key, values[key])
            # What does not exist there may still be relative to the current folder.
            values[key] = str(place) if place.exists() else values[key]
    return RunFile(store, experiment, values)


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


def merged(
    base: Mapping[str, Any], changes: Mapping[str, Any], sections: Collection[str] | None = None
) -> dict[str, Any]:
    """Return ``base`` with ``changes``; a section keeps the keys that ``changes`` leaves out."""
    result = {**base, **changes}
    for key, value in changes.items():
        is_section = key in (_MERGED if sections is None else sections)
        if is_section and isinstance(value, Mapping) and isinstance(base.get(key), Mapping):
            result[key] = {**base[key], **value}
    return result


def left_out(config: RunConfig, file: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    """Return, as ``key=value``, what differs in ``config`` from its default and stands nowhere.

    Args:
        config: of a run that has begun.
        file: the content of its file.
        overrides: beside the file.
    """
    usual = _flat(asdict(resolved({"algorithm": config.algorithm})))
    written = _flat(file).keys() | {options.renamed_key(of.partition("=")[0]) for of in overrides}
    return [
        f"{key}={options.excerpt(value)}"
        for key, value in _flat(asdict(config)).items()
        if value != usual.get(key)
        if key not in written
        if not any(above.startswith(f"{key}.") for above in written)
    ]


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` by dotted keys; a section that has a plain value is a key itself."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if key in SECTIONS and isinstance(value, Mapping):
            flat |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            flat[key] = value
    return flat


def overridden(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return ``values`` with overrides like ``optimizer.learning_rate=3e-4`` applied.

    Another ``algorithm`` or ``loss.name`` drops the arguments of the previous loss.

    Raises:
        InvalidArgumentError: an override without ``=``, or of a key inside a plain value.
    """
    result = dict(values)
    # Those that change the loss come first, or they would drop arguments that are set here too.
    first = ("algorithm=", "loss.name=")
    for override_ in sorted(overrides, key=lambda text: not text.startswith(first)):
        key, equals, text = override_.partition("=")
        if not equals:
            raise InvalidArgumentError(f"override {override_!r}: write it as section.key=value")
        *sections, last = options.renamed_key(key).split(".")
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
        is_another = override_.startswith(first) and table.get(last) != value
        table |= {last: value} if sections else merged(table, {last: value})
        loss = result.get("loss")
        # The arguments are of a named loss, whatever the algorithm; else of the algorithm's own.
        if is_another and isinstance(loss, Mapping) and (sections or loss.get("name") is None):
            result["loss"] = {"name": loss.get("name")}
    return result


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
    read = options.values_of(RunConfig, {**alone, **values}, strict=False)
    for name in SECTIONS.keys() & read.keys():
        if isinstance(read[name], Mapping):
            try:
                read[name] = SECTIONS[name](**read[name])
            except InvalidArgumentError as error:  # of several options together
                raise InvalidArgumentError(f"{name}.{error}") from error
    config = RunConfig(**read)
    _require_recordable(asdict(config))
    if config.rollout is not None and not (config.tasks and isinstance(config.model, str)):
        raise InvalidArgumentError(
            f"rollout={config.rollout!r} needs tasks, and a model of your own: give all three "
            "(`trinity-buffer init FOLDER` writes an example)"
        )
    own = ("tasks", "evaluate", "server", "server_type", "explorer", "max_tokens")
    idle = [key for key in own if getattr(config, key) != getattr(RunConfig, key)]
    if idle and not isinstance(config.model, str):
        raise InvalidArgumentError(
            f"{idle[0]}={getattr(config, idle[0])} is read by a run of your own alone: give it "
            "a model of your own too"
        )
    # Such a run would wait for its own commit for ever.
    rules = Admission(max_staleness=config.max_staleness)
    rules.require_commits(config.commit_every_steps, "commit_every_steps")
    return config


def _require_recordable(value: Any, key: str = "") -> None:
    """Raise InvalidArgumentError for what JSON or 64 bits cannot hold, or NUL in a text."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _require_recordable(inner, f"{key}.{name}" if key else str(name))
        return
    if isinstance(value, list | tuple):
        for place, inner in enumerate(value):
            _require_recordable(inner, f"{key}[{place}]")
        return
    wrong = None
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        wrong = f"an integer has at most 64 bits, from {-(1 << 63)} to {(1 << 63) - 1}"
    elif isinstance(value, float) and not abs(value) <= options.LARGEST:
        wrong = f"the largest number that can be computed with is {options.LARGEST:.4e}"
    elif isinstance(value, str) and "\0" in value:
        wrong = "NUL has no place in a text"
    elif not isinstance(value, int | float | str | None):
        wrong = "must be made of texts, numbers, lists and tables"
    if wrong is not None:
        raise InvalidArgumentError(f"{key}={options.excerpt(value)}: {wrong}")


def of_experiment(config: Mapping[str, Any]) -> RunConfig:
    """Return the configuration that an experiment recorded, with defaults for missing keys.

    Raises:
        InvalidArgumentError: a known key has an impossible value.
    """
    return resolved({key: value for key, value in config.items() if key in CONFIG})


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
    strategies, loss = (config.strategy or "").split("+"), config.loss.name
    look_for([config.algorithm, *user.values(), strategies, loss], config.folder)
    recipe = recipe_of(ALGORITHM_TYPE.get(config.algorithm))
    # Arguments belong to the part that they were written for: another part drops them.
    if config.strategy is not None:
        before = user.get("add_strategy", [*recipe.add_strategy])
        if strategies != ([before] if isinstance(before, str) else before):
            user.pop("add_strategy_args", None)
        user["add_strategy"] = strategies
    if config.strategy_args:
        given, wanted = user.get("add_strategy_args") or {}, user.get("add_strategy")
        names = recipe.add_strategy if wanted is None else wanted
        tables = tables_of([names] if isinstance(names, str) else names)
        user["add_strategy_args"] = merged(given, config.strategy_args, tables)
    if loss is not None:
        if loss != user.get("policy_loss_fn", recipe.policy_loss_fn):
            user.pop("policy_loss_fn_args", None)
        user["policy_loss_fn"] = loss
    if config.loss.args:
        user["policy_loss_fn_args"] = {**user.get("policy_loss_fn_args", {}), **config.loss.args}
    coefficient = config.optimizer.entropy_coef
    if coefficient is not None:
        # A coefficient asks for a bonus, even if the algorithm's recipe has none.
        own = recipe.entropy_loss_fn
        if own == "none" and coefficient:
            user.setdefault("entropy_loss_fn", "default")
        if user.get("entropy_loss_fn", own) != "none":
            args = user.get("entropy_loss_fn_args", {})
            user["entropy_loss_fn_args"] = {**args, "entropy_coef": coefficient}
    return build(config.algorithm, **user)


def tables_of(strategies: Sequence[str]) -> Sequence[str]:
    """Return the keys of a strategy's arguments that are tables: of several, each has its own."""
    return strategies if len(strategies) > 1 else ()


def effective(config: RunConfig) -> RunConfig:
    """Return a recorded configuration without what changes nothing of its training.

    Some of it is refused of a new run, and what was trained is replayed all the same.
    """
    args = dict(config.algorithm_args)
    look_for([config.algorithm, *args.values()], config.folder)
    recipe = recipe_of(ALGORITHM_TYPE.get(config.algorithm))
    advantage = args.get("advantage_fn", recipe.advantage_fn)
    if advantage is None or not ADVANTAGE_FN.get(advantage).reads_rewards:
        args.pop("kl_penalty_fn", None)
    for part in PARTS:
        is_asked = part == "entropy_loss_fn" and config.optimizer.entropy_coef
        if args.get(part, getattr(recipe, part)) in (None, "none") and not is_asked:
            args.pop(f"{part}_args", None)
    config = replace(config, algorithm_args=args, evaluation=type(config.evaluation)())
    algorithm = algorithm_of(config)
    reference = config.reference if algorithm.needs_reference else None
    teacher = config.teacher if "teacher_logprob" in algorithm.reads else None
    return replace(config, reference=reference, teacher=teacher)


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
    """Return the recorded configuration of a run: its keys, and the data's schema."""
    return asdict(config) | {"schema": algorithm_of(config).type.schema}


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
    opened = await store.experiment(expert)
    schema, wrong = opened.config.get("schema", "experience"), None
    if expert == name:
        wrong = (
            "is the run itself: its rows are not an expert's; record solutions in another "
            "experiment of the schema 'sft', and name that"
        )
    elif schema != "sft":
        wrong = (
            f"is of the schema {schema!r}: an expert's solutions are of 'sft'; record them in an "
            "experiment of that schema, and name it"
        )
    elif rows and not await opened.columns():
        wrong = (
            "holds no rows yet: record the expert's solutions first, or wait for them with --follow"
        )
    if wrong is not None:
        raise InvalidArgumentError(f"expert_experiment={expert!r} {wrong}")
