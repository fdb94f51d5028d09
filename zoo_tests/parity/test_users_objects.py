"""What the library leaves as it was: the script's own objects, what transformers and torch keep, random numbers.

What breaks here first: a name that is set in a configuration of the script, from which the next model is built.
"""

from __future__ import annotations

import copy
import logging
import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import booster
from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.planner.device import preset
from plugins.hybrid_parallel.planner.plan import Job, plan_for
from plugins.hybrid_parallel.shard_report import shard_report
from shardformer import LazyInitContext, record_module_init
from shardformer.policies.plans.propose import propose_plan
from zoo_tests.harness.ranks import distributed

_TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
_CONFIGS = {
    "Llama": _TEXT,
    "Mixtral": _TEXT | {"num_local_experts": 4},
    "Gemma3": {
        "text_config": _TEXT | {"head_dim": 8},
        "vision_config": _VISION | {"image_size": 16, "patch_size": 8},
        "mm_tokens_per_image": 1,
        "image_token_index": 90,
    },
}
_CLASSES = {"Gemma3": "Gemma3ForConditionalGeneration"}
_IDS = torch.arange(64).view(4, 16)
_TWO = {"num_microbatches": 2, "pp_size": 2}
_HEADS = {"sequence_parallelism_mode": "all_to_all"}
_LAYOUTS = [
    ("Llama", {"cp_size": 2}),
    ("Llama", {"cp_size": 2, **_HEADS}),
    ("Llama", {"tp_size": 2, "enable_sequence_parallelism": True, **_HEADS}),
    ("Llama", {"gradient_checkpointing": "selective"}),
    ("Llama", {**_TWO, "pp_style": "interleaved", "precision": "bf16", "enable_flash_attention": True}),
    ("Llama", {"zero_stage": 3, "enable_all_optimization": True}),
    ("Mixtral", {"ep_size": 2}),
    ("Gemma3", {"tp_size": 2, "enable_flash_attention": True}),
]
_SLOW = [
    ("Llama", {"tp_size": 2, "enable_fused_normalization": True, "enable_jit_fused": True}),
    ("Llama", {"tp_size": 2, "precision": "fp8"}),
    ("Llama", {"tp_size": 2, "precision": "fp16", "gradient_checkpointing": "full"}),
    ("Llama", {**_TWO, "pp_style": "zbv", "num_microbatches": 4}),
    ("Llama", {"zero_stage": 3, "offload_parameters": "cpu", "offload_optimizer": "cpu"}),
    ("Llama", {"reproducible": True}),
    ("Llama", {"tp_size": 2, "debug": True, "make_vocab_size_divisible_by": 64}),
    ("Mixtral", {"tp_size": 2}),
    ("Gemma3", _TWO),
]


