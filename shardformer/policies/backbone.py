"""BackbonePolicy: the policy of a module of the user's around models of transformers, its backbones.

Each backbone is sharded by its own policy, with the paths of the module. What is around them stays whole. Pipeline
stages go through one backbone: modules that run only behind it belong to the last stage, and every stage runs those in
front of it, because the module's forward may use their outputs behind the backbone, too. Their gradients are summed.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from shardformer.attention import log_once
from shardformer.policies.base import ModulePolicyDescription, Origin, Policy, description_of
from shardformer.policies.plans.stages import is_below, units_of
from shardformer.shard_config import ShardConfig
from shardformer.stages.layout import StageLayout, chained
from shardformer.stages.placeholders import StageInput
from shardformer.stages.stage import PipelineStageManager
from shardformer.utils.module_paths import has_module, join, path_of
from shardformer.utils.source import GETTERS, Read, reads_of_forward

Lookup = Callable[[nn.Module], Policy]
_OF_LAYERS = ("output_hidden_states", "output_attentions")
_WITHHELD = (
    "{name} is asked for {option}, of which each rank has a part in this layout; use {option}=False, or tp_size "
    "and dp_size alone"
)
_LIBRARIES = ("peft", "transformers")


def backbones_of(model: nn.Module, lookup: Lookup) -> dict[str, Policy]:
    """Return path -> policy of the outermost models of transformers inside a module; `lookup` may raise ValueError."""
    library = sys.modules.get("transformers.modeling_utils")
    found: dict[str, Policy] = {}
    for path, module in model.named_modules() if library is not None else ():
        if path and isinstance(module, library.PreTrainedModel) and not is_below(path, found):
            try:
                found[path] = lookup(module)
            except ValueError:  # one inside of it may have a policy
                continue
    return found


class BackbonePolicy(Policy):
    """Policy of a module around models of transformers that have policies of their own.

    A subclass may add descriptions of the module's own parts to the table.

    Args:
        lookup: returns the policy of a model of transformers: `policy_for`.
        declared: the user's policy for what is around the backbones. A backbone in which it names anything is sharded
            as it says.
    """

    origin = Origin.BACKBONES

    def __init__(self, lookup: Lookup, declared: Policy | None = None) -> None:
        super().__init__()
        self.lookup, self.declared = lookup, [] if declared is None else [declared]
        self.policies: dict[str, Policy] = {}  # by path of the backbone; stages are cut from the first
        self.declared_paths: list[str] = []  # of the backbones in which the user's policy names anything

    @property
    def base_path(self) -> str:
        """Return "": paths start at the module itself."""
        return ""

    @property
    def parts(self) -> Sequence[Policy]:
        """The policies of the backbones."""
        return tuple(self.policies.values())

    @property
    def path(self) -> str:
        """Path of the backbone that stages are cut from."""
        return next(iter(self.policies))

    def set_model(self, model: nn.Module) -> None:
        """Set the module, and find its backbones; stages are cut from the largest that can be cut."""
        super().set_model(model)
        found = backbones_of(model, self.lookup)
        for path, policy in found.items():
            policy.set_model(model.get_submodule(path))
        sizes = {path: sum(each.numel() for each in policy.model.parameters()) for path, policy in found.items()}
        order = sorted(found, key=lambda path: (found[path].stages is None, -sizes[path]))
        self.policies = {path: found[path] for path in order}
        for declared in self.declared:
            declared.set_model(model)
            declared.family_policy = None  # the backbones are prepared and checked here
        for name in ("stages", "_reads"):
            self.__dict__.pop(name, None)

    def set_shard_config(self, shard_config: ShardConfig) -> None:
        """Set the sharding options, for backbones that are not cut into stages without a pipeline."""
        super().set_shard_config(shard_config)
        for declared in self.declared:
            declared.set_shard_config(shard_config)
            named = list(_named_by(declared.module_policy(), self.model))
            self.declared_paths = [path for path in self.policies if any(is_below(each, [path]) for each in named)]
        for axis in ("sequence", "context"):  # made now, because the layers of all backbones share it
            getattr(shard_config, axis)
        whole = copy.copy(shard_config)
        whole.pipeline_stage_manager = PipelineStageManager()
        for path, policy in self.policies.items():
            config = copy.copy(shard_config if path == self.path else whole)
            config.enable_tensor_parallelism &= path not in self.declared_paths
            policy.set_shard_config(config)
            policy.set_model(policy.model)  # forgets what it found under other options

    # ----- what the engine asks -----

    @property
    def own_attention(self) -> Mapping[str, type[nn.Module]]:
        """The attentions of all backbones."""
        return {name: cls for part in self.parts for name, cls in part.own_attention.items()}

    @property
    def supports_ulysses(self) -> bool:
        """Whether all backbones support it."""
        return all(part.supports_ulysses for part in self.parts)

    @property
    def repeats_layers(self) -> bool:
        """Whether layers of a backbone may run several times."""
        return any(part.repeats_layers for part in self.parts)

    @property
    def splits_towers(self) -> bool:
        """Whether each backbone is split, or has a single list of layers."""
        return all(part.splits_towers or part.stages is None or not part.stages.next_layers for part in self.parts)

    @property
    def names_norms(self) -> bool:
        """Whether all tables name their norms."""
        return all(part.names_norms for part in self.parts)

    @property
    def replicate_unlisted(self) -> bool:
        """Whether the table of the layers that stages are cut from need not name everything."""
        return self.path in self.declared_paths or self.parts[0].replicate_unlisted

    @property
    def cuts_attention(self) -> bool:
        """Whether attention heads of a backbone are sharded."""
        return any(part.cuts_attention for part in self.parts)

    def tokens_mix_only_in_attention(self) -> bool:
        """Return False: nothing is known of the module's own forward."""
        return False

    def exchanges_heads(self) -> bool:
        """Return whether the layers of all backbones can."""
        return all(part.exchanges_heads() for part in self.parts)

    def head_counts(self) -> Mapping[str, int]:
        """Return the head counts of all backbones, by path."""
        return {join(path, name): n for path, each in self.policies.items() for name, n in each.head_counts().items()}

    def check(self) -> list[str]:
        """Return why a backbone cannot be sharded, or what the forward does that stages or parts cannot."""
        problems = [problem for part in (*self.declared, *self.parts) for problem in part.check()]
        if self.stages is not None and self.shard_config.stage_manager.num_stages > 1:
            problems += self._stage_problems()
        return list(dict.fromkeys([*problems, *self._problems_of_outputs()]))

    def preprocess(self) -> nn.Module:
        """Prepare all backbones, and what is around them."""
        for part in (*self.parts, *self.declared):
            part.preprocess()
        return self.model

    def postprocess(self) -> nn.Module:
        """Finish all backbones, and watch the calls of those whose layers are cut."""
        for part in (*self.parts, *self.declared):
            part.postprocess()
        if self.shard_config.stage_manager.num_stages > 1:
            self._tell_of_draws()
        for path, part in self.policies.items():
            views = getattr(self.model, "stage_views", None) if path == self.path else None
            if withheld := self._withheld(path):
                ignored = () if views is None else part.stages.first_inputs
                hook = _CallOfBackbone(path, withheld, ignored, None if views is None else views.stage_input)
                part.model.register_forward_pre_hook(hook, with_kwargs=True)
        return self.model

    def _tell_of_draws(self) -> None:
        """Log which modules in front of the backbone draw random numbers, other ones on each stage."""
        around = ((path, each) for path, each in self.model.named_modules() if not is_below(path, [self.path]))
        draws = [path for path, each in around if isinstance(each, nn.modules.dropout._DropoutNd) and each.p > 0]
        if draws := [path for path in draws if not self._runs_behind(path)]:
            log_once(
                type(self.model).__name__,
                f"draws random numbers in {draws[0]} on each pipeline stage by itself: what is made with them in front "
                f"of {_named(self.path)} differs from what is used of it behind",
            )

    def module_policy(self) -> Mapping[str | type[nn.Module], ModulePolicyDescription]:
        """Return the tables of all backbones, by path: the class names of one may be those of another."""
        named = [name for name in self.policies if name not in self.declared_paths]
        found = {path: each for name in named for path, each in self.table_of(name).items()}
        return found | {key: each for part in self.declared for key, each in part.module_policy().items()}

    def table_of(self, name: str) -> dict[str, ModulePolicyDescription]:
        """Return the table of the backbone at `name`, without modules whose parameters others around it read, too."""
        part = self.policies[name]
        named = self.model.named_parameters(remove_duplicate=False)
        around = {id(parameter) for path, parameter in named if not path.startswith(f"{name}.")}
        for read, _, found in self._reads_inside():
            if self._is_taken(read, found):
                around |= {id(each) for each in ([found] if isinstance(found, nn.Parameter) else found.parameters())}
        own = {key if isinstance(key, str) else key.__name__: each for key, each in part.module_policy().items()}
        table: dict[str, ModulePolicyDescription] = {}
        for path, module in part.model.named_modules():
            if (found := description_of(own, path, module)) is None:
                continue
            kept = [
                each
                for each in found.sub_module_replacement
                if around.isdisjoint(map(id, _parameters_at(module, each.suffix)))
            ]
            table[join(name, path).removesuffix(".")] = replace(found, sub_module_replacement=kept)
        return table

    # ----- what the forward reads -----

    @cached_property
    def _reads(self) -> list[Read] | None:
        """What the forward reads of the module; None if its source does not tell."""
        above = {parent for path in self.policies for parent in _parents(path)}
        own = [p for p in above if type(self.model.get_submodule(p)).__module__.split(".")[0] not in _LIBRARIES]
        try:
            return reads_of_forward(self.model, own)
        except OSError:
            return None

    def _calls(self, path: str) -> list[Read]:
        """Return the calls of the backbone at `path`, or of a module of a library around it."""
        return [read for read in self._reads or () if read.is_call and is_below(path, [read.path])]

    def _reads_inside(self) -> Iterator[tuple[Read, str, Any]]:
        """Yield what the forward reads inside of backbones: the place, the path of the module, and what is read."""
        for read in self._reads or ():
            path = next((each for each in self.policies if read.path.startswith(f"{each}.")), None)
            if path is not None:
                yield read, *_resolved(self.model, read.path)

    def _is_taken(self, read: Read, found: Any) -> bool:
        """Return whether the forward may use parameters inside of a backbone by itself."""
        is_owner = isinstance(found, nn.Module) and any(True for _ in found.parameters(recurse=False))
        return isinstance(found, nn.Parameter) or (is_owner and not read.is_call)

    def _parts_read(self) -> list[str]:
        """Return the paths of modules inside of backbones that the forward calls, or reads parameters of."""
        found = self._reads_inside()
        return [path for _, path, each in found if isinstance(each, nn.Module | nn.Parameter)]

    def _behind(self) -> list[str]:
        """Return the modules around the backbone that run only behind it."""
        return list(filter(self._runs_behind, units_of(self.model, [self.path])))

    def _runs_behind(self, path: str) -> bool:
        """Return whether the forward reads the module at `path` only behind its call of the backbone."""
        reads, calls = self._reads or [], self._calls(self.path)
        own = [at for at, read in enumerate(reads) if is_below(read.path, [path]) or is_below(path, [read.path])]
        handed_on = [at for at, read in enumerate(reads) if not read.path]
        return bool(calls and own) and min(own + handed_on) > reads.index(calls[0])

    def _stage_problems(self) -> Iterator[str]:
        """Yield the first thing that the forward does with the backbone and stages cannot."""
        calls, lists, name = self._calls(self.path), [each.layers for each in self.stages.chain], _named(self.path)
        is_read = any(not each.is_call and each.path and is_below(self.path, [each.path]) for each in self._reads or ())
        layers = [p for p in self._parts_read() if any(is_below(each, [p]) or is_below(p, [each]) for each in lists)]
        methods = [read.path for read, _, found in self._reads_inside() if inspect.isroutine(found)]
        methods = [path for path in methods if is_below(path, [self.path])]  # others are whole
        repeats = any(call.repeats for call in calls)
        repeats |= any(not one.excludes(other) for one, other in itertools.combinations(calls, 2))
        reasons = [
            *(["has no source that can be read; define the module in a file"] if self._reads is None else []),
            *(f"calls {_named(each)}(), not {name}(...); call {name}(...) alone" for each in methods),
            *(f"reads {_named(each)} of its layers; call {name}(...) alone" for each in layers),
            *([f"calls {name}(...) several times in a pass; give it all inputs in one batch"] if repeats else []),
            *([f"does not show one call of {name}(...); call it by this name"] if is_read or not calls else []),
        ]
        for reason in reasons[:1]:
            yield (
                f"pp_size={self.shard_config.stage_manager.num_stages} cuts {name} into stages, and the forward of "
                f"{type(self.model).__name__} {reason}, or use pp_size=1"
            )

    def _problems_of_outputs(self) -> Iterator[str]:
        """Yield what the forward asks of a backbone that no rank has whole."""
        for path, part in self.policies.items():
            config, asked = part.model.config, {name for call in self._calls(path) for name in call.arguments}
            for option in self._withheld(path):
                if option in asked or getattr(config, option, False):
                    yield _WITHHELD.format(name=_named(path), option=option)

    def _withheld(self, path: str) -> tuple[str, ...]:
        """Return the options of a backbone that ask for what lies on several ranks."""
        is_cut = path == self.path and self.shard_config.stage_manager.num_stages > 1
        if is_cut or self.shard_config.context is not None:
            return _OF_LAYERS
        return _OF_LAYERS[:1] if self.shard_config.sequence is not None else ()

    # ----- stages -----

    @cached_property
    def stages(self) -> StageLayout | None:
        """The stage layout of the backbone with the modules around it; None if it cannot be cut."""
        part, read = self.parts[0], self._parts_read()
        if part.stages is None:
            return None
        base = join(self.path, part.base_path).removesuffix(".")
        lists = [each.below(base) for each in part.stages.chain]
        # The forward calls these by itself: they run on all stages, as the modules in front of the backbone.
        moved = [p for each in lists for p in each.first if any(is_below(p, [r]) or is_below(r, [p]) for r in read)]
        for index, each in enumerate(lists):
            first = {path: stand_in for path, stand_in in each.first.items() if path not in moved}
            lists[index] = replace(each, first=first)
        heads = [n for n, _ in part.model.named_children() if part.base_path and n != part.base_path.split(".")[0]]
        last = [*lists[-1].last, *(join(self.path, name) for name in heads), *self._behind()]
        names = [name for name, _ in self.model.named_parameters()]
        every = [n for n in names if is_below(n, moved) or not (n.startswith(f"{base}.") or is_below(n, last))]
        lists[-1] = replace(lists[-1], last=tuple(last))
        lists[0] = replace(lists[0], every=(*lists[0].every, *every))
        return chained(lists)


