"""Commands on a machine of four simulated GPUs, in processes of their own: rank n of a job trains on `cuda:n`.

What breaks here first: a process that asks for the device before the library under test has brought it, see
`site/sitecustomize.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, BertForSequenceClassification, LlamaConfig

from zoo_tests.campaigns.faults.campaign import LAYOUTS, NAMED_WITHIN_S, Trial
from zoo_tests.harness.environment import REPOSITORY, environment_of_a_job
from zoo_tests.harness.ranks import DEVICE_VARIABLE, under_load

_LIMIT_S = 300


@pytest.fixture(autouse=True)
def simulated_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let jobs of these tests run on it."""
    monkeypatch.setenv(DEVICE_VARIABLE, "simcuda")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, vocab_size=500, max_position_embeddings=128, architectures=["LlamaForCausalLM"])
    config.save_pretrained(path)
    return str(path)


def booster(*arguments: str, module: str = "booster") -> str:
    """The output of a `booster` command that ends well."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=environment_of_a_job(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=under_load(_LIMIT_S),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_verify(model: str, tmp_path: Path) -> None:
    """It compares on CPUs, also where there are GPUs."""
    file = tmp_path / "result.json"
    out = booster("verify", model, "--tp", "2", "--json", str(file))
    assert out.splitlines()[2] == "equal", out
    assert json.loads(file.read_text())["first_difference"] is None


def test_doctor(tmp_path: Path) -> None:
    file = tmp_path / "links.json"
    out = booster("doctor", "--nproc-per-node", "2", "--tp", "2", "--output", str(file))
    assert "simulated CUDA device" in out and "Links between 2 ranks" in out
    assert json.loads(file.read_text())["axes"]["tp"]["latency_s"] > 0


@pytest.mark.slow
def test_plan_measures_the_gpus(model: str) -> None:
    sizes = ("--devices", "2", "--global-batch", "4", "--sequence-length", "32", "--precision", "fp32", "--max-tp", "2")
    out = booster("plan", model, *sizes, "--device", "this-machine", module="zoo_tests.simcuda.small_plan")
    assert "on 2 x this-machine" in out and "layouts fit" in out
    assert "measured on cuda:0" in out and "measured on cuda:1" in out


@pytest.mark.slow
def test_bert_example(tmp_path: Path) -> None:
    """With its own default precision, which is bf16 on GPUs."""
    script = REPOSITORY / "examples" / "bert" / "finetune.py"
    sizes = ("--model", "tiny", "--batch-size", "8", "--max-length", "24", "--limit", "21", "--eval-limit", "13")
    booster("run", "--nproc-per-node", "2", str(script), *sizes, "--tp", "2", "--output", str(tmp_path))
    figures = json.loads((tmp_path / "metrics.json").read_text())
    assert figures["samples"] == 13 and len(figures["train_losses"]) == 3
    assert all(0 < peak < 100 for peak in figures["peak_mib"]), "of the GPUs, not of the processes"
    _, info = BertForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert AutoConfig.from_pretrained(tmp_path).dtype == torch.bfloat16


@pytest.mark.slow
def test_ranks_that_hang_in_a_collective_are_named() -> None:
    trial = Trial("skipping", "step", 3, LAYOUTS[0])
    outcome = trial.run()
    assert trial.rank_is_named(outcome), outcome.err
    assert trial.operation_is_named(outcome), outcome.err
    assert len(outcome.lines) == 1 and outcome.code != 0, outcome.err
    assert outcome.named_s < 2 * NAMED_WITHIN_S  # of which 6 pass until a wait for a GPU counts; others use the cores
