"""What a script does with the adapters of peft beside training one: switch, switch off, merge, prompt.

The plain model takes the same steps, in the same process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.adapters import load_adapters, with_adapters
from zoo_tests.harness.case import share_of
from zoo_tests.harness.compare import check_losses
from zoo_tests.harness.ranks import distributed
from zoo_tests.harness.reference import loss_of
from zoo_tests.zoo import FAMILIES

_LLAMA = FAMILIES["llama"]


def _model(kind: str = "LORA", targets: tuple[str, ...] = ("q_proj", "o_proj", "up_proj"), **options: Any) -> nn.Module:
    return with_adapters(_LLAMA.build("causal_lm", torch.float64), targets, (("kind", kind), *options.items()))


def _two_adapters() -> nn.Module:
    from peft import LoraConfig

    model = _model(modules_to_save=("norm",), use_dora=True)
    torch.manual_seed(5)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["k_proj", "o_proj"], init_lora_weights=False))
    return model


def _logits(model: nn.Module) -> Tensor:
    batch = {key: value for key, value in _LLAMA.batch("causal_lm", 1, 4).items() if key != "labels"}
    with torch.no_grad():
        return model.eval()(**batch).logits


def _check(found: nn.Module, expected: nn.Module) -> Tensor:
    logits = _logits(expected)
    torch.testing.assert_close(_logits(found), logits, rtol=1e-9, atol=1e-9)
    return logits


@pytest.mark.slow
@distributed(2)
def test_switching_and_merging(tmp_path: Path) -> None:
    plain, sharded = _two_adapters(), _two_adapters()
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.3)
    booster = Booster(plugin=HybridParallelPlugin(tp_size=2, pp_size=1))
    model, optimizer = booster.boost(sharded, optimizer)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.3)
    seen = []
    for step, adapter in enumerate(("default", "other", "default")):
        plain.set_adapter(adapter)
        model.set_adapter(adapter)
        batch = _LLAMA.batch("causal_lm", step, 4)
        loss = loss_of(plain.train(), _LLAMA.heads["causal_lm"], batch)  # transformers' own is fp32
        loss.backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        result = booster.execute_pipeline(iter([batch]), model.train(), optimizer=optimizer)
        optimizer.step()
        optimizer.zero_grad()
        check_losses([result.loss.item()], [loss.item()], 1e-9)
        seen.append(_check(model, plain))
    with plain.disable_adapter(), model.disable_adapter():
        seen.append(_check(model, plain))
    booster.save_model(model, tmp_path)
    base = load_adapters(_LLAMA.build("causal_lm", torch.float64), tmp_path)
    base.load_adapter(tmp_path / "other", "other")
    for adapter in ("other", "default"):
        base.set_adapter(adapter)
        model.set_adapter(adapter)
        _check(model, base)
    for change in ("merge_adapter", "unmerge_adapter"):
        getattr(plain, change)()
        getattr(model, change)()
        _check(model, plain)
    _check(model.merge_and_unload(), plain.merge_and_unload())
    assert all(not torch.allclose(a, b) for a, b in zip(seen, seen[1:], strict=False))


@distributed(2)
def test_a_cut_embedding_is_not_merged() -> None:
    model = Booster(plugin=HybridParallelPlugin(tp_size=2)).boost(_model(targets=("embed_tokens", "q_proj")))
    with pytest.raises(ValueError, match=r"lora.Embedding cannot be merged into an embedding whose vocabulary tp_size"):
        model.merge_adapter()


_REPLICAS = {"dp_size": 2}
_SEQUENCE = {"tp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "split_gather"}
_HEADS = _SEQUENCE | {"sequence_parallelism_mode": "all_to_all"}
_REPLICAS, _HEADS, _STAGES = {"dp_size": 2}, {"tp_size": 2}, {"pp_size": 2}
_SEQUENCE = {"tp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "split_gather"}
_EXCHANGE = _SEQUENCE | {"sequence_parallelism_mode": "all_to_all"}
_QUICK = (("P_TUNING", _HEADS), ("PREFIX_TUNING", _STAGES))
_KINDS = ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING")
_FURTHER = [
    *((kind, layout) for kind in _KINDS for layout in (_REPLICAS, _HEADS, _STAGES, _SEQUENCE)),
    ("PROMPT_TUNING", _EXCHANGE),
    ("P_TUNING", _EXCHANGE),
]


@pytest.mark.slow
@distributed(2)
def test_prompts(tmp_path: Path) -> None:
    """What the table of docs/adapters.md says of them."""
    for kind, layout in _QUICK:
        _train_prompts(kind, layout, tmp_path / kind)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(_FURTHER)))
@distributed(2)
def test_prompts_on_each_layout(number: int, tmp_path: Path) -> None:
    _train_prompts(*_FURTHER[number], tmp_path)


# BERT's embedding is inside of a module that later stages do not have; ELECTRA's is narrower than its layers. Phi-3 and
# OLMo 2 gather all heads on each rank; CPMAnt slices embeddings, which later stages lack, where there is a prefix.
_PROMPT = {"kind": "PROMPT_TUNING", "task_type": "SEQ_CLS"}
_PREFIX = {"kind": "PREFIX_TUNING", "task_type": "CAUSAL_LM"}
_FAMILIES = [
    ("bert", "sequence", _PROMPT, _STAGES),
    ("electra", "sequence", _PROMPT | {"token_dim": 30}, _STAGES),
    ("phi3", "causal_lm", _PREFIX, _HEADS),
    ("olmo2", "causal_lm", _PREFIX, _HEADS),
    ("cpmant", "causal_lm", _PREFIX, _STAGES),
]


@pytest.mark.slow
@distributed(2)
def test_prompts_of_families_that_differ_from_llama() -> None:
    for name, head, options, layout in _FAMILIES:
        family = FAMILIES[name]
        given = {"num_virtual_tokens": 3, **options}
        plain, sharded = (with_adapters(family.build(head, torch.float64), (), tuple(given.items())) for _ in range(2))
        booster = Booster(plugin=HybridParallelPlugin(**layout, num_microbatches=2))
        params = [param for param in sharded.parameters() if param.requires_grad]
        model, optimizer = booster.boost(sharded, torch.optim.SGD(params, lr=0.3))
        batch = family.batch(head, 0, 4)
        loss, expected = model(**batch).loss, plain(**batch).loss
        booster.backward(loss, optimizer)
        expected.backward()
        check_losses([loss.item()], [expected.item()], 1e-6)
        found = optimizer.full_gradients()
        assert any("prompt_encoder" in each for each in found)
        for each, gradient in found.items():
            torch.testing.assert_close(gradient, plain.get_parameter(each).grad, rtol=1e-5, atol=1e-7)  # fp32 masks


@pytest.mark.slow
@distributed(4)
def test_prompts_on_four_ranks(tmp_path: Path) -> None:
    for kind in _KINDS:
        _train_prompts(kind, _HEADS | _STAGES, tmp_path / kind)


def _train_prompts(kind: str, layout: dict[str, Any], place: Path) -> None:
    """Labels of rows differ in number, so that a mean of means would not do."""
    given = {"kind": kind, "targets": (), "num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}
    plain, sharded = _model(**given), _model(**given)
    plugin = HybridParallelPlugin(**layout, num_microbatches=2)
    booster = Booster(plugin=plugin)
    model, optimizer = booster.boost(sharded, torch.optim.SGD(sharded.parameters(), lr=0.3))
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.3)
    for step in range(2):
        batch = _LLAMA.batch("causal_lm", step, 5)
        loss = plain(**batch).loss
        loss.backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        share = share_of(batch, plugin.dp_rank, plugin.dp_size)
        result = booster.execute_pipeline(iter([share]), model, optimizer=optimizer)
        optimizer.step()
        optimizer.zero_grad()
        check_losses([result.loss.item()], [loss.item()], 1e-6)  # peft's masks are fp32
    booster.save_model(model, place)
    _check_close(load_adapters(_LLAMA.build("causal_lm", torch.float64), place), plain)
    if layout != _EXCHANGE:  # which leaves no cache to generate with
        _generate_with_prompts(kind, model, plain, plugin.pp_size)
    booster.load_model(model, place)


def _generate_with_prompts(kind: str, model: nn.Module, plain: nn.Module, pp_size: int) -> None:
    prompt = {key: value for key, value in _LLAMA.batch("causal_lm", 0, 3).items() if key != "labels"}
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    if pp_size > 1:
        with pytest.raises(ConfigurationError, match=f"cannot put the virtual tokens of peft's {kind} in front"):
            model.generate(**prompt, **options)
        return
    assert torch.equal(model.eval().generate(**prompt, **options), plain.eval().generate(**prompt, **options))


def _check_close(found: nn.Module, expected: nn.Module) -> None:
    torch.testing.assert_close(_logits(found), _logits(expected), rtol=1e-5, atol=1e-5)


@distributed(2)
def test_adapters_that_are_not_in_a_model_of_peft_are_not_saved(tmp_path: Path) -> None:
    from peft import LoraConfig

    native = _LLAMA.build("causal_lm", torch.float64)
    with patch("transformers.integrations.peft.MIN_PEFT_VERSION", "0"):  # 5.24 asks for a peft to come
        native.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))
    booster = Booster(plugin=HybridParallelPlugin(tp_size=2))
    model = booster.boost(native)
    with pytest.raises(ConfigurationError, match=r"made by model.add_adapter, which save_model and load_model do not"):
        booster.save_model(model, tmp_path)
