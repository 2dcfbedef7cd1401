"""Whether the experiment that a run names as its expert's can be one."""

from __future__ import annotations

from trinity_buffer.cli.run_config import RunConfig
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.pipeline.store import Store


async def require_expert(store: Store, name: str, config: RunConfig, *, rows: bool = False) -> None:
    """Return if the expert's experiment of the run ``name``, where it is there, holds solutions.

    Args:
        store: of both.
        name: of the run.
        config: of the run.
        rows: it must hold some already: nobody will wait for them.

    Raises:
        InvalidArgumentError: says what it is instead.
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
