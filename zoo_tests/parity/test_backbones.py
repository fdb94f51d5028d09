"""Modules of the user's around models of transformers train to the numbers of plain training, under every layout.

What breaks here first: a module that is taken for one behind the backbone, and a part of a backbone that the module's
forward reads by itself. Look in `shardformer/policies/backbone.py`.
"""

from __future__ import annotations

from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaModel,
    PreTrainedModel,
    T5Config,
    T5Model,
    ViTConfig,
    ViTModel,
)

from booster import Booster, verify
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.boosted.forward_options import unread_by
from shardformer import PipelineStageManager, ShardConfig, ShardFormer, TPInfo
from shardformer.policies.plans.stage_inference import is_below
from shardformer.policies.proposed.propose import propose_plan
from shardformer.policies.registry import policy_for
from shardformer.stages.stage import run_stage
from zoo_tests.harness.ranks import distributed, run_on_ranks

HIDDEN, VOCABULARY, ROWS, LENGTH = 24, 37, 5, 7
SIZES = {"hidden_size": HIDDEN, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 20}


def bert(**changes: Any) -> BertModel:
    return BertModel(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **SIZES | changes))


def vit(**changes: Any) -> ViTModel:
    return ViTModel(ViTConfig(image_size=12, patch_size=6, **SIZES | changes), add_pooling_layer=False)


def mean_over(hidden: Tensor, mask: Tensor) -> Tensor:
    """The mean over tokens that count, [batch, hidden]."""
    return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


class TwoHeads(nn.Module):
    """A ViT with two heads, and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.kind, self.vit, self.place = nn.Linear(HIDDEN, 5), vit(), nn.Linear(HIDDEN, 2)

    def forward(self, pixel_values: Tensor, kinds: Tensor, places: Tensor) -> dict[str, Tensor]:
        hidden = self.vit(pixel_values).last_hidden_state
        kind, place = self.kind(hidden[:, 0]), self.place(hidden.mean(1))
        return {"loss": F.cross_entropy(kind, kinds) + 0.3 * F.mse_loss(place, places), "kind": kind, "place": place}


class TwoBackbones(nn.Module):
    """A text and an image, of which one backbone each is read."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text, self.head = vit(num_hidden_layers=1), bert(), nn.Linear(2 * HIDDEN, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, pixel_values: Tensor) -> Tensor:
        text = self.text(input_ids, attention_mask=attention_mask).pooler_output
        return self.head(torch.cat([text, self.image(pixel_values).last_hidden_state[:, 0]], -1))


class FrozenTower(nn.Module):
    """A frozen image tower in front of a text backbone, which reads the image as its first tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.bridge, self.text = vit(num_hidden_layers=1), nn.Linear(HIDDEN, HIDDEN), bert()
        self.head = nn.Linear(HIDDEN, 3)
        self.tower.requires_grad_(False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, pixel_values: Tensor) -> Tensor:
        with torch.no_grad():
            seen = self.tower(pixel_values).last_hidden_state
        words = self.text.get_input_embeddings()(input_ids)
        mask = torch.cat([attention_mask.new_ones(seen.shape[:2]), attention_mask], 1)
        out = self.text(inputs_embeds=torch.cat([self.bridge(seen), words], 1), attention_mask=mask)
        return self.head(mean_over(out.last_hidden_state, mask))


class FrontAndBehind(nn.Module):
    """Values made in front of the backbone are used behind it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.text, self.scale = nn.Linear(6, HIDDEN), bert(), nn.Parameter(torch.ones(HIDDEN))
        self.norm, self.leave = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 3)

    def forward(self, features: Tensor, attention_mask: Tensor) -> Tensor:
        hidden, counts = self.norm(torch.tanh(self.enter(features))), attention_mask.sum(1)
        out = self.text(inputs_embeds=hidden * self.scale, attention_mask=attention_mask).last_hidden_state
        return self.leave(self.norm(mean_over(out + hidden, attention_mask)) * counts[:, None] / 4)


