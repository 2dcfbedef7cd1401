"""What the processes of a torture do: the real roles, on a task of milliseconds."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any
from zlib import crc32

import anyio
import torch
from typing_extensions import override

from tests.crash.forking import become
from tests.torture.effects import note
from trinity_buffer import events, open_replay_stream, open_store, open_train_stream, run_strategy
from trinity_buffer.cli import roles
from trinity_buffer.cli.run_backends import first_policy, task_of
from trinity_buffer.cli.run_config import algorithm_of, of_experiment
from trinity_buffer.demo.policy import TransformerPolicy
from trinity_buffer.demo.rollout import TaskSampler
from trinity_buffer.errors import ConflictingExperienceError, TrainingError, TrinityBufferError
from trinity_buffer.experience import Experience
from trinity_buffer.explorer.explore import ExploreOptions, SamplingExplorer
from trinity_buffer.pipeline.config import RunConfig
from trinity_buffer.pipeline.train import checkpoint as checkpoints
from trinity_buffer.store import sqlite
from trinity_buffer.trainer.policy import TokenScores
from trinity_buffer.trainer.trainer import Trainer, TrainerSettings
from trinity_buffer.writer import WriteReceipt

REFUSED = 3
"""Exit code of a life that ended with one of our own errors, which a fault may cause."""


@dataclass(frozen=True, slots=True)
class Life:
    """What is special about one life of a process; all of it follows from the seed.

    Attributes:
        crash_at: crash point and count, as `tests.crash.points.killing` takes it.
        clock_s: by how much its clock is wrong from the start.
        clock_jump: after so many seconds the clock is wrong by so many seconds instead.
        pages: SQLite: so many pages more fit onto its disk.
        ranks: a trainer: it first takes a step as so many ranks and commits nothing, then trains
            alone.
    """

    crash_at: str | None = None
    clock_s: float = 0.0
    clock_jump: tuple[float, float] | None = None
    pages: int | None = None
    ranks: int = 1

    def with_fault(self, values: Mapping[str, Any]) -> Life:
        """Return a life that has these values too."""
        return replace(self, **values)


def live(role: str, arguments: Mapping[str, Any], life: Life, log: str) -> None:
    """Be ``role`` until the end, or until something ends it; say which of our errors it was.

    What takes effect is noted in the folder of ``log``.
    """
    folder = Path(log).parent
    become(log, life.crash_at, lambda _: note(folder, "kill at a crash point"))
    _move_clock(life, folder)
    if life.pages is not None:
        _shrink_disk(arguments["url"], life.pages)
    special = {"ranks": life.ranks} if role == "trainer" else {}
    try:
        globals()[role](**arguments, **special)
    except TrinityBufferError as error:
        if "disk is full" in str(error):
            note(folder, "disk full" if life.pages is None else "database full")
        sys.stdout.write(f"ENDED {type(error).__name__}: {error}\n")
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(REFUSED)  # whatever threads of it wait for


class _WrongClock:
    """The module ``time`` of a process whose wall clock is wrong; who reads it notes that once."""

    def __init__(self, seconds: float, folder: Path, kind: str) -> None:
        self._offset_ns = int(seconds * 1e9)
        self._noted = False
        self._note = (folder, kind)

    def time_ns(self) -> int:
        if not self._noted:
            self._noted = True
            note(*self._note)
        return time.time_ns() + self._offset_ns


def _move_clock(life: Life, folder: Path) -> None:
    def move(seconds: float, kind: str) -> None:
        vars(events)["time"] = _WrongClock(seconds, folder, kind)

    if life.clock_s:
        move(life.clock_s, "clock wrong")
    if life.clock_jump is not None:
        after_s, seconds = life.clock_jump
        timer = threading.Timer(after_s, move, (seconds, "clock jumped"))
        timer.daemon = True
        timer.start()


def _shrink_disk(url: str, pages: int) -> None:
    """Let the database grow by so many pages only, as the last ones of a disk would."""
    path = Path(url.removeprefix("sqlite:///"))
    # Of the header, and not asked of SQLite: that needs space for its shared memory, which just now
    # may not be there.
    with path.open("rb") as file:
        header = file.read(32)
    limit = int.from_bytes(header[28:32], "big") + pages
    usual = sqlite.pragmas

    def limited(*, durability: str, read_only: bool) -> list[str]:
        statements = usual(durability=durability, read_only=read_only)
        return [*statements, f"PRAGMA max_page_count={limit}"]

    sqlite.pragmas = limited


POISON = "poison row"
ROWS_PER_POISON = 40
"""A gradient step has four: each tenth holds a row that no trainer has the memory for."""


def _poison(experiences: Sequence[Experience], each: int) -> None:
    """Make one of ``each`` rows, or none, too long for the trainers; by its address alone."""
    chosen = [e for e in experiences if each and crc32(e.eid.uid.encode()) % each == 0]
    for experience in chosen:
        columns = {name: getattr(experience, name) for name in PER_TOKEN}
        for name, values in columns.items():
            if values is not None:
                longer = torch.cat((values, values[-1:].expand(POISON_TOKENS)))
                setattr(experience, name, longer)


PER_TOKEN = ("tokens", "logprobs", "action_mask")
POISON_TOKENS = 500

HEIR = "e1"
"""The explorer that finishes the batches of others that are gone."""


class _Insistent:
    """A writer that sends many calls again, in turn: afterwards, at the same time, or changed.

    Args:
        kinds: of sending something again; with `POISON` among them, some rows are poison.
    """

    def __init__(self, writer: Any, kinds: Sequence[str], folder: Path) -> None:
        self._writer = writer
        self._rows_per_poison = ROWS_PER_POISON if POISON in kinds else 0
        self._kinds = cycle(("", *(kind for kind in kinds if kind != POISON)))
        self._folder = folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    async def write(self, experiences: Sequence[Experience]) -> WriteReceipt:
        kind = next(self._kinds)
        _poison(experiences, each=self._rows_per_poison)
        if kind == "write sent twice at once":
            receipts: list[WriteReceipt] = []
            try:
                async with anyio.create_task_group() as group:
                    for _ in range(2):
                        group.start_soon(self._into, receipts, experiences)
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
        else:
            receipts = [await self._writer.write(experiences)]
        if kind == "write sent again":
            receipts.append(await self._writer.write(experiences))
        if kind == "changed write sent":
            await self._refused(experiences)
        if len(receipts) > 1:
            assert sorted(r.written for r in receipts) in ([0, len(experiences)], [0, 0]), receipts
            assert receipts[0].uids == receipts[1].uids
        if kind:
            note(self._folder, kind)
        return max(receipts, key=lambda receipt: receipt.written)

    async def _into(self, found: list[WriteReceipt], experiences: Sequence[Experience]) -> None:
        found.append(await self._writer.write(experiences))

    async def _refused(self, experiences: Sequence[Experience]) -> None:
        """Send the same EIDs with another reward: the store must keep what it has."""
        reward = experiences[-1].reward
        experiences[-1].reward = (reward or 0.0) + 1.0
        try:
            await self._writer.write(experiences)
        except ConflictingExperienceError:
            return
        finally:
            experiences[-1].reward = reward
        raise AssertionError("the store took another content for EIDs that it has")


def explorer(url: str, experiment: str, actor: str, folder: str, sends: Sequence[str]) -> None:
    """Explore until the experiment is finished.

    Args:
        sends: what the writer does, see `_Insistent`.
    """
    roles.use_one_thread()

    async def main() -> None:
        async with open_store(url) as store:
            opened = await store.experiment(experiment)
            config = of_experiment(opened.config)
            options = ExploreOptions(
                groups_per_batch=config.groups_per_batch,
                rollouts_per_group=config.rollouts_per_group,
                acknowledgements=Path(folder) / "acks" / f"{actor}.ack",
                take_over=actor == HEIR,
            )
            first = first_policy(config)
            sampler = TaskSampler(first, task_of(config), config.seed)
            made = SamplingExplorer(opened, sampler, actor, options, groups_per_write=1)
            made._writer = _Insistent(made._writer, sends, Path(folder))  # type: ignore[assignment]
            await made.run()

    anyio.run(main)


def strategy(url: str, experiment: str, name: str, args: Mapping[str, Any]) -> None:
    """Annotate until the experiment is finished."""
    roles.use_one_thread()

    async def main() -> None:
        async with open_store(url) as store:
            opened = await store.experiment(experiment)
            await run_strategy(opened, "grpo", args, name=name, follow=True)

    anyio.run(main)


async def _config_of(url: str, experiment: str) -> RunConfig:
    async with open_store(url, read_only=True) as store:
        return of_experiment((await store.experiment(experiment)).config)


class _Private:
    """A stream that publishes nothing: its trainer learns beside the one explorers follow."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Any:
        return iter(self._stream)

    def commit(self, step: Any, *, policy: Path, **others: Any) -> None:
        self._stream.commit(step, policy=False, **others)


