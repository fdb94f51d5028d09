"""`booster verify`: equal where the library is right, and the name of the place where it was broken on purpose.

What breaks here first: a field of a configuration that tiny_model.py does not know, or pieces that cannot be
put together, so that a module after the broken one is named.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import transformers

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.cli.verify import to_text
from plugins.hybrid_parallel.distributed.local_ranks import RankFailure, run_on_local_ranks
from plugins.hybrid_parallel.verify import verify as verify_module
from plugins.hybrid_parallel.verify.module_outputs import LinesRun, Output, difference
from plugins.hybrid_parallel.verify.tiny_model import TwinSizes, head_counts, small_config, twin_config
from plugins.hybrid_parallel.verify.verify import Verification, verify
from shardformer.shard_spec import Part, ShardSpec
from zoo_tests.booster.cli.test_commands import outcome
from zoo_tests.harness.environment import environment_of_a_job
from zoo_tests.harness.ranks import under_load
from zoo_tests.hybrid_parallel.cli import verify_faults

_LLAMA = {"hidden_size": 4096, "num_key_value_heads": 8}


def _directory(path: Path, config_class: str, model_class: str | None, **fields: Any) -> str:
    architectures = None if model_class is None else [model_class]
    getattr(transformers, config_class)(architectures=architectures, **fields).save_pretrained(path)
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config_class", "model_class", "fields", "layout", "precision"),
    [
        ("LlamaConfig", "LlamaForCausalLM", _LLAMA, ("--tp", "2", "--pp", "2", "--schedule", "zbv"), "fp64"),
        ("BertConfig", "BertForSequenceClassification", {}, ("--tp", "2", "--sp"), "fp64"),
        ("T5Config", "T5ForConditionalGeneration", {}, ("--cp", "2", "--sp", "all_to_all"), "fp64"),
        ("MixtralConfig", "MixtralForCausalLM", {}, ("--tp", "2"), "fp32"),
        pytest.param("MixtralConfig", "MixtralForCausalLM", {}, ("--ep", "2"), "fp32", marks=pytest.mark.slow),
        pytest.param(
            *("ViTConfig", "ViTForImageClassification", {"num_labels": 5}, ("--dp", "2", "--zero", "0"), "fp64"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.endswith("Config") else "",
)
def test_equal(
    config_class: str,
    model_class: str,
    fields: dict[str, Any],
    layout: tuple[str, ...],
    precision: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    model, file = _directory(tmp_path / "model", config_class, model_class, **fields), tmp_path / "result.json"
    code, out, err = outcome(capsys, "verify", model, *layout, "--json", str(file))
    assert (code, err) == (0, "")
    assert out.splitlines()[2] == "equal"
    result = json.loads(file.read_text())
    assert (result["model"], result["precision"], result["first_difference"]) == (model_class, precision, None)
    losses, gradients, weights = result["compared"]
    assert losses["count"] == 3 and gradients["count"] > 20 and weights["count"] >= gradients["count"]
    assert all(each["value"] < each["allowed"] for each in result["compared"])
    assert f"  {result['lines_not_run'][0]}" in out.splitlines()


def _with_fault(fault: Callable[[], None], config: Any, model_class: str, **layout: Any) -> Verification:
    options = {"tp_size": 1, "pp_size": 1, "dp_size": 1, **layout}
    with mock.patch.object(verify_module, "train_on_rank", partial(verify_faults.train_with, fault)):
        return verify(config, getattr(transformers, model_class), options, timeout_s=under_load(60))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "config", "model_class", "layout", "what", "name"),
    [
        (
            verify_faults.rows_are_not_summed,
            transformers.LlamaConfig(**_LLAMA),
            "LlamaForCausalLM",
            {"tp_size": 2, "pp_size": 2},
            "output",
            "model.layers.0.self_attn.o_proj",
        ),
        (
            verify_faults.one_module_is_off,
            transformers.LlamaConfig(**_LLAMA),
            "LlamaForCausalLM",
            {"tp_size": 2, "pp_size": 2, "pp_style": "interleaved"},
            "output",
            "model.layers.2.mlp.up_proj",
        ),
        pytest.param(
            verify_faults.one_module_is_off,
            transformers.T5Config(),
            "T5ForConditionalGeneration",
            {"tp_size": 2, "enable_sequence_parallelism": True},
            "output",
            "encoder.block.2.layer.1.DenseReluDense.wi",
            marks=pytest.mark.slow,
        ),
        (
            verify_faults.one_head_is_off,
            transformers.GPT2Config(),
            "GPT2LMHeadModel",
            {"tp_size": 2, "dp_size": 2},
            "output",
            "transformer.h.1.attn.c_attn",
        ),
        pytest.param(
            verify_faults.queries_are_off,  # behind experts that get their tokens in another order
            transformers.MixtralConfig(),
            "MixtralForCausalLM",
            {"tp_size": 2, "pp_size": 2},
            "output",
            "model.layers.2.self_attn.q_proj",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            verify_faults.later_calls_are_off,  # of a layer that all four share
            transformers.AlbertConfig(),
            "AlbertForMaskedLM",
            {"tp_size": 2},
            "output",
            "albert.encoder.albert_layer_groups.0.albert_layers.0.ffn",
            marks=pytest.mark.slow,
        ),
        (
            verify_faults.gradients_of_inputs_are_not_summed,
            transformers.LlamaConfig(**_LLAMA),
            "LlamaForCausalLM",
            {"tp_size": 2},
            "gradient",
            "model.norm.weight",  # in front of the head, whose backward pass is the first that is wrong
        ),
        (
            verify_faults.replicas_do_not_meet,
            transformers.BertConfig(),
            "BertForSequenceClassification",
            {"dp_size": 2},
            "gradient",
            "classifier.bias",
        ),
        pytest.param(
            verify_faults.weights_stay,
            transformers.BertConfig(),
            "BertForSequenceClassification",
            {"tp_size": 2},
            "weight",
            "bert.embeddings.word_embeddings.weight",
            marks=pytest.mark.slow,
        ),
        (
            verify_faults.labels_are_not_shifted,
            transformers.LlamaConfig(**_LLAMA),
            "LlamaForCausalLM",
            {"tp_size": 2},
            "loss",
            "",
        ),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_fault_is_found_where_it_is(
    fault: Callable[[], None], config: Any, model_class: str, layout: dict[str, Any], what: str, name: str
) -> None:
    found = _with_fault(fault, config, model_class, **layout)
    first = found.verdict.first
    assert first is not None, to_text(found)
    assert (first.step, first.what, first.name) == (1, what, name), first.text
    assert to_text(found).splitlines()[2] == f"different: step 1, {first.text}"
    assert ("partial sums" in first.text) == (fault is verify_faults.rows_are_not_summed)


def test_a_rank_that_raises_is_a_difference() -> None:
    found = _with_fault(verify_faults.a_rank_raises, transformers.BertConfig(), "BertForMaskedLM", tp_size=2)
    assert "\nfailed: the sharded training does not end: rank " in to_text(found)
    assert "ValueError: planted (verify_faults.py, line " in to_text(found)


@pytest.mark.parametrize(
    ("config_class", "model_class", "options", "sentence"),
    [
        ("LlamaConfig", "LlamaForCausalLM", ["--zero", "4"], "zero_stage=4 is not available; use 0 or 1 or 2"),
        ("BertConfig", "BertForMaskedLM", ["--sp"], "enable_sequence_parallelism=True needs tp_size > 1"),
        ("BertConfig", "BertForMaskedLM", ["--tp", "5"], "tp_size=5 does not divide num_attention_heads=12; use"),
        ("LlamaConfig", None, [], "{model} does not say what it is for; name a head with --head, as CausalLM"),
        ("BertConfig", "BertModel", [], "BertModel has no loss; name a head with --head, as CausalLM, or add"),
        ("BertConfig", None, ["--head", "CausalLMs"], "transformers has no model class 'CausalLMs'; give one"),
        ("ResNetConfig", "ResNetForImageClassification", ["--dp", "2"], "ResNetForImageClassification normalises over"),
        ("BertConfig", "BertForMaskedLM", ["--json", "/nowhere/x"], "/nowhere/x cannot be written, /nowhere is no"),
        ("BertConfig", "BertForMaskedLM", ["--precision", "bf16"], "argument --precision: invalid choice: 'bf16'"),
    ],
)
def test_a_mistake_is_one_sentence(
    config_class: str,
    model_class: str | None,
    options: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    model = _directory(tmp_path, config_class, model_class)
    code, out, err = outcome(capsys, "verify", model, *options)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {sentence.format(model=model)}")
    assert err.count("\n") == 1


# ----- tiny models -----


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp_size", "small"),
    [
        (32, 8, 2, (8, 2)),  # four heads to one of the keys
        (12, 12, 2, (4, 4)),
        (14, 2, 4, (14, 2)),  # copies of the keys' heads, uneven shares
        (64, 1, 2, (4, 1)),
        (6, 6, 4, (6, 6)),
        (64, 8, 8, (64, 8)),
        (96, 8, 8, (64, 8)),
    ],
)
def test_heads_of_a_twin_are_shared_out_like_those_of_the_model(
    heads: int, kv_heads: int, tp_size: int, small: tuple[int, int]
) -> None:
    config = transformers.LlamaConfig(
        hidden_size=8 * heads, num_attention_heads=heads, num_key_value_heads=kv_heads, num_hidden_layers=32
    )
    assert head_counts(small_config(config, TwinSizes.of(config, tp_size, 1))) == small


def test_a_twin_keeps_what_defines_the_architecture() -> None:
    def tiny_model(config: Any, num_stages: int = 2) -> Any:
        return small_config(config, TwinSizes.of(config, 2, num_stages))

    assert tiny_model(transformers.MistralConfig(sliding_window=None)).sliding_window is None
    assert tiny_model(transformers.MistralConfig(sliding_window=4096)).sliding_window == 5
    assert set(tiny_model(transformers.Gemma3TextConfig()).layer_types) == {"sliding_attention", "full_attention"}
    assert set(tiny_model(transformers.JambaConfig()).layers_block_type) == {"mamba", "attention"}
    assert tiny_model(transformers.Gemma3nTextConfig(num_hidden_layers=30)).intermediate_size == [48] * 4
    llama4 = tiny_model(transformers.Llama4TextConfig())
    assert set(llama4.no_rope_layers) == {0, 1} and llama4.num_experts_per_tok == 1
    assert len(llama4.layer_types) == llama4.num_hidden_layers == 4
    assert (
        tiny_model(transformers.GPT2Config(activation_function="relu", tie_word_embeddings=False)).tie_word_embeddings
        is False
    )
    assert tiny_model(transformers.BertConfig(hidden_act="relu", num_labels=7)).num_labels == 7
    assert tiny_model(transformers.LlamaConfig(num_hidden_layers=80), num_stages=8).num_hidden_layers == 8
    assert tiny_model(transformers.DeepseekV3Config(q_lora_rank=None)).q_lora_rank is None
    zamba = tiny_model(transformers.Zamba2Config())  # twice as wide in attention
    assert zamba.attention_hidden_size == 2 * zamba.hidden_size == 64
    assert tiny_model(transformers.MobileViTConfig()).hidden_sizes == [16, 24, 32]  # which 4 heads divide
    images = tiny_model(transformers.Qwen3VLConfig())  # whose defaults are of two sizes
    assert images.vision_config.out_hidden_size == images.text_config.hidden_size


def test_a_twin_has_the_projection_between_parts_of_different_widths() -> None:
    kind = transformers.MusicgenForConditionalGeneration
    text, sound, decoder = transformers.T5Config(), transformers.EncodecConfig(), transformers.MusicgenDecoderConfig()
    for d_model, names in ((text.d_model, ["enc_to_dec_proj"]), (decoder.hidden_size, [])):
        text.d_model = d_model
        config = transformers.MusicgenConfig(text_encoder=text, audio_encoder=sound, decoder=decoder)
        small = twin_config(kind, config, TwinSizes.of(config, 2, 1))
        with torch.device("meta"):
            assert [name for name, _ in kind(small).named_children() if name.startswith("enc_")] == names


# ----- outputs -----


def _pieces(whole: torch.Tensor, spec: ShardSpec | None, *parts: torch.Tensor) -> float | None:
    """The difference of a module's whole output to those of tensor-parallel ranks, in two micro-batches."""
    half = len(whole) // 2
    ranks = [Output("m", "Linear", spec, {0: part[:half].numpy(), 1: part[half:].numpy()}) for part in parts]
    return difference(Output("m", "Linear", None, {0: whole.numpy()}), [ranks], mask=None)


