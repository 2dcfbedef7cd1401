"""Peak memory and time of log-probs and entropies, forward and backward: ours beside other ways.

python -m benchmarks.loss_path                       # small, on the processor
python -m benchmarks.loss_path --device cuda         # 16k tokens x 152k words x 2,048, bfloat16
python -m benchmarks.loss_path --ways ours,trl --chunks 23,24,25 --repetitions 5

Ways: `ours`; `naive`, whole float32 logits; `trl`, the chunked function of TRL where it is
installed (`make outside ARGS=trl` makes an environment that has it); `products`, the four matrix
products alone, which nobody can leave out. Each measurement is a process of its own, and the ways
take turns. One JSON line a way: medians; megabytes beyond inputs and gradients; seconds are of the
processor's time, or of a GPU's clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from benchmarks.provenance import provenance
from trinity_buffer.trainer.last_hidden import OutputHead
from trinity_buffer.trainer.token_scores import chunk_columns, head_scores

SIZES = {"cpu": (2048, 65_536, 128), "cuda": (16_384, 152_064, 2048)}
TRL_COLUMNS = 8192
"""Of the vocabulary at a time, as TRL's own trainers ask for."""


def ours(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk_logits: int | None
) -> tuple[Tensor, ...]:
    """Return log-probabilities and entropies in chunks."""
    return head_scores(hidden, OutputHead(weight), targets, chunk_logits)


def naive(hidden: Tensor, weight: Tensor, targets: Tensor, _: int | None) -> tuple[Tensor, ...]:
    """Return them from all logits."""
    every = (hidden @ weight.T).float().log_softmax(-1)
    return every.gather(1, targets.unsqueeze(1)).squeeze(1), -(every.exp() * every).sum(1)


def has_trl() -> bool:
    """Return whether TRL's function is here."""
    return _trl_file() is not None


def _trl_file() -> Path | None:
    """Return the file of TRL's function; TRL itself is not imported, and may lack what it needs."""
    found = find_spec("trl")
    places = [] if found is None else found.submodule_search_locations or []
    files = (Path(place, "kernels", "chunked_logprob.py") for place in places)
    return next((file for file in files if file.exists()), None)


@cache  # made anew, its kernels would be looked up on the disk at every call
def _trl_function() -> Any:
    # Its backward pass asks the trainers of TRL, which need more packages, for a head in parts.
    alone = {
        name: ModuleType(name)
        for name in ("alone", "alone.kernels", "alone.trainer", "alone.trainer.utils")
    }
    vars(alone["alone.trainer.utils"])["maybe_gather_lm_head_ctx"] = lambda *_: nullcontext()
    sys.modules.update(alone)
    spec = spec_from_file_location("alone.kernels.chunked_logprob", _trl_file() or "trl")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ChunkedLogProbFunction


def trl(hidden: Tensor, weight: Tensor, targets: Tensor, _: int | None) -> tuple[Tensor, ...]:
    """Return them by the function of TRL."""
    function = _trl_function()
    given = (hidden, weight, None, targets, 1.0, TRL_COLUMNS, None, 1.0, ("entropy",))
    return function.apply(*given)[:2]  # type: ignore[no-any-return]  # another package's


class _Products(torch.autograd.Function):
    """The four products: logits, logits again, and of them the gradients of both factors."""

    @staticmethod
    @override
    def forward(ctx, hidden, weight, columns):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205
        """Return zeros."""
        ctx.save_for_backward(hidden, weight)
        ctx.columns = columns
        for begin in range(0, len(weight), columns):
            hidden @ weight[begin : begin + columns].T
        return hidden.new_zeros(len(hidden))

    @staticmethod
    @override
    def backward(ctx, _):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205
        """Return products of the shapes of the gradients."""
        hidden, weight = ctx.saved_tensors
        of_hidden, of_weight = torch.zeros_like(hidden), torch.empty_like(weight)
        for begin in range(0, len(weight), ctx.columns):
            part = weight[begin : begin + ctx.columns]
            logits = hidden @ part.T
            of_hidden += logits @ part
            of_weight[begin : begin + ctx.columns] = logits.T @ hidden
        return of_hidden, of_weight, None


