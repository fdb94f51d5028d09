"""What a boosted model tells of the whole model: the names of its parameters, their number, its embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from plugins.hybrid_parallel.boosted.facade import OnAnotherStage
from plugins.hybrid_parallel.boosted.surface import ModelSurface
from plugins.hybrid_parallel.boosted.whole_model import WholeModel
from shardformer.shard_spec import spec_of
from shardformer.stages.placeholders import StagePlaceholder


class WholeModelView(ModelSurface):
    """A boosted model under the names and with the sizes of the model that `boost` was given.

    Attributes:
        origin: what is known of that model.
    """

    origin: WholeModel

    def take_whole_states(self) -> None:
        """From now on, let the wrapped model take its part of state dicts of the whole model, and those of shards.

        Tied parameters may have the names that this rank holds or the names that the whole model lists.
        """
        origin = self.origin

        def take_own_part(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
            own = module.state_dict(keep_vars=True)
            held_as = {origin.listed_as[name]: name for name in own if name in origin.listed_as}
            for given in [each for each in state if each.startswith(prefix)]:
                name = given.removeprefix(prefix)
                here = name if name in own else held_as.get(name, name)
                if here in own:
                    state[prefix + here] = _own_part(state.pop(given), own[here])
                elif name in origin.names:  # of another stage
                    del state[given]

        self.module.register_load_state_dict_pre_hook(take_own_part)

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


def _own_part(value: Any, held: Any) -> Any:
    """Return the shard of a whole tensor that is held here as `held`; anything else as it is."""
    if not isinstance(value, Tensor) or value.shape == held.shape:
        return value
    spec = spec_of(held)
    return spec.shard(value) if tuple(value.shape) == spec.full_shape else value