def test_outputs_are_put_together() -> None:
    whole = torch.randn(4, 6, 12)
    left, right = whole.chunk(2, -1)
    assert _pieces(whole, None, whole, whole) == 0
    assert _pieces(whole, None, left, right) == 0  # features
    assert _pieces(whole, None, *whole.chunk(2, 1)) == 0  # a sequence
    assert _pieces(whole, None, left, left) > 0.1
    assert _pieces(whole, None, whole, whole + 1) > 0.1  # one rank alone
    assert _pieces(whole, None, right[..., :2], left) is None  # nothing fits
    padded = torch.nn.functional.pad(right, (0, 2))
    assert _pieces(whole, None, torch.cat([left, right[..., :1]], -1), padded[..., 1:]) == 0  # a vocabulary
    query, key = whole.split([8, 4], -1)
    fused = ShardSpec((12, 5), 0, (Part(8), Part(4)), 0, 2)
    ranks = [torch.cat([query.chunk(2, -1)[rank], key.chunk(2, -1)[rank]], -1) for rank in (0, 1)]
    assert _pieces(whole, fused, *ranks) == 0
    assert _pieces(whole, fused, *reversed(ranks)) > 0.1


class _Branching(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() < 0:
            x = -x
            x = x + 1
        return x


def test_lines_that_a_batch_does_not_run() -> None:
    with LinesRun(_Branching) as lines:
        _Branching()(torch.ones(3))
    first = _Branching.forward.__code__.co_firstlineno
    assert lines.others() == [f"test_verify.py, _Branching.forward: {first + 2}-{first + 3}"]
    with lines:
        _Branching()(-torch.ones(3))
    assert lines.others() == []


# ----- ranks -----


@pytest.mark.slow
def test_a_class_without_a_loss_trains_its_outputs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = _directory(tmp_path, "BertConfig", "BertModel")
    code, out, err = outcome(capsys, "verify", model, "--criterion", "--tp", "2", "--pp", "2")
    assert code == 0 and "\nequal\n" in out, out + err


@pytest.mark.slow
def test_a_rank_that_does_not_answer_is_given_up() -> None:
    with pytest.raises(ConfigurationError):  # the server that forks ranks has imported the libraries after that
        run_on_local_ranks(verify_faults.a_rank_is_mistaken, 2, timeout_s=under_load(90))
    start = time.monotonic()
    with pytest.raises(RankFailure, match="ranks 0, 1 of 2 did not answer within 2 s"):
        run_on_local_ranks(verify_faults.a_rank_sleeps, 2, timeout_s=2.0)
    assert time.monotonic() - start < under_load(10)


def test_a_mistake_on_a_rank_is_the_callers() -> None:
    with pytest.raises(ConfigurationError, match="planted mistake"):
        run_on_local_ranks(verify_faults.a_rank_is_mistaken, 2, timeout_s=under_load(30))


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.slow, id="SIGINT"),
        pytest.param(signal.SIGKILL, marks=pytest.mark.campaign, id="SIGKILL"),
    ],
)
def test_no_rank_outlives_the_command(number: signal.Signals, tmp_path: Path) -> None:
    script = (
        "from plugins.hybrid_parallel.distributed.local_ranks import run_on_local_ranks\n"
        "from zoo_tests.hybrid_parallel.cli.verify_faults import leave_pid_and_sleep\n"
        f"run_on_local_ranks(leave_pid_and_sleep, 2, {str(tmp_path)!r}, timeout_s=60.0)"
    )
    command = [sys.executable, "-c", script]
    process = subprocess.Popen(
        command,
        env=environment_of_a_job(),
        stderr=subprocess.PIPE,
        start_new_session=True,
        # A suite that a shell started in the background has Ctrl-C ignored, and so would this process.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        _wait_for(lambda: len(list(tmp_path.iterdir())) == 2)
        pids = [int(file.name) for file in tmp_path.iterdir()]
        server = Path(f"/proc/{psutil.Process(pids[0]).ppid()}/status").read_text()
        assert int(re.search(r"SigBlk:\s+(\w+)", server)[1], 16) & 1 << signal.SIGINT - 1, "its imports would end"
        (os.killpg if number is signal.SIGINT else os.kill)(process.pid, number)
        _wait_for(lambda: not any(psutil.pid_exists(pid) for pid in pids))
        said = process.communicate(timeout=under_load(20))[1].decode()
        assert said.count("Traceback") <= 1, said  # the script's own; ranks say nothing
    finally:
        process.kill()


def _wait_for(what: Callable[[], bool], limit_s: float = 90.0) -> None:
    limit = time.monotonic() + under_load(limit_s)
    while not what():
        assert time.monotonic() < limit, "it did not happen in time"
        time.sleep(0.05)


def test_mistakes_about_plans_are_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model, broken = _directory(tmp_path / "model", "GPT2Config", "GPT2LMHeadModel"), tmp_path / "plan.json"
    broken.write_text('{"styles": {"attn.c_attn": "columns"}}')
    told = {
        ("--propose", "--plan", str(broken)): f"--propose derives a plan, and --plan {broken} gives one; use one",
        ("--output", "plan.json"): "--output plan.json needs a plan to write; add --propose",
        ("--propose", "--output", str(tmp_path)): f"--output {tmp_path} cannot be written; name a file in an existing",
        ("--plan", str(broken)): "style 'columns' of 'attn.c_attn' is not known; use one of",
        ("--plan", "/nowhere.json"): "/nowhere.json holds no plan",
    }
    for arguments, message in told.items():
        code, _, err = outcome(capsys, "verify", model, *arguments)
        assert (code, err.count("\n")) == (2, 1) and message in err, err


@pytest.mark.slow
def test_a_directory_with_code_gets_a_plan_and_a_verdict(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shutil.copytree(Path(verify_faults.__file__).parent / "remote_model", tmp_path / "model")
    model, file = str(tmp_path / "model"), tmp_path / "plan.json"
    code, _, err = outcome(capsys, "verify", model, "--propose")
    assert code == 2 and f"{model} has code of its own, which is not run unasked" in err
    code, out, err = outcome(capsys, "verify", model, "--trust-remote-code", "--propose", "--output", str(file))
    assert code == 0 and "divide 9" in out and "\nequal\n" in out, out + err
    plan = json.loads(file.read_text())
    assert plan["local"] == {"blocks.*.mixer": ["heads"]} and plan["splits_sequence"]
    file.write_text(file.read_text().replace('"heads"', '"width"'))
    code, out, err = outcome(capsys, "verify", model, "--trust-remote-code", "--plan", str(file), "--tp", "2")
    assert code == 1, "an edit that is wrong"
