"""What public scripts read: a tiny model of each kind with its tokenizer, rows as files, and a metric."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
import transformers

_WORDS = [f"word{number}" for number in range(90)]
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<|end|>"]
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


def write(folder: Path) -> None:
    """Write all of it; scripts run in this folder."""
    (folder / "evaluate.py").write_text(_METRIC)
    torch.manual_seed(0)
    tokenizer = _tokenizer()
    size = len(tokenizer)
    llama = transformers.LlamaConfig(
        vocab_size=size, num_key_value_heads=2, pad_token_id=0, eos_token_id=5, max_position_embeddings=128, **_SIZES
    )
    bert = transformers.BertConfig(vocab_size=size, max_position_embeddings=128, **_SIZES, **_NO_DROPOUT)
    t5 = transformers.T5Config(
        vocab_size=size, d_model=32, d_kv=8, d_ff=56, num_layers=2, num_heads=4, decoder_start_token_id=0,
        dropout_rate=0.0, eos_token_id=5,
    )  # fmt: skip
    models = {
        "causal": transformers.LlamaForCausalLM(llama),
        "reward": transformers.LlamaForSequenceClassification(
            transformers.LlamaConfig(**llama.to_dict() | {"num_labels": 1})
        ),
        "bert": transformers.BertForMaskedLM(bert),
        "bert-base-cased": transformers.BertForMaskedLM(bert),  # which accelerate's examples name
        "t5": transformers.T5ForConditionalGeneration(t5),
    }
    for name, model in models.items():
        for parameter in model.parameters():  # norms and biases that are neither 1 nor 0
            parameter.data.add_(0.02 * torch.randn_like(parameter))
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    _write_rows(folder)


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
        "translations": lambda: {"translation": {"en": text(), "de": text(3, 6)}},
    }
    for kind, row in kinds.items():
        (folder / kind).mkdir()
        for split, count in (("train", 22), ("test", 7)):
            rows = [row() for _ in range(count)]
            if kind == "marks":  # both labels in each batch
                rows = [each | {"label": bool(at % 2)} for at, each in enumerate(rows)]
            (folder / kind / f"{split}.json").write_text("".join(json.dumps(each) + "\n" for each in rows))
    _write_glue(folder, kinds["classes"])


def _write_glue(folder: Path, row) -> None:
    """Where scripts that load `nyu-mll/glue` look first: a folder of that name."""
    glue = folder / "nyu-mll" / "glue"
    glue.mkdir(parents=True)
    parts = {"train": 70, "validation": 37, "test": 5}
    for part, count in parts.items():
        rows = (row() | {"idx": at} for at in range(count))
        (glue / f"{part}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    files = "".join(f"  - split: {part}\n    path: {part}.jsonl\n" for part in parts)
    (glue / "README.md").write_text(f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{files}---\n")
