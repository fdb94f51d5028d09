"""The fine-tuning script: to its end, taken up again under another layout, and on bad input.

Its ranks are those of the pool; `.ci/run` starts it by its command. If this fails and the parity tests pass, the fault
is in `examples/bert`, not in the engine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from finetune import parse_arguments
from metrics import Counts
from model import load_model
from report import prepare_directory
from torch.utils.data import DataLoader

from booster.errors import ConfigurationError
from zoo_tests.examples.scripts import run_on_pool, run_script
from zoo_tests.harness.ranks import RankError

_FAST = ("--model", "tiny", "--batch-size", 8, "--max-length", 24)


@pytest.mark.slow
def test_finetune_to_a_directory_and_resume_under_another_layout(mrpc_directory: Path, tmp_path: Path) -> None:
    output, plot = tmp_path / "out", tmp_path / "plots" / "loss.png"
    common = (*_FAST, "--task", "mrpc", "--data-dir", mrpc_directory, "--output", output, "--plot", plot)
    printed = run_on_pool("finetune", *common, "--tp", 2, ranks=2)
    for word in ("accuracy", "F1", "loss", "samples/s", "peak memory, rank 1"):
        assert word in printed[0].out
    assert "epoch 1/1:   0%" in printed[0].err
    assert (printed[1].out, printed[1].err) == ("", ""), "the table and the progress bar belong to one rank"
    assert plot.read_bytes().startswith(b"\x89PNG")
    first = json.loads((output / "metrics.json").read_text())
    assert first["samples"] == 13
    assert first["layout"] == {"tp": 2, "pp": 1, "dp": 1, "zero": 1}
    assert len(first["train_losses"]) == 3
    assert _metrics_of_saved(output, mrpc_directory) == pytest.approx(_metrics_in(first), abs=1e-5)

    run_on_pool("finetune", *common, "--epochs", 2, "--resume", ranks=2)
    second = json.loads((output / "metrics.json").read_text())
    # Global batches of 16 now: two steps more, after those of the first run.
    assert second["layout"] == {"tp": 1, "pp": 1, "dp": 2, "zero": 1}
    assert second["train_losses"][:3] == first["train_losses"]
    assert len(second["train_losses"]) == 5
    assert second["samples"] == 13
    assert _metrics_of_saved(output, mrpc_directory) == pytest.approx(_metrics_in(second), abs=1e-5)


def _metrics_in(figures: dict[str, Any]) -> list[float]:
    return [figures["accuracy"], figures["f1"], figures["loss"]]


def _metrics_of_saved(output: Path, data: Path) -> list[float]:
    """What plain transformers computes from the directory that the run left."""
    import torch
    from data import PairDataset, padding_collate
    from mrpc import mrpc_pairs
    from transformers import BertForSequenceClassification, BertTokenizerFast

    model, info = BertForSequenceClassification.from_pretrained(output, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    tokenizer = BertTokenizerFast.from_pretrained(output)
    dataset = PairDataset(mrpc_pairs(data)[1], tokenizer, max_length=24)
    batch = next(iter(DataLoader(dataset, batch_size=13, collate_fn=padding_collate(tokenizer))))
    counts = Counts()
    with torch.no_grad():
        counts.add(model.eval()(**batch).logits, batch["labels"])
    metrics = counts.metrics()
    return [metrics.accuracy, metrics.f1, metrics.loss]


def test_models_and_directories_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match="--model /nowhere is not a directory; give one, a hub name or 'minilm'"
    ):
        load_model("/nowhere", seed=0)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match=f"--model {tmp_path} cannot be loaded"):
        load_model(str(tmp_path), seed=0)
    with pytest.raises(ConfigurationError, match="--output /dev/null/out cannot be written to"):
        prepare_directory(Path("/dev/null/out"), "--output")


@pytest.mark.slow
def test_a_malformed_line_ends_all_ranks_and_loses_nothing(mrpc_directory: Path, tmp_path: Path) -> None:
    path = mrpc_directory / "msr_paraphrase_train.txt"
    path.write_text(path.read_text() + "1\t7\t8\tonly one sentence\n")
    kept = tmp_path / "out" / "model.safetensors"
    kept.parent.mkdir()
    kept.write_bytes(b"earlier work")
    arguments = (*_FAST, "--task", "mrpc", "--data-dir", mrpc_directory, "--output", kept.parent, "--tp", 2)
    with pytest.raises(RankError) as raised:
        run_on_pool("finetune", *arguments, ranks=2)
    sentence = f"ConfigurationError: {path}, line 23: 4 fields; expected 5 tab-separated fields"
    assert str(raised.value).count(sentence) == 2
    assert kept.read_bytes() == b"earlier work"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--task", "mrpc", "--data-dir", "/nowhere"), "--data-dir /nowhere is not a directory"),
        (("--resume", "--output", "{tmp}"), "--resume finds no checkpoint in {tmp}/checkpoints"),
    ],
)
def test_a_users_mistake_is_one_sentence(arguments: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    filled = [argument.format(tmp=tmp_path) for argument in ("--model", "tiny", "--output", "{tmp}", *arguments)]
    run = run_script("finetune.py", *filled)
    assert run.returncode != 0
    _assert_one_sentence(run.stderr, sentence.format(tmp=tmp_path))


def test_numbers_of_epochs_are_positive(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--epochs", "0"])
    _assert_one_sentence(capsys.readouterr().err, "0 is not an integer of at least 1")


def _assert_one_sentence(stderr: str, sentence: str) -> None:
    # bitsandbytes says so when something imports it on a CPU.
    theirs = "Failed to load CPU gemm_4bit_forward"
    lines = [line for line in stderr.splitlines() if line.strip() and not line.startswith(theirs)]
    assert len(lines) == 1, stderr
    assert sentence in lines[0]
