"""What Trinity-RFT's buffers hold: its SQLite files with tokens, its JSONL files with texts.

Written against Trinity-RFT 0.6.0. In SQLite an experience is a row of the table ``NAME`` and a blob
in ``NAME_blob``: tensors as safetensors and the rest as a pickle, of which only plain data is read.
"""

from __future__ import annotations

import io
import pickle  # noqa: TID251 - by an Unpickler that finds no class
import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from typing_extensions import override

from trinity_buffer.errors import InvalidArgumentError, InvalidExperienceError
from trinity_buffer.experience import CustomField, Experience
from trinity_buffer.identity import EID
from trinity_buffer.integrations.imports.rows import Row, Rows, Texts
from trinity_buffer.store.sqlite import dbapi2

_UNREADABLE = (pickle.UnpicklingError, EOFError, AttributeError, LookupError, ValueError, TypeError)
"""What an Unpickler raises of bytes that are no pickle, or one that is cut off."""

MAGIC = b"TRXP"
HEADER = struct.Struct("<BQQ")
PLAIN = ("truncate_status", "info", "metrics", "response_text", "prompt_text", "messages", "tools")
AS_PREFERENCES = (
    "write pairs as rows of prompt, chosen and rejected, and import these as `preferences`"
)


class _PlainUnpickler(pickle.Unpickler):
    """Reads dicts, lists, tuples, texts, numbers and None."""

    # Nothing runs while a pickle is read but what `find_class` returned.
    @override
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Refuse every class and function."""
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is no plain data")


def plain(data: bytes) -> Any:
    """Return what a pickle of plain data holds, without running anything that is in it.

    Raises:
        InvalidExperienceError: it holds something else, such as a class to call, or is cut off.
    """
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except _UNREADABLE as error:
        raise InvalidExperienceError(f"a pickle that cannot be read: {error}") from None


def read(path: Path, texts: Texts, rows: Rows) -> Iterator[Experience]:
    """Yield what the file holds; steps of one run that only a random suffix told apart are counted.

    Raises:
        InvalidArgumentError: it is no buffer of Trinity-RFT.
    """
    are_texts = path.suffix in (".json", ".jsonl")
    of_texts = partial(_of_texts, texts)
    seen: dict[tuple[Any, ...], int] = {}
    for experience in rows.read(rows.of(path), of_texts) if are_texts else _from_sql(path, rows):
        experience.eid = counted_eid(experience.eid, seen)
        yield experience


def counted_eid(eid: Any, seen: dict[tuple[Any, ...], int]) -> EID:
    """Return the address of an experience: the first of a step has no suffix, then ``a1``, ``a2``.

    Trinity tells them apart by a random suffix; the same again must have the same address.

    Args:
        eid: Trinity's, or ours.
        seen: how many there were of each step so far.
    """
    place = (eid.batch, eid.task, eid.run, eid.step)
    number = seen[place] = seen.get(place, -1) + 1
    return EID(*place, f"a{number}" if number else "")


def _from_sql(path: Path, rows: Rows) -> Iterator[Experience]:
    if path.is_dir():
        raise InvalidArgumentError(f"{path} is a folder: name the file of the buffer in it")
    connection = dbapi2.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    try:
        names = connection.execute("select name from sqlite_master where type = 'table'")
        tables = {name for (name,) in names}
        held = sorted(name for name in tables if f"{name}_blob" in tables)
        if not held:
            raise InvalidArgumentError(f"{path}: no table of experiences of Trinity-RFT is there")
        for table in held:
            found = _from_table(connection, path, table.replace('"', '""'))
            yield from rows.read(found, _of_table)
    except (dbapi2.DatabaseError, UnicodeDecodeError) as error:  # the latter of a damaged schema
        raise InvalidArgumentError(f"{path}: {error}") from error
    finally:
        connection.close()


def _from_table(connection: Any, path: Path, table: str) -> Iterator[Row]:
    known = {row[1] for row in connection.execute(f'pragma table_info("{table}")')}
    names = [name for name in ("id", "reward") if name in known] + ["experience_bytes"]
    cursor = connection.execute(
        f'select {", ".join(names)} from "{table}"'  # noqa: S608 - quoted above
        f' join "{table}_blob" using (id) order by id'
    )
    for values in cursor:
        held = dict(zip(names, values, strict=True))
        yield Row(held["id"], f"{path}, {table} {held['id']}", held)


def _of_table(row: Row) -> Iterator[Experience]:
    blob = bytes(row.held["experience_bytes"])
    if not blob.startswith(MAGIC):
        raise InvalidExperienceError(
            "a pickle of a class, as Trinity-RFT wrote before 0.6; write it anew with 0.6"
        )
    start = len(MAGIC) + HEADER.size
    if len(blob) < start:
        raise InvalidExperienceError("its blob ends within its header")
    version, size, _ = HEADER.unpack_from(blob, len(MAGIC))
    if version != 1:
        raise InvalidExperienceError(f"version {version} of Trinity-RFT's format is unknown")
    items = plain(blob[start : start + size])["items"]
    try:
        tensors = load(blob[start + size :])
    except SafetensorError as error:  # no subclass of what a wrong value raises
        raise ValueError(str(error)) from error
    for index, item in enumerate(items):
        prefix = f"{index}:"
        own = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        if "chosen" in own:
            raise InvalidExperienceError(f"a preference pair; {AS_PREFERENCES}")
        yield _experience(item, own, row.held.get("reward", item["reward"]))


def _experience(item: dict[str, Any], tensors: dict[str, Any], reward: Any) -> Experience:
    inputs = {k.partition(":")[2]: tensors.pop(k) for k in list(tensors) if ":" in k}
    custom = [
        CustomField(
            field["source_field"],
            field["destination_field"],
            getattr(torch, field["data_type"].removeprefix("torch.")),
        )
        for field in item["custom_fields"]
    ]
    return Experience(
        eid=_eid(item["eid"]),
        reward=reward,
        prompt_length=item["prompt_length"],
        multi_modal_inputs=inputs or None,
        custom_fields=custom,
        **{name: item[name] for name in PLAIN},
        **tensors,
    )


def _eid(fields: dict[str, Any]) -> EID:
    return EID(fields["batch"], fields["task"], fields["run"], fields["step"])


def _of_texts(texts: Texts, row: Row) -> Iterator[Experience]:
    held = row.held
    if not isinstance(held.get("eid"), dict):
        raise InvalidExperienceError("an experience of Trinity-RFT has an eid")
    prompt, answer = _turns(held)
    own = {name: held.get(name) for name in ("reward", *PLAIN) if name != "tools"}
    yield Experience(eid=_eid(held["eid"]), **{**texts.turn(prompt, answer, held), **own})


def _turns(row: dict[str, Any]) -> tuple[Any, Any]:
    if row.get("messages"):
        *prompt, last = row["messages"]
        return prompt, [last]
    if row.get("prompt_text") is None or row.get("response_text") is None:
        raise InvalidExperienceError(
            f"neither messages nor prompt_text and response_text; {AS_PREFERENCES}"
        )
    return row["prompt_text"], row["response_text"]
