"""Biases of routers follow the load of the experts over all ranks, by the rule of one process in plain torch.

What breaks here first: tokens that are counted twice (recomputation, placeholders of empty shares) or not at all (parts
of sequences). Look in `shardformer/layers/experts.py` and
`plugins/hybrid_parallel/features/expert_load.py`.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.case import share_of
from zoo_tests.harness.ranks import distributed, run_on_ranks

_RATE, _STEPS, _EXPERTS = 0.05, 3, 4
_SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_hidden_layers": 4, "vocab_size": 67}
_GLM = {"n_routed_experts": _EXPERTS, "first_k_dense_replace": 1}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_FAMILIES: dict[str, dict[str, Any]] = {
    "Glm4Moe": _GLM,
    "DeepseekV3": {**_GLM, **_LATENT, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4},
    "MiniMaxM2": {"num_local_experts": _EXPERTS},
    # A parameter, which is frozen, [1, experts].
    "Ernie4_5_Moe": {"moe_num_experts": _EXPERTS, "moe_k": 2, "moe_layer_start_index": 1, "moe_num_shared_experts": 1},
}
_NAMES = ("e_score_correction_bias",)

Report = dict[str, Any]


def _model(family: str) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**_SIZES, **_MOE, **_FAMILIES[family]})
    model = getattr(transformers, f"{family}ForCausalLM")(config).train()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "norm" not in name and "inv_freq" not in name:
            tensor.data.normal_(0.0, 0.1 if tensor.dim() > 1 else 0.01)
    return model


def _batch(step: int, last_rows: int = 5) -> dict[str, Tensor]:
    rows = last_rows if step == _STEPS - 1 else 5
    ids = torch.randint(1, 67, (rows, 13), generator=torch.Generator().manual_seed(step))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    mask[0, 5 + step :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _plain(family: str, last_rows: int) -> Report:
    model = _model(family)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    counts, mask, report = {}, torch.empty(0), {"losses": [], "loads": []}

    def count(module: nn.Module, args: tuple) -> None:
        for token, choices in enumerate(args[1].tolist()):
            for expert in choices if mask.flatten()[token] else ():
                counts[module][expert] += 1

    blocks = {name.removesuffix(".experts"): each for name, each in model.named_modules() if name.endswith(".experts")}
    for experts in blocks.values():
        experts.register_forward_pre_hook(count)
    for step in range(_STEPS):
        counts = {experts: [0] * _EXPERTS for experts in blocks.values()}
        batch = _batch(step, last_rows)
        mask = batch["attention_mask"]
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for path, experts in blocks.items():
            load = torch.tensor(counts[experts]).float()
            for name, bias in [*model.named_parameters(), *model.named_buffers()]:
                if name.startswith(f"{path}.") and name.endswith(_NAMES):
                    bias.data += _RATE * torch.sign(load.mean() - load).view_as(bias)
        report["losses"].append(loss.item())
        report["loads"].append({f"{path}.experts": counts[each] for path, each in blocks.items()})
    report["biases"] = {name: value.clone() for name, value in model.state_dict().items() if name.endswith(_NAMES)}
    return report


def _train(family: str, options: dict[str, Any], loop: str, last_rows: int) -> Report:
    """Train by `execute_pipeline`, or by the ordinary loop of which each step accumulates two passes."""
    booster = Booster(plugin=HybridParallelPlugin(moe_router_bias_update_rate=_RATE, **options))
    model = _model(family)
    trained = [each for each in model.parameters() if family.startswith("Ernie") or each.requires_grad]
    model, optimizer = booster.boost(model, torch.optim.SGD(trained, lr=0.1, weight_decay=0.0))
    report: Report = {"losses": [], "loads": []}
    for step in range(_STEPS):
        batch = _batch(step, last_rows)
        with torch.no_grad():
            model(**share_of(batch, booster.plugin.dp_rank, booster.plugin.dp_size))  # no step counts it
        if loop == "pipeline":
            share = share_of(batch, booster.plugin.dp_rank, booster.plugin.dp_size)
            loss = booster.execute_pipeline(iter([share]), model, optimizer=optimizer).loss
        else:
            count, loss = (batch["labels"][:, 1:] != -100).sum(), 0.0
            for index, part in enumerate(({n: v[:2] for n, v in batch.items()}, {n: v[2:] for n, v in batch.items()})):
                share = share_of(part, booster.plugin.dp_rank, booster.plugin.dp_size)
                with booster.no_sync(model, optimizer) if index == 0 else nullcontext():
                    value = model(**share).loss * ((part["labels"][:, 1:] != -100).sum() / count)
                    booster.backward(value, optimizer)
                    loss = loss + value.detach()
        optimizer.step()
        optimizer.zero_grad()
        report["losses"].append(float(loss))
        report["loads"].append({path: counts.tolist() for path, counts in model.expert_load().items()})
    state = {name: value for name, value in model.unwrap().named_buffers() if name.endswith(_NAMES)}
    return {**report, "biases": {name: value.clone() for name, value in state.items()}}


_EXCHANGED = {"tp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all"}
_FULL = {"gradient_checkpointing": "full"}
_FAST = [
    (2, "Glm4Moe", {"ep_size": 2}, "pipeline", 5),
    (2, "Ernie4_5_Moe", {"pp_size": 2, "num_microbatches": 3}, "pipeline", 5),
]
_SLOW = [
    (1, "MiniMaxM2", {}, "pipeline", 5),
    (4, "Glm4Moe", {"tp_size": 2, "ep_size": 2, **_FULL}, "pipeline", 5),
    (2, "Glm4Moe", {"ep_size": 2, "expert_capacity_factor": 100.0}, "ordinary", 5),
    (2, "Glm4Moe", {"pp_size": 2, "pp_style": "zbv", "num_microbatches": 3, **_FULL}, "pipeline", 5),
    (2, "Glm4Moe", {"cp_size": 2, "num_microbatches": 2}, "pipeline", 5),
    (4, "Glm4Moe", {"cp_size": 2, "pp_size": 2}, "ordinary", 5),
    (2, "Glm4Moe", _EXCHANGED, "pipeline", 5),
    (2, "DeepseekV3", {"tp_size": 2, "enable_sequence_parallelism": True}, "ordinary", 5),
    (4, "Glm4Moe", {"ep_size": 4, **_FULL}, "pipeline", 3),  # a replica has no sample in the last step
    (2, "Ernie4_5_Moe", {"zero_stage": 3}, "pipeline", 5),
    (2, "DeepseekV3", {"ep_size": 2, "zero_stage": 2}, "pipeline", 5),
]


@pytest.mark.parametrize(
    ("ranks", "family", "options", "loop", "last_rows"),
    [*_FAST, *(pytest.param(*each, marks=pytest.mark.slow) for each in _SLOW)],
)
def test_biases_are_those_of_plain_training(
    ranks: int, family: str, options: dict[str, Any], loop: str, last_rows: int
) -> None:
    plain = _plain(family, last_rows)
    reports = run_on_ranks(ranks, _train, family, options, loop, last_rows)
    biases = {name: bias for report in reports for name, bias in report["biases"].items()}
    assert biases.keys() == plain["biases"].keys()
    for report in reports:
        assert report["losses"] == pytest.approx(plain["losses"], rel=1e-5)
        assert report["loads"] == plain["loads"]
        assert all(torch.equal(biases[name], bias) for name, bias in report["biases"].items())
    assert all(torch.allclose(bias, plain["biases"][name], atol=1e-7) for name, bias in biases.items())
    assert all(len(set(load)) > 1 for loads in plain["loads"] for load in loads.values())


def _boosted(**options: Any) -> tuple[Booster, Any, Any]:
    booster = Booster(plugin=HybridParallelPlugin(moe_router_bias_update_rate=_RATE, **options))
    model = _model("Glm4Moe")
    return booster, *booster.boost(model, torch.optim.AdamW(model.parameters(), weight_decay=0.5))


def _step(booster: Booster, model: Any, optimizer: Any, step: int) -> dict[str, list[int]]:
    share = share_of(_batch(step), booster.plugin.dp_rank, booster.plugin.dp_size)
    booster.execute_pipeline(iter([share]), model, optimizer=optimizer)
    optimizer.step()
    optimizer.zero_grad()
    return {path: counts.tolist() for path, counts in model.expert_load().items()}


def _biases(model: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.unwrap().named_buffers() if name.endswith(_NAMES)}


def _save(folder: Path) -> list[dict[str, Tensor]]:
    booster, model, optimizer = _boosted(ep_size=2)
    found = []
    for step in range(2):
        _step(booster, model, optimizer, step)
        found.append(_biases(model))
        if step == 0:
            booster.save_checkpoint(folder, model=model, optimizer=optimizer)
    booster.save_model(model, folder / "files")
    load = model.expert_load()
    fullest = max(float(each.max() / each.double().mean()) for each in load.values())
    assert booster.meter(model, bar=False).measure()["max_vio"] == pytest.approx(fullest - 1.0)
    return found


def _resume(folder: Path) -> list[dict[str, Tensor]]:
    booster, model, optimizer = _boosted(tp_size=2)
    _step(booster, model, optimizer, 2)
    booster.load_checkpoint(folder, model=model, optimizer=optimizer)
    found = [_biases(model)]
    _step(booster, model, optimizer, 1)
    return [*found, _biases(model)]


@pytest.mark.slow
def test_biases_are_saved_and_resumed(tmp_path: Path) -> None:
    saved, resumed = run_on_ranks(2, _save, tmp_path)[0], run_on_ranks(2, _resume, tmp_path)[0]
    for before, after in zip(saved, resumed, strict=True):
        assert all(torch.equal(value, after[name]) for name, value in before.items())
    files = transformers.Glm4MoeForCausalLM.from_pretrained(tmp_path / "files").state_dict()
    assert all(torch.equal(value, files[name]) for name, value in saved[-1].items())


def _overflow() -> list[Any]:
    booster, model, optimizer = _boosted(precision="fp16", initial_scale=2.0**40, ep_size=2)
    before = _biases(model)
    loads = _step(booster, model, optimizer, 0)
    assert optimizer.step_was_skipped
    return [before, _biases(model), loads]


@pytest.mark.slow
def test_a_skipped_step_moves_no_bias() -> None:
    for before, after, loads in run_on_ranks(2, _overflow):
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        assert all(sum(load) == 2 * int(_batch(0)["attention_mask"].sum()) for load in loads.values())


@distributed(1)
def test_models_without_what_is_counted_are_refused() -> None:
    for name, what in (("moe_router_bias_update_rate", "no router in Llama"), ("count_expert_load", "no experts in")):
        with pytest.raises(ConfigurationError, match=f"{name}=.* finds {what}.*; use {name}="):
            Booster(plugin=HybridParallelPlugin(**{name: True if "load" in name else 0.1})).boost(_llama())
    with pytest.raises(ConfigurationError, match="use .*count_expert_load=True"):
        Booster(plugin=HybridParallelPlugin()).boost(_llama()).expert_load()


def _llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES, num_hidden_layers=1, vocab_size=67))
