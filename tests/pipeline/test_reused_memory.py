"""Memory that writes use again."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Resize
from trinity_buffer.codec.segments import Bytes
from trinity_buffer.pipeline.tensors import (
    ALIGNMENT,
    BufferPool,
    columns_of_present,
    present_tensors,
)


def address_of(array: object) -> int:
    return int(array.__array_interface__["data"][0])  # type: ignore[attr-defined]  # of NumPy


def test_a_block_is_used_again_once_nothing_is_left_of_it() -> None:
    memory = BufferPool()
    taken = memory.block(100).take(10)
    first = address_of(taken)
    del taken
    assert address_of(memory.block(100).take(10)) == first


@pytest.mark.parametrize(
    "look",
    [
        lambda taken: taken,
        lambda taken: taken[3:9],
        lambda taken: memoryview(taken.data)[3:9],
        lambda taken: torch.from_numpy(taken)[3:9].numpy(),
    ],
    ids=["an array", "a part", "a view", "a tensor"],
)
def test_what_somebody_looks_at_is_not_given_to_another(look: Callable[[Bytes], Any]) -> None:
    memory = BufferPool()
    taken = memory.block(100).take(64)
    taken[:] = 7
    kept = look(taken)
    del taken
    memory.block(100).take(64)[:] = 0
    assert set(bytes(kept)) == {7}


def test_what_is_taken_of_one_block_lies_apart() -> None:
    block = BufferPool().block(3 * ALIGNMENT)
    some = [block.take(ALIGNMENT - 1) for _ in range(4)]  # the last one finds no room
    for number, one in enumerate(some):
        one[:] = number
    assert [set(one.tolist()) for one in some] == [{0}, {1}, {2}, {3}]


def test_no_more_is_kept_than_is_allowed(resize: Resize) -> None:
    resize(blocks_kept=1, bytes_per_block=128)
    memory = BufferPool()
    large, first = memory.block(129).take(129), memory.block(100).take(9)
    place = address_of(first)
    second = memory.block(100).take(9)
    assert address_of(second) != place
    del large, first, second
    assert address_of(memory.block(100).take(9)) == place


def test_columns_are_made_in_the_memory_that_is_given() -> None:
    rows = [torch.tensor([1.5, 2.5], requires_grad=True), None, torch.tensor([3.5])]
    block = BufferPool().block(2 * ALIGNMENT)
    (column,) = columns_of_present("x", present_tensors(rows), block.take)
    assert column.elements.tolist() == [1.5, 2.5, 3.5]
    assert address_of(block.take(1)) - address_of(column.data) == ALIGNMENT


FORKED = """
import os, signal, torch
from trinity_buffer.experience import EID, Experience
from trinity_buffer.pipeline import encoding
one = Experience(eid=EID("b", 0, 0), tokens=torch.arange(4), prompt_length=2)
encoding._memory._lock.acquire()  # as a thread does that is not there in the child
if os.fork() == 0:
    signal.alarm(30)
    encoding.encode_experiences([one])
    os._exit(0)
raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_a_child_that_is_forked_while_memory_is_taken_may_write() -> None:
    assert subprocess.run([sys.executable, "-c", FORKED], check=False).returncode == 0


FREED_AND_ASKED_FOR = """
import asyncio, resource, sys
from trinity_buffer.pipeline.store import open_store

def pages_of_a_step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    some = [bytearray(b"x") * 400_000 for _ in range(8)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

async def main():
    async with open_store(sys.argv[1]):
        print(sorted(pages_of_a_step() for _ in range(21))[10])

asyncio.run(main())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what the allocator of glibc does")
def test_a_process_with_a_store_keeps_the_memory_of_a_step_for_the_next(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FREED_AND_ASKED_FOR, str(tmp_path / "run.db")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 50  # without it, 749: each page of 3 MB


OPENED_AGAIN = """
import asyncio, sys
from trinity_buffer.pipeline.store import open_store

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
