"""Rows of projections that one event makes by itself, whatever came before it.

Each is a tuple of all columns of its table in their order, as the drivers take and give them.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count, repeat
from typing import Any

from trinity_buffer.identity import Key
from trinity_buffer.store.address import first_address

Body = Mapping[str, Any]
Row = tuple[Any, ...]


def experience_rows(experiment: int, position: int, body: Body) -> list[Row]:
    """Return the rows of `experience` of an ``ExperiencesRecorded``."""
    meta, refused, key = body["meta"], body["refused"], body["segment"]
    batches, tasks = meta["batch"], meta["task"]
    number, base = len(batches), first_address(position)
    return list(
        zip(
            repeat(experiment, number),
            range(base, base + number),
            map(str, batches),
            map(str, tasks),
            meta["run"],
            meta["step"],
            meta["suffix"],
            map(_int_keys, batches, tasks),
            meta["reward"],
            meta["policy_version"],
            meta["prompt_length"],
            meta["length"],
            meta["trained_tokens"],
            meta["finish_reason"],
            map(refused.get, range(number)) if refused else repeat(None, number),
            repeat(key, number),
            meta["digest"],
            strict=True,
        )
    )


def _int_keys(batch_key: Key, task: Key) -> int:
    return isinstance(batch_key, int) + 2 * isinstance(task, int)


def plan_rows(experiment: int, body: Body, first: int) -> list[Row]:
    """Return the rows of `plan` of a ``BatchPlanned``; ``first`` is the ordinal of its first."""
    key = str(body["batch"])
    return [
        (experiment, key, str(task), isinstance(task, int), ordinal)
        for ordinal, task in enumerate(body["tasks"], first)
    ]


def annotation_rows(experiment: int, position: int, body: Body) -> list[Row]:
    """Return the rows of `annotation` of an ``ExperiencesAnnotated``."""
    groups, planned = body["groups"], body["planned"]
    addressed = zip(body["experiences"], groups, strict=True)
    slots = zip(addressed, count(first_address(position)), strict=False)
    name = body["consumer"]
    return [
        (experiment, name, slot, address, group, planned[group]) for (address, group), slot in slots
    ]


def rejection_rows(experiment: int, position: int, body: Body) -> list[Row]:
    """Return the rows of `rejection` of an ``ExperiencesRejected``."""
    name = body["consumer"]
    return [
        (experiment, name, address, reason, position)
        for address, reason in zip(body["experiences"], body["reasons"], strict=True)
    ]


def delivery_rows(experiment: int, body: Body) -> list[Row]:
    """Return the rows of `delivery` of a ``BatchLeased``."""
    name, number, addresses = body["consumer"], body["step"], body["annotations"]
    if not body.get("source"):
        return [(experiment, name, "", address, number) for address in addresses]
    names = ("", *body.get("sources", ()))
    return [
        (experiment, name, names[of], address, number)
        for of, address in zip(body["source"], addresses, strict=True)
    ]
