"""Make family-specific inputs: those of single heads besides text, images and the usual labels."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from booster.errors import ConfigurationError

_TRANSCRIPTS = ("ForConditionalGeneration", "ForSpeechToText", "ForSpeechToSpeech")


def labels_without_text(
    kind: str, model: nn.Module, batch: Mapping[str, Tensor], rows: int, generator: torch.Generator
) -> dict[str, Any]:
    """Make labels for a batch of images or sound.

    Args:
        kind: the task of the head, as "ForDepthEstimation".

    Raises:
        ConfigurationError: there are no random labels for this kind of head.
    """
    classes = getattr(model.config, "num_labels", 2)
    if kind == "ForAudioFrameClassification":
        frames = model(**batch).logits.shape[1]
        marks = torch.randint(0, classes, (rows, frames), generator=generator)
        return {"labels": torch.nn.functional.one_hot(marks, classes)}
    if kind in ("ForCTC", "ForRNNT", "ForTDT"):
        return {"labels": torch.randint(1, model.config.vocab_size, (rows, 3), generator=generator)}
    if kind.startswith("ForImageClassification"):  # Perceiver's has a suffix
        return {"labels": torch.randint(0, classes, (rows,), generator=generator)}
    if kind in _TRANSCRIPTS:
        return {"labels": torch.randint(5, 90, (rows, 7), generator=generator)}
    if "pixel_values" not in batch:
        raise _refusal(kind, model, batch)
    sides = batch["pixel_values"].shape[-2:]
    if kind == "ForSemanticSegmentation":
        return {"labels": torch.randint(0, classes, (rows, *sides), generator=generator)}
    if kind == "ForDepthEstimation":
        return {"labels": torch.rand(rows, *sides, generator=generator)}
    if kind == "ForMaskedImageModeling":
        return masked_patches(model, rows, sides, generator)
    if _takes_targets(model):
        return {"labels": detection_targets(rows, classes, sides, generator, "Segmentation" in kind)}
    return {"labels": _like_output(model, batch, generator)}


def detection_targets(
    rows: int, classes: int, sides: tuple[int, int], generator: torch.Generator, has_masks: bool = False
) -> list[dict[str, Tensor]]:
    """Make DETR's targets: for each image one to three boxes, [boxes, 4] (centre, width, height in shares of 1).

    Args:
        sides: height and width of the images, in pixels.
        has_masks: whether each box also has a mask of pixels, [boxes, height, width].
    """
    targets = []
    for row in range(rows):
        boxes = 1 + (row * 2 + 1) % 3
        centres = 0.3 + 0.4 * torch.rand(boxes, 2, generator=generator)
        target = {
            "class_labels": torch.randint(0, classes, (boxes,), generator=generator),
            "boxes": torch.cat([centres, 0.2 + 0.3 * torch.rand(boxes, 2, generator=generator)], -1),
        }
        if has_masks:
            target["masks"] = torch.randint(0, 2, (boxes, *sides), generator=generator).float()
        targets.append(target)
    return targets


def masked_patches(
    model: nn.Module, rows: int, sides: tuple[int, int], generator: torch.Generator
) -> dict[str, Tensor]:
    """Make the masked patches of each image, [rows, patches], and the visual tokens of all masked ones, [masked]."""
    size = model.config.patch_size
    height, width = size if isinstance(size, tuple | list) else (size, size)
    patches = (sides[0] // height) * (sides[1] // width)
    order = torch.rand(rows, patches, generator=generator).argsort(-1)
    masked = order < torch.randint(2, patches // 2, (rows, 1), generator=generator)
    tokens = torch.randint(0, model.config.vocab_size, (int(masked.sum()),), generator=generator)
    return {"bool_masked_pos": masked, "labels": tokens}


def _takes_targets(model: nn.Module) -> bool:
    """Check whether the labels are a list of dicts, one for each image."""
    return "dict" in str(inspect.signature(model.forward).parameters["labels"].annotation)


def _like_output(model: nn.Module, batch: Mapping[str, Tensor], generator: torch.Generator) -> Tensor:
    """Make labels of the shape of the output, as heat maps of key points are."""
    model.eval()  # batch norms do not see the batch
    with torch.no_grad():
        outputs = model(**batch)
    model.train()
    first = next(value for value in outputs.values() if isinstance(value, Tensor) and value.is_floating_point())
    return torch.rand(first.shape, generator=generator)


def _refusal(kind: str, model: nn.Module, batch: Mapping[str, Tensor]) -> ConfigurationError:
    return ConfigurationError(
        f"no labels can be made up for {type(model).__name__}, a head {kind} on {', '.join(batch)}; "
        "use --head with another head of the family, as ImageClassification"
    )


Maker = Callable[[nn.Module, Mapping[str, Tensor], torch.Generator], Any]


def further_inputs(
    family: str, model: nn.Module, batch: Mapping[str, Tensor], generator: torch.Generator
) -> dict[str, Any]:
    """Make the family-specific inputs of a model; they replace inputs of the same name in the batch (None: no input).

    Args:
        family: name of the family's folder in `transformers.models`.
        model: the model.
        batch: the inputs made so far.
        generator: source of random numbers.
    """
    takes = inspect.signature(model.forward).parameters
    found: dict[str, Any] = {}
    for name, make in _INPUTS.items():
        owner, _, argument = name.rpartition("/")
        if argument in takes and (owner == family or type(model).__name__.startswith(owner)):
            found[argument] = make(model, batch, generator)
    return found


def _draw(high: int, *shape: int) -> Maker:
    """Draw random integers below `high`; -1 in `shape` stands for the batch's size in that dimension."""

    def make(_: nn.Module, batch: Mapping[str, Tensor], generator: torch.Generator) -> Tensor:
        sizes = next(iter(batch.values())).shape
        whole = [sizes[index] if size == -1 else size for index, size in enumerate(shape)]
        return torch.randint(0, high, whole, generator=generator)

    return make


