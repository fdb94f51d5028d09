"""A model of each family that is sharded by a plan, transformers' own or one declared here, against plain training.

What breaks here first: a style, an attribute that counts heads, where a tree is cut into stages. The classes are those
that docs/results/coverage.md says are exact; `python -m zoo_tests.campaigns.census --only Family/` tells more of one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BioGptConfig, BioGptForCausalLM

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.verify.propose import share_cut
from plugins.hybrid_parallel.verify.train import train_reference
from shardformer.policies import families
from shardformer.policies.plans.plan import declared_plans
from shardformer.policies.registry import family_policies, policy_for
from zoo_tests.campaigns.census.classes import HeadClass, head_classes
from zoo_tests.campaigns.census.trained import PlainRun, plain_run, sharded_verdict, twin_of
from zoo_tests.campaigns.divided_sequences import families_to_ship, merged, plain_run_with_images
from zoo_tests.docs.pages import REPOSITORY, rows_of
from zoo_tests.harness.ranks import distributed, run_on_ranks
from zoo_tests.harness.sound_twin import media_twin_of, sound_twin_of

_PAGE = REPOSITORY / "docs" / "results" / "coverage.md"
# One of each kind of layer, for the fast part.
_FAST = ("megatron_bert", "biogpt", "olmo2")
_EVERY = 4  # of the families is in the suite, all others in the campaign
_EVERY_DIVIDED = 12
_LARGE = (
    "muse_glimmer",
    "muse_spark",
    "glm4v",
    "minicpmv4_6",
)  # in the campaign alone: each takes as long as ten others


def _inexact() -> set[tuple[str, str]]:
    """(class, layout) that the page says is not exact; "plain" in the place of a layout for every one.

    Too large for any test is what did not answer the census in time under one of them.
    """
    rows = rows_of(_PAGE, "Class") if _PAGE.exists() else []
    return {(row[0].strip("`"), "plain" if "did not answer" in row[2] else row[1]) for row in rows}


def _cases() -> Iterator:
    inexact, policies = _inexact(), family_policies()
    families: dict[str, list[HeadClass]] = {}
    for head in head_classes():
        if head.family in declared_plans() or head.family not in policies:
            families.setdefault(head.family, []).append(head)
    for number, (family, heads) in enumerate(families.items()):
        for layout in ("tp2pp2", "tp2", "pp2"):  # the first under which the family is exact
            bad = {name for name, where in inexact if where in ("plain", layout)}
            head = next((head for head in heads if head.name not in bad), None)
            if head is not None:
                marks = pytest.mark.campaign if number % _EVERY or family in _LARGE else pytest.mark.slow
                yield pytest.param(head, layout, id=f"{head.name}-{layout}", marks=() if family in _FAST else marks)
                break


def _plain(head: HeadClass) -> PlainRun:
    plain = plain_run(head)
    if isinstance(plain, str) and "library but it was not found" in plain:  # timm, of towers of images
        pytest.skip(plain)
    assert not isinstance(plain, str), f"plain training fails: {plain}"
    return plain


@pytest.mark.parametrize(("head", "layout"), list(_cases()))
def test_trains_like_plain_training(head: HeadClass, layout: str) -> None:
    plain = _plain(head)
    assert sharded_verdict(head, layout, plain) == "exact"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DbrxForCausalLM", "Qwen4ExpForCausalLM"])
def test_parts_that_return_several_tensors_of_the_tokens_between_slices_of_the_sequence(name: str) -> None:
    [head] = [head for head in head_classes() if head.name == name]
    plain = _plain(head)
    assert sharded_verdict(head, "sp2", plain) == "exact"


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("KimiLinearForCausalLM", 0.9),  # a delta net, its gate, and latent attention at one path
        *(
            pytest.param(name, least, marks=pytest.mark.slow)
            for name, least in (
                ("Qwen3_5ForCausalLM", 0.9),  # queries, keys and values of all heads one behind the other
                ("OlmoHybridForCausalLM", 0.9),
                ("BailingHybridForCausalLM", 0.9),
                ("DeepseekV3ForCausalLM", 0.7),
                ("OpenAIPrivacyFilterForTokenClassification", 0.9),  # experts with biases
                ("BambaForCausalLM", 0.5),  # transformers has no plan
            )
        ),
    ],
)
def test_what_a_plan_of_transformers_leaves_whole_is_divided(name: str, least: float) -> None:
    head = next((head for head in head_classes() if head.name == name), None)
    if head is None:
        pytest.skip(f"this release of transformers has no {name}")
    plain = _plain(head)
    assert sharded_verdict(head, "tp2", plain) == "exact"
    twin = plain.case.tiny_model
    assert share_cut(twin.build, twin.batch(twin.build(), 0, 2)).flops > least


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("Qwen2_5_VLForConditionalGeneration", 0.8),
        pytest.param("Qwen2AudioForConditionalGeneration", 0.7, marks=pytest.mark.slow),
        pytest.param("Gemma3ForConditionalGeneration", 0.8, marks=pytest.mark.slow),
        # Its text has a delta net and an attention that no rule knows at one path.
        pytest.param("Glm5NextForConditionalGeneration", 0.7, marks=pytest.mark.slow),
    ],
)
def test_towers_of_images_and_sounds_are_divided(name: str, least: float) -> None:
    [head] = [head for head in head_classes() if head.name == name]
    case = plain_run(head).case
    twin = media_twin_of(case.tiny_model)
    case = replace(case, tiny_model=twin)
    assert sharded_verdict(head, "tp2", PlainRun(case, train_reference(case))) == "exact"
    assert share_cut(twin.build, twin.batch(twin.build(), 0, 2)).flops > least


@pytest.mark.parametrize(
    ("name", "switches", "layouts"),
    [
        ("StableLmForCausalLM", {"qk_layernorm": True}, ("tp2",)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                # One head for each rank, and a key head for two of them.
                ("StableLmForCausalLM", {"qk_layernorm": True, "num_key_value_heads": 2}, ("tp4", "sp2", "tp2pp2")),
                ("PhiForCausalLM", {"qk_layernorm": True}, ("tp2", "sp2")),
                ("IdeficsForVisionText2Text", {"qk_layer_norms": True}, ("tp2",)),
                ("Gemma3nForCausalLM", {"activation_sparsity_pattern": [0.95, 0.5, 0.0, 0.3]}, ("tp2pp2", "tp4")),
            )
        ),
    ],
)
def test_parts_that_a_switch_adds(name: str, switches: dict[str, Any], layouts: tuple[str, ...]) -> None:
    [head] = [replace(head, switches=tuple(switches.items())) for head in head_classes() if head.name == name]
    plain = plain_run(head)
    assert not isinstance(plain, str), f"plain training fails: {plain}"
    assert {layout: sharded_verdict(head, layout, plain) for layout in layouts} == dict.fromkeys(layouts, "exact")


# What is divided -> its layout, and heads of families with layers of a kind of their own.
_KINDS = {
    "split_gather": (
        "sp2",
        {
            "MegatronBertForMaskedLM": "columns and rows in different modules",
            "Speech2TextForConditionalGeneration": "a decoder over other states, and linears of the layer itself",
            "DetrForObjectDetection": "a list of convolutions, which see whole sequences",
            "Qwen2AudioForConditionalGeneration": "a tower beside the layers",
            "Gemma4ForCausalLM": "layers that read another input for each token",
        },
    ),
    "cp": (
        "cp2",
        {
            "StableLmForCausalLM": "a plan of this package",
            "HunYuanDenseV1ForCausalLM": "norms of heads",
        },
    ),
    "all_to_all": (
        "sp2-ulysses",
        {"T5GemmaForConditionalGeneration": "two lists, and an embedding that is tied to the head alone"},
    ),
    "cp_all_to_all": (
        "cp2-ulysses",
        {
            "Pop2PianoForConditionalGeneration": "a bias of relative positions",
            "XmodForMaskedLM": "positions that the embedding counts by itself",
        },
    ),
}


def _divided(way: str) -> Iterator:
    """(head, layout) of families whose plans divide sequences, and of the kinds of layers."""
    layout, kinds = _KINDS[way]
    seen = json.loads((Path(families.__file__).parent / "divided_sequences.json").read_text(encoding="utf-8"))[way]
    known = [each for each in head_classes() if {each.family, f"{each.family}/{each.name}"} & {*seen}]
    first = {head.family: head for head in reversed(known)}
    bad = {name for name, where in _inexact() if where in ("plain", layout)}
    for number, head in enumerate(sorted({*first.values()}, key=lambda head: head.family)):
        if head.name not in bad and number % _EVERY_DIVIDED == 0 and head.name not in kinds:
            marks = pytest.mark.campaign if head.family in _LARGE else pytest.mark.slow
            yield pytest.param(head.name, layout, marks=marks, id=head.name)
    yield from (pytest.param(name, layout, marks=pytest.mark.slow, id=name) for name in kinds)


def _judged(name: str, layout: str, has_images: bool = False) -> str:
    [head] = [head for head in head_classes() if head.name == name]
    plain = _plain(head)
    model = plain.case.tiny_model.build()
    if layout != "sp2" or has_images:
        plain = plain_run_with_images(plain, policy_for(model)) or (None if has_images else plain)
        assert plain is not None and has_images <= ("pixel_values" in plain.case.tiny_model.batch(model, 0, 6))
    return sharded_verdict(head, layout, plain)


@pytest.mark.parametrize(("name", "layout"), [*_divided("split_gather"), *_divided("all_to_all")])
def test_slices_of_sequences_between_the_regions_of_a_plan(name: str, layout: str) -> None:
    assert _judged(name, layout) == "exact"


@pytest.mark.parametrize(("name", "layout"), [*_divided("cp"), *_divided("cp_all_to_all")])
def test_ranks_share_the_sequences_of_a_plan(name: str, layout: str) -> None:
    assert _judged(name, layout) == "exact"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *product(("Qwen2VLForConditionalGeneration", "LlavaForConditionalGeneration"), ("tp2pp2", "sp2", "cp2")),
        # Whose towers are registered behind the text, or have other names for their projections.
        ("Ernie4_5_VLMoeForConditionalGeneration", "pp2"),
        ("Ovis2ForConditionalGeneration", "pp2"),
        ("HunYuanVLForConditionalGeneration", "tp2"),
        ("Lfm3VlForConditionalGeneration", "tp2pp2"),
    ],
)
def test_images_among_the_tokens(name: str, layout: str) -> None:
    """Images as lists of patches, and one picture a sample; two micro-batches under a pipeline."""
    assert _judged(name, layout, has_images=True) == "exact"


def test_sounds_among_the_tokens() -> None:
    """The projection of sounds is registered behind the text."""
    [head] = [head for head in head_classes() if head.name == "VoxtralForConditionalGeneration"]
    case = replace(plain_run(head).case, tiny_model=sound_twin_of(twin_of(head)))
    plain = PlainRun(case, train_reference(case))
    projection = "model.multi_modal_projector.linear_1.weight"
    assert plain.trace.steps[0].gradients[projection].any()
    assert sharded_verdict(head, "tp2pp2", plain) == "exact"


def test_families_with_a_wrong_class_are_not_shipped() -> None:
    refused = "cp_size=2 cannot share the sequences of A"
    found = {"a/A": "exact", "a/B": refused, "b/A": "exact", "b/B": "the gradient of x differs", "c/A": refused}
    found |= {"d/A": "exact", "d/B": "it has towers, and no batch for them was made", "d/C": refused}
    assert families_to_ship(found) == {"a", "d/A"}
    assert merged(["d", "e"], {"a", "d/A"}) == ["a", "d", "e"]


@pytest.mark.slow
def test_stages_of_an_encoder_and_a_decoder_with_slices_of_their_sequences() -> None:
    [head] = [head for head in head_classes() if head.name == "Speech2TextForConditionalGeneration"]
    plain = plain_run(head)
    assert sharded_verdict(head, "tp2pp2", plain, enable_sequence_parallelism=True) == "exact"


def _ranks_of_draws() -> list[int | None]:
    config = BioGptConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)
    plugin = HybridParallelPlugin(tp_size=2, enable_sequence_parallelism=True)
    model = Booster(plugin=plugin).boost(BioGptForCausalLM(config))
    return [getattr(layer, "rank_of_draws", None) for layer in model.unwrap().biogpt.layers]


def test_layers_that_drop_by_a_function_draw_other_numbers_for_each_slice() -> None:
    assert run_on_ranks(2, _ranks_of_draws) == [[0, 0], [1, 1]]


def test_masks_of_a_module_around_the_reader_of_tokens_are_refused_under_cp() -> None:
    [head] = [head for head in head_classes() if head.name == "Gemma4UnifiedForConditionalGeneration"]
    verdict = sharded_verdict(head, "cp2", plain_run(head))
    assert "which makes its masks before the module that reads the tokens; use sequence_parallelism_mode" in verdict


def _towers() -> Iterator:
    inexact = {name for name, where in _inexact() if where in ("plain", "pp2")}
    for family, plan in declared_plans().items():
        heads = [head for head in head_classes() if head.family == family and head.name not in inexact]
        if plan.towers and heads:
            yield pytest.param(heads[0], id=heads[0].name)


@pytest.mark.slow
@pytest.mark.parametrize("head", list(_towers()))
def test_towers_are_cut_anywhere(head: HeadClass) -> None:
    """Inside of the encoder, between the towers, inside of the decoder: each leaves another forward to a stage."""
    plain = _plain(head)
    cuts = {split: sharded_verdict(head, "pp2", plain, layers_per_stage=split) for split in ((1, 7), (4, 4), (7, 1))}
    assert set(cuts.values()) == {"exact"}, cuts


_TINY = {"vocab_size": 24, "hidden_size": 32, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 4}


def _decoder(name: str, **options: Any) -> nn.Module:
    """A decoder whose weights, norms too, differ from each other."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**_TINY, **options, pad_token_id=0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.5, 0.3)
    return model


