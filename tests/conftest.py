"""Fixtures of all tests: stores on SQLite and on a real PostgreSQL."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from zlib import crc32

# Before anything imports torch, and inherited by every process that a test starts: the tests run on
# all cores already.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell lets what it starts in the background ignore Ctrl-C, and all that this starts in its turn.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import anyio
import pytest
from hypothesis import is_hypothesis_test, settings

from tests.postgres import PostgresServer
from tests.small_sizes import resized
from tests.warm_python import make_python, served
from trinity_buffer import open_store

gc.disable()  # until the tests are collected: what is made until then stays
DATABASE = "test"
STORE, EMPTY_STORE = "store", "empty_store"

LONGEST = (
    *("test_lower_bounds.py", "test_faults.py", "test_drafts.py", "test_growth.py"),
    *("test_peers.py", "test_blocks.py", "test_long_rows.py", "test_mutants.py"),
    *("test_torchrun.py", "test_extras.py"),
)
"""Files with tests that take a minute: whoever meets one at the end is waited for."""
MADE_ONCE = "apart"
"""A fixture of a module, of fifteen seconds: long tests that want it stay together."""
WAITS = "test_torture.py"
"""Its tests take a minute, too, and compute for ten seconds of it."""

Resize = Callable[..., object]

# A deadline per example measures the machine: the first one imports, and all cores are in use.
settings.register_profile("trinity_buffer", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=20)
settings.load_profile("trinity_buffer")


QUICK_ON_A_SERVER = (
    "migration",
    "store",
    "test_writing.py",
    "test_committing.py",
    "test_sessions.py",
)
"""Folders and files whose tests run on PostgreSQL in `make test`; of others, in `make check`."""


FORKING = ("CONTEXT", "said_by", "fork_children")
"""Names from `tests.crash.forking`, by which a module forks processes."""

PARSING = ("test_house.py", "test_private_names.py")
"""Files whose tests read the syntax trees of all code, which take seconds to make."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `make test` run some cases of each test, and `make check` all."""
    what = "run N cases of each parametrized test on each database, chosen by their checksums"
    parser.addoption("--cases", type=int, metavar="N", help=what)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Count what is tested once more on a server, above the store, among the long tests.

    With ``--dist=loadgroup``, tests stay with their file: what it imports late, and what its
    fixtures make once, is needed once. In `make test`, one process starts the server, one that from
    which others fork, one parses all code, and one lets Hypothesis read all modules for numbers and
    words to try. In `make check`, what is marked long goes to whichever process is free.
    """
    path = item.path.relative_to(Path(__file__).parent)
    folder = path.parts[0]
    is_marked = item.get_closest_marker("long") is not None
    is_quick = {folder, item.path.name} & set(QUICK_ON_A_SERVER)
    on_a_server = "postgresql" in item.name.partition("[")[2]
    if on_a_server and not is_quick:
        item.add_marker(pytest.mark.long)
    assert isinstance(item, pytest.Function)
    if item.path.name in PARSING:
        item.add_marker(pytest.mark.xdist_group("trees"))
    elif not item.config.getoption("--cases"):
        if not is_marked or MADE_ONCE in item.fixturenames:
            item.add_marker(pytest.mark.xdist_group(str(path)))
    elif on_a_server or any(name.startswith("postgres") for name in item.fixturenames):
        item.add_marker(pytest.mark.xdist_group("server"))
    elif not vars(item.module).keys().isdisjoint(FORKING):
        item.add_marker(pytest.mark.xdist_group("forks"))
    elif is_hypothesis_test(item.function):
        item.add_marker(pytest.mark.xdist_group("examples"))
    else:
        item.add_marker(pytest.mark.xdist_group(str(path)))


@pytest.hookimpl(trylast=True)  # when others have left out what is not asked for
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with what takes longest, and spread what waits among what computes."""
    if most := config.getoption("--cases"):
        left_out = _beyond(most, items)
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    first = [item for item in items if item.path.name in LONGEST]
    waiting = [item for item in items if item.path.name == WAITS]
    others = [item for item in items if item.path.name not in (*LONGEST, WAITS)]
    apart = len(others) // (len(waiting) + 1)
    for number, item in enumerate(waiting):
        others.insert(number * (apart + 1), item)
    items[:] = [*first, *others]


def _beyond(most: int, items: list[pytest.Item]) -> set[pytest.Item]:
    """Return all but ``most`` cases of each parametrized test on each database.

    Not every so manyth: in a product of parameters these would be all of one value.
    """
    tests: dict[tuple[str, bool], list[pytest.Item]] = {}
    for item in items:
        name, _, case = item.nodeid.partition("[")
        tests.setdefault((name, "postgresql" in case), []).append(item)
    by_checksum = [
        sorted(cases, key=lambda case: crc32(case.name.encode())) for cases in tests.values()
    ]
    return {case for cases in by_checksum for case in cases[most:]}


def pytest_collection_finish() -> None:
    """Collect garbage seldom, and leave out what was imported: it was a seventh of all the time."""
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """One server per test process, started by the first test that asks for it (0.5 s).

    One for all of them would need a lock and an owner that outlives the others, and would save
    nothing that can be measured. It is not durable: a test that kills a server starts its own.
    """
    with PostgresServer(durable=False) as server:
        server.create_database(DATABASE)
        yield server


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """URL of an empty PostgreSQL database."""
    yield postgres_server.url(DATABASE)
    postgres_server.empty_database(DATABASE)


@pytest.fixture(scope="session")
def postgres_store(postgres_server: PostgresServer) -> str:
    """URL of a store that is emptied after each test: its tables take a tenth of a second."""
    anyio.run(_create, postgres_server.create_database(EMPTY_STORE))
    return postgres_server.create_database(STORE, template=EMPTY_STORE)


@pytest.fixture
def postgres_store_url(postgres_server: PostgresServer, postgres_store: str) -> Iterator[str]:
    """URL of an empty store."""
    yield postgres_store
    postgres_server.empty_store(STORE, template=EMPTY_STORE)


async def _create(url: str) -> None:
    async with open_store(url):
        pass


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where a Python that has imported torch is served, one for all test processes."""
    base = tmp_path_factory.getbasetemp()
    with served(base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) as address:
        yield address


@pytest.fixture
def warm_python(warm: Path, tmp_path: Path) -> str:
    """Path of a Python that has imported torch, for a test that starts several processes."""
    make_python(tmp_path / "python", Path(sys.executable), warm)
    return str(tmp_path / "python")


@pytest.fixture
def new_sqlite_url(tmp_path: Path) -> str:
    """URL of an SQLite file that does not exist yet."""
    return f"sqlite:///{tmp_path / 'store.db'}"


@pytest.fixture
def resize() -> Iterator[Resize]:
    """Calls `resized`, until the test ends: ``resize(events_per_page=2)``."""
    with ExitStack() as stack:
        yield lambda **changed: stack.enter_context(resized(**changed))


@pytest.fixture(scope="session")
def sqlite_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that nobody opens again: a copy takes no time."""
    path = tmp_path_factory.mktemp("store") / "store.db"
    anyio.run(_create, f"sqlite:///{path}")
    return path


@pytest.fixture
def sqlite_url(sqlite_store: Path, tmp_path: Path) -> str:
    """URL of an empty store in a file."""
    return f"sqlite:///{shutil.copy(sqlite_store, tmp_path)}"


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest) -> str:
    """URL of an empty store, on each backend in turn: for tests of the store's contract."""
    fixture = {"sqlite": "sqlite_url", "postgresql": "postgres_store_url"}[request.param]
    url: str = request.getfixturevalue(fixture)
    return url
