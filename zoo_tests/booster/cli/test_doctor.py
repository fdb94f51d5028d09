"""`booster doctor`: what is there, what is missing, and how fast ranks reach each other.

What breaks here first: a rule by which the library chooses a kernel and that `cli/doctor.py` does not ask.
"""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from plugins.hybrid_parallel.planner import calibrate as measure_links
from plugins.hybrid_parallel.planner.calibrate import measure_axis
from zoo_tests.booster.cli.started import Started
from zoo_tests.booster.cli.test_commands import outcome
from zoo_tests.harness.ranks import distributed


def test_doctor_names_versions_and_what_is_optional(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = outcome(capsys, "doctor")
    assert (code, err) == (0, "")
    rows = {line.split()[0] for line in out.splitlines()}
    assert {"torch", "transformers", "accelerate", "cpu", "gloo", "nccl", "flash-attn", "apex", "liger-kernel"} <= rows


def test_doctor_fails_without_a_required_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("booster.cli.doctor._REQUIRED", ("torch", "no-such-distribution"))
    code, out, _ = outcome(capsys, "doctor")
    assert code == 1
    assert "no-such-distribution" in out
    assert "missing" in out


def test_what_is_missing_for_each_optimisation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's own rules are asked, so that a package that appears, or goes, is seen."""
    real = importlib.util.find_spec
    there, gone = {"flash_attn", "apex", "fused_layer_norm_cuda"}, {"liger_kernel", "xformers", "matplotlib"}
    fake = {**dict.fromkeys(there, SimpleNamespace()), **dict.fromkeys(gone)}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: fake[name] if name in fake else real(name))
    monkeypatch.setattr("shutil.which", lambda name: None)
    rows = _rows(outcome(capsys, "doctor")[1])
    assert rows["flash-attn"] == rows["apex"] == "available"
    assert rows["liger-kernel"] == "missing: RMS norms run through torch's kernel; install liger-kernel"
    assert rows["xformers"].startswith("missing") and rows["matplotlib"].startswith("missing")
    fake["fused_layer_norm_cuda"] = None  # another package of that name, or a build without extensions
    assert _rows(outcome(capsys, "doctor")[1])["apex"].startswith("missing: layer norms run through torch's kernel")
    assert rows["torchrun"].startswith("missing: ") and rows["fused operators"].startswith("missing: ")
    assert rows["attention here"] == "torch's SDPA"  # there is no GPU, whatever is installed


@pytest.mark.slow
def test_links_of_every_axis(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "links.json"
    sizes = ("--nproc-per-node", "4", "--tp", "2", "--pp", "2", "--output", str(file))
    code, out, err = outcome(capsys, "doctor", *sizes)
    assert (code, err) == (0, "")
    assert "Links between 4 ranks" in out and _rows(out)["tp of 2"].startswith("latency ")
    axes = json.loads(file.read_text())["axes"]
    assert list(axes) == ["pp", "tp"]  # dp has one rank
    assert {each["operation"] for each in axes["pp"]["collectives"]} == {"send"}
    assert {each["operation"] for each in axes["tp"]["collectives"]} == {"all_reduce", "all_gather", "reduce_scatter"}
    for axis in axes.values():
        assert 1e-6 < axis["latency_s"] < 1 and axis["latency_s"] <= axis["small_s"]
        assert axis["bandwidth_bytes_per_s"] == max(each["bus_bandwidth"] for each in axis["collectives"])


@pytest.mark.slow
def test_links_of_a_job(tmp_path: Path) -> None:
    """Under `booster run` the ranks of the job are measured, of however many machines, and the first one reports."""
    arguments = ("booster", "run", "--nproc-per-node", "2", "-m", "booster", "doctor", "--tp", "2")
    ended = Started("-m", *arguments).ended()
    assert ended.code == 0, ended.err
    assert ended.out.count("Links between 2 ranks") == ended.out.count("Versions") == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--nproc-per-node", "2", "--tp", "4"], "world size 2 is not a multiple of tp_size*pp_size=4*1=4"),
        (["--nproc-per-node", "4", "--dp", "3"], "dp_size=3 does not fit world size 4"),
        (["--nproc-per-node", "0"], "argument --nproc-per-node: '0' is not a positive integer, such as 4"),
        (["--nproc-per-node", "2", "--output", "/nowhere/x"], "/nowhere/x cannot be written, /nowhere is no dir"),
        (["--output", "links.json"], "--output is about links between ranks; add --nproc-per-node 4, say"),
    ],
)
def test_a_mistake_is_one_sentence(options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = outcome(capsys, "doctor", *options)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {sentence}") and err.count("\n") == 1


_DELAY_S = 0.01


@pytest.mark.slow
@distributed(2)
def test_a_slow_link_is_measured_as_one() -> None:
    group, device = dist.group.WORLD, torch.device("cpu")
    all_reduce = dist.all_reduce

    def slow(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        work = all_reduce(tensor, *args, **options)
        time.sleep(_DELAY_S if dist.get_rank() == 1 else 0.0)  # the slowest rank is what counts
        return work

    measure_links.dist.all_reduce = slow
    try:
        found = measure_axis(group, device, sizes=(2**16,), repeats=3)
    finally:
        measure_links.dist.all_reduce = all_reduce
    reduced, gathered, _ = found.collectives
    assert _DELAY_S <= found.small_s < 10 * _DELAY_S
    assert found.latency_s == found.small_s / 2  # two steps: there are two ranks
    assert _DELAY_S <= reduced.seconds < 10 * _DELAY_S
    assert reduced.algorithm_bandwidth == pytest.approx(2**16 / reduced.seconds)
    assert reduced.bus_bandwidth == pytest.approx(reduced.algorithm_bandwidth)  # 2 (n - 1) / n is 1
    assert gathered.bus_bandwidth == pytest.approx(gathered.algorithm_bandwidth / 2)
    assert found.bandwidth_bytes_per_s > reduced.bus_bandwidth


@pytest.mark.slow
@distributed(4)
def test_messages_between_neighbours() -> None:
    found = measure_axis(dist.group.WORLD, torch.device("cpu"), point_to_point=True, sizes=(2**16,), repeats=3)
    (sent,) = found.collectives
    assert found.num_ranks == 4 and found.latency_s == found.small_s
    assert sent.bus_bandwidth == sent.algorithm_bandwidth == found.bandwidth_bytes_per_s


def _rows(out: str) -> dict[str, str]:
    """Name -> what is said of it."""
    found = (line.strip().split("  ", 1) for line in out.splitlines() if line.startswith("  "))
    return {name: rest.strip() for name, rest in found}
