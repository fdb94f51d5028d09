"""Adapters in the directory format of peft: `adapter_config.json` and `adapter_model.safetensors`.

The directory holds the weights of the adapter and whatever else is trained with it (biases, copies of modules), but
not the base model. peft determined these tensors and their names on the whole model, before it was sharded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster.errors import ConfigurationError
from booster.plugin import write_text
from plugins.hybrid_parallel.boosted.model import HybridParallelModel
from plugins.hybrid_parallel.checkpoint.checks import check_adapters
from plugins.hybrid_parallel.checkpoint.global_tensor import Gather, local_tensors, open_for_messages, receive, send
from plugins.hybrid_parallel.checkpoint.save import Item, Unit, partial_path, remove_partial_files
from plugins.hybrid_parallel.checkpoint.tensor_file import TensorFileWriter, sync_directory
from plugins.hybrid_parallel.distributed.agreement import raise_on_all_ranks
from plugins.hybrid_parallel.distributed.mesh import DP_CP, HybridMesh
from shardformer.distributed.process_groups import all_gather_json
from shardformer.lazy.weight_files import check_shape, open_tensors, read_piece
from shardformer.matmul.quantised import is_quantised
from shardformer.peft import model_inside
from shardformer.peft.kinds import adapter_tensors, is_a, is_exactly, name_of, wrapped_layers
from shardformer.shard_spec import spec_of

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_DEFAULT = "default"  # saved in the directory itself; every other adapter has a subdirectory of its name


def has_adapters(module: nn.Module) -> bool:
    """Return whether the model is a peft model."""
    return is_a(module, "model")


def save_adapter_files(
    model: HybridParallelModel, mesh: HybridMesh, directory: Path, dtype: torch.dtype | None
) -> None:
    """Write all adapters, gathered by global rank 0, in `dtype` (None: their own), or refuse on all ranks."""
    check_adapters(model)
    with model.gathers.whole(params=_tensors_in_files(model)):
        _save(model, mesh, directory, dtype)


def _save(model: HybridParallelModel, mesh: HybridMesh, directory: Path, dtype: torch.dtype | None) -> None:
    for adapter, config in model.unwrap().peft_config.items():
        if adapter in model.origin.adapter_names:
            tensors = _gathered(model, mesh, adapter, dtype)
        else:
            tensors = _of_whole_model(model.unwrap(), adapter, dtype)
        place = directory if adapter == _DEFAULT else directory / adapter
        inside = model_inside(model.unwrap())
        if dist.get_rank() == 0:
            raise_on_all_ranks(partial(_write, place, tensors, config, inside))
        else:
            raise_on_all_ranks(lambda: None)


def load_adapter_files(model: HybridParallelModel, directory: Path, strict: bool) -> None:
    """Read this rank's slices of all adapters; refuses damaged files, other shapes or, if `strict`, names."""
    check_adapters(model)
    with model.gathers.whole(keeps_changes=True, params=_tensors_in_files(model)):
        _load(model, directory, strict)
    for optimizer in model.optimizers:
        optimizer.refresh_masters()


def _load(model: HybridParallelModel, directory: Path, strict: bool) -> None:
    for adapter in model.unwrap().peft_config:
        place = directory if adapter == _DEFAULT else directory / adapter
        found, missing, names = raise_on_all_ranks(partial(_match, model, place, adapter))
        everyone = all_gather_json([missing, [name for name, _ in found]])
        missing = sorted({name for lost, _ in everyone for name in lost})
        unexpected = sorted(set(names) - {name for _, known in everyone for name in known})
        if strict and (missing or unexpected):
            raise ConfigurationError(
                f"{place} does not fit the adapter '{adapter}': missing {missing[:5]}, unexpected {unexpected[:5]}; "
                "load an adapter with the same target_modules, or pass strict=False"
            )
        if adapter in model.origin.adapter_names:
            raise_on_all_ranks(partial(_copy, place / _WEIGHTS, found))
        else:
            raise_on_all_ranks(
                partial(_set_whole, model.unwrap(), place / _WEIGHTS, [name for name, _ in found], adapter)
            )


