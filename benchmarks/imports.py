"""Which files of a repository a command runs: its module, and all that this imports."""

from __future__ import annotations

import ast
import hashlib
import shlex
from collections.abc import Iterable
from functools import cache
from pathlib import Path


def files_of(command: str, root: Path) -> list[str]:
    """Return the files under ``root`` that ``command`` imports, sorted, itself among them.

    Imports inside functions count, those for type checkers alone do not. A text that names a module
    (of a table of lazy imports, or behind ``-m``) counts as an import of it.

    Args:
        command: a command line, as ``python -m module ...`` or ``python file.py ...``.
        root: folder of the repository, from which modules are found.

    Raises:
        ValueError: no module or file of the repository is run by the command.
    """
    return imported_by(entry_of(command, root), root)


def digest_of(files: Iterable[str], root: Path) -> str:
    """Return what tells these files, as they are now, from others: 16 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        content = (root / file).read_bytes()
        digest.update(f"{file}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def entry_of(command: str, root: Path) -> tuple[str, ...]:
    """Return the files under ``root`` with which ``command`` begins; raises as `files_of`."""
    words = shlex.split(command)
    if "-m" in words[:-1]:
        found = _places(words[words.index("-m") + 1], root)
    else:
        found = [word for word in words if word.endswith(".py") and (root / word).exists()][:1]
    if not found:
        raise ValueError(f"{command!r} runs no module of {root}: name one as `python -m module`")
    return tuple(found)


def imported_by(entry: Iterable[str], root: Path) -> list[str]:
    """Return the files under ``root`` that run with those of ``entry``, sorted."""
    here = {path.name.removesuffix(".py") for path in root.iterdir()}
    files: set[str] = set()
    modules: set[str] = set()
    todo = list(entry)
    while todo:
        file = todo.pop()
        if file in files:
            continue
        files.add(file)
        for module in _modules((root / file).read_bytes()) - modules:
            modules.add(module)
            if module.partition(".")[0] in here:
                todo += _places(module, root)
    return sorted(files)


def _places(module: str, root: Path) -> list[str]:
    """Return the files that run when ``module`` is imported, those of its packages among them."""
    parts = module.split(".")
    found = []
    for depth in range(1, len(parts) + 1):
        path = root.joinpath(*parts[:depth])
        names = [path / "__init__.py", path.with_suffix(".py")]
        names += [path / "__main__.py"] if depth == len(parts) else []
        found += [name.relative_to(root).as_posix() for name in names if name.is_file()]
    return found


@cache
def _modules(source: bytes) -> frozenset[str]:
    """Return the modules that a file names; of many commands, most have the same files."""
    found: set[str] = set()
    todo: list[ast.AST] = [ast.parse(source)]
    while todo:
        match todo.pop():
            case ast.Import(names=names):
                found.update(name.name for name in names)
            case ast.ImportFrom(module=str(module), names=names):
                found.add(module)
                found.update(f"{module}.{name.name}" for name in names)
            case ast.Constant(value=str(text)):
                found.update(_named(text))
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=others):
                todo += others
            case node:
                todo += ast.iter_child_nodes(node)
    return frozenset(found)


def _named(text: str) -> list[str]:
    """Return ``text`` if it could be a module's name, without what follows a colon."""
    name = text.partition(":")[0]
    return [name] if all(part.isidentifier() for part in name.split(".")) else []
