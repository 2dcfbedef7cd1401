"""Turns as they come, durable at once; and what a rollout holds when its reward is known.

A turn is an experience of the experiment ``NAME.turns``. When a rollout is closed, its turns become
what `Conversation` would make of them, in the experiment ``NAME`` that strategies and trainers
read. So a recorder that was killed finds its open rollouts again, and closing one twice is closing
it once.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import accumulate
from typing import Any, NamedTuple, Self

import anyio
from anyio.abc import TaskStatus
from typing_extensions import override

from trinity_buffer import errors
from trinity_buffer.experience import Experience
from trinity_buffer.explorer.conversation import (
    Completion,
    as_texts,
    experience_of,
    reasoning_in,
    stretches_of,
)
from trinity_buffer.identity import EID, TURNS, require_name
from trinity_buffer.pipeline.coordination.waiting import one_line
from trinity_buffer.pipeline.store import Experiment, Store
from trinity_buffer.sampling import MODE, SEGMENTS
from trinity_buffer.writer import WriteReceipt

_logger = logging.getLogger(__name__)

IDLE_S = 60.0
"""A task whose number of rollouts is not known is decided so long after the last one was closed."""

MOST_OPEN = 20_000
"""Rollouts that are known in memory."""

KEPT = ("finish_reason", "weight_version", "later_weight_version", "weight_checksum")


class Rollout(NamedTuple):
    """Which rollout a request belongs to."""

    batch: str
    task: str
    run: int

    @classmethod
    def of(cls, text: str, batch: str) -> Self:
        """Return the run that ``[batch/]task/run`` or ``task`` names, by default in ``batch``.

        Raises:
            InvalidArgumentError: a run that is no number, or a part that cannot name anything.
        """
        parts = text.strip("/").split("/")
        if len(parts) == 1:
            parts.append("0")
        if len(parts) == 2:
            parts.insert(0, batch)
        if len(parts) != 3 or not all(parts) or not parts[2].isdecimal() or len(parts[2]) > 19:
            raise errors.InvalidArgumentError(
                f"rollout {text!r:.80}: write it as task/run or batch/task/run, the run as a number"
            )
        require_name("the batch of the rollout", parts[0])
        require_name("the task of the rollout", parts[1])
        return cls(parts[0], parts[1], int(parts[2]))

    @override
    def __str__(self) -> str:
        return f"{self.batch}/{self.task}/{self.run}"


class Turn(NamedTuple):
    """One turn: what the model was told, what it said, and how many runs its request began here."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    completion: Completion
    choices: int = 1


@dataclass(slots=True)
class _Open:
    """How far a rollout has come; what was said is stored.

    Attributes:
        answers: what the model said in the turns that are stored; see `_answer`.
        choices: runs that one request began with it.
        lost: why a turn that was answered is not stored.
        turn: held while a turn is added, or the rollout is closed.
    """

    answers: list[bytes] = field(default_factory=list)
    is_closed: bool = False
    choices: int = 1
    lost: errors.TrinityBufferError | None = None
    turn: anyio.Lock = field(default_factory=anyio.Lock)


