"""Record of which features each linear layer reads, by one forward pass and automatic differentiation.

The output of every linear layer is made a leaf of the graph of derivatives, so that what a layer reads leads back to
the outputs of the layers just before it, and no further. The gradient of the first half of a layer's inputs, and that
of the second half, then show which output features of those layers each half depends on. A cut over two ranks is exact
where the halves are independent; the operators in between (softmax, rotary tables, gates) need not be known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardformer.layers.linear import out_features
from shardformer.matmul.native import is_linear
from shardformer.utils.caches import CACHE_NAMES

Halves = tuple[Tensor, Tensor]
_CACHES = (*CACHE_NAMES, "mems")  # of a rank's own heads


@dataclass
class Reads:
    """What one module reads directly, without other linear layers in between.

    Attributes:
        sources: path of a linear layer -> for either half of what the module reads, which output features [features]
            of the layer it depends on.
        parameters: name of a parameter -> for either half, which of its elements [shape] it depends on.
        num_features: size of the last dim of what the module reads.
    """

    sources: dict[str, Halves] = field(default_factory=dict)
    parameters: dict[str, Halves] = field(default_factory=dict)
    num_features: int = 0


@dataclass
class Recording:
    """What the modules of a model read in one forward pass.

    Attributes:
        linears: path of each linear layer that was called, in order of the first call -> what it reads.
        dropouts: path of each dropout module -> the linear layers that its input depends on.
        outputs: what the outputs of the model read.
    """

    linears: dict[str, Reads] = field(default_factory=dict)
    dropouts: dict[str, set[str]] = field(default_factory=dict)
    outputs: Reads = field(default_factory=Reads)


def record(model: nn.Module, forward: Callable[[], Any]) -> Recording:
    """Run `forward` once and return what the modules of `model` read; weights and gradients stay as they are.

    Args:
        model: the whole model; its weights must be as different from each other as trained ones are.
        forward: calls the model, and returns its outputs.
    """
    watch = _Watch(model)
    try:
        with torch.enable_grad():
            outputs = forward()
    finally:
        watch.remove()
    return watch.found(outputs)


class _Watch:
    """Hooks on the linear layers and dropouts of a model, and what they have seen.

    Args:
        model: the model to watch.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self._inputs: dict[str, list[Tensor]] = {}
        self._leaves: dict[str, list[Tensor]] = {}
        self._dropped: dict[str, list[Tensor]] = {}
        self._hooks = []
        for path, module in model.named_modules():
            if is_linear(module):
                self._hooks.append(module.register_forward_pre_hook(self._reader(self._inputs, path)))
                self._hooks.append(module.register_forward_hook(self._cut(path)))
            elif isinstance(module, nn.Dropout):
                self._hooks.append(module.register_forward_pre_hook(self._reader(self._dropped, path)))

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()

    def found(self, outputs: Any) -> Recording:
        """Return what was seen, once the forward pass has returned `outputs`."""
        floating = [leaf for leaf in tree_leaves(_plain(outputs)) if isinstance(leaf, Tensor) and leaf.requires_grad]
        result = Recording(outputs=self._reads(floating, halved=False))
        for path, inputs in self._inputs.items():
            result.linears[path] = self._reads(inputs, halved=True)
        for path, inputs in self._dropped.items():
            result.dropouts[path] = set(self._reads(inputs, halved=False).sources)
        return result

    def _reader(self, into: dict[str, list[Tensor]], path: str) -> Callable[..., None]:
        def read(_: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], Tensor):
                # A clone: the model may change the tensor in place afterwards.
                into.setdefault(path, []).append(args[0].clone())

        return read

    def _cut(self, path: str) -> Callable[..., Tensor]:
        def cut(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
            leaf = output.detach().requires_grad_()
            self._leaves.setdefault(path, []).append(leaf)
            return leaf.clone()  # operators in place are not allowed on a leaf

        return cut

    def _reads(self, tensors: list[Tensor], halved: bool) -> Reads:
        """Differentiate the tensors, or either half of their features, by all leaves and parameters."""
        reads = Reads(num_features=tensors[0].shape[-1] if tensors and tensors[0].dim() else 0)
        paths = [(path, leaf) for path, leaves in self._leaves.items() for leaf in leaves]
        wanted = [leaf for _, leaf in paths] + list(self._parameters.values())
        for tensor in (each for each in tensors if each.requires_grad):
            for half in (0, 1):
                direction = torch.randn_like(tensor)
                if halved:
                    middle = tensor.shape[-1] // 2
                    direction[..., slice(middle, None) if half == 0 else slice(None, middle)] = 0
                elif half == 1:
                    continue
                grads = torch.autograd.grad(tensor, wanted, direction, retain_graph=True, allow_unused=True)
                for (path, leaf), grad in zip(paths, grads, strict=False):
                    if grad is not None and leaf.dim():
                        self._add(reads.sources, path, half, (grad != 0).flatten(0, -2).any(0))
                for name, grad in zip(self._parameters, grads[len(paths) :], strict=True):
                    if grad is not None:
                        self._add(reads.parameters, name, half, grad != 0)
        return reads

    @staticmethod
    def _add(into: dict[str, Halves], name: str, half: int, mask: Tensor) -> None:
        if mask.any():
            found = into.setdefault(name, (torch.zeros_like(mask), torch.zeros_like(mask)))
            found[half].logical_or_(mask)


def num_outputs_of(model: nn.Module, path: str) -> int:
    """Return the output features of the linear layer at `path`."""
    return out_features(model.get_submodule(path))


def _plain(outputs: Any) -> Any:
    """Return the tensors of a model's outputs as plain containers, nested ones too; caches of keys are left out."""
    if isinstance(outputs, Mapping):
        return [_plain(value) for name, value in outputs.items() if name not in _CACHES]
    if isinstance(outputs, list | tuple):
        return [_plain(value) for value in outputs]
    if isinstance(outputs, SimpleNamespace) or dataclasses.is_dataclass(outputs):
        return _plain(vars(outputs))
    return outputs if isinstance(outputs, Tensor) else None
