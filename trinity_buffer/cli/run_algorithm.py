"""The algorithm of a run, from its configuration. One rule says which of two settings wins."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from trinity_buffer.algorithm import Algorithm, build
from trinity_buffer.algorithm.registry import is_path
from trinity_buffer.cli.run_config import RunConfig
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.own_code import look_in
from trinity_buffer.trainer.requirements import require, strategy_of


def require_parts_of(
    config: RunConfig,
    *,
    schema: str = "experience",
    columns: Collection[str] | None = None,
    experiments: Collection[str] | None = None,
) -> None:
    """Return if a run has what its algorithm needs; see `requirements.require`.

    Args:
        config: of the run.
        schema: of its data.
        columns: of the rows that are stored; None: there will be those that our explorers record.
        experiments: of the store, None if it is not there yet.

    Raises:
        InvalidArgumentError: says what is lacking, and what to do.
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

    The algorithm's own recipe gives way to ``algorithm_args``, and these to the keys that say one
    thing each, where they are set: ``strategy`` and ``strategy_args``, ``loss``,
    ``optimizer.entropy_coef``. ``rollouts_per_group`` is a key alone: explorers read it.

    Raises:
        UnknownNameError: a name that is not registered.
        InvalidArgumentError: an argument that nothing takes; the message says what is accepted.
    """
    user: dict[str, Any] = dict(config.algorithm_args)
    user["rollouts_per_group"] = config.rollouts_per_group
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
        own = build(config.algorithm).choices["entropy_loss_fn"].name
        if own == "none" and coefficient:
            user.setdefault("entropy_loss_fn", "default")
        if user.get("entropy_loss_fn", own) != "none":
            given = user.get("entropy_loss_fn_args", {})
            user["entropy_loss_fn_args"] = {**given, "entropy_coef": coefficient}
    look_for(user.values(), config.folder)
    return build(config.algorithm, **user)


def look_for(names: Iterable[object], folder: str | None) -> None:
    """Let classes that are named by their path be imported: from the current folder, and the run's.

    The folders are not looked in for anything else: a file of theirs may be called as a module.
    """
    listed = [one for name in names for one in (name if isinstance(name, list) else [name])]
    if any(isinstance(one, str) and is_path(one) for one in listed):
        look_in()
        look_in(folder)


def parts_of(algorithm: Algorithm) -> dict[str, object]:
    """Return the classes that an algorithm is made of, by what they are called."""
    chosen = [("add_strategy", choice) for choice in algorithm.strategies]
    chosen += algorithm.choices.items()
    return {f"{part} {choice.name!r}": choice.cls for part, choice in chosen}


def recorded(config: RunConfig) -> dict[str, Any]:
    """Return what an experiment of this run records: its configuration, and the data's schema."""
    return config.model_dump() | {"schema": algorithm_of(config).type.schema}