def products(
    hidden: Tensor, weight: Tensor, _: Tensor, chunk_logits: int | None
) -> tuple[Tensor, ...]:
    """Return zeros, after the products that nobody can leave out."""
    columns = chunk_columns(hidden, len(weight), chunk_logits, fused=hidden.is_cuda)
    return (_Products.apply(hidden, weight, columns),)  # type: ignore[no-untyped-call]  # no types


WAYS = {way.__name__: way for way in (ours, naive, trl, products)}


def _logits(power: int) -> int | None:
    return 2**power if power else None


def _megabytes(device: str, what: str) -> float:
    """Return what is used now, or the most that was."""
    if device == "cuda":
        now = what == "VmRSS"
        used = torch.cuda.memory_allocated() if now else torch.cuda.max_memory_allocated()
        return used / 1e6
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[what].split()[0]) * 1024 / 1e6


def _clock(device: str) -> float:
    """Return the processor's time, or the time when a GPU has done all that it was given."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def _begin_anew(device: str) -> None:
    """Forget the peak so far."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def measure(
    way: str, device: str, sizes: tuple[int, int, int], chunk_logits: int | None
) -> tuple[float, float]:
    """Return seconds and megabytes of one pass forward and backward, after one for warmth."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tokens, words, width = sizes
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hidden = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(words, width, device=device, dtype=dtype, requires_grad=True)
    targets = torch.randint(words, (tokens,), device=device)

    def once() -> tuple[float, float]:
        hidden.grad = weight.grad = None
        _begin_anew(device)
        before, begin = _megabytes(device, "VmRSS"), _clock(device)
        found = WAYS[way](hidden, weight, targets, chunk_logits)
        torch.stack([one.sum() for one in found]).sum().backward()
        seconds = _clock(device) - begin
        peak = _megabytes(device, "VmHWM") - before
        return seconds, peak - (hidden.nbytes + weight.nbytes) / 1e6

    once()
    return once()


def _in_turns(asked: argparse.Namespace, cases: list[tuple[str, int]]) -> None:
    """Run every case in a process of its own, round by round; print the medians."""
    origin = provenance("python -m benchmarks.loss_path")
    results: dict[tuple[str, int], list[list[float]]] = {case: [] for case in cases}
    for _ in range(asked.repetitions):
        for way, power in cases:
            command = [sys.executable, "-m", "benchmarks.loss_path", "--one", way]
            command += ["--device", asked.device, "--sizes", asked.sizes, "--chunks", str(power)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{way}: {done.stderr}")
            results[way, power].append(json.loads(done.stdout))
    for (way, power), pairs in results.items():
        seconds, megabytes = (statistics.median(column) for column in zip(*pairs, strict=True))
        row = {
            "way": way,
            "chunk_logits": _logits(power),
            "sizes": asked.sizes,
            "device": asked.device,
        }
        row |= {"seconds": round(seconds, 3), "megabytes": round(megabytes)}
        print(json.dumps({**row, **origin}), flush=True)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    there = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=sorted(SIZES), default=there)
    parser.add_argument("--sizes", help="tokens,words,width")
    parser.add_argument("--ways", help="with commas; default: all that can run")
    parser.add_argument(
        "--chunks", default="0", help="powers of two: logits held at a time; 0: the default"
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--one", choices=sorted(WAYS), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    asked.sizes = asked.sizes or ",".join(map(str, SIZES[asked.device]))
    powers = [int(power) for power in asked.chunks.split(",")]
    if asked.one:
        tokens, words, width = map(int, asked.sizes.split(","))
        print(
            json.dumps(measure(asked.one, asked.device, (tokens, words, width), _logits(powers[0])))
        )
        return
    usual = [way for way in WAYS if way != "trl" or find_spec("trl")]
    ways = asked.ways.split(",") if asked.ways else usual
    chunked = ("ours", "products")
    _in_turns(asked, [(w, p) for w in ways for p in (powers if w in chunked else powers[:1])])


if __name__ == "__main__":
    main()