def _deep(value: Any) -> Any:
    """All that an object holds, private attributes too, in a form that can be compared."""
    if isinstance(value, transformers.PreTrainedConfig | transformers.GenerationConfig):
        return {name: _deep(each) for name, each in vars(value).items()}
    if isinstance(value, dict):
        return {name: _deep(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_deep(each) for each in value]
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    return (type(value), value) if isinstance(value, int | float | str | None) else id(value)


def _process() -> dict[str, Any]:
    """What a process has once: settings of torch, warnings, levels of logging, the kernels that transformers knows."""
    return {
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "level": (logging.root.level, transformers.logging.get_verbosity()),
        "handlers": list(logging.root.handlers),
        "warnings": list(warnings.filters),
        "kernels": {name: id(kernel) for name, kernel in _kernels().items() if not name.startswith(_OURS)},
        "random": _random_states(),
    }


_OURS = ("sharded_", "context_")


def _kernels() -> dict[str, Any]:
    return {name: ALL_ATTENTION_FUNCTIONS[name] for name in ALL_ATTENTION_FUNCTIONS}


def _random_states() -> list[Any]:
    kind, words, *rest = numpy.random.get_state()
    return [torch.get_rng_state().tolist(), random.getstate(), kind, words.tolist(), rest]


def _build(family: str, config: Any) -> nn.Module:
    return getattr(transformers, _CLASSES.get(family, f"{family}ForCausalLM"))(config)


@pytest.mark.parametrize(
    ("family", "options"), [*_LAYOUTS, *(pytest.param(*each, marks=pytest.mark.slow) for each in _SLOW)]
)
@distributed(2)
def test_boosting_and_training_leave_the_scripts_objects_alone(family: str, options: dict[str, Any]) -> None:
    config, given = getattr(transformers, f"{family}Config")(**_CONFIGS[family]), copy.deepcopy(options)
    model = _build(family, config)
    batch = {"input_ids": _IDS.clone(), "labels": _IDS.clone()}
    if family == "Gemma3":
        batch["token_type_ids"] = torch.zeros_like(_IDS)
    loader = DataLoader([{name: value[row] for name, value in batch.items()} for row in (0, 1, 2, 3) * 2], batch_size=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    owned = [config, model.generation_config, batch, options, vars(loader)]
    before, process = _deep(owned), _process()

    engine = Booster(plugin=HybridParallelPlugin(**options))
    boosted, optimizer, batches = engine.boost(model, optimizer, loader)
    assert _process() == process
    engine.execute_pipeline(iter([batch]), boosted, optimizer=optimizer)
    optimizer.step()
    assert _deep(owned) == before and options == given
    assert _process() == process
    next(iter(batches))
    drawn = _random_states()
    torch.set_rng_state(torch.tensor(process["random"][0], dtype=torch.uint8))
    next(iter(loader))
    assert _random_states() == drawn, "a look at the boosted loader draws what one at the script's own does"
    assert _deep(owned) == before

    _build(family, config)(**batch).loss.backward()  # another model of the same configuration, plain
    other = _build(family, config)
    other, optimizer = Booster(plugin=HybridParallelPlugin(tp_size=2)).boost(other, torch.optim.SGD(other.parameters()))
    engine.execute_pipeline(iter([batch]), other, optimizer=optimizer)


@pytest.mark.parametrize("options", [{"cp_size": 2}, pytest.param(_TWO, marks=pytest.mark.slow)])
@distributed(2)
def test_packed_rows_leave_the_scripts_configuration_alone(options: dict[str, Any]) -> None:
    config = transformers.LlamaConfig(**_TEXT)
    model, before = _build("Llama", config), _deep(config)
    documents = [{"input_ids": list(range(length))} for length in (5, 7, 9, 4, 6)]
    loader = booster.data.pack(documents, max_tokens=32, rows_per_step=1).loader()
    engine = Booster(plugin=HybridParallelPlugin(**options))
    boosted, optimizer, loader = engine.boost(model, torch.optim.SGD(model.parameters()), loader)
    for batch in loader:
        engine.execute_pipeline(iter([batch]), boosted, optimizer=optimizer)
        optimizer.step()
    assert _deep(config) == before
    _build("Llama", config)(input_ids=_IDS, labels=_IDS).loss.backward()


class _Drawn(nn.Module):
    """Weights come from the generators of torch, Python and numpy, and dropout is on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 64), nn.Linear(64, 1)
        self.dropout = nn.Dropout(0.1)
        self.offset = nn.Parameter(torch.tensor([random.random(), numpy.random.rand()]))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.outer(self.dropout(self.inner(x).relu()))[:, 0] + self.offset.sum()
        return transformers.modeling_outputs.SequenceClassifierOutput(loss=(outputs - labels).square().mean())


def _built_recorded(context: Callable[[], Any]) -> None:
    with context():
        nn.Linear(8, 64)


def _calls() -> dict[str, Callable[[], Any]]:
    batch = {"x": torch.arange(32.0).view(4, 8) / 32, "labels": torch.ones(4)}
    model = _Drawn()
    job = Job(world_size=2, global_batch=4, length=16, precision="bf16")
    llama = partial(transformers.LlamaForCausalLM, transformers.LlamaConfig(**_TEXT))
    layout = HybridParallelConfig.from_options(tp_size=2)
    return {
        "propose_plan": lambda: propose_plan(model, batch),
        "plan_for": lambda: plan_for(llama, job, preset("H100")),
        "shard_report": lambda: shard_report(lambda: (_Drawn(), llama())[1], layout, 2),
        "record_module_init": lambda: _built_recorded(record_module_init),
        "LazyInitContext": lambda: _built_recorded(LazyInitContext),
    }


@pytest.mark.parametrize("name", _calls())
def test_what_looks_at_a_model_draws_nothing_from_the_scripts_random_numbers(name: str) -> None:
    call, states = _calls()[name], _random_states()
    call()
    assert _random_states() == states


@distributed(2)
def test_verify_draws_nothing_from_the_scripts_random_numbers() -> None:
    """Both trainings start from the same weights, whichever generator they come from."""
    states = _random_states()
    batch = {"x": torch.arange(32.0).view(4, 8) / 32, "labels": torch.ones(4)}
    booster.verify(_Drawn, batch, HybridParallelPlugin(zero_stage=3))
    assert _random_states() == states
