"""verl's training engine on boosted models: its `BaseEngine` under the backend name `hybrid_booster`.

verl imports this module by `model.external_lib`, and builds the engine from a `HybridBoosterEngineConfig`. A mini-batch
runs as one batch of `execute_pipeline`: each of verl's micro-batches, whose sequences are packed into one row, is a
micro-batch of the pipeline, so that stages work at the same time, and logits exist for one micro-batch at a time.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor, nn
from verl.utils import tensordict_utils
from verl.workers.config import EngineConfig
from verl.workers.engine import utils
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry
from verl.workers.engine.spec import BlockPlacement, ShardSpec

from booster.booster import Booster
from booster.errors import ConfigurationError
from booster.integrations.verl_options import dtype_of, plugin_options, scheduler_of
from booster.launch import launch_from_torch
from booster.logging import get_logger
from booster.plugin import load_plugin
from shardformer.cross_entropy.vocab_parallel import token_scores
from shardformer.distributed.process_groups import all_gather_json, world_group

BACKEND = "hybrid_booster"
_DEVICES = ["cpu", "cuda"]
_INDEX = "micro_batch"  # entry of a pipeline's batch: which of verl's micro-batches a row is
_OF_LORA = ("lora_alpha", "target_modules", "target_parameters", "exclude_modules")
_HUGGING_FACE = "huggingface"  # folder of verl's checkpoints for what `from_pretrained` opens
_logger = get_logger(__name__)
_setting = tensordict_utils.get_non_tensor_data


@dataclass
class HybridBoosterEngineConfig(EngineConfig):
    """verl's `actor.engine` for this backend: verl's common fields, and the layout.

    Attributes:
        tp_size, pp_size, cp_size, ep_size: ranks on the axes of the layout; replicas are what is left.
        zero_stage: what replicas share of the training state, 0 to 3.
        model_dtype: dtype in which weights are loaded; `dtype` is that of training.
        plugin: further options of `HybridParallelPlugin`, as `{"pp_style": "zero_bubble"}`.
    """

    strategy: str = BACKEND
    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    ep_size: int = 1
    zero_stage: int = 1
    model_dtype: str = "fp32"
    plugin: dict[str, Any] = field(default_factory=dict)


class HybridBoosterEngine(BaseEngine):
    """Trains a causal language model of transformers for verl; see verl's `BaseEngine` for what it does not explain.

    Args:
        optimizer_config: verl's `FSDPOptimizerConfig`; not read if the engine only infers.

    Raises:
        ConfigurationError: a configuration asks for what has no meaning under a layout, or for a layout that the ranks
            or the model do not allow.
    """

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        super().__init__()
        self.model_config, self.engine_config = model_config, engine_config
        self.optimizer_config, self.checkpoint_config = optimizer_config, checkpoint_config
        self.mode: str | None = None
        options = plugin_options(engine_config, model_config)
        launch_from_torch(seed=None)
        if getattr(engine_config, "full_determinism", False):
            utils.enable_full_determinism(engine_config.seed)
        self.plugin = load_plugin("hybrid_parallel", **options)
        self.booster = Booster(plugin=self.plugin)
        self.mesh = self.plugin.mesh
        self._saved: list[Path] = []
        self._delta_shard_snap: dict[str, Tensor] = {}

    # ----- model, optimizer and modes -----

    def initialize(self) -> None:
        """Load the model, and boost it with its optimizer and scheduler."""
        # What no file has, as the head of a critic, is drawn: the same on all ranks.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.engine_config.seed)
            module = self.build_module()
        if self.engine_config.forward_only:
            self.module, self.optimizer, self.lr_scheduler = self.booster.boost(module), None, None
            return
        from verl.workers.config.optimizer import build_optimizer

        trained = [param for param in module.parameters() if param.requires_grad]
        optimizer = build_optimizer(trained, self.optimizer_config)
        scheduler = scheduler_of(optimizer, self.optimizer_config)
        self.module, self.optimizer, self.lr_scheduler = self.booster.boost(module, optimizer, scheduler)

    def build_module(self) -> nn.Module:
        """Return the plain model that `model_config` names; override it to give one of your own."""
        from transformers import AutoModelForCausalLM

        model = self._loaded(AutoModelForCausalLM)
        config = self.model_config
        if not getattr(config, "lora_rank", 0):
            return model
        from peft import LoraConfig, PeftModel, TaskType, get_peft_model

        if getattr(config, "lora_adapter_path", None):
            return PeftModel.from_pretrained(model, config.lora_adapter_path, is_trainable=True)
        given = {name: getattr(config, name, None) for name in _OF_LORA}
        given = {name: [*each] if isinstance(each, list | tuple) else each for name, each in given.items()}
        return get_peft_model(model, LoraConfig(task_type=TaskType.CAUSAL_LM, r=config.lora_rank, **given))

    def _loaded(self, auto_class: Any) -> nn.Module:
        config = self.model_config
        return auto_class.from_pretrained(
            config.local_path,
            config=config.hf_config,
            dtype=dtype_of(getattr(self.engine_config, "model_dtype", "fp32")),
            trust_remote_code=config.trust_remote_code,
        )

    def train_mode(self, **kwargs: Any) -> AbstractContextManager[None]:
        """Return a context in which the model trains; gradients are dropped at its end."""
        return _Mode(self, "train", **kwargs)

    def eval_mode(self, **kwargs: Any) -> AbstractContextManager[None]:
        """Return a context in which the model is evaluated."""
        return _Mode(self, "eval", **kwargs)

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Return a context in which the model runs without its LoRA adapter."""
        return self.module.unwrap().disable_adapter()

    # ----- where this rank is -----

    def get_data_parallel_size(self) -> int:
        """Return the number of replicas."""
        return self.plugin.dp_size

    def get_data_parallel_rank(self) -> int:
        """Return which replica this rank belongs to."""
        return self.plugin.dp_rank

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """Return the ranks that have the same shard of other replicas."""
        return self.mesh.get_group("dp")

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Return whether verl takes the outputs of its replica from this rank, which runs the last stage."""
        firsts = self.mesh.get_local_rank("tp") == self.mesh.get_local_rank("cp") == 0
        return firsts and self.plugin.has_last_stage

    # ----- the step -----

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Run the micro-batches of a mini-batch, and add up the gradients of their losses.

        A loss of verl is divided by a count of the global batch already, and multiplied by the number of replicas:
        micro-batches add up, and replicas are averaged.

        Args:
            data: sequences of this replica, jagged, [rows, tokens].
            loss_function: (model_output, data, dp_group) -> (loss, metrics); None to infer.

        Returns:
            `model_output`, `loss` of each micro-batch, and `metrics`, on ranks that run the last stage. Other ranks
            have empty ones.
        """
        group = self.get_data_parallel_group()
        tokens = data["loss_mask"].sum().to(self.mesh.device_type)
        dist.all_reduce(tokens, group=group)
        tensordict_utils.assign_non_tensor(
            data, sp_size=self.mesh["cp"].size(), dp_size=self.get_data_parallel_size(), batch_num_tokens=tokens.item()
        )
        micro_batches, indices = utils.prepare_micro_batches(data=data, dp_group=group, same_micro_num_in_dp=True)
        micro_batches = [each.to(self.mesh.device_type) for each in micro_batches]
        losses = _Losses(micro_batches, loss_function, partial(self.model_outputs), group)
        self.booster.execute_pipeline(
            _rows(micro_batches),
            self.module,
            criterion=losses,
            optimizer=None if forward_only else self.optimizer,
            return_loss=False,
        )
        keeps = forward_only or _setting(data, "return_model_output", False)
        return utils.postprocess_batch_func(losses.outputs(keeps), indices=indices, data=data)

    def model_outputs(self, logits: Tensor, micro_batch: TensorDict) -> dict[str, Tensor]:
        """Return what verl's losses read of each token.

        Args:
            logits: [tokens, vocabulary], of all sequences in a row.

        Returns:
            `log_probs` of the next token, and where the batch asks for them `entropy` and `sum_pi_squared`, jagged.
        """
        ids = micro_batch["input_ids"]
        wanted = {"log_probs": "log_probs"}
        wanted |= {"entropy": "entropy"} if _setting(micro_batch, "calculate_entropy", False) else {}
        if _setting(micro_batch, "calculate_sum_pi_squared", False):
            wanted["sum_pi_squared"] = "log_sum_sq_probs"
        temperature = _setting(micro_batch, "temperature", 1.0)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if isinstance(temperature, Tensor):
            temperature = temperature.to(logits).expand(ids.shape[0]).repeat_interleave(ids.offsets().diff())[:, None]
        if isinstance(temperature, Tensor) or temperature != 1.0:
            logits = logits / temperature
        found = token_scores(logits, ids.values().roll(-1), tuple(wanted.values()))
        if "sum_pi_squared" in wanted:
            found["log_sum_sq_probs"] = found["log_sum_sq_probs"].exp()
        return {name: torch.nested.nested_tensor_from_jagged(found[own], ids.offsets()) for name, own in wanted.items()}

    def optimizer_zero_grad(self) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad()

    def optimizer_step(self) -> float:
        """Clip the gradients and update the weights; return the norm before, whose step is left out if not finite."""
        norm = self.module.clip_grad_norm_(self.optimizer_config.clip_grad)
        # In fp16 the step itself is left out, and shrinks the loss scale.
        if torch.isfinite(norm) or self.plugin.precision == "fp16":
            self.optimizer.step()
        else:
            _logger.warning("the norm of the gradients is %s; this step changes no weights", float(norm))
            self.optimizer.zero_grad()
        return float(norm)

    def lr_scheduler_step(self) -> float:
        """Advance the learning rate, and return that of the first parameter group."""
        self.lr_scheduler.step()
        return self.lr_scheduler.get_last_lr()[0]

    # ----- memory -----

    @property
    def is_param_offload_enabled(self) -> bool:
        """Whether parameters are in the memory of the machine, from where layers gather them (ZeRO stage 3)."""
        return self.engine_config.param_offload

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        """Whether optimizer states are in the memory of the machine, where the step runs."""
        return self.engine_config.optimizer_offload

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Check that nothing has to move: what is offloaded is never on the GPU, what is not always."""
        super().to(device=device, model=model, optimizer=optimizer, grad=grad)
        if device != "cpu" or self.mesh.device_type == "cpu":
            return
        asked = {"param_offload": model, "optimizer_offload": optimizer and self.optimizer is not None}
        for name, is_asked in asked.items():
            if is_asked and not getattr(self.engine_config, name):
                raise ConfigurationError(f"engine.to('cpu') finds {name}=False; set engine.{name}=True")

    # ----- checkpoints -----

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Write what `checkpoint_config.save_contents` lists; `hf_model` goes to the folder `huggingface`."""
        if hdfs_path is not None:
            raise ConfigurationError(f"hdfs_path={hdfs_path!r} is no folder of this machine; leave it out")
        config, contents = self.checkpoint_config, self.checkpoint_config.save_contents
        is_async = getattr(config, "async_save", False)
        objects = self._objects(contents)
        if objects:
            self.booster.save_checkpoint(local_path, asynchronous=is_async, global_step=global_step, **objects)
        if "hf_model" in contents:
            folder = Path(local_path) / _HUGGING_FACE
            self.booster.finish_saving()
            self.booster.save_model(self.module, str(folder))
            tokenizer = getattr(self.model_config, "tokenizer", None)
            if tokenizer is not None and dist.get_rank() == 0:
                tokenizer.save_pretrained(folder)
        self._saved.append(Path(local_path))
        while max_ckpt_to_keep and len(self._saved) > max_ckpt_to_keep:
            oldest = self._saved.pop(0)
            if dist.get_rank() == 0 and oldest not in self._saved:
                shutil.rmtree(oldest, ignore_errors=True)

    def load_checkpoint(
        self, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = True, **kwargs: Any
    ) -> None:
        """Load what `checkpoint_config.load_contents` lists, saved under this layout or another; the files stay."""
        objects = self._objects(self.checkpoint_config.load_contents)
        if local_path is not None and objects:
            self.booster.load_checkpoint(local_path, **objects)

    def _objects(self, contents: Sequence[str]) -> dict[str, Any]:
        """Return the objects that verl's names of contents stand for."""
        found = {"model": ("model", self.module), "optimizer": ("optimizer", self.optimizer)}
        found["lr_scheduler"] = ("extra", self.lr_scheduler)
        return {name: each for name, (of, each) in found.items() if of in contents and each is not None}

    # ----- weights -----

    def get_per_tensor_param(self, **kwargs: Any) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any] | None]:
        """Return whole weights by their names in files, on all ranks, and the configuration of an adapter or None.

        With LoRA these are the weights with the adapter added where `model.lora.merge` is set, or the adapter alone.

        Raises:
            ConfigurationError: if verl asks for the base model as well as the adapter.
        """
        merges = bool(_lora(self.model_config).get("merge", False))
        peft_config = getattr(self.module.unwrap(), "peft_config", None)
        if peft_config is None or merges:
            return self.booster.weights(self.module, merge_adapters=peft_config is not None), None
        if not kwargs.get("base_sync_done", True):
            raise ConfigurationError(
                "rollout.load_format=dummy asks for the weights of the base model as well as the adapter; use "
                "rollout.load_format=safetensors, or model.lora.merge=True"
            )
        return self.booster.weights(self.module), peft_config["default"].to_dict()

    def get_per_tensor_param_shard(
        self, **kwargs: Any
    ) -> tuple[Iterator[tuple[str, Tensor, ShardSpec]], dict[str, Any] | None]:
        """Return (name, this rank's one flat piece in bfloat16, its place), the same names on all ranks."""
        merges = getattr(self.module.unwrap(), "peft_config", None) is not None
        pieces = dict(self.booster.weights(self.module, torch.bfloat16, merge_adapters=merges, shards=True))
        return _with_places(pieces, self.mesh.device_type), None

    def get_per_tensor_param_delta_shard(self, **kwargs: Any) -> tuple[Iterator[tuple], dict[str, Any] | None]:
        """Return the elements that have changed since the last call; needs `prime_delta_snapshots` before the first."""
        pieces, _ = self.get_per_tensor_param_shard()
        return utils.hf_delta_export(pieces, self._delta_shard_snap, utils._hf_entry_identity), None


