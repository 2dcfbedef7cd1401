"""The house rules that no linter knows. Each breach is told as ``file:line``.

An exception to a rule stands in the table of that rule, with its reason; one that is no longer
needed is a breach as well.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.source_trees import PACKAGE, ROOT, Function, trees

MAX_FUNCTION_LINES = 80
MAX_FILE_LINES = 800
MAX_NESTING = 3

# The exceptions: the file, or ``file:function``, and why.
LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}
BROAD_EXCEPTS = {
    f"{PACKAGE}/cli/run_backends.py": "the user's code failed: one sentence, with its line",
    f"{PACKAGE}/algorithm/arguments.py:get": "one's own module failed: told as a sentence",
    f"{PACKAGE}/pipeline/train/stream.py:run": "handed to whoever reads the stream",
    f"{PACKAGE}/store/connection.py:execute": "raised again where the trip is waited for",
    f"{PACKAGE}/pipeline/coordination/waiting.py:task_group": "raised again, bare of the group",
    f"{PACKAGE}/pipeline/write/batch.py:prepare": "handed to its caller",
    f"{PACKAGE}/pipeline/write/writer.py:_commit": "handed to every caller of the group",
    f"{PACKAGE}/pipeline/write/writer.py:_commit_singly": "handed to its caller",
}
LAZY_IMPORTS = {
    f"{PACKAGE}/pipeline/archive.py:_parquet": "pyarrow is an extra",
    "benchmarks/learning_report.py:_plot": "matplotlib is an extra, and slow to import",
    f"{PACKAGE}/cli/data.py:import_": "torch, which an export does not need",
    f"{PACKAGE}/cli/data.py:report": "jinja2, which an export does not need",
    f"{PACKAGE}/cli/data.py:track": "torch, which an export does not need",
    f"{PACKAGE}/cli/data.py:replay": "torch, which compaction does not need",
    f"{PACKAGE}/cli/data.py:reannotate": "torch, which compaction does not need",
    f"{PACKAGE}/cli/run.py:init": "torch, which a refusal or a help page does not need",
    f"{PACKAGE}/cli/maintenance.py:migrate": "alembic, which only migrations need",
    f"{PACKAGE}/cli/maintenance.py:algorithms": "torch, which checks and repairs do not",
    f"{PACKAGE}/cli/options.py:chosen": "torch, which only a file needs",
    f"{PACKAGE}/cli/run.py:demo": "torch, which a refusal or a help page does not need",
    f"{PACKAGE}/cli/run.py:explore": "torch, likewise",
    f"{PACKAGE}/cli/run.py:annotate": "torch, likewise",
    f"{PACKAGE}/cli/run.py:train": "torch, likewise",
    f"{PACKAGE}/cli/run_config.py:_yaml": "YAML, in which few configurations are written",
    f"{PACKAGE}/cli/servers.py:record": "starlette and uvicorn are an extra",
    f"{PACKAGE}/cli/servers.py:serve": "starlette is an extra",
    f"{PACKAGE}/cli/servers.py:sync_weights": "httpx and torch, likewise",
    f"{PACKAGE}/cli/demo_run.py:save_curve": "matplotlib is an extra",
    f"{PACKAGE}/pipeline/store.py:writer": "torch, which readers do not need",
    f"{PACKAGE}/pipeline/store.py:read": "torch, which who only counts does not need",
    f"{PACKAGE}/pipeline/store.py:train_stream": "torch, which readers do not need",
    f"{PACKAGE}/pipeline/store.py:_create_or_change": "all options: for a new configuration",
    f"{PACKAGE}/codec/objects.py:_arrays": "NumPy, which who only asks does not need",
}
SEPARATE = {
    f"{PACKAGE}/cli/demo_run.py": "loads the demo, which no other command needs",
    f"{PACKAGE}/cli/main.py": "the entry point, beside `python -m`",
    f"{PACKAGE}/demo/recipes.py": "what a user of the demo changes",
    f"{PACKAGE}/integrations/trackers.py": "other people's packages, each an extra",
    f"{PACKAGE}/pipeline/annotate/deciding.py": "with its caller it has over 800 lines",
    f"{PACKAGE}/pipeline/annotate/rewards.py": "public, loaded by its name",
    f"{PACKAGE}/pipeline/history/migrate.py": "imports alembic",
    f"{PACKAGE}/pipeline/train/ranks.py": "how ranks find each other; with its caller over 800",
    f"{PACKAGE}/pipeline/write/writer.py": "imports torch, which readers do not need",
    f"{PACKAGE}/recorder/app.py": "imports starlette, an extra",
    f"{PACKAGE}/store/notify.py": "how each database tells of commits",
    f"{PACKAGE}/web/app.py": "imports starlette, an extra",
    f"{PACKAGE}/web/pages.py": "what templates show, without HTTP",
}
"""Modules that one other imports and that stay apart all the same."""

VAGUE_NAMES = {"found", "told", "said", "given", "kept", "one", "some"}
MAX_VAGUE_NAMES = 60
UNSAID = re.compile(
    r'"""(Return what|Do nothing)|\b(no|some)body\b|\bwhoever\b|\blets? go\b|as people say',
    re.IGNORECASE,
)
"""What leaves out the thing that is returned, or who does something."""
NAMED_BY_TRINITY = {
    f"{PACKAGE}/algorithm/utils.py": "Trinity-RFT's code imports it by this name",
    f"{PACKAGE}/algorithm/sample_strategy/utils.py": "likewise",
}
PRINTING = (f"{PACKAGE}/cli/", "tools/", "benchmarks/", "tests/")
NAMELESS = {"utils", "util", "common", "helpers", "helper", "manager", "managers"}
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
UNSAFE_CALLS = {
    *("eval", "exec", "torch.load", "torch.save"),
    *(f"torch.distributed.{name}_object" for name in ("all_gather", "gather")),
    *(f"torch.distributed.{name}_object_list" for name in ("broadcast", "scatter", "send", "recv")),
}
UNPICKLING = {
    f"{PACKAGE}/integrations/imports/formats.py": "an Unpickler whose find_class refuses every name"
}


