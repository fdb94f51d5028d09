"""State spaces that `tp_size` divides, against the whole ones: logits, gradients, generated tokens."""

from __future__ import annotations

import copy
import sys
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from shardformer import ShardConfig, ShardFormer
from shardformer.policies.mixers import StateSpace
from zoo_tests.harness.ranks import distributed

_BASE = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 29, "pad_token_id": 0, "eos_token_id": 1}
_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 24, "head_dim": 8}
_HYBRID = {**_BASE, **_HEADS, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 3, "mamba_chunk_size": 4}
_FALCON = {**_HYBRID, "mamba_d_ssm": 32, "ssm_multipliers": [0.3, 0.7, 1.3, 0.9, 1.1]}
_MAMBA_2 = {**_BASE, "num_heads": 4, "head_dim": 8, "state_size": 3, "chunk_size": 4, "use_bias": True}
_MAMBA = {**_BASE, "state_size": 3, "time_step_rank": 5, "use_bias": True}
_JAMBA = {**_BASE, **_HEADS, "mamba_d_state": 3, "mamba_dt_rank": 5, "attn_layer_period": 2, "attn_layer_offset": 1}
_MODELS = {
    "a group of each rank": ("Mamba2", {**_MAMBA_2, "n_groups": 2}),
    "one group": ("Mamba2", {**_MAMBA_2, "n_groups": 1}),
    "groups of each rank, and factors of features": ("FalconH1", {**_FALCON, "mamba_n_groups": 2}),
    "one group, and factors of features": ("FalconH1", {**_FALCON, "mamba_n_groups": 1, "mamba_rms_norm": False}),
    "one group, and a gate behind its norm": (
        "FalconH1",
        {**_FALCON, "mamba_n_groups": 1, "mamba_rms_norm": True, "mamba_norm_before_gate": True},
    ),
    "channels": ("Mamba", _MAMBA),
    "channels, and norms of what they share": ("Jamba", {**_JAMBA, "num_experts": 2, "num_experts_per_tok": 1}),
}


def _model(name: str, config: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**config))
    for parameter in model.parameters():  # biases are 0, and norms 1
        nn.init.normal_(parameter, std=0.3)
    return model.train()


def _refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("a kernel for training reads the local output projection, and adds nothing up")


def _without_kernels(model: nn.Module) -> AbstractContextManager[Any]:
    """Let a mixer fail that calls what packages replace by a kernel of all its parts."""
    module = sys.modules[type(model).__module__]
    names = [name for name in ("mamba2_split_conv1d_scan_combined", "mamba_inner_fn") if hasattr(module, name)]
    return mock.patch.multiple(module, **dict.fromkeys(names, _refuse))


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", _MODELS)
@distributed(2)
def test_divided_state_spaces(kind: str) -> None:
    name, config = _MODELS[kind]
    native = _model(name, config)
    ids = torch.randint(2, 29, (3, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[0, 5:], mask[0, 5:] = 0, 0
    group = dist.group.WORLD
    sharded, _ = ShardFormer(ShardConfig(tensor_parallel_process_group=group)).optimize(copy.deepcopy(native))
    expected = native(input_ids=ids, attention_mask=mask, labels=ids)
    expected.loss.backward()
    with _without_kernels(native):
        loss = sharded(input_ids=ids, attention_mask=mask, labels=ids).loss
    loss.backward()

    torch.testing.assert_close(loss, expected.loss)
    whole = _gradients(native)
    for path, gradient in _gradients(sharded).items():
        spec = sharded.get_parameter(path).shard_spec
        torch.testing.assert_close(gradient, spec.shard(whole[path]), rtol=1e-4, atol=1e-6, msg=path)
    mixers = [module for module in native.modules() if StateSpace().parts(module)]
    cut = sum(parameter.shard_spec.dim is not None for parameter in sharded.parameters())
    assert mixers and cut > 6 * len(mixers)
    assert all(module.training for module in sharded.modules())
    prompt = ids[1:, :3]
    generated = sharded.eval().generate(prompt, max_new_tokens=4, do_sample=False)
    # Up to transformers 5.22 Falcon-H1 itself continues otherwise with a cache than without one.
    plain = native.eval().generate(prompt, max_new_tokens=4, do_sample=False, use_cache=False)
    assert torch.equal(generated, plain)


@pytest.mark.parametrize(("heads", "groups", "is_cut"), [(4, 1, True), (4, 4, True), (3, 1, False), (6, 3, False)])
@distributed(2)
def test_state_spaces_that_ranks_do_not_divide_stay_whole(heads: int, groups: int, is_cut: bool) -> None:
    sizes = {**_MAMBA_2, "hidden_size": 12, "num_heads": heads, "head_dim": 24 // heads, "n_groups": groups}
    with torch.device("meta"):
        mixer = transformers.Mamba2Model(transformers.Mamba2Config(**sizes)).layers[0].mixer
    assert StateSpace().parts(mixer)
    config = ShardConfig(tensor_parallel_process_group=dist.group.WORLD)
    assert (StateSpace().change(SimpleNamespace(shard_config=config), mixer, "in_proj") is not None) == is_cut
    assert bool(StateSpace().local_counts(mixer, config)) == is_cut


@distributed(2)
def test_a_projection_with_a_hook_of_the_user_stays_whole() -> None:
    native, seen = _model(*_MODELS["one group"]), []
    for layer in native.backbone.layers:
        layer.mixer.in_proj.register_forward_hook(lambda _, __, output: seen.append(output.shape[-1]))
    sharded, _ = ShardFormer(ShardConfig(tensor_parallel_process_group=dist.group.WORLD)).optimize(native)
    ids = torch.arange(2, 9)[None]
    loss = sharded(input_ids=ids, labels=ids).loss
    assert set(seen) == {2 * 32 + 2 * 3 + 4}
    torch.testing.assert_close(loss, _model(*_MODELS["one group"])(input_ids=ids, labels=ids).loss)
