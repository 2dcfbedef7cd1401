"""The formats that `trinity-buffer import` reads, and how they get into a store.

- Demonstrations and pairs, as TRL and Hugging Face data sets hold them: ``messages``, of which the
  last one is trained, or ``prompt`` and ``completion``; ``prompt``, ``chosen`` and ``rejected``,
  where without a prompt it is what both answers begin with.
- Rollouts that verl 0.9.1 wrote with ``trainer.rollout_data_dir``, whose lines name the trajectory
  as ``{uid}_{session}_{index}``. Of any other uid all rows of a step are a group; without one, as
  in older dumps, those of the same input.
- Episodes that prime-rl's file monitor wrote, lines of ``Episode.to_record`` of verifiers 0.4.0. An
  episode is a run of its group, a branch of one of its traces is a step; episodes of an evaluation
  and traces that failed are left out. What was noted later is folded on, the newest winning:
  advantages become those of the experience.
- Buffers of Trinity-RFT 0.6.0: its SQLite files with tokens, its JSONL files with texts. In SQLite
  an experience is a row of the table ``NAME`` and a blob in ``NAME_blob``: tensors as safetensors
  and the rest as a pickle, of which only plain data is read.
"""

from __future__ import annotations

import io
import logging
import pickle  # noqa: TID251 - by an Unpickler that finds no class
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from typing_extensions import override

from trinity_buffer import errors
from trinity_buffer.experience import CustomField, Experience
from trinity_buffer.explorer.server import changes
from trinity_buffer.identity import EID, Key
from trinity_buffer.integrations.imports.rows import Row, Rows, Texts, name_of, only_texts, tools_of
from trinity_buffer.pipeline.store import Store
from trinity_buffer.sampling import SEGMENTS
from trinity_buffer.store.sqlite import dbapi2
from trinity_buffer.writer import BufferWriter, WriteReceipt

_logger = logging.getLogger(__name__)

_UNREADABLE = (pickle.UnpicklingError, EOFError, AttributeError, LookupError, ValueError, TypeError)
"""What an Unpickler raises of bytes that are no pickle, or one that is cut off."""

Json = dict[str, Any]

MAGIC = b"TRXP"
HEADER = struct.Struct("<BQQ")
"""What a blob of Trinity-RFT begins with: then its version, and the lengths of its parts."""

ALIKE = ("truncate_status", "info", "metrics", "response_text", "prompt_text", "messages", "tools")
"""What an experience of Trinity-RFT and ours hold under the same name."""

AS_PREFERENCES = "write pairs as prompt, chosen and rejected, and import these as `preferences`"


