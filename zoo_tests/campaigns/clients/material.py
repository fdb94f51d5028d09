"""What public scripts read: a tiny model of each kind with its tokenizer, rows and images as files, and a metric."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from zoo_tests.campaigns.clients.sights_and_sounds import (
    NO_DROPOUT,
    PIXELS,
    PROCESSORS,
    RATE,
    SIZES,
    models_of_sights_and_sounds,
    write_sights_and_sounds,
)

_WORDS = [f"word{number}" for number in range(90)]
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<|end|>"]
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
# A name that scripts of transformers use, and accelerate has no more.
_NAMES = '''"""accelerate's name of TPUs."""
import sys

class Names:
    def find_spec(self, *names):
        kind = getattr(sys.modules.get("accelerate.utils.dataclasses"), "DistributedType", None)
        if kind is not None and not hasattr(kind, "TPU"):
            type.__setattr__(kind, "TPU", kind.XLA)

sys.meta_path.insert(0, Names())
'''
_PROCESSOR = {
    "size": {"height": 16, "width": 16}, "do_resize": True, "do_rescale": True, "do_normalize": True,
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip


def write(folder: Path) -> None:
    """Write all of it; scripts run in this folder."""
    (folder / "evaluate.py").write_text(_METRIC)
    (folder / "nltk.py").write_text(_SENTENCES)
    (folder / "sitecustomize.py").write_text(_NAMES)
    torch.manual_seed(0)
    tokenizer = _tokenizer()
    models = _models(len(tokenizer)) | models_of_sights_and_sounds(len(tokenizer))
    for name, model in models.items():
        for parameter in model.parameters():  # norms and biases that are neither 1 nor 0
            parameter.data.add_(0.02 * torch.randn_like(parameter))
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    for name, kind in (("vit", "ViT"), ("mae", "ViT"), ("clip", "CLIP"), *PROCESSORS):
        processor = _PROCESSOR | {"image_processor_type": f"{kind}ImageProcessor"}
        (folder / name / "preprocessor_config.json").write_text(json.dumps(processor))
    sound = {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "sampling_rate": RATE}
    (folder / "wav2vec2" / "preprocessor_config.json").write_text(json.dumps(sound))
    _write_rows(folder)
    write_sights_and_sounds(folder)


def _models(size: int) -> dict[str, transformers.PreTrainedModel]:
    """A tiny model of each kind, for so many tokens, by the name of its folder."""
    llama = transformers.LlamaConfig(
        vocab_size=size, num_key_value_heads=2, pad_token_id=0, eos_token_id=5, max_position_embeddings=128, **SIZES
    )
    bert = transformers.BertConfig(vocab_size=size, max_position_embeddings=128, **SIZES, **NO_DROPOUT)
    t5 = transformers.T5Config(
        vocab_size=size, d_model=32, d_kv=8, d_ff=56, num_layers=2, num_heads=4, decoder_start_token_id=0,
        dropout_rate=0.0, eos_token_id=5,
    )  # fmt: skip
    xlnet = transformers.XLNetConfig(vocab_size=size, d_model=32, n_layer=2, n_head=4, d_inner=56, dropout=0.0)
    vit = transformers.ViTConfig(**PIXELS, encoder_stride=4, **SIZES, **NO_DROPOUT)
    mae = transformers.ViTMAEConfig(
        **PIXELS, **SIZES, **NO_DROPOUT, decoder_hidden_size=24, decoder_intermediate_size=40,
        decoder_num_attention_heads=4, decoder_num_hidden_layers=2,
    )  # fmt: skip
    text = {"vocab_size": size, "eos_token_id": 5, "bos_token_id": 2, "max_position_embeddings": 128}
    clip = transformers.CLIPConfig(text_config=text | SIZES, vision_config=PIXELS | SIZES, projection_dim=24)
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
        "teacher": transformers.LlamaForCausalLM(llama),  # one that is the student leaves gradients of rounding alone
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
    _write_hub(folder / "nyu-mll" / "glue", "mrpc", lambda: kinds["classes"]() | {"idx": draw.randrange(99)})
    _write_hub(folder / "xnli", "en", lambda: {"premise": text(), "hypothesis": text(), "label": 1})
    (folder / "data").mkdir()
    (folder / "data" / "wikitext-2.txt").write_text("\n".join(text() for _ in range(14_500)))  # of Lightning's examples


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
