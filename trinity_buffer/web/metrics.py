"""What is in a store, in the text format of Prometheus (version 0.0.4)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from trinity_buffer.inspector.doctor import examine
from trinity_buffer.inspector.overviews import (
    STEPS_OF_STALENESS,
    ExperimentOverview,
    Overview,
    overview,
)
from trinity_buffer.pipeline.store import Store

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

HELP = {
    "store_bytes": "Size of the database on disk.",
    "events_total": "Events of the log, by kind.",
    "experiences_total": "Experiences that were recorded.",
    "planned_rollouts_total": "Rollouts that were planned.",
    "missing_rollouts": "Planned rollouts that are not stored yet.",
    "policy_version": "The newest policy that was published.",
    "annotated_experiences_total": "Experiences with annotations, by annotation set.",
    "unseen_experiences": "Experiences that a strategy has not read yet.",
    "waiting_experiences": "Experiences that wait for their group.",
    "rejected_experiences_total": "Experiences that were left out, by whom and why.",
    "refused_experiences_total": "Experiences that were refused at the door, by reason.",
    "leased_step": "The last gradient step that a trainer was handed.",
    "committed_step": "The last gradient step that a trainer committed.",
    "ready_rows": "Rows that a trainer could be handed.",
    "leased_rows": "Rows that were handed out and are not committed.",
    "committed_rows": "Rows in committed steps; a rewind takes some back.",
    "staleness_mean": "Mean policy versions between sampling and training, of the last "
    f"{STEPS_OF_STALENESS} steps.",
    "stuck": "Things that nobody moves: `trinity-buffer doctor` names them.",
    "here": "Processes that are there, by role.",
}
"""Name -> what it counts; what ends in ``_total`` only grows."""


class _Sample(NamedTuple):
    name: str
    value: float
    labels: dict[str, str]


async def metrics(store: Store) -> str:
    """Return the numbers of all experiments, a line each."""
    counted, examined = await overview(store), await examine(store)
    samples = [*_of_store(counted)]
    for name in (one.name for one in counted.experiments):
        own = sum(one.experiment == name for one in examined.stuck)
        samples.append(_Sample("stuck", own, {"experiment": name}))
        for role in sorted({one.role for one in examined.here if one.experiment == name}):
            there = sum((one.experiment, one.role) == (name, role) for one in examined.here)
            samples.append(_Sample("here", there, {"experiment": name, "role": role}))
    order = list(HELP)
    samples.sort(key=lambda one: order.index(one.name))
    return "".join(
        line
        for name, some in groupby(samples, key=lambda one: one.name)
        for line in _lines(name, list(some))
    )


def _lines(name: str, some: list[_Sample]) -> Iterator[str]:
    full = f"trinity_buffer_{name}"
    yield f"# HELP {full} {HELP[name]}\n"
    yield f"# TYPE {full} {'counter' if name.endswith('_total') else 'gauge'}\n"
    for one in some:
        labels = ",".join(f'{key}="{_escaped(value)}"' for key, value in one.labels.items())
        yield f"{full}{f'{{{labels}}}' if labels else ''} {one.value}\n"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _of_store(counted: Overview) -> Iterator[_Sample]:
    yield _Sample("store_bytes", counted.size_bytes, {})
    for one in counted.experiments:
        yield from _of_experiment(one)
        yield from _of_strategies(one)
        yield from _of_trainers(one)


def _of_experiment(one: ExperimentOverview) -> Iterator[_Sample]:
    own = {"experiment": one.name}
    for kind, count in one.events.items():
        yield _Sample("events_total", count, {**own, "kind": kind})
    yield _Sample("experiences_total", one.experiences, own)
    yield _Sample("planned_rollouts_total", one.plans.planned, own)
    yield _Sample("missing_rollouts", one.plans.missing, own)
    if one.published is not None:
        yield _Sample("policy_version", one.published, own)
    for reason, count in one.refused.items():
        yield _Sample("refused_experiences_total", count, {**own, "reason": reason})
    for name, reasons in one.guests.items():
        yield from _rejected(one.name, name, reasons)


def _of_strategies(one: ExperimentOverview) -> Iterator[_Sample]:
    for row in one.strategies:
        labels = {"experiment": one.name, "set": row.consumer}
        yield _Sample("annotated_experiences_total", row.annotated, labels)
        yield _Sample("unseen_experiences", row.unseen, labels)
        yield _Sample("waiting_experiences", row.waiting, labels)
        yield from _rejected(one.name, row.consumer, row.rejected)


def _of_trainers(one: ExperimentOverview) -> Iterator[_Sample]:
    for row in one.trainers:
        labels = {"experiment": one.name, "trainer": row.name}
        yield _Sample("leased_step", row.leased, labels)
        yield _Sample("committed_step", row.committed, labels)
        yield _Sample("ready_rows", row.counts.ready, labels)
        yield _Sample("leased_rows", row.counts.leased, labels)
        yield _Sample("committed_rows", row.counts.committed, labels)
        if row.staleness is not None:
            yield _Sample("staleness_mean", row.staleness, labels)
        yield from _rejected(one.name, row.name, row.counts.rejected)


def _rejected(experiment: str, by: str, reasons: dict[str, int]) -> Iterator[_Sample]:
    for reason, count in reasons.items():
        labels = {"experiment": experiment, "by": by, "reason": reason}
        yield _Sample("rejected_experiences_total", count, labels)
