"""Mutants that change one line of the plugin: reduction, pipeline, loss, checkpoints, data, precision."""

from __future__ import annotations

from zoo_tests.campaigns.mutations.edits import Edit
from zoo_tests.campaigns.mutations.edits_of_shardformer import CONTEXT, EXPERTS, PARITY

_FEATURES = "zoo_tests/parity/test_features.py::test_options_together"
_16_BIT = "zoo_tests/parity/test_precision.py::test_16_bit"
_SCHEDULES = "zoo_tests/parity/test_schedules.py::test_trains_like_plain_training"
_LOOPS = "zoo_tests/parity/test_loops.py"
_PLUGIN = "zoo_tests/hybrid_parallel"
_OPTIMIZER = f"{_PLUGIN}/zero/test_optimizer.py"
_PRECISION = f"{_PLUGIN}/zero/test_precision.py"
_STEP_LOSS = f"{_PLUGIN}/loss/test_step_loss.py"
_UNEQUAL = f"{_STEP_LOSS}::test_unequal_shares_and_micro_batches"
_CHECKPOINTS = f"{_PLUGIN}/checkpoint/test_io.py"
_SAME_BITS = f"{_CHECKPOINTS}::test_resuming_on_the_same_layout_gives_the_same_bits"
_MODEL_FILES = f"{_PLUGIN}/checkpoint/test_save.py"
_UNUSED = "zoo_tests/parity/test_unused.py::test_replicas_that_use_other_parameters"
_CUT_SEQUENCES = "zoo_tests/shardformer/context_parallel/test_zigzag.py"

_COMPILED = "zoo_tests/hybrid_parallel/features/test_compilation.py::test_training_is_that_of_eager_layers"
_PACKED = "zoo_tests/parity/test_packing.py::test_documents_train_as_they_do_one_by_one"

