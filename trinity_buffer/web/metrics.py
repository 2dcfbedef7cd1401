"""What is in a store, in the text format of Prometheus (version 0.0.4)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from trinity_buffer.inspector.doctor import examine
from trinity_buffer.inspector.overviews import (
    STEPS_OF_STALENESS,
    Overview,
    TrainerProgress,
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


_Sample = tuple[str, float, dict[str, str]]
"""Name, value and labels."""


async def metrics(store: Store) -> str:
    """Return the numbers of all experiments, a line each."""
    counted, examined = await overview(store), await examine(store)
    samples = [*_of_store(counted)]
    stuck = Counter(finding.experiment for finding in examined.stuck)
    here = Counter((process.experiment, process.role) for process in examined.here)
    for name in (experiment.name for experiment in counted.experiments):
        samples.append(("stuck", stuck[name], {"experiment": name}))
        samples += [
            ("here", here[name, role], {"experiment": name, "role": role})
            for role in sorted(role for of, role in here if of == name)
        ]
    lines = []
    # Samples of one name must stand together, below its HELP and TYPE.
    for name, text in HELP.items():
        of_name = [sample for sample in samples if sample[0] == name]
        if of_name:
            full, kind = f"trinity_buffer_{name}", "counter" if name.endswith("_total") else "gauge"
            lines += [f"# HELP {full} {text}\n", f"# TYPE {full} {kind}\n"]
            lines += [f"{full}{_labels(labels)} {value}\n" for _, value, labels in of_name]
    return "".join(lines)


def _labels(labels: dict[str, str]) -> str:
    # The three characters that the format escapes in the value of a label.
    escapes = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
    pairs = ",".join(f'{key}="{value.translate(escapes)}"' for key, value in labels.items())
    return f"{{{pairs}}}" if pairs else ""


def _of_store(counted: Overview) -> Iterator[_Sample]:
    yield "store_bytes", counted.size_bytes, {}
    for experiment in counted.experiments:
        own = {"experiment": experiment.name}
        for kind, count in experiment.events.items():
            yield "events_total", count, own | {"kind": kind}
        yield "experiences_total", experiment.experiences, own
        yield "planned_rollouts_total", experiment.plans.planned, own
        yield "missing_rollouts", experiment.plans.missing, own
        if experiment.published is not None:
            yield "policy_version", experiment.published, own
        for reason, count in experiment.refused.items():
            yield "refused_experiences_total", count, own | {"reason": reason}
        for name, reasons in experiment.guests.items():
            yield from _rejected(own, name, reasons)
        for terms in experiment.strategies:
            labels = own | {"set": terms.consumer}
            yield "annotated_experiences_total", terms.annotated, labels
            yield "unseen_experiences", terms.unseen, labels
            yield "waiting_experiences", terms.waiting, labels
            yield from _rejected(own, terms.consumer, terms.rejected)
        for trainer in experiment.trainers:
            yield from _of_trainer(own, trainer)


def _of_trainer(own: dict[str, str], trainer: TrainerProgress) -> Iterator[_Sample]:
    labels, terms = own | {"trainer": trainer.name}, trainer.counts
    yield "leased_step", trainer.leased, labels
    yield "committed_step", trainer.committed, labels
    yield "ready_rows", terms.ready, labels
    yield "leased_rows", terms.leased, labels
    yield "committed_rows", terms.committed, labels
    if trainer.staleness is not None:
        yield "staleness_mean", trainer.staleness, labels
    yield from _rejected(own, trainer.name, terms.rejected)


def _rejected(own: dict[str, str], by: str, reasons: dict[str, int]) -> Iterator[_Sample]:
    for reason, count in reasons.items():
        yield "rejected_experiences_total", count, own | {"by": by, "reason": reason}
