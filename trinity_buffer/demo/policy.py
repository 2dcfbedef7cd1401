"""A small causal transformer: the policy that explorers sample from and trainers train.

Small enough for a processor core, and complete where it matters to a trainer: the same
log-probabilities for padded rows and for packed sequences, weights that depend on a seed alone, and
files that are either complete or absent.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from trinity_buffer.algorithm.advantage_fn.token_scores import expected_entropy_change
from trinity_buffer.errors import CheckpointError, InvalidArgumentError
from trinity_buffer.pipeline.train.checkpoint import fsync
from trinity_buffer.trainer.checkpoint import POLICY_FILE
from trinity_buffer.trainer.last_hidden import OutputHead
from trinity_buffer.trainer.policy import TokenScores, all_finite
from trinity_buffer.trainer.token_scores import entropy_changes, predicted, token_scores

_METADATA_KEY = "trinity_buffer_policy"


def scores_of_logits(logits: Tensor, microbatch: Mapping[str, Any]) -> TokenScores:
    """Return the same as `token_scores`, from all logits of a micro-batch at once.

    Runs were trained so before logits were made in slices. Summing in another order changes the
    last bits, so those runs are replayed with this.
    """
    ids = microbatch["input_ids"]
    time = ids.dim() - 1
    before = logits.narrow(time, 0, logits.shape[time] - 1)
    before = before if before.dtype == torch.float64 else before.float()
    heat = microbatch.get("temperature")
    if heat is not None:
        before = before / heat.narrow(time, 1, ids.shape[time] - 1).unsqueeze(-1)
    every = torch.log_softmax(before, -1)
    following = ids.narrow(time, 1, ids.shape[time] - 1).long()
    logprob = every.gather(-1, following.unsqueeze(-1)).squeeze(-1)
    entropy = -(every.exp() * every).sum(-1)
    real = predicted(microbatch)
    return TokenScores(*(functional.pad(x, (1, 0)).where(real, 0.0) for x in (logprob, entropy)))


def entropy_changes_of_logits(logits: Tensor, microbatch: Mapping[str, Any]) -> Tensor:
    """Return the same as `entropy_changes`, from the logits of a micro-batch."""
    heat = microbatch.get("temperature")
    if heat is not None:
        logits = logits / torch.roll(heat, -1, -1).unsqueeze(-1)
    return torch.roll(expected_entropy_change(logits), 1, -1).where(predicted(microbatch), 0.0)


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Shape of a `TransformerPolicy`.

    Attributes:
        vocab_size: number of tokens.
        width: size of the residual stream, a multiple of ``heads``.
        layers: number of blocks.
        heads: attention heads of each block.
        max_length: longest sequence, in tokens.

    Raises:
        InvalidArgumentError: a size below 1, or a width that the heads do not divide.
    """

    vocab_size: int
    width: int = 64
    layers: int = 2
    heads: int = 4
    max_length: int = 64

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise InvalidArgumentError(f"PolicyConfig.{name}={value}: it must be at least 1")
        if self.width % self.heads:
            raise InvalidArgumentError(
                f"PolicyConfig.width is {self.width}, it must be a multiple of heads={self.heads}"
            )


class _PackedRows(NamedTuple):
    """Where the tokens of packed sequences lie in padded rows ``[N, max_seqlen]``."""

    slots: Tensor
    rows: int
    width: int

    @classmethod
    def of(cls, cu_seqlens: Tensor, total: int, max_seqlen: int | None) -> _PackedRows:
        starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
        width = int(lengths.max()) if max_seqlen is None else max_seqlen
        first_slot = torch.arange(len(lengths), device=starts.device) * width
        shift = torch.repeat_interleave(first_slot - starts, lengths, output_size=total)
        return cls(shift + torch.arange(total, device=starts.device), len(lengths), width)

    def spread(self, packed: Tensor) -> Tensor:
        """Return ``[T_total, D]`` as ``[N, max_seqlen, D]``, zeros where there is no token."""
        rows = packed.new_zeros(self.rows * self.width, packed.shape[-1])
        return rows.index_copy(0, self.slots, packed).view(self.rows, self.width, -1)

    def gather(self, rows: Tensor) -> Tensor:
        """Return ``[N, max_seqlen, D]`` as ``[T_total, D]``."""
        return rows.flatten(0, 1).index_select(0, self.slots)


