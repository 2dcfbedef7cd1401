"""Episodes that prime-rl's file monitor wrote: ``traces/stream`` and ``traces/annotations``.

Written against verifiers 0.4.0, whose `Episode.to_record` a line is. An episode is a run of its
group, a branch of one of its traces is a step; episodes of an evaluation are passed over. What
producers noted later is folded on, the newest winning: advantages become those of the experience.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trinity_buffer.errors import InvalidArgumentError, InvalidExperienceError
from trinity_buffer.experience import Experience
from trinity_buffer.identity import EID
from trinity_buffer.integrations.imports.rows import Row, Rows
from trinity_buffer.integrations.imports.texts import Texts, only_texts

Path_ = list[dict[str, Any]]
"""The nodes of a branch, from the first message to the last."""


def read(path: Path, texts: Texts, rows: Rows) -> Iterator[Experience]:
    """Yield a rollout for each branch of each trainable trace; ``path``: the run, or ``traces``.

    Raises:
        InvalidArgumentError: there is no stream of episodes, or only one that is compressed.
    """
    del texts  # traces hold token ids
    traces = path / "monitors" / "file" / "traces"
    traces = traces if traces.is_dir() else path
    notes = _notes(traces / "annotations", rows)
    runs: dict[tuple[str, str], int] = {}
    for _, where, episode in _lines(traces / "stream", rows):
        with rows.reading(where, episode) as made:
            work = (episode.get("run") or {}).get("work") or {}
            if work.get("type") == "eval":
                continue
            place = (f"step-{work.get('step', 0)}", _group(episode))
            runs[place] = runs.get(place, -1) + 1
            for step, (trace, index, nodes) in enumerate(_branches(episode)):
                advantages = notes.get(trace["id"], {})
                eid = EID(*place, runs[place], step)
                policy = work.get("policy") or {}
                made.append(_experience(eid, trace, nodes, advantages, index, policy))
        yield from made


def _lines(stream: Path, rows: Rows) -> Iterator[Row]:
    """Yield the records of a stream: one file, or a folder of numbered chunks."""
    if any(stream.glob("*.zst")):
        raise InvalidArgumentError(f"{stream}: unpack its chunks first, with zstd -d --rm *.zst")
    single = stream.with_suffix(".jsonl")
    if not (single.is_file() or stream.exists()):
        raise InvalidArgumentError(
            f"{stream.parent}: no folder of prime-rl's file monitor: neither {stream.name} nor "
            f"{single.name} is in it, nor in monitors/file/traces below it"
        )
    yield from rows.of(single if single.is_file() else stream)


def _notes(folder: Path, rows: Rows) -> dict[str, dict[int, list[float | None]]]:
    """Return per trace and branch the advantages that were noted, one for each token."""
    by_trace: dict[str, dict[int, list[float | None]]] = {}
    names = {file.name.partition(".")[0] for file in folder.glob("*")} if folder.is_dir() else set()
    for name in sorted(names):
        for _, where, update in _lines(folder / name, rows):
            with rows.reading(where, update):
                branches = [
                    branch for branch in update.get("branches") or [] if branch.get("advantages")
                ]
                own = {branch["index"]: branch["advantages"] for branch in branches}
                by_trace.setdefault(update["trace_id"], {}).update(own)
    return by_trace


def _group(episode: dict[str, Any]) -> str:
    group = (episode.get("group") or {}).get("id") or episode.get("id")
    if group is None:
        raise InvalidExperienceError("an episode of prime-rl has an id")
    return str(group)


def _branches(episode: dict[str, Any]) -> Iterator[tuple[dict[str, Any], int, Path_]]:
    for trace in episode.get("traces") or []:
        if not (trace.get("agent") or {}).get("trainable", True):
            continue
        nodes = trace["nodes"]
        parents = {node.get("parent") for node in nodes}
        # A trace is a tree of messages: each path to a leaf was sampled as one text.
        leaves = [at for at in range(len(nodes)) if at not in parents]
        for index, leaf in enumerate(leaves):
            path: Path_ = []
            at: int | None = leaf
            while at is not None:
                path.insert(0, nodes[at])
                at = nodes[at].get("parent")
            if any(node.get("mask") and any(node["mask"]) for node in path):
                yield trace, index, path


def _experience(
    eid: EID,
    trace: dict[str, Any],
    nodes: Path_,
    noted_by_branch: dict[int, list[float | None]],
    index: int,
    policy: dict[str, Any],
) -> Experience:
    ids = [value for node in nodes for value in node["token_ids"]]
    mask = [value for node in nodes for value in node["mask"]]
    # A prompt has at least one token, without which the first could not be scored.
    start = max(mask.index(True), 1)
    messages = [node["message"] for node in nodes]
    only_texts(messages)
    noted = noted_by_branch.get(index)
    return Experience(
        eid=eid,
        tokens=ids,
        prompt_length=start,
        action_mask=mask[start:],
        logprobs=_spread(nodes)[start:],
        advantages=None if noted is None else [value or 0.0 for value in noted[start : len(ids)]],
        reward=sum(value["score"] * value.get("weight", 1.0) for value in _rewards(trace)),
        messages=messages,
        info={
            **({"model_version": policy["start"]} if "start" in policy else {}),
            "trace": trace["id"],
            "agent": (trace.get("agent") or {}).get("name"),
        },
    )


def _spread(nodes: Path_) -> list[float]:
    """Return a log-probability for each token: 0 for what was not sampled."""
    values: list[float] = []
    for node in nodes:
        sampled = iter(node.get("logprobs") or [])
        values += [next(sampled, 0.0) if sampled_here else 0.0 for sampled_here in node["mask"]]
    return values


def _rewards(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [reward for reward in (trace.get("rewards") or {}).values() if reward is not None]
