"""Nothing outside the package touches a private name of it, except the tests of that very module.

A private name may be changed by anybody who finds no other use of it in its module. So what stands
beside the package (tests, tools, benchmarks, migrations) uses public names: a test file
``test_x.py`` alone may use the private names of the modules that are called ``x``.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.source_trees import OUTSIDE, PACKAGE, ROOT, Function, trees

BY_TEXT = {"setattr", "getattr", "delattr", "hasattr", "attrgetter", "object"}
FOREIGN = {"_generate_and_score_completions": "TRL's, which our trainer overrides as its users do"}
WORD = re.compile(r"\b_[A-Za-z]\w*")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.strip("_") != ""


def defined(tree: ast.AST) -> set[str]:
    """Return the private names that a module gives to functions, variables and attributes."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Attribute(attr=name, value=ast.Name(id="self" | "cls"), ctx=ast.Store()):
                found.add(name)
    return {name for name in found if is_private(name)}


def is_ours(module: str | None) -> bool:
    return (module or "").partition(".")[0] == PACKAGE


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the names under which a module has the package, or something of it."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=module, names=names) if is_ours(module):
                yield from (alias.asname or alias.name for alias in names)
            case ast.Import(names=names):
                yield from (alias.asname or PACKAGE for alias in names if is_ours(alias.name))


def root_of(base: ast.expr) -> str:
    """Return the first name of a dotted one, such as ``tb`` of ``tb.Trainer``."""
    return ast.unparse(base).partition(".")[0].partition("[")[0]


def touched(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of what is imported, read, set, named in a text or overridden."""
    own = defined(tree)
    ours = set(imported(tree))
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=module, names=names) if is_ours(module):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.Attribute(attr=name) if name not in own:
                yield node.lineno, name
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=args):
                named = [a.value for a in args if isinstance(a, ast.Constant)] * (called in BY_TEXT)
                texts = [text.rpartition(".")[2] for text in named if isinstance(text, str)]
                yield from ((node.lineno, text) for text in texts if text not in own)
            case ast.ClassDef(bases=bases, body=body) if ours & {root_of(b) for b in bases}:
                yield from ((one.lineno, one.name) for one in body if isinstance(one, Function))


@cache
def homes() -> dict[str, set[str]]:
    """Return, for each private name of the package, the modules that give it."""
    found: dict[str, set[str]] = defaultdict(set)
    for path, tree in trees().items():
        file = Path(path)
        home = file.parent.name if file.stem == "__init__" else file.stem
        for name in defined(tree) if file.is_relative_to(PACKAGE) else ():
            found[name].add(home)
    return found


def breaches(file: Path, text: str, tree: ast.Module | None = None) -> list[str]:
    """Return the private names of the package that ``file`` touches and may not."""
    if homes().keys().isdisjoint(WORD.findall(text)):
        return []  # nine of ten files, whose trees need no walk
    tested = file.stem.removeprefix("test_") if file.stem.startswith("test_") else None
    return [
        f"{file}:{line}: {name} is private to {', '.join(sorted(homes()[name]))}"
        for line, name in sorted(touched(tree or ast.parse(text)))
        if is_private(name) and name not in FOREIGN and tested not in homes().get(name, {tested})
    ]


@pytest.mark.parametrize("folder", OUTSIDE)
def test_nobody_outside_touches_a_private_name(folder: str) -> None:
    files = {Path(path): tree for path, tree in trees().items() if path.startswith(f"{folder}/")}
    assert files
    told = [
        breach
        for file, tree in files.items()
        for breach in breaches(file, (ROOT / file).read_text(), tree)
    ]
    assert told == []


@pytest.mark.parametrize(
    "text",
    [
        "from trinity_buffer import _HOMES",
        "import trinity_buffer\nprint(trinity_buffer._HOMES)",
        "monkeypatch.setattr('trinity_buffer._HOMES', {})",
        "getattr(trinity_buffer, '_HOMES')",
        "import trinity_buffer as tb\nclass Mine(tb.Trainer):\n    def _HOMES(self): ...",
        "from trinity_buffer import Trainer\nclass Mine(Trainer):\n    def _HOMES(self): ...",
    ],
)
def test_a_private_name_is_found_however_it_is_touched(text: str) -> None:
    assert len(breaches(Path("tests/test_other.py"), text)) == 1
    assert breaches(Path("tests/test_trinity_buffer.py"), text) == []
    assert breaches(Path("tests/test_other.py"), text.replace("_HOMES", "HOMES")) == []
