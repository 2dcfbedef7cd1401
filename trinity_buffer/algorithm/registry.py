"""Names of the parts of an algorithm: for configurations; in Python, pass the object."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from trinity_buffer.algorithm.arguments import did_you_mean
from trinity_buffer.errors import InvalidArgumentError, UnknownNameError
from trinity_buffer.user_code import describe_error, own_line

T = TypeVar("T")
Registered = TypeVar("Registered", bound=type)


class Registry(Generic[T]):
    """Names of one kind of class, filed by decorator or entry point (``trinity_buffer.<kind>``)."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._classes: dict[str, T] = {}

    def register_module(self, name: str) -> Callable[[Registered], Registered]:
        """Return a decorator that files a class under ``name``.

        The same class again, as when a notebook's cell runs twice, takes its own place; and so does
        a user's version of a class of this package, if it has the same name.

        Raises:
            InvalidArgumentError: the name belongs to another class.
        """

        def register(cls: Registered) -> Registered:
            known = self._classes.get(name)
            if known is not None and not _is_version_of(cls, known):
                raise InvalidArgumentError(
                    f"{self.kind} {name!r} is taken by {known!r}; choose another name"
                )
            self._classes[name] = cls  # type: ignore[assignment]  # a class of kind T by contract
            return cls

        return register

    def get(self, name: str) -> T:
        """Return the class of ``name``; installed packages are asked the first time it is missing.

        Args:
            name: as it was registered, or where a class is: ``module.Class`` or ``module:Class``.

        Raises:
            UnknownNameError: lists the names there are, and the one probably meant.
        """
        if not isinstance(name, str):
            raise UnknownNameError(
                f"{name!r} is no name of a {self.kind} (there are: {', '.join(self.names())})"
            )
        if name not in self._classes and is_path(name):
            module, _, attribute = name.replace(":", ".").rpartition(".")
            with self.importing(name):
                imported: T = getattr(import_module(module), attribute)
            return imported
        if name not in self._classes:
            # Asked last: reading the metadata of all installed packages takes milliseconds.
            for entry in entry_points(group=self._group, name=name):
                # A package that fails to import must not look like a name that is missing.
                with self.importing(entry.value):
                    self._classes[name] = entry.load()
        if name in self._classes:
            return self._classes[name]
        names = self.names()
        meant = did_you_mean(name, names) or "; one of your own is named as module:Class"
        raise UnknownNameError(f"no {self.kind} {name!r}{meant} (there are: {', '.join(names)})")

    @contextmanager
    def importing(self, path: str) -> Iterator[None]:
        """Say in a sentence why ``path`` cannot be imported, and in which line of it.

        Raises:
            UnknownNameError: in place of whatever its module raises.
        """
        try:
            yield
        except Exception as error:
            known = isinstance(error, (ImportError, AttributeError))
            reason = str(error) if known else describe_error(error)
            line = own_line(error)
            place = "" if line is None else f" ({line})"
            raise UnknownNameError(f"no {self.kind} at {path!r}: {reason}{place}") from error

    def name_of(self, cls: type) -> str:
        """Return the name under which ``cls`` is filed; the class's own if it is not."""
        return next((name for name in self.names() if self.get(name) is cls), cls.__name__)

    def names(self) -> tuple[str, ...]:
        """Return the names that `get` knows, those of installed packages included, sorted."""
        installed = {entry.name for entry in entry_points(group=self._group)}
        return tuple(sorted(installed | set(self._classes)))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Forget at the end what was registered meanwhile: for tests."""
        before = dict(self._classes)
        try:
            yield
        finally:
            self._classes = before

    @property
    def _group(self) -> str:
        return f"trinity_buffer.{self.kind}"


def is_path(name: str) -> bool:
    """Return whether a name says where a class is, as ``module.Class`` or ``module:Class``."""
    return "." in name or ":" in name


def _is_version_of(cls: object, known: object) -> bool:
    """Return whether ``cls`` is ``known`` written again, or a user's version of a class of ours."""
    modules = [getattr(class_, "__module__", "") for class_ in (cls, known)]
    # By name and module: a cell that runs twice makes another class object.
    same_name = getattr(cls, "__qualname__", "") == getattr(known, "__qualname__", None)
    return same_name and (modules[0] == modules[1] or modules[1].startswith("trinity_buffer."))
