"""Small models, and their training with plain torch and boosted, both on the device of this rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.pipeline.schedule import SCHEDULES
from shardformer import record_module_init
from zoo_tests.campaigns.bits.training import hash_of
from zoo_tests.gpu import device
from zoo_tests.harness.adapters import with_adapters
from zoo_tests.harness.ranks import run_on_ranks

FP32 = 1e-4  # relative; see test_one_rank.py
STEPS, ROWS, LENGTH, VOCABULARY = 3, 16, 13, 160  # 16 x 13 tokens: products in 8 bit need multiples of 16
_SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4}
_DECODER = {**_SIZES, "num_key_value_heads": 2, "vocab_size": VOCABULARY, "attention_dropout": 0.0}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {  # name -> (model, configuration, its values)
    "bert": ("BertForMaskedLM", "BertConfig", {**_SIZES, **_NO_DROPOUT, "vocab_size": VOCABULARY}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _DECODER),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": VOCABULARY}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 64, "d_ff": 160, "d_kv": 16, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
        | {"dropout_rate": 0.0, "decoder_start_token_id": 0},
    ),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_DECODER, "num_local_experts": 4}),
}
# Name -> family, number of ranks, options.
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    f"pp2, {style}": ("llama", 2, {"pp_size": 2, "num_microbatches": 4, "pp_style": style, **more})
    for style in SCHEDULES
    for more in ({"num_model_chunks": 2} if style == "interleaved" else {},)
} | {
    "cp2, ring": ("llama", 2, {"cp_size": 2}),
    "cp2, all-to-all": ("llama", 2, {"cp_size": 2, "sequence_parallelism_mode": "all_to_all"}),
    "ep2": ("mixtral", 2, {"ep_size": 2}),
    "dp2, ZeRO-1": ("llama", 2, {"dp_size": 2, "zero_stage": 1, "zero_bucket_size_in_mb": 0.05}),
    "dp2, ZeRO-3": ("llama", 2, {"dp_size": 2, "zero_stage": 3, "zero_bucket_size_in_mb": 0.05}),
    "dp2, ZeRO-3, all in the memory of the host": (
        "llama",
        2,
        {"dp_size": 2, "zero_stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
    ),
    "tp2": ("llama", 2, {"tp_size": 2}),
    "tp2, sequence parallelism": ("llama", 2, {"tp_size": 2, "enable_sequence_parallelism": True}),
    "tp2-pp2": ("llama", 4, {"tp_size": 2, "pp_size": 2, "num_microbatches": 3}),
    "tp2-dp2": ("llama", 4, {"tp_size": 2}),
    # Of the families that differ most, where they differ.
    "tp2-pp2 of BERT": ("bert", 4, {"tp_size": 2, "pp_size": 2, "num_microbatches": 3}),
    "tp2 of GPT-2": ("gpt2", 2, {"tp_size": 2}),
    "pp2 of T5": ("t5", 2, {"pp_size": 2, "num_microbatches": 4}),
    "tp2 of Mixtral": ("mixtral", 2, {"tp_size": 2}),
}
_TARGETS = ("q_proj", "down_proj")


def build(family: str, adapters: bool = False, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    model, config, values = FAMILIES[family]
    values = {name: dropout if "drop" in name else value for name, value in values.items()}
    built = getattr(transformers, model)(getattr(transformers, config)(**values))
    return with_adapters(built, _TARGETS) if adapters else built


def batch(step: int) -> dict[str, Tensor]:
    """A global batch of rows of unlike lengths."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    mask = torch.arange(LENGTH) < torch.randint(LENGTH // 2, LENGTH + 1, (ROWS, 1), generator=generator)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


class Training:
    """A boosted model and its loop.

    Args:
        family: one of `FAMILIES`.
        adapters: whether a LoRA is trained, and not the model.
        directory: of a saved model, which is read once it is sharded; None to build the model.
        dropout: probability.
        options: of the plugin.
    """

    def __init__(
        self, family: str, adapters: bool = False, directory: str | None = None, dropout: float = 0.0, **options: Any
    ) -> None:
        if directory is None:
            model = build(family, adapters, dropout)
        else:
            with record_module_init():
                model = getattr(transformers, FAMILIES[family][0]).from_pretrained(directory)
        self.plugin = HybridParallelPlugin(seed=1, max_norm=1.0, **options)
        self.booster = Booster(plugin=self.plugin)
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
        self.model, self.optimizer = self.booster.boost(model.train(), optimizer)
        assert self.plugin.grid.device.type == _device()

    def step(self, number: int) -> float:
        """One step; its loss."""
        own = ROWS // self.plugin.dp_size
        share = {name: value[self.plugin.dp_rank * own :][:own] for name, value in batch(number).items()}
        loss = self.booster.execute_pipeline(iter([share]), self.model, optimizer=self.optimizer).loss
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def train(self, first: int = 0) -> list[float]:
        """Losses of the steps from `first` on."""
        return [self.step(number) for number in range(first, STEPS)]


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def train(family: str, options: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Losses of boosted and of plain training; options of `Training`."""
    return Training(family, **options).train(), train_plainly(family, options.get("adapters", False))


def train_plainly(family: str, adapters: bool = False) -> list[float]:
    """Losses of plain training of the whole batch, in fp32."""
    model = build(family, adapters).to(_device())
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    losses = []
    for step in range(STEPS):
        loss = model(**{name: value.to(_device()) for name, value in batch(step).items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def resume(
    directory: str, before: dict[str, Any], after: dict[str, Any], asynchronous: bool
) -> tuple[list[float], ...]:
    """Losses after a checkpoint: of the training that went on while it was written, and of another that resumed."""
    first = Training("llama", **before)
    first.step(0)
    first.booster.save_checkpoint(directory, model=first.model, optimizer=first.optimizer, asynchronous=asynchronous)
    went_on = first.train(1)
    first.plugin.checkpoint_io.finish_saving()
    dist.barrier()
    second = Training("llama", **after)
    second.booster.load_checkpoint(directory, model=second.model, optimizer=second.optimizer)
    return went_on, second.train(1)


def generate(options: dict[str, Any]) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens of the boosted and of the plain model."""
    boosted, plain = Training("llama", **options).model, build("llama").cuda()
    asked = {name: value[:, : LENGTH // 2].cuda() for name, value in batch(0).items() if name != "labels"}
    asked |= {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    return boosted.eval().generate(**asked).tolist(), plain.eval().generate(**asked).tolist()


def train_to_bits(family: str, directory: str, options: dict[str, Any]) -> tuple[list[float], float, str]:
    """Losses, the last norm of the gradients, and a hash of the weights, of a training with dropout.

    Args:
        directory: where all ranks save the model.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # of a real GPU it was set before
    try:
        training = Training(family, dropout=0.1, **options)
        losses = training.train()
    finally:
        torch.use_deterministic_algorithms(False)  # `boost` turned it on
    training.booster.save_model(training.model, directory)
    dist.barrier()
    return losses, float(training.optimizer.grad_norm), hash_of(Path(directory))


def needs_real_gpu(options: dict[str, Any]) -> None:
    """Skip a test of options that the simulated device has nothing for."""
    if device.chosen() != device.SIMULATED:
        return
    if options.get("zero_stage") == 3:
        pytest.skip("the simulated device gives no memory of a tensor back")
    if "offload_activations" in options:
        pytest.skip("the simulated device delays copies to the host; see simcuda/test_features.py")


def on_ranks(world_size: int, function: Any, *arguments: Any) -> list[Any]:
    """Run a function on ranks with the device of these tests."""
    return run_on_ranks(world_size, function, *arguments, device=device.chosen())
