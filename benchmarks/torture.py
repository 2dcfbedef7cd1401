"""Torture a store for some minutes, round by round, and tell what was found.

python -m benchmarks.torture --minutes 30 --seed 1 --store postgresql --record
python -m benchmarks.torture --seed 1 --first-round 17 --rounds 1    # the faults of round 17 again

Each round has a fresh store. The seed decides which faults come when, to whom, and what each
process brings along; the scheduler of the machine decides the rest. Exit code 1: something did not
hold, or a kind of fault never took effect.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.provenance import provenance
from tests.torture import sites
from tests.torture.kinds import KINDS
from tests.torture.plan import Plan
from tests.torture.round import RoundReport, run_round

DOCS = Path(__file__).parents[1] / "docs" / "proofs"
RECORD = DOCS / "torture.jsonl"
PAGE = DOCS / "reliability.md"
BEGIN, END = "<!-- torture: begin -->", "<!-- torture: end -->"
SUMS = (
    "events", "experiences", "acknowledged", "steps", "kills", "own_kills", "lives", "lost",
    "duplicated", "skipped", "replayed", "different",
)  # fmt: skip
ROUND_S = 12.0
COMMAND = ("python", "-m", "benchmarks.torture")
AGAIN = "again: "


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return the exit code."""
    asked = _parser().parse_args(arguments)
    command = shlex.join([*COMMAND, *_given(asked)])
    origin = provenance(command, asked.seed) if asked.record else {}
    begin = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="trinity-torture-"))
    reports: list[RoundReport] = []
    with sites.opened(asked.store, folder) as site:
        if "small disk" not in site.kind:
            print("no small disk can be mounted here: no `disk full`", file=sys.stderr)
        for number in _numbers(asked, begin):
            report = _round(asked, number, site, folder / str(number))
            reports.append(report)
            print(_line(report), file=sys.stderr, flush=True)
            if report.problems:
                break
            shutil.rmtree(folder / str(number))
    summary = _summary(asked, reports, time.monotonic() - begin)
    print(json.dumps(summary) if asked.json else _told(summary))
    if asked.record:
        record({**origin, **summary})
    if summary["problems"]:
        last = reports[-1].number
        print(f"what is left of round {last}, its store too: {folder / str(last)}", file=sys.stderr)
        print(f"{AGAIN}{_again(asked, last)}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    return 0


def _round(asked: argparse.Namespace, number: int, site: sites.Site, folder: Path) -> RoundReport:
    plan = Plan(asked.seed, number, site.kind, frozenset(asked.without))
    say = partial(print, file=sys.stderr, flush=True) if asked.verbose else lambda _: None
    return run_round(plan, site, folder, seconds=asked.round_seconds, say=say)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Formatter)
    parser.add_argument("--minutes", type=float, default=1.0, help="begin no round after that")
    parser.add_argument("--rounds", type=int, help="so many rounds, whatever they take")
    parser.add_argument("--first-round", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--round-seconds", type=float, default=ROUND_S, help="of faults, per round")
    parser.add_argument(
        "--without", metavar="KIND", action="append", default=[], choices=[k.name for k in KINDS],
        help="let no such fault come, which the run must notice; may be given again: %(choices)s",
    )  # fmt: skip
    parser.add_argument("--verbose", action="store_true", help="say each fault that is inflicted")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--record", action="store_true", help=f"append to {RECORD}, renew {PAGE}")
    return parser


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The docstring as it is, and the defaults."""


def _numbers(asked: argparse.Namespace, begin: float) -> Iterator[int]:
    number = asked.first_round
    while True:
        done = number - asked.first_round
        if asked.rounds is not None and done >= asked.rounds:
            return
        if asked.rounds is None and done and time.monotonic() - begin > asked.minutes * 60:
            return
        yield number
        number += 1


def _line(report: RoundReport) -> str:
    verdict = "holds" if not report.problems else "\n  ".join(["FAILED", *report.problems])
    return (
        f"round {report.number}: {report.seconds:.0f} s, {report.events} events, "
        f"{report.steps} steps; {_counted(report.faults)}; {report.lives} lives, "
        f"{report.own_kills} ended by us; {_counted(report.ended)}: {verdict}"
    )


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items()))


def _summary(
    asked: argparse.Namespace, reports: Sequence[RoundReport], seconds: float
) -> dict[str, Any]:
    faults = sum((report.faults for report in reports), Counter[str]())
    ended = sum((report.ended for report in reports), Counter[str]())
    sums = {name: sum(getattr(report, name) for report in reports) for name in SUMS}
    return {
        "store": reports[-1].store if reports else asked.store,
        "seed": asked.seed,
        "rounds": len(reports),
        "seconds": round(seconds),
        **sums,
        "faults": dict(sorted(faults.items())),
        "ended": dict(sorted(ended.items())),
        "problems": [f"round {r.number}: {p}" for r in reports for p in r.problems],
    }


def _given(asked: argparse.Namespace) -> list[str]:
    given = ["--store", asked.store, "--seed", str(asked.seed)]
    given += [word for kind in asked.without for word in ("--without", kind)]
    if asked.round_seconds != ROUND_S:
        given += ["--round-seconds", f"{asked.round_seconds:g}"]
    if asked.rounds is None:
        return ["--minutes", f"{asked.minutes:g}", *given]
    return ["--rounds", str(asked.rounds), "--first-round", str(asked.first_round), *given]


def _again(asked: argparse.Namespace, number: int) -> str:
    """Return the command that runs one round again."""
    one = {**vars(asked), "rounds": 1, "first_round": number}
    return shlex.join([*COMMAND, *_given(argparse.Namespace(**one))])


def _told(summary: dict[str, Any]) -> str:
    identical = "bit-identical" if not summary["different"] else f"{summary['different']} DIFFER"
    lines = [
        f"{summary['rounds']} rounds in {summary['seconds']} s on {summary['store']}, "
        f"seed {summary['seed']}",
        _counted(summary["faults"]),
        f"{summary['lives']} lives, {summary['own_kills']} ended by us",
        _counted(summary["ended"]) or "nobody ended with an error",
        f"{summary['events']} events, {summary['experiences']} experiences, "
        f"{summary['acknowledged']} acknowledged, {summary['steps']} gradient steps",
        *summary["problems"],
        f"replay of {summary['replayed']} checkpoints: {identical}",
        f"lost {summary['lost']}, duplicated {summary['duplicated']}, skipped {summary['skipped']}",
    ]
    return "\n".join(lines)


def record(summary: dict[str, Any]) -> None:
    """Append a summary to the record, and write the table of the documentation anew."""
    with RECORD.open("a") as file:
        file.write(json.dumps(summary) + "\n")
    page = PAGE.read_text()
    head, rest = page.split(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n{table()}{END}{rest.split(END)[1]}")


def table() -> str:
    """Return the record as a table in Markdown."""
    rows = [json.loads(line) for line in RECORD.read_text().splitlines()]
    text = (
        "| date | commit | command | rounds | events | experiences | steps | kills | other faults "
        "| lost | duplicated | skipped | replay |\n" + "|---" * 13 + "|\n"
    )
    for row in rows:
        kinds = ("kill", "kill at a crash point", "lives")
        others = _counted({k: n for k, n in row["faults"].items() if k not in kinds})
        replayed = f"{row['replayed']} of {row['replayed']} identical"
        if row["different"]:
            replayed = f"{row['different']} of {row['replayed']} differ"
        cells = (
            row["date"], row["commit"], f"`{row['command']}`", row["rounds"], row["events"],
            row["experiences"], row["steps"], row["kills"], others, row["lost"], row["duplicated"],
            row["skipped"], replayed,
        )  # fmt: skip
        text += "| " + " | ".join(map(str, cells)) + " |\n"
    return text


if __name__ == "__main__":
    sys.exit(main())