@EngineRegistry.register(model_type="language_model", backend=BACKEND, device=_DEVICES)
class HybridBoosterEngineWithLMHead(HybridBoosterEngine):
    """The engine of actors and reference models."""


@EngineRegistry.register(model_type="value_model", backend=BACKEND, device=_DEVICES)
class HybridBoosterEngineWithValueHead(HybridBoosterEngine):
    """The engine of critics: a model that gives each token one value."""

    def build_module(self) -> nn.Module:
        """Return the plain model with a head of one value for each token."""
        from transformers import AutoModelForTokenClassification

        config = self.model_config.hf_config
        # Values are compared with those that the same weights gave before: dropout would change them.
        config.num_labels, config.classifier_dropout = 1, 0.0
        return self._loaded(AutoModelForTokenClassification)

    def model_outputs(self, logits: Tensor, micro_batch: TensorDict) -> dict[str, Tensor]:
        """Return `values` of tokens, jagged; logits are [tokens, 1]."""
        offsets = micro_batch["input_ids"].offsets()
        return {"values": torch.nested.nested_tensor_from_jagged(logits.squeeze(-1), offsets)}


class _Mode(BaseEngineCtx):
    """verl's context of a mode."""

    def __enter__(self) -> None:
        super().__enter__()
        self.engine.module.train(self.mode == "train")

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if self.mode == "train" and (self.zero_grad_on_exit or kind is not None):
            self.engine.optimizer_zero_grad()
        super().__exit__(kind, error, traceback)


