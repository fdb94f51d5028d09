"""The golden table: how each head class is cut under each layout, so that a move of code can be seen to change nothing.

    python -m zoo_tests.campaigns.golden --check [--only PATTERN] [--jobs 2]
    python -m zoo_tests.campaigns.golden --show '^llama/LlamaForCausalLM$' [--layouts tp2,pp2]
    python -m zoo_tests.campaigns.golden --write [--only PATTERN]

`golden.json` has, for the tiny model of every class of the census that can be built, what sharding changed: classes of
modules, their attributes and those of configurations, placeholders of other stages, the cut of each parameter, and
which gradients are summed over ranks. Modules and parameters that stay as they are have no row. Nothing is trained:
ranks are made one after another with process groups whose collectives do nothing. Rows that classes share are stored
once; a change of one shows its old and its new text, and each class and layout that has it.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import copy
import hashlib
import json
import logging
import multiprocessing
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.distributed.mesh import build_mesh
from plugins.hybrid_parallel.setup.model import shard_model
from plugins.hybrid_parallel.shard_report import fake_rank
from shardformer.distributed.random import random_numbers_apart
from shardformer.shard_spec import grad_group_of, spec_of
from shardformer.stages.stage import StagePlaceholder
from zoo_tests.campaigns.census.classes import HeadClass, head_classes
from zoo_tests.campaigns.census.trained import twin_of

TABLE = Path(__file__).with_suffix(".json")
# Layout -> options, number of ranks, and the ranks that are made: each stage, and both ends of a tensor-parallel axis.
LAYOUTS: dict[str, tuple[dict[str, Any], int, tuple[int, ...]]] = {
    "tp2": ({"tp_size": 2}, 2, (0, 1)),
    "tp4": ({"tp_size": 4}, 4, (3,)),
    "pp2": ({"pp_size": 2, "num_microbatches": 2}, 2, (0, 1)),
    "tp2pp2": ({"tp_size": 2, "pp_size": 2, "num_microbatches": 2}, 4, (0, 3)),
    "sp2": ({"tp_size": 2, "enable_sequence_parallelism": True}, 2, (1,)),
    "cp2": ({"cp_size": 2}, 2, (1,)),
    "ep2": ({"ep_size": 2}, 2, (1,)),
}
_OURS = ("shardformer.", "plugins.")
_TORCH_STATE = re.compile(r"training|_(parameters|buffers|modules|is_full_backward_hook|compiled_call_impl)|.*_hooks.*")
_OF_A_RANK = re.compile(r".*rank|first_row|end_row")  # numbers that follow from a rank's place
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_ROOT, _TIED = "model itself", "tied parameters"
_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")
_MOST_NAMED = 8  # classes with one change

Rows = list[str]  # of one class under one layout, in the order of the model


class NotBuilt(Exception):
    """A class needs a package that is not installed."""


@random_numbers_apart()
def rows_of_class(head: HeadClass, layouts: Sequence[str]) -> dict[str, Rows]:
    """Layout -> what it changes; one row with the reason where the layout is refused.

    Raises:
        NotBuilt: the class needs a package that is not installed.
    """
    try:
        whole = twin_of(head).build()
    except ImportError as error:
        raise NotBuilt(" ".join(str(error).split())) from error
    return {layout: _rows_of_layout(head, whole, layout) for layout in layouts}


def _rows_of_layout(head: HeadClass, whole: nn.Module, layout: str) -> Rows:
    options, world_size, ranks = LAYOUTS[layout]
    config = HybridParallelConfig.from_options(**options)
    found: dict[int, dict[str, str]] = {}
    held: dict[int, frozenset[str]] = {}
    for rank in ranks:
        with fake_rank(rank, world_size):
            mesh = build_mesh(*config.parallel.mesh_shape(world_size), ep_size=config.parallel.ep_size)
            model = copy.deepcopy(whole)
            try:
                shared = shard_model(model, config, mesh)
            except ConfigurationError as error:
                return [f"refused: {' '.join(str(error).split()).replace(head.name, 'CLASS')}"]
            except Exception as error:  # any of a thousand classes may fail in its own way
                return [f"crashed: {type(error).__name__}"]
            found[rank] = _changes(whole, model)
        if shared:
            counts = Counter(str(sorted(stages)) for stages in shared)
            found[rank][_TIED] = ", ".join(f"{count} on stages {stages}" for stages, count in counts.items())
        modules = model.named_modules(remove_duplicate=False)
        present = [path or _ROOT for path, each in modules if not isinstance(each, StagePlaceholder)]
        held[rank] = frozenset((*present, _TIED))
    stages = config.parallel.pp_size
    places = {rank: f"stage {rank * stages // world_size}" if stages > 1 else f"rank {rank}" for rank in ranks}
    return [*_merged(found, held, places)]


def _merged(
    found: Mapping[int, Mapping[str, str]], held: Mapping[int, frozenset[str]], places: Mapping[int, str]
) -> Iterator[str]:
    """The rows of all ranks.

    Equal texts of several modules are one row, and so are those of several ranks: a row without a rank holds for each
    one that has the module. A placeholder says which stage has it not.

    Args:
        found: rank -> path -> text.
        held: rank -> paths of modules that are no placeholders.
        places: rank -> what a row that only this rank has begins with.
    """
    rows: dict[tuple[str, str], list[str]] = {}
    for path in dict.fromkeys(path for changes in found.values() for path in changes):
        texts = {rank: changes.get(path, "as it was") for rank, changes in found.items() if path in held[rank]}
        common = set(texts.values())
        for rank, changes in found.items():
            if (text := changes.get(path)) is not None:
                where = "" if rank in texts and len(common) == 1 else f"{places[rank]} "
                paths = rows.setdefault((where, text), [])
                paths += [path] if path not in paths else []
    for (where, text), paths in rows.items():
        for each in _siblings(_without_numbers(paths)):
            yield f"{where}{each}: {text}"


def _siblings(paths: list[str]) -> list[str]:
    """Paths of which those with one parent are one: `self_attn.(q_proj k_proj)`."""
    names: dict[str, list[str]] = {}
    for path in paths:
        parent, _, name = path.rpartition(".")
        names.setdefault(parent, []).append(name)
    merged = ((parent, f"({' '.join(group)})" if len(group) > 1 else group[0]) for parent, group in names.items())
    return [f"{parent}.{name}" if parent else name for parent, name in merged]


def _without_numbers(paths: list[str]) -> list[str]:
    """Paths of which those that only differ in one number are one: `layers.[0-3].mlp`."""
    for position in range(max(len(_NUMBER.findall(path)) for path in paths) - 1, -1, -1):
        merged: dict[tuple[str, str], list[int]] = {}
        for path in paths:
            numbers = [*_NUMBER.finditer(path)]
            place = numbers[position] if position < len(numbers) else None
            key = (path, "") if place is None else (path[: place.start()], path[place.end() :])
            merged.setdefault(key, []).extend([] if place is None else [int(place[0])])
        paths = [f"{start}{_ranges(numbers)}{end}" for (start, end), numbers in merged.items()]
    return paths


def _ranges(numbers: list[int]) -> str:
    if len(numbers) < 2:
        return "".join(map(str, numbers))
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda item: item[1] - item[0])]
    return f"[{','.join(str(run[0]) if len(run) == 1 else f'{run[0]}-{run[-1]}' for run in runs)}]"


# ----- what sharding changed -----


def _changes(whole: nn.Module, model: nn.Module) -> dict[str, str]:
    """Path -> what differs from the whole model, of modules, of their own tensors, and of configurations."""
    before, after = (dict(each.named_modules(remove_duplicate=False)) for each in (whole, model))
    found: dict[str, str] = {}
    configs: set[int] = set()
    tensors: dict[int, str] = {}
    for path, module in after.items():
        native = before.get(path)
        if native is None:
            continue
        parts = [*_class_change(native, module), *_attribute_changes(native, module)]
        config = getattr(module, "config", None)
        if hasattr(config, "to_dict") and id(config) not in configs:
            configs.add(id(config))
            parts += [f"config.{each}" for each in _differing(vars(native.config), vars(config))]
        if not isinstance(module, StagePlaceholder):
            parts += _tensor_changes(native, module, path, tensors)
        if parts:
            found[path or _ROOT] = ", ".join(parts)
    for path in before:
        parent, _, _ = path.rpartition(".")
        if path not in after and isinstance(after.get(parent), type(before[parent])):
            found[path] = "gone"
    return found


def _class_change(native: nn.Module, module: nn.Module) -> Iterator[str]:
    """The classes of ours that a module got, `+` where it keeps its own, without those that they derive from."""
    own = type(native).__mro__
    added = [cls for cls in type(module).__mro__ if cls not in own and cls.__module__.startswith(_OURS)]
    names = [cls.__name__ for cls in added if not any(cls in other.__mro__[1:] for other in added)]
    if names or not isinstance(module, type(native)):
        yield f"{'+' if isinstance(module, type(native)) else '>'}{'+'.join(names) or type(module).__name__}"


def _attribute_changes(native: nn.Module, module: nn.Module) -> list[str]:
    """Changed attributes, new ones that are switched on, and methods of its class that the object replaces."""
    before, after = vars(native), vars(module)
    if isinstance(module, StagePlaceholder):  # it copies what others read of the module that it stands for
        return []
    replaced = [f"{name}()" for name, value in after.items() if _replaces_method(native, name, value)]
    added = {name: value for name, value in after.items() if name not in before and not _OF_A_RANK.fullmatch(name)}
    if not isinstance(module, type(native)):  # its sizes follow from its parameters
        added = {name: value for name, value in added.items() if value is True}
    switched_on = {name: value for name, value in added.items() if value}
    kept = {name: value for name, value in after.items() if name in before}
    hooks = [f"{len(after[name])} {name.strip('_')}" for name in _HOOKS if len(after[name]) != len(before[name])]
    return sorted([*_differing(before, kept | switched_on), *replaced, *hooks])


def _replaces_method(native: nn.Module, name: str, value: Any) -> bool:
    return callable(value) and name not in vars(native) and callable(getattr(type(native), name, None))


def _differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """`name=value` of plain attributes that are new or have another value."""
    return [
        f"{name}={value}"
        for name, value in after.items()
        if not _TORCH_STATE.fullmatch(name) and _is_plain(value) and (name not in before or before[name] != value)
    ]


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | torch.Size | torch.dtype)


def _tensor_changes(native: nn.Module, module: nn.Module, path: str, names: dict[int, str]) -> Iterator[str]:
    """How the module's own parameters and buffers are cut, of whom they are copies, and which have gone.

    Args:
        names: id -> name of the parameters before, to which those of the module are added.
    """
    before = {**native._parameters, **native._buffers}
    after = {**module._parameters, **module._buffers}
    for name, tensor in after.items():
        if tensor is None:
            continue
        if (first := names.setdefault(id(tensor), f"{path}.{name}")) != f"{path}.{name}":
            yield f"{name} is {first}"
        whole = before.get(name)
        if whole is None:
            yield f"{name} {list(tensor.shape)} new"
            continue
        told = _cut_of(tensor)
        if tuple(tensor.shape) != spec_of(tensor).local_shape:
            told += f" holds {list(tensor.shape)}"
        if tensor.requires_grad != whole.requires_grad:
            told += " trains" if tensor.requires_grad else " frozen"
        if told:
            yield f"{name} {list(whole.shape)}{told}"
    yield from (f"{name} gone" for name, tensor in before.items() if tensor is not None and after.get(name) is None)


def _cut_of(tensor: torch.Tensor) -> str:
    spec, group = spec_of(tensor), grad_group_of(tensor)
    text = ""
    if spec.dim is not None and spec.world_size > 1:
        parts = (
            f"{part.size}{f'/{part.unit}' if part.unit > 1 else ''}{f'>{part.padded_size}' if part.padded_size else ''}"
            for part in spec.parts
        )
        copies = f" copies {spec.copies}" if spec.copies > 1 else ""
        text = f" dim {spec.dim} {spec.axis}{spec.world_size} ({' '.join(parts)}){copies}"
    summed = 1 if group is None else dist.get_world_size(group)
    return f"{text} summed over {summed}" if summed > 1 else text


# ----- the table -----

Table = dict[str, dict[str, Rows]]  # family/class -> layout -> rows


def make_table(heads: Sequence[HeadClass], layouts: Sequence[str], jobs: int = 1) -> tuple[Table, dict[str, str]]:
    """The rows of these classes, and family/class -> why it has none, of those that cannot be built here."""
    work = [(head, layouts) for head in heads]
    table: Table = {}
    left_out: dict[str, str] = {}
    with multiprocessing.get_context("spawn").Pool(jobs) if jobs > 1 else contextlib.nullcontext() as pool:
        made = map(_rows_or_reason, work) if pool is None else pool.imap(_rows_or_reason, work, chunksize=8)
        for name, rows in made:
            if isinstance(rows, str):
                left_out[name] = rows
            else:
                table[name] = rows
    return table, left_out


def _rows_or_reason(work: tuple[HeadClass, Sequence[str]]) -> tuple[str, dict[str, Rows] | str]:
    head, layouts = work
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            return f"{head.family}/{head.name}", rows_of_class(head, layouts)
    except Exception as error:  # any of a thousand classes may fail in its own way
        reason = str(error) if isinstance(error, NotBuilt) else f"{type(error).__name__}: {error}"
        return f"{head.family}/{head.name}", reason
    finally:
        logging.disable(before)


@cache
def stored() -> tuple[str, Table]:
    """The release of transformers whose classes the file has, and its table."""
    read = json.loads(TABLE.read_text(encoding="utf-8"))
    rows = read["rows"]
    return read["transformers"], {
        name: {layout: [rows[key] for key in keys.split()] for layout, keys in layouts.items()}
        for name, layouts in read["classes"].items()
    }


def write_table(table: Table) -> None:
    """Write the file: each row once, under a checksum, and for each class and layout the checksums of its rows."""
    rows = {_key(row): row for layouts in table.values() for each in layouts.values() for row in each}
    classes = {
        name: {layout: " ".join(map(_key, each)) for layout, each in layouts.items()} for name, layouts in table.items()
    }
    by_text = dict(sorted(rows.items(), key=lambda item: item[1]))
    text = json.dumps({"transformers": transformers.__version__, "rows": by_text, "classes": classes}, indent=0)
    TABLE.write_text(f"{text}\n", encoding="utf-8")


def _key(row: str) -> str:
    return base64.b32encode(hashlib.sha256(row.encode()).digest())[:7].decode()


def differences(before: Table, after: Table) -> list[str]:
    """Lines that say which rows changed, each change once, with the classes and layouts that have it."""
    found: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for name, layouts in after.items():
        for layout, rows in layouts.items():
            old = before.get(name, {}).get(layout)
            if old is None or old == rows:
                change = () if old is not None else ("+ not in the table",)
            else:
                gone, new = [row for row in old if row not in rows], [row for row in rows if row not in old]
                if len(gone) > 1 and new and new[0].startswith(("refused: ", "crashed: ")):
                    gone = [f"all {len(old)} rows"]  # one reason stands for them
                change = (*(f"- {row}" for row in gone), *(f"+ {row}" for row in new)) or ("the order of rows",)
            if change:
                found.setdefault(change, {}).setdefault(name, []).append(layout)
    lines = []
    for change, where in found.items():
        told = [f"{name} {','.join(layouts)}" for name, layouts in where.items()]
        lines += [*change, f"    {'; '.join(told[:_MOST_NAMED])}"]
        lines[-1] += f"; and {len(told) - _MOST_NAMED} more" if len(told) > _MOST_NAMED else ""
    return lines


def check(heads: Sequence[HeadClass], layouts: Sequence[str], jobs: int = 1) -> list[str]:
    """Lines that say what is no longer as in the file, of those of the classes that it has or that are new."""
    _, before = stored()
    after, left_out = make_table(heads, layouts, jobs)
    missing = [f"{name} is no longer built: {why}" for name, why in left_out.items() if name in before]
    return [*missing, *differences(before, after)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true", help="compare with the file; exit status 1 if a row differs")
    what.add_argument("--show", action="store_true", help="print the rows of classes as they are now")
    what.add_argument("--write", action="store_true", help="write the file, or with --only what it has of some classes")
    parser.add_argument("--only", default="", help="regular expression on Family/Class")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="of those to show or to compare")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    arguments = parser.parse_args()
    layouts = [*LAYOUTS] if arguments.write else arguments.layouts.split(",")
    heads = [head for head in head_classes() if re.search(arguments.only, f"{head.family}/{head.name}")]
    release, before = ("", {}) if arguments.write and not arguments.only else stored()
    if release not in ("", transformers.__version__) and not arguments.show:
        parser.error(f"the table has the classes of transformers {release}, not of {transformers.__version__}")
    if arguments.check:
        lines = check(heads, layouts, arguments.jobs)
    else:
        table, left_out = make_table(heads, layouts, arguments.jobs)
        lines = [f"left out: {name}: {why}" for name, why in left_out.items()]
        if arguments.write:
            names = [f"{head.family}/{head.name}" for head in head_classes()]
            write_table({name: (before | table)[name] for name in names if name in before or name in table})
        else:
            lines += _shown(table)
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.exit(int(arguments.check and bool(lines)))


def _shown(table: Table) -> Iterator[str]:
    for name, layouts in table.items():
        for layout, rows in layouts.items():
            yield from (f"{name} {layout}", *(f"    {row}" for row in rows))


if __name__ == "__main__":
    main()