def _of_whole_model(model: Any, adapter: str, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return the tensors of an adapter that is replicated on every rank."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in adapter_tensors(model, adapter).items()}
    return {
        name: tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }


def _adapter_tensors(model: HybridParallelModel, adapter: str, unique: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in a file, tensor) for each tensor of one adapter on this rank, under each of its names."""
    in_file = model.origin.adapter_names[adapter]
    for names, tensor in local_tensors(model, unique):
        yield from ((in_file[name], tensor) for name in names if name in in_file)


def adapter_items(model: HybridParallelModel, dtype: torch.dtype | None) -> Iterator[Item]:
    """Yield what `save_model` writes of all adapters; names of another adapter than the default begin with its own."""
    check_adapters(model)
    for adapter in model.unwrap().peft_config:
        if adapter in model.origin.adapter_names:
            tensors = dict(_adapter_tensors(model, adapter, unique=True))
        else:
            with model.gathers.whole():
                tensors = {name: each.clone() for name, each in _of_whole_model(model.unwrap(), adapter, dtype).items()}
        for name, tensor in tensors.items():
            in_file = name if adapter == _DEFAULT else f"{adapter}/{name}"
            saved_as = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            form = (saved_as, spec_of(tensor).full_shape)
            yield Item({in_file: tensor}, Unit((in_file,), {in_file: form}, keeps_values=True))


class MergedAdapters:
    """The weights of the base model with the products of LoRA added, as peft's `merge_and_unload` adds them."""

    def __init__(self, model: HybridParallelModel) -> None:
        self._model = model
        self._layers: dict[Tensor, nn.Module] = {}  # weight -> LoRA layer around it
        self._inner: dict[str, str | None] = {}  # path of a module in a wrapper -> its path in the base model
        raise_on_all_ranks(self._find_layers)

    def _find_layers(self) -> None:
        for path, layer in wrapped_layers(self._model.unwrap()):
            kind = name_of(layer)
            if is_exactly(layer, "copied module"):
                self._inner[f"{path}.modules_to_save.{layer.active_adapters[0]}."] = f"{path}."
            elif _adds_product(layer):
                self._layers[layer.base_layer.weight] = layer
                self._inner[f"{path}.base_layer."] = f"{path}."
            else:
                raise ConfigurationError(
                    f"merge_adapters=True cannot merge {path}, a {kind}: it merges LoRA without DoRA and biases into "
                    "weights that are not quantised; leave it out, and merge by PeftModel.from_pretrained(…)"
                    ".merge_and_unload()"
                )
            self._inner[f"{path}."] = None
        if any(config.is_prompt_learning for config in self._model.unwrap().peft_config.values()):
            raise ConfigurationError("merge_adapters=True cannot merge virtual tokens into weights; leave it out")

    def tensors(self) -> Iterator[tuple[list[str], Tensor]]:
        """Yield (names in the base model, tensor) for all tensors of the base model on this rank."""
        for names, tensor in local_tensors(self._model, unique=True):
            found = [name for name in map(self._name, names) if name is not None]
            if found:
                yield found, tensor

    def _name(self, name: str) -> str | None:
        for inner, outer in sorted(self._inner.items(), key=lambda each: -len(each[0])):
            if name.startswith(inner):
                if outer is None:
                    return None
                name = outer + name.removeprefix(inner)
                break
        return name.removeprefix(_PREFIX)

    def factors(self, tensor: Tensor) -> list[Tensor]:
        """Return the matrices of adapters whose products are added to a weight."""
        return [matrix for pair in self._pairs(tensor) for matrix in pair[:2]]

    def add(self, tensor: Tensor, values: Mapping[Tensor, Tensor]) -> Tensor:
        """Return a weight with the products added; `values`: parameter -> this rank's shard, for all `factors` too."""
        merged, layer = values[tensor], self._layers.get(tensor)
        for first, second, scaling in self._pairs(tensor):
            first, second = values[first], values[second]
            # peft computes in fp32 on CPUs, whose products in 16 bits were slow.
            if first.device.type == "cpu" and first.dtype in {torch.float16, torch.bfloat16}:
                first, second = first.float(), second.float()
            product = second @ first  # [out, in], or [width, tokens] of an embedding
            if is_exactly(layer, "lora embedding") or layer.fan_in_fan_out:
                product = product.T
            product = (product * scaling).to(merged.dtype)
            spec = spec_of(tensor)
            merged = merged + (product if product.shape == merged.shape else spec.shard(product))
        return merged

    def _pairs(self, tensor: Tensor) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Yield (A, B, scaling) of the active adapters."""
        layer = self._layers.get(tensor)
        for adapter in () if layer is None else layer.active_adapters:
            if adapter in layer.lora_A:
                yield layer.lora_A[adapter].weight, layer.lora_B[adapter].weight, layer.scaling[adapter]
            elif adapter in layer.lora_embedding_A:
                yield layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter], layer.scaling[adapter]


def _adds_product(layer: Any) -> bool:
    """Return whether an adapter adds the product of two matrices to a weight that can be changed."""
    is_known = is_exactly(layer, "lora linear", "lora embedding") and not is_quantised(layer.base_layer.weight)
    return is_known and not (layer.merged or layer.lora_variant or any(layer.lora_bias.values()))


def _tensors_in_files(model: HybridParallelModel) -> set[Tensor] | None:
    """Return the tensors of all adapters; None if peft reads some of them from the whole model."""
    adapters = model.unwrap().peft_config
    if any(adapter not in model.origin.adapter_names for adapter in adapters):
        return None
    return {tensor for adapter in adapters for _, tensor in _adapter_tensors(model, adapter, unique=False)}


def _gathered(
    model: HybridParallelModel, mesh: HybridMesh, adapter: str, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Gather a full adapter on global rank 0, in stage order; other ranks return an incomplete or empty dict."""
    tensors = dict(_adapter_tensors(model, adapter, unique=True))
    is_first = mesh.rank(DP_CP) == mesh.rank("tp") == 0
    forms = {}
    for name, tensor in tensors.items():
        saved_as = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        forms[name] = [str(saved_as).removeprefix("torch."), spec_of(tensor).full_shape]
    stages = [found for leads, found in all_gather_json([is_first, forms]) if leads]
    whole: dict[str, Tensor] = {}
    if mesh.rank(DP_CP) > 0:
        return whole
    pipeline = open_for_messages(mesh.group("pp"), mesh.device)
    for stage, described in enumerate(stages):
        for name, (kind, shape) in described.items():
            full = None
            if stage == mesh.rank("pp"):
                full = Gather.begin(tensors[name], dtype, mesh.group("tp")).finish()
            if mesh.rank("tp") > 0:
                continue
            if stage > 0 and stage == mesh.rank("pp"):
                send(full, 0, pipeline)
            elif stage > 0 and mesh.rank("pp") == 0:
                full = torch.empty(shape, dtype=getattr(torch, kind), device=mesh.device)
                receive(full, stage, pipeline)
            if mesh.rank("pp") == 0:
                whole[name] = full.cpu()
    return whole


def _write(directory: Path, tensors: dict[str, Tensor], config: Any, model: Any) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_described(config, model), indent=2, sort_keys=True)
    unfinished = partial_path(directory, _WEIGHTS)
    forms = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    try:
        with TensorFileWriter(unfinished, forms, {"format": "pt"}) as file:
            for name, tensor in tensors.items():
                file.write(name, tensor)
        os.replace(unfinished, directory / _WEIGHTS)
        write_text(directory / _CONFIG, text)
        sync_directory(directory)
    except OSError:
        remove_partial_files(directory)
        raise


