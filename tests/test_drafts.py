"""What CONTRIBUTING.md says of a new event kind and a new column is tried on a copy of the package.

A draft touches few files, and the type checker names every reader that a new kind concerns.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[1]
PACKAGE = "trinity_buffer"
READERS = {
    f"{PACKAGE}/store/fold.py",
    f"{PACKAGE}/pipeline/verify/log_audit.py",
    f"{PACKAGE}/inspector/events.py",
}
"""Of a new kind: those that CONTRIBUTING.md lists."""

KIND = '''
class PolicyScored(EventBody, frozen=True, kw_only=True):
    """Somebody measured a policy."""

    number: int
    score: float


class UnknownEvent(Struct, frozen=True, kw_only=True):
'''
USE_OF_KIND = """
import anyio, sys
from trinity_buffer.events import PolicyScored
from trinity_buffer.inspector.events import event_lines
from trinity_buffer.codec.objects import new_event
from trinity_buffer.events import now_us
from trinity_buffer.pipeline.verify.projections import rebuild
from trinity_buffer import open_store
from trinity_buffer import verify
from trinity_buffer.store import log

async def main():
    async with open_store(sys.argv[1]) as store:
        experiment = await store.experiment("x", config={})
        event = new_event(PolicyScored(number=3, score=0.5))
        await store.database.write(
            log.append, experiment.key, [("judge", event)]
        )
        assert (await verify(experiment)).problems == ()
        await rebuild(store.database, experiment.key)
        print([line.kind async for line in event_lines(experiment)])

anyio.run(main)
"""
COLUMN = [
    (
        "experience.py",
        "    teacher_logprobs: Tensor | None\n",
        "    teacher_logprobs: Tensor | None\n    drafts: Tensor | None\n",
    ),
    (
        "experience.py",
        "        teacher_logprobs: TensorLike | None = None,\n",
        "        teacher_logprobs: TensorLike | None = None,\n"
        "        drafts: TensorLike | None = None,\n",
    ),
    (
        "experience.py",
        '            ("teacher_logprobs", teacher_logprobs, torch.float32),\n',
        '            ("teacher_logprobs", teacher_logprobs, torch.float32),\n'
        '            ("drafts", drafts, torch.float32),\n',
    ),
    ("identity.py", '"teacher_logprobs", "chosen"', '"teacher_logprobs", "drafts", "chosen"'),
    (
        "pipeline/write/batch.py",
        'PER_TOKEN = ("logprobs", ',
        'PER_TOKEN = ("drafts", "logprobs", ',
    ),
    (
        "pipeline/train/collate.py",
        'OPTIONAL = {"teacher_logprob": "teacher_logprobs"}',
        'OPTIONAL = {"teacher_logprob": "teacher_logprobs", "draft": "drafts"}',
    ),
]
USE_OF_COLUMN = """
import anyio, sys
from pathlib import Path
import trinity_buffer as tb
from trinity_buffer.errors import InvalidExperienceError
from trinity_buffer.experience import EID, Experience
from trinity_buffer import compact
from trinity_buffer.pipeline.history.compact import restore
from trinity_buffer import verify

def made(run, drafts=(0.25, 0.5)):
    return Experience(
        eid=EID("b", 0, run), tokens=[1, 2, 3], prompt_length=1, reward=float(run), drafts=drafts
    )

async def main():
    async with tb.open_store(sys.argv[1]) as store:
        experiment = await store.experiment("x", config={})
        writer = experiment.writer("e0")
        await writer.plan("b", [0], 2)
        for wrong in ((0.25,), (0.25, float("nan"))):
            try:
                await writer.write([made(0, wrong)])
            except InvalidExperienceError as error:
                assert "drafts" in str(error), error
            else:
                raise AssertionError("a wrong column was let in")
        assert (await writer.write([made(0), made(1)])).written == 2
        await tb.run_strategy(experiment, "grpo")
        async with experiment.train_stream(strategy="grpo", groups_per_step=1) as stream:
            async for step in stream:
                (microbatch,) = step.microbatches
                assert microbatch["draft"].tolist() == [[0, 0.25, 0.5]] * 2, microbatch["draft"]
                await stream.commit(step)
        await compact(experiment, keep_steps=0, archive=Path(sys.argv[2]))
        await restore(experiment)
        read = [e.drafts.tolist() async for e in experiment.read()]
        assert read == [[0.25, 0.5]] * 2, read
        assert (await verify(experiment)).problems == ()
        print("came through")

