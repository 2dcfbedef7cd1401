"""A causal language model of transformers, as a trainer asks for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from trinity_buffer.errors import CheckpointError
from trinity_buffer.trainer.policy import TokenScores, all_finite
from trinity_buffer.trainer.token_scores import entropy_changes, token_scores

WEIGHTS_FILE = "model.safetensors"


class CausalLM:
    """Makes a policy of a causal language model; `save` writes what ``from_pretrained`` reads.

    Args:
        model: of transformers; it is trained in place.
    """

    file_name = "policy"

    def __init__(self, model: Any) -> None:
        self.model = model

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
        self.model.config.save_pretrained(folder)
        names = self._names()
        weights = self.model.state_dict()
        kept = {name: weights[name].detach().cpu().contiguous() for name in set(names.values())}
        save_file(kept, folder / WEIGHTS_FILE, metadata={"format": "pt"})

    def restore(self, path: str | Path) -> None:
        """Take the weights that `save` wrote into ``path``.

        Raises:
            CheckpointError: they are not there, not of this model, or not finite.
        """
        file = Path(path) / WEIGHTS_FILE
        try:
            kept = load_file(file)
            if not all_finite(kept.values()):
                raise CheckpointError(f"{file}: the weights hold NaN or Inf; use an older one")
            self.model.load_state_dict({n: kept[first] for n, first in self._names().items()})
        except (OSError, SafetensorError, KeyError, RuntimeError) as error:
            raise CheckpointError(
                f"{file}: no weights of a {type(self.model).__name__} of this shape ({error})"
            ) from error

    def _names(self) -> dict[str, str]:
        """Return for each name of a weight the first name of it: tied weights have several."""
        first: dict[tuple[int, Any], str] = {}
        return {
            name: first.setdefault((value.data_ptr(), value.shape), name)
            for name, value in self.model.state_dict().items()
        }


def policy_of(model: Any) -> Any:
    """Return ``model`` if it is a `Policy`, else a policy made of it."""
    return model if hasattr(model, "scores") else CausalLM(model)
