"""Tests and measures this machine's GPU, and writes a page about it: `python -m zoo_tests.gpu`, or `make gpu`."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
import transformers

from benchmarks import single_device
from zoo_tests.gpu import device
from zoo_tests.harness.ranks import run_on_ranks

_PACKAGES = ("triton", "flash-attn", "flash-attn-3", "xformers", "liger-kernel", "apex", "peft")
_TINY = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 512}
_HERE = Path(__file__).parent
_RANK_TIMEOUT_S = 240.0
_MEMORY_OF_A_WORKER = 8 * 2**30
_SHARE_OF_TESTS = 0.6  # of the time limit


@dataclass(frozen=True)
class Outcome:
    """What one test said.

    Attributes:
        name: file and name of the test.
        state: "passed", "failed" or "skipped".
        text: why it failed or was skipped, in a line.
    """

    name: str
    state: str
    text: str = ""


def main(arguments: list[str]) -> int:
    """Return 0 if every test passed, 1 if one failed, and 2 if there is no GPU."""
    options = _parser().parse_args(arguments)
    problem = device.problem() if options.device == device.GPU else None
    if problem is not None:
        print(f"make gpu: {problem}", file=sys.stderr)
        return 2
    start, limit = time.monotonic(), 60 * options.minutes
    options.output.parent.mkdir(parents=True, exist_ok=True)
    outcomes = run_tests(options.device, options.only, start + _SHARE_OF_TESTS * limit)
    page = [_head(options.device), _tests_section(outcomes, options.device)]
    options.output.write_text("\n".join(page))

    def write(table: str) -> None:  # row after row: what ends this process does not lose those before
        options.output.write_text("\n".join([*page, table]))

    write(_table(options.device, options.quick, start + limit, write))
    print(f"written to {options.output}")
    return 0 if all(each.state != "failed" for each in outcomes) else 1


def run_tests(name: str, only: str | None, until: float) -> list[Outcome]:
    """Run the tests of this folder with ranks on a device; what each said.

    Args:
        only: expression of `pytest -k`; None for all tests.
        until: time (`time.monotonic`) at which tests that still run count as failed.
    """
    with TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        command = [sys.executable, "-m", "pytest", str(_HERE), "-q", f"--device={name}", f"--junitxml={report}"]
        command += ["-m", "gpu", f"--numprocesses={_workers(name)}", *(["-k", only] if only else [])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        try:
            subprocess.run(command, env=environment, cwd=_HERE.parents[1], timeout=until - time.monotonic())
        except subprocess.TimeoutExpired:
            return [Outcome("all tests", "failed", "they did not end in time")]
        found = list(_outcomes(report)) if report.exists() else []
        return found or [Outcome("all tests", "failed", "none has run; the output of pytest says why")]


def _workers(name: str) -> int:
    """Processes that share the tests; each has up to seven ranks, with half a gigabyte of the GPU's memory each."""
    if name == device.SIMULATED:
        return 1
    memory, cores = torch.cuda.get_device_properties(0).total_memory, os.cpu_count() or 1
    return max(1, min(memory // (_MEMORY_OF_A_WORKER * torch.cuda.device_count()), cores // 3, 6))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m zoo_tests.gpu", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/gpu.md"), help="page to write")
    parser.add_argument("--device", choices=(device.GPU, device.SIMULATED), default=device.GPU)
    parser.add_argument("--minutes", type=float, default=8.0, help="time limit of tests and table")
    parser.add_argument("--quick", action="store_true", help="two models of the table, few steps")
    parser.add_argument("--only", help="tests to run, an expression of pytest -k")
    return parser


def _outcomes(report: Path) -> Iterator[Outcome]:
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}: {case.get('name')}"
        said = {child.tag: (child.get("message") or "").strip() for child in case}
        if "skipped" in said:
            yield Outcome(name, "skipped", said["skipped"].splitlines()[-1])
        elif "failure" in said or "error" in said:
            text = said.get("failure") or said.get("error") or "no message"
            yield Outcome(name, "failed", " ".join(text.split())[:300])
        else:
            yield Outcome(name, "passed")


def _head(name: str) -> str:
    lines = {
        "GPU": "simulated, in host memory" if name == device.SIMULATED else _gpu(),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}, NCCL {_nccl()}",
        "transformers": transformers.__version__,
        "Python": sys.version.split()[0],
        "packages": ", ".join(_installed()) or "none",
    }
    rows = [f"| {title} | {text} |" for title, text in lines.items()]
    return "\n".join(["# A run on a GPU", "", "Written by `make gpu`.", "", "| What | Here |", "|---|---|", *rows, ""])


def _gpu() -> str:
    found = torch.cuda.get_device_properties(0)
    memory, count = found.total_memory / 2**30, torch.cuda.device_count()
    return f"{count} x {found.name}, {memory:.0f} GiB, compute capability {found.major}.{found.minor}"


def _nccl() -> str:
    return ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"


def _installed() -> Iterator[str]:
    for package in _PACKAGES:
        try:
            yield f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue


def _tests_section(outcomes: list[Outcome], name: str) -> str:
    counts = {state: sum(each.state == state for each in outcomes) for state in ("passed", "failed", "skipped")}
    shares = name == device.GPU and torch.cuda.device_count() < 2
    how = (
        "All ranks share one GPU, over gloo."
        if shares
        else "Each rank has its own GPU, over NCCL, where there are enough."
    )
    summary = ", ".join(f"{count} {state}" for state, count in counts.items())
    lines = ["## Losses, checkpoints and tokens against plain torch on the same GPU", "", f"{summary}. {how}", ""]
    lines += ["| Test | Result |", "|---|---|"]
    lines += [f"| {each.name} | {_cell(each)} |" for each in outcomes]
    return "\n".join([*lines, ""])


def _cell(outcome: Outcome) -> str:
    text = outcome.text.replace("|", "\\|")
    return f"{outcome.state}: {text}" if text else outcome.state


def _table(name: str, quick: bool, until: float, write: Callable[[str], None]) -> str:
    run = _on_simulated_device if name == device.SIMULATED else None
    section = single_device.report(quick, run, until, write)
    print(section, flush=True)
    return section


def _on_simulated_device(function: Any, *arguments: Any) -> Any:
    return run_on_ranks(1, _of_tiny_models, function, *arguments, timeout_s=_RANK_TIMEOUT_S, device=device.SIMULATED)[0]


def _of_tiny_models(function: Any, name: str, *arguments: Any) -> Any:
    """Run on a rank with sizes for CPUs without bf16 instructions, on which small products take minutes."""
    shape = single_device.SHAPES[name]
    with mock.patch.dict(single_device.SHAPES, {name: replace(shape, small={**shape.small, **_TINY})}):
        return function(name, *arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
