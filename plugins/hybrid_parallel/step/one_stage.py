"""The pass of `model(**batch)` on one stage, in an ordinary loop: the outputs of this replica, and the loss of all."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from booster import failure
from booster.errors import ConfigurationError
from plugins.hybrid_parallel.data.batch_check import check_batch_of_replica
from plugins.hybrid_parallel.data.entry_dtypes import LossesPromote, has_floats
from plugins.hybrid_parallel.data.microbatch import without_rows
from plugins.hybrid_parallel.loss.choice import LossSource
from plugins.hybrid_parallel.loss.replica_losses import off_inputs
from plugins.hybrid_parallel.loss.step_loss import StepLoss
from plugins.hybrid_parallel.step.batch import Batch
from plugins.hybrid_parallel.step.outputs import AUX_LOSS, LOSS
from plugins.hybrid_parallel.step.passes import Pass, PassKind, in_pass
from plugins.hybrid_parallel.step.user_loop import empty_share
from shardformer.context_parallel.batch_facts import record_facts
from shardformer.layers.lm_head import parallel_logits
from shardformer.loss.routers import ASKED

if TYPE_CHECKING:
    from plugins.hybrid_parallel.boosted.model import HybridParallelModel


def run_one_stage(model: HybridParallelModel, batch: Batch) -> Any:
    """Run the forward pass of a batch; return the model's outputs, without rows if this replica has no samples."""
    trains, weight = torch.is_grad_enabled(), None
    if batch.is_packed:
        record_facts([batch.entries], [batch.on_host])
    batch = replace(batch, entries=model.options.inputs(batch.entries))
    if trains:
        model.begin_training(batch.entries, check_batch_of_replica)
        model.trace.begin([batch.entries], [])
        weight = model.user_loop.begin(batch)
        batch = replace(batch, entries=off_inputs(batch.entries), args=off_inputs(batch.args))
    this = Pass(PassKind.TRAIN if trains else PassKind.EVALUATE, batch.entries, batch.has_rows)
    inputs = batch.entries if batch.has_rows else batch.placeholder()
    guard = failure.guard("model(**batch)", publishes=False)
    with guard, in_pass(model, this, [inputs if batch.has_rows else {}]):
        model.runtime.begin_microbatch(0)
        if batch.loss.source is LossSource.HEAD:
            outputs = _with_head_loss(model, batch, inputs)
        elif batch.loss.source is LossSource.MODEL:
            outputs = _with_own_loss(model, batch, inputs)
        else:
            outputs = _without_loss(model, batch, inputs)
    outputs = outputs if batch.has_rows else without_rows(outputs)
    return outputs if weight is None else weight.on_outputs(outputs)


def _without_loss(model: HybridParallelModel, batch: Batch, inputs: dict[str, Any]) -> Any:
    """Return outputs of whole sequences, or the scores of tokens that are asked for."""
    loss, balance = batch.step_loss([]), None
    if model.losses.routers_see_parts and model.losses.routers_are_asked(batch.entries):
        balance = model.losses.balance_without_labels([batch.entries] if batch.has_rows else [])
        if balance is None:
            raise ConfigurationError(
                "output_router_logits=True adds outputs.aux_loss of whole sequences, of which each rank has a part; "
                "use output_router_logits=False, or cp_size=1 and sequence_parallelism_mode='split_gather'"
            )
        inputs = {**inputs, ASKED: False}
    with loss.reading(model.module), nullcontext() if balance is None else balance.watching(0, 0):
        outputs = loss.of_tokens(model.module(*batch.args, **loss.inputs(inputs)), inputs)
    outputs = model.whole_sequences(outputs)
    return outputs if balance is None else type(outputs)(**{**outputs, AUX_LOSS: balance.loss_of_replica()})


def _with_head_loss(model: HybridParallelModel, batch: Batch, inputs: dict[str, Any]) -> Any:
    """Return outputs with the loss of the head, computed on this rank's logits."""
    loss = batch.step_loss([batch.entries] if batch.has_rows else [])
    balance = loss.balance
    not_of_parts = {} if balance is None else {ASKED: False}
    with parallel_logits(model.module):
        with nullcontext() if balance is None else balance.watching(0, 0):
            given = {**model.head_loss.inputs(inputs), **not_of_parts, "return_dict": True}
            outputs = model.module(*batch.args, **given)
        value = _share(batch, loss, outputs)
    outputs, aux_loss = model.gathered(outputs), loss.aux_loss
    if balance is not None:
        value = value + balance.share_of_batch().to(value)
        aux_loss = balance.latest
    if aux_loss is not None:
        outputs = type(outputs)(**{**outputs, AUX_LOSS: aux_loss})
    return _with_loss(model, outputs, value)


def _with_own_loss(model: HybridParallelModel, batch: Batch, inputs: dict[str, Any]) -> Any:
    """Return outputs with the loss that the model's forward computes, if it does."""
    own = [batch.entries] if batch.has_rows else []
    compared = batch.step_loss(own) if batch.loss.compares else None
    if compared is not None:
        reading = compared.reading(model)
    else:
        reading = LossesPromote() if has_floats((*batch.args, *inputs.values())) else nullcontext()
    with reading:
        outputs = model.module(*batch.args, **inputs)
    if not isinstance(outputs, Mapping) or not isinstance(outputs.get(LOSS), Tensor):
        return outputs
    # Only now: replicas may call a model that returns no loss without each other.
    loss = compared or batch.step_loss(own)
    return _with_loss(model, outputs, _share(batch, loss, outputs))


def _share(batch: Batch, loss: StepLoss, outputs: Any) -> Tensor:
    return loss.share(outputs, 0) if batch.has_rows else empty_share(outputs, loss)


def _with_loss(model: HybridParallelModel, outputs: Mapping[str, Any], share: Tensor) -> Any:
    """Return `outputs` with the sum of the shares of the loss over all replicas."""
    rest = {key: item for key, item in outputs.items() if key != LOSS}
    return type(outputs)(loss=model.user_loop.loss_over_replicas(share), **rest)