def _draw_above(low: int, high: int, *shape: int) -> Maker:
    """Draw random integers from `low` on and below `high`; see `_draw`."""
    return lambda *given: _draw(high - low, *shape)(*given) + low


def _draw_rows(high: int, count: int, length: int) -> Maker:
    """Draw `count` sequences of random integers below `high` for each row, [rows * count, length]."""
    return lambda *given: _draw(high, -1, count, length)(*given).flatten(0, 1)


def _noise(*shape: int) -> Maker:
    """Draw standard normal numbers; -1 in `shape` stands for the number of rows of the batch."""

    def make(_: nn.Module, batch: Mapping[str, Tensor], generator: torch.Generator) -> Tensor:
        rows = next(iter(batch.values())).shape[0]
        return torch.randn(*[rows if size == -1 else size for size in shape], generator=generator)

    return make


def _first_marked(_: nn.Module, batch: Mapping[str, Tensor], __: torch.Generator) -> Tensor:
    marks = torch.zeros_like(batch["input_ids"])
    marks[..., 0] = 1
    return marks


def _nothing(*_: Any) -> None:
    """Leave the argument out: the model's default is meant."""


def _ones(*shape: int) -> Maker:
    """Make ones; -1 in `shape` stands for the batch's size in that dimension."""
    return lambda *given: torch.ones_like(_draw(2, *shape)(*given))


def _images(count: int | None = None, size: int = 16) -> Maker:
    """Draw an image for each row, or `count` of them."""
    return _noise(-1, *(() if count is None else (count,)), 3, size, size)


def _with_placeholders(count: int, token: int) -> Maker:
    """Put `count` placeholders of an image, or of sound, into each text, from the second token on."""

    def make(_: nn.Module, batch: Mapping[str, Tensor], __: torch.Generator) -> Tensor:
        tokens = batch["input_ids"].clone()
        tokens[:, 1 : 1 + count] = token
        return tokens

    return make