@dataclass(eq=False)
class _Losses:
    """The criterion of a mini-batch: verl's loss of each micro-batch, on ranks that run the last stage."""

    micro_batches: Sequence[TensorDict]  # of verl, one for each row of the pipeline's batch
    loss_function: Callable | None  # of verl; None to infer
    model_outputs: Callable[[Tensor, TensorDict], dict[str, Tensor]]  # (logits, micro-batch) -> what the loss reads
    group: dist.ProcessGroup
    own_entries: tuple[str, ...] = (_INDEX,)
    _found: dict[int, dict[str, Any]] = field(default_factory=dict)

    def __call__(self, outputs: Any, row: Mapping[str, Tensor]) -> tuple[Tensor, float]:
        """Return (loss, count): counts of a replica add up to one, so that replicas are averaged."""
        index = int(row[_INDEX])
        data = self.micro_batches[index]
        model_output = self.model_outputs(outputs.logits[0, : len(data["input_ids"].values())], data)
        loss, metrics = outputs.logits.new_zeros(()), {}
        if self.loss_function is not None:
            loss, metrics = self.loss_function(model_output=model_output, data=data, dp_group=self.group)
        model_output = utils.detach_tree(model_output)
        self._found[index] = {"model_output": model_output, "loss": loss.detach(), "metrics": metrics}
        return loss, 1.0 / len(self.micro_batches)

    def outputs(self, keeps: bool) -> list[dict[str, Any]]:
        """Return what was found, in order, with losses as numbers; `keeps`: with outputs of the model, too."""
        return [
            {**found, "loss": found["loss"].item() if self.loss_function is not None else 1.0}
            | ({} if keeps else {"model_output": {}})
            for _, found in sorted(self._found.items())
        ]


