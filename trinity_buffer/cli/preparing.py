"""The experiment of a run, made or changed as a configuration says."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from trinity_buffer.cli.demo_ends import require_policies
from trinity_buffer.cli.ends import ends_of
from trinity_buffer.cli.expert_check import require_expert
from trinity_buffer.cli.options import made_folder_of, only_one
from trinity_buffer.cli.ranks import device_here
from trinity_buffer.cli.run_algorithm import algorithm_of, recorded, require_parts_of
from trinity_buffer.cli.run_config import (
    RunConfig,
    merged,
    of_experiment,
    overridden,
    require_model,
    resolved,
)
from trinity_buffer.errors import InvalidArgumentError, UnknownStoreError
from trinity_buffer.identity import require_name
from trinity_buffer.pipeline.annotating.recorded_strategy import RECORDED
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.pipeline.store import Store, open_store
from trinity_buffer.store import queries
from trinity_buffer.trainer.requirements import strategy_of

DEFAULT_NAME = "run"


async def prepare(
    url: str,
    name: str | None,
    file: Mapping[str, Any],
    overrides: Sequence[str],
    *,
    explores: bool = False,
) -> str:
    """Return the experiment's name, after it was created or what changed was recorded.

    A refusal records nothing, and makes neither a store nor its folder.

    Args:
        name: of the experiment; None: the only one there is but for its turns, else `DEFAULT_NAME`.
        file: what a configuration file says.
        overrides: as ``optimizer.learning_rate=3e-4``.
        explores: what rollouts are made with must be there; else what is trained.

    Raises:
        InvalidArgumentError: says which key is wrong, or what the run lacks.
    """
    wanted = _Wanted(file, overrides, explores)
    with suppress(UnknownStoreError):
        async with open_store(url, create=False) as store:
            return await _record(store, name, wanted)
    require_name("an experiment's name", name or DEFAULT_NAME)
    wanted.settings()
    made_folder_of(url)
    async with open_store(url) as store:
        return await _record(store, name, wanted)


async def _record(store: Store, name: str | None, wanted: _Wanted) -> str:
    names = await store.experiments()
    name = name or only_one(names) or DEFAULT_NAME
    if name not in names:
        settings = wanted.settings(names)
        await require_expert(store, name, of_experiment(settings))
        await store.experiment(name, config=settings)
        return name
    opened = await store.experiment(name)
    before = opened.config
    changed = wanted.settings(names, before, await opened.columns())
    require_model(name, {**before, **wanted.file}, explores=wanted.explores)
    await require_expert(store, name, of_experiment(changed))
    await _require_the_same_set(opened, of_experiment(changed))
    # What is recorded beside a run's own keys stays.
    await store.experiment(name, config={**before, **changed})
    return name


async def _require_the_same_set(experiment: Experiment, config: RunConfig) -> None:
    """Return if the trainer of the run, where it has begun, goes on with the same annotation set.

    Raises:
        InvalidArgumentError: it trains on another one.
    """
    row = await experiment.database.read(queries.consumer_row, experiment.key, config.trainer)
    reads = strategy_of(algorithm_of(config)) or RECORDED
    if row is not None and row.kind == "trainer" and row.config.get("strategy") != reads:
        raise InvalidArgumentError(
            f"trainer {config.trainer!r} of experiment {experiment.name!r} trains on "
            f"{row.config.get('strategy')!r}, and algorithm={config.algorithm} would read "
            f"{reads!r}: name another trainer too (--set trainer=NAME), or another --experiment"
        )


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a command says of its run; see `prepare`."""

    file: Mapping[str, Any]
    overrides: Sequence[str]
    explores: bool

    def settings(
        self,
        names: Collection[str] = (),
        before: Mapping[str, Any] | None = None,
        columns: Collection[str] | None = None,
    ) -> dict[str, Any]:
        """Return what the experiment shall record, if all that it needs is there."""
        before = before or {}
        known = of_experiment(before).model_dump()
        if "rollouts_per_group" not in before:
            del known["rollouts_per_group"]  # its default is that of the algorithm
        values = merged(known, self.file)
        settings = resolved(overridden(values, self.overrides))
        changed = recorded(settings)
        # What nobody knows, or what cannot be trained, must not be what everybody reads.
        if "/" in settings.trainer and settings.trainer != before.get("trainer"):
            raise InvalidArgumentError(f"trainer={settings.trainer}: must be a text without '/'")
        require_policies(settings)
        require_parts_of(
            settings,
            schema=before.get("schema", changed["schema"]),
            columns=columns,
            experiments=names,
        )
        if not self.explores:
            device_here(settings.device)
        ends = ends_of(settings)
        (ends.require_explorable if self.explores else ends.require_trainable)()
        return changed
