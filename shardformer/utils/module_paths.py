"""Module paths: matching of names, suggestions, descriptions for messages, and the modules that they name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Found = TypeVar("Found")


def remembered(model: nn.Module, find: Callable[[Any], Found]) -> Found:
    """Return what `find(model)` returned the first time: a walk in each step is time in which a GPU gets no work.

    For models whose modules stay, as those of a boosted model do.
    """
    name = f"_remembered_{find.__name__}"
    if name not in vars(model):
        vars(model)[name] = find(model)
    return vars(model)[name]


def text_config(config: Any) -> Any:
    """Return the configuration of a model's text part; `config` itself if it is none of transformers."""
    if not hasattr(config, "get_text_config"):
        return config
    try:
        return config.get_text_config()
    except ValueError:  # of MusicGen's two texts, the decoder's
        return config.get_text_config(decoder=True)


def divisors_phrase(count: int) -> str:
    """Return the divisors of `count` as a phrase: "1, 2 or 4"."""
    divisors = [str(size) for size in range(1, count + 1) if count % size == 0]
    return divisors[0] if len(divisors) == 1 else f"{', '.join(divisors[:-1])} or {divisors[-1]}"


def mask_among(values: Iterable[Any]) -> Tensor | None:
    """Return the first mask of tokens among inputs of a model as [batch, seq]; None if there is none."""
    masks = (each for each in values if isinstance(each, Tensor) and each.dtype == torch.bool and each.dim() > 1)
    return next((each if each.dim() == 2 else each[..., 0] for each in masks), None)


def by_layer(value: Any) -> dict[int, Tensor]:
    """Return the features of each layer that a list or a dictionary holds; none of another value."""
    numbered = dict(enumerate(value)) if isinstance(value, list | tuple) else value
    return dict(numbered) if isinstance(numbered, Mapping) else {}


def spread(features: Tensor, mask: Tensor) -> Tensor:
    """Return [batch, seq, hidden] with [tokens, hidden] at the tokens of the mask, and 0 elsewhere."""
    return features.new_zeros(*mask.shape, features.shape[-1]).masked_scatter(mask[..., None], features)


def part_of(features: Tensor, mask: Tensor, cut: Callable[[Tensor], Tensor]) -> Tensor:
    """Return those of [tokens, hidden] whose tokens are in the part that `cut` takes of each of [batch, seq]."""
    numbers = mask.flatten().cumsum(0).view_as(mask) - 1
    return features[cut(numbers)[cut(mask)]]


# Of inputs and outputs: since transformers 5.24, before it, and before it in Mamba and its like.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
_MODULE = "transformers.cache_utils"


def cache_name(inputs: Mapping[str, Any]) -> str | None:
    """Return the name of the input that is a cache, known by its class, so that a release may rename it; else None.

    What has one of the old names counts whatever it is. An input of a user's own model may be called `cache`.
    """
    return next(
        (
            name
            for name, each in inputs.items()
            if each is not None and (name in CACHE_NAMES[1:] or _is_cache(type(each)))
        ),
        None,
    )


@cache
def _is_cache(kind: type) -> bool:
    return any(base.__module__ == _MODULE for base in kind.__mro__)


def ends_in(path: str, name: str) -> bool:
    """Return whether `path` ends in the dotted parts of `name`; a part `*` matches any number."""
    parts, wanted = path.split("."), name.lstrip(".").split(".")
    if wanted == [""] or len(wanted) > len(parts):
        return False
    found = parts[len(parts) - len(wanted) :]
    return all(part == want or (want == "*" and part.isdecimal()) for part, want in zip(found, wanted, strict=True))


def in_order(paths: Iterable[str]) -> list[str]:
    """Return paths in the order of their layers: `layers.2` before `layers.10`."""
    return sorted(paths, key=lambda path: [(part.zfill(9) if part.isdecimal() else part) for part in path.split(".")])


def nearest_names(name: str, paths: Iterable[str]) -> list[str]:
    """Return the ends of paths that are most similar to `name`, the nearest first."""
    return difflib.get_close_matches(name.lstrip("."), _endings(paths), n=3, cutoff=0.0)


