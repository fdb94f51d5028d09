"""Choice of the tensor-parallel regions of a model: column-parallel layers, what lies between, a row-parallel layer.

Megatron-LM's pairs (arXiv 1909.08053, section 3) are found by independence instead of by names: a layer can be
row-parallel if each half of its input depends on one half of the features of every layer just before it, and those
layers can be column-parallel if nothing else reads them.

One forward pass and automatic differentiation record which features each layer reads. The output of every linear layer
is made a leaf of the graph of derivatives, so that what a layer reads leads back to the outputs of the layers just
before it, and no further. The gradient of the first half of a layer's inputs, and that of the second half, then show
which output features of those layers each half depends on. A cut over two ranks is exact where the halves are
independent; the operators in between (softmax, rotary tables, gates) need not be known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardformer.layers.linear import out_features
from shardformer.matmul.native import is_linear
from shardformer.policies.feature_counts import HEADS, drops_by_function, names_read
from shardformer.utils.module_paths import CACHE_NAMES, starred

Halves = tuple[Tensor, Tensor]
_CACHES = (*CACHE_NAMES, "mems")  # of a rank's own heads


@dataclass
class Reads:
    """What one module reads directly, without other linear layers in between."""

    # path of a linear layer -> for either half of what the module reads, which output features [features] of the layer
    # it depends on
    sources: dict[str, Halves] = field(default_factory=dict)
    # name of a parameter -> for either half, which of its elements [shape] it depends on
    parameters: dict[str, Halves] = field(default_factory=dict)
    num_features: int = 0  # size of the last dim of what the module reads


@dataclass
class Recording:
    """What the modules of a model read in one forward pass."""

    # path of each linear layer that was called, in order of the first call -> what it reads
    linears: dict[str, Reads] = field(default_factory=dict)
    # path of each dropout module -> the linear layers that its input depends on
    dropouts: dict[str, set[str]] = field(default_factory=dict)
    outputs: Reads = field(default_factory=Reads)  # what the outputs of the model read


def record(model: nn.Module, forward: Callable[[], Any]) -> Recording:
    """Run `forward` once, and return what modules of `model` read; its weights must differ as trained ones."""
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


# Styles of a column-parallel layer whose features are 1, 3 or 2 parts, each cut by itself; the first that fits counts.
_COLUMNS = {1: "colwise", 3: "fused_colwise", 2: "packed_colwise"}
PARTIAL = "replicated_with_grad_allreduce"


@dataclass
class Region:
    """A tensor-parallel region, in every layer that has it."""

    # path with `*` for numbers -> tensor-parallel style, of linear layers and of parameters in between
    styles: dict[str, str] = field(default_factory=dict)
    # columns, rows: the paths of its linear layers
    columns: set[str] = field(default_factory=set)
    rows: set[str] = field(default_factory=set)


def find_regions(model: nn.Module, recording: Recording) -> list[Region]:
    """Return the regions of `model` in order; layers whose weights others use too are in none of them."""
    search = _Search(model, recording)
    rows = search.independent_rows()
    rows = search.consistent(search.without_chains(rows))
    regions: list[Region] = []
    for row in (each for each in search.order if each in rows):
        styles = {**search.columns_of(row), **(search.parameters_of(row) or {}), row: "rowwise"}
        new = Region(styles, set(search.columns_of(row)), {row})
        for other in [each for each in regions if each.columns & new.columns or each.styles.keys() & new.styles.keys()]:
            regions.remove(other)
            new = Region(other.styles | new.styles, other.columns | new.columns, other.rows | new.rows)
        regions.append(new)
    for region in regions:
        region.styles |= dict.fromkeys(sorted(_dropouts_in(region, recording)), "dropout")
    return regions


class _Search:
    """Elimination of layers that cannot be row- or column-parallel, over paths with `*` for numbers."""

    def __init__(self, model: nn.Module, recording: Recording) -> None:
        self._model, self._recording = model, recording
        self._readers: dict[str, list[Reads]] = {}
        for path, reads in recording.linears.items():
            self._readers.setdefault(starred(path), []).append(reads)
        self.order = list(self._readers)
        self._unfit = self._used_elsewhere()
        self._kinds: dict[tuple[str, str], str | None] = {}
        for row, found in self._readers.items():
            # A dict: the order of a set would differ between ranks.
            for source in dict.fromkeys(starred(path) for reads in found for path in reads.sources):
                self._kinds[row, source] = self._kind(row, source)

    def columns_of(self, row: str) -> dict[str, str | None]:
        """Return the style of each layer that `row` reads, by path; None for one that cannot be column-parallel."""
        return {source: kind for (reader, source), kind in self._kinds.items() if reader == row}

    def parameters_of(self, row: str) -> dict[str, str] | None:
        """Return the styles of the parameters between the columns and `row`; None if one cannot be cut."""
        styles: dict[str, str] = {}
        for reads in self._readers[row]:
            for name, halves in reads.parameters.items():
                style = _style_of_parameter(halves)
                path = name
                if style == PARTIAL and _is_norm_like(self._model, name):
                    path = name.rpartition(".")[0]
                if style is None or styles.setdefault(starred(path), style) != style:
                    return None
        return styles

    def independent_rows(self) -> set[str]:
        """Return the layers that could be row-parallel, if what they read were column-parallel."""
        return {
            row
            for row, found in self._readers.items()
            if row not in self._unfit and all(reads.sources and reads.num_features % 2 == 0 for reads in found)
            if all(kind is not None for kind in self.columns_of(row).values()) and self.parameters_of(row) is not None
        }

    def without_chains(self, rows: set[str]) -> set[str]:
        """Drop rows that read another row: of a chain of layers the first two are a pair."""
        kept: set[str] = set()
        for row in (each for each in self.order if each in rows):
            if not kept & self.columns_of(row).keys() and row not in self.columns_of(row):
                kept.add(row)
        return kept

    def consistent(self, rows: set[str]) -> set[str]:
        """Drop rows until nothing outside of the regions reads what is inside of them."""
        outside = set(map(starred, self._recording.outputs.sources)) | self._unfit
        outside_parameters = set(self._recording.outputs.parameters)
        while True:
            others = [(row, reads) for row, found in self._readers.items() if row not in rows for reads in found]
            read = outside | {starred(path) for _, reads in others for path in reads.sources}
            params = outside_parameters | {name for _, reads in others for name in reads.parameters}
            kept = {row for row in rows if not read & self.columns_of(row).keys() and self._agrees(row, rows)}
            kept = {row for row in kept if not any(params & reads.parameters.keys() for reads in self._readers[row])}
            if kept == rows:
                return rows
            rows = kept

    def _agrees(self, row: str, rows: Iterable[str]) -> bool:
        """Return whether all rows want the same style of the columns of `row`, and none of these is a row."""
        own = self.columns_of(row)
        wanted = [self.columns_of(other) for other in rows]
        return not own.keys() & set(rows) and all(
            each.get(source, style) == style for each in wanted for source, style in own.items()
        )

    def _kind(self, row: str, source: str) -> str | None:
        kinds = set()
        for reads in self._readers[row]:
            for path, halves in reads.sources.items():
                if starred(path) == source:
                    kinds.add(_style_of_column(halves, num_outputs_of(self._model, path)))
        return kinds.pop() if len(kinds) == 1 else None

    def _used_elsewhere(self) -> set[str]:
        """Return the linear layers whose weight is also used without calling them, or that are tied."""
        read = set(self._recording.outputs.parameters)
        read |= {name for found in self._readers.values() for reads in found for name in reads.parameters}
        owners: dict[int, set[str]] = {}
        for name, param in self._model.named_parameters(remove_duplicate=False):
            owners.setdefault(id(param), set()).add(name)
            if len(owners[id(param)]) > 1:
                read |= owners[id(param)]
        return {starred(name.rpartition(".")[0]) for name in read}


def _style_of_column(halves: Halves, features: int) -> str | None:
    """Return the style of a layer whose `features` the halves of a row's input depend on; None if they overlap."""
    for parts, style in _COLUMNS.items():
        if features % (2 * parts) == 0 and _is_first(halves[0], parts) and _is_first(~halves[0] & halves[1], parts, 1):
            return None if (halves[0] & halves[1]).any() else style
    return None


