"""The parts of `benchmarks.gpu`, each a process of its own.

python -m benchmarks.gpu_parts scores --device cpu --seconds 20 --tiny

Prints a JSON line for each figure. Sizes are those of a Qwen3 model of 0.6 billion weights in
bfloat16, of random weights, or tiny. Times are medians, of ways that take turns.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import torch
from torch import Tensor

import trinity_buffer as tb
from benchmarks import loss_path
from benchmarks.provenance import provenance
from tests.algorithm.losses.steps import WHOLE, make_step
from trinity_buffer.algorithm import POLICY_LOSS_FN, build
from trinity_buffer.lazy import extra
from trinity_buffer.pipeline.train.checkpoint import digest_of
from trinity_buffer.trainer.determinism import largest_difference
from trinity_buffer.trainer.last_hidden import difference
from trinity_buffer.trainer.token_scores import token_scores

ROOT = Path(__file__).resolve().parents[1]
Run = Callable[[], float]
Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is computed.

    Attributes:
        scores: tokens, words, width of the head that is scored alone.
        model: of a Qwen3 model.
        lengths: the shortest and the longest row of a padded micro-batch, in tokens.
        packed_lengths: likewise, where packed rows are compared with padded ones.
        rows: of a micro-batch.
        rows_per_step: of a trainer's step.
        waiting_rows: of a step that a trainer waits for.
        bits_layers: of the model that is trained three times.
    """

    scores: tuple[int, int, int]
    model: Mapping[str, int]
    lengths: tuple[int, int]
    packed_lengths: tuple[int, int]
    rows: int
    rows_per_step: int
    waiting_rows: int
    bits_layers: int


QWEN = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
TINY_QWEN = {
    "vocab_size": 515,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
FULL = Sizes((16_384, 151_936, 2048), QWEN, (768, 1280), (512, 1024), 12, 64, 256, 4)
TINY = Sizes((65, 515, 16), TINY_QWEN, (9, 24), (9, 24), 3, 8, 16, 2)


@dataclass(frozen=True, slots=True)
class Bench:
    """Where and for how long a part runs."""

    device: str
    seconds: float
    sizes: Sizes

    @property
    def dtype(self) -> torch.dtype:
        """Of models: bfloat16 on a GPU."""
        return torch.float32 if self.device == "cpu" else torch.bfloat16

    def clock(self) -> float:
        """Return seconds, when the device has done all that it was given."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def peak_mb(self, run: Callable[[], object]) -> float | None:
        """Return the megabytes that a run held beyond what was held before; None on a CPU."""
        if self.device != "cuda":
            run()
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 1e6

    def in_turns(self, ways: Mapping[str, Callable[[], object]], share: float) -> dict[str, float]:
        """Return the median seconds of each way, after two rounds for warmth.

        Args:
            share: of the part's seconds.
        """
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        end = time.perf_counter() + share * self.seconds
        rounds = 0
        while rounds < 5 or (time.perf_counter() < end and rounds < 52):
            for name, way in ways.items():
                begin = self.clock()
                way()
                seconds[name].append(self.clock() - begin)
            rounds += 1
        return {name: statistics.median(times[2:]) for name, times in seconds.items()}


def figure(
    what: str, value: float, unit: str, goal: tuple[str, float] | None = None, **more: object
) -> Line:
    """Return the line of a figure.

    Args:
        goal: ``"<="`` or ``">="``, and the limit; None: there is none.
    """
    holds = None
    if goal is not None:
        holds = value <= goal[1] if goal[0] == "<=" else value >= goal[1]
    text = "none" if goal is None else f"{goal[0]} {goal[1]:g}"
    rounded = float(f"{value:.4g}")
    return {"what": what, "figure": rounded, "unit": unit, "goal": text, "holds": holds, **more}


def milliseconds(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the times in milliseconds, rounded."""
    return {name: float(f"{value * 1e3:.4g}") for name, value in seconds.items()}


def scores(bench: Bench) -> Iterator[Line]:
    """Log-probs and entropies of a head alone, forward and backward."""
    tokens, words, width = bench.sizes.scores
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=bench.device, dtype=bench.dtype)
    weight = torch.randn(words, width, device=bench.device, dtype=bench.dtype) / width**0.5
    hidden.requires_grad_()
    weight.requires_grad_()
    targets = torch.randint(words, (tokens,), device=bench.device)
    products_at_once = min(words, 16_384) * tokens

    def way(name: str) -> Callable[[], None]:
        chunk = products_at_once if name == "products" else None

        def run() -> None:
            hidden.grad = weight.grad = None
            values = loss_path.WAYS[name](hidden, weight, targets, chunk)
            torch.stack([value.sum() for value in values]).sum().backward()

        return run

    ways = {name: way(name) for name in ("ours", "products", "naive", "trl")}
    if not loss_path.has_trl():
        print("scores: no wheel of TRL is here, its function is left out", file=sys.stderr)
        del ways["trl"]
    times = bench.in_turns(ways, 0.5)
    details = {"milliseconds": milliseconds(times)}
    ratio = times["ours"] / times["products"]
    yield figure("scores / the four products", ratio, "x", ("<=", 1.15), **details)
    if "trl" in times:
        yield figure("TRL's scores / the four products", times["trl"] / times["products"], "x")
    gradients = []
    for name in ("ours", "naive"):
        ways[name]()
        gradients.append((hidden.grad, weight.grad))
    apart = max(difference(*pair) for pair in zip(*gradients, strict=True))
    yield figure("gradients of scores: difference from whole logits", apart, "", ("<=", 1e-2))
    gradients.clear()
    gradients_mb = (hidden.nbytes + weight.nbytes) / 1e6
    for name in ways.keys() & {"ours", "trl"}:
        hidden.grad = weight.grad = None
        peak = bench.peak_mb(ways[name])
        if peak is not None:
            goal = ("<=", 1000.0) if name == "ours" else None
            yield figure(f"memory of {name} beyond gradients", peak - gradients_mb, "MB", goal)


