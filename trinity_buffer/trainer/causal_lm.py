"""A causal language model of transformers, as a trainer asks for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typing_extensions import override

from trinity_buffer.errors import CheckpointError, InvalidArgumentError
from trinity_buffer.extras import extra
from trinity_buffer.trainer.parallel import is_sharded, unwrapped
from trinity_buffer.trainer.policy import TokenScores, all_finite
from trinity_buffer.trainer.token_scores import entropy_changes, token_scores

WEIGHTS_FILE = "model.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"


class CausalLM:
    """Makes a policy of a causal language model; `save` writes what ``from_pretrained`` reads.

    Of a model with an adapter (`peft`) that is the adapter alone: whoever restores it brings the
    base.

    Args:
        model: of transformers, or a `PeftModel` of one, perhaps in a `DistributedDataParallel`; it
            is trained in place.

    Raises:
        InvalidArgumentError: its weights are sharded.
    """

    file_name = "policy"

    def __init__(self, model: Any) -> None:
        if any(map(is_sharded, model.parameters())):
            raise InvalidArgumentError(
                f"a {type(model).__name__} whose weights are sharded (FSDP2): a `Trainer` writes "
                "no sharded checkpoints yet; train it in a loop of your own with "
                "`tb.token_scores`, or use DistributedDataParallel"
            )
        self.model = model
        self._own = unwrapped(model)

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

    def save(self, path: str | Path) -> None:
        """Write config and weights into the new folder ``path``.

        The bytes depend on the model alone; whoever commits the checkpoint makes it durable.
        """
        folder = Path(path)
        folder.mkdir()
        if _is_adapted(self._own):
            _save_adapter(self._own, folder)
            return
        self._own.config.save_pretrained(folder)
        names = self._names()
        weights = self._own.state_dict()
        kept = {name: weights[name].detach().cpu().contiguous() for name in set(names.values())}
        save_file(kept, folder / WEIGHTS_FILE, metadata={"format": "pt"})

    def restore(self, path: str | Path) -> None:
        """Take the weights that `save` wrote into ``path``.

        Raises:
            CheckpointError: they are not there, not of this model, or not finite.
        """
        file = Path(path) / (ADAPTER_FILE if _is_adapted(self._own) else WEIGHTS_FILE)
        try:
            kept = load_file(file)
            if not all_finite(kept.values()):
                raise CheckpointError(f"{file}: the weights hold NaN or Inf; use an older one")
            self._take(kept)
        except (OSError, SafetensorError, KeyError, RuntimeError) as error:
            raise CheckpointError(
                f"{file}: no weights of a {type(self._own).__name__} of this shape ({error})"
            ) from error

    def frozen(self) -> CausalLM:
        """Return the policy as it is now; of one with an adapter, the policy without it.

        That costs no memory, and is the same as long as the adapter is fresh.
        """
        return _Unadapted(self.model) if _is_adapted(self._own) else CausalLM(deepcopy(self._own))

    def _take(self, kept: Mapping[str, Tensor]) -> None:
        if _is_adapted(self._own):
            missing = set(_adapter_of(self._own)) ^ set(kept)
            if missing:
                raise KeyError(min(missing))
            name = self._own.active_adapter
            extra("peft", "lora").set_peft_model_state_dict(self._own, kept, adapter_name=name)
        else:
            self._own.load_state_dict({n: kept[first] for n, first in self._names().items()})

    def _names(self) -> dict[str, str]:
        """Return for each name of a weight the first name of it: tied weights have several."""
        first: dict[tuple[int, Any], str] = {}
        return {
            name: first.setdefault((value.data_ptr(), value.shape), name)
            for name, value in self._own.state_dict().items()
        }


class _Unadapted(CausalLM):
    """A model as it is without its adapter."""

    @override
    def scores(self, microbatch: Mapping[str, Any]) -> TokenScores:
        """Return what the base model says."""
        with self._own.disable_adapter():
            return super().scores(microbatch)


def _is_adapted(model: Any) -> bool:
    return hasattr(model, "disable_adapter")  # a PeftModel has it, a plain model has not


def _adapter_of(model: Any) -> dict[str, Tensor]:
    """Return the weights of the active adapter, under the names that peft gives them."""
    found: dict[str, Tensor] = extra("peft", "lora").get_peft_model_state_dict(
        model, adapter_name=model.active_adapter, save_embedding_layers=False
    )
    return found


def _save_adapter(model: Any, folder: Path) -> None:
    """Write the active adapter and its configuration, as peft and inference servers read them."""
    model.peft_config[model.active_adapter].save_pretrained(folder)
    kept = {name: w.detach().cpu().contiguous() for name, w in _adapter_of(model).items()}
    save_file(kept, folder / ADAPTER_FILE, metadata={"format": "pt"})


def reference_of(policy: Any) -> Any:
    """Return what divergences of ``policy`` are measured from: the policy as it is now, frozen."""
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
