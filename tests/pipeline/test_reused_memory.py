"""Memory that is freed and asked for again."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

FREED_AND_ASKED_FOR = """
import asyncio, resource, sys
from trinity_buffer import open_store

def pages_of_a_step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    some = [bytearray(b"x") * 400_000 for _ in range(8)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

async def main():
    async with open_store(sys.argv[1]):
        print(sorted(pages_of_a_step() for _ in range(21))[10])

asyncio.run(main())
"""


@pytest.mark.long
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what the allocator of glibc does")
def test_a_process_with_a_store_keeps_the_memory_of_a_step_for_the_next(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FREED_AND_ASKED_FOR, str(tmp_path / "run.db")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 50  # without it, 749: each page of 3 MB


OPENED_AGAIN = """
import asyncio, sys
from trinity_buffer import open_store

def resident():
    line = next(x for x in open("/proc/self/status") if x.startswith("VmRSS"))
    return int(line.split()[1])

async def main():
    found = []
    for _ in range(5):
        async with open_store(sys.argv[1]):
            found.append(resident())
    print(found[-1] - found[0])

asyncio.run(main())
"""


@pytest.mark.long
@pytest.mark.skipif(platform.system() != "Linux", reason="asks /proc")
def test_to_open_a_store_again_takes_no_more_memory(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OPENED_AGAIN, str(tmp_path / "run.db")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 8 << 10  # KiB; 31 MiB where the block is taken each time


LIMITED = """
import resource, sys
from trinity_buffer.codec.blob import keep_what_is_freed, mapped

pages = int(open("/proc/self/statm").read().split()[0])
most = pages * resource.getpagesize() + (8 << 20)
resource.setrlimit(resource.RLIMIT_AS, (most, most))
keep_what_is_freed()
try:
    mapped(16 << 20)
except MemoryError as error:
    print(error)
"""


@pytest.mark.skipif(platform.system() != "Linux", reason="asks /proc")
def test_memory_that_is_limited_is_not_said_to_be_an_unreachable_store() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True
    )
    assert done.stdout == "16777216 bytes: Cannot allocate memory\n"