def model_of(bench: Bench, layers: int | None = None) -> Any:
    """Return a Qwen3 model of random weights."""
    transformers = extra("transformers", "hf")
    shape = dict(bench.sizes.model) | ({"num_hidden_layers": layers} if layers else {})
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(bench.dtype)
    try:
        with torch.device(bench.device):
            return transformers.Qwen3ForCausalLM(
                transformers.Qwen3Config(**shape, tie_word_embeddings=True)
            )
    finally:
        torch.set_default_dtype(default)


def lengths_between(low: int, high: int, rows: int) -> list[int]:
    """Return the lengths of rows, evenly from ``low`` to ``high``: a few draws would lean."""
    return torch.linspace(low, high, rows).round().int().tolist()


def padded(bench: Bench, lengths: Sequence[int]) -> dict[str, Tensor]:
    """Return a padded micro-batch of random tokens."""
    width = max(lengths)
    sizes = torch.tensor(lengths, device=bench.device)
    there = torch.arange(width, device=bench.device)[None] < sizes[:, None]
    words = bench.sizes.model["vocab_size"]
    ids = torch.randint(words, there.shape, device=bench.device).masked_fill(~there, 0)
    return {"input_ids": ids, "attention_mask": there.long()}


def packed(rows: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the rows of a padded micro-batch packed."""
    there = rows["attention_mask"].bool()
    sizes = there.sum(1)
    limits = torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).to(torch.int32)
    positions = torch.arange(there.shape[1], device=there.device).expand(there.shape)[there]
    return {
        "input_ids": rows["input_ids"][there],
        "position_ids": positions,
        "cu_seqlens": limits,
        "max_seqlen": int(sizes.max()),
    }


def ours(model: Any, rows: Mapping[str, Any]) -> None:
    """Add the gradient of a micro-batch, as our trainer does."""
    token_scores(model, rows).logprob.mean().neg().backward()


def plain(model: Any, rows: Mapping[str, Tensor]) -> None:
    """Add the same gradient, from whole logits."""
    ids = rows["input_ids"]
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    targets = ids[:, 1:].masked_fill(rows["attention_mask"][:, 1:] == 0, -100)
    loss = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
    )
    (loss / ids.numel()).backward()


def microbatch(bench: Bench) -> Iterator[Line]:
    """A micro-batch, forward and backward: beside a plain loop with whole logits; packed."""
    model = model_of(bench)
    rows = padded(bench, lengths_between(*bench.sizes.lengths, bench.sizes.rows))

    def way(add: Callable[[Any, Mapping[str, Tensor]], None]) -> Callable[[], None]:
        def run() -> None:
            model.zero_grad(set_to_none=True)
            add(model, rows)

        return run

    ways = {"ours": way(ours), "plain": way(plain)}
    times = bench.in_turns(ways, 0.3)
    details: dict[str, Any] = {"milliseconds": milliseconds(times)}
    peaks = {name: bench.peak_mb(run) for name, run in ways.items()}
    details["megabytes"] = {name: round(peak) for name, peak in peaks.items() if peak is not None}
    ratio = times["ours"] / times["plain"]
    yield figure("micro-batch / plain loop with whole logits", ratio, "x", ("<=", 1.05), **details)
    yield from packing(bench, model)


def packing(bench: Bench, model: Any) -> Iterator[Line]:
    """Packed rows beside the same rows padded, in real tokens a second."""
    number = bench.sizes.rows * 4 // 3
    rows = padded(bench, lengths_between(*bench.sizes.packed_lengths, number))
    layouts: dict[str, Mapping[str, Any]] = {"padded": rows, "packed": packed(rows)}

    def way(name: str) -> Callable[[], None]:
        def run() -> None:
            model.zero_grad(set_to_none=True)
            ours(model, layouts[name])

        return run

    times = bench.in_turns({name: way(name) for name in layouts}, 0.3)
    details = {"milliseconds": milliseconds(times)}
    rate = times["padded"] / times["packed"]
    goal = (">=", 1.15)
    yield figure("packed / padded, real tokens a second", rate, "x", goal, **details)
    turned = packed({name: column.flip(0) for name, column in rows.items()})
    with torch.no_grad():  # a row that reads its neighbours has others then
        values, others = (token_scores(model, one).logprob for one in (layouts["packed"], turned))
    sizes = turned["cu_seqlens"].diff().tolist()
    others = torch.cat(others.split(sizes)[::-1])
    what = "log-probs of rows packed in turned order: difference"
    yield figure(what, difference(values, others), "", ("<=", 1e-3))


def losses(bench: Bench) -> Iterator[Line]:
    """Every policy loss and its gradient on this device, beside the CPU."""
    batch, _ = make_step(torch.float32).microbatch(WHOLE[0][0], packed=False)
    worst, names = 0.0, POLICY_LOSS_FN.names()
    for name in names:
        made = POLICY_LOSS_FN.get(name)
        found = []
        for device in ("cpu", bench.device):
            torch.manual_seed(0)
            loss_fn = made(backend="trinity", **made.default_args())
            given = {key: batch[key].to(device) for key in loss_fn.select_keys}
            leaf = batch["logprob"].to(device).clone().requires_grad_()
            loss, _ = loss_fn(logprob=leaf, **given)
            loss.backward()
            assert leaf.grad is not None
            found.append(torch.cat([loss.detach().reshape(1), leaf.grad.flatten()]).cpu().double())
        worst = max(worst, float((found[0] - found[1]).norm() / found[0].norm().clamp_min(1e-12)))
    what = f"largest relative difference of {len(names)} losses from the CPU"
    yield figure(what, worst, "", ("<=", 1e-5))


async def _fill(url: str, bench: Bench, groups: int, low: int, high: int) -> None:
    """Record rollouts of random tokens in groups of 4, and annotate them."""
    words = bench.sizes.model["vocab_size"]
    draw = torch.Generator().manual_seed(2)
    async with tb.open_store(url) as store:
        experiment = await store.experiment("bench", config={"rollouts_per_group": 4})
        writer = experiment.writer("explorer-0")
        for task in range(groups):
            rows = []
            for run in range(4):
                size = int(torch.randint(low, high + 1, (), generator=draw))
                prompt = size // 4
                rows.append(
                    tb.Experience(
                        eid=tb.EID("b0", task, run),
                        tokens=torch.randint(words, (size,), generator=draw),
                        prompt_length=prompt,
                        logprobs=-torch.rand(size - prompt, generator=draw) * 5,
                        reward=float(torch.rand((), generator=draw)),
                    )
                )
            await writer.write(rows)
        await tb.run_strategy(experiment, "grpo")


def _stream(url: str, bench: Bench, **options: Any) -> Any:
    rows = bench.sizes.rows_per_step
    sizes = {"groups_per_step": rows // 4, "tokens_per_microbatch": 16_384}
    return tb.open_train_stream(
        url, experiment="bench", strategy="grpo", device=bench.device, **(sizes | options)
    )


def _trained(
    bench: Bench, url: str, folder: Path, consumer: str, *, steps: int, **settings: Any
) -> list[float]:
    """Train some steps; return the seconds of each.

    Each step reads its loss from the device. Not `Bench.clock`, which would wait for copies too.
    """
    ends: list[float] = []

    def report(_: tb.StepReport) -> None:
        ends.append(time.perf_counter())

    with _stream(url, bench, consumer=consumer) as stream:
        chosen = tb.TrainerSettings(
            checkpoints=folder,
            learning_rate=1e-5,
            max_steps=steps,
            record_row_metrics=False,
            **settings,
        )
        trainer = tb.Trainer(stream, model_of(bench), build("grpo", kl_loss_fn="none"), chosen)
        ends.append(bench.clock())
        trainer.run(report)
    return [end - begin for begin, end in pairwise(ends)]


def steps(bench: Bench) -> Iterator[Line]:
    """Commits, what determinism costs, and the wait for the next step."""
    every = 2  # steps, between commits
    with tempfile.TemporaryDirectory() as place:
        url = f"sqlite:///{place}/steps.db"
        length = sum(bench.sizes.lengths) // 2  # of all rows: steps that differ cannot be compared
        groups = bench.sizes.rows_per_step // 4 * 2 * MOST_STEPS_BESIDE
        anyio.run(_fill, url, bench, groups, length, length)
        kinds: dict[str, dict[str, Any]] = {
            "free": {"deterministic": False, "commit_every_steps": 99, "steps": 4},
            "synchronous": {"async_checkpoints": False, "commit_every_steps": every, "steps": 7},
        }
        seconds: dict[str, list[float]] = {}
        gb = 0.0
        for kind, settings in kinds.items():
            folder = Path(place, kind)
            seconds[kind] = _trained(bench, url, folder, kind, **settings)
            files = [file for file in max(folder.glob("step-*")).rglob("*") if file.is_file()]
            gb = sum(file.stat().st_size for file in files) / 1e9
            shutil.rmtree(folder)
        free = statistics.median(seconds["free"][1:-1])  # the first warms up, the last commits
        alone = statistics.median(seconds["synchronous"][2:-1:every])
        committing = statistics.median(seconds["synchronous"][1:-1:every])
        yield figure("deterministic / not", alone / free, "x", ("<=", 1.10), **_rounded(seconds))
        writing = max(committing - alone, 1e-9)
        goal = (">=", 1.5)
        yield figure("synchronous commit", gb / writing, "GB/s", goal, checkpoint_gb=round(gb, 2))
        yield figure("the disk alone, five files at once", disk_gb_per_s(Path(place), gb), "GB/s")
        every = steps_beside(writing, alone)
        own = {"async_checkpoints": True, "commit_every_steps": every, "steps": 2 * every}
        beside = _trained(bench, url, Path(place, "beside"), "beside", **own)
        goal = ("<=", 0.05)
        details = _rounded({"asynchronous": beside}) | {"steps_between_commits": every}
        share = held_up(beside, every, alone)
        yield figure("asynchronous commit holds training up", share, "of a step", goal, **details)
        yield from _waits(bench, place)


def disk_gb_per_s(folder: Path, gb: float) -> float:
    """Return how fast bytes of a checkpoint are written and flushed, without all else."""
    data = memoryview(os.urandom(1 << 20) * max(1, round(gb * 1e9 / 5 / (1 << 20))))

    def write(number: int) -> None:
        with Path(folder, f"part-{number}").open("wb", buffering=0) as file:
            at = 0
            while at < len(data):
                at += file.write(data[at:])
            os.fsync(file.fileno())

    begin = time.perf_counter()
    with ThreadPoolExecutor(5) as pool:
        list(pool.map(write, range(5)))
    return 5 * len(data) / 1e9 / (time.perf_counter() - begin)


MOST_STEPS_BESIDE = 4


def steps_beside(writing_s: float, step_s: float) -> int:
    """Return how many steps lie between commits, so that none waits for the one before it."""
    return min(MOST_STEPS_BESIDE, max(2, math.ceil(1.5 * writing_s / step_s)))


def held_up(seconds: Sequence[float], every: int, step_s: float) -> float:
    """Return how much longer the steps beside a commit took, and beginning the next, in steps.

    The first commit allocates page-locked memory, which those after it use again.

    Args:
        seconds: of each step, of which every such one ends with a commit.
        step_s: seconds of a step alone.
    """
    return sum(seconds[every : 2 * every]) / step_s - every


def _rounded(seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    return {"seconds": {kind: [round(s, 3) for s in some] for kind, some in seconds.items()}}


READ = ("input_ids", "attention_mask", "action_mask", "old_logprob", "advantages")
STEP_S = 0.05


def _waits(bench: Bench, place: str) -> Iterator[Line]:
    """The wait for the next step beside one of 50 ms."""
    rows, number = bench.sizes.waiting_rows, 12
    url = f"sqlite:///{place}/waits.db"
    anyio.run(_fill, url, bench, rows // 4 * number, *(256, 512))
    options = {"groups_per_step": rows // 4, "tokens_per_microbatch": None}
    waits = []
    with _stream(url, bench, **options) as stream:
        for _ in range(number):
            begin = bench.clock()
            step = next(stream)
            for name in READ:
                step.microbatches[0].get(name)
            waits.append(bench.clock() - begin)
            time.sleep(STEP_S)
            stream.commit(step)
    share = statistics.median(waits[2:]) / STEP_S
    yield figure("wait for the next step beside one of 50 ms", share, "of a step", ("<=", 0.01))


def bits(bench: Bench) -> Iterator[Line]:
    """Train five steps; replay them; kill at the third and resume: are the weights the same?"""
    with tempfile.TemporaryDirectory() as place:
        url = f"sqlite:///{place}/trained.db"
        groups = bench.sizes.rows_per_step // 4 * 5
        anyio.run(_fill, url, bench, groups, *bench.sizes.lengths)
        other = f"sqlite:///{place}/killed.db"
        shutil.copy(Path(place, "trained.db"), Path(place, "killed.db"))
        trained, killed = _process(bench, "train", url), _process(bench, "kill", other)
        codes = trained.wait(), killed.wait()
        if codes != (0, -signal.SIGKILL):
            raise SystemExit(f"bits: training ended with {codes[0]}, the killed with {codes[1]}")
        replayed, resumed = _process(bench, "replay", url), _process(bench, "train", other)
        codes = replayed.wait(), resumed.wait()
        if any(codes):
            raise SystemExit(f"bits: the replay ended with {codes[0]}, the resumed with {codes[1]}")
        ends = {name: _last(Path(place), name) for name in ("trained", "replayed", "killed")}
        for what, name in (("replayed", "replayed"), ("killed and resumed", "killed")):
            same = digest_of(ends[name]) == digest_of(ends["trained"])
            most = largest_difference(ends["trained"], ends[name]).relative
            line = figure(
                f"weights of a run {what}: different bits", float(not same), "", ("<=", 0)
            )
            yield line | {"largest_difference": most}
        begun = _last(Path(place), "trained", first=True)
        moved = largest_difference(begun, ends["trained"]).relative
        yield figure("the weights changed meanwhile by", moved, "of the largest", (">=", 1e-4))


def _last(place: Path, name: str, *, first: bool = False) -> Path:
    """Return the policy in the last checkpoint of a run, or in its first."""
    folders = sorted(Path(place, f"{name}-checkpoints").glob("step-*"))
    return folders[0 if first else -1] / "policy"


def _process(bench: Bench, what: str, url: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.gpu_parts", what, "--url", url]
    command += ["--device", bench.device, "--seconds", "0"]
    command += ["--tiny"] if bench.sizes is TINY else []
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def train_for_bits(bench: Bench, what: str, url: str) -> None:
    """Train five steps, or kill this process after the third; or replay them."""
    place = Path(url.removeprefix("sqlite:///"))
    name = "replayed" if what == "replay" else place.stem

    def report(done: tb.StepReport) -> None:
        if what == "kill" and done.step == 3:  # of five
            os.kill(os.getpid(), signal.SIGKILL)

    if what == "replay":
        source = tb.open_replay_stream(url, experiment="bench", device=bench.device)
    else:
        source = _stream(url, bench, wait_for_lease=True, lease_ttl_s=5)
    with source as stream:
        settings = tb.TrainerSettings(
            checkpoints=place.with_name(f"{name}-checkpoints"),
            learning_rate=1e-3,  # bfloat16 would round smaller steps away
            commit_every_steps=99 if what == "replay" else 1,  # the last one is compared
            keep_checkpoints=None if name == "trained" else 2,  # the first is compared, too
            async_checkpoints=False,
        )
        model = model_of(bench, bench.sizes.bits_layers)
        tb.Trainer(stream, model, build("grpo", kl_loss_fn="none"), settings).run(report)


def environment() -> dict[str, Any]:
    """Return the card and the versions of what decides how fast it is."""
    names = {"triton", "transformers", "trl"} & {one.name for one in metadata.distributions()}
    versions = {"cuda": torch.version.cuda} | {name: metadata.version(name) for name in names}
    return {"card": torch.cuda.get_device_name(), "versions": versions}


PARTS: dict[str, Callable[[Bench], Iterator[Line]]] = {
    "scores": scores,
    "microbatch": microbatch,
    "losses": losses,
    "steps": steps,
    "bits": bits,
}


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=[*PARTS, "train", "kill", "replay", "provenance"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--url")
    parser.add_argument("--command", default="python -m benchmarks.gpu")
    asked = parser.parse_args()
    bench = Bench(asked.device, asked.seconds, TINY if asked.tiny else FULL)
    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here: give --device cpu --tiny to see that it runs at all")
    if asked.part in PARTS:
        for line in PARTS[asked.part](bench):
            if (
                asked.device == "cpu" and line["unit"]
            ):  # speeds of a CPU, of tiny sizes, mean nothing
                line["holds"] = None
            print(json.dumps(line), flush=True)
    elif asked.part == "provenance":
        print(json.dumps(provenance(asked.command) | environment()))
    else:
        train_for_bits(bench, asked.part, asked.url)


if __name__ == "__main__":
    main()
