"""Build the tiny model: the same class and configuration, with small sizes instead of large ones.

Fields are recognized by their names, which `family_fields.json` has: `names` of kinds of fields, and small `sizes`.
Among `choices`, None, 0 or a value below the small size is a choice of architecture, which the tiny model keeps; those
`of_the_whole` say nothing of it.

`fields` are those of a family in addition, by model_type, or by the class of a configuration without one. `like` names
`groups` of them, and "DEFAULT" stands for the default of the configuration's class. `switches` has what defaults leave
out and checkpoints have, or a plan may leave out: tests train with it, and a tiny model of a user's configuration has
what that says.
"""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.verify.random_batch import batch_for, cast
from shardformer.distributed.random import random_numbers_apart
from shardformer.utils.module_paths import text_config

_INDEXES = ("idx", "indices", "indexes")
_PERIODS = ("period", "interval", "every_n", "pattern", "sparse_step", "layer_step")


def layer_lists(config: Any, num_layers: int | None, wanted: int) -> tuple[int, dict[str, list[Any]]]:
    """Shorten the per-layer lists of a configuration to the layers of the tiny model.

    These are lists with one entry per layer and lists of layer indices. Every combination of entries that a layer has
    is kept, so the tiny model may have more layers than `wanted`.

    Args:
        config: the configuration of the whole model.
        num_layers: its number of layers, if known.
        wanted: minimum number of layers of the tiny model.

    Returns:
        The number of layers, and name -> shortened list.
    """
    fields = {name: value for name, value in config.to_dict().items() if isinstance(value, list | tuple)}
    numbers = {name: value for name, value in fields.items() if _names_layers(name, value, num_layers)}
    lists = {
        name: value
        for name, value in fields.items()
        if name not in numbers and len(value) == num_layers and (num_layers > 4 or "layer" in name)
    }
    if not lists and not numbers:
        return wanted, {}
    entries = [*lists.values(), *([layer in value for layer in range(num_layers)] for value in numbers.values())]
    first_of: dict[str, int] = {}
    for layer in range(num_layers):
        first_of.setdefault(repr([value[layer] for value in entries]), layer)
    kinds = list(first_of.values())
    chosen = [kinds[index % len(kinds)] for index in range(max(wanted, len(kinds)))]
    short = {name: [value[layer] for layer in chosen] for name, value in lists.items()}
    short |= {name: [index for index, layer in enumerate(chosen) if layer in value] for name, value in numbers.items()}
    return len(chosen), short


def _names_layers(name: str, value: list[Any], num_layers: int | None) -> bool:
    """Check whether the list holds layer indices, such as those of the layers with experts."""
    if num_layers is None or not value or not any(word in name for word in ("layer", *_INDEXES)):
        return False
    if not all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < num_layers for item in value):
        return False
    return all(before < after for before, after in zip(value, value[1:], strict=False))


def numbers_in_size(name: str, value: Any, num_layers: int) -> list[int] | None:
    """Return a small tower's layer indices for a longer list, every second if it has none; None for others."""
    is_list = isinstance(value, list | tuple) and all(type(each) is int and each >= 0 for each in value)
    if not is_list or not any(word in name for word in _INDEXES) or "out_indices" in name or not value:
        return None
    inside = [each for each in value if each < num_layers]
    return None if len(inside) == len(value) else inside or list(range(1, num_layers, 2))