anyio.run(main)
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package, and of what a type checker needs beside it."""
    for name in (PACKAGE, "migrations", "typings"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    if (known := ROOT / ".mypy_cache").is_dir():  # other people's packages take longer than ours
        shutil.copytree(known, tmp_path / known.name)
    return tmp_path


def replaced(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, f"{path}: {old!r} is there {text.count(old)} times"
    path.write_text(text.replace(old, new))


def complaints(copy: Path) -> list[tuple[str, int]]:
    """Return the files and lines that the type checker names."""
    done = subprocess.run(
        (sys.executable, "-m", "mypy", PACKAGE), cwd=copy, capture_output=True, text=True
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = re.findall(r"^([\w/.]+):(\d+): error: (.*)$", done.stdout, re.MULTILINE)
    assert all("PolicyScored" in what for _, _, what in found), done.stdout
    return [(file, int(line)) for file, line, _ in found]


def ran(python: str, copy: Path, script: str, *arguments: str) -> str:
    done = subprocess.run(
        (python, "-c", script, *arguments),
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def changed(copy: Path) -> Sequence[str]:
    files = [path.relative_to(copy) for path in (copy / PACKAGE).rglob("*.py")]
    return [f"{file}" for file in files if (copy / file).read_bytes() != (ROOT / file).read_bytes()]


def test_the_type_checker_names_every_reader_of_a_new_kind(
    warm_python: str, copy: Path, tmp_path: Path
) -> None:
    events = copy / PACKAGE / "events.py"
    old = "\nclass UnknownEvent(Struct, frozen=True, kw_only=True):\n"
    replaced(events, old, KIND)
    replaced(events, "    | ChainStarted\n", "    | ChainStarted\n    | PolicyScored\n")
    named = complaints(copy)
    assert {file for file, _ in named} == READERS
    for file, line in named:
        know(copy / file, line)
    assert complaints(copy) == []
    assert len(changed(copy)) + 1 <= 6, "with its writer"
    assert "PolicyScored" in ran(
        warm_python, copy, USE_OF_KIND, f"sqlite:///{tmp_path / 'draft.db'}"
    )


def know(path: Path, line: int) -> None:
    """Give the reader a case for the new kind, before the one that may not be reached."""
    lines = path.read_text().splitlines()
    assert "assert_never" in lines[line - 1]
    otherwise = line - 2
    indent = lines[otherwise].partition("case")[0]
    answers = any("return " in line for line in lines[otherwise - 3 : otherwise])
    does = "return str(fact.score)" if answers else "pass"
    lines[otherwise:otherwise] = [f"{indent}case PolicyScored():", f"{indent}    {does}"]
    text = "\n".join([*lines, ""])
    future = "from __future__ import annotations\n"
    assert text.count(future) == 1
    path.write_text(
        text.replace(future, f"{future}\nfrom trinity_buffer.events import PolicyScored\n")
    )


def test_a_new_column_comes_through_with_five_files(
    warm_python: str, copy: Path, tmp_path: Path
) -> None:
    for file, old, new in COLUMN:
        replaced(copy / PACKAGE / file, old, new)
    assert len(changed(copy)) <= 5
    url, archive = f"sqlite:///{tmp_path / 'draft.db'}", str(tmp_path / "archive")
    assert ran(warm_python, copy, USE_OF_COLUMN, url, archive) == "came through\n"