class Recording:
    """Where a recorder keeps what is said.

    Args:
        experiment: of the closed rollouts.
        turns: of the single turns.
        actor: name of the recorder; no two that live at the same time may share it.

    Attributes:
        failed: how the store failed after an answer had left; nothing more can be promised.
    """

    def __init__(self, experiment: Experiment, turns: Experiment, *, actor: str) -> None:
        self._experiment = experiment
        self._turns = turns
        self._writer = experiment.writer(actor)
        self._turn_writer = turns.writer(actor)
        self._open: dict[Rollout, _Open] = {}
        self.failed: errors.StoreError | None = None

    @classmethod
    async def begin(cls, store: Store, name: str, *, actor: str, config: Mapping[str, Any]) -> Self:
        """Return a recording into the experiment ``name``.

        Args:
            store: where it is kept.
            actor: name of the recorder.
            config: what a new experiment is configured with beside `IDLE_S`; one that is there
                keeps its other keys.
        """
        before: Mapping[str, Any] = {"idle_s": IDLE_S}
        if name in await store.experiments():
            before = (await store.experiment(name)).config
        experiment = await store.experiment(name, config={**before, **config})
        turns = await store.experiment(f"{name}{TURNS}", config={})
        return cls(experiment, turns, actor=actor)

    async def record_turns(
        self, first: Rollout, turns: Sequence[Turn], *, task_status: TaskStatus[None] | None = None
    ) -> None:
        """Store one turn of rollout ``first``; of several choices, one of each run from its run on.

        On return they are durable, all or none. With a ``task_status``, the answer leaves when that
        is told: their places in their rollouts are taken then, so that closing one waits.
        What fails later is told to those who ask for these rollouts next.

        Raises:
            ConflictError: a rollout is closed, or lacks a turn.
        """
        rollouts = [first._replace(run=first.run + number) for number in range(len(turns))]
        # Only the first tells how many runs began with it: `continued` looks there.
        turns = [turns[0]._replace(choices=len(turns)), *turns[1:]]
        async with AsyncExitStack() as held:
            opened = [await held.enter_async_context(self._taken(place)) for place in rollouts]
            parts = zip(rollouts, opened, turns, strict=True)
            stored = [_stored(place, len(state.answers), turn) for place, state, turn in parts]
            opened[0].choices = max(opened[0].choices, len(turns))
            if task_status is not None:
                task_status.started()
            try:
                await self._turn_writer.write(stored)
            except errors.TrinityBufferError as error:
                if task_status is None:
                    for place in rollouts:  # a server that was lost may have stored it: read anew
                        self._open.pop(place, None)
                    raise
                self._lose(first, opened, error)
                return
            for state, turn in zip(opened, turns, strict=True):
                state.answers.append(_answer(turn.completion.message()))

    async def require_open(self, rollout: Rollout, choices: Any = 1) -> None:
        """Raise unless ``rollout``, and of several choices each run from its run on, takes a turn.

        Raises:
            ConflictError: one is closed, or lacks a turn.
        """
        count = choices if isinstance(choices, int) else 1
        for number in range(max(1, min(count, MOST_OPEN))):
            async with self._taken(rollout._replace(run=rollout.run + number)):
                pass

    @asynccontextmanager
    async def _taken(self, rollout: Rollout, *, closes: bool = False) -> AsyncIterator[_Open]:
        """Yield a rollout under its lock, if it takes a turn, or its close."""
        state = await self._of(rollout)
        async with state.turn:
            if state.is_closed and not closes:
                raise errors.ConflictError(f"rollout {rollout} is closed: begin another one")
            if state.lost is not None:
                raise errors.ConflictError(
                    f"rollout {rollout} lacks a turn that was answered before it was stored, which "
                    f"then failed ({state.lost}): begin another one"
                )
            yield state

    def _lose(self, run: Rollout, opened: list[_Open], error: errors.TrinityBufferError) -> None:
        """Note that a turn was answered and could not be stored."""
        message = one_line(f"rollout {run}: a turn that was answered is lost: {error}")
        _logger.error("%s", message)
        for state in opened:
            state.lost = error
        if isinstance(error, errors.StoreError):
            self.failed = error

    async def continued(self, rollout: Rollout, messages: Sequence[Mapping[str, Any]]) -> Rollout:
        """Return which of the choices that began at ``rollout`` the ``messages`` go on with.

        Only runs that one request made are looked at: also one to a recorder before this one. Where
        none said the last answer last, as when a client asks again, one that has said it goes on.
        """
        last = [message for message in messages if message.get("role") == "assistant"][-1:]
        answers = [_answer(message) for message in last]
        run_of, end, earlier = rollout, rollout.run + 1, []
        while answers and run_of.run < end:
            state = await self._of(run_of)
            end = max(end, run_of.run + state.choices)
            if end == rollout.run + 1:
                break
            async with state.turn:  # what has left already may not be stored yet
                said = state.answers
            if said[-1:] == answers:
                return run_of
            earlier += [run_of] if answers[0] in said else []
            run_of = run_of._replace(run=run_of.run + 1)
        return earlier[0] if earlier else rollout

    async def close(self, rollout: Rollout, reward: float | None) -> WriteReceipt:
        """Store what can be trained of ``rollout``, with its reward; on return it is durable.

        The same again does nothing.

        Raises:
            InvalidArgumentError: it has no turns.
            ConflictError: its batch is sealed, or it lacks a turn.
            ConflictingExperienceError: it was closed with another reward.
        """
        async with self._taken(rollout, closes=True) as state:
            turns = await self._stored_turns(rollout)
            if not turns:
                raise errors.InvalidArgumentError(f"rollout {rollout}: nothing was said in it")
            # From the stored turns, so that a recorder that was restarted closes it alike.
            stretches = stretches_of([turn.completion for turn in turns])
            made = []
            for step, end in enumerate(accumulate(map(len, stretches))):
                last = turns[end - 1]  # of a sub-agent, say, which has a conversation of its own
                messages = [*last.messages, last.completion.message()]
                row = experience_of(stretches[step], reward, messages=messages, tools=last.tools)
                row.eid = EID(rollout.batch, rollout.task, rollout.run, step)
                made.append(row)
            try:
                receipt = await self._writer.write(made)
            except errors.ConflictingExperienceError as error:
                raise errors.ConflictingExperienceError(
                    f"rollout {rollout} is closed with another reward, which stays: begin another"
                ) from error
            state.is_closed = True
        if receipt.rejected or (receipt.duplicates and not await self._is_closed(rollout)):
            raise errors.ConflictError(
                f"batch {rollout.batch!r} was sealed before rollout {rollout} was closed, which is "
                "recorded as late and never trained: send rewards before the seal"
            )
        return receipt

    async def seal(self, batch: str) -> int:
        """Seal a batch with what is stored of it; return how many experiences that are."""
        stored = await self._writer.stored(batch)
        await self._writer.seal(batch, stored)
        return stored

    def begin_rollout(self, rollout: Rollout) -> None:
        """Begin a rollout whose name is a fresh UUID: no stored turns of it are looked for."""
        self._open[rollout] = _Open()

    async def _of(self, rollout: Rollout) -> _Open:
        """Return the rollout, as far as it has come: by this recorder or by one before it."""
        state = self._open.pop(rollout, None)
        if state is None:
            turns, is_closed = await self._stored_turns(rollout), await self._is_closed(rollout)
            choices = max((turn.choices for turn in turns), default=1)
            answers = [_answer(turn.completion.message()) for turn in turns]
            known = _Open(answers, is_closed, choices)
            # Another request may have read it while this one waited for the store.
            state = self._open.pop(rollout, None) or known
        self._open[rollout] = state  # the one used last is the last
        while len(self._open) > MOST_OPEN:
            self._open.pop(next(iter(self._open)))  # it is stored, and found again there
        return state

    async def _stored_turns(self, rollout: Rollout) -> list[Turn]:
        stored = [row async for row in self._turns.read(**rollout._asdict())]
        return [_turn_of(row) for row in sorted(stored, key=lambda row: row.eid.step)]

    async def _is_closed(self, rollout: Rollout) -> bool:
        async for _ in self._experiment.read(**rollout._asdict(), families=("light",)):
            return True
        return False


