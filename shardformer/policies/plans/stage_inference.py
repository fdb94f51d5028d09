"""Inference of the stage layout of a model from its module tree."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from os.path import commonprefix

from torch import nn

from shardformer.stages.stage import (
    IdentityPlaceholder,
    Received,
    ReceivedByTower,
    StageLayout,
    StagePlaceholder,
    UnreachablePlaceholder,
    ZeroEmbedding,
)
from shardformer.utils.forward_syntax import inputs_between_layers
from shardformer.utils.source import syntax_of

# Inputs that the first stage turns into embeddings; later stages do not read them.
ENCODED_INPUTS = (
    "pixel_values",
    "pixel_values_videos",
    "pixel_attention_mask",
    "input_features",
    "input_audio_embeds",
    "audio_values",
)
_FEATURES = re.compile(r"get_(?!cls|text)\w+_features")
# The output of these modules is added to the token embeddings.
_POSITIONS = ("embed_positions", "position_embeddings", "positions_embed", "wpe")


def layer_paths(model: nn.Module, plan: Mapping[str, str]) -> str | None:
    """Return the path of the layer list that most of the plan names; without one, the path of the largest list."""
    lists = Counter(
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        for pattern in plan
        if re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path) == pattern.partition(".*.")[0]
    )
    if lists:
        return lists.most_common(1)[0][0]
    sizes = {
        path: sum(parameter.numel() for parameter in module.parameters())
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
    }
    return max(sizes, key=sizes.__getitem__) if sizes else None


def stage_layout(model: nn.Module, layers: str | None, root: str = "", runs_once: bool = False) -> StageLayout | None:
    """Build a layout for the layer list `layers`, assuming that modules run in registration order.

    Modules registered before the list, on any level, run before it, and so do those that turn images or sounds into
    embeddings (`feature_modules`); other modules registered after it run after it. Modules without parameters (rotary
    tables) stay on every stage. A pooler, and the modules of a head class outside its base model, run after the layers
    regardless of their order. Only modules below `root` are considered. None if there are no layers, or if they run
    several times in a pass, unless a declaration says that they run once.
    """
    if layers is None or len(model.get_submodule(layers)) == 0 or (not runs_once and _run_again(model, layers)):
        return None
    first: dict[str, type[StagePlaceholder]] = {}
    last: list[str] = []
    every: list[str] = []  # also parameters that modules own directly: class tokens, layer weights
    parts, features = layers.split("."), feature_modules(model, [layers])
    for depth in range(len(root.split(".")) if root else 0, len(parts)):
        parent = ".".join(parts[:depth])
        every += [_below(parent, name) for name in model.get_submodule(parent)._parameters]
        seen = depth == 0 and parts[0] == getattr(model, "base_model_prefix", None)
        for name, module in with_parameters(model.get_submodule(parent)):
            if name == parts[depth]:
                seen = True
            elif "rotary" in name:  # whose learned frequencies all layers read (Mistral Large 4)
                every.append(_below(parent, name))
            elif (seen and _below(parent, name) not in features) or name == "pooler":
                last.append(_below(parent, name))
            else:
                first[_below(parent, name)] = placeholder_for(module, name)
    layer, runner = model.get_submodule(layers)[0], model.get_submodule(".".join(parts[:-1]))
    skips_encoders = any(placeholder is UnreachablePlaceholder for placeholder in first.values())
    return StageLayout(
        layers=layers,
        first=first,
        every=tuple(every),
        last=tuple(last),
        tuple_output=num_outputs(layer),
        first_inputs=ENCODED_INPUTS if skips_encoders else (),
        inputs_between=() if root else inputs_between_layers(type(runner), parts[-1]),
    )


def _run_again(model: nn.Module, layers: str) -> bool:
    """Return whether the module that owns the layer list at a path goes over it in a loop within another `for`.

    So do Dory and Inkling 2 Loop: a stage would run its layers once.
    """
    parent, _, name = layers.rpartition(".")
    try:
        tree = syntax_of(type(model.get_submodule(parent)).forward)
    except OSError:  # a model without source
        return False
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For)]
    inner = [each for outer in loops for each in ast.walk(outer) if isinstance(each, ast.For) and each is not outer]
    return any(
        isinstance(node, ast.Attribute) and node.attr == name and _is_self(node.value)
        for loop in inner
        for node in ast.walk(loop.iter)
    )


def tower_layout(
    model: nn.Module,
    encoder: str,
    decoder: str,
    placeholder_of: Callable[[str], type[StagePlaceholder] | None] = lambda path: None,
) -> StageLayout | None:
    """Build a layout for the layer lists of an encoder and its decoder.

    Modules outside both towers run after the decoder, except embeddings, which the towers share, and modules for which
    `placeholder_of` returns a placeholder: these run before the encoder.
    """
    roots = [path.rpartition(".")[0] for path in (encoder, decoder)]
    layouts = [stage_layout(model, path, root) for path, root in zip((encoder, decoder), roots, strict=True)]
    if None in layouts:
        return None
    first, last = dict(layouts[0].first), list(layouts[1].last)
    parts = roots[0].split(".")
    for depth in range(len(parts)):
        parent = ".".join(parts[:depth])
        for name, module in with_parameters(model.get_submodule(parent)):
            path = _below(parent, name)
            if any(root == path or root.startswith(f"{path}.") for root in roots):
                continue
            if (declared := placeholder_of(path)) is not None:
                first[path] = declared
            elif isinstance(module, nn.Embedding):
                first[path] = ReceivedByTower
            else:
                last.append(path)
    behind = replace(layouts[1], last=tuple(last))
    shared = len(commonprefix([root.split(".") for root in roots]))
    whole_encoder = ".".join(parts[: shared + 1])  # its forward may use modules around the layers
    finished_towers = {whole_encoder: ("last_hidden_state",)}
    return replace(layouts[0], first=first, finished_towers=finished_towers, next_layers=behind)


def feature_modules(model: nn.Module, lists: Iterable[str]) -> set[str]:
    """Return the paths of the modules that turn images or sounds into embeddings, before the layers of text run.

    They are those that `get_image_features` and the like call. Methods that call the layers themselves are left out:
    their modules run around the layers.

    Args:
        lists: paths of the layer lists.
    """
    found: set[str] = set()
    for path, module in model.named_modules():
        for method in filter(_FEATURES.fullmatch, dir(type(module))):
            called = {_below(path, name) for name in _modules_called_by(module, method, set())}
            if not any(is_below(layers, called) for layers in lists):
                found |= called
    return found


def is_below(path: str, modules: Iterable[str]) -> bool:
    """Return whether a path is that of one of the modules, or of a part of one."""
    return any(f"{path}.".startswith(f"{each}.") for each in modules)


def _modules_called_by(module: nn.Module, method: str, seen: set[str]) -> set[str]:
    """Return the names of the children that a method of `module` reads, itself or by other methods."""
    seen.add(method)
    try:
        tree = syntax_of(getattr(type(module), method))
    except OSError:  # a model without source
        return set()
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_self(node.value)}
    found = names & module._modules.keys()
    for name in names - seen - {"forward"}:
        if inspect.isfunction(getattr(type(module), name, None)):
            found |= _modules_called_by(module, name, seen)
    return found


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def with_parameters(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the children of `module` that have parameters."""
    return [(name, child) for name, child in module.named_children() if any(True for _ in child.parameters())]


