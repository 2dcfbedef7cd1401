"""What a store has acknowledged, noted by the explorer itself: the proof from outside."""

from __future__ import annotations

import os
from pathlib import Path

from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.writer import WriteReceipt


class Acknowledgements:
    """An append-only file of the lines of receipts that `write` has returned.

    ``trinity-buffer verify --acknowledged FOLDER`` compares such files with the log. A crash may
    leave the last line unfinished; it is read as never written.

    Raises:
        InvalidArgumentError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        # Its name may be an actor's, which a POSIX locale would have in ASCII.
        path = Path(os.fsdecode(str(path).encode("utf-8", "surrogateescape")))
        try:
            torn = path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n")
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise InvalidArgumentError(f"acknowledgements {path}: {error.strerror}") from error
        if torn:  # a kill may cut a write short; the next line must not grow out of what is left
            os.write(self._descriptor, b"\n")

    def note(self, receipt: WriteReceipt) -> None:
        """Append the lines of ``receipt``, in one write call."""
        os.write(self._descriptor, "".join(f"{line}\n" for line in receipt.lines).encode())

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)
