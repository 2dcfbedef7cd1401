"""Commands that check and mend a store, and those that say what this package knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from trinity_buffer.cli.escaping import one_line
from trinity_buffer.cli.options import (
    ExperimentOption,
    JsonLinesOption,
    JsonOption,
    StoreOption,
    chosen_experiment,
    chosen_store,
)
from trinity_buffer.cli.printing import console, print_json, progress, shown, table
from trinity_buffer.cli.running import run
from trinity_buffer.pipeline.history.rebuild import RebuildReport
from trinity_buffer.pipeline.history.rebuild import rebuild as rebuild_projections
from trinity_buffer.pipeline.store import open_store
from trinity_buffer.pipeline.verifying.verify import VerifyReport
from trinity_buffer.pipeline.verifying.verify import verify as verify_experiment
from trinity_buffer.store.url import named

PROBLEMS_SHOWN = 50

AcknowledgedOption = Annotated[
    Path | None,
    typer.Option(
        help="Folder (or file) of lines of receipts, as explore --acknowledge and"
        " tb.explore(acknowledgements=PATH) write them, or of uids."
    ),
]


def verify(
    store: StoreOption = None,
    experiment: ExperimentOption = None,
    acknowledged: AcknowledgedOption = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Checkpoint whose manifests.json is compared with the log.")
    ] = None,
    consumer: Annotated[
        str | None,
        typer.Option(help="The trainer that wrote the checkpoint, if several could have."),
    ] = None,
    head: Annotated[
        str | None, typer.Option(help="A head that you kept: the log must still contain it.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Open no segment; count projections, compare no rows.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check every promise: the log, its segments and projections, and the proof from outside.

    Exit code 1 if anything is wrong.

    Example: trinity-buffer verify --acknowledged runs/demo.acks --checkpoint
        runs/demo.checkpoints/step-00000040
    """

    async def main() -> VerifyReport:
        url = chosen_store(store)
        name = await chosen_experiment(url, experiment)
        with progress() as report:
            async with open_store(url, read_only=True) as opened:
                return await verify_experiment(
                    await opened.experiment(name),
                    acknowledged,
                    checkpoint,
                    quick=quick,
                    consumer=consumer,
                    head=head,
                    progress=report,
                )

    found: VerifyReport = run(main)
    if as_json:
        print_json(found.to_dict())
    else:
        _print_verified(found)
    raise typer.Exit(0 if found.ok else 1)


def _print_verified(found: VerifyReport) -> None:
    out = console()

    def say(line: str) -> None:
        out.print(one_line(line), markup=False)

    kind = "quick look" if found.quick else "full look"
    say(f"{found.store}, experiment {found.experiment}, {found.version}, {kind}")
    say(
        f"{found.events} events, {found.experiences} experiences, {found.manifests} manifests, "
        f"{found.segments} segments in {found.seconds:.1f} s"
    )
    plans = found.plans
    say(f"planned {plans.planned} = stored {plans.stored} + missing {plans.missing}")
    for s in found.strategies:
        say(
            f"set {s.consumer}: recorded {s.recorded} = unseen {s.unseen} + waiting {s.waiting} + "
            f"annotated {s.annotated} + rejected {sum(s.rejected.values())} ({shown(s.rejected)})"
        )
    for t in found.trainers:
        say(
            f"trainer {t.consumer}: rows {t.rows} = ready {t.ready} + leased {t.leased} + "
            f"committed {t.committed} + rejected {sum(t.rejected.values())} ({shown(t.rejected)})"
        )
    for line in _wrong(found):
        say(line)
    say(_outside(found))
    say(f"head {found.head} at position {found.events}")
    say("everything holds" if found.ok else "FAILED")
    say(_counted(found))


def _counted(found: VerifyReport) -> str:
    counts = f"lost {found.lost}, duplicated {found.duplicated}"
    if found.measured:
        return counts
    given = {"--acknowledged": found.acknowledged, "--checkpoint": found.chain}
    lacking = f"give {' and '.join(name for name, said in given.items() if said is None)}"
    if found.acknowledged == 0:
        lacking = f"--acknowledged holds no uids; {lacking}"
    if found.lost or found.duplicated:
        return f"{counts}, not all of it measured: {lacking}"
    return f"lost, duplicated: not measured: {lacking}"


