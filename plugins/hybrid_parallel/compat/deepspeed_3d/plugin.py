"""`ThreeDPlugin`: plugin for a `DeepSpeed3DParallelConfig`, which adapts models and batches to the engine.

`tie_first` wraps a bare base model in its family's causal language model with a tied head: the last stage computes the
logits with a weight that is tied to the embedding of the first one, and kept in sync as any tied weight.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from booster.errors import ConfigurationError
from booster.logging import get_logger
from booster.plugin import TrainingObjects
from plugins.hybrid_parallel.compat.deepspeed_3d.config import DeepSpeed3DParallelConfig
from plugins.hybrid_parallel.compat.deepspeed_3d.patches import (
    ForwardPatches,
    LogitHelper,
    find_patched,
    helper_as_patch,
    reading_cut_logits,
)
from plugins.hybrid_parallel.plugin import HybridParallelPlugin
from shardformer.distributed.atorch import ParallelGroups


def with_tied_head(model: nn.Module, logit_helper: LogitHelper | None) -> nn.Module:
    """Wrap a bare base model in its family's causal language model; return any other model unchanged.

    A model that already has a head keeps it, tied or not.

    Args:
        logit_helper: computes the logits of the tied head; None for the family's own computation.

    Raises:
        ConfigurationError: the family has no head that consists only of the embedding, or `logit_helper` was given for
            a model that is not bare.
    """
    if is_bare(model):
        return _causal_model(model)
    name = type(model).__name__
    if logit_helper is not None:
        raise ConfigurationError(
            f"logit_helper computes logits from the input embedding, and {name} is no base model of transformers "
            "without a head; use logit_helper=None, or boost the base model alone"
        )
    _logger.info("tie_first changes nothing: %s is no base model of transformers without a head", name)
    return model


def is_bare(model: nn.Module) -> bool:
    """Check whether this is a base model of transformers without a head, such as `LlamaModel`."""
    from transformers import PreTrainedModel

    return isinstance(model, PreTrainedModel) and model.base_model is model and model.get_output_embeddings() is None


def _causal_model(base: nn.Module) -> nn.Module:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    name, embedding = type(base).__name__, base.get_input_embeddings()
    cls = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(base.config), None)
    if cls is None or not isinstance(embedding, nn.Embedding):
        raise ConfigurationError(
            f"tie_first=True finds no causal language model of the family of {name}; use tie_first=False, where "
            "loss_func gets the hidden states"
        )
    config = copy.deepcopy(base.config)
    config.tie_word_embeddings = True
    with torch.device("meta"):  # only shapes are needed: weights outside of the base model are refused or tied
        whole = cls(config)
    prefix = cls.base_model_prefix
    if type(getattr(whole, prefix, None)) is not type(base):
        raise ConfigurationError(
            f"tie_first=True: {cls.__name__} is not built around a {name}; boost a {cls.__name__}, or use "
            "tie_first=False"
        )
    setattr(whole, prefix, base)
    head = whole.get_output_embeddings()
    own = [key for key, tensor in _own_tensors(whole, prefix) if tensor is not getattr(head, "weight", None)]
    if own or head is None or head.weight.shape != embedding.weight.shape:
        raise ConfigurationError(
            f"tie_first=True: the logits of {cls.__name__} need more than the embedding of {name}"
            + (f", {', '.join(own[:3])}" if own else "")
            + f"; boost a {cls.__name__} with weights of its own, or use tie_first=False"
        )
    head.weight = embedding.weight
    whole.training = head.training = base.training
    share_config(base, base.config, whole.config)
    return whole


def _own_tensors(whole: nn.Module, prefix: str) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers outside of the base model."""
    named = [*whole.named_parameters(remove_duplicate=False), *whole.named_buffers()]
    return [(key, tensor) for key, tensor in named if not key.startswith(f"{prefix}.")]


def share_config(base: nn.Module, old: object, new: object) -> None:
    """Replace the configuration `old`, unchanged, by `new` in all modules of `base`, which share it."""
    for module in base.modules():
        if getattr(module, "config", None) is old:
            module.config = new


LossFunction = Callable[[Any, Any], Any]
_FORM = "((inputs...), (labels...)), or a mapping of the model's keyword arguments"


