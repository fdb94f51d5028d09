"""What a `DeepSpeed3DParallelConfig` describes trains to the numbers of plain training of the equivalent tied model.

What breaks here first: the head that a bare base model gets (`deepspeed_3d/plugin.py`), and patches of modules that are
replaced while the model is sharded (`three_d/patches.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model, LlamaConfig, LlamaForCausalLM, LlamaModel

from booster import Booster
from plugins.hybrid_parallel import (
    DeepSpeed3DParallelConfig,
    HybridParallelPlugin,
    vocab_parallel_cross_entropy,
    vocab_parallel_logit_helper,
)
from shardformer import TPInfo
from zoo_tests.harness.ranks import run_on_ranks
from zoo_tests.parity.test_tp_info import GPT2, LLAMA

SAMPLES, LENGTH, VOCABULARY = 13, 8, 101
BATCH, STEPS_OF_A_BATCH = 6, 3  # samples of a step; the last has one, and one of two replicas none of them
LR, CLIP = 0.3, 0.5

# ----- what is trained -----


def samples() -> TensorDataset:
    """Tokens, and masks with another number of labels in each sample."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
    keep = torch.rand(SAMPLES, LENGTH, generator=generator) > torch.linspace(0, 0.9, SAMPLES).unsqueeze(1)
    keep[:, 0] = True  # no sample is without labels
    return TensorDataset(tokens, keep.double())


def llama_batch(batch: list[Tensor]) -> tuple[tuple, tuple]:
    """As in ATorch's example: (tokens, attention_mask, position_ids), (labels, loss_mask)."""
    tokens, keep = batch
    inputs = tokens[:, :-1]
    return (inputs, torch.ones_like(inputs), torch.arange(LENGTH).expand_as(inputs)), (tokens[:, 1:], keep)


def gpt2_batch(batch: list[Tensor]) -> tuple[tuple, tuple]:
    tokens, keep = batch
    return (tokens[:, :-1], None, torch.ones_like(tokens[:, :-1])), (tokens[:, 1:], keep)


def llama_model(head: bool = False) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, tie_word_embeddings=False, **sizes)
    return (LlamaForCausalLM if head else LlamaModel)(config).double()


def gpt2_model() -> nn.Module:
    torch.manual_seed(0)
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=4, n_head=4, n_positions=LENGTH, **dropouts)
    return GPT2Model(config).double()


