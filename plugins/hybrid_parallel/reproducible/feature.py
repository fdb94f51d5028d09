"""The option `reproducible`: what it replaces, what it is refused with, and the blocks that layers are computed in.

autograd adds up the gradients of all uses of a tied parameter before a hook sees them, rounding the sum. If two stages
of a pipeline hold the parameter, each has the gradient of its own use. So that both are the same sum, modules that
share a parameter read it through an alias, whose gradient is given to the bucket directly.

Units are the samples that every pass runs over, whatever the layout, and their random numbers. How a matrix product
rounds may depend on its shape. A unit has a fixed number of samples, so that its products have the same shapes on every
rank of every layout. The generator (`UnitStream`) is seeded when a pass enters a layer or another module outside of the
layers, and when it leaves one. What is drawn in between depends on nothing but the seed, the step, the position of the
unit in the global batch, the name of the module and how often it was called in this pass.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.modules.batchnorm import _BatchNorm

from booster.errors import ConfigurationError
from booster.logging import get_logger
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.data.microbatch import split_batch
from plugins.hybrid_parallel.distributed.mesh import DP_CP, HybridMesh, block_group
from plugins.hybrid_parallel.features.feature import Feature, Parts
from plugins.hybrid_parallel.reproducible.batch_invariance import BatchInvariant
from plugins.hybrid_parallel.reproducible.reducer import ExactBucket, ExactReducer
from plugins.hybrid_parallel.zero.bucket_layout import give_gradient
from plugins.hybrid_parallel.zero.granularity import Granularity, granularity_of
from shardformer.distributed.process_groups import world_group
from shardformer.distributed.random import SharedStream, seed_all_generators
from shardformer.peft import model_inside
from shardformer.shardformer import ModelSharder
from shardformer.transforms.layout_checks import InBlocks, block_problems, check_policy
from shardformer.utils.module_paths import alias_parameters, text_config
from shardformer.utils.untraced import in_backward

if TYPE_CHECKING:
    from plugins.hybrid_parallel.boosted.model import HybridParallelModel
    from plugins.hybrid_parallel.step.passes import Pass


class UnitStream(SharedStream):
    """Random stream of a model that is seeded by position."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._step, self._first, self._next, self._unit = -1, 0, 0, 0
        self._calls: Counter[str] = Counter()
        self._seeds: dict[tuple[str, int], int] = {}  # (name, seed before its call) -> seed, for recomputation
        self._is_active = False
        self._attached: set[nn.Module] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> UnitStream:
        """Serve the copies of a model too."""
        return self

    def restart(self, step: int) -> None:
        """Do nothing: a step that is resumed has its numbers."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return nothing: the numbers follow from the number of the step."""
        return {}

    def load_state_dict(self, states: dict[str, Tensor]) -> None:
        """Do nothing, see `state_dict`."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this the default generator inside the context; restore the user's states afterwards."""
        before, self._is_active = self._is_active, True
        try:
            with super().active():
                yield
        finally:
            self._is_active = before

    def begin_pass(self, step: int, units_before: int, units: int) -> None:
        """Note which samples come next; `units_before`: of this batch on the replicas before this one."""
        if step != self._step:
            self._step, self._next = step, 0
            self._seeds.clear()
        self._first = self._next + units_before
        self._next += units

    def begin_unit(self, index: int) -> None:
        """Seed for unit `index` of this replica's part of the batch."""
        if self._is_active:
            self._unit = self._first + index
            self._calls.clear()
            seed_all_generators(self._seed_of(""))

    def attach(self, model: nn.Module) -> None:
        """Seed at the layers of `model`, and at its other modules that have no modules inside; call it once a stage."""
        self._attach_below(model, "")

    def _attach_below(self, module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            where = f"{path}.{name}" if path else name
            if child in self._attached:
                continue
            if isinstance(module, nn.ModuleList) or not any(True for _ in child.children()):
                self._attached.add(child)
                child.register_forward_pre_hook(partial(self._enter, where))
                child.register_forward_hook(partial(self._leave, where))
            else:
                self._attach_below(child, where)

    def _enter(self, name: str, *_: Any) -> None:
        if not self._is_active:
            return
        key = (name, torch.initial_seed())
        if not in_backward():
            self._calls[name] += 1
            self._seeds[key] = self._seed_of(f"{name}:{self._calls[name]}")
        # Recomputation restores the generator first, so that the key is that of the forward pass.
        if key in self._seeds:
            seed_all_generators(self._seeds[key])

    def _leave(self, name: str, *_: Any) -> None:
        if self._is_active and not in_backward():
            seed_all_generators(self._seed_of(f"{name}:{self._calls[name]}:after"))

    def _seed_of(self, place: str) -> int:
        text = f"{self.seed}:{self._step}:{self._unit}:{place}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


class Units:
    """Cuts batches into units."""

    # whether positions are counted from the first token that is no padding, as `generate` does
    counts_positions: Callable[[], bool] = staticmethod(lambda: False)

    def __init__(self, size: int, mesh: HybridMesh, stream: UnitStream) -> None:
        self.size, self._mesh, self.stream = size, mesh, stream

    def begin(self, rows: int, step: int, replicas_wait: bool) -> int:
        """Begin a pass over a batch; all replicas call it, with their own `rows`.

        Args:
            replicas_wait: whether replicas wait for one another in each pass.

        Returns:
            The number of passes of this replica; those after its own units are over placeholders.

        Raises:
            ConfigurationError: if the samples of a replica are no whole units; raised on all replicas.
        """
        everyone = self._rows_of_replicas(rows)
        for number in everyone:
            if number % self.size:
                raise ConfigurationError(
                    f"reproducible_unit={self.size} does not divide the {number} samples of a replica; use batches of "
                    "a multiple of it with drop_last=True, or reproducible_unit=1"
                )
        units = [number // self.size for number in everyone]
        rank = self._mesh.rank("dp")
        self.stream.begin_pass(step, sum(units[:rank]), sum(units))
        return max(units) if replicas_wait else units[rank]

    def refuse_sums(self) -> None:
        """Refuse a loss (sum, count) of several replicas, each of which has a sum of its own."""
        if self._mesh.size(DP_CP) > 1:
            raise ConfigurationError(
                "booster.backward got (sum, count), whose sums over replicas round in another way than that of all, so "
                "that reproducible=True does not hold; use outputs.loss, or a criterion of execute_pipeline"
            )

    def cut(self, batch: Mapping[str, Any], rows: int, tokens: Mapping[str, int]) -> list[dict[str, Any]]:
        """Return the units of a batch, in memory of their own: how a kernel rounds may depend on where it begins.

        Args:
            batch: its samples are whole units.
            rows: number of its samples.
            tokens: of images and sounds, see `media_tokens`.
        """
        batch = _with_positions(batch) if rows and self.counts_positions() else batch
        units = split_batch(batch, rows // self.size, tokens=tokens, rows=rows) if rows else []
        return [{name: _copied(value) for name, value in unit.items()} for unit in units]

    def _rows_of_replicas(self, rows: int) -> Sequence[int]:
        if self._mesh.size("dp") == 1:
            return [rows]
        found = [torch.zeros((), dtype=torch.int64) for _ in range(self._mesh.size("dp"))]
        dist.all_gather(found, torch.tensor(rows), group=self._mesh.group("dp"))
        return [int(each) for each in found]


def _copied(value: Any) -> Any:
    is_values = isinstance(value, Tensor) and value.is_floating_point()
    return value.clone(memory_format=torch.contiguous_format) if is_values else value


def _with_positions(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a batch of texts with positions, if there is padding in front of a text and they are not given."""
    mask = batch.get("attention_mask")
    is_text = not any(isinstance(each, Tensor) and each.is_floating_point() for each in batch.values())
    if "position_ids" in batch or not is_text or mask is None or mask.dim() != 2 or bool(mask[:, 0].all()):
        return batch
    return {**batch, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


_logger = get_logger(__name__)

_SHORT = (torch.bfloat16, torch.float16)
_FIXED_WORKSPACES = (":4096:8", ":16:8")  # with which products of cuBLAS are deterministic, by NVIDIA's documentation


class Reproducible(Feature):
    """Units of samples, random numbers by position, and exact sums of gradients."""

    def check(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], mesh: HybridMesh) -> None:
        """Refuse models, optimizers and devices for which bits may depend on the layout; pin kernels."""
        check_reproducible(model, optimizers, mesh.size(DP_CP), mesh.device, self.config.mixed_precision.precision)

    def sharded(self, parts: Parts) -> None:
        """Replace micro-batches by units, and what holds and reduces gradients; the first rank's seed counts."""
        shared_seed = torch.tensor(parts.seed, dtype=torch.int64)
        if dist.get_world_size() > 1:
            dist.broadcast(shared_seed, src=0, group=world_group())
        parts.stream = UnitStream(int(shared_seed))
        parts.units = Units(self.config.debugging.reproducible_unit, parts.mesh, parts.stream)
        parts.bucket, parts.reducer = ExactBucket, ExactReducer

    def finished(self, model: HybridParallelModel) -> None:
        """Have modules of this rank draw by unit, and use tied parameters apart; refuses stages that share layers."""
        check_names_of_tied(model.tied, model.unwrap(), model.origin.aliases)
        runtime, modules = model.runtime, []
        for stage in runtime.stages:
            with runtime.viewing(stage):
                model.units.stream.attach(runtime.module)
                modules += runtime.module.named_modules(remove_duplicate=False)
        separate_uses(modules)
        runtime.register_microbatch_hook(model.units.stream.begin_unit)
        model.around_passes.append(partial(_of_each_token, model))
        takes_positions = "position_ids" in getattr(model.options.signature, "parameters", ())
        model.units.counts_positions = lambda: takes_positions and model.losses.scores is not None


def _of_each_token(model: HybridParallelModel, this: Pass) -> AbstractContextManager[Any]:
    """Let passes that generate or score give a token the same bits, unless attention chooses its own order."""
    scores = model.losses.scores is not None
    if not this.generates and not scores:
        return nullcontext()
    problem = _not_invariant(model.unwrap())
    if problem and scores:
        raise ConfigurationError(
            f"log-probabilities under reproducible=True equal those of generate(), bit by bit, and {problem}; use "
            "attn_implementation='sdpa' and a model of attention, or reproducible=False"
        )
    return nullcontext() if problem else BatchInvariant()


def _not_invariant(model: nn.Module) -> str:
    """Return why a token's bits would depend on other tokens; empty if they do not."""
    inside = model_inside(model)
    if getattr(inside, "_is_stateful", False):
        return f"{type(inside).__name__} keeps a state of all tokens, which it computes in chunks"
    found = getattr(text_config(getattr(inside, "config", None)), "_attn_implementation", None)
    kernel = getattr(found, "kernel", found)
    return "" if kernel == "sdpa" else f"attn_implementation={kernel!r} adds up keys in an order of its own"


def check_reproducible(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    num_replicas: int,
    device: torch.device,
    precision: str,
) -> None:
    """Refuse, by the first, what makes bits depend on the layout; pin kernels; `precision`: the option."""
    is_short = precision == "bf16" or any(each.dtype in _SHORT for each in model.parameters())
    if device.type == "cuda" and is_short:
        raise ConfigurationError(
            "reproducible=True refuses 16-bit products on GPUs, which rounded in another way from run to run on the "
            "one that was tested; use precision='fp32' and a model in fp32, or train on CPUs, or use "
            "reproducible=False"
        )
    _pin_kernels(device)
    if double := next((name for name, each in model.named_parameters() if each.dtype == torch.float64), None):
        raise ConfigurationError(
            f"{double} is in float64, and reproducible=True adds up gradients on a grid of fp32 values; use "
            "model.float(), or reproducible=False"
        )
    for path, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            raise ConfigurationError(
                f"{path} is a {type(module).__name__}, whose running statistics depend on how a batch is cut; use a "
                "model without batch norms, or reproducible=False"
            )
    for optim in optimizers:
        if granularity_of(optim) is not Granularity.ELEMENT:
            raise ConfigurationError(
                f"{type(optim).__name__} updates a value from other values of its parameter, whose sums depend on the "
                "layout; use AdamW, or reproducible=False"
            )
    # Losses are divided by the number of replicas and their gradients multiplied by it.
    inverse = torch.tensor(1.0 / num_replicas, dtype=torch.float32)
    if float(inverse * num_replicas) != 1.0:
        raise ConfigurationError(
            f"dp_size={num_replicas} times its inverse is not 1 in fp32, so that reproducible=True does not hold; use "
            "a power of two"
        )


def _pin_kernels(device: torch.device) -> None:
    """Have kernels round in one way from run to run."""
    if device.type == "cpu":
        if torch.get_num_threads() != 1:
            _logger.info("reproducible=True runs kernels in one thread a rank: how they round depends on their number")
            torch.set_num_threads(1)
    elif device.type == "cuda":
        if os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in _FIXED_WORKSPACES:
            raise ConfigurationError(
                "reproducible=True needs a fixed workspace of cuBLAS on GPUs, and CUBLAS_WORKSPACE_CONFIG is "
                f"{os.environ.get('CUBLAS_WORKSPACE_CONFIG', 'not set')}; set CUBLAS_WORKSPACE_CONFIG=:4096:8 before "
                "the job starts, or use reproducible=False"
            )
        if not torch.are_deterministic_algorithms_enabled():
            _logger.info("reproducible=True turns on torch.use_deterministic_algorithms")
            torch.use_deterministic_algorithms(True)
    else:
        raise ConfigurationError(
            f"reproducible=True is not proved for kernels of the device {device.type!r}; train on CPUs or CUDA "
            "GPUs, or use reproducible=False"
        )


def check_names_of_tied(tied: Collection[nn.Parameter], model: nn.Module, aliases: Mapping[str, Sequence[str]]) -> None:
    """Refuse layers that several stages share: one process adds up the gradients of all their calls by itself.

    Args:
        aliases: name -> the other names of the same parameter in the whole model.

    Raises:
        ConfigurationError: if there are some; raised on all ranks that hold them.
    """
    known = {*aliases, *(name for others in aliases.values() for name in others)}
    for name, parameter in model.named_parameters():
        if parameter in set(tied) and name not in known:
            raise ConfigurationError(
                f"{name} belongs to layers that several pipeline stages share, whose gradients reproducible=True does "
                "not add up in one order; use pp_size=1, or reproducible=False"
            )


class _Use(torch.autograd.Function):
    """One use of a parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter) -> Tensor:
        """Return an alias of the parameter."""
        ctx.parameter = parameter
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor | None:
        """Give the gradient to the parameter's bucket; leave it to autograd if it has none."""
        return None if give_gradient(ctx.parameter, grad) else grad


def separate_use(parameter: Tensor) -> Tensor:
    """Return an alias of a parameter, whose gradient is a summand of its own."""
    return _Use.apply(parameter)


def separate_uses(modules: Collection[tuple[str, nn.Module]]) -> None:
    """Give `modules` (name -> module, of this rank) that share a parameter aliases of it in training calls."""
    # A module with several names is called by each of them.
    names = Counter(module for _, module in set(modules))
    holders: dict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in names:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holders[parameter].append((module, name))
    shared: dict[nn.Module, list[str]] = defaultdict(list)
    for places in holders.values():
        if len(places) > 1 or names[places[0][0]] > 1:
            for module, name in places:
                shared[module].append(name)
    for module, own in shared.items():
        alias_parameters(module, partial(_aliases_of, own))


def _aliases_of(names: Sequence[str], module: nn.Module, _: tuple[Any, ...]) -> dict[str, Tensor]:
    if not torch.is_grad_enabled():
        return {}
    parameters = {name: module._parameters[name] for name in names}
    # Others have been replaced by aliases.
    return {name: separate_use(each) for name, each in parameters.items() if isinstance(each, nn.Parameter)}


_COUNTS = (4, 2)  # without an option, the first that the model takes


def tensor_group(model: nn.Module, config: HybridParallelConfig, mesh: HybridMesh) -> ProcessGroup:
    """Return a whole model's tensor-parallel group, if its blocks can be computed; all ranks call this."""
    count = _num_blocks(model, config)
    sequence_count = _num_sequence_blocks(model, config, count)
    return mesh.group("tp") if count == 1 else block_group(mesh, count, separate_use, sequence_count)


def _num_sequence_blocks(model: nn.Module, config: HybridParallelConfig, count: int) -> int:
    """Return the number of blocks of each sequence, whatever the layout; `count`: blocks of the layers."""
    asked = config.debugging.reproducible_sequence_blocks
    if asked == 1 or (asked is None and count == 1):
        return 1
    if count == 1:
        problem = _problem(model, config, _COUNTS[-1]) or "its layers are computed at once"
    else:
        problem = _problem(model, config, count, cuts_sequences=True)
    if not problem:
        return asked or count
    if asked is None:  # under sequence parallelism the model is refused for the same reason
        return 1
    raise ConfigurationError(
        f"reproducible_sequence_blocks={asked} cannot divide the sequences of {type(model).__name__}: "
        f"{problem.split(';')[0]}; use reproducible_sequence_blocks=1 without sequence parallelism, or "
        "reproducible=False"
    )


def _num_blocks(model: nn.Module, config: HybridParallelConfig) -> int:
    """Return the number of blocks of the layers, which must not depend on the layout."""
    asked, tp_size, name = config.debugging.reproducible_blocks, config.parallel.tp_size, type(model).__name__
    counts = _COUNTS if asked is None else (asked,)
    reasons = {count: _problem(model, config, count) for count in counts if count > 1}
    count = next((count for count, reason in reasons.items() if not reason), 1)
    if asked is not None and count != asked:
        raise ConfigurationError(
            f"reproducible_blocks={asked} cannot divide the layers of {name}: {reasons[asked]}; use "
            "reproducible_blocks=1 with tp_size=1, or reproducible=False"
        )
    if count % tp_size:
        reason = next((reason for size, reason in reasons.items() if reason and size <= tp_size), "")
        why = f", because {reason.partition(';')[0]}" if reason else ""  # without its own way out
        takes = not why and asked is None and tp_size.bit_count() == 1
        other = f"reproducible_blocks={tp_size} in every layout" if takes else "reproducible=False"
        raise ConfigurationError(
            f"tp_size*cp_size={tp_size} does not divide the reproducible_blocks={count} of {name}{why}; use a product "
            f"that divides {count}, or {other}"
        )
    return count


def _problem(model: nn.Module, config: HybridParallelConfig, count: int, cuts_sequences: bool = False) -> str:
    """Return why the model cannot be computed in blocks, or ""; `cuts_sequences`: in blocks of sequences too."""
    policy, kernels = config.policy, config.kernels
    options = {
        "custom_policy": policy.custom_policy is not None,
        "tp_info": policy.tp_info is not None,
        "sharding_dim": policy.sharding_dim is not None,
        "enable_jit_fused=True": kernels.enable_jit_fused,
        "enable_all_optimization=True": kernels.enable_all_optimization,
    }
    opaque = next((option for option, is_set in options.items() if is_set), None)
    if opaque is not None:
        return f"{opaque} does not tell how to compute a layer in blocks"
    shard_config = InBlocks(enable_sequence_parallelism=cuts_sequences)
    shard_config.count = count
    try:
        sharder = ModelSharder(model, shard_config)
        check_policy(sharder)
        problems = block_problems(sharder, count)
    except ValueError as error:  # no policy, or a layer that cannot be divided
        problems = [str(error)]
    problem = next(iter(problems), "").replace("tp_size=", "reproducible_blocks=")
    return problem.replace("enable_sequence_parallelism=True", "reproducible_sequence_blocks")
