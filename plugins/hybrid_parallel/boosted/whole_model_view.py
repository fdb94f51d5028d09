"""What a boosted model tells of the whole model: the names of its parameters, their number, its embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from plugins.hybrid_parallel.boosted.facade import OnAnotherStage
from plugins.hybrid_parallel.boosted.surface import ModelSurface
from plugins.hybrid_parallel.boosted.whole_model import WholeModel
from shardformer.stages.placeholders import StagePlaceholder


class WholeModelView(ModelSurface):
    """A boosted model under the names and with the sizes of the model that `boost` was given.

    Attributes:
        origin: what is known of that model.
    """

    origin: WholeModel

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters by the names that the whole model lists.

        A tied parameter that a stage holds as its head's weight is listed under the embedding's name, as in the
        unsharded model. Code that chooses parameters by name thus chooses the same ones on every stage.
        """
        listed_as = self.origin.listed_as if remove_duplicate else {}
        for name, param in super().named_parameters("", recurse, remove_duplicate):
            yield (f"{prefix}." if prefix else "") + listed_as.get(name, name), param

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load this rank's state dict; tied parameters may have the names that it holds or the names that it lists."""
        own = self.module.state_dict(keep_vars=True)
        held_as = {self.origin.listed_as[name]: name for name in own if name in self.origin.listed_as}
        if any(name not in own and name in held_as for name in state_dict):
            state_dict = {name if name in own else held_as.get(name, name): each for name, each in state_dict.items()}
        return super().load_state_dict(state_dict, *args, **kwargs)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the first parameter on this rank, as transformers has it."""
        return next((param.dtype for param in self.module.parameters() if param.is_floating_point()), torch.float32)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Return the number of parameters of the whole model, as it was given to `boost`."""
        if not self.origin.sizes:
            return self.module.num_parameters(only_trainable, exclude_embeddings)
        return self.origin.sizes[only_trainable, exclude_embeddings]

    def get_input_embeddings(self) -> nn.Module:
        """Return this rank's shard of the input embeddings; on a stage without them, a module that refuses any use."""
        found = self.module.get_input_embeddings()
        return OnAnotherStage("input embedding") if isinstance(found, StagePlaceholder) else found

    def get_output_embeddings(self) -> nn.Module | None:
        """Return this rank's shard of the head; on a stage without it, a module that refuses any use."""
        found = self.module.get_output_embeddings()
        return OnAnotherStage("output embedding") if isinstance(found, StagePlaceholder) else found