class Tagger(nn.Module):
    """A linear chain of tags with transition scores of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.transitions, self.text = nn.Parameter(torch.zeros(4, 4)), bert()
        self.emit = nn.Sequential(nn.Linear(HIDDEN, 9), nn.GELU(), nn.Linear(9, 4))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, tags: Tensor) -> SimpleNamespace:
        scores = self.emit(self.text(input_ids, attention_mask=attention_mask).last_hidden_state)
        return SimpleNamespace(loss=(self.all_ways(scores, attention_mask) - self.one_way(scores, tags)).mean())

    def one_way(self, scores: Tensor, tags: Tensor) -> Tensor:
        chosen = scores.gather(2, tags.clamp(min=0)[..., None]).squeeze(2)
        steps = self.transitions[tags[:, :-1].clamp(min=0), tags[:, 1:].clamp(min=0)]
        return (chosen * (tags >= 0)).sum(1) + (steps * (tags[:, 1:] >= 0)).sum(1)

    def all_ways(self, scores: Tensor, mask: Tensor) -> Tensor:
        total = scores[:, 0]
        for step in range(1, scores.shape[1]):
            longer = torch.logsumexp(total[:, :, None] + self.transitions, 1) + scores[:, step]
            total = torch.where(mask[:, step, None] > 0, longer, total)
        return total.logsumexp(1)


class Pairs(nn.Module):
    """Pairs of texts, whose distance is trained; both are read in one pass."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.project = bert(), nn.Linear(HIDDEN, 8, bias=False)

    def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        first, second = self.vectors(torch.cat([one, other])).chunk(2)
        return first, second

    def vectors(self, ids: Tensor) -> Tensor:
        return F.normalize(self.project(self.text(ids).last_hidden_state.mean(1)), dim=-1)


class PairsOneByOne(Pairs):
    """The same, each text in a pass of its own: stages cannot."""

    def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return self.vectors(one), self.vectors(other)


