"""Layers that a user has changed train as in plain torch on every layout, or are refused by name.

What breaks here first: a parallel layer that takes the place of a changed one. Look in
`shardformer/transforms/layout_checks.py` and
`shardformer/utils/derived_modules.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from transformers import LlamaForCausalLM

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from shardformer import record_module_init
from shardformer.shard_spec import ShardSpec, spec_of
from zoo_tests.harness.case import Recipe, share_of
from zoo_tests.harness.ranks import distributed, run_on_ranks
from zoo_tests.harness.reference import loss_of

_SHAPE = (("num_hidden_layers", 2), ("num_key_value_heads", 1), ("intermediate_size", 82))
_LLAMA = Recipe(family="llama", head="causal_lm", config=_SHAPE)
_TIED = Recipe(family="llama", head="causal_lm", config=(*_SHAPE, ("tie_word_embeddings", True)))
_GPT2 = Recipe(family="gpt2", head="lm_head", config=(("n_layer", 2),))


class Louder(nn.Linear):
    """A forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 1.3


class ScaledHead(nn.Linear):
    """A class of transformers, as Dory's head, whose forward is not that of a linear layer."""

    __module__ = "transformers.models.dory.modeling_dory"

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.logit_scale


class Adapted(nn.Module):
    """A wrapper as in tutorials on LoRA."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner, self.in_features, self.out_features = inner, inner.in_features, inner.out_features
        self.low = nn.Linear(inner.in_features, 2, bias=False, dtype=inner.weight.dtype)
        self.high = nn.Linear(2, inner.out_features, bias=False, dtype=inner.weight.dtype)
        for index, each in enumerate((self.low, self.high)):
            nn.init.constant_(each.weight, 0.03 * (index + 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.high(self.low(x).tanh())


def _other_class(module: nn.Linear) -> None:
    module.__class__ = Louder


def _patched(module: nn.Module) -> None:
    native = module.forward
    module.forward = MethodType(lambda self, x: native(x) + 0.1 * x.mean(-1, keepdim=True), module)


def _change_llama(model: nn.Module, seen: list[Tensor]) -> None:
    """Something on every kind of layer."""
    first, last = (layer for layer in model.model.layers)
    first.self_attn.q_proj.register_forward_hook(lambda _, __, output: output * 1.5 + output.mean(-1, keepdim=True))
    first.mlp.down_proj.register_forward_pre_hook(lambda _, args: (args[0] - args[0].mean(-1, keepdim=True),))
    first.self_attn.k_proj.register_full_backward_hook(lambda _, given, got: (given[0] * 2,))
    parametrizations.weight_norm(first.mlp.gate_proj)
    _patched(first.mlp.up_proj)
    _other_class(last.self_attn.v_proj)
    prune.random_unstructured(last.self_attn.o_proj, "weight", amount=0.4)
    last.self_attn.k_proj = Adapted(last.self_attn.k_proj)
    last.mlp.register_forward_hook(lambda _, __, output: output * 0.7)
    last.input_layernorm.register_forward_hook(lambda _, __, output: output + 0.2)
    model.lm_head.__class__ = ScaledHead
    model.lm_head.logit_scale = nn.Parameter(torch.linspace(0.5, 2, model.lm_head.out_features, dtype=torch.float64))
    last.register_full_backward_hook(lambda _, __, got: seen.append(got[0].norm().detach()))


def _parametrize(model: nn.Module, seen: list[Tensor]) -> None:
    """Weights that are computed from others; each read of a spectral norm changes the next."""
    first, last = (layer for layer in model.model.layers)
    for module in (model.model.embed_tokens, model.lm_head, first.mlp.gate_proj):
        parametrizations.spectral_norm(module)
    parametrizations.weight_norm(first.mlp.down_proj)
    parametrizations.orthogonal(first.self_attn.q_proj)
    weight_norm(last.mlp.gate_proj), spectral_norm(last.mlp.up_proj)  # the old ones, which are hooks


def _change_tied(model: nn.Module, seen: list[Tensor]) -> None:
    """The head has the weight of the changed embedding."""
    model.model.embed_tokens.register_forward_hook(lambda _, __, output: output * 2)
    model.model.embed_tokens.register_full_backward_hook(lambda _, __, got: seen.append(got[0].norm().detach()))


def _change_gpt2(model: nn.Module, seen: list[Tensor]) -> None:
    """Query, key and value in one layer, whose weight is transposed."""
    for block in model.transformer.h:
        block.attn.c_attn.register_forward_hook(lambda _, __, output: output * 1.1 + output.mean(-1, keepdim=True))
        _patched(block.mlp.c_proj) if block.mlp.c_proj.nx == block.mlp.c_proj.nf else None
        block.attn.c_proj.register_forward_pre_hook(lambda _, args: (args[0] * 0.8,))


def _share_by_hand(model: nn.Module, seen: list[Tensor]) -> None:
    """One object in two places: of several layers, a single projection, and a norm inside and behind the layers."""
    first, last = (layer for layer in model.model.layers)
    last.mlp, last.self_attn.q_proj, model.model.norm = first.mlp, first.self_attn.q_proj, first.input_layernorm


def _share_apart(model: nn.Module, seen: list[Tensor]) -> None:
    """One weight in layers that are cut along other dimensions, and two weights that are columns of one matrix."""
    first, last = (layer for layer in model.model.layers)
    first.self_attn.q_proj.weight = last.self_attn.o_proj.weight
    both = torch.cat((last.mlp.gate_proj.weight.data, last.mlp.up_proj.weight.data), dim=1)
    last.mlp.gate_proj.weight, last.mlp.up_proj.weight = map(nn.Parameter, both.chunk(2, dim=1))


def _repeat(model: nn.Module, seen: list[Tensor]) -> None:
    model.model.layers[1] = model.model.layers[0]
    model.config.use_cache = False  # a cache has one place for each layer object


_MODELS: dict[str, tuple[Recipe, Callable[[nn.Module, list[Tensor]], None]]] = {
    "llama": (_LLAMA, _change_llama),
    "parametrized": (_LLAMA, _parametrize),
    "tied": (_TIED, _change_tied),
    "gpt2": (_GPT2, _change_gpt2),
    "shared": (_LLAMA, _share_by_hand),
    "cut apart": (_LLAMA, _share_apart),
    "repeated": (_LLAMA, _repeat),
}


_SLOW = ("gpt2", "cut apart", "repeated")


def _changed(name: str) -> tuple[nn.Module, list[Tensor]]:
    recipe, change = _MODELS[name]
    model, seen = recipe.model(), []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        change(model, seen)
    return model, seen


def _train(name: str, options: dict[str, Any] | None, steps: int = 2) -> tuple[dict[str, tuple[Tensor, Any]], list]:
    """Values and specs of the parameters here, and what backward hooks saw."""
    model, seen = _changed(name)
    recipe = _MODELS[name][0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if options is None:
        for step in range(steps):
            loss_of(model, recipe.zoo_head, recipe.batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    else:
        booster = Booster(plugin=HybridParallelPlugin(**options))
        model, optimizer = booster.boost(model, optimizer)
        for step in range(steps):
            share = share_of(recipe.batch(step), booster.plugin.dp_rank, booster.plugin.dp_size)
            booster.execute_pipeline(iter([share]), model, optimizer=optimizer)
            optimizer.step()
            optimizer.zero_grad()
    with nullcontext() if options is None else model.summon_full_params():
        named = model.named_parameters(remove_duplicate=False)
        return {key: (value.detach().clone(), spec_of(value)) for key, value in named}, seen


def _check(name: str, world_size: int, **options: Any) -> list[dict[str, ShardSpec]]:
    expected, expected_seen = _train(name, None)
    specs = []
    for found, seen in run_on_ranks(world_size, _train, name, options):
        for key, (value, spec) in found.items():
            piece = spec.shard(expected[key][0])
            torch.testing.assert_close(value, piece, rtol=1e-9, atol=1e-11, msg=lambda m, n=key: f"{n}: {m}")
        if options.get("tp_size") == world_size:
            torch.testing.assert_close(seen, expected_seen, rtol=1e-9, atol=1e-12)
        specs.append({key: spec for key, (_, spec) in found.items()})
    return specs


@pytest.mark.parametrize("name", list(_MODELS))
def test_changed_layers_under_tensor_parallelism(name: str) -> None:
    specs = _check(name, 2, tp_size=2)[0]
    if name == "llama":
        assert specs["model.layers.0.self_attn.q_proj.weight"].dim is None
        assert specs["model.layers.1.self_attn.q_proj.weight"].dim == 0  # nobody has changed it
    if name == "tied":
        assert specs["model.embed_tokens.weight"].dim is None


@pytest.mark.parametrize("name", ["llama", "shared", *(pytest.param(each, marks=pytest.mark.slow) for each in _SLOW)])
@pytest.mark.parametrize(
    "options", [{"pp_size": 2, "num_microbatches": 2}, {"dp_size": 2}], ids=["pp2", "dp2"]
)  # fmt: skip
def test_changed_layers_under_pipelines_and_replicas(name: str, options: dict[str, int]) -> None:
    _check(name, 2, **options)


@pytest.mark.parametrize("name", ["parametrized", pytest.param("llama", marks=pytest.mark.slow)])
def test_changed_layers_of_which_ranks_keep_parts(name: str) -> None:
    _check(name, 2, dp_size=2, zero_stage=3)


def _refused(model: nn.Module, message: str, **options: Any) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Booster(plugin=HybridParallelPlugin(**options)).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))


@distributed(2)
def test_what_cannot_hold_is_refused_by_name() -> None:
    tp = {"tp_size": 2}
    model = _LLAMA.model()
    model.model.layers[1].mlp.act_fn.register_forward_hook(lambda *_: None)
    _refused(model, r"layers.1.mlp.act_fn has a forward hook, which would see a rank's share.*use tp_size=1", **tp)

    model = _LLAMA.model()
    wrapper = Adapted(model.model.layers[0].mlp.up_proj)
    del wrapper.out_features
    model.model.layers[0].mlp.up_proj = wrapper
    _refused(model, r"mlp.up_proj \(a Adapted\) has the forward of Adapted.*give it the attribute out_features", **tp)

    model = _LLAMA.model()
    model.model.layers[0].mlp.extra = nn.Linear(3, 3)
    _refused(model, r"says nothing about model.layers.0.mlp.extra \(a Linear\).*sharding_dim=-1.*TPInfo", **tp)

    for options in ({"cp_size": 2}, {"tp_size": 2, "enable_sequence_parallelism": True}):
        model = _LLAMA.model()
        model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
        _refused(model, r"layers.0.mlp has a forward hook, which would see a part of each sequence under", **options)

    for change, message in (
        (_repeat, r"layers\.0 and model\.layers\.1 are one object"),
        (
            _share_by_hand,
            r"layers\.0\.input_layernorm\.weight.* is also model\.norm\.weight, which sees whole sequences",
        ),
    ):
        model = _LLAMA.model()
        change(model, [])
        _refused(model, message, tp_size=2, enable_sequence_parallelism=True)

    for name, value, options in (("max_norm", 1.0, {"dp_size": 2}), ("sparse", True, tp)):
        model = _LLAMA.model()
        setattr(model.model.embed_tokens, name, value)
        _refused(model, rf"model.embed_tokens has {name}=.*, (which|whose).*; use", **options)


def _alias_the_embedding(model: nn.Module) -> None:
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.data)


def _transpose(model: nn.Module) -> None:
    model.model.layers[1].self_attn.o_proj.weight = nn.Parameter(model.model.layers[0].self_attn.q_proj.weight.data.t())


def _look_at_rows(model: nn.Module) -> None:
    model.register_buffer("rows", model.lm_head.weight.data[3:5])


def _remember(model: nn.Module) -> None:
    model.model.norm.remembered = model.model.norm.weight.detach()


_ONE_MEMORY = {
    _alias_the_embedding: r"embed_tokens\.weight and lm_head\.weight are two.*; assign one nn\.Parameter",
    _transpose: r"0\.self_attn\.q_proj\.weight and .*1\.self_attn\.o_proj\.weight are two.*; compute one",
    _look_at_rows: r"lm_head\.weight and rows are two tensors",
    _remember: r"norm\.weight and model\.norm\.remembered are two tensors",
}


@pytest.mark.parametrize("change", list(_ONE_MEMORY))
@pytest.mark.parametrize("options", [{}, {"tp_size": 2}, {"pp_size": 2}, {"zero_stage": 3}], ids=str)
@distributed(2)
def test_tensors_in_one_memory_are_refused(change: Callable[[nn.Module], None], options: dict[str, int]) -> None:
    model = _LLAMA.model()
    change(model)
    _refused(model, _ONE_MEMORY[change], **options)
    with record_module_init():
        model = LlamaForCausalLM(_LLAMA.model().config)
        change(model)
    _refused(model, _ONE_MEMORY[change], **options)
