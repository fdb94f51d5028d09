"""Guards for boosted models and optimizers: uses that would train or save wrong numbers are refused.

Other engines probe an object for attributes of their own before they wrap it. The guards raise on these attributes.
So do backward passes whose gradients would differ from those of the global batch; of some a script is warned.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from booster.errors import ConfigurationError
from booster.logging import get_logger
from booster.plugin import CheckpointIO, check_lr_scheduler
from booster.wrappers import ModelWrapper, OptimizerWrapper
from plugins.hybrid_parallel.distributed.mesh import EP, HybridMesh
from plugins.hybrid_parallel.loss.arithmetic import SumOverReplicas, nodes_of
from shardformer.layers.parallel_module import hook_gradient
from shardformer.loss.terms import IGNORE_INDEX
from shardformer.shard_spec import grad_group_of, spec_of
from shardformer.utils.untraced import untraced

if TYPE_CHECKING:
    from plugins.hybrid_parallel.step.user_loop import UserLoop
    from plugins.hybrid_parallel.zero.bucket_layout import TiedParameter


# Attribute that an engine reads first -> the engine.
_BOOSTED_ENGINES = {
    "Trainer": "booster.integrations.transformers.boosted(Trainer)(…, plugin=plugin)",
    "Accelerator.prepare": "booster.integrations.accelerate.Accelerator(plugin=plugin)",
}
_ASKED_OF_MODELS = {
    "_ddp_params_and_buffers_to_ignore": "DistributedDataParallel",
    "_is_accelerate_prepared": "Accelerator.prepare",
    "accepts_loss_kwargs": "Trainer",
}
# Methods of transformers' models that replace modules or weights.
_BEFORE_BOOST = frozenset(
    {
        "add_adapter",
        "init_weights",
        "load_adapter",
        "resize_token_embeddings",
        "set_attn_implementation",
        "set_input_embeddings",
        "set_output_embeddings",
        "tie_weights",
    }
)
_LOCAL_STATE = "model.state_dict() has this rank's part of the model alone"
_SAVE_MODEL = (
    "call booster.save_model(model, directory) on all ranks, or what the script has: accelerator.save_model, "
    "trainer.save_model, model.save_pretrained"
)
# Packages that read a state dict to load, copy or gather it.
_READ_STATES = frozenset(("torch", "booster", "plugins", "shardformer", "peft"))
_log = get_logger(__name__)


class GuardedModel(ModelWrapper):
    """Wrapper of a sharded model that refuses unsupported use by other code.

    If each rank has the whole model (data and context parallelism), it is saved like any other. Its parameters have
    the names of the wrapped model.
    """

    def __init__(self, module: nn.Module, mesh: HybridMesh) -> None:
        super().__init__(module)
        self.mesh = mesh
        self.optimizers: list[Any] = []  # a live list, which the optimizers share; passes wait for what they gather
        self.gathers: Any = None  # gathers the parameters that ranks shard (ZeRO stage 3)
        self.files = ModelFiles()

    # ----- engines around it -----

    def __getattr__(self, name: str) -> Any:
        _refuse_what_has_moved(self, name, "model")
        if name in _ASKED_OF_MODELS:
            _refuse_engine(_ASKED_OF_MODELS[name])
        if name in _BEFORE_BOOST:
            return partial(_refuse_change, name)
        return super().__getattr__(name)

    def _replicate_for_data_parallel(self) -> NoReturn:
        _refuse_engine("DataParallel")

    def _marked_by_fsdp(self, value: bool) -> NoReturn:
        _refuse_engine("FSDP")

    _is_fsdp_managed_module = property(None, _marked_by_fsdp)

    @property
    def _torchdynamo_orig_callable(self) -> NoReturn:
        """What `torch.compile` asks for first, since 2.15 past `__getattr__`; others may walk all attributes."""
        if sys._getframe(1).f_globals.get("__name__", "").startswith("torch._dynamo"):
            _refuse_compiler()
        raise AttributeError("_torchdynamo_orig_callable")

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse `torch.compile`."""
        _refuse_compiler()

    @staticmethod
    def refuse_outer_engine() -> None:
        """Refuse to run inside a module that another engine has wrapped."""
        if DistributedDataParallel._get_active_ddp_module() is not None:
            _refuse_engine("DistributedDataParallel")

    # ----- its weights -----

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds every weight of the model, unsharded."""
        cut = (spec_of(param).full_shape != tuple(param.shape) for param in self.module.parameters())
        return self.mesh.size("pp") == 1 and not any(cut)

    @contextmanager
    def summon_full_params(self, writeback: bool = True) -> Iterator[None]:
        """Have the parameters of this rank whole in this context, under ZeRO stage 3 too; all ranks must enter it.

        Args:
            writeback: whether values that are changed in place, in the same way on all replicas, stay so under stage 3.
        """
        self._wait_for_parameters()
        with self.gathers.whole(writeback) if self.gathers else nullcontext():
            yield

    def unwrap(self) -> nn.Module:
        """Return the sharded model itself."""
        self._wait_for_parameters()
        return super().unwrap()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Yield the names and shards of the parameters of this rank."""
        self._wait_for_parameters()
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        """Yield the names and values of the buffers of this rank."""
        return self.module.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the wrapped model's state dict; if this rank holds only a part, as one that cannot be saved."""
        with self.summon_full_params(writeback=False):
            state = self.module.state_dict(*args, **kwargs)
            if self.gathers and not kwargs.get("keep_vars"):
                for name, value in state.items():
                    state[name] = value.clone() if isinstance(value, Tensor) else value
        if self.is_whole:
            return state
        if "destination" in kwargs and hasattr(state, "_metadata"):  # of a module around this one
            path = kwargs.get("prefix", "").removesuffix(".")
            state._metadata[path] = LocalMetadata(state._metadata.get(path, {}))
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load this rank's state dict, or the whole model's on all ranks; optimizers follow in their next step."""
        if assign:
            raise ConfigurationError(
                "model.load_state_dict(assign=True) would replace weights that boost() has shared out; leave assign out"
            )
        try:
            with self.summon_full_params():
                return self.module.load_state_dict(state_dict, strict)
        except RuntimeError as error:
            if self.is_whole:
                raise
            raise ConfigurationError(
                f"model.load_state_dict() takes this rank's part of the model under {self._cut_by()}, or the whole "
                f"model's state on all ranks, and got neither: {error}"
            ) from error

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *given: Any) -> None:
        """Load as a part of another module, whose `state_dict` names these weights as the wrapped model does."""
        for name in [each for each in state_dict if each.startswith(prefix)]:
            state_dict[f"{prefix}module.{name.removeprefix(prefix)}"] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *given)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ConfigurationError(
            "a model that boost() returned holds process groups and cannot be pickled; instead of torch.save(model) "
            "use booster.save_model(model, directory), or booster.save_checkpoint to continue later; for an average of "
            "weights (EMA) use copy.deepcopy(model) or torch's AveragedModel(model)"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GuardedModel:
        """Refuse `to`, `half`, `cuda` if they change weights, which optimizers keep; "cpu:0" is the CPU."""
        weights = self.module.parameters() if self.optimizers else ()
        if self.gathers:  # a tensor for each kind of weight, which this rank may not have
            kinds = {(weight.dtype, weight.device) for weight in weights}
            weights = [torch.zeros(1, dtype=dtype, device=device) for dtype, device in kinds]
        copied = False
        for weight in weights:
            found = fn(weight.data)
            is_copy = found.data_ptr() != weight.data_ptr()
            same_kind = (found.dtype, found.device) == (weight.dtype, weight.device)
            if is_copy and not (same_kind and torch.equal(found, weight)):
                raise ConfigurationError(
                    "boost() has put the model in its place and precision, and its optimizer works on these weights; "
                    "convert the model before boost(), or use HybridParallelPlugin(precision=…)"
                )
            copied = copied or is_copy
        return self if self.gathers or copied else super()._apply(fn, recurse)

    def _wait_for_parameters(self) -> None:
        for optimizer in self.optimizers:
            optimizer.wait_for_parameters()

    def _cut_by(self) -> str:
        sizes = {"tp_size": "tp", "pp_size": "pp", "ep_size": EP}
        return ", ".join(f"{name}={size}" for name, axis in sizes.items() if (size := self.mesh.size(axis)) > 1)


@dataclass
class ModelFiles:
    """How a model's weights are gathered and written."""

    # returns what writes and gathers models, which is imported when it is first needed; set by the plugin
    io: Callable[[], CheckpointIO] | None = None
    state: Mapping[str, Tensor] | None = None  # the whole weights, while a method of the model writes them
    number: int = 0  # of the answer by which this rank writes its part for rank 0


