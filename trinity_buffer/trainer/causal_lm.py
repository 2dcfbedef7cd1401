"""A causal language model of transformers, as a trainer asks for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from typing_extensions import override

from trinity_buffer.errors import CheckpointError, InvalidArgumentError
from trinity_buffer.lazy import extra
from trinity_buffer.trainer.last_hidden import difference, last_hidden, noise_of
from trinity_buffer.trainer.parallel import is_sharded, opened, part_like, resharded, unwrapped
from trinity_buffer.trainer.policy import TokenScores, all_finite, in_eval_mode
from trinity_buffer.trainer.token_scores import entropy_changes, token_scores

WEIGHTS, ADAPTER = "model", "adapter_model"
"""How the files of the weights begin."""


class CausalLM:
    """Makes a policy of a causal language model; `save` writes what ``from_pretrained`` reads.

    Of a model with an adapter (`peft`) that is the adapter alone: its base has to be there when
    it is restored.

    Args:
        model: of transformers, or a `PeftModel` of one, perhaps in a `DistributedDataParallel`, or
            with weights that the ranks hold in parts (``fully_shard``, FSDP2); it is trained in
            place.
    """

    file_name = "policy"

    def __init__(self, model: Any) -> None:
        self.model = model
        self._own = unwrapped(model)
        resharded(model)

    @property
    def takes(self) -> frozenset[str]:
        """What it reads that few rows bring: the temperature, and what its model says it takes."""
        return frozenset({"temperature", *getattr(self._own, "takes", ())})

    @property
    def vocabulary(self) -> int | None:
        """How many tokens the model has; None: its configuration does not say."""
        size: int | None = getattr(self._own.config, "vocab_size", None)
        if size is None:
            return None
        return max(size, getattr(self._own.get_input_embeddings(), "num_embeddings", size))

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the weights."""
        return self.model.parameters()  # type: ignore[no-any-return]  # a model of transformers

    def scores(self, microbatch: Mapping[str, Any]) -> TokenScores:
        """Return log-probability and entropy of every token; see `token_scores`."""
        return token_scores(self.model, microbatch)

    def entropy_changes(self, microbatch: Mapping[str, Any]) -> Tensor:
        """Return the expected change of entropy at every token; see `entropy_changes`."""
        return entropy_changes(self.model, microbatch)

    @property
    def is_adapted(self) -> bool:
        """Whether its adapter is all that is saved."""
        return hasattr(self._own, "disable_adapter")  # a PeftModel has it, a plain model has not

    @property
    def stem(self) -> str:
        """How the files of its weights begin."""
        return ADAPTER if self.is_adapted else WEIGHTS

    def held(self) -> dict[str, Tensor]:
        """Return the weights to save by name, as this rank holds them; tied weights once."""
        resharded(self.model)
        if self.is_adapted:
            return _adapter_of(self._own)
        first: dict[Any, str] = {}
        parameters = dict(self._own.named_parameters(remove_duplicate=False))
        weights = self._own.state_dict()
        for name, weight in weights.items():
            # A part may be empty, and then lies nowhere.
            in_parts = is_sharded(weight)
            place = id(parameters[name]) if in_parts else (weight.data_ptr(), weight.shape)
            first.setdefault(place, name)
        return {name: weights[name] for name in first.values()}

    def unsaved(self) -> dict[str, nn.Parameter]:
        """Return the trainable weights that `save` leaves out: those beside the active adapter."""
        if not self.is_adapted:
            return {}
        weights = dict(self._own.named_parameters(remove_duplicate=False))
        saved = {id(weight) for weight in _adapter_of(self._own, weights).values()}
        trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
        return {name: weight for name, weight in trained.items() if id(weight) not in saved}

    def save(self, path: str | Path) -> None:
        """Write config and weights into the new folder ``path``.

        The bytes depend on the model alone; the commit of the checkpoint syncs them to the disk.
        """
        Path(path).mkdir()
        self.save_config(path)
        tensors = {name: weight.detach().cpu().contiguous() for name, weight in self.held().items()}
        save_file(tensors, Path(path) / f"{self.stem}.safetensors", metadata={"format": "pt"})

    def save_config(self, path: str | Path) -> None:
        """Write all but the weights into the folder ``path``."""
        if self.is_adapted:
            self._own.peft_config[self._own.active_adapter].save_pretrained(path)
        else:
            self._own.config.save_pretrained(path)

    def restore(self, path: str | Path) -> None:
        """Take the weights that any number of ranks wrote into ``path``.

        Raises:
            CheckpointError: they are not there, not of this model, or not finite.
        """
        file = Path(path) / f"{self.stem}.safetensors"
        try:
            with opened(Path(path), self.stem) as tensors:
                self._take(tensors, file)
        except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"{file}: no weights of a {type(self._own).__name__} of this shape ({error})"
            ) from error

    def frozen(self) -> CausalLM:
        """Return the policy as it is now; of one with an adapter, the policy without it.

        That costs no memory, and is the same as long as the adapter is fresh.

        Raises:
            InvalidArgumentError: the adapter changes the model already, or its making has changed
                the weights below it (PiSSA); or ranks hold the weights in parts.
        """
        if self.is_adapted:
            self._require_fresh_adapter()
            return _Unadapted(self.model)
        if any(map(is_sharded, self.parameters())):
            raise InvalidArgumentError(
                "the algorithm measures a divergence from the model as it is now, and a model that "
                "ranks hold in parts (FSDP2) is not copied: give reference=, sharded likewise"
            )
        return CausalLM(deepcopy(self._own))

    def _require_fresh_adapter(self) -> None:
        """Raise unless the model scores as it does without its adapter."""
        with torch.no_grad(), in_eval_mode(self._own):
            # Low ids: every vocabulary has them.
            ids = torch.tensor([[3, 4, 5, 6, 7, 8]], device=next(self.parameters()).device)
            batch = {"input_ids": ids % (self.vocabulary or 9)}
            adapted, _ = last_hidden(self.model, batch)
            with self._own.disable_adapter():
                base, _ = last_hidden(self.model, batch)
        if difference(adapted, base) > noise_of(base):
            raise InvalidArgumentError(
                "the algorithm measures a divergence from the model as it is now, and without its "
                "adapter it is another one: the adapter is trained already, or its making has "
                "changed the weights below it (init_lora_weights='pissa' and the like do): give "
                "reference=, such as a copy of the model (copy.deepcopy)"
            )

    def _take(self, saved: Mapping[str, Tensor], file: Path) -> None:
        """Copy what was saved over what is held, one tensor after the other."""
        held = self.held()
        if missing := held.keys() ^ saved.keys():
            raise KeyError(min(missing))
        taken = {}
        for name, weight in held.items():
            whole = saved[name]
            if whole.shape != weight.shape:
                raise ValueError(f"{name} is of {list(whole.shape)}, not of {list(weight.shape)}")
            if not all_finite([whole]):
                raise CheckpointError(f"{file}: {name} holds NaN or Inf; use an older one")
            taken[name] = part_like(whole, weight)
            if not self.is_adapted:
                with torch.no_grad():
                    weight.copy_(taken.pop(name))
        if self.is_adapted:
            adapter = self._own.active_adapter
            extra("peft", "lora").set_peft_model_state_dict(self._own, taken, adapter_name=adapter)


