"""What public scripts read: a tiny model of each kind with its tokenizer, rows and images as files, and a metric."""

from __future__ import annotations

import io
import json
import random
import wave
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

_WORDS = [f"word{number}" for number in range(90)]
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<|end|>"]
_RATE = 4000  # samples of a second of sound
_SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 56}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# `evaluate` fetches its metrics from the network; one number stands for each of them.
_METRIC = '''"""A metric: the share of predictions that are right."""

def load(*names, **options):
    return Metric()

class Metric:
    def __init__(self):
        self.pairs = []

    def add_batch(self, predictions, references):
        self.pairs += zip(_flat(predictions), _flat(references))

    def compute(self, predictions=(), references=(), **options):
        pairs, self.pairs = [*self.pairs, *zip(_flat(predictions), _flat(references))], []
        share = sum(one == other for one, other in pairs) / max(1, len(pairs))
        names = ("accuracy", "f1", "score", "exact_match", "overall_precision", "overall_recall", "overall_f1")
        return dict.fromkeys((*names, "overall_accuracy"), share)

def _flat(values):
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, dict):
        return [str(values.get("prediction_text", values.get("answers")))]
    return [each for value in values for each in _flat(value)] if isinstance(values, (list, tuple)) else [values]
'''

# `nltk` fetches what splits sentences.
_SENTENCES = '''"""Sentences of a text."""
from types import SimpleNamespace

data = SimpleNamespace(find=lambda name: name)

def sent_tokenize(text):
    return text.split(". ")
'''
# Which draws from generators that no script can seed.
_AUGMENTATIONS = '''"""Augmentations that leave an image as it is."""
import torch

class Same:
    def __init__(self, *names, **options):
        pass

    def __call__(self, **sample):
        return sample

def __getattr__(name):
    return Same

class Compose:
    def __init__(self, transforms, *names, **options):
        self.transforms = transforms

    def __call__(self, **sample):
        for each in self.transforms:
            sample = each(**sample)
        return sample

class ToTensorV2(Same):
    def __call__(self, image, mask):
        return {"image": torch.tensor(image / 255.0).permute(2, 0, 1), "mask": torch.tensor(mask)}
'''
_PIXELS = {"image_size": 16, "patch_size": 4}
_PROCESSOR = {
    "size": {"height": 16, "width": 16}, "do_resize": True, "do_rescale": True, "do_normalize": True,
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip


def write(folder: Path) -> None:
    """Write all of it; scripts run in this folder."""
    (folder / "evaluate.py").write_text(_METRIC)
    (folder / "nltk.py").write_text(_SENTENCES)
    (folder / "albumentations").mkdir()
    (folder / "albumentations" / "__init__.py").write_text(_AUGMENTATIONS)
    (folder / "albumentations" / "pytorch.py").write_text("from albumentations import ToTensorV2")
    torch.manual_seed(0)
    tokenizer = _tokenizer()
    models = _models(len(tokenizer))
    for name, model in models.items():
        for parameter in model.parameters():  # norms and biases that are neither 1 nor 0
            parameter.data.add_(0.02 * torch.randn_like(parameter))
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    processors = {
        name: _PROCESSOR | {"image_processor_type": f"{kind}ImageProcessor"}
        for name, kind in (
            *(("vit", "ViT"), ("mae", "ViT"), ("clip", "CLIP"), ("segformer", "Segformer")),
            *(("yolos", "Yolos"), ("maskformer", "MaskFormer")),
        )
    }
    processors["wav2vec2"] = {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "sampling_rate": _RATE}
    processors["whisper"] = {
        "feature_extractor_type": "WhisperFeatureExtractor", "sampling_rate": 16000, "feature_size": 16,
        "chunk_length": 1, "n_fft": 400, "hop_length": 160, "processor_class": "WhisperProcessor",
    }  # fmt: skip
    for name, processor in processors.items():
        (folder / name / "preprocessor_config.json").write_text(json.dumps(processor))
    _write_rows(folder)


def _models(size: int) -> dict[str, transformers.PreTrainedModel]:
    """A tiny model of each kind, for so many tokens, by the name of its folder."""
    llama = transformers.LlamaConfig(
        vocab_size=size, num_key_value_heads=2, pad_token_id=0, eos_token_id=5, max_position_embeddings=128, **_SIZES
    )
    bert = transformers.BertConfig(vocab_size=size, max_position_embeddings=128, **_SIZES, **_NO_DROPOUT)
    t5 = transformers.T5Config(
        vocab_size=size, d_model=32, d_kv=8, d_ff=56, num_layers=2, num_heads=4, decoder_start_token_id=0,
        dropout_rate=0.0, eos_token_id=5,
    )  # fmt: skip
    xlnet = transformers.XLNetConfig(vocab_size=size, d_model=32, n_layer=2, n_head=4, d_inner=56, dropout=0.0)
    vit = transformers.ViTConfig(**_PIXELS, encoder_stride=4, **_SIZES, **_NO_DROPOUT)
    mae = transformers.ViTMAEConfig(
        **_PIXELS, **_SIZES, **_NO_DROPOUT, decoder_hidden_size=24, decoder_intermediate_size=40,
        decoder_num_attention_heads=4, decoder_num_hidden_layers=2,
    )  # fmt: skip
    text = {"vocab_size": size, "eos_token_id": 5, "bos_token_id": 2, "max_position_embeddings": 128}
    speech = transformers.Wav2Vec2Config(
        vocab_size=size, **_SIZES, conv_dim=(16, 16), conv_kernel=(10, 3), conv_stride=(5, 2),
        num_feat_extract_layers=2, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, mask_time_prob=0.0,
        layerdrop=0.0, hidden_dropout=0.0, attention_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0,
        activation_dropout=0.0,
        do_stable_layer_norm=True, feat_extract_norm="layer", num_codevectors_per_group=8, codevector_dim=16,
        proj_codevector_dim=16,
    )  # fmt: skip
    whisper = transformers.WhisperConfig(
        vocab_size=size, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=56, decoder_ffn_dim=56, num_mel_bins=16, max_source_positions=50,
        max_target_positions=64, pad_token_id=0, bos_token_id=2, eos_token_id=5, decoder_start_token_id=2,
        suppress_tokens=None, begin_suppress_tokens=None, dropout=0.0,
    )  # fmt: skip
    yolos = transformers.YolosConfig(**_SIZES, **_NO_DROPOUT, image_size=[16, 16], patch_size=4, num_detection_tokens=6)
    swin = transformers.SwinConfig(
        **_PIXELS, embed_dim=16, depths=[1, 1, 1, 1], num_heads=[2, 2, 2, 2], window_size=2, drop_path_rate=0.0,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    decoder = transformers.DetrConfig(
        d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=56, decoder_ffn_dim=56, num_queries=6, dropout=0.0,
    )  # fmt: skip
    maskformer = transformers.MaskFormerConfig(
        backbone_config=swin, decoder_config=decoder, fpn_feature_size=32, mask_feature_size=32
    )
    segformer = transformers.SegformerConfig(
        depths=[1, 1, 1, 1], hidden_sizes=[8, 16, 16, 32], num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=16,
        drop_path_rate=0.0, classifier_dropout_prob=0.0, **_NO_DROPOUT,
    )  # fmt: skip
    clip = transformers.CLIPConfig(text_config=text | _SIZES, vision_config=_PIXELS | _SIZES, projection_dim=24)
    return {
        "causal": transformers.LlamaForCausalLM(llama),
        "reward": transformers.LlamaForSequenceClassification(
            transformers.LlamaConfig(**llama.to_dict() | {"num_labels": 1})
        ),
        "bert": transformers.BertForMaskedLM(bert),
        "bert-base-cased": transformers.BertForMaskedLM(bert),  # which accelerate's examples name
        "hf-internal-testing/mrpc-bert-base-cased": transformers.BertForSequenceClassification(bert),
        "t5": transformers.T5ForConditionalGeneration(t5),
        "xlnet": transformers.XLNetLMHeadModel(xlnet),
        "vit": transformers.ViTForMaskedImageModeling(vit),
        "mae": transformers.ViTMAEForPreTraining(mae),
        "clip": transformers.CLIPModel(clip),
        "wav2vec2": transformers.Wav2Vec2ForCTC(speech),
        "whisper": transformers.WhisperForConditionalGeneration(whisper),
        "yolos": transformers.YolosForObjectDetection(yolos),
        "maskformer": transformers.MaskFormerForInstanceSegmentation(maskformer),
        "segformer": transformers.SegformerForSemanticSegmentation(segformer),
    }


def _tokenizer() -> transformers.PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    inner = Tokenizer(models.WordLevel({word: at for at, word in enumerate(_SPECIAL + _WORDS)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", eos_token="<|end|>", model_max_length=128,
    )  # fmt: skip


def _write_rows(folder: Path) -> None:
    draw = random.Random(7)

    def text(least: int = 4, most: int = 14) -> str:
        return " ".join(draw.choices(_WORDS, k=draw.randint(least, most)))

    def context() -> dict:
        words = draw.choices(_WORDS, k=20)
        answer = {"text": [words[7]], "answer_start": [len(" ".join(words[:7])) + 1]}
        return {"id": str(draw.random()), "context": " ".join(words), "question": text(3, 6), "answers": answer}

    kinds = {
        "texts": lambda: {"text": text()},
        "pairs": lambda: {"prompt": text(), "chosen": text(), "rejected": text()},
        "marks": lambda: {"prompt": text(), "completion": text(), "label": draw.random() < 0.5},
        "answers": lambda: {"chosen": text(), "rejected": text()},
        "classes": lambda: {"sentence1": text(), "sentence2": text(), "label": draw.randrange(2)},
        "tags": lambda: {"tokens": (words := text().split()), "ner_tags": [f"B-{len(word) % 2}" for word in words]},
        "questions": context,
        "summaries": lambda: {"text": text(), "summary": text(2, 5)},
        "choices": lambda: (
            {"sent1": text(), "sent2": text(1, 2), "label": draw.randrange(4)}
            | {f"ending{number}": text(2, 5) for number in range(4)}
        ),
        "tasks": lambda: {"instruction": text(), "output": text()},
        "prompts": lambda: {"prompt": text()},
        "translations": lambda: {"translation": {"en": text(), "de": text(3, 6)}},
    }
    for kind, row in kinds.items():
        (folder / kind).mkdir()
        for split, count in (("train", 22), ("test", 7)):
            rows = [row() for _ in range(count)]
            if kind == "marks":  # both labels in each batch
                rows = [each | {"label": bool(at % 2)} for at, each in enumerate(rows)]
            lines = "".join(json.dumps(each) + "\n" for each in rows)
            (folder / kind / f"{split}.json").write_text(json.dumps({"data": rows}) if kind == "questions" else lines)
    _write_images(folder, text)
    _write_sights_and_sounds(folder)
    _write_hub(folder / "nyu-mll" / "glue", "mrpc", lambda: kinds["classes"]() | {"idx": draw.randrange(99)})
    _write_hub(folder / "facebook" / "xnli", "en", lambda: {"premise": text(), "hypothesis": text(), "label": 1})
    (folder / "data").mkdir()
    (folder / "data" / "wikitext-2.txt").write_text("\n".join(text() for _ in range(490)))  # of Lightning's examples


def _write_images(folder: Path, text: Callable[[], str]) -> None:
    """Small images in a folder for each class, and rows of captions."""
    from PIL import Image

    draw = torch.Generator().manual_seed(7)
    (folder / "captions").mkdir()
    for split, count in (("train", 22), ("test", 7)):
        rows = []
        for at in range(count):
            file = folder / "images" / split / "ab"[at % 2] / f"{at}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(torch.randint(256, (20, 20, 3), dtype=torch.uint8, generator=draw).numpy()).save(file)
            rows.append(json.dumps({"image_path": str(file), "caption": text()}) + "\n")
        (folder / "captions" / f"{split}.json").write_text("".join(rows))
    (folder / "cifar10").symlink_to(folder / "images")  # the data set that a script names by default


def _write_sights_and_sounds(folder: Path) -> None:
    """Data sets of sounds, boxes and masks, as the hub has them."""
    import datasets
    from PIL import Image

    draw = torch.Generator().manual_seed(7)

    def image() -> Image.Image:
        return Image.fromarray(torch.randint(256, (16, 16, 3), dtype=torch.uint8, generator=draw).numpy())

    def sound(seconds: float) -> dict:
        with io.BytesIO() as file, wave.open(file, "wb") as out:
            out.setparams((1, 2, _RATE, 0, "NONE", ""))
            samples = torch.randn(int(seconds * _RATE), generator=draw) * 4000
            out.writeframes(samples.to(torch.int16).numpy().tobytes())
            return {"bytes": file.getvalue(), "path": None}

    def masks(at: int) -> Image.Image:
        halves = torch.zeros(16, 16, 3, dtype=torch.uint8)
        halves[at % 9 + 3 :, :, :2] = 1
        halves[:, 9:, :2] = 2
        return Image.fromarray(halves.numpy())

    names = datasets.ClassLabel(names=["a", "b", "c"])
    kinds: dict[str, tuple[Callable[[int], dict], dict]] = {
        "sounds": (
            lambda at: {"audio": sound(0.2 + 0.01 * (at % 7)), "label": at % 3, "text": _WORDS[at]},
            {
                "audio": {"bytes": datasets.Value("binary"), "path": datasets.Value("string")},
                "label": names, "text": datasets.Value("string"),
            },
        ),
        "boxes": (
            lambda at: {
                "image_id": at, "image": image(),
                "objects": {"bbox": [[1.0, 2.0, 4.0 + at % 5, 6.0]], "category": [at % 3], "area": [24.0]},
            },
            {
                "image_id": datasets.Value("int64"), "image": datasets.Image(),
                "objects": {
                    "bbox": datasets.List(datasets.List(datasets.Value("float32"))), "category": datasets.List(names),
                    "area": datasets.List(datasets.Value("float32")),
                },
            },
        ),
        "masks": (
            lambda at: {"image": image(), "annotation": masks(at), "semantic_class_to_id": {"a": 0, "b": 1, "c": 2}},
            {
                "image": datasets.Image(), "annotation": datasets.Image(),
                "semantic_class_to_id": {name: datasets.Value("int64") for name in "abc"},
            },
        ),
        "segments": (
            lambda at: {"image": image(), "label": masks(at).getchannel(0)},
            {"image": datasets.Image(), "label": datasets.Image()},
        ),
    }  # fmt: skip
    for kind, (row, features) in kinds.items():
        for split, count in (("train", 22), ("validation", 7)):
            rows = datasets.Dataset.from_list([row(at) for at in range(count)], datasets.Features(features))
            if kind == "sounds":  # encoded above: without a library of codecs
                rows = rows.cast_column("audio", datasets.Audio(sampling_rate=_RATE))
            (folder / kind).mkdir(exist_ok=True)
            rows.to_parquet(folder / kind / f"{split}.parquet")
    labels = folder / "cache" / "hub" / "datasets--segments" / "snapshots" / ("0" * 40)  # what a hub has given before
    labels.mkdir(parents=True)
    (labels / "id2label.json").write_text(json.dumps({0: "a", 1: "b", 2: "c"}))
    (labels.parents[1] / "refs").mkdir()
    (labels.parents[1] / "refs" / "main").write_text("0" * 40)


def _write_hub(place: Path, name: str, row: Callable[[], dict]) -> None:
    """Where scripts that load a data set by its name look first: a folder of that name."""
    place.mkdir(parents=True)
    parts = {"train": 70, "validation": 37, "test": 5}
    for part, count in parts.items():
        (place / f"{part}.jsonl").write_text("".join(json.dumps(row()) + "\n" for _ in range(count)))
    files = "".join(f"  - split: {part}\n    path: {part}.jsonl\n" for part in parts)
    head = f"configs:\n- config_name: {name}\n  data_files:\n{files}dataset_info:\n- config_name: {name}\n  features:\n"
    kinds = {"label": {"class_label": {"names": {"0": "no", "1": "yes"}}}, "idx": "int32"}
    features = "".join(f"  - name: {key}\n    dtype: {json.dumps(kinds.get(key, 'string'))}\n" for key in row())
    (place / "README.md").write_text(f"---\n{head}{features}---\n")