class LocalState(OrderedDict[str, Any]):
    """State dict of one rank's shards: it can be loaded into this model again, but not saved to a file.

    Args:
        gather: returns the whole state dict, on all ranks; all of them call it.
    """

    def __init__(self, state: Any = (), gather: Callable[[], dict[str, Tensor]] | None = None) -> None:
        super().__init__(state)
        self.gather = gather

    def items(self) -> ItemsView[str, Any]:
        """Return names and tensors; refuse safetensors, which would write them, and warn code that may do so later."""
        reader = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        if reader == "safetensors":
            _refuse_local_file()
        if reader not in _READ_STATES:
            _warn_of_local_state()
        return super().items()

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalState:
        return LocalState(((name, copy.deepcopy(value, memo)) for name, value in self.items()), self.gather)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse_local_file()


class LocalMetadata(dict[str, Any]):
    """What torch notes about a module in a state dict, here of one rank's shards: it keeps that from being saved."""

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalMetadata:
        return LocalMetadata(self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse_local_file()


class WholeState(dict[str, Tensor]):
    """State dict of the whole model, gathered from all ranks: it may be saved, as torch's own state dicts are."""

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return OrderedDict, (), None, None, iter(self.items())  # which `torch.load` opens with `weights_only`


class GuardedOptimizer(OptimizerWrapper):
    """Wrapper of an optimizer that refuses unsupported use by other code."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ConfigurationError(
            "an optimizer that boost() returned belongs to its model and process groups, and cannot be copied or "
            "pickled; use booster.save_optimizer(optimizer, directory), or optimizer.state_dict() for this rank's part"
        )

    def __getattr__(self, name: str) -> Any:
        _refuse_what_has_moved(self, name, "optimizer")
        if name == "_step_supports_amp_scaling":
            raise ConfigurationError(
                "torch.amp.GradScaler cannot unscale the gradients of a boosted optimizer; leave it out and use "
                "HybridParallelPlugin(precision='fp16'), which scales the loss by itself"
            )
        if name == "_is_accelerate_prepared":
            _refuse_engine("Accelerator.prepare")
        found = super().__getattr__(name)
        return partial(_refuse_half_step, name) if name in ("first_step", "second_step") else found


def release(model: GuardedModel) -> None:
    """Release what a model and its optimizers hold, after `relayout` has moved their state; they refuse further use."""
    for optimizer in list(model.optimizers):
        optimizer.__dict__.clear()
    model.__dict__.clear()


def _refuse_what_has_moved(found: GuardedModel | GuardedOptimizer, name: str, kind: str) -> None:
    if not found.__dict__ and not name.startswith("__"):
        raise ConfigurationError(
            f"booster.relayout has moved the state of this {kind} to another layout; use the {kind} that it returned"
        )


def _refuse_engine(engine: str) -> NoReturn:
    instead = _BOOSTED_ENGINES.get(engine)
    instead = (
        f"leave {engine} out and train with booster.execute_pipeline, or with model(**batch) and booster.backward"
        if instead is None
        else f"leave out boost(), and use {instead} on the plain model"
    )
    raise ConfigurationError(
        f"{engine} cannot take what boost() returned, which shares out batches and averages gradients by itself; "
        f"{instead}"
    )


@untraced  # raising in a graph would only end the trace
def _refuse_compiler() -> NoReturn:
    raise ConfigurationError(
        "torch.compile cannot trace the communication of a boosted model; leave it out, or use "
        "compile_layers=True, which compiles each layer between these"
    )


def refuse_traced_call() -> None:
    """Refuse to run in a function that `torch.compile` traces."""
    if torch.compiler.is_compiling():
        _refuse_compiler()


def _refuse_half_step(method: str, *args: Any, **kwargs: Any) -> NoReturn:
    """Refuse the two halves of a step of SAM: the user's optimizer has gradients only in `step`."""
    raise ConfigurationError(
        f"optimizer.{method}() would find no gradients, which boost() has shared out; give the pass to "
        "optimizer.step(closure)"
    )


def _refuse_local_file() -> NoReturn:
    raise ConfigurationError(f"{_LOCAL_STATE}; instead of saving it {_SAVE_MODEL}")


@cache
def _warn_of_local_state() -> None:
    _log.warning("%s; to save the model %s", _LOCAL_STATE, _SAVE_MODEL)


def _refuse_change(method: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise ConfigurationError(
        f"model.{method}() changes weights or modules that boost() has shared out; call it before boost()"
    )


def check_boosted(objects: Mapping[str, Any]) -> None:
    """Refuse objects, by kind ("model", "optimizer", "dataloader", …), whose state cannot be saved or restored."""
    checks = {
        "model": check_boosted_model,
        "optimizer": check_boosted_optimizer,
        "lr_scheduler": check_lr_scheduler,
        "dataloader": check_resumable_loader,
    }
    for kind, check in checks.items():
        if objects.get(kind) is not None:
            check(objects[kind])


def check_boosted_model(model: Any) -> None:
    """Refuse a model that `boost` did not return."""
    refuse_traced_call()
    if isinstance(model, GuardedModel):
        return
    kind = type(model).__name__
    if not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"a {kind} stands where the model belongs; the order is booster.execute_pipeline(data_iter, model, …), "
            "booster.save_model(model, directory)"
        )
    inside = next((path for path, each in model.named_modules() if isinstance(each, GuardedModel)), None)
    if inside is not None:
        raise ConfigurationError(f"the model is {kind} around the one that boost() returned; pass its .{inside}")
    raise ConfigurationError(
        f"the model is a plain {kind}; pass the model that boost() returned: "
        "model, optimizer, … = booster.boost(model, optimizer, …)"
    )


def check_boosted_optimizer(optimizer: Any) -> None:
    """Refuse an optimizer that `boost` did not return."""
    refuse_traced_call()
    if not isinstance(optimizer, Optimizer):
        raise ConfigurationError(
            f"a {type(optimizer).__name__} stands where the optimizer belongs; the order is booster.backward(loss, "
            "optimizer), booster.execute_pipeline(data_iter, model, criterion, optimizer)"
        )
    if not isinstance(optimizer, GuardedOptimizer):
        raise ConfigurationError(
            f"the optimizer is a plain {type(optimizer).__name__}; pass the one that boost() returned for one that "
            "was made before: model, optimizer, … = booster.boost(model, optimizer, …)"
        )


def check_tied(tied: Mapping[nn.Parameter, TiedParameter], model: nn.Module) -> None:
    """Check that all stages agree on whether a tied parameter is frozen: its name differs from stage to stage.

    Raises:
        ConfigurationError: if a parameter is frozen on only some of its stages; raised on all of them.
    """
    for param, tie in sorted(tied.items(), key=lambda item: item[1].order):
        flags = torch.tensor([int(param.requires_grad), int(not param.requires_grad)])
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=tie.group)
        if flags.tolist() == [1, 1]:
            name = next(name for name, other in model.named_parameters() if other is param)
            raise ConfigurationError(
                f"{name} is one weight on several pipeline stages, and only some of them have frozen it; set "
                "requires_grad by every name that the tied weight has"
            )