def _rows(micro_batches: Sequence[TensorDict]) -> dict[str, Tensor]:
    """Return a pipeline's batch: each row is a micro-batch, padded to the longest by a last document."""
    first = micro_batches[0]
    for name in ("multi_modal_inputs", "routed_experts"):
        if name in first:
            raise ConfigurationError(
                f"the batch has {name}, which this engine does not pass to the model; leave it out"
            )
    if _setting(first, "distillation_use_topk", False):
        raise ConfigurationError("distillation_use_topk=True reads logits inside of the engine; use False")
    packs = _setting(first, "use_remove_padding", True)
    rows = [each["input_ids"].values() for each in micro_batches]
    longest = max(map(len, rows))
    batch = {
        "input_ids": torch.stack([F.pad(row, (0, longest - len(row))) for row in rows]),
        _INDEX: torch.arange(len(rows), device=rows[0].device),
    }
    positions = torch.arange(longest, device=rows[0].device)
    if packs:
        restarting = [
            torch.cat([_positions(each), positions[: longest - len(row)]])
            for each, row in zip(micro_batches, rows, strict=True)
        ]
        return {**batch, "position_ids": torch.stack(restarting)}
    most = max(len(each) for each in micro_batches)
    if most > 1:
        raise ConfigurationError(
            f"use_remove_padding=False leaves each sequence in a row of its own, and a micro-batch has {most}; use "
            "micro_batch_size_per_gpu=1 and use_dynamic_bsz=False, or use_remove_padding=True"
        )
    return {**batch, "attention_mask": torch.stack([positions < len(row) for row in rows]).long()}


