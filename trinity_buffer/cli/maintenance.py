"""Commands that check and repair a store, and the list of what this package knows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trinity_buffer.cli import options, output
from trinity_buffer.inspector.doctor import examine
from trinity_buffer.pipeline.store import Experiment, Store
from trinity_buffer.pipeline.verify.projections import Progress
from trinity_buffer.pipeline.verify.projections import rebuild as rebuild_projections
from trinity_buffer.pipeline.verify.verify import VerifyReport
from trinity_buffer.pipeline.verify.verify import verify as verify_experiment
from trinity_buffer.pipeline.write import planning
from trinity_buffer.store.url import named

PROBLEMS_SHOWN = 50


@options.command()
async def verify(
    experiment: Experiment,
    acknowledged: Path | None = None,
    checkpoint: Path | None = None,
    consumer: str | None = None,
    head: str | None = None,
    quick: bool = False,
    *,
    progress: Progress,
) -> output.Answer:
    """Check every promise: the log, its segments and projections, and the proof from outside.

    Exit code 1 if anything is wrong.

    Example: trinity-buffer verify --acknowledged runs/demo.acks --checkpoint
        runs/demo.checkpoints/step-00000040

    Args:
        acknowledged: Folder (or file) of lines of receipts, as explore --acknowledge and
            tb.explore(acknowledgements=PATH) write them, or of uids.
        checkpoint: Checkpoint whose manifests.json is compared with the log.
        consumer: The trainer that wrote the checkpoint, if several could have.
        head: A head that you kept: the log must still contain it.
        quick: Open no segment; count projections, compare no rows.
    """
    report = await verify_experiment(
        experiment,
        acknowledged,
        checkpoint,
        quick=quick,
        consumer=consumer,
        head=head,
        progress=progress,
    )
    return output.Answer(report.to_dict(), _verified(report), failed=not report.ok)


def _verified(report: VerifyReport) -> output.Lines:
    kind = "quick look" if report.quick else "full look"
    yield f"{report.store}, experiment {report.experiment}, {report.version}, {kind}"
    yield (
        f"{report.events} events, {report.experiences} experiences, {report.manifests} manifests, "
        f"{report.segments} segments in {report.seconds:.1f} s"
    )
    plans = report.plans
    yield f"planned {plans.planned} = stored {plans.stored} + missing {plans.missing}"
    for s in report.strategies:
        yield (
            f"set {s.consumer}: recorded {s.recorded} = unseen {s.unseen} + waiting {s.waiting} + "
            f"annotated {s.annotated} + rejected {sum(s.rejected.values())} "
            f"({output.shown(s.rejected)})"
        )
    for t in report.trainers:
        yield (
            f"trainer {t.consumer}: rows {t.rows} = ready {t.ready} + leased {t.leased} + "
            f"committed {t.committed} + rejected {sum(t.rejected.values())} "
            f"({output.shown(t.rejected)})"
        )
    wrong = [f"wrong: {problem}" for problem in report.problems]
    lines = wrong[:1] + [f"lost: {item}" for item in report.lost_items]  # it may explain them
    lines += [f"duplicated: {item}" for item in report.duplicated_items] + wrong[1:]
    # A damaged store can have a problem for each of a million rows.
    yield from lines[:PROBLEMS_SHOWN]
    if len(lines) > PROBLEMS_SHOWN:
        yield f"... and {len(lines) - PROBLEMS_SHOWN} more (--json has all)"
    yield _compared(report)
    yield f"head {report.head} at position {report.events}"
    if report.ok and report.quick:
        yield (
            "what was looked at holds: a quick look opens no segment or archive, and counts the "
            "rows of projections instead of comparing them"
        )
    else:
        yield "everything holds" if report.ok else "FAILED"
    yield _lost_and_duplicated(report)


def _lost_and_duplicated(report: VerifyReport) -> str:
    counts = f"lost {report.lost}, duplicated {report.duplicated}"
    if report.measured:
        return counts
    # Without evidence from outside, rows that vanished together with their events go unnoticed.
    evidence = {"--acknowledged": report.acknowledged, "--checkpoint": report.chain}
    lacking = f"give {' and '.join(name for name, value in evidence.items() if value is None)}"
    if report.acknowledged == 0:
        lacking = f"--acknowledged holds no uids; {lacking}"
    if report.lost or report.duplicated:
        return f"{counts}, not all of it measured: {lacking}"
    if report.acknowledged:
        return f"lost 0 of {report.acknowledged} acknowledged, else not measured: {lacking}"
    return f"lost, duplicated: not measured: {lacking}"


def _compared(report: VerifyReport) -> str:
    evidence = []
    if report.acknowledged is not None:
        bare = report.acknowledged - report.contents
        without = f" (of {bare} the content was not compared)" if bare else ""
        evidence.append(f"{report.acknowledged or 'no'} acknowledged uids{without}")
    if report.chain is not None:
        evidence.append(f"a checkpoint of {report.chain} manifests")
    if not evidence:
        return "no proof from outside: give --acknowledged and --checkpoint"
    return f"compared with {' and '.join(evidence)}"


@options.command(read_only=False)
async def rebuild(experiment: Experiment, *, progress: Progress) -> output.Answer:
    """Rebuild every projection from the log.

    Other processes may keep running; they see all of the change or none of it.

    Example: trinity-buffer rebuild --store runs/demo.db
    """
    report = await rebuild_projections(experiment.database, experiment.key, progress)
    mended = f"mended: {output.shown(report.mended)}"
    what = mended if report.mended else "every row was right already"
    return output.Answer(report, f"{report.events} events folded; {what}")


@options.command()
async def migrate(store: str | None = None, wait: bool = False) -> output.Answer:
    """Upgrade a store that an older version wrote.

    Example: trinity-buffer migrate --store runs/demo.db

    Args:
        wait: Wait until no process has it open.
    """
    from trinity_buffer.pipeline.history.migrate import migrate as migrate_store  # noqa: PLC0415 - alembic

    url = options.chosen_store(store)
    before, after = await migrate_store(url, wait=wait)
    name = named(url)
    line = f"{name}: schema {before} -> {after}"
    if before == after:
        line = f"{name} is up to date (schema {after})"
    return output.Answer({"store": name, "before": before, "after": after}, line)


@options.command()
async def doctor(store: Store, experiment: str | None = None) -> output.Answer:
    """Say what is stuck, since when, and what would help; exit code 1 if anything is.

    Example: trinity-buffer doctor --store runs/demo.db
    """
    examination = await examine(store, experiment)

    def text() -> output.Lines:
        yield f"store: {examination.url}"
        if examination.here:
            columns = "experiment, role, name, where=place, waits for=waiting_for"
            yield output.table_of("who is there", columns, examination.here)
        else:
            yield "no process is running"
        for finding in examination.stuck:
            where = f"experiment {finding.experiment}: " if finding.experiment else ""
            since = "" if finding.since is None else f", since {output.time_of(finding.since)} UTC"
            yield output.verbatim(f"stuck: {where}{finding.what}{since}\n  {finding.remedy}")
        if not examination.stuck:
            yield "nothing is stuck"

    return output.Answer(examination, text(), failed=bool(examination.stuck))


@options.command(read_only=False)
async def seal(experiment: Experiment, batch: str) -> output.Answer:
    """Seal a batch as it is: its groups are decided with the runs that are stored.

    What comes later is recorded as rejected (late). To have the runs made that are missing, start
    its explorer again under the same name, or another one with --take-over.

    Example: trinity-buffer seal e0-7 --store runs/demo.db

    Args:
        batch: Its id, as `trinity-buffer doctor` names it.
    """
    write = experiment.database.write
    experiences = await write(planning.seal, experiment.key, batch, actor="user")
    line = f"sealed batch {batch} with {experiences} experiences"
    if experiences is None:
        line = f"batch {batch} was sealed before"
    return output.Answer({"batch": batch, "experiences": experiences}, line)


@options.command(lines=True)
def algorithms() -> output.Answer:
    """List the algorithms and the parts that they are built from, with their arguments.

    Those of an algorithm are the effective ones: the parts' defaults, changed by its recipe.

    Example: trinity-buffer algorithms --json
    """
    from trinity_buffer import algorithm  # noqa: PLC0415 - torch, which only this one needs
    from trinity_buffer.algorithm.arguments import Registry  # noqa: PLC0415
    from trinity_buffer.algorithm.building import effective_args  # noqa: PLC0415

    kinds = [value for value in vars(algorithm).values() if isinstance(value, Registry)]
    entries: list[dict[str, Any]] = []
    for registry in sorted(kinds, key=lambda registry: registry.kind):
        for name in registry.names():
            cls, is_whole = registry.get(name), registry.kind == "algorithm_type"
            args = effective_args(name) if is_whole else dict(cls.default_args())
            if is_whole:
                del args["algorithm"]  # its own name
            place = f"{cls.__module__}.{cls.__qualname__}"
            entry = {"kind": registry.kind, "name": name, "class": place, "arguments": args}
            entries.append(entry)

    def text() -> output.Lines:
        rows = [(*[*entry.values()][:-1], _arguments_text(entry["arguments"])) for entry in entries]
        yield output.table(f"{len(entries)} registered names", list(entries[0]), rows)

    return output.Answer(entries, text())


def _arguments_text(arguments: Mapping[str, Any]) -> str:
    """Return arguments as text, those of a part in brackets behind its name."""

    def text(value: Any) -> str:
        if isinstance(value, list):
            return "+".join(map(text, value)) or "none"
        if isinstance(value, dict) and value.keys() == {"name", "args"}:
            return f"{value['name']}({_arguments_text(value['args'])})"
        return str(value)

    return ", ".join(f"{name}={text(value)}" for name, value in arguments.items())