def _marked_placeholders(count: int) -> Maker:
    def make(_: nn.Module, batch: Mapping[str, Tensor], __: torch.Generator) -> Tensor:
        marks = torch.zeros_like(batch["input_ids"])
        marks[:, 1 : 1 + count] = 1
        return marks

    return make


def _frames(model: nn.Module, batch: Mapping[str, Tensor], _: torch.Generator) -> Tensor:
    """Put the mark of speech and three frames of sound into each text."""
    tokens = batch["input_ids"].clamp(min=8)
    tokens[:, 4] = model.config.audio_bos_token_id
    tokens[:, 5:8] = model.config.audio_latent_token_id
    return tokens


def _first_or_none(_: nn.Module, batch: Mapping[str, Tensor], __: torch.Generator) -> Tensor:
    """Link each token to the first one, and the first to nothing, which is the index behind the last token."""
    mask = batch["attention_mask"]
    first = mask.argmax(1, keepdim=True)
    return first.expand(mask.shape).scatter(1, first, mask.shape[1])


def _kept(count: int) -> Maker:
    """Draw positions of tokens that are not padding, [rows, count]."""

    def make(_: nn.Module, batch: Mapping[str, Tensor], generator: torch.Generator) -> Tensor:
        return torch.multinomial(batch["attention_mask"].float(), count, replacement=True, generator=generator)

    return make


def _shares(*shape: int) -> Maker:
    """Draw shares that add up to 1 in the last dimension."""
    return lambda *given: _noise(*shape)(*given).softmax(-1)


def _per_token(*width: int) -> Maker:
    """Draw standard normal numbers for each token of the text, [rows, tokens, *width]."""
    return lambda _, batch, generator: torch.randn(*batch["input_ids"].shape, *width, generator=generator)


def _phrases(_: nn.Module, batch: Mapping[str, Tensor], generator: torch.Generator) -> Tensor:
    """Make texts of two phrases between the marks that Grounding DINO looks for: [CLS] a b . c . [SEP]."""
    rows = batch["input_ids"].shape[0]
    texts = torch.tensor([101, 0, 0, 1012, 0, 1012, 102]).repeat(rows, 1)
    texts[:, [1, 2, 4]] = torch.randint(5, 95, (rows, 3), generator=generator)
    return texts


def _targets(_: nn.Module, batch: Mapping[str, Tensor], generator: torch.Generator) -> list[dict[str, Tensor]]:
    """Make boxes whose classes are the two phrases."""
    return detection_targets(batch["input_ids"].shape[0], 2, (64, 64), generator)


_box = _draw(60, -1, -1, 4)


def _ordered_box(*given: Any) -> Tensor:
    return _box(*given).sort(-1).values