def _positions(micro_batch: TensorDict) -> Tensor:
    """Return positions of packed sequences, [tokens], by which a model tells them apart: each counts from 0."""
    offsets, given = micro_batch["input_ids"].offsets(), micro_batch["position_ids"]
    counted = torch.arange(int(offsets[-1]), device=offsets.device)
    counted = counted - offsets[:-1].repeat_interleave(offsets.diff())
    if given.dim() != 2 or not torch.equal(given.values(), counted):
        raise ConfigurationError(
            "position_ids of a sequence do not count 0, 1, 2, …, by which sequences in a row are told apart; use "
            "use_remove_padding=False"
        )
    return counted


def _with_places(pieces: Mapping[str, Any], device: str) -> Iterator[tuple[str, Tensor, ShardSpec]]:
    """Yield (name, piece, flat, its place) of all names of all ranks, in the same order on each.

    A rank without a piece, and one whose piece another rank has as well, yields it without contributing.

    Raises:
        ConfigurationError: if a rank has several pieces of a tensor.
    """
    places = {name: [[[*part.offsets], [*part.sizes]] for part in each.rectangles] for name, each in pieces.items()}
    mine = {name: [[*each.shape], str(each.dtype), places[name]] for name, each in pieces.items()}
    all_ranks = all_gather_json(mine)
    for rank, each in enumerate(all_ranks):
        several = next((name for name, (_, _, parts) in each.items() if len(parts) > 1), None)
        if several is not None:
            raise ConfigurationError(
                f"rank {rank} has {len(each[several][2])} pieces of {several}, and verl's ShardSpec describes one; "
                "use a checkpoint engine of whole weights, or zero_stage=1 and tp_size=1"
            )
    owners: dict[tuple, int] = {}
    for rank, each in enumerate(all_ranks):
        for name, (_, _, parts) in each.items():
            owners.setdefault((name, str(parts)), rank)
    for name, (shape, dtype, _) in {name: each for rank in all_ranks for name, each in rank.items()}.items():
        parts = pieces[name].rectangles if name in pieces else []
        place: int | BlockPlacement = 0
        values = torch.empty(0, dtype=getattr(torch, dtype.removeprefix("torch.")), device=device)
        for part in parts:
            values = part.values.reshape(-1)
            place = BlockPlacement(tuple(part.sizes), tuple(part.offsets), tuple(shape))
        contributes = bool(parts) and owners[name, str(places[name])] == dist.get_rank()
        yield name, values, ShardSpec(tuple(shape), place=place, gather_group=world_group(), contributes=contributes)


def _lora(model_config: Any) -> Mapping[str, Any]:
    return getattr(model_config, "lora", None) or {}