def names_of_inputs(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the positional parameters of a model's forward."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind in kinds)


class PairLoss:
    """Criterion of `execute_pipeline` that calls a loss function of logits and labels.

    Args:
        loss_func: (logits, labels) -> mean over samples, or (sum, count).
        model: the model that computed the logits; they stay sharded over the vocabulary if its head is.
        names: names of the labels in a batch, in order.
        is_tuple: whether `loss_func` takes a tuple of labels or a single tensor.
    """

    reads_parallel_logits = True

    def __init__(self, loss_func: LossFunction, model: nn.Module, names: Sequence[str], is_tuple: bool) -> None:
        self.loss_func, self.model = loss_func, model
        self.own_entries, self.is_tuple = tuple(names), is_tuple

    def __call__(self, outputs: Any, microbatch: Mapping[str, Any]) -> Any:
        """Compute the user's loss from the outputs and the labels of a micro-batch."""
        labels = tuple(microbatch[name] for name in self.own_entries)
        with reading_cut_logits(self.model):
            return self.loss_func(_logits_of(outputs), labels if self.is_tuple else labels[0])


def adapted(
    batch: Any, names: Sequence[str], model: nn.Module, criterion: LossFunction | None, needs_loss: bool
) -> tuple[Any, Callable[[Any, Any], Any] | None]:
    """Convert a batch to a mapping, and the loss function to a criterion for it.

    If the batch is a mapping, both are returned unchanged.

    Args:
        batch: a mapping, or ((inputs...), (labels...)).
        names: names of the model's inputs, in order.
        model: the model, for the criterion.

    Raises:
        ConfigurationError: the batch has another form or more inputs than the model, or a required loss function is
            missing.
    """
    if isinstance(batch, Mapping):
        return batch, criterion
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        what = f"{len(batch)} elements" if isinstance(batch, tuple | list) else f"a {type(batch).__name__}"
        raise ConfigurationError(f"a batch is {what}; let batch_fn return {_FORM}")
    inputs, labels = batch
    is_tuple = isinstance(labels, tuple | list)
    labels = labels if is_tuple else (labels,)
    given = _by_name(inputs, names)
    if criterion is None:
        if needs_loss:
            raise ConfigurationError(
                "a batch of ((inputs...), (labels...)) says nothing about the loss; give execute_pipeline a "
                "criterion=loss_func, which is called as loss_func(logits, labels)"
            )
        return given, None
    labels = {f"labels[{number}]": value for number, value in enumerate(labels)}
    return {**given, **labels}, PairLoss(criterion, model, tuple(labels), is_tuple)


def _by_name(inputs: Any, names: Sequence[str]) -> dict[str, Any]:
    """Map inputs to their parameter names in the model's forward; None inputs are left out."""
    if isinstance(inputs, Mapping):
        return dict(inputs)
    inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    if len(inputs) > len(names):
        raise ConfigurationError(
            f"a batch has {len(inputs)} inputs, and the model's forward takes {len(names)} by position "
            f"({', '.join(names)}); use so many at most"
        )
    return {name: value for name, value in zip(names, inputs, strict=False) if value is not None}


def _logits_of(outputs: Any) -> Any:
    """Return the input of the loss: the logits, or the hidden states of a model without a head."""
    if isinstance(outputs, Mapping):
        return outputs["logits"] if "logits" in outputs else next(iter(outputs.values()))
    return outputs[0] if isinstance(outputs, tuple) else outputs


_logger = get_logger(__name__)
_AXES = {"tensor": "tp_size", "data": "dp_size", "pipeline": "pp_size"}


class ThreeDPlugin(HybridParallelPlugin):
    """Plugin that `HybridParallelPlugin.from_3d_config` creates; see there.

    Attributes:
        optimizer, lr_scheduler: the boosted optimizer and schedule built from `ds_config`; None if it describes none or
            `boost` was given one.
    """

    def __init__(
        self,
        config: DeepSpeed3DParallelConfig,
        parallel_config: tuple[Sequence[tuple[str, int]], Sequence[int] | None],
        **overrides: Any,
    ) -> None:
        if not isinstance(config, DeepSpeed3DParallelConfig):
            raise ConfigurationError(f"the configuration is a {type(config).__name__}; use DeepSpeed3DParallelConfig()")
        self.three_d, self.groups = config, _groups_of(parallel_config)
        for name, option in _AXES.items():
            if option in overrides:
                raise ConfigurationError(f"{option} conflicts with parallel_config; use the size of '{name}' there")
        options = config.options(self.groups.sizes)
        self._cuts_batch_itself = not {"num_microbatches", "microbatch_size"}.isdisjoint(overrides)
        if self._cuts_batch_itself:
            options.pop("num_microbatches", None)
        super().__init__(**{**options, **overrides})
        problems = []
        if self.config.parallel.device_mapping is not None:
            problems.append("device_mapping conflicts with parallel_config; use the order of ranks there")
        kernels = self.config.kernels
        if self.three_d.custom_patcher and (kernels.enable_jit_fused or kernels.enable_all_optimization):
            problems.append("custom_patcher patches layers that fused operators take apart; use enable_jit_fused=False")
        if self.three_d.logit_helper is not None and self.config.parallel.enable_sequence_parallelism:
            problems.append("logit_helper needs whole sequences; use enable_sequence_parallelism=False")
        if problems:
            raise ConfigurationError("; ".join(problems))
        if config.deepspeed is not None:
            config.deepspeed.tell_what_is_left()
        self.optimizer: torch.optim.Optimizer | None = None
        self.lr_scheduler: Any = None
        self._names_of_inputs: WeakKeyDictionary[nn.Module, tuple[str, ...]] = WeakKeyDictionary()

    def configure(self, objects: TrainingObjects) -> TrainingObjects:
        """Add the tied head and the patches to the model, build what `ds_config` describes, and boost."""
        deepspeed = self.three_d.deepspeed
        if deepspeed is not None and not self._cuts_batch_itself and objects.dataloaders:
            micro, steps = deepspeed.batch_sizes(self.groups.sizes.get("data", 1))
            sizes = [loader.batch_size for loader in objects.dataloaders]
            if micro is not None and None not in sizes and micro * steps not in sizes:
                raise ConfigurationError(
                    f"batch_size={sizes[0]} of the loader is not train_micro_batch_size_per_gpu * "
                    f"gradient_accumulation_steps = {micro} * {steps}, which one step takes; "
                    f"use batch_size={micro * steps}"
                )
        if objects.model is None:
            return super().configure(objects)
        names, patched = names_of_inputs(objects.model), find_patched(objects.model, self.three_d.custom_patcher or {})
        config = getattr(objects.model, "config", None)
        model = self._with_head(objects.model, patched)
        patches = ForwardPatches(model, patched)
        del patched  # otherwise it would keep modules alive that sharding replaces
        described = self._described(model, objects)
        try:
            patches.apply(model)
            boosted = super().configure(replace(described, model=model))
        except BaseException:
            patches.remove(model)
            if model is not objects.model:
                share_config(objects.model, model.config, config)
            raise
        patches.apply(boosted.model.unwrap())
        self._names_of_inputs[boosted.model] = names
        if described.optimizers and not objects.optimizers:
            self.optimizer = boosted.optimizers[0]
            boosted = replace(boosted, optimizers=[])
        if len(described.lr_schedulers) > len(objects.lr_schedulers):
            self.lr_scheduler = boosted.lr_schedulers[-1]
            boosted = replace(boosted, lr_schedulers=boosted.lr_schedulers[:-1])
        return boosted

    def _with_head(self, model: nn.Module, patched: dict[nn.Module, list]) -> nn.Module:
        helper = self.three_d.logit_helper
        if not self.three_d.tie_first:
            return model
        needs_head = is_bare(model)
        model = with_tied_head(model, helper)
        if needs_head and helper is not None:
            patched[model.get_output_embeddings()] = [helper_as_patch(helper)]
        return model

    def _described(self, model: nn.Module, objects: TrainingObjects) -> TrainingObjects:
        """Add the optimizer and the schedule that `ds_config` describes, unless `boost` was given one."""
        deepspeed, optimizers, schedulers = self.three_d.deepspeed, objects.optimizers, objects.lr_schedulers
        if deepspeed is None:
            return objects
        if deepspeed.optimizer is not None:
            if optimizers:
                _logger.info("ds_config: the block 'optimizer' is ignored: boost() was given an optimizer")
            else:
                optimizers = [deepspeed.optimizer.build(each for each in model.parameters() if each.requires_grad)]
        if deepspeed.scheduler is not None:
            if schedulers:
                _logger.info("ds_config: the block 'scheduler' is left, boost() was given a schedule")
            elif not optimizers:
                raise ConfigurationError(
                    "ds_config has a scheduler and no optimizer, and boost() was given none; use a block 'optimizer'"
                )
            else:
                schedulers = [deepspeed.scheduler.build(optimizers[0])]
        return replace(objects, optimizers=optimizers, lr_schedulers=schedulers)

    def _adapt(
        self, batch: Any, model: nn.Module, criterion: Callable[[Any, Any], Any] | None, needs_loss: bool
    ) -> tuple[Any, Callable[[Any, Any], Any] | None]:
        if self.three_d.batch_fn is not None:
            batch = self.three_d.batch_fn(batch)
        return adapted(batch, self._names_of_inputs[model], model, criterion, needs_loss)

    def _placement(self) -> list[list[list[int]]] | None:
        """Return the ranks as [dp][pp][tp]; None if the groups are in the plugin's own order."""
        tensor, data, pipeline = (self.groups.sizes.get(name, 1) for name in _AXES)
        ranks = [[[0] * tensor for _ in range(pipeline)] for _ in range(data)]
        for rank in self.groups.order:
            at = {name: 0 for name in _AXES} | self.groups.coordinates(rank)
            ranks[at["data"]][at["pipeline"]][at["tensor"]] = rank
        in_order = [
            [[(stage * data + replica) * tensor + shard for shard in range(tensor)] for stage in range(pipeline)]
            for replica in range(data)
        ]
        return None if ranks == in_order else ranks


def _groups_of(parallel_config: Any) -> ParallelGroups:
    """Parse `parallel_config` to process groups; refuses others than tensor, data and pipeline."""
    try:
        axes, order = parallel_config
        axes = [(name, size) for name, size in axes]
        count = math.prod(size for _, size in axes)
        groups = ParallelGroups.of(axes, order, count)
    except (TypeError, ValueError) as error:
        example = '([("tensor", 2), ("data", 2), ("pipeline", 2)], None)'
        reason = str(error) if isinstance(error, ValueError) and "parallel group" in str(error) else ""
        reason = reason or (str(error) if "order of ranks" in str(error) else f"is none; use {example}")
        raise ConfigurationError(f"parallel_config={parallel_config!r}: {reason}") from None
    for name, size in groups.sizes.items():
        if name not in _AXES and size > 1:
            raise ConfigurationError(
                f"the parallel group '{name}' of size {size} is not a 3D-parallel axis; use tensor, data and pipeline"
            )
    return groups
