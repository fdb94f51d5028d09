"""TRL's trainers on boosted models: what they take from a whole batch, and their reference model.

`boosted` puts `BoostedTRLTrainer` before the classes of TRL. What it relies on in TRL is listed, and tested, in
`zoo_tests/booster/integrations/test_upstream.py`.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster.integrations import arguments, trl_server
from booster.integrations.fused_head import AdapterReference
from booster.integrations.trainer_accelerator import LossInProgress
from booster.launch import launch_from_torch
from booster.plugin import Plugin

_DISTILLING, _ONLINE_DPO = "DistillationTrainer", "OnlineDPOTrainer"
_OF_TOKENS = (_DISTILLING, "ServerDistillationTrainer")  # their loss is a mean over tokens
_ENDED = "val/contain_eos_token"  # the metric of OnlineDPO that TRL does not gather
# Entries of a generated batch that are no arguments of a model.
_GENERATED = {f"{part}_{end}" for part in ("prompt", "completion") for end in ("ids", "mask")}
_GENERATED |= {"tool_mask", "num_items_in_batch", "num_images"}
_ROUNDING = 1e-5  # of an entropy in fp32
_COUNTED = {"input_ids": "ids", "attention_mask": "mask"}  # entries of a batch -> ends of TRL's names


def trl_mixins(trainer_class: type) -> tuple[type, ...]:
    """Return what `boosted` needs for a trainer of TRL; nothing for others; refuses those that cannot hold."""
    names = _names_in_trl(trainer_class)
    if not names:
        return ()
    arguments.check_trainer_class(names)
    if names[0] in arguments.ASYNCHRONOUS:
        from booster.integrations.trl_async import BoostedAsyncTrainer

        return BoostedAsyncTrainer, BoostedTRLTrainer
    return (BoostedTRLTrainer,)


def _names_in_trl(trainer_class: type) -> list[str]:
    return [base.__name__ for base in trainer_class.__mro__ if base.__module__.partition(".")[0] == "trl"]


class BoostedTRLTrainer:
    """Mixin of a boosted trainer of TRL; refuses options that cannot hold under the layout."""

    def __init__(self, *args: Any, plugin: Plugin | None = None, **kwargs: Any) -> None:
        if plugin is not None:
            launch_from_torch(seed=None)
            # TRL tokenizes before Trainer asks: what cannot hold is said before that.
            for given in (*args, *kwargs.values()):
                if hasattr(given, "per_device_train_batch_size"):
                    arguments.check_job(given)
                    arguments.check_arguments(given, plugin)
                    arguments.check_trl_options(_names_in_trl(type(self)), given, plugin)
                    arguments.count_generations(given, plugin.dp_size)
        self._num_stored = 0
        self._tools = trl_server.ToolsOfFirstRank(self)
        if kwargs.get("environment_factory") is not None:
            kwargs["environment_factory"] = self._tools.factory(kwargs["environment_factory"])
        with self._of_replicas(**(trl_server.served(self) if "trl.generation.vllm_client" in sys.modules else {})):
            super().__init__(*args, plugin=plugin, **kwargs)
        self.accelerator.draws_as_plain = hasattr(self, "generation_config")
        if hasattr(self, "_forward_redirection"):  # the boosted model is called itself
            self._forward_redirection = lambda wrapper, model, method, inner, *args: method(wrapper, *args)
        arguments.check_options_of_model(self)
        self._watch_programs_outside()

    def create_accelerator_and_postprocess(self) -> None:
        """Let all ranks run what TRL's main process does where that alone talks to a server."""
        super().create_accelerator_and_postprocess()
        alone = self._class_of_trl == _ONLINE_DPO and self.args.use_vllm
        self.accelerator.all_ranks_lead = alone or self._class_of_trl in arguments.ASYNCHRONOUS

    def _send_telemetry(self) -> None:
        if dist.get_rank() == 0:
            super()._send_telemetry()

    @property
    def _class_of_trl(self) -> str:
        """Name of TRL's nearest class; TRL's `_name` is what it calls it in metrics and model cards."""
        return _names_in_trl(type(self))[0]

    # ----- rewards and tools -----

    def _watch_programs_outside(self) -> None:
        """Let tools run once for a replica, and rewards and rollouts be looked through."""
        self._standalone_tools = [self._tools.tool(each) for each in getattr(self, "_standalone_tools", ())]
        self._checked = trl_server.CheckedRewards(self.accelerator.replicas)
        if getattr(self, "rollout_func", None):
            self.rollout_func = trl_server.rollout_of_first_rank(self.rollout_func, self.accelerator.replicas)
        for index, function in enumerate(getattr(self, "reward_funcs", None) or ()):
            if not isinstance(function, nn.Module):
                name = getattr(function, "__name__", type(function).__name__)
                if getattr(self, "environment_factories", None):  # whose state the first rank has
                    function = self._tools.tool(function)
                self.reward_funcs[index] = self._checked.checked(function, name)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return rewards, those of the first rank of each replica; raises ConfigurationError if one is missing."""
        return self._rewards_of_first_ranks(super()._calculate_rewards(*args, **kwargs))

    def _calculate_rewards_from_functions(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return rewards as `_calculate_rewards` does: OnlineDPO's name for it."""
        return self._rewards_of_first_ranks(super()._calculate_rewards_from_functions(*args, **kwargs))

    def _rewards_of_first_ranks(self, rewards: Tensor) -> Tensor:
        self._checked.raise_problem()
        return self.accelerator.replicas.of_first_ranks(rewards)

    # ----- the meter -----

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as the trainer does, while meters look on."""
        return self._metered(super()._generate, *args, **kwargs)

    def _generate_vllm(self, *args: Any, **kwargs: Any) -> Any:
        """Generate by OnlineDPO's server, while meters look on; others do so inside of `_generate`."""
        if self._class_of_trl != _ONLINE_DPO:
            return super()._generate_vllm(*args, **kwargs)
        return self._metered(super()._generate_vllm, *args, **kwargs)

    def _metered(self, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            counts = [stack.enter_context(each.meter.generating()) for each in self._meters()]
            found = generate(*args, **kwargs)
        # GRPO's are lists of ids; OnlineDPO's are padded, with a mask behind.
        tokens = found[3] if isinstance(found[1], Tensor) else sum(map(len, found[1]))
        for count in counts:
            count(tokens)
        return self._as_wide_on_all_replicas(*found) if self._class_of_trl == _ONLINE_DPO else found

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Return what a step trains on, which meters count; the loader has prompts alone."""
        if isinstance(inputs, list):
            arguments.check_shares(self, len(inputs))
        for callback in self._meters():
            callback.training.close()
        made = super()._prepare_inputs(inputs)
        for callback in self._meters() if self.model.training else ():
            callback.training.enter_context(callback.meter.training())
        if self.model.training and isinstance(made, dict) and "completion_ids" in made and made is not inputs:
            parts = {
                name: [made[f"{part}_{end}"] for part in ("prompt", "completion")] for name, end in _COUNTED.items()
            }
            for callback in self._meters():
                callback.meter.count({name: torch.cat(tensors, 1) for name, tensors in parts.items()})
        return made

    # ----- distillation -----

    def _compute_loss(self, student: nn.Module, inputs: Any, *rest: Any, **options: Any) -> Any:
        """Compute DistillationTrainer's divergence, entropies and count from logits: a head's weight is cut."""
        if self._class_of_trl != _DISTILLING:
            return super()._compute_loss(student, inputs, *rest, **options)
        mask, (items,) = inputs["completion_mask"] * inputs.get("tool_mask", 1), rest
        batch = {
            "input_ids": torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
            "attention_mask": torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
            "use_cache": False,
            **{name: each for name, each in inputs.items() if name not in _GENERATED},
        }
        self.teacher_model.eval()
        with torch.no_grad():
            theirs = self.teacher_model(**batch).logits
        scores = [
            (logits[:, -mask.shape[1] - 1 : -1][mask != 0].float() / self.temperature).log_softmax(-1)
            for logits in (student(**batch).logits, theirs)
        ]  # [tokens that count, vocabulary] each
        divergence, entropy = _divergence(*scores, self.beta), -(scores[0].exp() * scores[0]).sum().detach()
        count, progress = (mask != 0).sum(), self.accelerator.loss_in_progress
        if progress is not None and items is not None:  # TRL's number of items is that of all replicas
            progress.is_weighted = True
        return divergence / (count.clamp(min=1) if items is None else items), entropy, count

    # ----- means of a process are those of all replicas -----

    def _weighted(self, loss: Tensor, rows: int | None, inputs: Any = None) -> Tensor:
        """Weight a mean by this replica's share of the samples, or, in GRPO's loss "bnpo", of the tokens."""
        counts_tokens = getattr(self.args, "loss_type", None) == "bnpo" and not hasattr(self, "teacher_model")
        if (counts_tokens or self._class_of_trl in _OF_TOKENS) and inputs is not None:
            rows = _tokens_of(inputs)
        return super()._weighted(loss, rows, inputs)

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss as the trainer does; its entropy bonus and its metrics are those of all replicas."""
        if self.plugin.dp_size == 1:
            return super().compute_loss(model, inputs, *args, **kwargs)
        with self._bonus_of_replicas(inputs):
            result = super().compute_loss(model, inputs, *args, **kwargs)
        if (name := self._class_of_trl) in _NOTED:
            self._share_metrics(self._metrics["train" if self.model.training else "eval"], _NOTED[name](inputs))
        return result

    def get_high_entropy_mask(self, entropies: Tensor, mask: Tensor, threshold: float) -> Tensor:
        """Return the tokens of GRPO's highest entropies, [rows, tokens], with all that tie for the lowest of them.

        Where the same words go before, entropies are equal but for rounding, which differs by layout.
        """
        kept = super().get_high_entropy_mask(entropies, mask, threshold)
        lowest = self.accelerator.gather(entropies.masked_fill(~kept, torch.inf).amin()).min()
        return (entropies >= lowest * (1 - _ROUNDING)) & mask.bool()

    @contextmanager
    def _bonus_of_replicas(self, inputs: Any) -> Iterator[None]:
        """Weight GRPO's entropy bonus by this replica's share of the tokens; "bnpo" weights the whole loss so."""
        coefficient = getattr(self, "entropy_coef", 0.0)
        if not coefficient or self.args.loss_type == "bnpo":
            yield
            return
        tokens = _tokens_of(inputs)
        total = self.accelerator.reduce(torch.tensor(tokens, device=self.args.device)).item()
        self.entropy_coef = coefficient * tokens * self.plugin.dp_size / total
        try:
            yield
        finally:
            self.entropy_coef = coefficient
        if noted := self._metrics["train" if self.model.training else "eval"].get("entropy_coef"):
            noted[-1] = coefficient

    def _share_metrics(self, noted: dict[str, list[float]], weight: int) -> None:
        """Share `noted` metrics, name -> values of `weight` samples or tokens here, that are not shared yet."""
        fresh = {
            name: [place for place, each in enumerate(values) if not isinstance(each, _OfReplicas)]
            for name, values in noted.items()
        }
        own = {name: [float(noted[name][place]) for place in places] for name, places in fresh.items()}
        parts = self.accelerator.replicas.gather_objects([[weight, own]])
        for name, places in fresh.items():
            for index, place in enumerate(places):
                known = [(each, values[name][index]) for each, values in parts if len(values.get(name, ())) > index]
                noted[name][place] = _OfReplicas(_joined(name, known))

    def _estimate_optimal_values(self) -> None:
        """Estimate values as A2PO does, each replica those of its share of the samples."""
        replicas = self.plugin.dp_size
        for dataset in (self.train_dataset, self.eval_dataset):
            rest = len(dataset or ()) % (self.args.per_device_train_batch_size * replicas)
            if 0 < rest < replicas:
                raise arguments.unlike_shares(self, [0] * (replicas - rest) + [1] * rest)
        super()._estimate_optimal_values()

    # ----- ORPO and CPO, which add a mean over tokens to one over pairs -----

    def concatenated_inputs(self, batch: Any, *args: Any, **options: Any) -> Any:
        """Join answers that are padded as in one process: the metrics of logits count padding."""
        pad, wide = self.accelerator.pad_across_processes, dict(batch)
        fills = {"input_ids": options.get("padding_value", 0), "attention_mask": 0, "labels": -100}
        for name in [each for each in batch if each.partition("_")[2] in fills and not each.startswith("prompt")]:
            wide[name] = pad(batch[name], 1, fills[name.partition("_")[2]])
        return super().concatenated_inputs(wide, *args, **options)

    def concatenated_forward(self, model: nn.Module, batch: Any) -> tuple[Any, ...]:
        """Score answers as the trainer does, with a mean over tokens that counts as many as one over pairs should.

        Raises:
            ConfigurationError: a replica has no pairs; raised on all of them.
        """
        replicas, counted = self.accelerator.replicas, batch["chosen_labels"] != -100
        if replicas.size == 1:
            return super().concatenated_forward(model, batch)
        if not self.is_encoder_decoder:
            reads_prompts = self._class_of_trl == "ORPOTrainer"
            counted = (batch["chosen_attention_mask"] != 0 if reads_prompts else counted)[:, 1:]
        own = torch.stack([counted.sum(), counted.new_tensor(len(counted), dtype=torch.int64)])
        everyone = replicas.gather(own[None])
        if not everyone[:, 1].all():
            raise arguments.unlike_shares(self, everyone[:, 1].tolist(), "each needs one")
        (tokens, pairs), (all_tokens, all_pairs) = own.tolist(), everyone.sum(0).tolist()
        scores = super().concatenated_forward(model, batch)
        mean = scores[4] if tokens or not all_tokens else torch.zeros_like(scores[4])  # not the nan of no tokens
        return (*scores[:4], mean * (tokens * all_pairs / max(pairs * all_tokens, 1)), *scores[5:])

    # ----- OnlineDPO, which has its loss and its metrics in `training_step` -----

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Train on a batch; a loss that the trainer computes here is that of all replicas, and so are its metrics."""
        if self._class_of_trl != _ONLINE_DPO or self.plugin.dp_size == 1:
            return super().training_step(model, inputs, *args, **kwargs)
        rows = len(inputs["prompt"])
        arguments.check_shares(self, rows)
        self.accelerator.losses_by_rows = True
        with self.accelerator.computing_loss(LossInProgress(rows, answers=2)):
            loss = super().training_step(model, inputs, *args, **kwargs)
        self._share_metrics({_ENDED: self.stats[_ENDED]}, rows)
        return self._weighted(loss, rows)

    def _move_model_to_vllm(self) -> None:
        """Send OnlineDPO's server what `save_model` would write, merged; raises ServerError on all ranks."""
        self.vllm_client.update_named_params(self._announced_weights, trl_server.merged_weights(self))
        self.vllm_client.reset_prefix_cache()

    @cached_property
    def _announced_weights(self) -> list[tuple[str, str, list[int]]]:
        """Names, dtypes and shapes, for which all weights are gathered once; training changes none of them."""
        return trl_server.announced(trl_server.merged_weights(self))

    def _as_wide_on_all_replicas(self, *found: Any) -> tuple[Any, ...]:
        """Pad prompts in front and answers behind as one process does: OnlineDPO's metrics count padding too."""
        pad, index = self.accelerator.pad_across_processes, self._tokenizer.pad_token_id
        counts = int(self.args.use_vllm)  # TRL's mask counts the padding before prompts that a server gets
        fills = ((index, True), (counts, True), (index, False), (0, False))
        tensors = (pad(each, 1, fill, first) for each, (fill, first) in zip(found, fills, strict=False))
        return (*tensors, *found[len(fills) :])

    # ----- processes are replicas -----

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the trainer does, with a replica for a process."""
        with self._of_replicas():
            return super().train(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as the trainer does, with a replica for a process."""
        with self._of_replicas():
            return super().evaluate(*args, **kwargs)

    @contextmanager
    def _of_replicas(self, **ours: Callable[..., Any]) -> Iterator[None]:
        """Let the functions by which TRL's modules count processes, or take a model out of its wrapper, be ours."""
        ours |= {
            "gather": self._gather,
            "gather_object": lambda objects: self.accelerator.replicas.gather_objects(objects),
            "set_seed": self._set_seed,
            "unwrap_model_for_generation": _boosted_for_generation,
        }
        modules = [module for name, module in sys.modules.items() if name.startswith("trl.")]
        found = [(vars(module), name) for module in modules for name in ours if callable(vars(module).get(name))]
        before = [names[name] for names, name in found]
        for names, name in found:
            names[name] = ours[name]
        try:
            yield
        finally:
            for (names, name), function in zip(found, before, strict=True):
                names[name] = function

    def _gather(self, data: Any) -> Any:
        """Return values of all replicas, of their first ranks: a program outside may answer each rank otherwise."""
        replicas = self.accelerator.replicas
        return replicas.gather(replicas.of_first_ranks(data))

    def _set_seed(self, seed: int, device_specific: bool = False, **options: Any) -> None:
        """Seed the generators with the same number on all ranks of a replica: they draw the same tokens."""
        from accelerate.utils import set_seed

        set_seed(seed + self.accelerator.process_index if device_specific else seed, **options)

    # ----- data -----

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, *rest: Any) -> Any:
        """Prepare texts as one process does; KTO pairs the samples of a batch, which here is that of all replicas."""
        args = copy.copy(args)
        args.per_device_train_batch_size *= self.plugin.dp_size
        return super()._prepare_dataset(dataset, processing_class, args, *rest)

    # ----- the reference model -----

    def _wrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Boost the model; without a reference model, its base, or an adapter that TRL makes, is the reference."""
        has_adapters = hasattr(model, "disable_adapter")
        for callback in self.callback_handler.callbacks:
            if hasattr(callback, "teacher_adapter_name"):
                callback._initialize_teacher_adapter()  # while the model is whole; TRL does so when training begins
        wrapped = super()._wrap_model(model, *args, **kwargs)
        if has_adapters and getattr(self, "ref_model", self.model) is None:
            self.ref_model = AdapterReference(self.model, "ref" if "ref" in model.peft_config else None)
        if getattr(self, "teacher_model", None) is model:  # of SDPO and SDFT
            kind = self.args.teacher_model_kind
            adapter = "teacher" if kind == "ema" else None
            self.teacher_model = wrapped if kind == "live" else AdapterReference(wrapped, adapter)
        return wrapped

    def add_callback(self, callback: Any) -> None:
        """Add a callback; one that moves a reference or an adapter has both whole meanwhile (ZeRO stage 3)."""
        if hasattr(callback, "sync_target_model"):
            callback.sync_target_model = partial(self._sync, callback.sync_target_model)
        if hasattr(callback, "teacher_adapter_name"):
            callback.on_step_end = partial(self._move_teacher, callback)
        super().add_callback(callback)

    @torch.no_grad()
    def _move_teacher(self, callback: Any, args: Any, state: Any, control: Any, **further: Any) -> None:
        """Move the teacher's adapter towards the trained one, as TRL's callback does with whole weights."""
        if state.global_step % callback.sync_steps:
            return
        inside, rate = self.model.unwrap(), callback.update_rate
        with self.model.summon_full_params():
            params = dict(inside.named_parameters())
            for name, teacher in params.items():
                if callback.teacher_adapter_name in (parts := name.split(".")):
                    parts[parts.index(callback.teacher_adapter_name)] = inside.active_adapter
                    teacher.copy_((1 - rate) * teacher + rate * params[".".join(parts)])

    def _sync(self, sync: Callable[..., None], model: nn.Module, target: nn.Module, alpha: float) -> None:
        with self.model.summon_full_params(writeback=False), target.summon_full_params():
            sync(model, target, alpha)

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        """Compute log-probabilities of the reference by the boosted model, and store them where all ranks read them."""
        self._wrap_model(self.model)
        if not getattr(dataset, "cache_files", True):
            dataset = self._stored(dataset, name)
        return super()._precompute_ref_logps(dataset, name, batch_size)

    def _stored(self, dataset: Any, name: str) -> Any:
        """Return a dataset from memory as one in files: TRL stores log-probabilities in their folder."""
        from datasets import load_from_disk

        folder = Path(self.args.output_dir) / "reference_log_probs" / f"{name}-{self._num_stored}"
        self._num_stored += 1
        if self.accelerator.is_main_process:
            dataset.save_to_disk(folder)
        self.accelerator.wait_for_everyone()
        return load_from_disk(folder)

    def compute_ref_log_probs(self, model: nn.Module, inputs: Any) -> Any:
        """Score a batch by the reference in the precision of the training."""
        with self.compute_loss_context_manager():
            return super().compute_ref_log_probs(model, inputs)


class _OfReplicas(float):
    """A metric of the samples of all replicas."""


def _divergence(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return the sum over tokens of a generalized Jensen-Shannon divergence (arXiv 2306.13649).

    Args:
        student, teacher: log-probabilities, [tokens, vocabulary].
        beta: share of the teacher in the mixture; 0 is the divergence of the student from the teacher, 1 the reverse.
    """
    if beta in (0.0, 1.0):
        here, there = (teacher, student) if beta == 0.0 else (student, teacher)
        return (here.exp() * (here - there)).sum()
    mixed = torch.logaddexp(student + math.log(1 - beta), teacher + math.log(beta))
    parts = ((each.exp() * (each - mixed)).sum() for each in (teacher, student))
    return beta * next(parts) + (1 - beta) * next(parts)


