"""Tests and measures this machine's GPU, and writes a page about it: `python -m zoo_tests.gpu`, or `make gpu`."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers

from benchmarks.harness import table
from benchmarks.single_device import SHAPES
from booster.errors import ConfigurationError
from plugins.hybrid_parallel.distributed.local_ranks import RankFailure, run_on_local_ranks
from zoo_tests.gpu import device, stages
from zoo_tests.gpu.training import LAYOUTS
from zoo_tests.harness.ranks import RankError, run_on_ranks

_PACKAGES = ("triton", "flash-attn", "flash-attn-3", "xformers", "liger-kernel", "apex", "peft")
_HERE = Path(__file__).parent
_MEMORY_OF_A_WORKER = 8 * 2**30
_SECONDS_TO_REPORT = 20.0


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
    options.output.parent.mkdir(parents=True, exist_ok=True)
    page = Page(options)
    for name in options.stages:
        page.begin(name)
        STAGES[name](page)
    print(f"written to {options.output}")
    return 0 if all(each.state != "failed" for each in page.outcomes) else 1


class Page:
    """The page of a run; what is written is kept, whatever ends this process.

    Attributes:
        options: of the command.
        until: when the stage ends that is running (`time.monotonic`).
        outcomes: of the tests that have run.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device, self.outcomes = options, options.device, list[Outcome]()
        self.is_real = options.device == device.GPU
        self._sections = [_head(options.device)]

    def begin(self, stage: str) -> None:
        """Begin a stage, with a section of its own."""
        print(f"make gpu: {stage}", flush=True)
        self.until = time.monotonic() + 60 * self.options.minutes
        self._sections.append("")

    def write(self, section: str) -> None:
        """Write the section of the stage, anew with each row."""
        self._sections[-1] = section
        self.options.output.write_text("\n".join(self._sections))

    def run(self, function: Callable[..., Any], *arguments: Any, ranks: int = 1, seconds: float = 300.0) -> Any:
        """Run a function on new ranks; return what rank 0 returned, or a sentence about why there is nothing.

        Args:
            seconds: after which ranks that have not answered are ended; fewer where the stage ends before.
        """
        left = min(seconds, self.until - time.monotonic())
        if left < 1:
            return "no time left"
        if self.is_real and torch.cuda.device_count() < ranks:
            return f"needs {ranks} GPUs"
        try:
            if self.is_real:
                return run_on_local_ranks(function, ranks, *arguments, timeout_s=left, device="cuda")[0]
            return run_on_ranks(
                ranks, stages.with_tiny_models, function, *arguments, timeout_s=left, device=self.device
            )[0]
        except (RankFailure, RankError, ConfigurationError) as failure:
            lines = str(failure).replace("|", "/").splitlines()
            return next((line for line in reversed(lines) if re.match(r"[\w.]*Error: ", line)), lines[0])[:300]

    def rows(self, title: str, columns: list[str], rows: Iterable[tuple[list[Any], Any]], note: str = "") -> None:
        """Write a table row by row.

        Args:
            rows: the first cells of each row; its other cells, or a text about why there are none.
            note: what stands below the table.
        """
        done: list[list[Any]] = []
        for first, found in rows:
            cells = [*first, *(found if isinstance(found, list) else [found])]
            done.append(cells + ["-"] * (len(columns) - len(cells)))
            self.write(table(title, columns, done, note))


def _test(page: Page) -> None:
    page.outcomes += run_tests(page.device, page.options.only, page.until)
    page.write(_tests_section(page.outcomes, page.device))


def _speed(stage: str, page: Page) -> None:
    ways = stages.WAYS[stage]
    names = stages.MODELS if stage == "speed" else stages.MODELS[:1]
    asked = [(name, way) for name in names for way in ways if SHAPES[name].liger or way != "liger"]
    if stage == "levers":
        asked[3:3] = stages.SLOWER_COMPILED
    rows = (
        (
            [name, way],
            page.run(stages.speed, name, way, ways[way], page.is_real, ranks=(ways[way] or {}).get("tp_size", 1)),
        )
        for name, way in asked[: 1 if page.options.quick else None]
    )
    page.rows(f"{stage.capitalize()}: bf16, steps that nothing waits for", ["model", "way", *stages.COLUMNS], rows)