EDITS_OF_PLUGIN: dict[str, Edit] = {
    # packed documents
    "packed documents see each other beside a cache": Edit(
        "plugins.hybrid_parallel.boosted.forward_options",
        'found: dict[str, Any] = {"use_cache": False} if self._takes_use_cache else {}',
        "found: dict[str, Any] = {}",
        (f"{_PACKED}[tp2]",),
    ),
    "positions of borders do not restart": Edit(
        "plugins.hybrid_parallel.boosted.forward_options",
        "(torch.arange(rows * length) - firsts.repeat_interleave(lengths))",
        "torch.arange(rows * length)",
        (f"{_PACKED}[dp2]",),
    ),
    "a row cut inside of documents": Edit(
        "plugins.hybrid_parallel.data.microbatch",
        "return [self.borders[index] for index",
        "return [max(self.borders[index] - 1, 0) if index < self.num_documents else self.borders[-1] for index",
        (f"{_PACKED}[pp2]",),
    ),
    "parts of a row get the gradients of other tokens": Edit(
        "plugins.hybrid_parallel.step.outputs",
        "grad.split(self.lengths, 1)[self.index]",
        "grad.roll(1, 1).split(self.lengths, 1)[self.index]",
        ("zoo_tests/parity/test_packing.py::test_a_loss_of_the_script_sees_the_whole_row",),
    ),
    "hooks of layers in their graphs": Edit(
        "plugins.hybrid_parallel.features.compilation",
        """        attributes["forward"] = compiled  # for""",
        """        return torch.compile(layer._call_impl, backend=_BACKEND)(*args, **kwargs)  # for""",
        (f"{_COMPILED}[stage 3]", f"{_COMPILED}[offloaded activations]"),
    ),
    # zero, zero/collectives
    "gradients of earlier passes forgotten": Edit(
        "plugins.hybrid_parallel.zero.bucket",
        "self.shard_grads.add_(self._result)",
        "self.shard_grads = self._result",
        (f"{_LOOPS}::test_gradients_of_two_calls_add_up[dp2-1]",),
    ),
    "pieces start with the first values of their parameter": Edit(
        "plugins.hybrid_parallel.zero.bucket_layout",
        "view.copy_(sources[index]().reshape(-1)[start:stop])",
        "view.copy_(sources[index]().reshape(-1)[: stop - start])",
        (f"{PARITY}[llama-causal_lm-dp2-zero1]",),
    ),
    "sum of replicas keeps the first two": Edit(
        "plugins.hybrid_parallel.zero.collectives.p2p",
        "        out.add_(part)\n",
        "        pass\n",
        (f"{_OPTIMIZER}::test_four_replicas[1]",),
    ),
    "sum of replicas keeps the first": Edit(
        "plugins.hybrid_parallel.zero.collectives.p2p",
        "torch.add(first, second, out=out)",
        "out.copy_(first)",
        (f"{PARITY}[bert-masked_lm-dp2-zero1]",),
    ),
    "ranks do not agree on what was used": Edit(
        "plugins.hybrid_parallel.zero.reducer",
        "                dist.all_reduce(together, op=dist.ReduceOp.MAX, group=group)\n",
        "",
        (
            f"{_UNUSED}[0-True]",
            f"{_UNUSED}[1-True]",
        ),
    ),
    "ranks of parts of sequences do not agree on what was used": Edit(
        "plugins.hybrid_parallel.zero.reducer",
        "        for are_stages in (False, True):",
        "        for are_stages in (True,):",
        ("zoo_tests/parity/test_unused.py::test_ranks_whose_tokens_reach_other_parameters",),
    ),
    "memory of unused parameters not cleared": Edit(
        "plugins.hybrid_parallel.zero.bucket",
        "zero([self._grad_view(index) for index in range(len(self.params)) if index not in self.written])",
        "zero([])",
        (
            f"{_UNUSED}[0-True]",
            f"{_UNUSED}[1-True]",
        ),
    ),
    "padding of buckets takes part in the norm": Edit(
        "plugins.hybrid_parallel.zero.bucket",
        "zero([self._flat_grads[start:stop] for start, stop in self._gaps])",
        "torch._foreach_add_([self._flat_grads[start:stop].fill_(0.0) for start, stop in self._gaps], 1.0)",
        (f"{_OPTIMIZER}::test_clipping_equals_torchs[0.05-1]",),
    ),
    "norm from before the sum over tensor ranks": Edit(
        "plugins.hybrid_parallel.zero.bucket",
        "        if self.sum_groups or factor is not None:\n            self.norm = None\n",
        "        if factor is not None:\n            self.norm = None\n",
        (f"{_FEATURES}[gpt2-lm_head-tp2dp2-zero1-sp-momentum-clip]",),
    ),
    "small gradients scaled up to the limit": Edit(
        "plugins.hybrid_parallel.loss.arithmetic",
        "(max_norm / (norm + 1e-6)).clamp(max=1.0)",
        "max_norm / (norm + 1e-6)",
        (f"{_OPTIMIZER}::test_clipping_equals_torchs[1000.0-1]",),
    ),
    "norms of buckets added up": Edit(
        "plugins.hybrid_parallel.zero.reducer",
        "return torch.linalg.vector_norm(together, norm_type)",
        "return together.sum()",
        (f"{_FEATURES}[bert-masked_lm-pp2dp2-zero0-momentum-clip]",),
    ),
    "experts reduced as if all ranks had them": Edit(
        "plugins.hybrid_parallel.setup.optimizer",
        "mesh.group(replicate_axis(axis)) for axis",
        "mesh.group(replicate_axis(TENSOR)) for axis",
        (f"{EXPERTS}[mixtral-causal_lm-dp2-zero1-momentum-fp32-clip-ep_size=2]",),
    ),
    "unused parameters are stepped": Edit(
        "plugins.hybrid_parallel.zero.bucket",
        "views[place] if piece.index in self.used else None",
        "views[place]",
        (f"{_OPTIMIZER}::test_unused_parameters_are_not_moved_by_weight_decay[1-12]",),
    ),
    # pipeline, step
    "every micro-batch has the inputs of the first": Edit(
        "plugins.hybrid_parallel.pipeline.runtime",
        "run_stage(runtime.module, message, self.microbatches[index], action.stage)",
        "run_stage(runtime.module, message, self.microbatches[0], action.stage)",
        (f"{_SCHEDULES}[llama-causal_lm-pp2-zero1-clip-pp_style=zero_bubble-num_microbatches=7]",),
    ),
    "outputs of micro-batches in reverse": Edit(
        "plugins.hybrid_parallel.step.outputs",
        "return torch.cat(list(values))",
        "return torch.cat(list(values)[::-1])",
        (f"{_PLUGIN}/pipeline/test_outputs.py::test_outputs_of_a_head_on_every_rank[pp2-gpt2-lm_head]",),
    ),
    "gradients not corrected to the count of the criterion": Edit(
        "plugins.hybrid_parallel.step.passes",
        "reducer.finish(factor)",
        "reducer.finish()",
        (f"{_UNEQUAL}[sum_and_count-3-1]",),
    ),
    "gradients doubled between stages": Edit(
        "plugins.hybrid_parallel.pipeline.runtime",
        "zip(edges, grads, strict=True)",
        "zip(edges, [grad * 2.0 for grad in grads], strict=True)",
        (f"{_16_BIT}[bert-masked_lm-pp2dp2-zero1-momentum-fp16]",),
    ),
    "loss not scaled before the backward pass": Edit(
        "plugins.hybrid_parallel.loss.arithmetic",
        "return share if scale == 1.0 else share * scale",
        "return share",
        (f"{_PRECISION}::test_the_scale_does_not_show_in_gradients_norm_and_update[4096.0]",),
    ),
    # loss
    "every rank of a sequence counts the loss of a criterion": Edit(
        "plugins.hybrid_parallel.loss.step_loss",
        "loss = per_copy(loss, self.copies)",
        "loss = loss * 1.0",
        (f"{_CUT_SEQUENCES}::test_a_criterion_sees_whole_sequences",),
    ),
    "labels counted once for every copy of a sequence": Edit(
        "plugins.hybrid_parallel.loss.step_loss",
        "per_copy(count.detach() if isinstance(count, Tensor) else count, self.copies)",
        "count.detach() if isinstance(count, Tensor) else count",
        (f"{_CUT_SEQUENCES}::test_a_criterion_sees_whole_sequences",),
    ),
    "padding of a part has labels": Edit(
        "plugins.hybrid_parallel.loss.step_loss",
        "partial(self.axis.take, fill=IGNORE_INDEX)",
        "partial(self.axis.take, fill=1)",
        (f"{CONTEXT}[llama-causal_lm-cp3-zero1-momentum-clip]",),
    ),
    "loss reported of one replica": Edit(
        "plugins.hybrid_parallel.loss.step_loss",
        "            dist.all_reduce(value, group=self.mesh.replica_group)\n",
        "            pass\n",
        (f"{PARITY}[bert-masked_lm-dp2-zero1]",),
    ),
    "labels counted in the last micro-batch alone": Edit(
        "plugins.hybrid_parallel.loss.step_loss",
        "counts += head_loss.counts(microbatch)",
        "counts = head_loss.counts(microbatch)",
        (f"{PARITY}[bert-masked_lm-pp2-zero1]",),
    ),
    "labels of other replicas not counted": Edit(
        "plugins.hybrid_parallel.loss.step_loss",
        '            dist.all_reduce(value, group=self.mesh.group("dp"))\n        return value\n',
        "            pass\n        return value\n",
        (
            f"{PARITY}[bert-masked_lm-dp2-zero1]",
            f"{_UNEQUAL}[mean_square-3-1]",
        ),
    ),
    "means of micro-batches weigh alike": Edit(
        "plugins.hybrid_parallel.loss.step_loss",
        "value = value * self.rows[index]",
        "value = value * self.rows[0]",
        (f"{_UNEQUAL}[mean_square-7-1]",),
    ),
    "gradient of routers by the choices of one stage": Edit(
        "plugins.hybrid_parallel.loss.step_loss",
        "self._total.derivatives * self.weight",
        "part.derivatives * self.weight",
        ("zoo_tests/shardformer/loss/test_routers.py::test_it_is_that_of_plain_training[4-options9]",),
    ),
    "loss of routers added by every replica": Edit(
        "plugins.hybrid_parallel.loss.step_loss",
        "(self.routers.factor * of_routers / replicas)",
        "(self.routers.factor * of_routers)",
        ("zoo_tests/shardformer/loss/test_routers.py::test_it_is_that_of_plain_training[2-options3]",),
    ),
    "loss of routers in a user's own loss is a share of it": Edit(
        "plugins.hybrid_parallel.step.user_loop",
        "            dist.all_reduce(total, group=mesh.group(DP_CP))\n",
        "            total *= mesh.size(DP_CP)\n",
        ("zoo_tests/shardformer/loss/test_routers.py::test_a_loss_of_ones_own_adds_that_of_all_stages[4-options2]",),
    ),
    "loss of the model itself not weighted by samples": Edit(
        "plugins.hybrid_parallel.loss.step_loss",
        "share_of_mean(loss, self.rows[index], self.global_rows)",
        "loss / len(self.microbatches)",
        (f"{_STEP_LOSS}::test_a_model_that_computes_its_own_loss",),
    ),
    # checkpoint
    "every part of a fused weight saved as its first": Edit(
        "shardformer.shard_spec",
        "copy_(shard.narrow(self.dim, position, stop - start))",
        "copy_(shard.narrow(self.dim, 0, stop - start))",
        (f"{_MODEL_FILES}::test_round_trip[gpt2-True-tp2-pp2-5GB]",),
    ),
    "momentum read from the start of its parameter": Edit(
        "plugins.hybrid_parallel.checkpoint.optimizer_state",
        "wanted = GlobalTensor.piece(spec, state[key], piece.start, piece.stop)",
        "wanted = GlobalTensor.piece(spec, state[key], 0, piece.stop - piece.start)",
        (f"{_SAME_BITS}[dp2-fp32]",),
    ),
    "masters read from the rounded parameters": Edit(
        "plugins.hybrid_parallel.checkpoint.optimizer_state",
        'candidates = [f"{PREFIX}{name}/{MASTER}" for name in names] + [f"{MODEL}{name}" for name in names]',
        'candidates = [f"{MODEL}{name}" for name in names]',
        (f"{_SAME_BITS}[tp2-bf16]",),
    ),
    "loss scale begins anew after loading": Edit(
        "plugins.hybrid_parallel.checkpoint.optimizer_state",
        '        self.optimizer.loss_scale.load_state_dict(self.saved["loss_scale"])\n',
        "",
        (f"{_SAME_BITS}[tp2-fp16]",),
    ),
    "random numbers of the first rank on all": Edit(
        "plugins.hybrid_parallel.checkpoint.training_state",
        "        prefix = _own_prefix() if replica_of is None",
        '        prefix = f"{PREFIX}0/" if replica_of is None',
        (f"{_SAME_BITS}[dp2-fp32]",),
    ),
    "states from before loading stay": Edit(
        "plugins.hybrid_parallel.checkpoint.optimizer_state",
        "                self.optimizer.state.pop(target, None)\n",
        "                continue\n",
        (f"{_CHECKPOINTS}::test_loading_forgets_the_states_of_before",),
    ),
    "options of parameter groups not loaded": Edit(
        "plugins.hybrid_parallel.checkpoint.optimizer_state",
        "group[key] = _like(value, group.get(key))",
        "_like(value, group.get(key))",
        (f"{_SAME_BITS}[dp2-fp32]",),
    ),
    # data
    "every replica reads the first share": Edit(
        "plugins.hybrid_parallel.data.sharded_sampler",
        "return group[self.rank]",
        "return group[0]",
        (f"{_CHECKPOINTS}::test_the_position_counts_samples_under_another_number_of_replicas[2]",),
    ),
    "position in an epoch counted in batches of one replica": Edit(
        "plugins.hybrid_parallel.data.dataloader",
        "self.global_batch_size = (share.batch_size or 1) * share.world_size",
        "self.global_batch_size = share.batch_size or 1",
        (f"{_CHECKPOINTS}::test_the_position_counts_samples_under_another_number_of_replicas[2]",),
    ),
    "a resumed epoch begins one batch early": Edit(
        "plugins.hybrid_parallel.data.dataloader",
        "if number >= self._to_skip:",
        "if number >= self._to_skip - 1:",
        (f"{_CHECKPOINTS}::test_the_position_in_an_epoch_is_part_of_the_checkpoint",),
    ),
    "stand-in of an empty share learns": Edit(
        "plugins.hybrid_parallel.data.microbatch",
        "zero_of(joined_blocks(value, -1))",
        "joined_blocks(value, -1).sum() * 1.0",
        (f"{_PLUGIN}/data/test_empty_shares.py::test_a_replica_without_samples_changes_nothing[dp2]",),
    ),
    "samples that micro-batches do not divide left out": Edit(
        "plugins.hybrid_parallel.data.microbatch",
        "return value.tensor_split(num_pieces, dim=dim)",
        "return value.narrow(dim, 0, rows - rows % num_pieces).tensor_split(num_pieces, dim=dim)",
        (f"{_FEATURES}[bert-masked_lm-pp2-zero1-adamw-num_microbatches=3]",),
    ),
    # loss scale, masters
    "gradients accumulated in 16 bit": Edit(
        "plugins.hybrid_parallel.zero.bucket",
        "self.grad_dtype = torch.promote_types(dtype, torch.float32)",
        "self.grad_dtype = dtype",
        (f"{_PRECISION}::test_gradients_are_accumulated_in_fp32",),
    ),
    "masters made of rounded weights": Edit(
        "plugins.hybrid_parallel.zero.bucket",
        "sources = [bucket_layout.take_source(param, initial) for param in params]",
        "sources = [bucket_layout.take_source(param, {}) for param in params]",
        (f"{_16_BIT}[bert-masked_lm-tp2-zero1-momentum-bf16]",),
    ),
    "masters rounded before every step": Edit(
        "plugins.hybrid_parallel.zero.bucket_layout",
        "            rounded = master.to(present.dtype)\n",
        "            rounded = master.to(present.dtype)\n            own.copy_(rounded)\n",
        (f"{_PRECISION}::test_small_updates_add_up_in_master_weights[1]",),
    ),
    "parameters do not follow their masters": Edit(
        "plugins.hybrid_parallel.zero.bucket_layout",
        "            self._parameters.copy_(self.values, non_blocking=True)\n",
        "            pass\n",
        (f"{_16_BIT}[bert-masked_lm-tp2-zero1-momentum-bf16]",),
    ),
    "loss scale grows one step late": Edit(
        "plugins.hybrid_parallel.loss.arithmetic",
        "self.good_steps == self.growth_interval",
        "self.good_steps == self.growth_interval + 1",
        (f"{_PRECISION}::test_loss_scale_halves_skips_and_grows_on_all_ranks[1]",),
    ),
    "loss scale quartered on an overflow": Edit(
        "plugins.hybrid_parallel.loss.arithmetic",
        "max(self.value / 2, _FLOOR)",
        "max(self.value / 4, _FLOOR)",
        (f"{_PRECISION}::test_loss_scale_halves_skips_and_grows_on_all_ranks[0]",),
    ),
    "norm of scaled gradients": Edit(
        "plugins.hybrid_parallel.zero.optimizer",
        "unscaled(self.global_norm(), self._held_scale)",
        "self.global_norm()",
        (f"{_PRECISION}::test_the_scale_does_not_show_in_gradients_norm_and_update[4096.0]",),
    ),
    "gradients that wait keep the scale of their pass": Edit(
        "plugins.hybrid_parallel.zero.optimizer",
        "bucket.scale_grads(scale / self._held_scale)",
        "bucket.scale_grads(1.0)",
        (f"{_PLUGIN}/zero/test_two_optimizers.py::test_gradients_that_wait_are_brought_to_a_new_scale",),
    ),
    "clipping adds the norms of optimizers": Edit(
        "plugins.hybrid_parallel.zero.optimizer",
        "torch.linalg.vector_norm(torch.stack([each.global_norm(norm_type) for each in optimizers]), norm_type)",
        "torch.stack([each.global_norm(norm_type) for each in optimizers]).sum()",
        (f"{_PLUGIN}/zero/test_two_optimizers.py::test_gradients_of_all_optimizers_are_clipped_by_one_norm",),
    ),
    "a changed element rounds all masters": Edit(
        "plugins.hybrid_parallel.zero.bucket_layout",
        "torch.where(rounded == present, master, present.to(master.dtype), out=master)",
        "master.copy_(present)",
        (f"{_PLUGIN}/zero/test_user_gradients.py::test_a_changed_row_leaves_the_masters_of_other_rows",),
    ),
    "whole parameters put together backwards": Edit(
        "plugins.hybrid_parallel.zero.whole_parameters",
        "spec = self.specs[index].on_rank(place * self.specs[index].copies)",
        "spec = self.specs[index].on_rank(self.specs[index].world_size - 1 - place * self.specs[index].copies)",
        (f"{_PLUGIN}/zero/test_whole_parameters.py::test_equals_plain_training[lamb-gpt2-tp2]",),
    ),
    "closures see the weights of before the step": Edit(
        "plugins.hybrid_parallel.zero.optimizer",
        "            optimizer.publish()\n",
        "",
        (f"{_PLUGIN}/zero/test_closures.py::test_equals_plain_torch[1-False]",),
    ),
    "each rank's search goes by its own loss": Edit(
        "plugins.hybrid_parallel.zero.optimizer",
        "return _mean(loss, optimizer.mesh.group(DP_CP))",
        "return loss",
        (f"{_PLUGIN}/zero/test_closures.py::test_lbfgs_with_replicas_alone[None-True]",),
    ),
    "an average that keeps what it should drop": Edit(
        "plugins.hybrid_parallel.zero.average",
        "average.lerp_(values, 1.0 - self.decay)",
        "average.lerp_(values, self.decay)",
        (f"{_PLUGIN}/zero/test_average.py::test_parameters_that_are_unfrozen_later",),
    ),
}