@dataclass
class _CallOfBackbone:
    """A hook on a backbone whose layers are cut."""

    path: str  # of the backbone
    withheld: Sequence[str]  # options that ask for what lies on several ranks
    ignored: Sequence[str] = ()  # inputs that only the first stage reads
    stage_input: StageInput | None = None  # what stages receive; None if the backbone is not cut into stages
    pass_number: int = -1

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Refuse what the source of the module around did not show; drop what only the first stage reads."""
        if args:
            kwargs = {**inspect.signature(module.forward).bind_partial(*args).arguments, **kwargs}
        for option in self.withheld:
            if kwargs.get(option):
                raise ValueError(_WITHHELD.format(name=_named(self.path), option=option))
        received = self.stage_input
        if received is not None:
            if self.pass_number == received.pass_number:
                raise ValueError(
                    f"{_named(self.path)} is called several times in a pass, and pipeline stages run it once; call it "
                    "once, with all inputs in one batch, or use pp_size=1"
                )
            self.pass_number = received.pass_number
            if received.hidden is not None:
                kwargs = {name: value for name, value in kwargs.items() if name not in self.ignored}
        return (), kwargs


def _named_by(table: Mapping[str | type[nn.Module], ModulePolicyDescription], model: nn.Module) -> Iterator[str]:
    """Yield the paths of the modules that a table changes."""
    by_name = {key if isinstance(key, str) else key.__name__: each for key, each in table.items()}
    for path, module in model.named_modules():
        if (found := description_of(by_name, path, module)) is not None:
            yield from (join(path, each.suffix) for each in found.sub_module_replacement)
            if replace(found, sub_module_replacement=[]) != ModulePolicyDescription():
                yield path


def _parents(path: str) -> list[str]:
    """Return the paths of the modules around the one at `path`, without the model itself."""
    parts = path.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


def _resolved(model: nn.Module, path: str) -> tuple[str, Any]:
    """Return the path of the innermost module that a path names, and what it names there; None for plain values."""
    found: Any = model
    at: list[str] = []
    for name in path.split("."):
        if name in found._modules:
            found = found._modules[name]
            at.append(name)
            continue
        value = getattr(found, name, None)
        if name in GETTERS:
            found = value()
            at = path_of(model, found).split(".")
        elif isinstance(value, nn.Parameter) or inspect.isroutine(value):
            return ".".join(at), None if hasattr(nn.Module, name) else value
        else:
            return ".".join(at), None
    return ".".join(at), found


def _named(path: str) -> str:
    """Return how code of the module names what is at a path: "self.towers[0].text"."""
    return re.sub(r"\.(\d+)", r"[\1]", f"self.{path}")


def _parameters_at(module: nn.Module, suffix: str) -> list[nn.Parameter]:
    return list(module.get_submodule(suffix).parameters()) if has_module(module, suffix) else []
