"""Mutants that change one line of an integration: shares, reductions, clipping, schedules, orders of samples."""

from __future__ import annotations

from zoo_tests.campaigns.mutations.edits import Edit

_HERE = "booster.integrations"
_TESTS = "zoo_tests/booster/integrations"
_LOOP = f"{_TESTS}/test_accelerate_parity.py::test_a_layout_trains_as_one_process"
_STATE = f"{_TESTS}/test_accelerate_state.py"
_PREPARE = f"{_TESTS}/test_accelerate_prepare.py"
_VALUES = f"{_TESTS}/test_accelerate_values.py"
_LIGHTNING = f"{_TESTS}/lightning/test_trainer.py"
_FITS = f"{_LIGHTNING}::test_logs_and_weights_are_those_of_one_process"
_CONTINUES = f"{_LIGHTNING}::test_training_continues_in_another_layout"
_FABRIC = f"{_TESTS}/lightning/test_fabric.py"

EDITS_OF_INTEGRATIONS: dict[str, Edit] = {
    # accelerate
    "accumulated batches of accelerate not divided": Edit(
        f"{_HERE}.accelerate",
        "loss = loss / self.gradient_accumulation_steps",
        "loss = loss / 1.0",
        (f"{_LOOP}[dp2]", f"{_LOOP}[pp2]"),
    ),
    "clipping of accelerate left out": Edit(
        f"{_HERE}.accelerate",
        ".clip_grad_norm_(max_norm, norm_type)",
        ".clip_grad_norm_(1e9, norm_type)",
        (f"{_LOOP}[tp2]",),
    ),
    "schedule of accelerate steps once for all replicas": Edit(
        f"{_HERE}.accelerate",
        "repeats = 1 if self.split_batches else self.num_processes",
        "repeats = 1",
        (f"{_LOOP}[dp2]",),
    ),
    "state of accelerate without the order of samples": Edit(
        f"{_HERE}.accelerate_state",
        "loader.load_state_dict(state, continues=self.use_stateful_dataloader)",
        "loader.set_epoch(0)",
        (f"{_STATE}::test_a_run_goes_on_in_another_layout[tp2-dp2]",),
    ),
    "schedule of accelerate not loaded": Edit(
        f"{_HERE}.accelerate_state",
        "scheduler.load(state, factor)",
        "scheduler.load(scheduler.scheduler.state_dict(), 1)",
        (f"{_STATE}::test_a_run_goes_on_in_another_layout[pp2-tp2]",),
    ),
    "steps of a schedule not converted for other replicas": Edit(
        f"{_HERE}.prepared_loader",
        'steps = state["last_epoch"] * factor',
        'steps = state["last_epoch"]',
        (f"{_STATE}::test_a_run_goes_on_in_another_layout[tp2-dp2]",),
    ),
    "remainder of one replica's batch": Edit(
        f"{_HERE}.prepared_loader",
        "return samples % self.total_batch_size",
        "return samples % self.loader.batch_size",
        (f"{_PREPARE}::test_each_sample_is_evaluated_once",),
    ),
    "last batch of accelerate not known": Edit(
        f"{_HERE}.prepared_loader",
        "self.end_of_dataloader = self.loader.position in (0, length)",
        "self.end_of_dataloader = self.loader.position > length",
        (f"{_PREPARE}::test_an_iteration_that_is_left_early_does_not_count_any_more",),
    ),
    "batches skipped in each epoch": Edit(
        f"{_HERE}.prepared_loader",
        "self.loader.skip_batches, self._to_skip = self._to_skip, 0",
        "self.loader.skip_batches = self._to_skip",
        (f"{_PREPARE}::test_batches_are_skipped_once",),
    ),
    # values of replicas
    "mean of replicas not divided": Edit(
        f"{_HERE}.replicas",
        'factor = scale / self.size if reduction == "mean" else scale',
        "factor = scale",
        (f"{_VALUES}::test_values_of_replicas_are_joined_once_each",),
    ),
    "values gathered over tensor-parallel ranks": Edit(
        f"{_HERE}.replicas",
        'self.mesh = plugin.mesh["dp"]',
        'self.mesh = plugin.mesh["tp"]',
        (f"{_VALUES}::test_replicas_count_as_processes",),
    ),
    # Lightning
    "shares of Lightning not weighed": Edit(
        "plugins.hybrid_parallel.loss.arithmetic",
        "return ctx.losses.weigh(grad, ctx.weight), None, None",
        "return grad, None, None",
        (f"{_FITS}[own-loss-dp2]", f"{_FABRIC}::test_what_a_script_uses_around_its_loop[dp2]"),
    ),
    "outputs that a pipeline fetched not weighed": Edit(
        "plugins.hybrid_parallel.step.user_loop",
        "grad = self.weight.on_gradient(grad)",
        "pass",
        (f"{_FITS}[own-loss-dp2pp2]",),
    ),
    "logged means not weighed": Edit(
        f"{_HERE}.lightning.job",
        "reduced = self.shares.weighted(reduced)",
        "reduced = reduced.clone()",
        (f"{_FITS}[own-loss-dp2]",),
    ),
    "shares without samples logged as nan": Edit(
        f"{_HERE}.lightning.inner_model",
        "if shares.is_empty and kwargs",
        "if not shares.is_empty and kwargs",
        (f"{_FITS}[own-loss-dp2]",),
    ),
    "logged values reduced over all ranks": Edit(
        f"{_HERE}.lightning.job",
        "group = self.replicas.mesh.get_group() if _is_everyone(group) else group\n",
        "group = world_group() if _is_everyone(group) else group\n",
        (f"{_FITS}[bert-tp2pp2]",),
    ),
    "metrics gathered from all ranks": Edit(
        f"{_HERE}.replicas",
        "if not dist.is_initialized() or group is not None or function is not None or metric._is_synced:\n",
        "if True:\n",
        (f"{_FITS}[bert-tp2pp2]",),
    ),
    "clipping of Lightning left out": Edit(
        f"{_HERE}.lightning.job",
        "boosted_in(optimizer).clip_grad_norm_(clip_val)",
        "boosted_in(optimizer).clip_grad_norm_(1e9)",
        (f"{_FITS}[bert-tp2pp2]", f"{_FITS}[manual-dp2]"),
    ),
    "order of samples after the sanity check not restored": Edit(
        f"{_HERE}.lightning.strategy",
        "order.load_state_dict(state)",
        "order.load_state_dict(order.state_dict())",
        (f"{_FITS}[bert-tp2pp2]",),
    ),
    "toggled optimizers keep the gradients of others": Edit(
        f"{_HERE}.lightning.inner_model",
        "param.requires_grad = requires_grad and param in chosen",
        "param.requires_grad = requires_grad",
        (f"{_FITS}[two-optimizers-dp2]", f"{_FITS}[two-optimizers-pp2]"),
    ),
    "parameters frozen after the forward pass take gradients": Edit(
        "plugins.hybrid_parallel.zero.reducer",
        "is_watched = bool(param._backward_hooks) or not param.requires_grad",
        "is_watched = bool(param._backward_hooks)",
        (f"{_FITS}[two-optimizers-dp2]",),
    ),
    "second optimizer of Lightning not loaded": Edit(
        f"{_HERE}.lightning.job",
        "self.booster.load_optimizer(optimizer, folder / _FURTHER.format(number))",
        "self.booster",
        (f"{_CONTINUES}[two-optimizers-dp2-tp2]",),
    ),
    "methods of Fabric's model are those of the shards": Edit(
        f"{_HERE}.lightning.inner_model",
        "vars(boosted)[name] = MethodType(method, boosted)",
        "vars(boosted)[name] = MethodType(method, inner)",
        (f"{_FABRIC}::test_what_a_script_uses_around_its_loop[dp2]",),
    ),
}