# "argument", "family/argument" or "Class/argument" -> function that makes the argument.
_INPUTS: Mapping[str, Maker] = {
    "AlbertForPreTraining/sentence_order_label": _draw(2, -1),
    "ElectraForPreTraining/labels": _draw(2, -1, -1),
    "FunnelForPreTraining/labels": _draw(2, -1, -1),
    "audio_spectrogram_transformer/input_values": _noise(-1, 40, 24),
    "videomae/pixel_values": _noise(-1, 4, 3, 16, 16),
    "vivit/pixel_values": _noise(-1, 4, 3, 16, 16),
    "wav2vec2_bert/input_features": _noise(-1, 12, 24),
    "LukeForEntity/entity_ids": _draw(20, -1, 2),
    "LukeForEntity/entity_attention_mask": lambda *given: torch.ones_like(_draw(20, -1, 2)(*given)),
    "LukeForEntity/entity_position_ids": _draw(9, -1, 2, 3),
    "LukeForEntity/entity_token_type_ids": _draw(2, -1, 2),
    "LukeForEntityClassification/labels": _draw(2, -1),
    "LukeForEntityPairClassification/labels": _draw(2, -1),
    "LukeForEntitySpanClassification/labels": _draw(2, -1, 2),
    "LukeForEntity/entity_start_positions": _draw(9, -1, 2),
    "LukeForEntity/entity_end_positions": _draw(9, -1, 2),
    "LongformerForQuestionAnswering/global_attention_mask": _first_marked,
    "LongformerForMultipleChoice/global_attention_mask": _first_marked,
    "speech_to_text/input_features": _noise(-1, 24, 80),
    "seamless_m4t/input_features": _noise(-1, 24, 160),
    "seamless_m4t_v2/input_features": _noise(-1, 24, 160),
    "xmod/lang_ids": _draw(2, -1),
    "whisper/input_features": _noise(-1, 80, 128),
    "siglip2/pixel_values": _noise(-1, 16, 48),
    "siglip2/pixel_attention_mask": lambda _, batch, __: torch.ones(len(batch["pixel_values"]), 16, dtype=torch.int64),
    "siglip2/spatial_shapes": lambda _, batch, __: torch.full((len(batch["pixel_values"]), 2), 4),
    "timesformer/pixel_values": _noise(-1, 8, 3, 16, 16),
    "vilt/pixel_values": _noise(-1, 3, 16, 16),
    "ViltForQuestionAnswering/labels": lambda *given: _noise(-1, 2)(*given).softmax(-1),
    "lasr/input_features": _noise(-1, 40, 128),
    "lasr/attention_mask": lambda _, batch, __: torch.ones(batch["input_features"].shape[:2], dtype=torch.int64),
    "bros/bbox": lambda *given: _box(*given) / 60,
    "layoutlmv3/bbox": _box,
    "lilt/bbox": _ordered_box,
    "bros/bbox_first_token_mask": lambda _, batch, __: batch["attention_mask"].bool(),
    "blip_2/pixel_values": _images(),
    "blip_2/input_ids": _with_placeholders(2, 99),
    "bridgetower/pixel_values": _images(),
    "BridgeTowerForMaskedLM/pixel_mask": _nothing,
    "kosmos2/pixel_values": _images(),
    "kosmos2/image_embeds_position_mask": _marked_placeholders(2),
    "ViltForImagesAndText/pixel_values": _images(2),
    "ViltForImagesAndText/labels": _draw(2, -1),
    "XmodForMultipleChoice/lang_ids": lambda *_: torch.tensor(1),
    "granite_speech5/input_features": _noise(-1, 48, 96),
    **dict.fromkeys(
        ("SplinterForQuestionAnswering/start_positions", "SplinterForQuestionAnswering/end_positions"),
        lambda *given: _kept(1)(*given)[:, 0],
    ),
    "SplinterForPreTraining/question_positions": _kept(2),
    "SplinterForPreTraining/start_positions": _kept(2),
    "SplinterForPreTraining/end_positions": _kept(2),
    "TapasForQuestionAnswering/token_type_ids": _draw(2, -1, -1, 7),
    "TapasForQuestionAnswering/labels": _draw(2, -1, -1),
    "VisualBertFor/visual_embeds": _noise(-1, 4, 16),
    "VisualBertFor/visual_attention_mask": _ones(-1, 4),
    "VisualBertForMultipleChoice/visual_embeds": _noise(-1, 3, 4, 16),
    "VisualBertForMultipleChoice/visual_attention_mask": _ones(-1, 3, 4),
    "VisualBertForPreTraining/labels": lambda _, batch, __: torch.nn.functional.pad(
        batch["input_ids"], (0, 4), value=-100
    ),
    "VisualBertForQuestionAnswering/labels": _shares(-1, 2),
    "VisualBertForRegionToPhraseAlignment/region_to_phrase_position": _draw(9, -1, 4),
    "VisualBertForRegionToPhraseAlignment/labels": _shares(-1, 4, 4),
    "perceiver/pixel_values": _images(),
    "pp_formulanet/pixel_values": _images(),
    "pp_formulanet/decoder_input_ids": _draw(90, -1, 7),
    "pp_formulanet/labels": _draw(90, -1, 7),
    "pp_formulanet/input_ids": _nothing,
    "pp_formulanet/attention_mask": _nothing,
    "SeamlessM4TTextToUnit/inputs_embeds": _per_token(32),
    "SeamlessM4Tv2TextToUnit/inputs_embeds": _per_token(32),
    "SeamlessM4TTextToUnit/input_ids": _nothing,
    "SeamlessM4Tv2TextToUnit/input_ids": _nothing,
    "CsmForConditionalGeneration/input_ids": _draw(15, -1, -1, 4),
    "CsmForConditionalGeneration/labels": _draw(15, -1, -1, 4),
    "Qwen3OmniMoeTalker/inputs_embeds": _per_token(32),
    "Qwen3OmniMoeTalker/talker_input_ids": lambda _, batch, __: batch["input_ids"],
    "Qwen3OmniMoeTalker/input_ids": _nothing,
    "depth_pro/pixel_values": _images(size=64),
    **dict.fromkeys(("superglue/pixel_values", "lightglue/pixel_values"), _images(2, 32)),
    "vitpose/dataset_index": _draw(4, -1),
    "omdet_turbo/classes_input_ids": _draw_rows(90, 2, 5),
    "omdet_turbo/classes_attention_mask": lambda *given: torch.ones_like(_draw_rows(90, 2, 5)(*given)),
    "omdet_turbo/tasks_input_ids": _draw(90, -1, 7),
    "omdet_turbo/tasks_attention_mask": _ones(-1, 7),
    "omdet_turbo/classes_structure": lambda *given: _draw_above(2, 3, -1)(*given),
    "SpeechT5ForSpeechToSpeech/decoder_input_values": _noise(-1, 6, 8),
    "efficientloftr/pixel_values": _noise(-1, 2, 1, 64, 64),
    "kyutai_speech_to_text/input_ids": _draw(15, -1, -1, 5),
    "kyutai_speech_to_text/labels": _draw(90, -1, -1),
    "molmo2/mm_token_type_ids": _draw(1, -1, -1),
    "PerceiverForMaskedLM/labels": _draw(90, -1, 64),
    "shieldgemma2/labels": lambda _, batch, __: batch["input_ids"],
    **dict.fromkeys(("pocket_tts/input_ids", "gradium_phonon_tts/input_ids"), _frames),
    **dict.fromkeys(("pocket_tts/labels", "gradium_phonon_tts/labels"), _noise(-1, 3, 32)),
    "granite_speech5/attention_mask": _ones(-1, 48),
    "BrosSpadeEL/labels": _first_or_none,
    "higgs_audio_v2/input_ids": _with_placeholders(3, 99),
    "higgs_audio_v2/audio_input_ids": _draw(16, -1, 3, 4),
    "higgs_audio_v2/audio_labels": _draw(16, -1, 3, 4),
    "higgs_audio_v2/audio_input_ids_mask": lambda *given: _ones(-1, 3)(*given).bool(),
    "SeamlessM4Tv2TextToUnit/char_input_ids": _draw(90, -1, -1),
    "SeamlessM4Tv2TextToUnit/char_count_per_id": _ones(-1, -1),
    "BlipFor/pixel_values": _images(),
    "canary/input_features": _noise(-1, 48, 24),
    "cohere_asr/input_features": _noise(-1, 48, 24),
    "BlipForQuestionAnswering/labels": _draw(90, -1, 7),
    "clipseg/pixel_values": _images(),
    "clipseg/conditional_pixel_values": _nothing,
    "clipseg/labels": lambda *given: _noise(-1, 16, 16)(*given).sigmoid(),
    "dia/decoder_input_ids": _draw(90, -1, 7, 3),
    "dia/labels": _draw_rows(90, 3, 7),
    "git/pixel_values": _images(),
    **dict.fromkeys(("grounding_dino/pixel_values", "mm_grounding_dino/pixel_values"), _images(size=64)),
    **dict.fromkeys(("grounding_dino/input_ids", "mm_grounding_dino/input_ids"), _phrases),
    **dict.fromkeys(("grounding_dino/attention_mask", "mm_grounding_dino/attention_mask"), _ones(-1, 7)),
    **dict.fromkeys(("grounding_dino/labels", "mm_grounding_dino/labels"), _targets),
    "idefics/pixel_values": _images(1),
    "idefics/image_attention_mask": _ones(-1, -1, 1),
    "instructblip/pixel_values": _images(),
    "instructblip/input_ids": _with_placeholders(2, 99),
    "instructblip/qformer_input_ids": _draw(90, -1, 4),
    "instructblipvideo/pixel_values": _images(2),
    "instructblipvideo/input_ids": _with_placeholders(4, 99),
    "instructblipvideo/qformer_input_ids": _draw(90, -1, 4),
    "lxmert/visual_feats": _noise(-1, 5, 16),
    "lxmert/visual_pos": _noise(-1, 5, 4),
    "LxmertForPreTraining/matched_label": _draw(2, -1),
    "LxmertForPreTraining/ans": _draw(8, -1),
    "LxmertForQuestionAnswering/labels": _draw(8, -1),
    "moonshine/input_values": _noise(-1, 2000),
    "omniasr_ctc/input_values": _noise(-1, 1, 500),
    "moonshine_streaming/input_values": _noise(-1, 640),
    **dict.fromkeys(("musicgen/labels", "musicgen_melody/labels"), _draw_above(3, 90, -1, 7, 4)),
    **dict.fromkeys(("MusicgenForCausalLM/input_ids", "MusicgenMelodyForCausalLM/input_ids"), _nothing),
    **dict.fromkeys(("MusicgenForCausalLM/attention_mask", "MusicgenMelodyForCausalLM/attention_mask"), _nothing),
    **{
        f"{family}/{name}": make
        for family in ("parakeet", "nemotron_asr_streaming", "nemotron3_5_asr")
        for name, make in (("input_features", _noise(-1, 48, 24)), ("attention_mask", _ones(-1, 48)))
    },
    **{
        f"{name}/{argument}": make
        for name in ("ParakeetForRNNT", "NemotronAsrStreamingForRNNT", "Nemotron3_5AsrForRNNT")
        for argument, make in (("labels", _draw_above(3, 90, -1, 3)), ("decoder_input_ids", _draw_above(3, 90, -1, 4)))
    },
    "nemotron3_5_asr/prompt_ids": _draw(4, -1),
    "rag/context_input_ids": _draw_rows(90, 2, 9),
    "rag/context_attention_mask": lambda *given: torch.ones_like(_draw_rows(90, 2, 9)(*given)),
    "rag/labels": _draw_above(3, 90, -1, 7),
    "rag/doc_scores": _noise(-1, 2),
    "seggpt/pixel_values": _images(size=8),
    "seggpt/prompt_pixel_values": _images(size=8),
    "seggpt/prompt_masks": _images(size=8),
    "seggpt/labels": _images(size=8),
    **dict.fromkeys(("SpeechT5ForTextToSpeech/labels", "SpeechT5ForSpeechToSpeech/labels"), _noise(-1, 6, 8)),
    **dict.fromkeys(
        ("SpeechT5ForTextToSpeech/speaker_embeddings", "SpeechT5ForSpeechToSpeech/speaker_embeddings"), _noise(-1, 8)
    ),
    "tvp/pixel_values": _noise(-1, 2, 3, 64, 64),
    "tvp/labels": lambda *given: _noise(3, -1)(*given).sigmoid().sort(0, descending=True).values,
    "udop/bbox": lambda *given: _ordered_box(*given) / 60,
    "voxtral_realtime/input_features": lambda _, batch, generator: torch.randn(
        batch["input_ids"].shape[0], 128, 8 * batch["input_ids"].shape[1], generator=generator
    ),
}