class _Unadapted(CausalLM):
    """A model as it is without its adapter."""

    @override
    def scores(self, microbatch: Mapping[str, Any]) -> TokenScores:
        """Return the scores of the base model."""
        with self._own.disable_adapter():
            return super().scores(microbatch)


def _adapter_of(model: Any, weights: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return the weights of the active adapter, under the names that peft gives them.

    Args:
        weights: of the model, by name; None: what its `state_dict` returns.
    """
    adapter: dict[str, Tensor] = extra("peft", "lora").get_peft_model_state_dict(
        model, weights, adapter_name=model.active_adapter, save_embedding_layers=False
    )
    return adapter


def reference_of(policy: Any) -> Any:
    """Return the reference of divergences: a frozen copy of ``policy`` as it is now."""
    return policy.frozen() if isinstance(policy, CausalLM) else deepcopy(policy)


def policy_of(model: Any) -> Any:
    """Return ``model`` if it is a `Policy`, else a policy made of it.

    Raises:
        InvalidArgumentError: it is no model.
    """
    if isinstance(model, type) or not (hasattr(model, "scores") or hasattr(model, "parameters")):
        raise InvalidArgumentError(
            f"{model!r:.80} is no model: give the Trainer one that is loaded, as by "
            "`AutoModelForCausalLM.from_pretrained`, or a `Policy`"
        )
    return model if hasattr(model, "scores") else CausalLM(model)
