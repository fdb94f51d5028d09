"""Ray Train on a real local cluster: the example trains under tp, loses a worker, and goes on from its checkpoint.

What breaks here first: what Ray accepts as a checkpoint, or a process group of Ray's that we replace.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from zoo_tests.harness.environment import REPOSITORY, environment_of_a_job
from zoo_tests.harness.ranks import under_load

EXAMPLE = REPOSITORY / "examples" / "clusters" / "ray_train.py"
DRIVER = Path(__file__).with_name("ray_driver.py")
STEPS, ROWS = 5, 4
_LIMIT_S = 900  # 80 s alone: Ray starts each worker twice


def plain_losses() -> list[float]:
    """The example's training in one process, without Ray and this library."""
    torch.manual_seed(7)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    rows = torch.stack([torch.randint(128, (16,), generator=generator) for _ in range(STEPS * ROWS)])
    losses = []
    for ids in rows.split(ROWS):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.campaign
def test_a_worker_is_killed_under_tensor_parallelism(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    environment = environment_of_a_job(RAY_USAGE_STATS_ENABLED="0", OMP_NUM_THREADS="1")
    environment["PYTHONPATH"] += f":{EXAMPLE.parent}:{DRIVER.parent}"
    done = subprocess.run(
        [sys.executable, str(DRIVER), str(tmp_path), "2", str(STEPS)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=under_load(_LIMIT_S),
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert (tmp_path / "killed").exists(), "no worker was killed"
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["losses"] == pytest.approx(plain_losses(), rel=1e-5, abs=0)
    assert result["checkpoint"] == str(tmp_path / "train" / f"step-{STEPS}")
    assert result["kept"] == [f"step-{STEPS - 1}", f"step-{STEPS}"], "Ray removes older checkpoints"


@pytest.mark.slow
def test_without_ray_the_example_says_so(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ModuleNotFoundError(\"No module named 'ray'\")")
    environment = environment_of_a_job()
    environment["PYTHONPATH"] = f"{tmp_path}:{environment['PYTHONPATH']}"
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], env=environment, capture_output=True, text=True, timeout=under_load(120)
    )
    assert done.returncode == 1
    assert done.stderr == (
        "error: No module named 'ray'; install or upgrade Ray Train with pip install --upgrade 'ray[train]'\n"
    )