def _is_first(mask: Tensor, parts: int, half: int = 0) -> bool:
    """Return whether a mask [features] holds only elements of this half of each part."""
    return bool(mask.any()) and not mask.view(parts, 2, -1)[:, 1 - half].any()


def _style_of_parameter(halves: Halves) -> str | None:
    """Return the style of a parameter that the halves of a row's input depend on; None if it cannot be cut."""
    first, second = halves
    if not first.any() or not second.any():
        return None
    if (first & second).any():
        return PARTIAL
    for dim, style in ((0, "first_dim"), (first.dim() - 1, "rowwise"), (first.dim() - 2, "colwise")):
        if dim >= 0 and first.shape[dim] % 2 == 0:
            rows = [mask.transpose(0, dim).flatten(1).any(1) if mask.dim() > 1 else mask for mask in halves]
            if _is_first(rows[0], 1) and _is_first(rows[1], 1, 1):
                return style
    return None


def _is_norm_like(model: nn.Module, name: str) -> bool:
    """Return whether the parameter belongs to a module without children, such as a norm."""
    owner = model.get_submodule(name.rpartition(".")[0])
    return not any(True for _ in owner.children())


def _dropouts_in(region: Region, recording: Recording) -> set[str]:
    """Return the dropouts between the columns and the rows of a region: each rank draws its own mask there."""
    inside: Mapping[str, set[str]] = {path: set(map(starred, read)) for path, read in recording.dropouts.items()}
    return {starred(path) for path, read in inside.items() if read and read <= region.columns}