@pytest.mark.slow
@distributed(2)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Cohere", {"use_qk_norm": True, "num_key_value_heads": 1}),  # the norm of keys is copied, that of queries cut
        ("Apertus", {"num_key_value_heads": 2}),  # an activation with parameters and buffers
        ("StableLm", {"qk_layernorm": True, "num_key_value_heads": 1}),  # a list with a norm for each head
        ("Phi", {"qk_layernorm": True}),  # norms with a bias, which all heads share
    ],
)
def test_parts_that_the_plan_forgets_train_and_are_saved(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    plain = _decoder(name, **options)
    booster = Booster(plugin=HybridParallelPlugin(tp_size=2))

    def boosted() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = _decoder(name, **options)
        model.model.layers[0].self_attn.q_proj.weight.is_slow = True
        return booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.05))

    model, optimizer = boosted()
    assert [hasattr(param, "is_slow") for param in model.parameters()].count(True) == 1
    assert [hasattr(param, "is_slow") for param in optimizer.param_groups[0]["params"]].count(True) == 1
    reference = torch.optim.SGD(plain.parameters(), lr=0.05)
    for step in range(3):
        if step == 2:
            booster.save_checkpoint(str(tmp_path / "state"), model=model, optimizer=optimizer)
            model, optimizer = boosted()
            booster.load_checkpoint(str(tmp_path / "state"), model=model, optimizer=optimizer)
        ids = torch.randint(24, (3, 7), generator=torch.Generator().manual_seed(step))
        expected = plain(input_ids=ids, labels=ids).loss
        expected.backward()
        loss = booster.execute_pipeline({"input_ids": ids, "labels": ids}, model, optimizer=optimizer).loss
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0, check_dtype=False, check_device=False)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    booster.save_model(model, str(tmp_path / "model"))
    saved = type(plain).from_pretrained(tmp_path / "model", dtype=torch.float64).state_dict()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(saved[key], value, rtol=1e-6, atol=1e-7, msg=key)