def short_periods(fields: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Shorten the periods of recurring layer kinds (and their offsets) that exceed `num_layers`."""
    short: dict[str, Any] = {}
    for name, value in fields.items():
        is_period = isinstance(value, int) and any(word in name for word in _PERIODS)
        if is_period and value > num_layers and not name.startswith("_"):
            short[name] = 2
            if (offset := name.replace("_period", "_offset")) != name and offset in fields:
                short[offset] = 1
    return short


_MISSING = object()
_HEAD_DIM = 8
_LARGE_WIDTH = 1000
_SEED = 20
_MOST_PARAMETERS = 10_000_000
_TABLE = json.loads(Path(__file__).with_name("family_fields.json").read_text(encoding="utf-8"))
_SIZES: dict[str, Any] = _TABLE["sizes"]
_NAMES = {kind: tuple(names) for kind, names in _TABLE["names"].items()}
_HEADS, _KV_HEADS, _HIDDEN, _LAYERS = (_NAMES[kind] for kind in ("heads", "kv_heads", "hidden", "layers"))
_ALL_LAYERS = (*_LAYERS, *_NAMES["tower_layers"])


@dataclass(frozen=True)
class TwinSizes:
    """Sizes of a tiny model."""

    layers: int = 4  # minimum number of layers of each tower
    heads: int = 4  # number of attention heads
    # number of key and value heads; None to keep the model's ratio of heads to key and value heads
    kv_heads: int | None = None
    # keep the parts that the model has (windows, experts, kinds of layers) and the other settings of its configuration;
    # False takes every size from the table
    is_faithful: bool = True
    keeps_widths: bool = False  # parts of different widths differ in the tiny model, too

    @staticmethod
    def of(config: Any, tp_size: int, num_stages: int) -> TwinSizes:
        """Choose sizes for a layout; both head counts are divisible by `tp_size` exactly if the model's own are."""
        heads, kv_heads = head_counts(text_config(config))
        group = heads // kv_heads
        small = tp_size * -(-(4 if group == 1 else 2) // tp_size)
        if kv_heads % tp_size:  # heads are replicated or unevenly sharded
            small = kv_heads
        if group <= 8:
            return TwinSizes(layers=max(4, num_stages), heads=small * group)
        group = tp_size * -(-4 // tp_size) + (1 if heads % tp_size else 0)
        return TwinSizes(layers=max(4, num_stages), heads=small * group, kv_heads=small)


@dataclass(frozen=True)
class TinyModel:
    """Tiny model of the class of a model, of which every process builds an identical copy."""

    # module, name: module and name of the model's class
    module: str
    name: str
    config: Any  # the small configuration
    dtype: torch.dtype = torch.float64  # dtype of the weights
    # largest size; None for any, as some families have layers of a fixed size
    most_parameters: int | None = _MOST_PARAMETERS
    has_labels: bool = True  # whether its batches have labels

    def build(self) -> nn.Module:
        """Build the model in training mode, without dropout."""
        model = build_small(getattr(importlib.import_module(self.module), self.name), self.config, self.dtype)
        count = sum(param.numel() for param in model.parameters())
        if self.most_parameters is not None and count > self.most_parameters:
            largest, param = max(model.named_parameters(), key=lambda item: item[1].numel())
            raise ConfigurationError(
                f"the tiny model of {self.name} would have {count:,} parameters, for {largest} stays "
                f"{'x'.join(map(str, param.shape))}; give a small configuration of your own"
            )
        return model

    def batch(self, model: nn.Module, step: int, rows: int) -> dict[str, Any]:
        """Make the global batch of a step."""
        return cast(batch_for(model, step, rows, self.has_labels), self.dtype)


def twin_config(model_class: type[nn.Module], config: Any, sizes: TwinSizes) -> Any:
    """Return the small configuration of a class: all parts are of one width, where that leaves out no projection.

    Between parts of different widths some classes have one that others have not (MusicGen); then these differ.
    """
    narrow = small_config(config, sizes)
    if len(set(_hidden_sizes(config))) > 1:
        with suppress(Exception), torch.device("meta"):  # some models need values to be built
            wide = small_config(config, replace(sizes, keeps_widths=True))
            built = (model_class(copy.deepcopy(twin)) for twin in (narrow, wide))
            of_narrow, of_wide = ({name for name, _ in model.named_parameters()} for model in built)
            return wide if of_wide - of_narrow else narrow
    return narrow


def small_config(config: Any, sizes: TwinSizes, widths: Mapping[int, int] | None = None) -> Any:
    """Return the configuration with small sizes and no dropout; `widths`: of the whole that it is part of."""
    config_class = type(config)
    values = small_values(config, sizes, widths)
    try:
        small = config_class(**values)
    except Exception as error:  # configuration classes raise arbitrary exception types
        reason = " ".join(str(error).split())[:160]
        raise ConfigurationError(
            f"no tiny model of {config_class.__name__} can be made ({reason}); give a small configuration of your own"
        ) from None
    if hasattr(small, "use_cache"):
        small.use_cache = False
    if small.is_encoder_decoder and getattr(small, "decoder_start_token_id", None) is None:
        small.decoder_start_token_id = 0
    return small


def small_values(config: Any, sizes: TwinSizes, widths: Mapping[int, int] | None = None) -> dict[str, Any]:
    """Return the arguments from which the small configuration is built."""
    widths = _small_widths(config, sizes) if widths is None else widths
    read = {name: _read(config, name) for name in _named_sizes() if _is_written(config, name)}
    if sizes.is_faithful:  # what differs between layers has a value for the whole, too
        read = {name: value for name, value in read.items() if value is not _MISSING}
    fields = {**vars(config), **read}
    layers, lists, values = sizes.layers, {}, {}
    if sizes.is_faithful:
        layers, lists = layer_lists(config, _count(config, _LAYERS), sizes.layers)
        values = {**_own_values(config), **short_periods(fields, layers)}
        if values.get("num_kv_shared_layers"):  # the last ones read keys and values of earlier ones
            values["num_kv_shared_layers"] = layers // 2
    for name, value in fields.items():
        if hasattr(value, "to_dict"):
            values[name] = small_config(value, sizes, widths).to_dict()
        elif isinstance(value, float) and any(word in name for word in ("drop", "jitter")):
            values[name] = 0.0
        elif sizes.is_faithful and isinstance(value, list | tuple):
            values |= _small_list(name, value)
        elif (width := _linked_width(name, value, widths, sizes)) is not None:
            values[name] = width
        elif (numbers := numbers_in_size(name, value, layers)) is not None:
            values[name] = numbers
        elif value is not _MISSING and (isinstance(value, int | list) or value is None):
            values |= _small(name, value, config, sizes, layers)
    values |= {name: _small_sizes(name, value) for name, value in lists.items()}
    if sizes.is_faithful and getattr(config, "is_heterogeneous", False) and "layer_types" in values:
        values["per_layer_config"] = _small_layers(config, values)
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(fields.get(name), dict) and (sizes.is_faithful or "mrope_section" in fields[name]):
            values[name] = _small_rope(fields[name], getattr(config, "partial_rotary_factor", None))
    kind = config.model_type or type(config).__name__
    values = _with_special(values, family_fields(kind, "fields"))
    return values if sizes.is_faithful else _with_special(values, family_fields(kind, "switches"))


def _small_layers(config: Any, values: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Return what layers have of their own, in the ratio that it has to the value of the whole configuration."""
    own, kinds = config.to_dict(), config.layer_types
    layers = {int(index): fields for index, fields in own["per_layer_config"].items()}
    small = {}
    for index, kind in enumerate(values["layer_types"]):
        fields = layers.get(kinds.index(kind), {})
        small[index] = {
            name: max(value * values[name] // own[name], 1) if name in values and isinstance(value, int) else value
            for name, value in fields.items()
        }
    return {index: fields for index, fields in small.items() if fields}


def head_counts(config: Any) -> tuple[int, int]:
    """Return the numbers of query heads and of key and value heads of a configuration."""
    heads = _count(config, _HEADS) or 4
    kv_heads = _count(config, _KV_HEADS) or heads
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        kv_heads = 1
    if _read(config, "kv_lora_rank") not in (None, _MISSING) or heads % kv_heads:  # latent attention: one per head
        kv_heads = heads
    return heads, kv_heads


def build_small(model_class: type[nn.Module], config: Any, dtype: torch.dtype) -> nn.Module:
    """Build a model from a small configuration with a fixed seed, in training mode and without dropout."""
    with random_numbers_apart(_SEED):
        with _marked_memory():
            model = model_class(copy.deepcopy(config))  # sharding enters its attention in a model's configuration
        with torch.no_grad():
            # Biases start at 0 and norms at 1: noise makes errors in them visible.
            for param in model.parameters():
                if param.is_floating_point():
                    param.copy_(param.where(~param.isnan(), 0.0)).add_(torch.randn_like(param), alpha=0.02)
    return without_dropout(model.to(dtype).train())


def without_dropout(model: nn.Module) -> nn.Module:
    """Switch the dropout of a model off, in place: some heads have one without a configuration field."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model


@contextmanager
def _marked_memory() -> Iterator[None]:
    """Fill new tensors with NaN: it marks parameters that a class never initializes (experts of Qwen3-Omni)."""
    was_strict = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_strict, warn_only=only_warned)


def _hidden_sizes(config: Any) -> Iterator[int]:
    """Yield the hidden sizes of a configuration and of those inside it."""
    own = _count(config, _HIDDEN)
    if own is not None:
        yield own
    for part in vars(config).values():
        if hasattr(part, "to_dict"):
            yield from _hidden_sizes(part)


def _small_widths(config: Any, sizes: TwinSizes) -> dict[int, int]:
    """Return the hidden sizes of a configuration and of those inside it, and what the tiny model has for each."""
    own = dict.fromkeys([*_hidden_sizes(text_config(config)), *_hidden_sizes(config)])
    small = sizes.heads * _HEAD_DIM
    return {width: small * (1 + sizes.keeps_widths * index) for index, width in enumerate(own)}


def _linked_width(name: str, value: Any, widths: Mapping[int, int], sizes: TwinSizes) -> int | None:
    """Return the small size of a field that is a hidden size, or a width of a projection to or from one; else None.

    In a faithful model a width is as many times the hidden size, up to 4, and a large one that is no multiple of any
    belongs to a projection alone.
    """
    is_width = name in _HIDDEN or (name.endswith(_NAMES["widths"]) and name not in _SIZES)
    if not is_width or not isinstance(value, int):
        return None
    for times in range(1, 5 if sizes.is_faithful else 2):
        if value // times in widths and value % times == 0:
            return times * widths[value // times]
    is_large = name in _HIDDEN or (sizes.is_faithful and value > _LARGE_WIDTH)
    return sizes.heads * _HEAD_DIM if is_large else None


def _named_sizes() -> Iterator[str]:
    yield from (*_HEADS, *_KV_HEADS, *_HIDDEN, *_ALL_LAYERS, *_SIZES)


def _small(name: str, own: Any, config: Any, sizes: TwinSizes, layers: int) -> dict[str, Any]:
    """Return the small value of a field; empty if the field is not a size or keeps its value."""
    if sizes.is_faithful and name in _NAMES["choices"] and (own is None or (isinstance(own, int) and own == 0)):
        return {}
    if name in _KV_HEADS:
        return {name: _small_kv_heads(config, sizes)}
    for names, value in ((_HEADS, sizes.heads), (_HIDDEN, sizes.heads * _HEAD_DIM), (_ALL_LAYERS, layers)):
        if name in names:
            return {name: value}
    if name not in _SIZES:
        return {}
    if sizes.is_faithful and name in _NAMES["choices"] and isinstance(own, int):
        return {name: min(own, _SIZES[name])}
    return {name: _SIZES[name]}


def _small_kv_heads(config: Any, sizes: TwinSizes) -> int:
    if _read(config, "kv_lora_rank") is not _MISSING:  # latent attention has a key and a value for every head
        return sizes.heads
    if sizes.kv_heads is not None:
        return sizes.kv_heads
    heads, kv_heads = head_counts(config)
    group = heads // kv_heads
    return sizes.heads // group if sizes.heads % group == 0 else max(1, sizes.heads * kv_heads // heads)


def _small_sizes(name: str, own: list[Any]) -> list[Any]:
    """Shrink a list with one size per layer, such as the widths of feed-forwards in Gemma 3n, in their ratios."""
    if name not in _SIZES or not all(type(size) is int for size in own) or max(own) <= _SIZES[name]:
        return own
    return [-(-_SIZES[name] * size // max(own)) for size in own]


def _small_list(name: str, own: Sequence[Any]) -> dict[str, Any]:
    """Shrink a list with one size per image dimension, or per stage of a hierarchical image model; else empty."""
    if not own or not all(isinstance(item, int) for item in own):
        return {}
    if name in ("image_size", "patch_size"):
        return {name: [_SIZES[name]] * len(own)}
    if name.endswith("token_id"):
        return {name: _SIZES.get(name, own)}
    if name in ("depths", *_ALL_LAYERS):
        return {name: [min(depth, 2) for depth in own]}
    if name in ("hidden_sizes", *_HIDDEN):
        return {name: [8 * -(-2 * width // own[0]) for width in own]}  # heads divide them
    return {}


def _small_rope(own: Mapping[str, Any], share: float | None) -> dict[str, Any]:
    """Adapt the parameters of rotary embeddings (nested for several kinds of layers) to the small head size."""
    share = own.get("partial_rotary_factor", share) or 1.0
    half = int(_HEAD_DIM * share) // 2
    small = dict(own)
    for name, value in own.items():
        if isinstance(value, dict):
            small[name] = _small_rope(value, share)
        elif name == "mrope_section":
            small[name] = [2, 1, 1] if half == 4 else [1, 1, 0]
        elif isinstance(value, list) and name.endswith("_factor"):
            small[name] = value[:half]
        elif name == "original_max_position_embeddings":
            small[name] = 32
    return small


def family_fields(kind: str, section: str) -> dict[str, Any]:
    """Return what `family_fields.json` has for a family, in its section "fields" or "switches": field -> value."""
    own = _TABLE[section].get(kind, {})
    found: dict[str, Any] = {}
    for fields in (*(_TABLE["groups"][name] for name in own.get("like", ())), own):
        found |= {name: value for name, value in fields.items() if name not in ("like", "why")}
    return found


def _with_special(values: dict[str, Any], special: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in special.items():
        if value == "DEFAULT":
            values.pop(name, None)
        else:
            values[name] = {**values[name], **value} if isinstance(value, dict) and name in values else value
    return values


def _own_values(config: Any) -> dict[str, Any]:
    """Return the values of the configuration that differ from the defaults of its class."""
    own = config.to_dict()
    try:
        usual = type(config)().to_dict()
    except Exception:  # a class without defaults
        usual = {}
    return {
        name: value
        for name, value in own.items()
        if not name.startswith("_")
        and name not in _NAMES["of_the_whole"]
        and (name not in usual or usual[name] != value)
    }


def _count(config: Any, names: tuple[str, ...]) -> int | None:
    """Return the value of the first of these fields that is a positive integer; None if there is none."""
    found = (vars(config).get(name) or _read(config, name) for name in names)
    return next((value for value in found if isinstance(value, int) and value > 0), None)


def _is_written(config: Any, name: str) -> bool:
    found = getattr(type(config), name, None)
    return not (isinstance(found, property) and found.fset is None)


def _read(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, _MISSING)
    except Exception:  # some configurations raise for a field that differs between layers
        return _MISSING