def _wrong(found: VerifyReport) -> list[str]:
    lines = [f"lost: {item}" for item in found.lost_items]
    lines += [f"duplicated: {item}" for item in found.duplicated_items]
    lines += [f"wrong: {problem}" for problem in found.problems]
    more = len(lines) - PROBLEMS_SHOWN
    return [*lines[:PROBLEMS_SHOWN], f"... and {more} more (--json has all)"] if more > 0 else lines


def _outside(found: VerifyReport) -> str:
    given = []
    if found.acknowledged is not None:
        bare = found.acknowledged - found.contents
        without = f" (of {bare} the content was not compared)" if bare else ""
        given.append(f"{found.acknowledged or 'no'} acknowledged uids{without}")
    if found.chain is not None:
        given.append(f"a checkpoint of {found.chain} manifests")
    if not given:
        return "no proof from outside: give --acknowledged and --checkpoint"
    return f"compared with {' and '.join(given)}"


def rebuild(
    store: StoreOption = None, experiment: ExperimentOption = None, as_json: JsonOption = False
) -> None:
    """Rebuild every projection from the log.

    Other processes may keep running; they see all of the change or none of it.

    Example: trinity-buffer rebuild --store runs/demo.db
    """

    async def main() -> RebuildReport:
        url = chosen_store(store)
        name = await chosen_experiment(url, experiment)
        with progress() as report:
            async with open_store(url) as opened:
                found = await opened.experiment(name)
                return await rebuild_projections(found.database, found.key, report)

    found: RebuildReport = run(main)
    if as_json:
        print_json(found)
    else:
        what = f"mended: {shown(found.mended)}" if found.mended else "every row was right already"
        console().print(f"{found.events} events folded; {what}", markup=False)


def migrate(
    store: StoreOption = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until no process has it open.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Upgrade a store that an older version wrote.

    Example: trinity-buffer migrate --store runs/demo.db
    """
    from trinity_buffer.pipeline.history.migrate import migrate as migrate_store  # noqa: PLC0415 - alembic

    url = chosen_store(store)
    before, after = run(partial(migrate_store, url, wait=wait))
    name = named(url)
    if as_json:
        print_json({"store": name, "before": before, "after": after})
    elif before == after:
        console().print(f"{name} is up to date (schema {after})", markup=False)
    else:
        console().print(f"{name}: schema {before} -> {after}", markup=False)


def algorithms(as_json: JsonLinesOption = False) -> None:
    """List the algorithms and the parts that they are built from, with their arguments.

    Those of an algorithm are the effective ones: the parts' defaults, changed by its recipe.

    Example: trinity-buffer algorithms --json
    """
    from trinity_buffer import algorithm  # noqa: PLC0415 - torch, which only this one needs
    from trinity_buffer.algorithm.building import effective_args  # noqa: PLC0415
    from trinity_buffer.algorithm.registry import Registry  # noqa: PLC0415

    kinds = [value for value in vars(algorithm).values() if isinstance(value, Registry)]
    found: list[dict[str, Any]] = [
        {
            "kind": kind.kind,
            "name": name,
            "class": _named(kind.get(name)),
            "arguments": _arguments_of(kind.kind, name, kind.get(name), effective_args),
        }
        for kind in sorted(kinds, key=lambda kind: kind.kind)
        for name in kind.names()
    ]
    if as_json:
        print_json(*found)
        return
    rows = [(*list(one.values())[:-1], _told(one["arguments"])) for one in found]
    console().print(table(f"{len(found)} registered names", list(found[0]), rows))


def _arguments_of(
    kind: str, name: str, cls: Any, effective_args: Callable[[str], dict[str, Any]]
) -> dict[str, Any]:
    """Return what ``cls`` takes unless it is told otherwise; of an algorithm, part by part."""
    if kind != "algorithm_type":
        return dict(cls.default_args())
    found: dict[str, Any] = effective_args(name)
    del found["algorithm"]  # its name
    return found


def _told(arguments: Mapping[str, Any]) -> str:
    """Return arguments as people read them, those of a part behind its name."""
    return ", ".join(f"{name}={_one_told(value)}" for name, value in arguments.items())


def _one_told(value: Any) -> str:
    if isinstance(value, list):
        return "+".join(map(_one_told, value)) or "none"
    if isinstance(value, dict) and value.keys() == {"name", "args"}:
        return f"{value['name']}({_told(value['args'])})"
    return str(value)


def _named(cls: Any) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