def _described(config: Any, model: Any) -> dict[str, Any]:
    """Return peft's configuration as its `save_pretrained` writes it, for inference and with the base model's path."""
    described = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    described["inference_mode"] = True
    if described.get("base_model_name_or_path") is None:
        described["base_model_name_or_path"] = model.__dict__.get("name_or_path") or None
    if described.get("task_type") is None:
        kind = type(model)
        described["auto_mapping"] = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    return described


def _match(
    model: HybridParallelModel, directory: Path, adapter: str
) -> tuple[list[tuple[str, Tensor]], list[str], list[str]]:
    """Return the tensors to read on this rank, the names that the file lacks, and all names in the file."""
    for name in (_CONFIG, _WEIGHTS):
        if not (directory / name).is_file():
            raise ConfigurationError(
                f"{directory} has no {name}; give a directory of save_model, or of peft's save_pretrained"
            )
    if adapter in model.origin.adapter_names:
        tensors = dict(_adapter_tensors(model, adapter, unique=False))
    else:  # replicated on every rank
        tensors = adapter_tensors(model.unwrap(), adapter)
    with open_tensors(directory / _WEIGHTS) as file:
        names = list(file.keys())
        found = [(name, tensor) for name, tensor in tensors.items() if name in names]
        for name, tensor in found:
            check_shape(file, name, directory / _WEIGHTS, spec_of(tensor))
    read = {id(tensor) for _, tensor in found}
    return found, sorted(name for name, tensor in tensors.items() if id(tensor) not in read), names


@torch.no_grad()
def _copy(path: Path, found: list[tuple[str, Tensor]]) -> None:
    for name, tensor in found:
        tensor.copy_(read_piece(path, name, spec_of(tensor)))


def _set_whole(model: Any, path: Path, names: list[str], adapter: str) -> None:
    from peft import set_peft_model_state_dict

    with open_tensors(path) as file:
        set_peft_model_state_dict(model, {name: file.get_tensor(name) for name in names}, adapter_name=adapter)
