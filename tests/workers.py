"""Test processes that are forked when all tests are collected: a plugin of pytest.

Importing and collecting takes ten seconds, and more memory than the tests. Each worker has one
test and knows the next one, as fixtures of a module end with its last test.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from hypothesis import find
from hypothesis import strategies as st

NO_MORE = -1
Message = dict[str, Any]


@dataclass
class Worker:
    """A process, the tests that it was given and has not ended, and what these belong to."""

    number: int
    pid: int
    pipe: Connection
    tests: deque[int] = field(default_factory=deque)
    part: str = ""
    is_ending: bool = False
    last_words: str = ""

    def say(self, test: int) -> None:
        with suppress(BrokenPipeError):  # that it died is heard later
            self.pipe.send(test)


class Workers:
    """Runs the tests in ``count`` processes; tests of one part in the same one, while it lasts."""

    def __init__(
        self, config: pytest.Config, count: int, part_of: Callable[[pytest.Item], str]
    ) -> None:
        self.config = config
        self.count = count
        self.part_of = part_of
        self.workers: list[Worker] = []
        self.started = 0
        self.session: pytest.Session
        self.waiting: dict[str, deque[int]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Give tests to the workers, and report what they say, until all tests have ended."""
        if session.testsfailed or self.config.option.collectonly:
            return None  # as pytest does it
        self.session = session
        for number, item in enumerate(session.items):
            self.waiting.setdefault(self.part_of(item), deque()).append(number)
        self.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # is made now
        find(st.text(), lambda _: True)  # Hypothesis reads all modules, and all of Unicode
        gc.freeze()
        try:
            for _ in range(min(self.count, len(session.items))):
                self._start()
            while self.workers:
                for pipe in wait([worker.pipe for worker in self.workers]):
                    self._hear(next(w for w in self.workers if w.pipe is pipe))
        finally:
            for worker in self.workers:
                worker.pipe.close()  # which ends it
            for worker in self.workers:
                os.waitpid(worker.pid, 0)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        return True

    def _start(self) -> None:
        ours, its = Pipe()
        sys.stdout.flush()  # else each worker has a copy of what was not written yet
        self.started += 1
        pid = os.fork()
        if not pid:
            for pipe in (ours, *(worker.pipe for worker in self.workers)):
                pipe.close()  # a worker ends when nobody holds the other end
            _Life(self.session, its, f"w{self.started}").live()
        its.close()
        self.workers.append(Worker(self.started, pid, ours))
        self._feed(self.workers[-1])

    def _feed(self, worker: Worker) -> None:
        while not worker.is_ending and len(worker.tests) < 2:
            test = self._next(worker)
            worker.is_ending = test == NO_MORE
            worker.tests.extend(() if worker.is_ending else (test,))
            worker.say(test)

    def _next(self, worker: Worker) -> int:
        """Return the next test of the worker's part, of the first that nobody has, or of any."""
        if self._is_over():
            return NO_MORE
        if worker.part not in self.waiting:
            taken = {other.part for other in self.workers}
            free = (part for part in self.waiting if part not in taken)
            longest = max(self.waiting, key=lambda part: len(self.waiting[part]))
            worker.part = next(free, longest)
        tests = self.waiting[worker.part]
        test = tests.popleft()
        if not tests:
            del self.waiting[worker.part]
        return test

    def _is_over(self) -> bool:
        return bool(self.session.shouldfail or self.session.shouldstop or not self.waiting)

    def _hear(self, worker: Worker) -> None:
        message: Message = {}
        with suppress(EOFError, ConnectionResetError):
            message = worker.pipe.recv()
        if not message:
            self._bury(worker)
        elif "ended" in message:
            worker.tests.popleft()
            self._feed(worker)
        elif "warning" in message:
            warning = warnings.WarningMessage(category=UserWarning, **message["warning"])
            self.config.hook.pytest_warning_recorded.call_historic(
                kwargs={"warning_message": warning, "when": "runtest", "location": None}
                | {"nodeid": self.session.items[worker.tests[0]].nodeid}
            )
        elif "died" in message:
            worker.last_words = message["died"]
        else:
            report = self.config.hook.pytest_report_from_serializable(
                config=self.config, data=message["report"]
            )
            name = f"w{worker.number}"  # in the places where pytest looks for a name of xdist's
            gateway = SimpleNamespace(id=name)
            report.node = SimpleNamespace(_workerinfocache=f"[{name}]", gateway=gateway)
            self.config.hook.pytest_runtest_logreport(report=report)

    def _bury(self, worker: Worker) -> None:
        """Say of which test the worker died, and let another one go on with its tests."""
        _, status = os.waitpid(worker.pid, 0)
        self.workers.remove(worker)
        worker.pipe.close()
        if worker.tests:
            item = self.session.items[worker.tests.popleft()]
            code = os.waitstatus_to_exitcode(status)
            reason = worker.last_words or f"the process of this test ended with {code}"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", reason, "call")
            self.config.hook.pytest_runtest_logreport(report=report)
        if worker.tests:
            self.waiting.setdefault(worker.part, deque()).extendleft(reversed(worker.tests))
        if not self._is_over():
            self._start()


class _Life:
    """What a worker does: it is a plugin itself, which hears of every report."""

    def __init__(self, session: pytest.Session, pipe: Connection, name: str) -> None:
        self.session = session
        self.pipe = pipe
        self.name = name

    def live(self) -> NoReturn:
        code = 1
        try:
            self._settle()
            self._run()
            code = 0
        except (EOFError, BrokenPipeError):
            pass  # the parent has gone
        except BaseException:  # an interruption, or an error of pytest or a plugin
            self._say(died=traceback.format_exc())
            raise
        finally:
            with suppress(Exception):  # a server of a fixture ends with it
                self.session._setupstate.teardown_exact(None)
            os._exit(code)

    def _settle(self) -> None:
        """Be a process of its own: with files of its own for what tests print, and a folder."""
        config = self.session.config
        plugins = config.pluginmanager
        plugins.unregister(name="terminalreporter")
        plugins.register(self)
        capture = plugins.getplugin("capturemanager")
        assert capture is not None
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()
        folders = config._tmp_path_factory  # type: ignore[attr-defined]
        folders._basetemp = folders.getbasetemp() / self.name
        folders._basetemp.mkdir(mode=0o700)
        os.environ["PYTEST_WORKER"] = self.name

    def _run(self) -> None:
        test = self._heard()
        while test != NO_MORE:
            following = self._heard()
            items = self.session.items
            item, after = items[test], None if following == NO_MORE else items[following]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            self._say(ended=test)
            test = following

    def _heard(self) -> int:
        number: int = self.pipe.recv()
        return number

    def _say(self, **message: Any) -> None:
        self.pipe.send(message)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        config = self.session.config
        self._say(report=config.hook.pytest_report_to_serializable(config=config, report=report))

    def pytest_warning_recorded(self, warning_message: Any) -> None:
        seen = {name: getattr(warning_message, name) for name in ("filename", "lineno")}
        self._say(warning={"message": str(warning_message.message), **seen})