def _stored(rollout: Rollout, step: int, turn: Turn) -> Experience:
    """Return a turn as it is stored."""
    completion = turn.completion
    info = {key: getattr(completion, key) for key in (*KEPT, MODE)}
    info["choices"] = turn.choices if turn.choices > 1 else None
    segment = completion.sampling_segment()
    info[SEGMENTS] = None if segment is None else [segment]
    return Experience(
        eid=EID(rollout.batch, rollout.task, rollout.run, step),
        tokens=[*completion.prompt_ids, *completion.token_ids],
        prompt_length=len(completion.prompt_ids),
        logprobs=None if completion.logprobs is None else list(completion.logprobs),
        info={key: value for key, value in info.items() if value is not None},
        response_text=completion.text,
        messages=[*map(dict, turn.messages), dict(completion.message())],
        tools=[dict(tool) for tool in turn.tools] or None,
    )


def _turn_of(stored: Experience) -> Turn:
    """Return a turn that was stored."""
    tokens, begin = stored.tokens.tolist(), stored.prompt_length
    messages = list(stored.messages or ())
    (segment,) = stored.info.get(SEGMENTS) or ({},)
    options = {k: v for k, v in segment.items() if k not in ("begin", "end", MODE)}
    return Turn(
        messages[:-1],
        stored.tools or (),
        Completion(
            prompt_ids=tokens[:begin],
            token_ids=tokens[begin:],
            logprobs=None if stored.logprobs is None else stored.logprobs.tolist(),
            text=stored.response_text or "",
            tool_calls=messages[-1].get("tool_calls") or () if messages else (),
            reasoning=reasoning_in(messages[-1] if messages else {}),
            **{key: stored.info.get(key) for key in (*KEPT, MODE)},
            sampling=options,
        ),
        stored.info.get("choices", 1),
    )


def _answer(message: Mapping[str, Any]) -> bytes:
    """Return a digest of the text and the tool calls of a message: an answer is known by it."""
    text = as_texts([message])[0].get("content") or ""
    calls = [
        (call.get("id"), function.get("name"), _parsed(function.get("arguments")))
        for call in message.get("tool_calls") or ()
        for function in [call.get("function") or {}]
    ]  # clients send it in parts, or without its blanks
    return sha256(json.dumps([text.strip(), calls], sort_keys=True).encode()).digest()


def _parsed(arguments: Any) -> Any:
    """Return the arguments of a tool call as JSON, which a client may have written anew."""
    try:
        return json.loads(arguments, parse_int=float)  # JavaScript writes 1 for 1.0
    except (TypeError, ValueError):
        return arguments
