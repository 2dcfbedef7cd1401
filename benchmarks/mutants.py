"""Break the code in small ways: which changes does no test notice? A seeded sample of mutants.

python -m benchmarks.mutants --sample 20 --seed 7   # the next call goes on with what has no result
python -m benchmarks.mutants --again                # runs the survivors again: are they killed now?
python -m benchmarks.mutants --record               # adds the counts to docs/proofs/mutants.jsonl

mutmut makes the mutants, one change each, and runs each against the tests that call its function;
what it mutates and which tests it knows stands in pyproject.toml, its results in mutants/. A mutant
that means the same as the code stands in docs/proofs/mutants.md with the reason. Exit code 1:
another one survived, or not all of the sample were run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.mutant_tests import write_order
from benchmarks.provenance import provenance

ROOT = Path(__file__).resolve().parents[1]
RECORD = "docs/proofs/mutants.jsonl"
PAGE = "docs/proofs/mutants.md"
UNCHECKED = {"not checked", "check was interrupted by user"}
ALIVE = {"survived", "no tests"}
NOTHING = "(nothing)"
"""A pattern for which mutmut makes all mutants, learns which tests call what, and runs none."""


SPINNER = {chr(number) for number in range(0x2800, 0x2900)}
"""What mutmut draws while it works."""


def drawn(names: Iterable[str], seed: int, size: int) -> list[str]:
    """Return a sample of mutants: of the same code and seed, a smaller one begins a larger one.

    What is drawn of the other functions stays when a function changes.
    """
    return sorted(names, key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest())[:size]


def make(root: Path) -> None:
    """Let mutmut make the mutants of the code as it is now; results of the same code are kept.

    Raises:
        SystemExit: a test failed without any mutant.
    """
    done = _mutmut(root, "run", NOTHING)
    if "but nothing matches" not in done.stderr:
        told = [
            line for line in re.split(r"[\r\n]+", done.stdout) if line and line[0] not in SPINNER
        ]
        raise SystemExit(
            "\n".join([*told[-40:], done.stderr, "debug = true in [tool.mutmut] shows which test"])
        )
    write_order(root / "mutants")


def results(root: Path) -> dict[str, str]:
    """Return what mutmut calls the result of each mutant, by its name."""
    lines = _mutmut(root, "results", "--all", "true").stdout.splitlines()
    return {name.strip(): result for name, _, result in (line.rpartition(": ") for line in lines)}


def run(root: Path, names: Sequence[str], children: int) -> None:
    """Run the tests against each mutant; results are kept one by one.

    Raises:
        SystemExit: a test failed without any mutant.
    """
    if names:
        command = [*_command("run"), *names, "--max-children", str(children)]
        if subprocess.run(command, cwd=root, check=False).returncode:
            raise SystemExit("mutmut did not come to an end; the next call goes on")


def change(diff: str) -> str:
    """Return what a mutant changes, as docs/proofs/mutants.md tells it: the lines before and after.

    Its name will not do: the mutants of a function are numbered anew when the function changes.
    """
    was, became = (
        " ".join(
            line[1:].strip() for line in diff.splitlines() if re.match(rf"{sign}(?!{sign})", line)
        )
        for sign in ("-", r"\+")
    )
    return f"`{was}` → `{became}`"


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Do what the command line asks for; return the exit code."""
    asked = _parser().parse_args(arguments)
    make(root)
    before = results(root)
    sample = drawn(before, asked.seed, asked.sample)
    wanted = UNCHECKED | (ALIVE if asked.again else set())
    run(root, [name for name in sample if before[name] in wanted], asked.children)
    after = results(root)
    counts = Counter(_told(root, name, after[name]) for name in sample)
    print(f"{len(sample)} mutants: " + ", ".join(f"{n} {what}" for what, n in counts.items()))
    if asked.record:
        _record(root, asked, counts)
    return int(any(counts[what] for what in ALIVE | UNCHECKED))


def _told(root: Path, name: str, result: str) -> str:
    """Print the mutant if it lives and nobody knows why; return what it counts as."""
    if result not in ALIVE:
        return result
    diff = _mutmut(root, "show", name).stdout
    told = f"{name.partition('__mutmut_')[0]}: {change(diff)}"
    if (root / PAGE).exists() and told in (root / PAGE).read_text():
        return "equivalent"
    print(f"{result}: {told}\n{diff}")
    return result


def _record(root: Path, asked: argparse.Namespace, counts: Counter[str]) -> None:
    command = f"python -m benchmarks.mutants --sample {asked.sample} --seed {asked.seed} --record"
    row = {"sample": asked.sample, **counts, **provenance(command, asked.seed)}
    with (root / RECORD).open("a") as file:
        file.write(json.dumps(row) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sample", type=int, default=400, help="how many mutants (400)")
    parser.add_argument("--seed", type=int, default=1, help="of the sample (1)")
    parser.add_argument("--children", type=int, default=2, help="how many run at once (2)")
    parser.add_argument("--again", action="store_true", help="run what survived again, too")
    parser.add_argument("--record", action="store_true", help=f"append to {RECORD}")
    return parser


def _mutmut(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        _command(*arguments), cwd=root, capture_output=True, text=True, check=False
    )


def _command(*arguments: str) -> list[str]:
    return [str(Path(sys.executable).with_name("mutmut")), *arguments]


if __name__ == "__main__":
    sys.exit(main())