def trainer(
    url: str,
    experiment: str,
    consumer: str,
    strategy: str,
    folder: str,
    publishes: bool,
    ranks: int,
) -> None:
    """Train alone until the experiment is finished; first take a step as ``ranks``, if several."""
    roles.use_one_thread()
    config = anyio.run(_config_of, url, experiment)
    opened = partial(
        open_train_stream,
        url,
        experiment=experiment,
        strategy=strategy,
        consumer=consumer,
        groups_per_step=config.groups_per_step,
        lease_ttl_s=config.lease_ttl_s,
        follow=True,
    )
    if ranks > 1:
        _leave_a_step(opened, ranks)
    dealt = anyio.run(_num_dealt, url, experiment)
    drops = Path(folder) / f"drops-{consumer}"
    dropped = drops.read_text().splitlines() if drops.exists() else []
    with opened(drop=dropped) as stream:
        if ranks > 1 and anyio.run(_num_dealt, url, experiment) > dealt:
            note(Path(folder), "world size changed")
        checkpoints = Path(folder) / f"checkpoints-{consumer}"
        made = _trainer_on(stream if publishes else _Private(stream), config, checkpoints)
        try:
            made.run(_silence)
        except MemoryError as error:
            uid = _named_by(error)
            with drops.open("a") as file:
                file.write(f"{uid}\n")
            note(Path(folder), POISON)
            raise TrainingError(f"{uid} is too long for the memory") from error