class KeyValueCache:
    """Keys and values of the tokens that were read so far, one pair per layer, for decoding."""

    def __init__(self, layers: int) -> None:
        self._pairs: list[tuple[Tensor, Tensor] | None] = [None] * layers

    @property
    def length(self) -> int:
        """Number of tokens read so far."""
        return 0 if self._pairs[0] is None else self._pairs[0][0].shape[-2]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return all keys and values of ``layer``, ``[B, heads, T, D]``, the new ones included."""
        past = self._pairs[layer]
        if past is not None:
            keys, values = torch.cat((past[0], keys), -2), torch.cat((past[1], values), -2)
        self._pairs[layer] = (keys, values)
        return keys, values

    def take(self, rows: Tensor) -> KeyValueCache:
        """Return a cache of the given rows, in this order and as often as they are named."""
        taken = KeyValueCache(len(self._pairs))
        taken._pairs = [p and (p[0][rows], p[1][rows]) for p in self._pairs]
        return taken


Packed: TypeAlias = _PackedRows | None
Cache: TypeAlias = KeyValueCache | None


class _Attention(nn.Module):
    """Causal self-attention that never looks into another sequence."""

    def __init__(self, config: PolicyConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads = config.heads
        self.inward = nn.Linear(config.width, 3 * config.width, bias=False)
        self.outward = nn.Linear(config.width, config.width, bias=False)

    @override
    def forward(self, hidden: Tensor, packed: Packed, cache: Cache) -> Tensor:
        # Packed sequences are spread over rows for the attention alone: a block-diagonal mask over
        # all tokens would cost their number squared.
        joined = self.inward(hidden)
        joined = joined if packed is None else packed.spread(joined)
        rows, width, _ = joined.shape
        queries, keys, values = joined.view(rows, width, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if cache is not None:
            keys, values = cache.append(self.layer, keys, values)
        causal = width > 1 and width == keys.shape[-2]
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=causal)
        mixed = mixed.transpose(1, 2).reshape(rows, width, -1)
        return self.outward(mixed if packed is None else packed.gather(mixed))  # type: ignore[no-any-return]  # nn.Module.__call__


class _Block(nn.Module):
    """Attention, then a feed-forward layer, each behind a norm and beside a residual."""

    def __init__(self, config: PolicyConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = _Attention(config, layer)
        self.feed_norm = nn.LayerNorm(config.width)
        self.feed_in = nn.Linear(config.width, 4 * config.width, bias=False)
        self.feed_out = nn.Linear(4 * config.width, config.width, bias=False)

    @override
    def forward(self, hidden: Tensor, packed: Packed, cache: Cache) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), packed, cache)
        inner = functional.relu(self.feed_in(self.feed_norm(hidden)))
        return hidden + self.feed_out(inner)  # type: ignore[no-any-return]  # nn.Module.__call__


class TransformerPolicy(nn.Module):
    """A causal transformer over tokens, for padded rows and for packed sequences.

    Padded rows are right-padded: what follows a token never changes its score, so no
    attention mask is needed. Weights depend on ``config`` and ``seed`` alone, and making a policy
    leaves torch's global random state as it was.

    Args:
        config: the shape.
        seed: of the initial weights.

    Attributes:
        whole_logits: make all logits at once to score tokens, as old runs did: `scores_of_logits`.
    """

    file_name = POLICY_FILE
    takes = frozenset({"temperature"})
    whole_logits = False

    def __init__(self, config: PolicyConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):
            self.tokens = nn.Embedding(config.vocab_size, config.width)
            self.positions = nn.Embedding(config.max_length, config.width)
            self.blocks = nn.ModuleList(_Block(config, i) for i in range(config.layers))
            self.norm = nn.LayerNorm(config.width)
            self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.dim() == 1:
                continue  # norms start as the identity
            deviation = 1 / math.sqrt(weight.shape[1])
            if name.endswith(("outward.weight", "feed_out.weight")):
                deviation /= math.sqrt(2 * config.layers)  # the stream keeps its size
            if name == "head.weight":
                deviation /= 10  # nearly uniform: a first guess that explores
            nn.init.normal_(weight, std=deviation, generator=generator)

    @override
    def forward(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Return the logits of the next token, ``[B, T, vocab]``, packed ``[T_total, vocab]``.

        Args:
            input_ids: ``[B, T]`` right-padded, or ``[T_total]`` with ``cu_seqlens``.
            position_ids: position of every token in its sequence; None: counted from 0.
            cu_seqlens: ``[N + 1]`` boundaries of packed sequences.
            max_seqlen: length of the longest of them; None: read back from ``cu_seqlens``.

        Raises:
            InvalidArgumentError: a shape that fits no layout, or a sequence above ``max_length``.
        """
        microbatch: dict[str, Any] = {"input_ids": input_ids, "position_ids": position_ids}
        microbatch |= {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        return self.head(self.last_hidden(microbatch)[0])  # type: ignore[no-any-return]  # nn.Module.__call__

    def last_hidden(self, microbatch: Mapping[str, Any]) -> tuple[Tensor, OutputHead]:
        """Return the last hidden states, and the head that makes logits of them; see `forward`."""
        ids, limits = microbatch["input_ids"], microbatch.get("cu_seqlens")
        if ids.dim() != (2 if limits is None else 1):
            raise InvalidArgumentError(
                f"input_ids has shape {tuple(ids.shape)}: give [B, T], or [T_total] together with "
                "cu_seqlens"
            )
        packed = None
        if limits is not None:
            packed = _PackedRows.of(limits, len(ids), microbatch.get("max_seqlen"))
        self._check_length(ids.shape[1] if packed is None else packed.width)
        positions = microbatch.get("position_ids")
        if positions is None:
            steps = torch.arange(ids.shape[-1], device=ids.device)
            # Of packed rows, that of every token in its own sequence.
            positions = steps if packed is None else packed.slots % packed.width
        return self._hidden(ids, positions, packed, None), OutputHead(self.head.weight)

    def _logits_of(self, microbatch: Mapping[str, Any]) -> Tensor:
        # The runs that were scored so counted the positions themselves.
        limits = {name: microbatch.get(name) for name in ("cu_seqlens", "max_seqlen")}
        return self.forward(microbatch["input_ids"], **limits)

    def scores(self, microbatch: Mapping[str, Any]) -> TokenScores:
        """Return log-probability and entropy of every token; see `token_scores`.

        Raises:
            InvalidArgumentError: see `forward`.
        """
        if self.whole_logits:
            return scores_of_logits(self._logits_of(microbatch), microbatch)
        return token_scores(self, microbatch)

    def entropy_changes(self, microbatch: Mapping[str, Any]) -> Tensor:
        """Return the expected change of entropy at every token; see `entropy_changes`."""
        if self.whole_logits:
            return entropy_changes_of_logits(self._logits_of(microbatch), microbatch)
        return entropy_changes(self, microbatch)

    def read(self, input_ids: Tensor, cache: KeyValueCache) -> Tensor:
        """Read ``[B, T]`` further tokens into ``cache`` and return the logits after the last one.

        The first call reads the prompts, later ones a single token per row.

        Raises:
            InvalidArgumentError: a sequence above ``max_length``, or several further tokens.
        """
        seen, new = cache.length, input_ids.shape[1]
        if seen and new > 1:
            raise InvalidArgumentError(
                f"{new} further tokens per row: after the prompt a cache reads one token at a time"
            )
        self._check_length(seen + new)
        positions = torch.arange(seen, seen + new, device=input_ids.device)
        return self.head(self._hidden(input_ids, positions, None, cache)[:, -1])  # type: ignore[no-any-return]  # nn.Module.__call__

    def new_cache(self) -> KeyValueCache:
        """Return an empty cache for `read`."""
        return KeyValueCache(self.config.layers)

    def new_critic(self) -> TransformerCritic:
        """Return a fresh critic of the same shape, on the same device."""
        return TransformerCritic(self.config).to(self.head.weight.device)

    def save(self, path: str | Path) -> None:
        """Write config and weights to ``path`` in an existing folder, replacing a file there.

        Completely or not at all, and durably; the bytes depend on the weights and the config alone.
        """
        # One key, because safetensors writes several in an order that changes from run to run. The
        # empty metadata keeps the bytes, and so the digests, of earlier versions.
        header = json.dumps({"config": asdict(self.config), "metadata": {}}, sort_keys=True)
        tensors = {name: t.detach().cpu().contiguous() for name, t in self.state_dict().items()}
        path = Path(path)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            temporary.write_bytes(save(tensors, metadata={_METADATA_KEY: header}))
            fsync(temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        fsync(path.parent)

    def restore(self, path: str | Path) -> None:
        """Take the weights that `save` wrote to ``path``.

        Raises:
            CheckpointError: there is no such file, or it is not a policy of this kind and shape.
        """
        try:
            self.load_state_dict(self.load(path).state_dict())
        except RuntimeError as error:
            raise CheckpointError(f"{path}: a policy of another shape ({error})") from error

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Return the model that `save` wrote to ``path``, on the CPU.

        Raises:
            CheckpointError: there is no such file, it is not a policy of this kind, or its weights
                are not finite.
        """
        try:
            with safe_open(path, framework="pt") as file:
                config = dict(json.loads((file.metadata() or {})[_METADATA_KEY])["config"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except FileNotFoundError as error:
            raise CheckpointError(f"{path}: there is no such policy file") from error
        except (SafetensorError, KeyError, OSError, ValueError, TypeError, RuntimeError) as error:
            raise CheckpointError(
                f"{path}: not a policy that save_policy wrote ({error}); publish it again"
            ) from error
        if not all_finite(tensors.values()):
            raise CheckpointError(
                f"{path}: the weights hold NaN or Inf, nothing can be sampled from them; publish "
                "an older checkpoint"
            )
        try:
            policy = cls(PolicyConfig(**config))
            policy.to(next(iter(tensors.values())).dtype).load_state_dict(tensors)
        except (TypeError, RuntimeError, StopIteration, InvalidArgumentError) as error:
            raise CheckpointError(f"{path}: the weights do not fit the config ({error})") from error
        return policy

    def _hidden(self, ids: Tensor, places: Tensor, packed: Packed, cache: Cache) -> Tensor:
        hidden = self.tokens(ids) + self.positions(places)
        for block in self.blocks:
            hidden = block(hidden, packed, cache)
        return self.norm(hidden)  # type: ignore[no-any-return]  # nn.Module.__call__

    def _check_length(self, length: int) -> None:
        if length > self.config.max_length:
            raise InvalidArgumentError(
                f"a sequence of {length} tokens, PolicyConfig.max_length is "
                f"{self.config.max_length}; make the policy with a larger one"
            )


class TransformerCritic(TransformerPolicy):
    """A transformer with one output per token, 0 everywhere at first.

    Args:
        config: the shape; its vocabulary is what is read.
        seed: of the initial weights.
    """

    def __init__(self, config: PolicyConfig, *, seed: int = 0) -> None:
        super().__init__(config, seed=seed)
        self.head = nn.Linear(config.width, 1, bias=False)
        nn.init.zeros_(self.head.weight)

    def values(
        self, input_ids: Tensor, *, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None
    ) -> Tensor:
        """Return the value of the state in which each token was chosen, the shape of ``input_ids``.

        Arguments as of `forward`.
        """
        found = self.forward(input_ids, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen).squeeze(-1)
        values = torch.roll(found, 1, -1)
        first = torch.zeros_like(input_ids, dtype=torch.bool)
        if cu_seqlens is None:
            first[:, 0] = True
        else:
            first[cu_seqlens[:-1].long()] = True
        return values.masked_fill(first, 0.0)