def masked_loss(logits: Tensor, labels: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    labels, keep = labels
    return (vocab_parallel_cross_entropy(logits, labels) * keep).sum(), keep.sum()


def plain_loss(logits: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
    losses = F.cross_entropy(logits.flatten(0, 1), labels[0].flatten(), reduction="none")
    return (losses * labels[1].flatten()).sum() / labels[1].sum()


def tempered(hidden: Tensor, embedding: nn.Module) -> Tensor:
    return vocab_parallel_logit_helper(hidden, embedding) * 0.5 + 0.1 * hidden.mean(-1, keepdim=True)


def times(factor: float) -> Callable:
    return lambda forward, module: lambda *args, **kwargs: factor * forward(*args, **kwargs)


def with_own_weight(forward: Callable, module: nn.Module) -> Callable:
    """Reads a parameter of the module, which has to be the one that is trained."""
    return lambda x: forward(x) + x[..., :1] * module.weight.mean()


LAYERS = [f"h.{number}" for number in range(4)]
PATCHES = {
    "h.*": times(0.7),  # each layer, the first and the last of a stage among them
    "wte": times(1.3),  # replaced by rows of the vocabulary
    "mlp.c_fc": times(1.5),  # cut by its outputs
    "h.1.mlp.c_proj": times(0.5),  # cut by its inputs
    "ln_f": with_own_weight,
}
WHOLE_VOCABULARY = (
    TPInfo().shard_col({"attn.c_attn": {"stride": 3}}, "mlp.c_fc").shard_row("attn.c_proj", "mlp.c_proj")
    .shrink({".attn": {"embed_dim", "split_size", "num_heads"}})
)  # fmt: skip


@dataclass(frozen=True)
class Scenario:
    """A training.

    Attributes:
        build, head: the model that is boosted, and the class that it is saved as.
        options: of DeepSpeed3DParallelConfig.
        helper: what plain training computes its logits with; None for the model's own head.
        clips: whether gradients are clipped, under a learning rate that warms up and decays.
        overrides: options of the plugin.
        tolerance: relative. Norms of Llama compute in fp32, where another scale of the loss is rounded differently.
    """

    build: Callable[[], nn.Module]
    head: type[nn.Module]
    options: dict[str, Any] = field(default_factory=dict)
    helper: Callable[[Tensor, nn.Module], Tensor] | None = vocab_parallel_logit_helper
    clips: bool = False
    overrides: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-9


_LLAMA = {"tpinfo": LLAMA, "batch_fn": llama_batch}
_GPT2 = {"tpinfo": GPT2, "batch_fn": gpt2_batch}
SCENARIOS = {
    "llama": Scenario(llama_model, LlamaForCausalLM, _LLAMA, clips=True, tolerance=1e-6),
    "gpt2": Scenario(gpt2_model, GPT2LMHeadModel, _GPT2),
    "patched": Scenario(gpt2_model, GPT2LMHeadModel, _GPT2 | {"custom_patcher": PATCHES}),
    # Its linear layers stay native, and get forwards that put gradients off.
    "patched, in halves": Scenario(
        gpt2_model,
        GPT2LMHeadModel,
        {"batch_fn": gpt2_batch, "custom_patcher": PATCHES},
        overrides={"pp_style": "zbv", "num_microbatches": 2},
    ),
    "helper": Scenario(gpt2_model, GPT2LMHeadModel, _GPT2 | {"logit_helper": tempered}, helper=tempered),
    # Defect 1 of ATorch: the two helpers were mixed up, whatever was cut, and the user's was lost.
    "whole vocabulary": Scenario(gpt2_model, GPT2LMHeadModel, _GPT2 | {"tpinfo": WHOLE_VOCABULARY}),
    "whole vocabulary, helper": Scenario(
        gpt2_model, GPT2LMHeadModel, _GPT2 | {"tpinfo": WHOLE_VOCABULARY, "logit_helper": tempered}, helper=tempered
    ),
    # Defect 4: a head of its own was replaced by the embedding.
    "own head": Scenario(lambda: llama_model(head=True), LlamaForCausalLM, _LLAMA, helper=None, tolerance=1e-6),
    "family's policy": Scenario(llama_model, LlamaForCausalLM, {"batch_fn": llama_batch}, tolerance=1e-6),
}
LAYOUTS = {"tp2pp2": (2, 1, 2), "tp2dp2": (2, 2, 1), "tp2": (2, 1, 1), "pp2": (1, 1, 2)}


def ds_config(clips: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": STEPS_OF_A_BATCH,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 2000},
    }
    if clips:
        params = {"total_num_steps": 4, "warmup_num_steps": 2, "warmup_min_lr": 0.1, "warmup_max_lr": LR}
        schedule = {"type": "WarmupDecayLR", "params": params | {"warmup_type": "linear"}}
        config |= {"gradient_clipping": CLIP, "scheduler": schedule}
    return config


_LRS = (0.1, 0.2, LR)  # of the schedule above: at 0 and 1 of 2 steps of warm-up, then at the first of 2 that decay

# ----- both ways of training it -----


def train_in_3d(name: str, layout: tuple[int, int, int], directory: str) -> list[float]:
    """Losses of the steps; the model is saved."""
    scenario = SCENARIOS[name]
    config = DeepSpeed3DParallelConfig(ds_config=ds_config(scenario.clips), **scenario.options)
    axes = list(zip(("tensor", "data", "pipeline"), layout, strict=True))
    plugin = HybridParallelPlugin.from_3d_config(config, (axes, None), **scenario.overrides)
    booster = Booster(plugin=plugin)
    loader = DataLoader(samples(), batch_size=BATCH // layout[1])
    model, loader = booster.boost(scenario.build(), loader)
    losses, batches = [], iter(loader)
    for _ in range(len(loader)):
        result = booster.execute_pipeline(batches, model, criterion=masked_loss, optimizer=plugin.optimizer)
        plugin.optimizer.step()
        plugin.optimizer.zero_grad()
        if plugin.lr_scheduler is not None:
            plugin.lr_scheduler.step()
        losses.append(result.loss.item())
    booster.save_model(model, directory)
    return losses


def train_reference(scenario: Scenario) -> tuple[list[float], nn.Module, nn.Module]:
    """Losses of the steps, the model before and after."""
    first, model = scenario.build(), scenario.build()
    for path, module in list(model.named_modules()):
        for name, patch in (scenario.options.get("custom_patcher") or {}).items():
            if path == name or path.endswith(f".{name}") or (name == "h.*" and path in LAYERS):
                module.forward = patch(module.forward, module)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=LR), []
    for step, batch in enumerate(DataLoader(samples(), batch_size=BATCH)):
        inputs, labels = scenario.options["batch_fn"](batch)
        output = model(*inputs)[0]
        loss = plain_loss(output if scenario.helper is None else scenario.helper(output, _embedding(model)), labels)
        loss.backward()
        if scenario.clips:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.param_groups[0]["lr"] = _LRS[step]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, first, model


def _embedding(model: nn.Module) -> nn.Module:
    return model.get_input_embeddings()


def _named(scenario: Scenario, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    prefix = "" if scenario.helper is None else f"{scenario.head.base_model_prefix}."
    return ((prefix + name, param.detach()) for name, param in model.named_parameters())


CASES = [
    ("llama", "tp2pp2"),
    ("whole vocabulary", "tp2"),
    ("family's policy", "tp2"),
]
SLOW = [
    ("llama", "tp2dp2"),
    ("gpt2", "tp2pp2"),
    ("gpt2", "tp2dp2"),
    ("patched", "tp2pp2"),
    ("patched, in halves", "pp2"),
    ("helper", "tp2pp2"),
    ("whole vocabulary, helper", "tp2"),
    ("own head", "tp2pp2"),
]


@pytest.mark.parametrize(
    ("name", "layout"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=lambda value: value,
)
def test_trains_like_plain_training(name: str, layout: str, tmp_path: Path) -> None:
    scenario, sizes = SCENARIOS[name], LAYOUTS[layout]
    found = run_on_ranks(sizes[0] * sizes[1] * sizes[2], train_in_3d, name, sizes, str(tmp_path))
    losses, first, plain = train_reference(scenario)
    assert all(each == found[0] for each in found)
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(losses), rtol=scenario.tolerance, atol=0)
    saved, report = scenario.head.from_pretrained(tmp_path, dtype=torch.float64, output_loading_info=True)
    assert not any(report.values()), report
    assert saved.config.tie_word_embeddings is (scenario.helper is not None)
    weights, before = dict(saved.named_parameters()), dict(_named(scenario, first))
    for key, expected in _named(scenario, plain):
        moved = (expected - before[key]).abs().max()
        difference = (weights[key] - expected).abs().max()
        assert difference <= scenario.tolerance * moved, f"{key} differs by {difference / moved:.1e} of its way"


@pytest.mark.parametrize("name", [*PATCHES, "tempered"])
def test_each_patch_changes_something(name: str) -> None:
    """Else the comparison above says nothing about it."""
    one = {"custom_patcher": {name: PATCHES[name]}} if name in PATCHES else {}
    changed = Scenario(gpt2_model, GPT2LMHeadModel, _GPT2 | one, vocab_parallel_logit_helper if one else tempered)
    losses, unchanged = train_reference(changed)[0], train_reference(SCENARIOS["gpt2"])[0]
    assert abs(losses[-1] - unchanged[-1]) > 1e-5 * unchanged[-1]
