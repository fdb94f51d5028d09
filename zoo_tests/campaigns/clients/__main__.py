"""Runs public scripts plainly and under layouts, with no line changed.

    python -m zoo_tests.campaigns.clients --scripts FOLDER --log FILE --output docs/results/scripts.md

The scripts are those of installed packages, and those of the folders that are named. What is compared: every number
that a script logs or writes as JSON, and the weights that it saves, which plain transformers opens. What is in the log
is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from booster.takeover import VARIABLE
from zoo_tests.campaigns.clients.jobs import LAYOUTS, Job, jobs
from zoo_tests.campaigns.clients.material import write
from zoo_tests.harness.environment import environment_of_a_job
from zoo_tests.scripts.outcome import CRASHES, DIFFERS, EXACT, HANGS, REFUSED, Outcome, head_of_table, put_into

_LIMIT_S, _TIMED_OUT = 400, 124
_BATCH = 4
_LOGGED = re.compile(r"\{'[a-z].*\}|epoch \d+: .*|.*(?:perplexity|accuracy): .*|.*(?:val |test_)loss .*", re.IGNORECASE)
_NUMBER = re.compile(r"'?(\w+)'?(?:: '?|(?<=loss)[ │]+)(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)\b")
_TIMES = re.compile(r"token_id|runtime|per_second|samples|total_flos|memory|epoch|num_input_tokens|_time|^time|lr$")
_TOLERANCE = 2e-4  # of four digits that are printed, in fp32
# A softmax over positions, or over choices, does not see them: their gradient is rounding, which Adam makes a step of.
# Nor does a group norm of single channels see a constant before it.
_UNSEEN = re.compile(r"(qa_outputs|\.key|hidden_states_norms\.\d)\.bias$|^classifier\.bias of 1$")
_UNSEEN_BEFORE_ANSWERS = re.compile(r"encoder\.layer\.3\.output\.LayerNorm\.bias$")  # of the last layer
_SENTENCE = re.compile(r"^(?:\[rank\d\]: )?error: (.*)$", re.MULTILINE)
Values = dict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scripts", nargs="*", type=Path, default=[], help="folders of scripts")
    parser.add_argument("--only", nargs="*", help="names of files")
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--output", type=Path, help="the page whose table is written")
    parser.add_argument("--log", type=Path, help="a file of lines of JSON, one for each run")
    options = parser.parse_args()
    known, unknown = jobs(options.scripts)
    known = [job for job in known if not options.only or job.name in options.only]
    log = options.log.read_text().splitlines() if options.log is not None and options.log.exists() else []
    lines = map(json.loads, log)
    outcomes = {(name, layout): Outcome(kind, detail) for name, layout, kind, detail in lines}
    with tempfile.TemporaryDirectory() as place:
        write(Path(place))
        for job in known:
            missing = [layout for layout in options.layouts if (job.name, layout) not in outcomes]
            for layout, outcome in compare(job, missing, Path(place)):
                outcomes[job.name, layout] = outcome
                print(f"{job.name:28} {layout:7} {outcome.kind:8} {outcome.detail[:600]}", flush=True)
                if options.log is not None:
                    with options.log.open("a") as file:
                        file.write(json.dumps([job.name, layout, outcome.kind, outcome.detail]) + "\n")
    for path in unknown:
        print(f"{path.name:28} no arguments are known that make it small")
    if options.output is not None:
        put_into(options.output, "clients", table(outcomes, options.layouts))


def compare(job: Job, layouts: list[str], place: Path) -> Iterator[tuple[str, Outcome]]:
    """Run a script plainly and under layouts; yield each layout and how that went."""
    expected: dict[int, tuple[Values, dict] | Outcome] = {}  # with so many batches at once
    for layout in layouts:
        ranks, text, replicas = LAYOUTS[layout]
        joined = 1 if job.has_batch else replicas
        if joined not in expected:
            start = ["-m", "zoo_tests.campaigns.clients.joined", str(joined)] if joined > 1 else []
            ended, plain = _run(start, job, _BATCH, place)
            failed = Outcome("does not run plainly", _last_error(ended))
            expected[joined] = failed if ended.returncode else plain
        wanted = expected[joined]
        if isinstance(wanted, Outcome):
            yield layout, wanted
            continue
        start = ["-m", "booster", "run", "--nproc-per-node", str(ranks), "--layout", text]
        outcome = _judge(*_run(start, job, _BATCH // replicas if job.has_batch else _BATCH, place), wanted)
        draws = outcome.kind == DIFFERS and replicas > 1 and job.draws and "values" not in outcome.detail
        yield layout, Outcome("own draws", outcome.detail) if draws else outcome


def _run(
    start: list[str], job: Job, batch: int, place: Path
) -> tuple[subprocess.CompletedProcess, tuple[Values, dict[str, torch.Tensor]]]:
    out = place / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    environment = environment_of_a_job(HF_HUB_OFFLINE="1", HF_HOME=str(place / "cache"), OMP_NUM_THREADS="1")
    environment["PYTHONPATH"] += os.pathsep + str(place)
    command = [sys.executable, *start, *job.command(out, batch)]
    options: dict = {"cwd": place, "env": environment, "capture_output": True, "text": True, "timeout": _LIMIT_S}
    try:
        ended = subprocess.run(command, **options)
    except subprocess.TimeoutExpired:
        ended = subprocess.CompletedProcess(command, _TIMED_OUT, "", f"not ended after {_LIMIT_S} s")
    return ended, (_values(ended.stdout + ended.stderr, out), _weights(out))


def _last_error(ended: subprocess.CompletedProcess) -> str:
    lines = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
    errors = [line for line in lines if re.search(r"\w(Error|Exception)\b.*: ", line)]
    return (errors or lines)[-1]


def _judge(ended: subprocess.CompletedProcess, found: tuple[Values, dict], expected: tuple[Values, dict]) -> Outcome:
    if ended.returncode == _TIMED_OUT:
        return Outcome(HANGS, ended.stderr)
    if ended.returncode:
        sentences = _SENTENCE.findall(ended.stderr)
        if len(set(sentences)) == 1 and "Traceback" not in ended.stderr:
            return Outcome(REFUSED, sentences[0])
        said = _last_error(ended)
        return Outcome("fails a check of its own" if "AssertionError: " in said else CRASHES, said)
    if f"{VARIABLE}=" in ended.stderr and "was not used" in ended.stderr:
        return Outcome("not taken over", "it makes no Trainer, Accelerator or Fabric")
    for name, wanted in expected[0].items():
        got = found[0].get(name, [])
        wanted = [one for one in wanted for _ in range(max(1, len(got) // len(wanted)))]  # some log on every rank
        if len(got) != len(wanted):
            return Outcome(DIFFERS, f"{name}: {len(got)} values, not {len(wanted)}")
        for one, other in zip(got, wanted, strict=True):
            if abs(one - other) > _TOLERANCE * max(1.0, abs(other)):
                return Outcome(DIFFERS, f"{name}: {one} for {other}")
    if expected[1].keys() != found[1].keys():
        return Outcome(DIFFERS, f"names of saved values: {sorted(expected[1].keys() ^ found[1].keys())[:3]}")
    unseen = [_UNSEEN, *([_UNSEEN_BEFORE_ANSWERS] if "qa_outputs.bias" in expected[1] else [])]
    apart = {
        name: float((found[1][name] - each).abs().max())
        for name, each in expected[1].items()
        if not any(pattern.search(name if each.numel() > 1 else f"{name} of 1") for pattern in unseen)
    }
    worst = max(apart, key=apart.__getitem__, default="")
    if apart.get(worst, 0.0) > _TOLERANCE:
        count = sum(each > _TOLERANCE for each in apart.values())
        return Outcome(DIFFERS, f"{count} saved weights, {worst} by {apart[worst]:.2g}")
    if not expected[0] and not expected[1]:
        return Outcome("passes", "it compares values itself")
    return Outcome(EXACT, f"{sum(map(len, expected[0].values()))} values, {len(expected[1])} weights")


def _values(printed: str, out: Path) -> Values:
    """Numbers by name, in order, without those of time and memory."""
    found: Values = {}
    for line in _LOGGED.findall(printed):
        for name, number in _NUMBER.findall(line):
            if not _TIMES.search(name):
                found.setdefault(name, []).append(float(number))
    for file in sorted(out.glob("*_results.json")):
        for name, value in json.loads(file.read_text()).items():
            if isinstance(value, int | float) and not _TIMES.search(name):
                found.setdefault(f"{file.name} {name}", []).append(float(value))
    return found


def _weights(out: Path) -> dict[str, Any]:
    """The weights that a script has saved, as plain `from_pretrained` opens them."""
    import transformers

    adapters = {name: each for file in out.glob("adapter_model.safetensors") for name, each in load_file(file).items()}
    if not list(out.glob("model*.safetensors")):
        return adapters
    architecture = json.loads((out / "config.json").read_text())["architectures"][0]
    return dict(getattr(transformers, architecture).from_pretrained(out, dtype=torch.float32).state_dict())


def table(outcomes: dict[tuple[str, str], Outcome], layouts: list[str]) -> str:
    """The table of scripts and layouts, and what was not exact."""
    lines = head_of_table([outcome.kind for outcome in outcomes.values()], ["Script", "Lines changed", *layouts])
    for script in dict.fromkeys(name for name, _ in outcomes):
        cells = [outcomes.get((script, layout), Outcome("not run")).kind for layout in layouts]
        lines.append(f"| {script} | 0 | {' | '.join(cells)} |")
    lines += ["", "What was not exact:", ""]
    said: dict[tuple[str, str], list[str]] = {}
    for (script, layout), outcome in outcomes.items():
        if outcome.kind not in (EXACT, "passes"):
            said.setdefault((script, outcome.detail), []).append(layout)
    lines += [f"- {script}, {', '.join(found)}: {detail}" for (script, detail), found in said.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