class Breach(NamedTuple):
    file: str
    line: int
    what: str
    function: str = ""


def nodes(*kinds: type[ast.AST]) -> Iterator[tuple[str, str, ast.AST]]:
    """Yield the file, the innermost function (or nothing) and the node of each of the ``kinds``."""
    yield from (found for found in looked_at() if isinstance(found[2], kinds))


@cache
def looked_at() -> list[tuple[str, str, ast.AST]]:
    """Return what any rule looks at: a tenth of all nodes, walked through once."""
    kinds = (Function, ast.ExceptHandler, ast.Call, ast.Import, ast.ImportFrom)
    return [
        (file, function, node)
        for file, tree in trees().items()
        for function, node in walk(tree, "")
        if isinstance(node, kinds)
    ]


def walk(node: ast.AST, function: str) -> Iterator[tuple[str, ast.AST]]:
    waiting = [(function, node)]
    while waiting:
        function, node = waiting.pop()
        for child in ast.iter_child_nodes(node):
            yield function, child
            waiting.append((child.name if isinstance(child, Function) else function, child))


def functions() -> Iterator[tuple[str, Function]]:
    for file, _, node in nodes(ast.FunctionDef, ast.AsyncFunctionDef):
        assert isinstance(node, Function)
        yield file, node


def complain(breaches: list[Breach], allowed: dict[str, str]) -> None:
    """Fail with every breach that is not allowed, and with every permission that nobody uses."""
    keys = [{b.file, f"{b.file}:{b.function}"} for b in breaches]
    wrong = [
        f"{b.file}:{b.line}: {b.what}"
        for b, key in zip(breaches, keys, strict=True)
        if not key & set(allowed)
    ]
    needless = set(allowed).difference(*keys)
    wrong += [f"{key}: needs no exception any more" for key in sorted(needless)]
    assert not wrong, "\n" + "\n".join(wrong)


