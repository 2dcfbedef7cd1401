"""A trainer's beginning: its annotation set is there, or waited for; then it is registered."""

from __future__ import annotations

from trinity_buffer.algorithm.arguments import did_you_mean
from trinity_buffer.errors import ConflictingStrategyError, UnknownNameError
from trinity_buffer.events import ConsumerRegistered
from trinity_buffer.pipeline.events import new_event, now_us
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.pipeline.presence import Presence
from trinity_buffer.pipeline.spoken_wait import SpokenWait
from trinity_buffer.pipeline.streaming.stream_options import StreamOptions
from trinity_buffer.store import queries
from trinity_buffer.store.rows import ConsumerRow


async def register(experiment: Experiment, consumer: str, annotation_set: str) -> ConsumerRow:
    """Return the trainer ``consumer`` of ``annotation_set``, registered now if it was not.

    Raises:
        ConflictingStrategyError: the name is taken by something else.
    """
    config = {"strategy": annotation_set}
    event = new_event(ConsumerRegistered(consumer=consumer, kind="trainer", config=config))
    row = await experiment.database.write(
        queries.registered, experiment.key, consumer, event, clock=now_us
    )
    if row.kind != "trainer" or row.config != config:
        raise ConflictingStrategyError(
            f"consumer {consumer!r} is a {row.kind} on {row.config.get('strategy')!r}, not a "
            f"trainer on {annotation_set!r}: give this one a name of its own, consumer="
        )
    return row


async def has_set(experiment: Experiment, options: StreamOptions) -> bool:
    """Return whether the set of a stream is there; False if it is to be waited for.

    Raises:
        UnknownNameError: it is not, and no wait was asked for.
    """
    known = await _sets(experiment)
    if options.strategy is None or options.strategy in known:
        return True
    if not (options.follow and options.wait_for_set):
        raise UnknownNameError(_unknown(experiment, options.strategy, known))
    return False


async def wait_for_set(experiment: Experiment, options: StreamOptions) -> None:
    """Return once somebody annotates the set of a stream; say so aloud meanwhile.

    Raises:
        UnknownNameError: the experiment is finished without it.
    """
    name = options.strategy or ""

    async def tell() -> str:
        lacking = _unknown(experiment, name, await _sets(experiment))
        return f"trainer {options.consumer!r} waits: {lacking}"

    changes = experiment.database.changes
    presence = Presence(experiment.database, experiment.key, "trainer", options.consumer)
    wait = SpokenWait(changes, tell, presence)
    while True:
        state = await changes.state()
        finished = await experiment.is_finished()
        known = await _sets(experiment)
        if name in known:
            return
        if finished:
            lacking = _unknown(experiment, name, known)
            raise UnknownNameError(f"the experiment was finished: {lacking}")
        await wait.changed(state)


async def _sets(experiment: Experiment) -> list[str]:
    consumers = await experiment.database.read(queries.consumers, experiment.key)
    return [row.name for row in consumers.values() if row.kind == "strategy"]


def _unknown(experiment: Experiment, name: str, known: list[str]) -> str:
    return (
        f"experiment {experiment.name!r} has no annotation set {name!r} (there: "
        f"{', '.join(known) or 'none'}{did_you_mean(name, known)}); no process annotates it: run "
        f"a strategy of this name, `trinity-buffer annotate --name {name} --follow`"
    )
