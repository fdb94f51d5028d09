"""Build a model of one layer of each kind, sharded for one rank of a layout, and track which of its parts runs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from booster.errors import ConfigurationError
from booster.logging import quiet
from plugins.hybrid_parallel.boosted.model import HybridParallelModel
from plugins.hybrid_parallel.boosted.model_api import WholeModel
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.distributed.mesh import build_mesh
from plugins.hybrid_parallel.planner.op_recorder import Operator, Part
from plugins.hybrid_parallel.setup.model import shard_model, wrap_model
from plugins.hybrid_parallel.setup.optimizer import build_optimizer
from plugins.hybrid_parallel.step.passes import Batch
from shardformer.peft import model_inside
from shardformer.policies.registry import policy_for
from shardformer.stages.stage import StageLayout
from shardformer.utils.module_paths import names_of_parameters, text_config

_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
_SIMPLE = (int, float, str, bool, tuple, type(None))


@dataclass(frozen=True)
class LayerList:
    """List of layers of the whole model."""

    # module paths of the list in the whole model. If the sublayers of each layer are in lists of their own, the paths
    # of those lists follow.
    paths: tuple[str, ...]
    kinds: tuple[int, ...]  # the kind of each layer; the pruned model keeps one layer of each kind, at index `kind`

    @property
    def firsts(self) -> list[int]:
        """Index of the first layer of each kind."""
        return [self.kinds.index(kind) for kind in range(max(self.kinds) + 1)]


def layer_lists(model: nn.Module, base_path: str, layout: StageLayout | None) -> list[LayerList]:
    """Find the lists of layers of a model and classify their layers into kinds.

    Two layers are of the same kind if their modules, parameters and settings are equal, except for layer indices. The
    first and the last layer of a list are kinds of their own, because they may change the input or the output.

    Args:
        base_path: path of the base model, to which the paths of `layout` are relative.

    Returns:
        The lists; empty if `layout` is None.
    """
    base, prefix = model.get_submodule(base_path), f"{base_path}." if base_path else ""
    lists = []
    for each in layout.chain if layout is not None else ():
        paths = (each.layers, *each.sublayer_lists)
        parts = [list(base.get_submodule(path)) for path in paths]
        seen: dict[tuple, int] = {}
        kinds = []
        for position, layers in enumerate(zip(*parts, strict=True)):
            end = position if position in (0, len(parts[0]) - 1) else None
            kinds.append(seen.setdefault((end, *map(_signature, layers)), len(seen)))
        lists.append(LayerList(tuple(prefix + path for path in paths), tuple(kinds)))
    return lists


def prune_layers(model: nn.Module, lists: Sequence[LayerList]) -> None:
    """Remove all but the first layer of each kind, in place."""
    for each in lists:
        for path in each.paths:
            layers = model.get_submodule(path)
            kept = [layers[index] for index in each.firsts]
            layers._modules = {str(place): layer for place, layer in enumerate(kept)}
        _shorten_config(model, len(each.kinds), each.firsts)


def name_in_skeleton(name: str, lists: Sequence[LayerList]) -> str:
    """Return the name of the parameter in the skeleton that corresponds to `name` in the whole model."""
    for each in lists:
        for path in each.paths:
            if name.startswith(f"{path}."):
                number, rest = re.match(r"(\d+)(.*)", name[len(path) + 1 :]).groups()
                return f"{path}.{each.kinds[int(number)]}{rest}"
    return name


def _signature(layer: nn.Module) -> tuple:
    return tuple(
        (
            name,
            type(module).__qualname__,
            tuple((key, tuple(each.shape), each.requires_grad) for key, each in module.named_parameters(recurse=False)),
            tuple(sorted((key, str(value)) for key, value in _settings(module).items())),
        )
        for name, module in layer.named_modules()
    )


def _settings(module: nn.Module) -> Mapping[str, object]:
    return {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, _SIMPLE)
        and not key.startswith("_")
        and not re.search(r"(layer|block).*(idx|id|index|number)", key)
    }


def _shorten_config(model: nn.Module, count: int, keep: Sequence[int]) -> None:
    """Shorten settings with one entry per layer (such as `layer_types`), and update the numbers of layers."""
    for module in model.modules():
        for key in _COUNTS:
            if vars(module).get(key) == count:
                setattr(module, key, len(keep))
    copied: dict[int, Any] = {}  # the user's own configuration may build further models
    configs = {}
    for module in model.modules():
        if vars(module).get("config") is not None:
            module.config = deepcopy(module.config, copied)
            configs[id(module.config)] = module.config
    for config in configs.values():
        for key, value in list(vars(config).items()):
            if isinstance(value, list | tuple) and len(value) == count and count > 1:
                setattr(config, key, type(value)(value[index] for index in keep))
            elif key in _COUNTS and value == count:
                setattr(config, key, len(keep))


class PartListener(Protocol):
    """Listener that is notified which part of a model runs."""

    def enter(self, part: Part) -> None:
        """Handle the start of `part`."""

    def give(self, hidden: Tensor) -> None:
        """Handle the hidden state that the running part returns."""


def build_proxy_model(
    build: Callable[[], nn.Module],
    config: HybridParallelConfig,
    device: torch.device | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
) -> tuple[nn.Module, list[LayerList], HybridParallelModel]:
    """Build the model with one layer of each kind, shard it for this rank, and wrap it.

    Args:
        build: builds the whole model; called on the meta device.
        device: device on which the model gets random values; None to leave it on the meta device.
        optimizer: builds an optimizer, which is wrapped too; None for no optimizer.

    Returns:
        The sharded module, its lists of layers by their paths inside of peft's wrapper, and the wrapped model.
    """
    mesh = build_mesh(
        1, config.parallel.ep_size, 1, config.parallel.tp_size, device=device, ep_size=config.parallel.ep_size
    )
    with quiet(), torch.device("meta"):
        model = build()
    try:
        inside = model_inside(model)
        policy = policy_for(inside)
        policy.set_model(inside)
        lists = layer_lists(inside, policy.base_path, policy.stages)
        prune_layers(inside, lists)
    except ValueError as error:
        if config.parallel.tp_size > 1:
            raise ConfigurationError(str(error)) from error
        lists = []  # without a policy, any model runs on a single rank
    optim = optimizer(model.parameters()) if optimizer is not None else None
    names, groups = names_of_parameters(model), [list(model.parameters())]
    origin = WholeModel.of(model)
    shared = shard_model(model, config, mesh)
    if device is not None:
        give_memory(model, device)
        give_values(model)
    model.train()
    built = wrap_model(model, config, mesh, 0, origin, shared)
    if optim is not None:
        build_optimizer(optim, groups, names, built, config, mesh)
    return model, lists, built.model


def give_memory(module: nn.Module, device: torch.device | str = "cpu") -> None:
    """Replace meta tensors by uninitialized tensors on `device`, in place; attributes of parameters are kept."""
    moved: dict[int, tuple[Tensor, Tensor]] = {}  # id -> (old tensor, kept alive so that its id stays unique; new one)
    for each in module.modules():
        for held in (each._parameters, each._buffers):
            for name, tensor in held.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in moved:
                    new = torch.empty_like(tensor, device=device)
                    if isinstance(tensor, nn.Parameter):
                        new = nn.Parameter(new, tensor.requires_grad)
                    new.__dict__.update(tensor.__dict__)
                    moved[id(tensor)] = tensor, new
                held[name] = moved[id(tensor)][1]


@torch.no_grad()
def give_values(module: nn.Module) -> None:
    """Set parameters to small random values and buffers to ones, so that no pass gets slow or undefined values."""
    for param in module.parameters():
        param.normal_(std=0.02)
    for buffer in module.buffers():
        buffer.fill_(1)


def training_loss(wrapped: HybridParallelModel, batch: dict[str, Tensor]) -> Tensor:
    """Compute the loss of a step as `execute_pipeline` does."""
    made = Batch(wrapped, batch, batch)
    loss = made.step_loss([batch])
    with loss.reading(wrapped.unwrap()):
        return loss.share(wrapped.unwrap()(**made.inputs_of(batch, loss)), 0)


def watch_layers(module: nn.Module, lists: Sequence[LayerList], listener: PartListener) -> list[Any]:
    """Register hooks that tell `listener` which part runs, in forward and backward passes; return their handles."""
    hooks, module = [], model_inside(module)
    for number, each in enumerate(lists):
        layers = [list(module.get_submodule(path)) for path in each.paths]
        for kind, parts in enumerate(zip(*layers, strict=True)):
            for part in parts:
                hooks.append(part.register_forward_pre_hook(_entering(listener, number, kind), with_kwargs=True))
            hooks.append(parts[-1].register_forward_hook(_leaving(listener, number, kind)))
    return hooks


def _entering(listener: PartListener, number: int, kind: int) -> Callable:
    def enter(_: nn.Module, args: tuple, kwargs: dict) -> None:
        if kind == 0:
            hidden = args[0] if args else next(iter(kwargs.values()))
            if isinstance(hidden, Tensor) and hidden.requires_grad:
                hidden.register_hook(lambda grad: listener.enter(("gap", number)))
        listener.enter(("layer", number, kind))

    return enter


def _leaving(listener: PartListener, number: int, kind: int) -> Callable:
    def leave(_: nn.Module, __: tuple, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if isinstance(hidden, Tensor):
            if hidden.requires_grad:
                hidden.register_hook(lambda grad: listener.enter(("layer", number, kind)))
            listener.give(hidden)
        listener.enter(("gap", number + 1))

    return leave


# Heads with one label per sample; all other text heads have one per token.
_ONE_LABEL = ("SequenceClassification", "ImageClassification", "AudioClassification", "MultipleChoice")


def batch_of(model: nn.Module, rows: int, length: int, device: str = "cpu") -> dict[str, Tensor]:
    """Make a batch of zeros: `rows` samples of `length` tokens, or `rows` images, with labels, on `device`."""
    model = model_inside(model)
    name, config = type(model).__name__, model.config
    positions = _positions(config)
    if positions is not None and length > positions:
        raise ConfigurationError(
            f"samples of {length} tokens are longer than the {positions} positions of {name}; use {positions} or fewer"
        )
    takes = inspect.signature(model.forward).parameters
    ids = torch.zeros(rows, length, dtype=torch.long, device=device)
    per_sample = torch.zeros(rows, dtype=torch.long, device=device)
    batch: dict[str, Any] = {}
    if "input_ids" in takes:
        batch["input_ids"] = ids.unsqueeze(1).expand(rows, 2, length) if "MultipleChoice" in name else ids
    elif "pixel_values" in takes:
        vision = getattr(config, "vision_config", config)
        size, channels = getattr(vision, "image_size", 224), getattr(vision, "num_channels", 3)
        sides = size if isinstance(size, tuple | list) else (size, size)
        dtype = next(model.parameters()).dtype
        batch["pixel_values"] = torch.zeros(rows, channels, *sides, dtype=dtype, device=device)
    else:
        raise ConfigurationError(
            f"{name} reads neither text nor images, and the planner knows no other batch; plan a model of its family "
            "that does"
        )
    if "start_positions" in takes:
        return {**batch, "start_positions": per_sample, "end_positions": per_sample}
    if "labels" not in takes:
        raise ConfigurationError(f"{name} has no loss to train with; give a head with --head, as one ForCausalLM")
    return {**batch, "labels": per_sample if any(head in name for head in _ONE_LABEL) else ids}


def _positions(config: Any) -> int | None:
    """Return the number of positions of a model; None if its configuration does not give one."""
    text = text_config(config)
    found = [getattr(text, name, None) for name in ("max_position_embeddings", "n_positions")]
    return next((count for count in found if isinstance(count, int) and count > 0), None)


@dataclass(frozen=True)
class Packing:
    """Rows of several documents each."""

    document: float  # mean number of tokens of a document, weighted by tokens; a row is one sample
    length: int  # tokens of a row
    # whether attention computes the pairs of tokens of one document alone, as flash-attn does. All other kernels
    # compute all pairs of a row under a mask.
    is_varlen: bool

    @property
    def share(self) -> float:
        """Part of the pairs of tokens of a row that are of one document."""
        return min(1.0, self.document / self.length)

    def executed(self, operator: Operator) -> Operator:
        """Return an operator with the FLOPs that a device computes for packed rows."""
        if operator.kind != "attention":
            return operator
        # A kernel that gets a mask does not know that half of it is empty.
        factor = self.share if self.is_varlen else 2.0 if operator.is_causal else 1.0
        return replace(operator, flops=operator.flops * factor)

    def useful(self, operator: Operator) -> float:
        """Return the FLOPs of an operator between tokens of one document."""
        return operator.flops * (self.share if operator.kind == "attention" else 1.0)

    def mask_bytes(self, rows: int, itemsize: int) -> tuple[int, int]:
        """Return the bytes of the mask of a micro-batch, and those that each attention layer saves of it.

        The mask is boolean, [rows, 1, length, length]; torch saves it in the dtype of the scores with every layer.
        """
        pairs = 0 if self.is_varlen else rows * self.length**2
        return pairs, pairs * itemsize


KINDS = ("nf4", "nf4-double", "int8")
_BLOCK, _NESTED_BLOCK = 64, 256  # values that share a scale, and scales that share one (bitsandbytes' defaults)
_CODES, _NESTED_CODES = 16 * 4, 256 * 4  # bytes of the tables of values, fp32


@dataclass(frozen=True)
class QuantisedBase:
    """How the linear layers of a frozen base are stored."""

    kind: str  # "nf4", "nf4-double" (scales in 8 bit too) or "int8"
    # parts of the paths of modules that stay as they are; None for the head and what is tied, as in transformers
    skipped: tuple[str, ...] | None = None

    def names(self, model: nn.Module) -> frozenset[str]:
        """Return the names of the weights of a whole model, without peft's wrapper, that are quantised."""
        skipped = self._skipped(model)
        found = {
            f"{path}.weight": module.weight
            for path, module in model.named_modules()
            if type(module).__name__ in ("Linear", "Conv1D") and not _is_skipped(path, skipped) and "lora_" not in path
        }
        if trained := next((name for name, weight in found.items() if weight.requires_grad), None):
            raise ConfigurationError(
                f"{trained} is to be quantised to {self.kind}, and only frozen weights can be; give --adapter"
            )
        return frozenset(found)

    def _skipped(self, model: nn.Module) -> tuple[str, ...]:
        if self.skipped is not None:
            return self.skipped
        from transformers.quantizers.base import get_keys_to_not_convert

        return tuple(get_keys_to_not_convert(model))

    def stored_bytes(self, elements: int, outputs: int) -> int:
        """Return the bytes of a weight or shard with scales and tables; `outputs`: its number of output features."""
        if self.kind == "int8":
            return elements + 4 * outputs
        scales = -(-elements // _BLOCK)
        packed = (elements + 1) // 2 + _CODES
        if self.kind == "nf4":
            return packed + 4 * scales
        return packed + scales + 4 * -(-scales // _NESTED_BLOCK) + _NESTED_CODES + 4  # and the offset of all scales


def quantised_by(config: Any, kind: str | None = None) -> QuantisedBase | None:
    """Return how a configuration's `quantization_config`, or `kind`, stores the base; None for no quantisation."""
    given = getattr(config, "quantization_config", None)
    if kind is not None or given is None:
        return None if kind is None else QuantisedBase(kind)
    values: Mapping[str, Any] = given if isinstance(given, Mapping) else given.to_dict()
    skipped = values.get("llm_int8_skip_modules")
    skipped = None if skipped is None else tuple(skipped)
    if values.get("load_in_8bit"):
        return QuantisedBase("int8", skipped)
    if values.get("load_in_4bit"):
        return QuantisedBase("nf4-double" if values.get("bnb_4bit_use_double_quant") else "nf4", skipped)
    raise ConfigurationError(
        f"the planner does not know quantisation by {values.get('quant_method')}; use {', '.join(KINDS)}, or a "
        "configuration without quantisation"
    )


def with_adapter(build: Callable[[], nn.Module], adapter: Any) -> Callable[[], nn.Module]:
    """Return a function that builds the model of `build` with an adapter of peft, a `PeftConfig`."""
    return partial(_adapted, build, adapter)


def _adapted(build: Callable[[], nn.Module], adapter: Any) -> nn.Module:
    import copy

    from peft import get_peft_model

    return get_peft_model(build(), copy.deepcopy(adapter))  # which takes over defaults of the model


def _is_skipped(path: str, skipped: tuple[str, ...]) -> bool:
    return any(f".{path}.".find(f".{part}.") >= 0 for part in skipped)
