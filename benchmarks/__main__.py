"""Run the benchmarks and write their tables: `python -m benchmarks [--quick] [--only NAME] [--output FILE]`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import transformers

from benchmarks import (
    activation_memory,
    add_a_family,
    bare_loop,
    checkpoint_bandwidth,
    checkpoint_state,
    construction_memory,
    context_parallel,
    cuda_counts,
    fp8,
    goodput,
    grouped_experts,
    host_time,
    links,
    loss_memory,
    offload,
    offload_activations,
    optimizer_memory,
    packing,
    pipeline,
    pipeline_loop,
    planner_accuracy,
    published_runs,
    rank_of_larger,
    relayout,
    schedules,
    single_device,
    start_up,
    step_profile,
    tensor_parallel,
    trainer,
    zero_layouts,
    zero_memory,
    zero_stages,
    zero_step,
)

BENCHMARKS = {
    "tensor_parallel": tensor_parallel,
    "context_parallel": context_parallel,
    "fp8": fp8,
    "grouped_experts": grouped_experts,
    "zero_step": zero_step,
    "zero_memory": zero_memory,
    "zero_stages": zero_stages,
    "zero_layouts": zero_layouts,
    "packing": packing,
    "pipeline": pipeline,
    "pipeline_loop": pipeline_loop,
    "trainer": trainer,
    "schedules": schedules,
    "host_time": host_time,
    "step_profile": step_profile,
    "start_up": start_up,
    "add_a_family": add_a_family,
    "bare_loop": bare_loop,
    "optimizer_memory": optimizer_memory,
    "single_device": single_device,
    "rank_of_larger": rank_of_larger,
    "construction_memory": construction_memory,
    "loss_memory": loss_memory,
    "relayout": relayout,
    "offload": offload,
    "activation_memory": activation_memory,
    "offload_activations": offload_activations,
    "cuda_counts": cuda_counts,
    "planner_accuracy": planner_accuracy,
    "links": links,
    "published_runs": published_runs,
    "goodput": goodput,
    "checkpoint_bandwidth": checkpoint_bandwidth,
    "checkpoint_state": checkpoint_state,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure, and write tables of ratios.")
    parser.add_argument("--quick", action="store_true", help="few repeats and short sequences, to see that it runs")
    parser.add_argument("--only", choices=BENCHMARKS, action="append", help="one of the benchmarks; may be repeated")
    parser.add_argument("--output", type=Path, help="write the tables to this Markdown file")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    transformers.logging.set_verbosity_error()
    sections: dict[str, str] = {}
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        if options.only and options.output.is_file():
            sections = _sections_of(options.output.read_text())
    for name in options.only or BENCHMARKS:
        report = BENCHMARKS[name].report(options.quick)
        print(report, flush=True)
        sections |= _sections_of(f"\n{report}")
        if options.output is not None:  # after each section: a later failure does not lose it
            options.output.write_text("\n".join([_introduction(options), *sections.values()]))


def _introduction(options: argparse.Namespace) -> str:
    levers = os.path.relpath("docs/levers.md", options.output.parent)
    return (
        f"# Measured performance\n\nWritten by `{_command(options)}`, section by section. Every figure is a ratio of "
        "medians within one run. In a run the compared implementations alternate (A B A B), so that the ratio does "
        f"not depend on how fast the machine is on a given day. One thread per rank, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, {os.cpu_count()} cores. `--only NAME` measures a section again and "
        f"replaces the section with the same title. [Levers]({levers}) lists the changes that led to these figures, "
        "including those that did not help.\n"
    )


def _sections_of(page: str) -> dict[str, str]:
    """Return title -> section of results."""
    return {section.splitlines()[0]: section for section in map("## {}".format, page.split("\n## ")[1:])}


def _command(options: argparse.Namespace) -> str:
    return " ".join(["python -m benchmarks", *(["--quick"] if options.quick else []), f"--output {options.output}"])


if __name__ == "__main__":
    main()