def _layouts(page: Page) -> None:
    rows = (
        ([name], page.run(stages.layout, family, options, ranks=ranks, seconds=60.0))
        for name, (family, ranks, options) in list(LAYOUTS.items())[: 1 if page.options.quick else None]
    )
    page.rows("Layouts, a GPU for each rank, over NCCL", ["layout", "losses"], rows)


def _links(page: Page) -> None:
    ranks = max(2, torch.cuda.device_count()) if page.is_real else 2
    found = page.run(stages.links, page.is_real, ranks=ranks)
    columns = ["KiB", "all-reduce", "all-gather", "reduce-scatter"]
    rows = [(row[:1], row[1:]) for row in found] if isinstance(found, list) else [([], found)]
    page.rows(f"Links between {ranks} ranks: GB/s that a rank sends", columns, rows, stages.bucket_of(found))


def _trace(page: Page) -> None:
    path = page.options.output.with_suffix(".trace.json").absolute()
    found = page.run(stages.trace, stages.MODELS[0], str(path), page.is_real)
    text = f"{path.name}, for ui.perfetto.dev: {found * 1e3:.1f} ms of kernels" if isinstance(found, float) else found
    page.write(f"## Trace of a step\n\n{text}\n")


def _bits(page: Page) -> None:
    names, repeats = (stages.MODELS[:1], 2) if page.options.quick else (stages.MODELS, 30)
    rows = (([name], page.run(stages.bits, name, repeats, page.is_real)) for name in names)
    page.rows("The same pass in bf16, again and again", ["model", "result"], rows)


STAGES: dict[str, Callable[[Page], None]] = {
    "speed": partial(_speed, "speed"),
    "tests": _test,
    "levers": partial(_speed, "levers"),
    "layouts": _layouts,
    "links": _links,
    "rivals": partial(_speed, "rivals"),
    "trace": _trace,
    "bits": _bits,
}


def _stages(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [each for each in names if each not in STAGES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no stage; use some of {','.join(STAGES)}")
    return names


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
        running, reason = subprocess.Popen(command, env=environment, cwd=_HERE.parents[1]), None
        try:
            running.wait(until - time.monotonic())
        except subprocess.TimeoutExpired:
            reason = "they did not end in time"
            running.send_signal(signal.SIGINT)  # pytest writes what it has
            with suppress(subprocess.TimeoutExpired):
                running.wait(_SECONDS_TO_REPORT)
            running.kill()
        found = list(_outcomes(report)) if report.exists() else []
        if reason is None and not found:
            reason = "none has run; the output of pytest says why"
        return found if reason is None else [*found, Outcome("other tests" if found else "all tests", "failed", reason)]


def _workers(name: str) -> int:
    """Processes that share the tests; each has up to seven ranks, with half a gigabyte of the GPU's memory each."""
    if name == device.SIMULATED:
        return 1
    memory, cores = torch.cuda.get_device_properties(0).total_memory, os.cpu_count() or 1
    return max(1, min(memory // (_MEMORY_OF_A_WORKER * torch.cuda.device_count()), cores // 3, 6))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m zoo_tests.gpu", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/gpu.md"), help="page to write")
    parser.add_argument("--device", choices=(device.GPU, device.SIMULATED, "cpu"), default=device.GPU)
    parser.add_argument("--minutes", type=float, default=8.0, help="time limit of each stage")
    parser.add_argument(
        "--stages", type=_stages, default=list(STAGES), help="what to do, in this order; all without it"
    )
    parser.add_argument("--quick", action="store_true", help="the first row of each stage")
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
        "GPU": _gpu() if name == device.GPU else "none: tiny sizes, whose times mean nothing",
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