class Adapters(nn.Module):
    """A list of adapters behind the backbone, and one in front of it."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.parts = nn.ModuleDict({"text": bert(), "head": nn.Linear(HIDDEN, 3)})

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **others: Any) -> Tensor:
        hidden = self.parts["text"](input_ids, attention_mask).last_hidden_state
        for adapter in self.adapters:
            hidden = hidden + torch.tanh(adapter(hidden))
        return self.parts["head"](mean_over(hidden, attention_mask))


class Encoder(nn.Module):
    """A backbone with something in front of it and behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.behind, self.model, self.front = nn.Linear(HIDDEN, HIDDEN), vit(), nn.Conv2d(3, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        return torch.tanh(self.behind(self.model(pixel_values=self.front(images)).last_hidden_state[:, 0]))


class TwoLevels(nn.Module):
    """The backbone is two levels below the module."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.encoder = nn.Linear(HIDDEN, 3), Encoder()

    def forward(self, pixel_values: Tensor) -> SimpleNamespace:
        return SimpleNamespace(found=self.head(self.encoder(pixel_values)))


class TiedHead(PreTrainedModel):
    """A model with a configuration, and a vocabulary head that is tied to the embedding of its backbone."""

    config_class = LlamaConfig

    def __init__(self, config: LlamaConfig | None = None) -> None:
        sizes = SIZES | {"num_key_value_heads": 2}
        super().__init__(config or LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=False, **sizes))
        self.decoder, self.words = LlamaModel(self.config), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.post_init()
        self.words.weight = self.decoder.embed_tokens.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.words(self.decoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state)


class ReadsWeights(TiedHead):
    """The same, with the embedding's weight read in the forward."""

    def __init__(self, config: LlamaConfig | None = None) -> None:
        super().__init__(config)
        del self.words

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.decoder(input_ids=input_ids, attention_mask=attention_mask)[0]
        return F.linear(hidden, self.decoder.embed_tokens.weight)


class ValueHead(nn.Module):
    """A language model with a value for each token."""

    def __init__(self) -> None:
        super().__init__()
        config = GPT2Config(vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=3, n_head=4, n_positions=16)
        self.lm, self.value = GPT2LMHeadModel(config), nn.Linear(VOCABULARY, 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits = self.lm(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        return torch.cat([logits, self.value(torch.tanh(logits))], -1)


class Translator(nn.Module):
    """An encoder-decoder with a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        config = T5Config(
            vocab_size=VOCABULARY,
            d_model=HIDDEN,
            d_kv=6,
            d_ff=20,
            num_layers=2,
            num_heads=4,
            num_decoder_layers=2,
            dropout_rate=0.0,
        )
        self.model, self.words = T5Model(config), nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor) -> Tensor:
        given = {"attention_mask": attention_mask, "decoder_input_ids": decoder_input_ids}
        return self.words(self.model(input_ids=input_ids, **given).last_hidden_state)


# ----- criteria: what they read of the batch is no argument of the forward -----


def of_kinds(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(getattr(outputs, "found", outputs), batch["kinds"])


def of_words(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The loss of each token that counts, with weights of its own; (sum, count)."""
    scores, words = outputs[..., :VOCABULARY], batch["words"]
    loss = F.cross_entropy(scores.transpose(1, 2), words, reduction="none") * batch["weights"]
    return loss.sum() + 0.1 * outputs[..., VOCABULARY:].square().sum(), (words >= 0).sum()


def of_pairs(outputs: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return F.cosine_embedding_loss(*outputs, batch["same"], margin=0.3)


TEXT, IMAGE = ("input_ids", "attention_mask"), ("pixel_values",)
# Module -> (entries of the batch, criterion)
MODULES: dict[type[nn.Module], tuple[tuple[str, ...], Any]] = {
    TwoHeads: (("pixel_values", "kinds", "places"), None),
    TwoBackbones: ((*TEXT, *IMAGE, "kinds"), of_kinds),
    FrozenTower: ((*TEXT, *IMAGE, "kinds"), of_kinds),
    FrontAndBehind: (("features", "attention_mask", "kinds"), of_kinds),
    Tagger: ((*TEXT, "tags"), None),
    Pairs: (("one", "other", "same"), of_pairs),
    Adapters: ((*TEXT, "kinds"), of_kinds),
    TwoLevels: ((*IMAGE, "kinds"), of_kinds),
    TiedHead: ((*TEXT, "words", "weights"), of_words),
    ReadsWeights: ((*TEXT, "words", "weights"), of_words),
    ValueHead: ((*TEXT, "words", "weights"), of_words),
    Translator: ((*TEXT, "decoder_input_ids", "words", "weights"), of_words),
}
LAYOUTS = {
    "tp2": {"tp_size": 2},
    "pp2": {"pp_size": 2, "num_microbatches": 3},
    "tp2pp2": {"tp_size": 2, "pp_size": 2, "num_microbatches": 2},
    "dp2": {"dp_size": 2},
    "sp2": {"tp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "split_gather"},
}


def batch_of(names: tuple[str, ...]) -> dict[str, Tensor]:
    """Rows of several lengths, which are all different."""
    generator = torch.Generator().manual_seed(3)

    def draw(high: int, *shape: int) -> Tensor:
        return torch.randint(1, high, shape, generator=generator)

    lengths = torch.tensor([7, 3, 5, 6, 4])
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    entries = {
        "input_ids": draw(VOCABULARY, ROWS, LENGTH) * mask,
        "attention_mask": mask,
        "pixel_values": torch.randn(ROWS, 3, 12, 12, generator=generator),
        "features": torch.randn(ROWS, LENGTH, 6, generator=generator),
        "kinds": draw(3, ROWS),
        "places": torch.randn(ROWS, 2, generator=generator),
        "tags": draw(4, ROWS, LENGTH).masked_fill(mask == 0, -100),
        "words": draw(VOCABULARY, ROWS, LENGTH).masked_fill(mask == 0, -100),
        "weights": torch.rand(ROWS, LENGTH, generator=generator),
        "one": draw(VOCABULARY, ROWS, LENGTH),
        "other": draw(VOCABULARY, ROWS, LENGTH),
        "same": torch.tensor([1, -1, 1, -1, -1]),
        "decoder_input_ids": draw(VOCABULARY, ROWS, LENGTH),
    }
    return {name: entries[name] for name in names}


def built(kind: type[nn.Module]) -> nn.Module:
    """The module with weights that are all different; norms and biases are not 1 and 0."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = kind()
        for parameter in model.parameters():
            parameter.data += 0.2 * torch.randn(parameter.shape)
    return model


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
        self.forward = MethodType(OtherName.forward, self)


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