def check_criterion(criterion: Any) -> None:
    """Refuse what stands where the criterion belongs, and cannot be called with outputs and a batch."""
    is_other = isinstance(criterion, Optimizer) or "torch.nn." in str(getattr(criterion, "__module__", ""))
    if is_other or not callable(criterion):
        raise ConfigurationError(
            f"a {type(criterion).__name__} stands where the criterion belongs, a function of outputs and batch; "
            "write optimizer=optimizer, or criterion=lambda outputs, batch: loss(outputs.logits, batch['labels'])"
        )
    try:
        inspect.signature(criterion).bind(None, None)
    except ValueError:  # a built-in function does not tell what it takes
        return
    except TypeError:
        raise ConfigurationError(
            f"the criterion takes {inspect.signature(criterion)}, and is called with the outputs and the batch; write "
            "criterion=lambda outputs, batch: loss(outputs.logits, batch['labels'])"
        ) from None


def check_resumable_loader(loader: Any) -> None:
    """Refuse a loader that does not know its position, and what is no loader."""
    if not all(callable(getattr(loader, name, None)) for name in ("__iter__", "state_dict")):
        raise ConfigurationError(
            f"the loader is a plain {type(loader).__name__}, which cannot say where it is in its epoch; pass the one "
            "that boost() returned: model, optimizer, loader = booster.boost(model, optimizer, loader)"
        )