def test_one_process_reads_the_trees(request: pytest.FixtureRequest) -> None:
    """pytest-xdist sends a test to the process of its group by the end of the test's id."""
    if request.config.getoption("loadgroup", default=False):
        remedy = "these releases of pytest and pytest-xdist do not go together: make setup"
        assert request.node.nodeid.endswith("@trees"), remedy


def test_no_file_is_longer_than_one_can_keep_in_mind() -> None:
    lengths = {file: len((ROOT / file).read_bytes().splitlines()) for file in trees()}
    long = {file: n for file, n in lengths.items() if n > MAX_FILE_LINES}
    complain([Breach(file, n, f"{n} lines") for file, n in long.items()], LONG_FILES)


def test_no_function_is_longer_than_eighty_lines() -> None:
    breaches = []
    for file, node in functions():
        assert node.end_lineno is not None
        if (length := node.end_lineno - node.lineno + 1) > MAX_FUNCTION_LINES:
            what = f"{node.name} has {length} lines"
            breaches.append(Breach(file, node.lineno, what, node.name))
    complain(breaches, LONG_FUNCTIONS)


def depth(node: ast.AST) -> int:
    # A ``with`` opens something; it does not branch.
    blocks = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.Match)
    holders = (ast.stmt, ast.ExceptHandler, ast.match_case)  # an expression holds no block
    inner = [
        depth(child) - is_elif(node, child)
        for child in ast.iter_child_nodes(node)
        if isinstance(child, holders)
    ]
    return isinstance(node, blocks) + max(inner, default=0)


def is_elif(node: ast.AST, child: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]


def test_no_block_is_nested_deeper_than_three() -> None:
    deep = [(file, f) for file, f in functions() if depth(f) > MAX_NESTING]
    complain([Breach(file, f.lineno, f"{f.name}: {depth(f)} levels") for file, f in deep], {})


def is_public(name: str) -> bool:
    return not name.startswith("_")


def undocumented(node: ast.Module | ast.ClassDef) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.Module) and node.body and not ast.get_docstring(node):
        yield 1, "the module has no docstring"
    for child in node.body:
        if isinstance(child, Function | ast.ClassDef) and is_public(child.name):
            decorators = {name_of(d) for d in child.decorator_list}
            if not decorators & {"overload", "override", "setter"} and not ast.get_docstring(child):
                yield child.lineno, f"{child.name} has no docstring"
            if isinstance(child, ast.ClassDef):
                yield from undocumented(child)


def name_of(node: ast.AST) -> str:
    """Return the last part of a dotted name, or nothing."""
    return dotted(node).rpartition(".")[2]


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_every_public_name_says_what_it_is() -> None:
    breaches = []
    for file, tree in trees().items():
        if file.startswith((PACKAGE, "tools")):
            breaches += [Breach(file, line, what) for line, what in undocumented(tree)]
    complain(breaches, {})


def test_nobody_catches_everything_and_goes_on() -> None:
    breaches = []
    for file, function, node in nodes(ast.ExceptHandler):
        assert isinstance(node, ast.ExceptHandler)
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        broad = [c for c in caught if c is None or name_of(c) in {"Exception", "BaseException"}]
        reraises = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
        if broad and not reraises:
            breaches.append(Breach(file, node.lineno, "except Exception", function))
    complain(breaches, BROAD_EXCEPTS)


