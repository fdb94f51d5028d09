"""`make gpu` without a GPU: every line of it runs, and what it says is what happened."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.autograd import DeviceType

from zoo_tests.gpu import __main__ as script
from zoo_tests.gpu import stages
from zoo_tests.harness.ranks import run_on_ranks

REPORT = """<testsuites><testsuite>
<testcase classname="zoo_tests.gpu.test_a" name="one"/>
<testcase classname="zoo_tests.gpu.test_a" name="two"><failure message="assert 1 == 2&#10; + where"/></testcase>
<testcase classname="zoo_tests.gpu.test_a" name="three"><skipped message="flash_attn is not installed"/></testcase>
<testcase classname="zoo_tests.gpu.test_a" name="four"><error message="fixture failed">trace</error></testcase>
</testsuite></testsuites>"""


@pytest.mark.slow
def test_page(tmp_path: Path) -> None:
    """Each stage writes its rows; without a GPU, those of tiny models on CPUs."""
    page = tmp_path / "runs" / "gpu.md"
    asked = "layouts,speed,links,rivals,trace,bits"  # levers are as speed is
    assert script.main(["--device", "cpu", "--quick", "--output", str(page), "--stages", asked]) == 0
    text = page.read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    found = {tuple(row[:2]): row for row in rows} | {row[0]: row for row in rows}
    model = stages.MODELS[0]
    assert float(found[model, "ours"][6]) > 0 and found[model, "ours"][5].endswith("%"), text
    assert found[model, "torchtitan"][2] == "ModuleNotFoundError: No module named 'torchtitan'", text
    assert found["pp2, 1f1b"][1].startswith("equal: ") and float(found["64"][1]) > 0, text
    assert found[model][1].startswith("2 passes: the same bits, of "), text
    assert json.loads(page.with_suffix(".trace.json").read_text())["traceEvents"]
    sections = [
        text.index(f"## {title}") for title in ("Layouts", "Speed", "Links", "Rivals", "Trace", "The same pass")
    ]
    assert sections == sorted(sections)


def other_bits() -> str:
    draws = mock.patch.object(torch.nn.functional, "silu", lambda x: x * (1 + torch.rand_like(x) / 2))
    with draws:
        return stages.with_tiny_models(stages.bits, stages.MODELS[0], 3, False)


def test_the_first_operator_with_other_bits_is_named() -> None:
    (said,) = run_on_ranks(1, other_bits)
    assert said == "pass 2 of 3: aten.rand_like.default in model.layers.0.mlp.act_fn got other bits first"


def test_a_layout_with_another_loss_is_named() -> None:
    with mock.patch.object(stages, "train", return_value=([1.0, 2.0], [1.0, 2.1])):
        assert stages.layout("llama", {}) == "DIFFERENT: 5e-02 from plain training"


def test_buckets_are_as_large_as_links_need() -> None:
    rows = [[64, 9.0, 9.0, 1.0], [4096, 1.0, 1.0, 90.0], [65536, 1.0, 1.0, 100.0], [262144, 1.0, 1.0, 98.0]]
    assert "from 4 MiB on" in stages.bucket_of(rows)
    assert stages.bucket_of("needs 2 GPUs") == ""


def test_kernels_count_once() -> None:
    """torch gives their time to the operators and to the annotations around them, too."""

    def event(device: DeviceType, is_user_annotation: bool = False) -> SimpleNamespace:
        return SimpleNamespace(device_type=device, self_device_time_total=5e6, is_user_annotation=is_user_annotation)

    with mock.patch.object(torch.profiler, "profile") as profile:
        events = [event(DeviceType.CPU), event(DeviceType.CUDA), event(DeviceType.CUDA, True), event(DeviceType.CUDA)]
        profile.return_value.__enter__.return_value.key_averages.return_value = events
        assert stages._busy(lambda: None, torch.device("cpu")) == 10.0


def test_what_has_no_row(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A stage that does not exist, and one without time."""
    page = tmp_path / "gpu.md"
    with pytest.raises(SystemExit):
        script.main(["--device", "cpu", "--stages", "speed,sped"])
    assert "'sped' is no stage; use some of speed,tests," in capsys.readouterr().err
    script.main(["--device", "cpu", "--stages", "bits", "--quick", "--minutes", "0", "--output", str(page)])
    assert f"| {stages.MODELS[0]} | no time left |" in page.read_text()


@pytest.mark.slow
def test_tests_of_a_gpu(tmp_path: Path) -> None:
    page, only = tmp_path / "gpu.md", "test_fp32 and bert or flash_attention_3"
    assert script.main(["--device", "simcuda", "--only", only, "--output", str(page), "--stages", "tests"]) == 0
    text = page.read_text()
    assert "| test_one_rank: test_fp32[bert] | passed |" in text and "skipped: flash_attn_interface" in text
    assert "1 passed, 0 failed, 1 skipped" in text


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
