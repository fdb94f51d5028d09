"""`make gpu` on the simulated device: every line of it runs, and what it says is what happened."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import single_device
from plugins.hybrid_parallel.distributed.local_ranks import RankFailure
from zoo_tests.gpu import __main__ as script
from zoo_tests.harness.ranks import run_on_ranks

REPORT = """<testsuites><testsuite>
<testcase classname="zoo_tests.gpu.test_a" name="one"/>
<testcase classname="zoo_tests.gpu.test_a" name="two"><failure message="assert 1 == 2&#10; + where"/></testcase>
<testcase classname="zoo_tests.gpu.test_a" name="three"><skipped message="flash_attn is not installed"/></testcase>
<testcase classname="zoo_tests.gpu.test_a" name="four"><error message="fixture failed">trace</error></testcase>
</testsuite></testsuites>"""


def test_page(tmp_path: Path) -> None:
    page = tmp_path / "runs" / "gpu.md"
    only = "test_fp32 and bert or flash_attention_3"
    ended = script.main(["--device", "simcuda", "--quick", "--only", only, "--minutes", "6", "--output", str(page)])
    assert ended == 0, page.read_text()
    text = page.read_text()
    assert "| test_one_rank: test_fp32[bert] | passed |" in text and "skipped: flash_attn_interface" in text
    assert "1 passed, 0 failed, 1 skipped" in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith(("| Llama", "| BERT"))]
    assert len(rows) == 2 and all(float(row[1]) > 0 for row in rows), text


def measure_as_on_a_gpu() -> tuple[dict[str, Any], list[object]]:
    """Each way measured alone, with too little memory for one of them; and the row of the table."""
    tiny = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    tiny = replace(single_device.SHAPES["BERT-large"], real=tiny, rows=2, length=8)
    with (
        mock.patch.dict(single_device.SHAPES, tiny=tiny),
        mock.patch.object(single_device, "matmul_peak", return_value=1e12),
        mock.patch.object(single_device, "compiled_step", side_effect=torch.OutOfMemoryError),
    ):
        found = single_device.measure("tiny", 1, True)
        with mock.patch.object(single_device, "our_step", side_effect=ValueError("a | b\n")):
            found["of a failure"] = single_device.measure("tiny", 1, True)["times"]["ours"]
    return found, single_device._row("tiny", found)


def test_ways_that_do_not_fit_together() -> None:
    ((found, row),) = run_on_ranks(1, measure_as_on_a_gpu, device="simcuda")
    assert set(found["times"]) == {"plain", "ours", "compiled"} and found["times"]["compiled"] == "out of memory"
    assert found["of a failure"] == "ValueError: a / b"
    assert row[0] == "tiny" and row[1] > 0 and row[2:5] == ["out of memory", "-", "-"] and row[6].endswith("%")


def test_no_memory_is_compared_with_that_of_a_way_that_failed() -> None:
    found = {"times": {"plain": [2.0], "ours": "out of memory"}, "memory": {"plain": 4, "ours": 8}}
    assert single_device._row("tiny", {**found, "flops": 1e12, "peak": 2e12})[-1] == "-"


def test_table_of_a_gpu() -> None:
    """A process for each shape; what fails or has no time left is a row, and the others are measured."""
    measured = {"times": {"plain": [2.0], "ours": [1.0], "ours compiled": [0.5]}, "flops": 1e12, "peak": 2e12}
    measured["memory"] = {"plain": 4, "ours": 3, "ours compiled": 3}
    answers = [[measured], RankFailure("rank 0 did not answer"), *[[measured]] * 4]
    with (
        mock.patch.object(single_device, "run_on_local_ranks", side_effect=answers) as run,
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "get_device_name", return_value="a GPU"),
    ):
        told: list[str] = []
        table = single_device.report(quick=False, until=time.monotonic() + 60, tell=told.append)
        late = single_device.report(quick=True, until=time.monotonic() - 1)
    assert len(told) == len(answers) and told[-1] == table and told[0].count("| 50% |") == 1
    lines = table.splitlines()
    assert "(a GPU)" in lines[0] and "| Llama 1B | 2.000 | - | - | 2.000 | - | 50% | 0.750 |" in lines
    assert sum("RankFailure: rank 0 did not answer" in line for line in lines) == 1
    assert late.count("no time left") == 2 * 7 and run.call_count == len(answers)
    assert all(call.kwargs["device"] == "cuda" and call.kwargs["timeout_s"] <= 60 for call in run.call_args_list)
    assert all(call.args[-1] is True for call in run.call_args_list), "the shapes were not real"


def test_description_of_a_gpu() -> None:
    (line,) = run_on_ranks(1, script._gpu, device="simcuda")
    count, rest = line.split(" ", 1)
    assert rest == "x simulated CUDA device, 8 GiB, compute capability 9.0"
    assert count in ("1", "4")  # a process sees its own; under `pytest --device simcuda`, those of the machine
    assert run_on_ranks(1, script._nccl, device="simcuda") == ["2.27.0"]


def test_what_pytest_says(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    found = {each.name: (each.state, each.text) for each in script._outcomes(tmp_path / "report.xml")}
    assert found == {
        "test_a: one": ("passed", ""),
        "test_a: two": ("failed", "assert 1 == 2 + where"),
        "test_a: three": ("skipped", "flash_attn is not installed"),
        "test_a: four": ("failed", "fixture failed"),
    }


def test_tests_that_do_not_end_have_failed() -> None:
    ((name, state, text),) = [vars(each).values() for each in script.run_tests("simcuda", None, time.monotonic() + 0.5)]
    assert (name, state, text) == ("all tests", "failed", "they did not end in time")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(capsys: pytest.CaptureFixture) -> None:
    """One sentence, and another exit code than that of failed tests."""
    assert script.main([]) == 2
    said = capsys.readouterr().err
    assert said.startswith("make gpu: no GPU can be used: torch") and said.count("\n") == 1
