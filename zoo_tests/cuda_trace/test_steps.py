"""Whole steps on a GPU, seen from the host: nothing waits for the device, and collectives get what NCCL accepts.

What breaks here first: `item()`, a mask that selects, a tensor made on the CPU, a non-contiguous gradient. The message
names the line. `python -m zoo_tests.cuda_trace` runs
single traces.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from zoo_tests.cuda_trace import guard
from zoo_tests.zoo import FAMILIES

_ROOT = Path(__file__).resolve().parents[2]
# Layout -> options, and the rank that is traced, of two.
_LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "tp2": ({"tp_size": 2, "max_norm": 1.0}, 0),
    "sp2": ({"tp_size": 2, "enable_sequence_parallelism": True}, 0),
    "pp2 first": ({"pp_size": 2}, 0),
    "pp2 last": ({"pp_size": 2}, 1),
    "dp2": ({"dp_size": 2}, 1),
    "dp2 zero0": ({"dp_size": 2, "zero_stage": 0, "precision": "fp16"}, 0),
    "cp2": ({"cp_size": 2}, 0),
    "cp2 all-to-all": ({"cp_size": 2, "sequence_parallelism_mode": "all_to_all"}, 1),
    "ep2": ({"ep_size": 2}, 1),
    "fp8": ({"tp_size": 2, "precision": "fp8"}, 0),
    "fp8 rowwise": ({"tp_size": 2, "precision": "fp8", "fp8_recipe": "rowwise"}, 0),
    "fp8 zero3": ({"dp_size": 2, "zero_stage": 3, "precision": "fp8"}, 1),
    "operators": ({"tp_size": 2, "gradient_checkpointing": "operators"}, 0),
}
_SAMPLE = {
    ("llama", "cp2"),
    ("llama", "fp8 zero3"),
    ("llama", "operators"),
    ("bert", "tp2"),
    ("gpt2", "dp2"),
    ("t5", "pp2 last"),
    ("mixtral", "ep2"),
    ("vit", "sp2"),
}
_MICROBATCHES = 2
# Where the host may wait, and how often in a step with `_MICROBATCHES` passes through `_LAYERS` layers.
_LAYERS = 5
_STEP = ("plugins/hybrid_parallel/zero/bucket_layout.py", 1)  # the decision to skip a step that is not finite
_TRANSFORMERS = "transformers/"
_BATCH = ("plugins/hybrid_parallel/data/microbatch.py", 0)
# How often transformers waits in a micro-batch: 1 for each mask, to know whether it hides anything, if no more is said.
_IN_TRANSFORMERS = {
    **dict.fromkeys(("t5", "mt5", "umt5"), 2),
    **dict.fromkeys(("mbart", "pegasus", "blenderbot", "m2m_100"), 3),
    # In fp16 also for each layer of the encoder, to know whether it overflowed.
    **dict.fromkeys(("bart", "mvp", "plbart", "blenderbot_small", "marian"), 3 + 3),
    "gpt_neo": 5,  # the lowest number of the dtype, made on the host in each layer
    **dict.fromkeys(("falcon", "falcon_multi_query"), 2 * 5),  # two indices in lists in each layer
    "blip_2": 2 + 2 * 3,  # an empty cache of keys and values for each layer
    "blip_2_t5": 3 + 2 * 4,
}
# torch's grouped product takes rows of whole 16 bytes, and its fake kernel bf16 alone.
_EXPERT_SIZES = {"mixtral": {}, "qwen3_moe": {"moe_intermediate_size": 32}}
_LARGE = {"vocab_size": 600_000, "hidden_size": 8192}
_EXPERTS = ("shardformer/layers/experts.py", _MICROBATCHES * _LAYERS)  # rows to each rank


def _cases() -> list[Any]:
    found = []
    for family in FAMILIES:
        for layout in _LAYOUTS:
            marks = pytest.mark.slow if (family, layout) in _SAMPLE else pytest.mark.campaign
            found.append(pytest.param(family, layout, marks=marks, id=f"{family}-{layout.replace(' ', '-')}"))
    return found


@pytest.fixture(scope="module")
def tracer() -> Iterator[subprocess.Popen[str]]:
    """A process that traces steps: torch has to be imported after its device is registered."""
    try:
        guard.library()
    except guard.NoGuardError as error:
        pytest.skip(str(error))
    command, environment = [sys.executable, "-m", "zoo_tests.cuda_trace"], {**os.environ, "PYTHONPATH": str(_ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, cwd=_ROOT, env=environment, **pipes) as process:
        yield process
        process.stdin.close()


def _trace(tracer: subprocess.Popen[str], family: str, layout: str, **config: int) -> dict[str, Any]:
    options, rank = _LAYOUTS.get(layout, ({"dp_size": 2, "zero_stage": 3}, 1))
    options = {"precision": "bf16", "num_microbatches": _MICROBATCHES, **options}
    if family in _EXPERT_SIZES:
        options = {**options, "precision": options["precision"].replace("fp16", "bf16")}
        config |= _EXPERT_SIZES[family]
    asked = {"family": family, "options": options, "world_size": 2, "rank": rank, "config": config}
    print(json.dumps(asked), file=tracer.stdin, flush=True)
    answer = tracer.stdout.readline()
    assert answer, "the tracer has died; `python -m zoo_tests.cuda_trace` shows why"
    return json.loads(answer)


@pytest.mark.parametrize(("family", "layout"), _cases())
def test_a_step_does_not_wait_for_the_device(tracer: subprocess.Popen[str], family: str, layout: str) -> None:
    counts = _trace(tracer, family, layout)
    if counts.get("refused"):
        assert (family, layout) not in _SAMPLE, counts["error"]
        pytest.skip(f"the layout is refused: {counts['error']}")
    assert "error" not in counts, f"{counts['error']} at {counts['where']}"
    assert sum(counts["kernels"].values()) > 100, "no step was recorded"
    assert not counts["faults"]
    theirs = (_TRANSFORMERS, _MICROBATCHES * _IN_TRANSFORMERS.get(family, 1))
    allowed = (_STEP, theirs, _EXPERTS)
    strange = {place: count for place, count in counts["syncs"].items() if not _is_from(place, *allowed)}
    assert not strange, "the host waits for the device"
    for where, most in allowed:
        times = sum(count for place, count in counts["syncs"].items() if _is_from(place, (where, most)))
        assert times <= most, f"the host waits {times} times at {where}"
    late = [place for place in counts["copies"] if not _is_from(place, _BATCH, theirs)]
    assert not late, "something besides the batch is copied between host and device"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_a_step_launches_fewer_kernels_than_that_of_fsdp2(tracer: subprocess.Popen[str], family: str) -> None:
    """A step of ours computes a norm, too. What breaks first: a kernel for each parameter."""
    options = {"precision": "bf16", "num_microbatches": _MICROBATCHES, "dp_size": 2}
    found = []
    for system in ("ours", "FSDP2"):
        asked = {"family": family, "system": system, "options": options, "world_size": 2}
        print(json.dumps(asked), file=tracer.stdin, flush=True)
        found.append(json.loads(tracer.stdout.readline())["kernels"])
    ours, theirs = (sum(kernels.values()) for kernels in found)
    assert ours < theirs
    assert found[0]["add_"] < 6, "gradients of later micro-batches are added together"
    assert found[0]["_fused_adamw_"] == 1


@pytest.mark.parametrize(
    "layout",
    [pytest.param(each, marks=pytest.mark.campaign) for each in ("tp2", "pp2 last", "dp2 zero3", "cp2")]
    + [pytest.param("dp2", marks=pytest.mark.slow)],
)
def test_tensors_of_more_values_than_32_bits_count(tracer: subprocess.Popen[str], layout: str) -> None:
    """Embedding and head: places in buckets and shards, and of labels."""
    counts = _trace(tracer, "llama", layout, **_LARGE)
    assert "error" not in counts, f"{counts['error']} at {counts['where']}"
    assert not counts["faults"]
    if "dp" in layout:  # at least their gradients are on the way, in fp32
        assert counts["collective_bytes"] > 2 * 4 * _LARGE["vocab_size"] * _LARGE["hidden_size"]


@pytest.mark.slow
@pytest.mark.parametrize("compilers", [(), ("false",)])
def test_a_missing_or_failing_compiler_is_one_sentence(
    compilers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(guard, "_COMPILERS", compilers)
    with pytest.raises(guard.NoGuardError, match="need a C\\+\\+ compiler|do not fit the headers of torch"):
        guard.compile_to(tmp_path / "guard.so")


def _is_from(place: str, *lines: tuple[str, int]) -> bool:
    return any(f"@ {where}" in place for where, _ in lines)