def test_only_commands_print() -> None:
    breaches = [
        Breach(file, node.lineno, "print")
        for file, _, node in nodes(ast.Call)
        if isinstance(node, ast.Call) and dotted(node.func) == "print"
        if not file.startswith(PRINTING)
    ]
    complain(breaches, {})


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        module = node.module or ""
        return [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return []


def test_no_byte_that_is_read_can_run() -> None:
    breaches = []
    for file, _, node in nodes(ast.Import, ast.ImportFrom, ast.Call):
        if isinstance(node, ast.Call):
            unsafe = {dotted(node.func)} & UNSAFE_CALLS
            unsafe |= {k.arg for k in node.keywords if k.arg == "allow_pickle"}
        else:
            unsafe = {name for name in imported(node) if name.partition(".")[0] in UNSAFE_MODULES}
            unsafe |= set(imported(node)) & UNSAFE_CALLS
        if unsafe and not file.startswith("tests/"):
            what = ", ".join(sorted(map(str, unsafe)))
            breaches.append(Breach(file, getattr(node, "lineno", 0), what))
    complain(breaches, UNPICKLING)


def test_imports_stand_at_the_top() -> None:
    breaches = [
        Breach(file, getattr(node, "lineno", 0), f"import in {function}", function)
        for file, function, node in nodes(ast.Import, ast.ImportFrom)
        if function and not file.startswith("tests/")
    ]
    complain(breaches, LAZY_IMPORTS)


def test_every_module_has_a_name_that_says_something() -> None:
    words = {file: set(Path(file).with_suffix("").parts) for file in trees()}
    complain(
        [Breach(f, 1, "says nothing") for f in trees() if words[f] & NAMELESS], NAMED_BY_TRINITY
    )


def test_a_module_with_one_importer_has_a_reason() -> None:
    files = {f.removesuffix(".py").replace("/", "."): f for f in trees() if f.startswith(PACKAGE)}
    importers: dict[str, set[str]] = {}
    imports = [(file, n) for file, _, n in nodes(ast.ImportFrom) if isinstance(n, ast.ImportFrom)]
    for file, node in imports:
        for name in node.names:
            modules = [f"{node.module}.{name.name}", str(node.module)]
            module = next((files[m] for m in modules if m in files), None)
            if module is not None and file.startswith(PACKAGE):
                importers.setdefault(module, set()).add(file)
    apart = ("/__init__.py", f"{PACKAGE}/algorithm/")
    breaches = [
        Breach(module, 1, f"only {others.pop()} imports it: merge them, or say why not")
        for module, others in sorted(importers.items())
        if len(others) == 1 and not module.endswith(apart[0]) and not module.startswith(apart[1])
    ]
    complain(breaches, SEPARATE)


def test_things_are_called_what_they_are() -> None:
    names = [
        f"{file}:{getattr(node, 'lineno', 0)}: {name}"
        for file, tree in trees().items()
        if file.startswith(PACKAGE)
        for node in ast.walk(tree)
        for name in assigned(node)
        if name.strip("_") in VAGUE_NAMES
    ]
    assert len(names) <= MAX_VAGUE_NAMES, "\n" + "\n".join(names)


def test_sentences_name_the_thing() -> None:
    lines = [
        f"{file}:{number}: {line.strip()}"
        for file, line, number in (
            (file, line, number)
            for file in trees()
            if file.startswith(PACKAGE)
            for number, line in enumerate((ROOT / file).read_text().splitlines(), 1)
        )
        if UNSAID.search(line)
    ]
    assert not lines, "\n" + "\n".join(lines)


def assigned(node: ast.AST) -> list[str]:
    """Return the names that a node gives to a thing."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            return [name]
        case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return [name]
        case ast.ClassDef(name=name):
            return [name]
    return []


def modules_after(statement: str) -> set[str]:
    """Return the names of the modules that a fresh Python holds after ``statement``."""
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    return set(done.stdout.decode().split())


NOT_LOADED_BY = {
    "trinity_buffer": {"torch", "sqlalchemy", "numpy", "pydantic", "typer", "rich"},
    "trinity_buffer.pipeline.store": {"torch"},
    "trinity_buffer.cli.stats": {"torch", "numpy", "pydantic"},
    "trinity_buffer.store": {"torch", "msgpack"},
    "trinity_buffer.algorithm": {"sqlalchemy", "msgpack"},
}


LOADS_TORCH = pytest.param("trinity_buffer.algorithm", marks=pytest.mark.long)


@pytest.mark.parametrize(
    "module", [*(name for name in NOT_LOADED_BY if name not in LOADS_TORCH.values), LOADS_TORCH]
)
def test_an_import_does_not_load_what_it_does_not_need(module: str) -> None:
    heavy = NOT_LOADED_BY[module] & modules_after(f"import {module}")
    assert not heavy, f"import {module} loads {', '.join(sorted(heavy))}"
