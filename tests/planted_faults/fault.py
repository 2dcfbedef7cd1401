"""A fault: a change of the package that a fast test notices."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        what: what is wrong under it, for `docs/proofs/faults.md`.
        file: path in the package.
        old, new: the text that is there once, and what takes its place.
        test: file and function that turn red.
    """

    what: str
    file: str
    old: str
    new: str
    test: str

    @property
    def package(self) -> str:
        """The part of the package that it is in."""
        return self.file.rpartition("/")[0] or self.file.removesuffix(".py")
