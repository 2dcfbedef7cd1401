"""What a GPU makes of it: scores, micro-batches, packed rows, equal bits, commits, waits.

python -m benchmarks.gpu                         # four minutes on one GPU
python -m benchmarks.gpu --minutes 2 --only scores,microbatch
python -m benchmarks.gpu --device cpu --tiny     # does it run at all? No figure means anything

Each part is a process of its own, which ends with its share of the time. It prints one JSON line a
figure: what was measured, the figure, its goal, and whether it holds (null: there is no goal, or a
CPU's speed is asked of it). `--record` appends them to docs/proofs/gpu.jsonl, with the card and the
versions. Exit code 1: a part failed, or a goal was missed.
It needs no network; torch and triton are used as they are found, transformers must be there. What
else the machine lacks is installed from a folder: `--wheels FOLDER`.
TRL's function is measured where a wheel of TRL is, without the packages that TRL needs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs" / "proofs" / "gpu.jsonl"
PARTS = {"scores": 30, "microbatch": 38, "losses": 10, "bits": 65, "steps": 97}
"""Seconds of each part, of 240; last the one that says most if it is cut short."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line, or ``arguments``, asks for; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=4.0, help="for all parts together")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU computes in seconds")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels to install for this run")
    parser.add_argument("--record", action="store_true", help=f"append to {RECORD.name}")
    asked = parser.parse_args(arguments)
    if asked.record and (asked.tiny or asked.device == "cpu"):
        parser.error("--record is for figures of a GPU: leave --tiny and --device cpu out")
    names = asked.only.split(",")
    if unknown := set(names) - PARTS.keys():
        parser.error(f"--only {min(unknown)}: the parts are {', '.join(PARTS)}")
    end = time.monotonic() + asked.minutes * 60
    with tempfile.TemporaryDirectory() as site:
        environment = _environment(asked.wheels, Path(site))
        lines, failed = _run(names, asked, end, environment)
        if asked.record:
            _record(lines, names, environment)
    for line in lines:
        missed = "" if line.get("holds") is not False else "   MISSED"
        print(f"{line['what']}: {line['figure']} {line['unit']}, goal {line['goal']}{missed}")
    return int(failed or any(line.get("holds") is False for line in lines))


def _environment(wheels: Path | None, site: Path) -> dict[str, str]:
    """Return the environment of the parts, in which the wheels of a folder can be imported."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    paths = [str(ROOT), environment.get("PYTHONPATH", "")]
    if wheels is not None:
        files = sorted(map(str, wheels.glob("*.whl")))
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        if subprocess.run([*pip, "--target", str(site), *files], check=False).returncode:
            raise SystemExit(f"--wheels {wheels}: pip could not install what is there, see above")
        paths.insert(1, str(site))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment


def _run(
    names: Sequence[str], asked: argparse.Namespace, end: float, environment: dict[str, str]
) -> tuple[list[dict[str, Any]], bool]:
    """Run the parts, one after the other; return their figures, and whether one failed."""
    lines: list[dict[str, Any]] = []
    failed = False
    for place, name in enumerate(names):
        left = end - time.monotonic()
        seconds = left * PARTS[name] / sum(PARTS[later] for later in names[place:])
        command = [sys.executable, "-m", "benchmarks.gpu_parts", name]
        command += ["--device", asked.device, "--seconds", f"{seconds:.0f}"]
        command += ["--tiny"] if asked.tiny else []
        print(f"{name}: up to {seconds:.0f} s", file=sys.stderr, flush=True)
        begin = time.monotonic()
        try:
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
                check=False,
                timeout=max(left, 1),
            )
            output, reason = done.stdout, f"exit code {done.returncode}" if done.returncode else ""
        except subprocess.TimeoutExpired as error:
            output, reason = (error.stdout or b"").decode(), "no time was left"
        lines += [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        took = f"{time.monotonic() - begin:.0f} s"
        print(f"{name}: {reason or 'done'} after {took}", file=sys.stderr, flush=True)
        failed |= bool(reason)
    return lines, failed


def _record(
    lines: Sequence[dict[str, Any]], names: Sequence[str], environment: dict[str, str]
) -> None:
    """Append the figures, with the card, the versions and what ran, to `RECORD`."""
    about = f"python -m benchmarks.gpu --only {','.join(names)} --record"
    command = [sys.executable, "-m", "benchmarks.gpu_parts", "provenance", "--command", about]
    told = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env=environment, check=True
    ).stdout
    origin = json.loads(told)
    with RECORD.open("a") as file:
        file.writelines(json.dumps({**line, **origin}) + "\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
