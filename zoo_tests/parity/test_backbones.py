"""Modules of the user's around models of transformers train to the numbers of plain training, under every layout.

What breaks here first: a module that is taken for one behind the backbone, and a part of a backbone that the module's
forward reads by itself. Look in `shardformer/policies/backbone.py`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    CLIPConfig,
    CLIPModel,
)

from booster import Booster, verify
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.boosted.forward_options import unread_by
from shardformer import PipelineStageManager, ShardConfig, ShardFormer, TPInfo
from shardformer.policies.plans.propose import propose_plan
from shardformer.policies.plans.stages import is_below
from shardformer.policies.registry import policy_for
from shardformer.stages.stage import run_stage
from zoo_tests.harness.own_modules import (
    HIDDEN,
    MODULES,
    ROWS,
    SIZES,
    VOCABULARY,
    Adapters,
    FrontAndBehind,
    FrozenTower,
    Pairs,
    PairsOneByOne,
    ReadsWeights,
    Tagger,
    TiedHead,
    Translator,
    TwoBackbones,
    TwoHeads,
    TwoLevels,
    ValueHead,
    batch_of,
    bert,
    built,
    of_kinds,
    of_pairs,
)
from zoo_tests.harness.ranks import distributed, run_on_ranks

LAYOUTS = {
    "tp2": {"tp_size": 2},
    "pp2": {"pp_size": 2, "num_microbatches": 3},
    "tp2pp2": {"tp_size": 2, "pp_size": 2, "num_microbatches": 2},
    "dp2": {"dp_size": 2},
    "sp2": {"tp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "split_gather"},
}


class Build:
    """Builds a module; it can be sent to ranks."""

    def __init__(self, kind: type[nn.Module]) -> None:
        self.kind, self.__qualname__ = kind, kind.__name__

    def __call__(self) -> nn.Module:
        return built(self.kind)


def verify_on_ranks(kind: type[nn.Module], layout: dict[str, Any]) -> None:
    names, criterion = MODULES[kind]
    assert verify(Build(kind), batch_of(names), HybridParallelPlugin(**layout), criterion=criterion).equal


FAST = {(TwoBackbones, "tp2"), (FrozenTower, "pp2")}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(
            kind, layout, id=f"{kind.__name__}-{layout}", marks=() if (kind, layout) in FAST else pytest.mark.slow
        )
        for kind in MODULES
        for layout in LAYOUTS
    ],
)
def test_trains_like_plain_training(kind: type[nn.Module], layout: str) -> None:
    run_on_ranks(4 if layout == "tp2pp2" else 2, verify_on_ranks, kind, LAYOUTS[layout])


HEAD = TPInfo().shard_col({"words": {"gather_output": True}})
WITH_OPTIONS: list[tuple[type[nn.Module], dict[str, Any]]] = [
    (TwoHeads, {"sharding_dim": -1, "pp_size": 2, "num_microbatches": 2}),
    (Translator, {"tp_info": HEAD, "tp_size": 2}),
    (Translator, {"tp_info": HEAD, "pp_size": 2, "num_microbatches": 2}),
    (TwoBackbones, {"tp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all"}),
    (ValueHead, {"cp_size": 2, "sequence_parallelism_mode": "all_to_all"}),
    (TiedHead, {"pp_size": 2, "num_microbatches": 3, "gradient_checkpointing": "full", "zero_stage": 0}),
    (FrontAndBehind, {"pp_size": 2, "num_microbatches": 2, "zero_stage": 3}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), WITH_OPTIONS)
def test_options_of_the_plugin(kind: type[nn.Module], options: dict[str, Any]) -> None:
    run_on_ranks(2, verify_on_ranks, kind, options)


@pytest.mark.slow
@distributed(2)
def test_a_derived_plan_is_cut_into_the_stages_of_the_backbone() -> None:
    names, _ = MODULES[FrontAndBehind]
    plan = propose_plan(built(FrontAndBehind).eval(), batch_of(names[:-1]))
    assert any(path.startswith("text.encoder.layer.*") for path in plan.styles)
    for sizes in ({"tp_size": 2}, {"pp_size": 2, "num_microbatches": 2}):
        verify_on_ranks(FrontAndBehind, {**sizes, "custom_policy": plan.policy()})


@pytest.mark.parametrize(
    ("kind", "last", "every"),
    [
        (TwoHeads, {"kind", "place"}, set()),
        (TwoBackbones, {"head", "image"}, set()),  # the image is read behind the text
        (FrozenTower, {"head"}, {"tower", "bridge", "text.embeddings"}),
        (FrontAndBehind, {"leave"}, {"enter", "norm", "scale"}),  # the norm is used in front and behind
        (Tagger, {"emit"}, {"transitions"}),
        (Adapters, {"adapters.0", "adapters.1", "adapters.2", "parts.head"}, set()),
        (TwoLevels, {"head", "encoder.behind"}, {"encoder.front"}),
        (ReadsWeights, set(), {"decoder.embed_tokens"}),
    ],
)
def test_modules_behind_the_backbone_are_on_the_last_stage_alone(
    kind: type[nn.Module], last: set[str], every: set[str]
) -> None:
    policy = policy_for(model := built(kind))
    policy.set_model(model)
    *_, end = policy.stages.chain
    own = [path for path in end.last if not path.startswith(f"{policy.path}.")]
    assert set(own) == last
    shared = {name for name, _ in model.named_parameters() if is_below(name, policy.stages.every)}
    assert shared == {name for name, _ in model.named_parameters() if is_below(name, every)}


# ----- what stages cannot do -----


class OneText(nn.Module):
    """A text backbone and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.head = bert(), nn.Linear(HIDDEN, 3)


