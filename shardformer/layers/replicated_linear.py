"""Linear layers and embeddings with whole weights, which replace those of torch and transformers.

Products of a linear layer can run in FP8 and its weight gradients can be deferred. The weight gradients of both kinds
can be written directly to gradient buffers (`matmul/kernel.py`).
"""

from __future__ import annotations

from torch import Tensor, nn

from shardformer.matmul.kernel import WeightGradStore, embedding, has_grad_buffer
from shardformer.matmul.native import MatmulLayer
from shardformer.matmul.quantised import is_quantised
from shardformer.utils.derived_modules import derive, replace_modules


class Linear(MatmulLayer, nn.Linear):
    """`nn.Linear` with the same state.

    Attributes:
        adds_bias: False if a following activation adds the bias.
    """

    adds_bias = True

    def forward(self, input: Tensor) -> Tensor:
        """Compute what the native layer computes, with its kernel."""
        return self.linear(input, self.weight, self.bias if self.adds_bias else None)


class Conv1D(MatmulLayer, nn.Module):
    """`Conv1D` of transformers, whose weight is [in, out], with the same state; `adds_bias` as in `Linear`."""

    adds_bias = True

    def forward(self, x: Tensor) -> Tensor:
        """Compute what the native layer computes, with its kernel."""
        return self.linear(x, self.weight.t(), self.bias if self.adds_bias else None)


class Embedding(nn.Embedding):
    """`nn.Embedding` with the same state."""

    def forward(self, input: Tensor) -> Tensor:
        """Look up the rows `input` of the weight; the gradient may go to an attached buffer."""
        return embedding(input, self.weight, self.padding_idx)


def replicated_linear(module: nn.Module) -> nn.Module | None:
    """Return a `Linear` or `Conv1D` with `module`'s state, or itself; None unless it is a plain linear layer."""
    if "forward" in vars(module) or is_quantised(module._parameters.get("weight")):
        return None
    if isinstance(module, Linear | Conv1D):
        return module
    if type(module).forward is nn.Linear.forward:
        return derive(module, Linear)
    is_conv1d = type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"
    return derive(module, Conv1D) if is_conv1d else None


def replace_native_layers(model: nn.Module, with_buffers: bool = False) -> None:
    """Replace layers below `model` by those of this file; `with_buffers`: only where a gradient's buffer waits."""
    chosen = (each for each in model.modules() if not with_buffers or has_grad_buffer(each._parameters.get("weight")))
    found = {module: replicated_linear(module) or _replicated_embedding(module) for module in chosen}
    replace_modules(model, {module: new for module, new in found.items() if new is not None and new is not module})


def defer_weight_grads(model: nn.Module, store: WeightGradStore) -> None:
    """Let `store` defer the weight gradients of the linear layers of `model`."""
    replace_native_layers(model)
    for module in model.modules():
        if isinstance(module, MatmulLayer):
            module.weight_grad_store = store


def _replicated_embedding(module: nn.Module) -> nn.Module | None:
    if type(module).forward is not nn.Embedding.forward or "forward" in vars(module):
        return None
    return None if module.max_norm or module.scale_grad_by_freq or module.sparse else derive(module, Embedding)
