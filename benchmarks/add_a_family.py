"""How long it takes to add a family by rules alone.

    python -m benchmarks --only add_a_family --output docs/results/performance.md
    python -m benchmarks.add_a_family [--classes bert/BertForSequenceClassification,…]

For each class a directory with its configuration is made, as of a model that nobody has seen: a proposal consults no
table of families. Then a stopwatch runs over the two commands of a user: one proposes a plan and writes it, the other
verifies it on two tensor-parallel ranks.
"""

from __future__ import annotations

import argparse
import importlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import table

_CLASSES = (
    "bert/BertForSequenceClassification",
    "gpt2/GPT2LMHeadModel",
    "opt/OPTForCausalLM",
    "t5/T5ForConditionalGeneration",
    "vit/ViTForImageClassification",
)
_COLUMNS = ("class", "files", "lines", "commands", "parameters divided", "plan, s", "verified, s", "CPU, s", "verdict")
_NOTE = (
    "A proposal consults no table of families: these are models that nobody has seen. The first command proposes "
    "a plan and writes it, the second trains the model by it on two tensor-parallel ranks and plainly. The CPU time of "
    "both does not depend on what else the machine does."
)
_BOOSTER = (sys.executable, "-c", "from booster.cli.main import main; main()")


@dataclass(frozen=True)
class Added:
    """What a family took.

    Attributes:
        lines: of the plan, one entry a line.
        share: of the parameters that two ranks divide.
        proposed_s, verified_s: seconds of both commands.
        cpu_s: of both commands and their ranks, which a loaded machine does not change.
        verdict: of the second command, or what the first one said.
    """

    lines: int
    share: float
    proposed_s: float
    verified_s: float
    cpu_s: float
    verdict: str


def add(name: str, layout: tuple[str, ...]) -> Added:
    """Propose and verify a plan for family/class with a stopwatch."""
    family, _, class_name = name.partition("/")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config = getattr(module, class_name).config_class(architectures=[class_name])
    before = _cpu_s()
    with tempfile.TemporaryDirectory(prefix="family-") as folder:
        config.save_pretrained(folder)
        plan, report = Path(folder, "plan.json"), Path(folder, "report.json")
        proposed_s, said = _timed("verify", folder, "--propose", "--output", str(plan), "--json", str(report))
        if not plan.is_file():
            return Added(0, 0.0, proposed_s, 0.0, _cpu_s() - before, said)
        verified_s, said = _timed("verify", folder, "--plan", str(plan), *layout)
        share = json.loads(report.read_text(encoding="utf-8"))["parameters_cut"]
        lines = len(plan.read_text(encoding="utf-8").splitlines())
        return Added(lines, share, proposed_s, verified_s, _cpu_s() - before, said)


def _cpu_s() -> float:
    """Return the CPU seconds of all commands so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _timed(*arguments: str) -> tuple[float, str]:
    """Return the seconds of a command of `booster`, and "equal" or the last line of what it said."""
    start = time.perf_counter()
    done = subprocess.run([*_BOOSTER, *arguments], capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode == 0:
        return seconds, "equal"
    return seconds, (done.stderr or done.stdout).strip().splitlines()[-1]


def report(quick: bool) -> str:
    classes = _CLASSES[:1] if quick else _CLASSES
    return table(
        "A family by rules alone", list(_COLUMNS), [_row(name, add(name, ("--tp", "2"))) for name in classes], _NOTE
    )


def _row(name: str, found: Added) -> list[object]:
    seconds = [f"{each:.0f}" for each in (found.proposed_s, found.verified_s, found.cpu_s)]
    return [f"`{name}`", 1, found.lines, 2, f"{found.share:.0%}", *seconds, found.verdict]


def main() -> None:
    """Print the table, row by row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", default=",".join(_CLASSES), help="family/class, separated by commas")
    parser.add_argument("--layout", default="--tp 2", help="of the second command")
    options = parser.parse_args()
    _tell(_COLUMNS)
    _tell(["---"] * len(_COLUMNS))
    for name in options.classes.split(","):
        _tell(_row(name, add(name, tuple(options.layout.split()))))


def _tell(cells: Iterable[object]) -> None:
    sys.stdout.write(f"| {' | '.join(map(str, cells))} |\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