_COMPARED_PASSES = 100  # backward passes whose labels are counted at most: each waits for a GPU
_MEAN = 1  # reduction="mean", as torch numbers it
_MEANS_OF_LABELS = ("NllLossBackward0", "NllLoss2DBackward0")


def refuse_backward(model: nn.Module) -> None:
    """Refuse backward passes into a model without an optimizer: nothing would sum its gradients over ranks."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            hook_gradient(parameter, refuse_without_optimizer)


def refuse_backward_of_step(*args: Any, **kwargs: Any) -> NoReturn:
    """Replace `backward` of the loss of a step, which has no graph."""
    raise ConfigurationError(
        "result.loss.backward() has nothing to do: execute_pipeline runs the backward pass itself where it gets "
        "optimizer=optimizer; call optimizer.step()"
    )


def check_weights_in_loss(loss: Tensor) -> None:
    """Refuse a loss that reads, besides the model's outputs, a weight whose gradient tensor-parallel ranks sum.

    Under sequence parallelism such a weight (of a norm, say) serves this rank's tokens alone, so its gradient is a
    partial sum; but all ranks read the whole weight, and would count a penalty on it once each. The outputs reach the
    weight through a collective of ours, a function in Python, at which the search ends.

    Raises:
        ConfigurationError: if the loss reads one; raised on all ranks, which compute the same loss.
    """
    for node in nodes_of(loss):
        weight = getattr(node, "variable", None)  # of a leaf of the graph
        if weight is not None and grad_group_of(weight) is not None:
            raise ConfigurationError(
                f"the loss reads a weight of shape {list(weight.shape)} besides the model's outputs, and under "
                "sequence parallelism each tensor-parallel rank would count it; compute it from the model's outputs (a "
                "penalty on weights is the optimizer's weight_decay)"
            )


class LabelCounts:
    """Says once where a mean over labels is not that of the global batch, because replicas have other counts a row.

    The number of labels is that of torch's cross entropy in the loss, or else of the labels that the model was given.
    So it does where a script multiplies its loss by the number of processes, which it does not need here.
    """

    def __init__(self, mesh: HybridMesh) -> None:
        self._mesh = mesh
        self._passes_left = _COMPARED_PASSES if mesh.size("dp") > 1 else 0
        self._is_factor_known = False

    def check_factor(self, loss: Tensor, by_rows: bool) -> None:
        """Say that a loss (0-d) is multiplied by the ranks, or by the replicas although these count `by_rows`."""
        ranks, replicas = dist.get_world_size(), self._mesh.size("dp")
        counted = {count for count, is_wrong in ((ranks, ranks != replicas), (replicas, by_rows)) if is_wrong} - {1}
        found = counted.intersection(_factors_of(loss))
        if found and not self._is_factor_known and dist.get_rank() == 0:
            _log.warning(
                "the loss is multiplied by %d, as by a number of processes (%d ranks, %d replicas); its gradients are "
                "those of all rows without it: leave it out, or read accelerator.num_processes after the model's call",
                *(found.pop(), ranks, replicas),
            )
            self._is_factor_known = True

    def compare(self, loss: Tensor, batch: UserLoop) -> None:
        """Compare counts; each replica calls this. `loss`: a mean of the script, 0-d; `batch`: the last that it saw."""
        if not self._passes_left:
            return
        self._passes_left -= 1
        mine = torch.tensor([float(_labels_in(loss, batch.labels)), batch.rows], dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(self._mesh.size("dp"))]
        dist.all_gather(everyone, mine, group=self._mesh.group("dp"))
        counts = sorted((labels / rows, labels, rows) for labels, rows in map(Tensor.tolist, everyone) if rows)
        if not counts or counts[0][0] == counts[-1][0]:
            return
        self._passes_left = 0
        if dist.get_rank() == 0:
            (_, least, rows_of_least), (_, most, rows_of_most) = counts[0], counts[-1]
            _log.warning(
                "one replica has %g labels in %d rows, and another %g in %d; replicas count by their rows, so that a "
                "mean over labels is not that of the global batch: booster.backward((sum, count), optimizer) is, with "
                "the sum over labels and their number",
                *(most, rows_of_most, least, rows_of_least),
            )


def _factors_of(loss: Tensor) -> Iterator[float]:
    """Yield the numbers that a script has multiplied its loss by, the last first."""
    node = loss.grad_fn
    while node is not None and node.name() in ("MulBackward0", "DivBackward0"):
        factor = node._saved_other
        if node.name() == "MulBackward0" and factor is not None and factor.dim() == 0 and factor.device.type == "cpu":
            yield float(factor)
        inputs = [each for each, _ in node.next_functions if each is not None]
        node = inputs[0] if len(inputs) == 1 else None


def _labels_in(loss: Tensor, labels: Any) -> Tensor | float:
    """Return the number of labels that this replica's loss is a mean over; 0 if it is none of the script's own."""
    counts, reads_loss = list[Tensor](), False
    for node in nodes_of(loss):
        if node.name() in _MEANS_OF_LABELS and node._saved_reduction == _MEAN:
            counts.append(node._saved_total_weight)
        reads_loss |= node.name() == f"{SumOverReplicas.__name__}Backward"
    if counts:
        return torch.stack([each.double() for each in counts]).sum()
    # Without the model's loss, the labels are there for the script's.
    is_counted = isinstance(labels, Tensor) and labels.dim() > 1 and not labels.is_floating_point()
    return (labels != IGNORE_INDEX).sum() if is_counted and not reads_loss else 0.0


def refuse_without_optimizer(gradient: Tensor) -> NoReturn:
    """Refuse a gradient of a model that has no optimizer."""
    raise ConfigurationError(
        "backward() reached a model that was boosted without its optimizer, so that nothing sums its gradients over "
        "ranks; use model, optimizer = booster.boost(model, optimizer) and booster.backward(loss, optimizer)"
    )


def check_dtype(dtype: torch.dtype | None) -> None:
    """Refuse a dtype to which weights cannot be rounded."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigurationError(
            f"dtype={dtype!r} is no floating-point dtype of torch, to which weights are rounded; use torch.bfloat16"
        )
