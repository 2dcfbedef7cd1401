"""The record of what was measured, and the tables of the documents that are made of it.

python -m benchmarks.performance     # write the tables again
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).resolve().parents[1] / "docs" / "proofs"
RECORD = DOCS / "performance.jsonl"
PAGE = DOCS / "performance.md"
LOOKS = DOCS / "reliability.md"

Row = Mapping[str, Any]


class Line(NamedTuple):
    """A line of a table: what was measured, and what it should be."""

    op: str
    case: str
    what: str
    goal: str = ""


SPEEDS = (
    Line("write", "64 per call, one caller", "durable write, 64 per call, one caller", "0.35"),
    Line("write", "8 per call, one caller", "durable write, 8 per call, one caller"),
    Line("write", "1 per call, one caller", "durable write, 1 per call, one caller"),
    Line("write", "1 per call, 64 callers", "durable write, 1 per call, 64 callers"),
    Line("annotate", "grpo, groups of 8", "GRPO over groups of 8"),
    Line("stream", "batches of 256, padded", "stream, collated batches of 256, padded", "0.1"),
    Line("stream", "batches of 256, packed", "stream, collated batches of 256, packed", "0.1"),
    Line("latency", "write to delivered, p50", "write to delivered, three processes, p50", "15 ms"),
    Line("latency", "write to delivered, p99", "write to delivered, p99", "60 ms"),
)
VERIFYING = (
    Line("verify", "full", "all of it", "60"),
    Line("verify", "full, acknowledged", "all of it, `--acknowledged` with a uid for each"),
    Line("verify", "quick", "`--quick`", "5"),
    Line("verify", "bare", "the bytes of the file, read and hashed"),
)


def figure(row: Row) -> str:
    """Return what a result is about.

    Raises:
        KeyError: it lacks its operation, its case or its backend.
    """
    return f"{row['op']}, {row['case']}, {row['backend']}"


def record(row: Row) -> None:
    """Append a result to the record, and write the tables again.

    Raises:
        KeyError: it does not say what it is about; nothing is written.
    """
    figure(row)
    with RECORD.open("a") as file:
        file.write(json.dumps(row) + "\n")
    write_tables()


def write_tables() -> None:
    """Write the table of each page from the newest result of each figure on SQLite."""
    newest = newest_rows()
    _replace(PAGE, "speeds", speeds(newest))
    _replace(PAGE, "peers", peers(newest))
    _replace(PAGE, "growth", growth(newest))
    _replace(LOOKS, "verify", verifying(newest))


def newest_rows() -> dict[tuple[str, str], Row]:
    """Return the last result on SQLite of each operation and case."""
    rows = [json.loads(line) for line in RECORD.read_text().splitlines()]
    return {(row["op"], row["case"]): row for row in rows if row["backend"] == "sqlite"}


def speeds(newest: Mapping[tuple[str, str], Row]) -> str:
    """Return the table of docs/proofs/performance.md."""
    head = (
        "| what | ours | bare | ratio (lowest–highest) | goal | measured |\n" + "|---" * 6 + "|\n"
    )
    return head + _lines(
        SPEEDS, newest, lambda row: [_rate(row, "ours"), _rate(row, "limit"), _ratio(row)]
    )


def peers(newest: Mapping[tuple[str, str], Row]) -> str:
    """Return the table of docs/proofs/performance.md about other people's stores."""
    head = "| what: store | ours | theirs | ours / theirs (lowest–highest) | measured |\n"
    lines = [
        [_peer(row), _rate(row, "ours"), _rate(row, "limit"), _ratio(row), _measured(row)]
        for (op, _), row in newest.items()
        if op == "peers"
    ]
    return head + "|---" * 5 + "|\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _peer(row: Row) -> str:
    return f"{row['case']} {row['version']}" if row["version"] else str(row["case"])


def growth(newest: Mapping[tuple[str, str], Row]) -> str:
    """Return the table of docs/proofs/performance.md of what a longer run costs."""
    rows = [row for (op, _), row in newest.items() if op == "growth"]
    sizes = sorted({size for row in rows for size in row["sizes"]})
    head = ["what", *[f"{size:,}" for size in sizes], "ratio", "of processor time", "limit"]
    text = f"| {' | '.join([*head, 'measured'])} |\n" + "|---" * (len(head) + 1) + "|\n"
    for row in rows:
        medians = dict(zip(row["sizes"], row["medians"], strict=True))
        cells = [f"{medians[size]:g} {row['unit']}" if size in medians else "" for size in sizes]
        ratios = [f"{row[name]:g}" if name in row else "" for name in ("ratio", "cpu_ratio")]
        limit = f"{row['limit']:g}{'' if row['limited'] == 'ratio' else ' ' + row['unit']}"
        every = [row["case"], *cells, *ratios, limit, _measured(row)]
        text += f"| {' | '.join(every)} |\n"
    return text


def verifying(newest: Mapping[tuple[str, str], Row]) -> str:
    """Return the table of docs/proofs/reliability.md about how long `verify` takes."""
    head = "| look at a store | experiences | seconds | goal | measured |\n" + "|---" * 5 + "|\n"
    return head + _lines(VERIFYING, newest, lambda row: [_number(row), f"{row['wall_s']:.1f}"])


def _lines(
    lines: tuple[Line, ...],
    newest: Mapping[tuple[str, str], Row],
    cells: Callable[[Row], list[str]],
) -> str:
    text = ""
    for line in lines:
        row = newest.get((line.op, line.case))
        if row is not None:
            every = [line.what, *cells(row), line.goal, _measured(row)]
            text += "| " + " | ".join(every) + " |\n"
    return text


def _measured(row: Row) -> str:
    noted = f"before {row['noted']}" if "noted" in row else "commit unknown"
    return f"{row['date']}, {row['commit'] or noted}"


def _number(row: Row) -> str:
    return f"{row['experiences']:,}" if "experiences" in row else ""


def _rate(row: Row, of: str) -> str:
    if row["unit"] == "ms":
        return f"{row[of]:g} ms"
    return f"{row[of]:,} /s"


def _ratio(row: Row) -> str:
    if row["ratio"] is None:
        return ""
    return f"{row['ratio']:g} ({row['ratio_low']:g}–{row['ratio_high']:g})"


def _replace(page: Path, name: str, table: str) -> None:
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    head, rest = page.read_text().split(begin)
    page.write_text(f"{head}{begin}\n{table}{end}{rest.split(end)[1]}")


if __name__ == "__main__":
    write_tables()