class ReadsLayers(OneText):
    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.text(input_ids, output_hidden_states=True).hidden_states[-2])


class OtherName(OneText):
    def forward(self, input_ids: Tensor) -> Tensor:
        text = self.text
        return self.head(text(input_ids)[0])


class ByLayer(OneText):
    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.text.embeddings(input_ids)
        for layer in self.text.encoder.layer:
            hidden = layer(hidden)
        return self.head(hidden)


class Features(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = {**SIZES, "num_hidden_layers": 1}
        text, image = {**sizes, "vocab_size": VOCABULARY}, {**sizes, "image_size": 12, "patch_size": 6}
        self.clip = CLIPModel(CLIPConfig(text_config=text, vision_config=image, projection_dim=8))

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.clip.get_image_features(pixel_values)


class Replaced(OneText):
    def __init__(self) -> None:
        super().__init__()
        self.forward = partial(OtherName.forward, self)


class InACondition(OneText):
    def forward(self, input_ids: Tensor) -> Tensor:
        if input_ids.shape[1] > 5:
            return self.head(self.text(input_ids)[0])
        if input_ids.shape[1] > 4:
            return self.head(self.text(input_ids, torch.ones_like(input_ids))[0])
        return torch.zeros(1)


class Twice(OneText):
    def forward(self, input_ids: Tensor) -> Tensor:
        def run(ids: Tensor) -> Tensor:
            return self.text(ids, output_attentions=len(input_ids) == 3)[0]

        return self.head(run(input_ids) + run(input_ids))


def problems_of(kind: type[nn.Module], num_stages: int = 2) -> str:
    policy = policy_for(model := kind())
    policy.set_model(model)
    policy.set_shard_config(ShardConfig(pipeline_stage_manager=PipelineStageManager(0, num_stages)))
    return "; ".join(policy.check())


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (PairsOneByOne, "of PairsOneByOne calls self.text(...) several times in a pass; give it all inputs in one bat"),
        (ReadsLayers, "self.text is asked for output_hidden_states, of which each rank has a part in this layout"),
        (OtherName, "the forward of OtherName does not show one call of self.text(...); call it by this name, or use"),
        (ByLayer, "the forward of ByLayer reads self.text.encoder.layer of its layers; call self.text(...) alone"),
        (Features, "the forward of Features calls self.clip.get_image_features(), not self.clip(...)"),
        (Replaced, "the forward of Replaced has no source that can be read; define the module in a file, or use pp_s"),
        (InACondition, ""),
        (Adapters, ""),
    ],
)
def test_a_pipeline_is_refused_before_anything_is_changed(kind: type[nn.Module], reason: str) -> None:
    assert reason in problems_of(kind) if reason else problems_of(kind) == ""
    assert problems_of(kind, num_stages=1) == ""


def test_what_the_source_does_not_show_is_refused_in_the_pass() -> None:
    ids = torch.ones(2, 6, dtype=torch.long)

    def run(kind: type[nn.Module], stage: int, input_ids: Tensor) -> Any:
        model = kind()
        ShardFormer(ShardConfig(pipeline_stage_manager=PipelineStageManager(stage, 2))).optimize(model)
        message = None if stage == 0 else (torch.randn(*input_ids.shape, HIDDEN),)
        return run_stage(model, message, {"input_ids": input_ids})

    with pytest.raises(ValueError, match=r"self.text is called several times in a pass, and pipeline stages run it on"):
        run(Twice, 1, ids)
    with pytest.raises(ValueError, match=r"self.text is asked for output_attentions, of which each rank has a part"):
        run(Twice, 0, torch.ones(3, 6, dtype=torch.long))
    with pytest.raises(ValueError, match=r"the forward of InACondition returned without running the layers that the"):
        run(InACondition, 0, ids[:, :4])
    assert run(InACondition, 1, ids).shape == (2, 6, 3)


