"""The stores that are compared, and which interpreter runs each."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.environments import ROOT, environment, locked_version

LOCKS = Path(__file__).parent / "environments"
OUTSIDE = ROOT / "tests" / "outside"


@dataclass(frozen=True, slots=True)
class Store:
    """A store that is compared, ours or another one.

    Attributes:
        title: as a table has it.
        module: where it is.
        lock: folder of the environment that it runs in; None: that of this process.
        package: which of its packages has the store's version.
    """

    title: str
    module: str
    lock: Path | None = None
    package: str = ""

    def python(self) -> str:
        """Return its interpreter, whose environment is made on first use.

        Raises:
            CalledProcessError: the environment cannot be made; pip has said why.
        """
        return sys.executable if self.lock is None else str(environment(self.lock))

    @property
    def version(self) -> str | None:
        """As its lock has it, None for what runs in this process's environment."""
        return None if self.lock is None else locked_version(self.lock, self.package)


OURS = "trinity_buffer"
STORES = {
    OURS: Store("Trinity Buffer", "benchmarks.peers.stores.trinity_buffer"),
    "bare_sqlite": Store("bare sqlite3", "benchmarks.peers.stores.bare_sqlite"),
    "files": Store("plain files", "benchmarks.peers.stores.files"),
    "files_of_lists": Store(
        "files of lists, msgspec",
        "benchmarks.peers.stores.files_of_lists",
        LOCKS / "msgspec",
        "msgspec",
    ),
    "reverb": Store("Reverb", "benchmarks.peers.stores.reverb", LOCKS / "reverb", "dm-reverb"),
    "torchrl": Store(
        "TorchRL memory map", "benchmarks.peers.stores.torchrl", LOCKS / "torchrl", "torchrl"
    ),
    "torchrl_ram": Store(
        "TorchRL in memory", "benchmarks.peers.stores.torchrl_ram", LOCKS / "torchrl", "torchrl"
    ),
    "transferqueue": Store(
        "TransferQueue",
        "benchmarks.peers.stores.transferqueue",
        LOCKS / "transferqueue",
        "TransferQueue",
    ),
    "trinity_rft_sql": Store(
        "Trinity-RFT, SQL",
        "benchmarks.peers.stores.trinity_rft_sql",
        OUTSIDE / "trinity-rft",
        "trinity-rft",
    ),
    "trinity_rft_queue": Store(
        "Trinity-RFT, queue",
        "benchmarks.peers.stores.trinity_rft_queue",
        OUTSIDE / "trinity-rft",
        "trinity-rft",
    ),
}
