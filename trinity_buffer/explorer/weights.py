"""Published weights: loaded into an explorer's own model, or pushed to inference servers."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, Self, runtime_checkable

import anyio.to_thread

from trinity_buffer.errors import CheckpointError, InferenceServerError, RefusedRequestError
from trinity_buffer.events import PolicyPublished, kinds_of
from trinity_buffer.explorer.server import Dialect, Server
from trinity_buffer.pipeline.store import Experiment, PublishedPolicy
from trinity_buffer.pipeline.train.checkpoint import being_read, require_digest


@runtime_checkable
class Loadable(Protocol):
    """A model that can be had with other weights."""

    def load(self, uri: str) -> Self:
        """Return such a model with the weights that were published at ``uri``. Off the event loop.

        Raises:
            CheckpointError: they are not there any more.
        """
        ...


async def use_newest(
    experiment: Experiment,
    known: PublishedPolicy | None,
    use: Callable[[PublishedPolicy], Awaitable[None]],
) -> PublishedPolicy | None:
    """Have what was published last used, if it is not ``known``; return what is in use now.

    A run that was wound back publishes other weights under a version that was there before.
    """
    while True:
        policy = await experiment.newest_policy()
        if policy is None or (known is not None and policy.position == known.position):
            return known
        try:
            await use(policy)
        except CheckpointError:
            # The trainer keeps only its newest checkpoints: between the event and the file, a newer
            # one came. Gone, half there or another's file: all mean to ask again.
            newer = await experiment.newest_policy()
            if newer is None or newer.position == policy.position:
                raise
            continue
        return policy


class Weights:
    """A model that keeps up with what the trainer publishes, if it is `Loadable`.

    Attributes:
        model: with the newest weights that were loaded.
        version: of these weights; as the model comes it is policy version 0. None: it has none,
            for it cannot be loaded anew.
    """

    def __init__(self, experiment: Experiment, model: Any) -> None:
        self._experiment = experiment
        self._loaded: PublishedPolicy | None = None
        self.model = model
        self.version = 0 if isinstance(model, Loadable) else None

    async def load_newest(self) -> None:
        """Load what was published last, if anything is new."""
        self._loaded = await use_newest(self._experiment, self._loaded, self._load)

    async def follow(self) -> None:
        """Load whatever is published, until the experiment is finished."""
        begin = 0 if self._loaded is None else self._loaded.position
        kinds = kinds_of(PolicyPublished)
        async for _ in self._experiment.events(begin, follow=True, kinds=kinds):
            await self.load_newest()

    async def _load(self, policy: PublishedPolicy) -> None:
        try:
            self.model = await anyio.to_thread.run_sync(self._loaded_with, policy)
        except CheckpointError as error:
            error.add_note(
                f"the trainer published it as policy version {policy.version}: its commit can "
                "name another path of the same weights that this model loads (policy=PATH), or "
                "publish nothing (policy=False)"
            )
            raise
        self.version = policy.version

    def _loaded_with(self, policy: PublishedPolicy) -> Any:
        """Return the model with these weights, which stay while they are loaded."""
        with being_read(Path(policy.uri)):
            if policy.digest and Path(policy.uri).exists():
                require_digest(Path(policy.uri), policy.digest)
            return self.model.load(policy.uri)


_logger = logging.getLogger(__name__)

PauseMode = Literal["wait", "keep", "abort"]

LOOKED_AT_EVERY_S = 5.0
"""How often a server is asked whether it still holds the weights: a restarted one does not."""


@dataclass(frozen=True, slots=True)
class PushReport:
    """What is said of weights that a server has taken.

    Attributes:
        checksum: of the server's own checksums of its weights; None: it tells none.
    """

    url: str
    version: int
    checksum: str | None


async def push_weights(
    server: Server, policy: PublishedPolicy, *, dialect: Dialect = "vllm", mode: PauseMode = "wait"
) -> PushReport:
    """Have ``server`` load the weights of ``policy`` and call them by its version.

    The server reads the folder itself, so it must see the same path. A server that fails on the
    way, or names other weights before it is resumed, stays paused: nothing is sampled from
    unknown weights.

    Args:
        mode: what becomes of requests under way: ``"wait"`` lets them end, ``"abort"`` ends them,
            ``"keep"`` goes on with them under the new weights (SGLang's answer then names those
            alone).

    Raises:
        CheckpointError: the weights are not there any more, or are others.
        InferenceServerError: the server refuses, or names other weights afterwards.
    """
    path, version = Path(policy.uri), str(policy.version)
    with being_read(path):
        if policy.digest:
            await anyio.to_thread.run_sync(require_digest, path, policy.digest)
        try:
            await (_into_sglang if dialect == "sglang" else _into_vllm)(
                server, str(path), version, mode
            )
        except InferenceServerError as error:
            raise InferenceServerError(
                f"{error} (while it took policy {version}; if it was paused it stays so until "
                "weights are pushed again)"
            ) from error
    checksum = None if dialect == "sglang" else await server.weight_checksum()
    return PushReport(server.root, policy.version, checksum)


async def _into_vllm(server: Server, path: str, version: str, mode: PauseMode) -> None:
    # Paused until the version is confirmed: no token is sampled from half-loaded weights.
    await server.post("/pause", mode=mode)
    await server.post(
        "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}}
    )
    await server.post("/update_weight_version", {"new_version": version})
    await _require_version(server, version, "vllm")
    await server.post("/resume")


async def _into_sglang(server: Server, path: str, version: str, mode: PauseMode) -> None:
    # Not paused, it lets all requests end before it loads; no way of pausing it does. To keep them
    # is `retract`: with `in_place` its cache cannot be flushed, on which it ends.
    if mode != "wait":
        await server.post("/pause_generation", {"mode": "retract" if mode == "keep" else "abort"})
    try:
        await _load_into_sglang(server, path, version)
    except InferenceServerError:
        if mode == "wait":
            await server.post("/pause_generation", {"mode": "abort"})
        raise
    await server.post("/continue_generation")


async def _load_into_sglang(server: Server, path: str, version: str) -> None:
    answer = await server.post(
        "/update_weights_from_disk", {"model_path": path, "weight_version": version}
    )
    if not answer.get("success"):
        raise InferenceServerError(f"{server.root} did not load {path}: {answer.get('message')}")
    await _require_version(server, version, "sglang")


async def _require_version(server: Server, version: str, dialect: Dialect) -> None:
    """Refuse a server with weights of another version; SGLang may name none."""
    held = await server.weight_version(dialect)
    if held != version and not (held is None and dialect == "sglang"):
        raise InferenceServerError(f"{server.root} holds weights {held!r} instead of {version!r}")


async def sync_weights(
    experiment: Experiment,
    servers: Sequence[Server],
    *,
    dialect: Dialect = "vllm",
    mode: PauseMode = "wait",
    follow: bool = False,
    report: Callable[[PushReport], None] = lambda _: None,
) -> int:
    """Push the newest published policy to every server; return its version, 0 if there is none.

    With ``follow`` go on with whatever is published, until the experiment is finished, and push
    again to a server that names other weights, as one does that was restarted, or that was away.

    Raises:
        CheckpointError, InferenceServerError: see `push_weights`; with ``follow`` a server that
            does not answer at all is waited for.
    """
    changes = experiment.database.changes
    pushed: PublishedPolicy | None = None
    pusher = _Pusher(dialect, mode, report, waits=follow)
    due = 0.0
    while True:
        state = await changes.state()
        is_last = not follow or await experiment.is_finished()
        pushed = await use_newest(experiment, pushed, partial(pusher.push, servers))
        if is_last:
            return 0 if pushed is None else pushed.version
        if pushed is not None and time.monotonic() >= due:
            behind = [server for server in servers if await pusher.holds_others(server, pushed)]
            await use_newest(experiment, None, partial(pusher.push, behind))
            due = time.monotonic() + LOOKED_AT_EVERY_S
        await changes.changed(state, LOOKED_AT_EVERY_S)


@dataclass(slots=True)
class _Pusher:
    """Pushes weights to servers, and knows which of them were away.

    Args:
        waits: a server that is away is pushed to later; otherwise that is an error.
    """

    dialect: Dialect
    mode: PauseMode
    report: Callable[[PushReport], None]
    waits: bool
    away: set[Server] = field(default_factory=set)

    async def push(self, servers: Sequence[Server], policy: PublishedPolicy) -> None:
        """Push ``policy`` to ``servers``, one after the other: the rest go on sampling."""
        for server in servers:
            try:
                pushed = await push_weights(server, policy, dialect=self.dialect, mode=self.mode)
            except InferenceServerError as error:
                if not self.waits or (await self._looked_at(server))[0]:
                    raise
                if server not in self.away:
                    _logger.warning(
                        "%s; it is given the newest weights when it is there again", error
                    )
                self.away.add(server)
            else:
                self.away.discard(server)
                self.report(pushed)

    async def holds_others(self, server: Server, pushed: PublishedPolicy) -> bool:
        """Return whether a server is to be pushed to again: it was away, or names other weights."""
        is_there, held = await self._looked_at(server)
        return is_there and (server in self.away or held not in (None, str(pushed.version)))

    async def _looked_at(self, server: Server) -> tuple[bool, str | None]:
        """Return whether a server answers, as a refusal does, and what weights it names."""
        try:
            return True, await server.weight_version(self.dialect)
        except RefusedRequestError:
            return True, None
        except InferenceServerError:
            return False, None