def _named_by(error: MemoryError) -> str:
    """Return the uid of the row that an error says how to drop, as a person would read it."""
    (uid,) = re.findall(r"--drop (\S+?)`", "\n".join(error.__notes__))
    return str(uid)


def _leave_a_step(opened: Callable[..., Any], ranks: int) -> None:
    """Take a step as ``ranks`` ranks, and commit nothing.

    As soon as one of them fails that is the error: the others may wait for it, and for ever.
    """

    def take(rank: int) -> None:
        with opened(rank=rank, world_size=ranks) as stream:
            next(stream, None)

    pool = ThreadPoolExecutor(ranks)
    for taken in as_completed([pool.submit(take, rank) for rank in range(ranks)]):
        taken.result()


async def _num_dealt(url: str, experiment: str) -> int:
    """Return how many steps were dealt anew so far."""
    async with open_store(url, read_only=True) as store:
        opened = await store.experiment(experiment)
        return len([event async for event in opened.events(kinds=("StepDealt",))])


def _trainer_on(stream: Any, config: RunConfig, folder: Path) -> Trainer:
    optimizer = config.optimizer
    settings = TrainerSettings(
        checkpoints=folder,
        learning_rate=optimizer.learning_rate,
        max_gradient_norm=optimizer.max_gradient_norm,
    )
    policy = first_policy(config)
    policy.__class__ = _SmallPolicy
    return Trainer(stream, policy, algorithm_of(config), settings)


class _SmallPolicy(TransformerPolicy):
    """One that has no memory for a poison row."""

    @override
    def scores(self, microbatch: Mapping[str, Any]) -> TokenScores:
        tokens = microbatch["input_ids"].shape[-1]
        if tokens > POISON_TOKENS:
            raise MemoryError(f"{tokens} tokens")
        return super().scores(microbatch)


def _silence(_: Any) -> None:
    """Say nothing."""


def reader(url: str, experiment: str, path: str) -> None:
    """Follow the log and note every position, until the experiment is finished."""
    file = Path(path)
    whole = file.read_text().rpartition("\n")[0].splitlines() if file.exists() else []
    if file.exists():
        os.truncate(file, sum(len(line) + 1 for line in whole))
    last = int(whole[-1].split()[0]) if whole else 0

    async def main() -> None:
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        async with open_store(url) as store:
            opened = await store.experiment(experiment)
            async for event in opened.events(after=last, follow=True):
                os.write(descriptor, f"{event.position} {event.kind} {event.actor}\n".encode())

    anyio.run(main)


class _Compared:
    """A replay stream whose commits compare the checkpoint with the one that the log recorded."""

    def __init__(self, stream: Any, recorded: Mapping[int, str]) -> None:
        self._stream = stream
        self._recorded = recorded
        self.compared = 0
        self.different: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Any:
        return iter(self._stream)

    def commit(self, step: Any, checkpoint: Path, **others: Any) -> None:
        """Compare weights, optimizer, random numbers and manifests at once: the folder's digest."""
        if step.step in self._recorded:
            self.compared += 1
            if checkpoints.digest_of(checkpoint) != self._recorded[step.step]:
                self.different.append(step.step)


def replay(url: str, experiment: str, consumer: str, folder: str) -> None:
    """Train once more, undisturbed, on the recorded batches; write what came out to a file."""
    roles.use_one_thread()
    config = anyio.run(_config_of, url, experiment)
    recorded = anyio.run(_recorded_digests, url, experiment, consumer)
    with open_replay_stream(url, experiment=experiment, consumer=consumer) as stream:
        compared = _Compared(stream, recorded)
        _trainer_on(compared, config, Path(folder) / f"replay-{consumer}").run(_silence)
    result = {
        "recorded": len(recorded),
        "compared": compared.compared,
        "different": compared.different,
    }
    (Path(folder) / f"replay-{consumer}.json").write_text(json.dumps(result))


async def _recorded_digests(url: str, experiment: str, consumer: str) -> dict[int, str]:
    """Return step -> digest of the checkpoint that was committed after it."""
    async with open_store(url, read_only=True) as store:
        opened = await store.experiment(experiment)
        return {
            event.body["steps"][-1]: event.body["checkpoint_digest"]
            async for event in opened.events(kinds=("StepsCommitted",))
            if event.body["consumer"] == consumer
        }