class _PlainUnpickler(pickle.Unpickler):
    """Reads dicts, lists, tuples, texts, numbers and None."""

    # Nothing runs while a pickle is read but what `find_class` returned.
    @override
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Refuse every class and function."""
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is no plain data")


def plain(data: bytes) -> Any:
    """Return the plain data in a pickle, without running anything that is in it.

    Raises:
        InvalidExperienceError: it holds something else, such as a class to call, or is cut off.
    """
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except _UNREADABLE as error:
        raise errors.InvalidExperienceError(f"a pickle that cannot be read: {error}") from None


def read_trinity(path: Path, texts: Texts, rows: Rows) -> Iterator[Experience]:
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
        raise errors.InvalidArgumentError(f"{path} is a folder: name the file of the buffer in it")
    connection = dbapi2.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    try:
        names = connection.execute("select name from sqlite_master where type = 'table'")
        tables = {name for (name,) in names}
        held = sorted(name for name in tables if f"{name}_blob" in tables)
        if not held:
            raise errors.InvalidArgumentError(f"{path}: no table of Trinity-RFT's experiences")
        for table in held:
            yield from rows.read(_from_table(connection, path, table), _of_table)
    except (dbapi2.DatabaseError, UnicodeDecodeError) as error:  # the latter of a damaged schema
        raise errors.InvalidArgumentError(f"{path}: {error}") from error
    finally:
        connection.close()


def _from_table(connection: Any, path: Path, table: str) -> Iterator[Row]:
    quoted = table.replace('"', '""')
    joined = f'from "{quoted}" join "{quoted}_blob" using (id)'
    known = {name for name, *_ in connection.execute(f"select * {joined} limit 0").description}
    # The others are neither read nor decoded.
    names = [name for name in ("id", "reward", "experience_bytes") if name in known]
    for values in connection.execute(f"select {', '.join(names)} {joined} order by id"):
        held = dict(zip(names, values, strict=True))
        yield Row(held["id"], f"{path}, {table} {held['id']}", held)


def _of_table(row: Row) -> Iterator[Experience]:
    blob = bytes(row.held["experience_bytes"])
    if not blob.startswith(MAGIC):
        raise errors.InvalidExperienceError(
            "a pickle of a class, as Trinity-RFT wrote before 0.6; write it anew with 0.6"
        )
    start = len(MAGIC) + HEADER.size
    if len(blob) < start:
        raise errors.InvalidExperienceError("its blob ends within its header")
    version, size, _ = HEADER.unpack_from(blob, len(MAGIC))
    if version != 1:
        raise errors.InvalidExperienceError(f"version {version} of Trinity-RFT's format is unknown")
    items = plain(blob[start : start + size])["items"]
    try:
        tensors = load(blob[start + size :])
    except SafetensorError as error:  # no subclass of what a wrong value raises
        raise ValueError(str(error)) from error
    for index, item in enumerate(items):
        prefix = f"{index}:"
        own = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        if "chosen" in own:
            raise errors.InvalidExperienceError(f"a preference pair; {AS_PREFERENCES}")
        # As Trinity-RFT reads its tables: what was set in the column counts, and NULL is no reward.
        yield _of_item(item, own, row.held.get("reward", item["reward"]))


def _of_item(item: dict[str, Any], tensors: dict[str, Any], reward: Any) -> Experience:
    inputs = {k.partition(":")[2]: tensors.pop(k) for k in list(tensors) if ":" in k}
    custom = []
    for own in item["custom_fields"]:
        dtype = getattr(torch, own["data_type"].removeprefix("torch."))
        custom.append(CustomField(own["source_field"], own["destination_field"], dtype))
    return Experience(
        eid=_address(item["eid"]),
        reward=reward,
        prompt_length=item["prompt_length"],
        multi_modal_inputs=inputs or None,
        custom_fields=custom,
        **{name: item[name] for name in ALIKE},
        **tensors,
    )


def _address(fields: dict[str, Any]) -> EID:
    return EID(fields["batch"], fields["task"], fields["run"], fields["step"])


def _of_texts(texts: Texts, row: Row) -> Iterator[Experience]:
    held = row.held
    if not isinstance(held.get("eid"), dict):
        raise errors.InvalidExperienceError("an experience of Trinity-RFT has an eid")
    if held.get("messages"):
        *prompt, last = held["messages"]
        answer: Any = [last]
    elif held.get("prompt_text") is None or held.get("response_text") is None:
        raise errors.InvalidExperienceError(
            f"neither messages nor prompt_text and response_text; {AS_PREFERENCES}"
        )
    else:
        prompt, answer = held["prompt_text"], held["response_text"]
    own = {name: held.get(name) for name in ("reward", *ALIKE) if name != "tools"}
    yield Experience(eid=_address(held["eid"]), **{**texts.turn(prompt, answer, held), **own})


def read_prime_rl(path: Path, texts: Texts, rows: Rows) -> Iterator[Experience]:
    """Return a rollout for each branch of each trainable trace; ``path``: the run, or ``traces``.

    Raises:
        InvalidArgumentError: there is no stream of episodes, or only one that is compressed.
    """
    del texts  # traces hold token ids
    traces = path / "monitors" / "file" / "traces"
    traces = traces if traces.is_dir() else path
    notes: dict[tuple[str, int], list[float | None]] = {}
    folder = traces / "annotations"
    names = {file.name.partition(".")[0] for file in folder.glob("*")}
    for name in sorted(names):
        list(rows.read(_lines(folder / name, rows), partial(_note, notes)))
    return rows.read(_lines(traces / "stream", rows), partial(_episode, notes, {}))


def _lines(stream: Path, rows: Rows) -> Iterator[Row]:
    """Return the records of a stream: one file, or a folder of numbered chunks."""
    if any(stream.glob("*.zst")):
        raise errors.InvalidArgumentError(f"{stream}: unpack its chunks, with zstd -d --rm *.zst")
    single = stream.with_suffix(".jsonl")
    if not (single.is_file() or stream.exists()):
        raise errors.InvalidArgumentError(
            f"{stream.parent}: no folder of prime-rl's file monitor: neither {stream.name} nor "
            f"{single.name} is in it, nor in monitors/file/traces below it"
        )
    return rows.of(single if single.is_file() else stream)


def _note(notes: dict[tuple[str, int], list[float | None]], update: Row) -> tuple[Experience, ...]:
    """Note the advantages of branches, one for each token; the newest count."""
    trace = update.held["trace_id"]
    branches = update.held.get("branches") or []
    notes.update({(trace, b["index"]): b["advantages"] for b in branches if b.get("advantages")})
    return ()


def _episode(
    notes: Mapping[tuple[str, int], list[float | None]], runs: dict[tuple[str, str], int], row: Row
) -> Iterator[Experience]:
    """Yield the branches of the traces of an episode; ``runs``: the newest run of each group."""
    episode = row.held
    work = (episode.get("run") or {}).get("work") or {}
    if work.get("type") == "eval":
        return
    group = (episode.get("group") or {}).get("id") or episode.get("id")
    if group is None:
        raise errors.InvalidExperienceError("an episode of prime-rl has an id")
    place = (f"step-{work.get('step', 0)}", str(group))
    runs[place] = runs.get(place, -1) + 1
    policy = work.get("policy") or {}
    for step, (trace, index, nodes) in enumerate(_branches(episode)):
        ids = [value for node in nodes for value in node["token_ids"]]
        mask = [value for node in nodes for value in node["mask"]]
        # A prompt has at least one token, without which the first could not be scored.
        start = max(mask.index(True), 1)
        logprobs, sampling = _spread(nodes), list(_sampling(nodes, start))
        messages = [node["message"] for node in nodes]
        only_texts(messages)
        noted = notes.get((trace["id"], index))
        advantages = None if noted is None else [value or 0.0 for value in noted[start : len(ids)]]
        rewards = (trace.get("rewards") or {}).values()
        yield Experience(
            eid=EID(*place, runs[place], step),
            tokens=ids,
            prompt_length=start,
            action_mask=mask[start:],
            logprobs=None if logprobs is None else logprobs[start:],
            advantages=advantages,
            reward=sum(r["score"] * r.get("weight", 1.0) for r in rewards if r is not None),
            messages=messages,
            info={
                **({"model_version": policy["start"]} if "start" in policy else {}),
                **({SEGMENTS: sampling} if sampling else {}),
                "trace": trace["id"],
                "agent": (trace.get("agent") or {}).get("name"),
            },
        )


def _branches(episode: Json) -> Iterator[tuple[Json, int, list[Json]]]:
    """Yield trace, index and nodes, from the first message to the last, of each branch.

    As prime-rl does: nothing of a trace that failed, nor of a compaction that its agent did not go
    on with, and the mask of what several branches share is that of its first branch alone.
    """
    for trace in episode.get("traces") or []:
        if not ((trace.get("agent") or {}).get("trainable", True) and trace.get("ok", True)):
            continue
        calls = {call.get("node"): call.get("sampling") for call in trace.get("calls") or []}
        nodes = [{**node, "sampling": calls.get(at)} for at, node in enumerate(trace["nodes"])]
        parents = {node.get("parent") for node in nodes}
        links = [node.get("semantic_parents") or () for node in nodes]
        went_on = {e["node"] for of in links for e in of if e["type"] == "compaction"}
        # A trace is a tree of messages: each path to a leaf was sampled as one text.
        for index, leaf in enumerate(at for at in range(len(nodes)) if at not in parents):
            if leaf not in went_on and any(e["type"] == "compaction_attempt" for e in links[leaf]):
                continue
            path: list[dict[str, Any]] = []
            at: int | None = leaf
            while at is not None:
                path.insert(0, nodes[at])
                nodes[at] = {**nodes[at], "mask": [False] * len(nodes[at].get("mask") or ())}
                at = nodes[at].get("parent")
            if any(node.get("mask") and any(node["mask"]) for node in path):
                yield trace, index, path


def _spread(nodes: Sequence[dict[str, Any]]) -> list[float] | None:
    """Return a log-probability for each token, 0 for what was not sampled; None: some lack it.

    Raises:
        InvalidExperienceError: a message has another number of them than of sampled tokens.
    """
    values: list[float] = []
    for node in nodes:
        sampled, held = sum(node["mask"]), node.get("logprobs") or []
        if sampled and not held:
            return None  # zeros would be believed
        if sampled and len(held) != sampled:
            raise errors.InvalidExperienceError(
                f"a message has {sampled} sampled tokens and {len(held)} log-probs"
            )
        given = iter(held)
        values += [next(given) if sampled_here else 0.0 for sampled_here in node["mask"]]
    return values


def _sampling(nodes: Sequence[dict[str, Any]], start: int) -> Iterator[dict[str, Any]]:
    """Yield how messages were sampled, where that changes the probabilities of their tokens."""
    end = 0
    for node in nodes:
        begin, end = end, end + len(node["mask"])
        asked = dict(node["sampling"] or {})
        options = changes({**(asked.pop("extra_body", None) or {}), **asked})
        if options and any(node["mask"]):
            first = max(begin + node["mask"].index(True), start)
            yield {"begin": first, "end": end, **options}


def read_sft(path: Path, texts: Texts, rows: Rows) -> Iterator[Experience]:
    """Return a demonstration for each row."""
    return rows.read(rows.of(path), partial(_demonstration, name_of(path), texts))


def _demonstration(batch: str, texts: Texts, row: Row) -> Iterator[Experience]:
    held = row.held
    if messages := held.get("messages"):
        *asked, last = messages
        turn = texts.turn(asked, [last], held)
    elif {"prompt", "completion"} <= held.keys():
        turn = texts.turn(held["prompt"], held["completion"], held)
    else:
        raise errors.InvalidExperienceError(
            f"a demonstration has messages, or prompt and completion, not {sorted(held)}"
        )
    yield Experience(eid=EID(batch, row.number, 0), messages=messages or None, **turn)


def read_preferences(path: Path, texts: Texts, rows: Rows) -> Iterator[Experience]:
    """Return a pair for each row."""
    return rows.read(rows.of(path), partial(_pair, name_of(path), texts))


def _pair(batch: str, texts: Texts, row: Row) -> Iterator[Experience]:
    held = row.held
    if not {"chosen", "rejected"} <= held.keys():
        raise errors.InvalidExperienceError(f"a pair has chosen and rejected, not {sorted(held)}")
    prompt, *answers = held.get("prompt"), held["chosen"], held["rejected"]
    if prompt is None:
        pairs = zip(*answers, strict=False)
        prompt = [first for first, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        if not prompt or isinstance(answers[0], str):
            raise errors.InvalidExperienceError(
                "there is no prompt, and no messages that both answers begin with"
            )
        answers = [answer[len(prompt) :] for answer in answers]
    tokens = texts.prompt(prompt, held)
    ids = [torch.tensor(texts.answer(prompt, a, held), dtype=torch.int32) for a in answers]
    messages = [answer if isinstance(answer, list) else None for answer in answers]
    yield Experience(
        eid=EID(batch, row.number, 0),
        tokens=tokens,
        prompt_length=len(tokens),
        chosen=ids[0],
        rejected=ids[1],
        prompt_text=prompt if isinstance(prompt, str) else None,
        chosen_messages=messages[0],
        rejected_messages=messages[1],
        tools=tools_of(held),
    )


NEEDED = ("input", "output", "score", "step")
OWN = (*NEEDED, "uid")
_CUT = {"truncate_status": "response_truncated"}


def read_verl(path: Path, texts: Texts, rows: Rows) -> Iterator[Experience]:
    """Return a rollout for each line; a step is a batch, what else a line holds is in ``info``."""
    return rows.read(rows.of(path), partial(_rollout, texts, {}))


def _rollout(
    texts: Texts, seen: dict[int, dict[str, tuple[Key, int]]], row: Row
) -> Iterator[Experience]:
    """Yield a rollout; ``seen``: per step and group its task and runs so far."""
    held = row.held
    if missing := [name for name in NEEDED if name not in held]:
        raise errors.InvalidExperienceError(
            f"this row lacks {', '.join(missing)}, which a row of verl's dumps has"
        )
    step, uid = int(held["step"]), held.get("uid")
    group, *place = str(uid).rsplit("_", 2)
    if len(place) == 2 and all(number.isdigit() for number in place):
        eid = EID(f"step-{step}", group, int(place[0]), int(place[1]))
    else:
        groups = seen.setdefault(step, {})
        named = uid is not None and uid != ""
        group = str(uid if named else held["input"])
        task, run = groups.get(group, (group if named else len(groups), -1))
        groups[group] = (task, run + 1)
        eid = EID(f"step-{step}", task, run + 1)
    yield Experience(
        eid=eid,
        reward=float(held["score"]),
        info={"model_version": step - 1, **{k: v for k, v in held.items() if k not in OWN}},
        # A dump holds no special tokens: it tells of an empty answer alone that it was ended.
        **texts.turn(held["input"], held["output"], _CUT if held["output"] else {}),
    )


PER_WRITE = 256

BESIDE = ("tools", "chat_template_kwargs")
"""Columns of data sets that the chat template is given."""


@dataclass(frozen=True, slots=True)
class Format:
    """A format of files.

    Attributes:
        read: yields the experiences of a file or folder, in the order in which they stand there.
        schema: of the experiment that they go into.
        holds: what it is, in a few words.
        columns: what is read of a row, where a row may have others.
        lacks: what no file of it holds, as a warning tells.
    """

    read: Callable[[Path, Texts, Rows], Iterator[Experience]]
    schema: str
    holds: str
    columns: tuple[str, ...] = ()
    lacks: str = ""


FORMATS = {
    "trinity-rft": Format(
        read_trinity, "experience", "an experience buffer of Trinity-RFT: SQLite, or JSONL of texts"
    ),
    "verl": Format(
        read_verl,
        "experience",
        "rollouts dumped by verl: STEP.jsonl, or a folder",
        lacks="verl leaves special tokens out of its dumps: prompts lack those of a chat template, "
        "answers the one that ends them, which those that were cut off never had. "
        "trinity_buffer.integrations.verl records what was sampled",
    ),
    "prime-rl": Format(
        read_prime_rl, "experience", "episodes of prime-rl's file monitor: the folder of the run"
    ),
    "preferences": Format(
        read_preferences,
        "dpo",
        "pairs as TRL takes them: JSONL, JSON, Parquet, or a saved data set",
        ("prompt", "chosen", "rejected", *BESIDE),
    ),
    "sft": Format(
        read_sft,
        "sft",
        "demonstrations as TRL takes them, in the same kinds of file",
        ("messages", "prompt", "completion", *BESIDE),
    ),
}


@dataclass(slots=True)
class Imported:
    """What an import did.

    Attributes:
        written: experiences that were new.
        duplicates: those that were stored already.
        batches: how many there are.
        late: new ones of batches that an earlier import sealed; counted in ``written``, never
            trained.
        left_out: the rows that are not imported: where each stands, and why.
    """

    written: int = 0
    duplicates: int = 0
    batches: int = 0
    late: int = 0
    left_out: list[str] = field(default_factory=list)


def require_readable(
    name: str, path: Path, *, tokenizer: Path | None = None, skip_bad_lines: bool = False
) -> None:
    """Raise unless what goes in first can be read and stored: asked before a store is made for it.

    Raises:
        InvalidArgumentError: nothing is there, or what is there is not of the format ``name``.
    """
    if not path.exists():
        raise errors.InvalidArgumentError(f"{path}: there is no such file or folder")
    chosen = FORMATS[name]
    rows = Rows(chosen.schema, skip_bad=skip_bad_lines)
    if not list(islice(chosen.read(path, Texts(tokenizer), rows), PER_WRITE)):
        left_out = f"; left out, first of all: {rows.left_out[0]}" if rows.left_out else ""
        raise errors.InvalidArgumentError(
            f"{path}: there is nothing to import; {name} means {chosen.holds}{left_out}"
        )


async def import_file(
    store: Store,
    experiment: str,
    name: str,
    path: Path,
    *,
    tokenizer: Path | None = None,
    skip_bad_lines: bool = False,
) -> Imported:
    """Write what stands in ``path`` into ``experiment``, which is made if there is none.

    Every batch is sealed, so that strategies need no plan. The same again is a no-op. Blank lines
    are passed over, and a last line that is torn is left out.

    Args:
        store: where to.
        experiment: its name.
        name: of the format, a key of `FORMATS`.
        path: a file or a folder.
        tokenizer: the folder of a tokenizer of transformers; formats that hold texts need it.
        skip_bad_lines: leave out a row that cannot be imported.

    Raises:
        InvalidArgumentError: a row is not of the format, or texts come without a tokenizer;
            what stands before the row may be stored already.
        ConflictingExperienceError: another content is stored under the same address.
    """
    chosen = FORMATS[name]
    config = {"schema": chosen.schema, **({"tokenizer": str(tokenizer)} if tokenizer else {})}
    opened = await store.experiment(experiment, config=config)
    rows = Rows(chosen.schema, skip_bad=skip_bad_lines, columns=chosen.columns)
    made = chosen.read(path, Texts(tokenizer), rows)
    placed = ((experience, rows.where) for experience in made)
    writer, done = opened.writer(actor=f"import-{name}"), Imported(left_out=rows.left_out)
    batches: dict[Key, None] = {}
    try:
        # Pages of one write each: a file may be larger than memory.
        while page := list(islice(placed, PER_WRITE)):
            receipt = await _stored(writer, page)
            done.written += receipt.written
            done.duplicates += receipt.duplicates
            done.late += receipt.rejected
            batches.update(dict.fromkeys(experience.eid.batch for experience, _ in page))
    except errors.InvalidArgumentError as error:
        if not batches:
            raise
        raise errors.InvalidArgumentError(
            f"{error}; the {done.written + done.duplicates} experiences before it are stored and "
            "not sealed yet: mend it and import the same again, which skips them"
        ) from error
    # Sealed at the end: rows of a batch may stand anywhere in the files.
    for batch in batches:
        await writer.seal(batch, await writer.stored(batch))
    done.batches = len(batches)
    if chosen.lacks:
        _logger.warning("%s: %s", path, chosen.lacks)
    if rows.unread:
        unread, read = ", ".join(sorted(rows.unread)), ", ".join(chosen.columns)
        message = "%s: the columns %s are not imported: %s reads %s"
        _logger.warning(message, path, unread, name, read)
    return done


async def _stored(writer: BufferWriter, page: Sequence[tuple[Experience, str]]) -> WriteReceipt:
    try:
        return await writer.write([experience for experience, _ in page])
    except errors.ConflictingExperienceError as error:
        places = [where for experience, where in page if experience.eid.uid == error.uid]
        raise errors.ConflictingExperienceError(
            f"{' and '.join(places)}: {error}. If the file is the same, another version or another "
            "tokenizer imported it: import it into a new experiment (--experiment NAME)"
        ) from error