def _below(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name


def placeholder_for(module: nn.Module, name: str) -> type[StagePlaceholder]:
    """Return the placeholder on later stages for a module called `name` that runs before the layers."""
    if name in _POSITIONS:
        return ZeroEmbedding
    if isinstance(module, nn.Embedding) or name == "embeddings":
        return Received
    # An encoder of another modality is not called if its inputs are not given.
    is_tower = any(isinstance(inner, nn.ModuleList) for inner in module.modules())
    return UnreachablePlaceholder if is_tower else IdentityPlaceholder


def num_outputs(layer: nn.Module) -> int:
    """Return the length of the tuple that the forward of `layer` returns; 0 if it returns the bare hidden state.

    It is read from the source, because annotations are often out of date.
    """
    tree = syntax_of(type(layer).forward)
    returned = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return) and node.value is not None]
    if not returned:
        return 0
    value = returned[-1]
    if isinstance(value, ast.Name):
        assigned = [node.value for node in ast.walk(tree) if isinstance(node, ast.Assign) and _assigns(node, value.id)]
        value = next((each for each in map(_first_part, assigned) if isinstance(each, ast.Tuple)), value)
    value = _first_part(value)
    return len(value.elts) if isinstance(value, ast.Tuple) else 0


def _first_part(value: ast.expr) -> ast.expr:
    """Return the left operand of a concatenation such as (hidden state, …) + rest; else the value itself."""
    return value.left if isinstance(value, ast.BinOp) else value


def _assigns(node: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