def _tokens_of(inputs: Any) -> int:
    """Return the number of tokens that count in a loss: those of completions, but for answers of tools."""
    mask = inputs["completion_mask"] if "completion_mask" in inputs else inputs["labels"] != -100
    return int((mask * inputs.get("tool_mask", mask)).sum())


# Trainers that note metrics of a process -> what a metric of a batch is a mean over.
_NOTED: dict[str, Callable[[Any], int]] = {"A2POTrainer": lambda inputs: len(inputs["input_ids"])}
_NOTED["IWOPDTrainer"] = _tokens_of


def _joined(name: str, known: list[tuple[int, float]]) -> float:
    """Return a metric of all replicas, of pairs of its weight and its value on each."""
    values = [value for _, value in known]
    if "min_" in name or "max_" in name:
        return min(values) if "min_" in name else max(values)
    return sum(weight * value for weight, value in known) / max(sum(weight for weight, _ in known), 1)


@contextmanager
def _boosted_for_generation(
    model: nn.Module, accelerator: Any, *args: Any, gradient_checkpointing_kwargs: dict | None = None, **options: Any
) -> Iterator[nn.Module]:
    """Yield the boosted model, whose `generate` runs on all ranks of a replica, without gradient checkpointing."""
    from trl.models.utils import disable_gradient_checkpointing

    with disable_gradient_checkpointing(accelerator.unwrap_model(model), gradient_checkpointing_kwargs):
        yield model
