"""What a strategy goes through once before its first group: one in a store in memory."""

from __future__ import annotations

from functools import cache

from trinity_buffer.events import ConsumerRegistered
from trinity_buffer.pipeline.annotating.decider import Decider, StrategySetup
from trinity_buffer.pipeline.annotating.grouping import GroupingRules
from trinity_buffer.pipeline.annotating.named_strategy import make_strategy
from trinity_buffer.pipeline.annotating.strategy_lease import StrategyLease
from trinity_buffer.pipeline.annotating.unit_reader import UnitReader
from trinity_buffer.pipeline.events import new_event, now_us
from trinity_buffer.pipeline.experiment_handle import ExperimentHandle
from trinity_buffer.pipeline.lease_holders import owner_of_process
from trinity_buffer.pipeline.loading.event_cache import EventCache
from trinity_buffer.pipeline.loading.experiences import experiences_in
from trinity_buffer.pipeline.writing.rehearsal import NAME, RUNS, written
from trinity_buffer.store import promises, queries
from trinity_buffer.store.scratch import Scratch, scratch
from trinity_buffer.store.transaction import compile_for
from trinity_buffer.writer import StagedWriter

TTL_US = 10**9
"""Of a lease that ends with the store in which it is held."""


@cache
def rehearse_deciding(dialect: str, families: tuple[str, ...]) -> None:
    """Decide a group in a store in memory, once in a process.

    The first group that comes would take ten times as long as the next.

    Args:
        dialect: of the store that is read.
        families: what the strategy reads of experiences; nothing if their rewards are enough.
    """
    with scratch() as s:
        decided(s, families)
    compile_for(dialect)


def decided(s: Scratch, families: tuple[str, ...] = ()) -> ExperimentHandle:
    """Write a group to an empty store in memory, and decide it; return the experiment."""
    experiment = ExperimentHandle(s.database, written(s), NAME, {"rollouts_per_group": RUNS})
    key, rules, staged = experiment.key, GroupingRules.of(experiment.config), StagedWriter()
    registered = ConsumerRegistered(consumer=NAME, kind="strategy", config={})
    s.write(queries.registered, key, NAME, new_event(registered), clock=now_us)
    setup = StrategySetup(NAME, make_strategy("grpo", staged, {}), staged, {}, rules, None)
    cache = EventCache(key, NAME)
    reader = UnitReader(experiment, NAME, setup.unit, rules, cache)
    decider = Decider(experiment, setup, reader, cache)
    reader.read(s)
    _, units, events = decider.split(s, reader.take_ready())
    decision = decider.by_rewards(s, units, events)
    lease = StrategyLease(experiment, NAME)
    s.write(promises.acquire, key, NAME, owner=owner_of_process(), now_us=now_us(), ttl_us=TTL_US)
    s.write(decision.append, s.database.segments, key, NAME, require=lease.require)
    if families:
        rows = reader.rows(s, [address for unit in units for address in unit.addresses])
        experiences_in(s, cache, list(rows.values()), families)
    return experiment