def with_own_masks(model: nn.Module, region: Region) -> Region | None:
    """Add the style for functional dropout around a region's layers; None if there is dropout that has no style.

    Dropout modules have styles already, and the functions of transformers' attention registry draw per rank.
    """
    parts = [path.split(".") for path in sorted(region.columns | region.rows)]
    depth = next((at for at, names in enumerate(zip(*parts, strict=False)) if len(set(names)) > 1), 0)
    owner = ".".join(parts[0][:depth])
    columns = {path.rpartition(".")[0] for path in region.columns}
    for path in sorted({owner, *columns}):
        module = next((each for name, each in model.named_modules() if starred(name) == path), None)
        if module is None or not drops_by_function(module):
            continue
        if hasattr(module, "activation_dropout") and hasattr(module, "activation_fn"):
            region.styles[path] = "activation_dropout"
        elif path in columns and (len(region.columns) > 1 or "fused_colwise" in region.styles.values()):
            region.styles[path] = "draws_per_rank"
        else:
            return None
    return region


Local = Mapping[str, tuple[str, ...]]
_PARTS = {"fused_colwise": 3, "packed_colwise": 2}


def local_choices(model: nn.Module, region: Region) -> list[Local]:
    """Return the sets of attributes that may have to be divided in a region, the most likely first.

    An attribute is a number of heads, or of features of a column-parallel layer, that the forward of a module around
    the region's layers reads. Which of them stand for a rank's share cannot be known from names: only training tells.

    Returns:
        Choices, each a mapping from path with `*` for numbers to names of attributes.
    """
    sizes = _feature_counts(model, region)
    heads: dict[str, set[str]] = {}
    features: dict[str, set[str]] = {}
    always: dict[str, set[str]] = {}
    for path, module in _owners(model, region):
        numbers = {name: value for name, value in vars(module).items() if type(value) is int and value > 1}
        if isinstance(module, nn.modules.conv._ConvNd):
            always[path] = {"groups", "in_channels", "out_channels"}
            continue
        read = names_read(module)
        for name in numbers.keys() & read:
            if HEADS.fullmatch(name) and any(size % numbers[name] == 0 for size in sizes) and numbers[name] % 2 == 0:
                heads.setdefault(path, set()).add(name)
            elif numbers[name] in sizes:
                features.setdefault(path, set()).add(name)
    # Few attributes first: a number may equal that of features by chance, and must then stay.
    single = [{path: {name}} for path, names in sorted(features.items()) for name in sorted(names)]
    choices: list[Local] = []
    for parts in ((heads,), *((heads, one) for one in single), (heads, features), (), *((one,) for one in single)):
        local = _joined(*parts, always)
        if local not in choices:
            choices.append(local)
    return choices


def _joined(*parts: Mapping[str, set[str]]) -> Local:
    found: dict[str, set[str]] = {}
    for part in parts:
        for path, names in part.items():
            found[path] = found.get(path, set()) | names
    return {path: tuple(sorted(names)) for path, names in sorted(found.items())}


def _feature_counts(model: nn.Module, region: Region) -> set[int]:
    """Return the features of the region's columns, and those of each part of a fused one."""
    found = {num_outputs_of(model, path) for path in _paths(model, region.columns)}
    styles = {path: region.styles[starred(path)] for path in _paths(model, region.columns)}
    return found | {num_outputs_of(model, path) // _PARTS.get(style, 1) for path, style in styles.items()}


def _owners(model: nn.Module, region: Region) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules around the layers of a region, one for each path with `*`, up to the layers' closest ancestor.

    The convolutions whose weights are cut, and children without parameters, are among them.
    """
    linears = sorted(region.columns | region.rows)
    split = [path.split(".") for path in linears]
    depth = next(
        (at for at, parts in enumerate(zip(*split, strict=False)) if len(set(parts)) > 1), min(map(len, split)) - 1
    )
    owners = {".".join(parts[:end]) for parts in split for end in range(depth, len(parts))}
    owners |= {path.rpartition(".")[0] for path, style in region.styles.items() if style == "first_dim"}
    seen = set()
    for path, module in model.named_modules():
        name = starred(path)
        is_core = name.rpartition(".")[0] in owners and not any(True for _ in module.parameters())
        if (name in owners or is_core) and name not in seen:
            seen.add(name)
            yield name, module


def _paths(model: nn.Module, patterns: set[str]) -> list[str]:
    return [path for path, _ in model.named_modules() if starred(path) in patterns]