# ----- the ordinary loop, and what is saved -----


def of_tuple(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return of_pairs(model(batch["one"], batch["other"]), batch)  # positional arguments


def of_dictionary(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    outputs = model(**batch)
    return outputs["loss"] + outputs["place"].square().mean()


def of_tensor(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return of_kinds(model(batch["input_ids"], batch["attention_mask"], pixel_values=batch["pixel_values"]), batch)


LOOPS = {Pairs: of_tuple, TwoHeads: of_dictionary, TwoBackbones: of_tensor}


@pytest.mark.parametrize(
    "kind", [TwoBackbones, *(pytest.param(each, marks=pytest.mark.slow) for each in (Pairs, TwoHeads))]
)
@distributed(2)
def test_the_ordinary_loop_under_a_pipeline(kind: type[nn.Module]) -> None:
    batch = {name: value.double() if value.is_floating_point() else value for name, value in _batch(kind).items()}
    plain = built(kind).double().eval()
    expected = LOOPS[kind](plain, batch)
    expected.backward()
    booster = Booster(plugin=HybridParallelPlugin(pp_size=2, num_microbatches=3))
    model = built(kind).double()
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = LOOPS[kind](model.eval(), batch)
    booster.backward(loss, optimizer)
    torch.testing.assert_close(loss.detach(), expected.detach())
    grads = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, grad in optimizer.full_gradients().items():
        torch.testing.assert_close(grad, torch.zeros_like(grad) if grads[name] is None else grads[name])


def _batch(kind: type[nn.Module]) -> dict[str, Tensor]:
    return batch_of(MODULES[kind][0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [FrozenTower, TiedHead, Translator])
def test_weights_and_checkpoints_open_under_other_layouts(kind: type[nn.Module], tmp_path: Path) -> None:
    run_on_ranks(2, _train_on, kind, {"tp_size": 2}, tmp_path / "new", tmp_path / "one")
    one = run_on_ranks(2, _train_on, kind, {"pp_size": 2, "num_microbatches": 2}, tmp_path / "one", tmp_path / "two")
    two = run_on_ranks(2, _train_on, kind, {"dp_size": 2, "zero_stage": 2}, tmp_path / "two", None)
    plain, losses = built(kind).double().eval(), []
    optimizer, (_, criterion) = torch.optim.AdamW(plain.parameters(), lr=0.01), MODULES[kind]
    batch = {name: value.double() if value.is_floating_point() else value for name, value in _batch(kind).items()}
    for _ in range(3):
        outputs = plain(**{name: batch[name] for name in batch if name not in unread_by(plain, batch)})
        found = criterion(outputs, batch)
        loss = found[0] / found[1] if isinstance(found, tuple) else found
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert [one[0], two[0]] == pytest.approx(losses[1:], rel=1e-7)  # Llama's norms compute in fp32


def _train_on(kind: type[nn.Module], options: dict[str, Any], read: Path, write: Path | None) -> float:
    """Train a step from a checkpoint; the weights are written and read as well."""
    plugin = HybridParallelPlugin(**options)
    booster, model = Booster(plugin=plugin), built(kind).double().eval()
    model, optimizer = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    if read.exists():
        booster.load_checkpoint(read, model=model, optimizer=optimizer)
        booster.load_model(model, read / "weights")
    batch = {name: value.double() if value.is_floating_point() else value for name, value in _batch(kind).items()}
    first, last = (ROWS * rank // plugin.dp_size for rank in (plugin.dp_rank, plugin.dp_rank + 1))
    share = {name: value[first:last] for name, value in batch.items()}
    loss = booster.execute_pipeline(iter([share]), model.eval(), MODULES[kind][1], optimizer).loss.item()
    optimizer.step()
    if write is not None:
        booster.save_checkpoint(write, model=model, optimizer=optimizer)
        booster.save_model(model, write / "weights")
    return loss


class WithAdapters(FrontAndBehind):
    """Its backbone has LoRA adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.text = get_peft_model(self.text, LoraConfig(r=2, target_modules=["query", "value"], lora_dropout=0.0))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"tp_size": 2}, {"pp_size": 2, "num_microbatches": 2}])
def test_adapters_of_a_backbone(options: dict[str, Any]) -> None:
    run_on_ranks(2, _verify_adapters, options)


def _verify_adapters(options: dict[str, Any]) -> None:
    batch = _batch(FrontAndBehind)
    assert verify(Build(WithAdapters), batch, HybridParallelPlugin(**options), criterion=of_kinds).equal
