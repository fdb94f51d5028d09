"""Ranks from a notebook: functions of its cells, on forks of its process.

What breaks here first: threads of the notebook that a fork does not have.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zoo_tests.harness.environment import REPOSITORY, environment_of_a_job

_CELLS = """
import os, sys, time
import torch
from booster import Booster, ConfigurationError, notebook_launcher
from plugins.hybrid_parallel import HybridParallelPlugin
from transformers import LlamaConfig, LlamaForCausalLM

torch.set_num_threads(2)
inputs = torch.randn(512, 512, requires_grad=True)
(inputs @ inputs).sum().backward()  # threads of OpenMP and of autograd
ids = torch.arange(24).view(2, 12)


def losses(model, backward, optimizer, steps):
    found = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def build():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(steps, fails=False):
    booster = Booster(HybridParallelPlugin(tp_size=2))
    model, optimizer = booster.boost(*build())
    found = losses(model, lambda loss: booster.backward(loss, optimizer), optimizer, steps)
    if fails and int(os.environ["RANK"]) == 1:
        raise ValueError("bad luck")
    if fails:
        torch.distributed.barrier()  # its connection ends with rank 1
    return found
"""
_TRAIN = """
model, optimizer = build()
plain = losses(model, torch.Tensor.backward, optimizer, 3)
for _ in range(2):
    found = notebook_launcher(train, (3,), num_processes=2)
    assert found[0] == found[1] and torch.allclose(torch.tensor(found[0]), torch.tensor(plain), rtol=1e-6), found
for call, sentence in (
    (lambda: notebook_launcher(train, (1, True)), "rank 1 failed: ValueError: bad luck"),
    (lambda: notebook_launcher(train, num_processes=0), "num_processes=0 is no number of ranks; use 2"),
    (lambda: notebook_launcher(train, "3"), "args='3' is no tuple of arguments; use args=('3',)"),
    (lambda: notebook_launcher(lambda: lambda: 1), "rank 0 failed: TypeError: what <lambda> returns cannot leave"),
    (lambda: notebook_launcher(sys.exit, (3,)), "rank 0 failed: it ended with exit code 3"),
    (lambda: notebook_launcher(3), "fn=3 is no function; use notebook_launcher(train, args=(…))"),
):
    try:
        call()
    except (RuntimeError, ConfigurationError) as error:
        assert str(error).startswith(sentence), error
    else:
        raise AssertionError(sentence)
"""
_WAIT = """
def wait():
    open(f"{sys.argv[1]}/{os.environ['RANK']}", "w").write(str(os.getpid()))
    time.sleep(600)


notebook_launcher(wait)
"""


def _start(source: str, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-c", source, *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment_of_a_job(), cwd=REPOSITORY, **streams)


@pytest.mark.slow
def test_functions_of_cells() -> None:
    _, errors = (process := _start(_CELLS + _TRAIN)).communicate(timeout=300)
    assert process.returncode == 0, errors


@pytest.mark.slow
def test_an_interrupt_ends_the_ranks(tmp_path: Path) -> None:
    process = _start(_CELLS + _WAIT, str(tmp_path))
    while len(ranks := [path for path in tmp_path.iterdir() if path.read_text()]) < 2:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert "KeyboardInterrupt" in errors
    assert not any(Path(f"/proc/{rank.read_text()}").exists() for rank in ranks)
