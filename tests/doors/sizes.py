"""How a command that takes long is run here: as it is written, with these arguments behind it.

For `make`, they go into its ``ARGS``. Of several beginnings that fit, the longest counts.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from typing import NamedTuple

DEMO = (
    "--set max_steps=2 --set groups_per_step=2 --set groups_per_batch=1 --set rollouts_per_group=4 "
    "--set model.width=8 --set model.layers=1 --set model.heads=1 "
    "--set evaluation.num_eval_samples=8"
)
BENCH = "--only write,stream --tasks 2 --repetitions 1"
PEERS = "--peers bare_sqlite --only write --repetitions 1 --experiences 512"
LEARNING = "--small --seeds 0 --results runs/learning.jsonl"
GUARD = "--tasks 2 --repetitions 1 --least 0"
SIZES = {
    "python -m benchmarks.asking": "--experiences 192 --repetitions 1 --store runs/asking.db",
    "python -m benchmarks.asking --experiences": "--experiences 192 --repetitions 1",
    "python -m benchmarks.compaction": "--experiences 64 --tasks 64 --store runs/compaction.db",
    "python -m benchmarks.exporting": (
        "--experiences 64 --tasks 8 --repetitions 1 --store runs/exporting.db"
    ),
    "python -m benchmarks.chain": "--tasks 32 --repetitions 1",
    "python -m benchmarks.earlier": "--only write --repetitions 1",
    "python -m benchmarks.long_rows": "--rows 2 --calls 2 --repetitions 1 --steps 1",
    "python -m benchmarks.sharing": "--processes 1,2 --tasks 64",
    "python -m benchmarks.floors": "--tasks 32 --repetitions 1",
    "python -m benchmarks.growth": (
        "--first 1024 --experiences 1024 --rounds 1 --batches 16 --store runs/growth.db"
    ),
    "python -m benchmarks.guard": GUARD,
    "python -m benchmarks.recorder": "--minutes 0.5 --rate 5",
    "make demo": DEMO,
    "make test": "-n 0 tests/codec/test_bodies.py",
    "make bench": BENCH,
    "make bench-peers": PEERS,
    "make bench-guard": GUARD,
    "make proofs": "--only no-such-proof",  # --run takes hours; tests/benchmarks runs it small
    "make outside": "--list",  # what it runs is other people's packages, for many minutes
    "make migrate": "URL=runs/demo.db",
    "trinity-buffer demo": DEMO,
    "trinity-buffer explore": "--batches 10",
    "python benchmarks/learning.py": LEARNING,
    "python benchmarks/learning.py --all": f"{LEARNING} --algorithm sft",
    "python -m benchmarks.gpu": "--device cpu --tiny --only losses",
    "python -m benchmarks.learning_hf": "--small --seeds 7",
    "python -m benchmarks.loss_path": (
        "--device cpu --ways ours,naive --chunks 10 --sizes 64,512,16 --repetitions 1"
    ),
    "python -m benchmarks.outside": "--list",
    "python -m benchmarks.peers": PEERS,
    "python -m benchmarks.proofs": "--only no-such-proof",
    "python -m benchmarks.run": BENCH,
    "python -m benchmarks.watching": (
        "--experiences 2048 --steps 2 --pairs 1 --store runs/watching.db"
    ),
    "python -m benchmarks.watching --store": "--experiences 2048 --steps 2 --pairs 1",
    "python -m benchmarks.writers": "--writers 2 --seconds 0.3",
    "python -m benchmarks.verify": "--experiences 64 --repetitions 1 --store runs/verify.db",
}


def sized(command: str) -> str:
    """Return the command with the arguments that make it small."""
    words, more = shlex.split(command), _sizes_of(command)
    if not more:
        return command
    if words[0] != "make" or more.startswith("URL="):
        return f"{command} {more}"
    given = [word.removeprefix("ARGS=") for word in words if word.startswith("ARGS=")]
    others = [word for word in words if not word.startswith("ARGS=")]
    return f"{shlex.join(others)} ARGS={shlex.quote(' '.join([*given, more]))}"


def _sizes_of(command: str) -> str:
    words = shlex.split(command)
    fitting = [start for start in SIZES if words[: len(start.split())] == start.split()]
    return SIZES[max(fitting, key=len)] if fitting else ""


KEEPS = "--record"
"""With it a script does what it does without, and keeps the result: one run shows both."""


class Run(NamedTuple):
    """What a line comes to.

    Attributes:
        program: with its arguments.
        kept: the other options that no size sets again.
        sizes: what is put behind them.
    """

    program: str
    kept: tuple[str, ...]
    sizes: str


def united(commands: Sequence[str], others: Iterable[str] = ()) -> list[str]:
    """Return the commands, but of those that come to the same run only one.

    It has the options of all of them, and of those of ``others`` that come to it too: each is still
    read, though the sizes set it again.
    """
    together: dict[Run, dict[str, None]] = {_run_of(command)[0]: {} for command in commands}
    for command in (*commands, *others):
        run, again = _run_of(command)
        if run in together:
            together[run].update(dict.fromkeys(again))
    return [" ".join([run.program, *again, *run.kept]) for run, again in together.items()]


def known(commands: Iterable[str]) -> set[Run]:
    """Return what the commands come to."""
    return {_run_of(command)[0] for command in commands}


def _run_of(command: str) -> tuple[Run, list[str]]:
    """Return what a line comes to, and those of its options that are set again, or `KEEPS`."""
    if not command.startswith("python "):
        return Run(command, (), ""), []
    sizes = _sizes_of(command)
    program, *options = re.split(" (?=--)", command)
    again = [one for one in options if one.split()[0] in (KEEPS, *sizes.split())]
    kept = tuple(one for one in options if one not in again)
    return Run(program, kept, sizes), again