def _endings(paths: Iterable[str]) -> list[str]:
    """Return the last part of each path, and the last two."""
    return sorted({".".join(path.split(".")[-count:]) for path in paths for count in (1, 2)})


def starred(path: str) -> str:
    """Return `path` with `*` instead of numbers, as plans name a module of every layer."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path)


def join(path: str, name: str) -> str:
    """Return the path of `name` in the module at `path`, which is "" for the model itself."""
    return f"{path}.{name}" if path else name


def path_of(model: nn.Module, module: nn.Module) -> str:
    """Return the path of a module of the model; "" if it is the model itself, or no part of it."""
    return next((name for name, other in model.named_modules() if other is module), "")


def told(model: nn.Module, paths: Iterable[str]) -> str:
    """Describe modules of a model, several layers as one: "layers.*.norm (a LayerNorm), head (a Linear)"."""
    alike: dict[str, list[str]] = {}
    for path in paths:
        alike.setdefault(starred(path), []).append(path)
    return ", ".join(
        f"{same[0] if len(same) == 1 else path} (a {type(model.get_submodule(same[0])).__name__})"
        for path, same in alike.items()
    )


def replace_module(root: nn.Module, path: str, new: nn.Module) -> None:
    """Replace the module at `path` by `new`."""
    parent, _, name = path.rpartition(".")
    setattr(root.get_submodule(parent), name, new)


def has_module(root: nn.Module, path: str) -> bool:
    """Return whether `path` names a module below `root`; an attribute that is None (no pooler) does not count."""
    module: nn.Module | None = root
    for name in path.split(".") if path else ():
        module = None if module is None else module._modules.get(name)
    return module is not None


def names_of_parameters(model: nn.Module) -> dict[int, list[str]]:
    """Return id of each parameter -> its names, several if it is tied, in the model's order."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def alias_groups(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter, in the model's order."""
    return list(names_of_parameters(model).values())


def tied_names(model: nn.Module) -> list[list[str]]:
    """Return groups of names that refer to one parameter, in the model's order."""
    return [names for names in alias_groups(model) if len(names) > 1]


def retie(model: nn.Module, tied: list[list[str]]) -> None:
    """Tie the names of each group again after replacements; a sharded parameter takes precedence."""
    for names in tied:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        held = [name for name in names if name in parameters]
        if not held:
            continue
        sharded = [name for name in held if getattr(parameters[name], "shard_spec", None) is not None]
        keep = parameters[(sharded or held)[0]]
        for name in held:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, keep)


Aliases = Callable[[nn.Module, tuple[Any, ...]], Mapping[str, Tensor]]


def alias_parameters(module: nn.Module, aliases_of: Aliases, during: nn.Module | None = None) -> None:
    """Let the forward of `module` read other tensors than its own parameters.

    Args:
        aliases_of: (module, all inputs of a call) -> the tensors of this call, by paths of parameters in the module;
            nothing for a call that reads the parameters.
        during: the module that reads the parameters of `module` in its own forward; None for `module` itself.
    """
    _alias(module, "_parameters", aliases_of, during or module)


def alias_buffers(module: nn.Module, aliases_of: Aliases) -> None:
    """Let the forward of `module` read other tensors than its own buffers, see `alias_parameters`."""
    _alias(module, "_buffers", aliases_of, module)


def _alias(module: nn.Module, kind: str, aliases_of: Aliases, during: nn.Module) -> None:
    calls: list[dict[str, Tensor | None]] = []  # the tensors themselves, by nested calls

    def exchange(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        native = {}
        for path, tensor in tensors.items():
            owner, _, name = path.rpartition(".")
            held = getattr(module.get_submodule(owner), kind)
            native[path], held[name] = held[name], tensor
        return native

    def enter(_: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
        calls.append(exchange(aliases_of(module, (*args, *kwargs.values()))))

    def leave(*_: Any) -> None:
        exchange(calls.pop())

    during.register_forward_pre_hook(enter, with_kwargs=True)
    during.register_forward_hook(leave, always_call=True)
