"""Mutants that change one line of the integrations: Trainer, TRL, and what both take from accelerate."""

from __future__ import annotations

from zoo_tests.campaigns.mutations.edits import Edit

_TESTS = "zoo_tests/booster/integrations"
_TRAINER = f"{_TESTS}/test_trainer_parity.py::test_a_job_logs_what_one_process_logs"
_TRAINER_RESUMED = f"{_TESTS}/test_trainer_checkpoints.py::test_a_run_goes_on_in_another_layout"
_TRL = f"{_TESTS}/test_trl_parity.py::test_few_steps_log_what_one_process_logs"
_GENERATION = f"{_TESTS}/test_trl_generation.py"
_ROLLOUTS = f"{_TESTS}/test_trl_rollouts.py"
_SERVER = f"{_TESTS}/test_trl_server.py"
_QUEUE = f"{_TESTS}/test_trl_async.py"
_TRL_RESUMED = f"{_TESTS}/test_trl_checkpoints.py::test_training_goes_on_in_another_layout"

EDITS_OF_TRAINERS: dict[str, Edit] = {
    "Trainer: shares of replicas weigh the same": Edit(
        "booster.integrations.transformers",
        "weight = rows * self.accelerator.replicas.size / max(total, 1)",
        "weight = 1.0",
        (
            f"{_TRAINER}[mean over a batch-dp2]",
            f"{_TRAINER}[function's mean-dp2]",
            f"{_TRAINER}[own evaluation-dp2]",
            f"{_TRL}[dpo]",
            f"{_TRL}[reward]",
        ),
    ),
    "Trainer: the label smoother counts the labels of one replica": Edit(
        "booster.integrations.transformers",
        "items = self.accelerator.reduce(counted.ne(smoother.ignore_index).sum())",
        "items = replicas * counted.ne(smoother.ignore_index).sum()",
        (f"{_TRAINER}[t5 smoothed and generated-dp2]",),
    ),
    "Trainer: no label smoothing": Edit(
        "booster.integrations.transformers",
        "return smoother(outputs, labels, shift_labels, num_items_in_batch=num_items_in_batch)",
        "return type(smoother)(epsilon=0.0)(outputs, labels, shift_labels, num_items_in_batch=num_items_in_batch)",
        (f"{_TRAINER}[t5 smoothed-dp2]",),
    ),
    "Trainer: sums divided by the items of all replicas are averaged": Edit(
        "booster.integrations.transformers",
        "            loss = loss * replicas\n",
        "            pass\n",
        (f"{_TRAINER}[sum over a step-dp2]",),
    ),
    "Trainer: gradients are not clipped": Edit(
        "booster.integrations.accelerate",
        'self._model_of(parameters, "clip_grad_norm_").clip_grad_norm_(max_norm, norm_type)',
        'self._model_of(parameters, "clip_grad_norm_").clip_grad_norm_(float("inf"))',
        (f"{_TRAINER}[bert-dp2]", f"{_TRAINER}[bert-tp2pp2]", f"{_TRL}[sft dft]"),
    ),
    "Trainer: the schedule begins anew": Edit(
        "booster.integrations.trainer_checkpoints",
        ', "lr_scheduler": self.lr_scheduler}',
        "}",
        (f"{_TRAINER_RESUMED}[bert-dp2-pp2]", f"{_TRL_RESUMED}[sft lora-tp2-pp2]"),
    ),
    "TRL: KTO pairs the samples of one replica": Edit(
        "booster.integrations.trl_trainers",
        "args.per_device_train_batch_size *= self.plugin.dp_size",
        "args.per_device_train_batch_size *= 1",
        (f"{_TRL}[kto]",),
    ),
    "TRL: bnpo weighs replicas by samples": Edit(
        "booster.integrations.trl_trainers",
        'return int((mask * inputs.get("tool_mask", mask)).sum())',
        "return len(mask)",
        (f"{_GENERATION}::test_replicas_log_what_one_process_logs_of_their_completions[grpo bnpo-4]",),
    ),
    "TRL: each rank runs its tools": Edit(
        "booster.integrations.trl_server",
        "return self._trainer.accelerator.replicas.on_first_rank(lambda: self._run(function, args, kwargs))",
        "return self._run(function, args, kwargs)",
        (f"{_ROLLOUTS}::test_one_rank_runs_the_tools_of_a_replica",),
    ),
    "TRL: a rank keeps its wrong rewards to itself": Edit(
        "booster.integrations.trl_server",
        "self._replicas.raise_on_all_ranks(problem, cause)",
        "assert problem is None, cause",
        (f"{_ROLLOUTS}::test_a_wrong_reward_is_said_on_all_ranks",),
    ),
    "TRL: a server gets adapters apart": Edit(
        "booster.integrations.trl_server",
        'merges = hasattr(trainer.model.unwrap(), "peft_config")',
        "merges = False",
        (f"{_SERVER}::test_a_server_gets_each_tensor_and_all_ranks_its_completions[grpo lora-tp2]",),
    ),
    "TRL: ranks do not gather what a dead server left": Edit(
        "booster.integrations.trl_server",
        "deque(weights, 0)  # the other ranks gather it all",
        "pass",
        (f"{_SERVER}::test_a_server_that_is_away_has_another_model_or_dies_is_said_on_all_ranks",),
    ),
    "TRL: completions of engines in another order": Edit(
        "booster.integrations.trl_server",
        "for rank in self._firsts)",
        "for rank in self._firsts[::-1])",
        (f"{_SERVER}::test_engines_of_the_ranks_get_each_tensor_and_share_the_prompts[grpo lora-tp2-1]",),
    ),
    "TRL: a queue's rows are those of the first replica": Edit(
        "booster.integrations.prepared_loader",
        "value[self._index : self._index + 1]",
        "value[:1]",
        (f"{_QUEUE}::test_a_queue_trains_as_in_one_process[grpo-dp2]",),
    ),
    "TRL: a segment sees one token too few": Edit(
        "booster.integrations.trl_async",
        "places > ends)",
        "places >= ends.clamp(min=1))",
        (f"{_QUEUE}::test_a_queue_trains_as_in_one_process[grpo capped-tp2]",),
    ),
    "TRL: metrics of replicas weigh the same": Edit(
        "booster.integrations.replicas",
        "shares = (self.rows / self.rows.sum()).to(values.dtype)",
        "shares = torch.full_like(values, 1 / len(values))",
        (f"{_TRL}[kto]",),
    ),
    "TRL: padding is scored": Edit(
        "shardformer.cross_entropy.vocab_parallel",
        "each.view(labels.shape).masked_fill(ignored, 0)",
        "each.view(labels.shape)",
        (f"{_TRL}[sft dft]", f"{_TRL}[dpo]"),
    ),
    "TRL: the reference of a trained adapter is the bare model": Edit(
        "booster.integrations.trl_trainers",
        '"ref" if "ref" in model.peft_config else None',
        "None",
        (f"{_TRL}[dpo trained lora]",),
    ),
}
