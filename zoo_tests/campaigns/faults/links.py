"""What becomes of a job when the network between its machines fails: `--cluster` of the campaign.

Two machines of two ranks each (tensor parallel 2 x data parallel 2), made of namespaces, see `zoo_tests/cluster`. A
fault strikes between two steps; what the job must survive leaves no error line and the exit code 0.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from benchmarks.harness import table
from zoo_tests.campaigns.faults.watch import JOB
from zoo_tests.cluster.cluster import Cluster, Machine
from zoo_tests.cluster.namespaces import Process, problem

NAMED_WITHIN_S = 10.0
_START_S = 400.0
_LIMIT_S = 150.0
_RATE, _SLOW_RATE = "1gbit", "50mbit"
_POLL_S = 0.02
_PAGE = """# Faults of links

Written by `python -m zoo_tests.campaigns.faults --cluster --output docs/results/link_faults.md`. Two machines of two
ranks each, made of namespaces and joined by links of 1 Gbit/s ([clusters](../clusters.md)); tp 2 inside a machine, dp 2
across, by `booster run` with the c10d rendezvous. The fault strikes the link of the machine named, after the third
step. Promised: survived, or the machine named within {named:g} s. torch {torch}, {cores} cores.

{table}
One line of each that was named:

{examples}
"""


def _cut_for_five_seconds(machine: Machine) -> None:
    machine.link.cut()
    time.sleep(5)
    machine.link.mend()


@dataclass(frozen=True)
class LinkFault:
    """What happens to a machine's link.

    Attributes:
        strike: does it.
        survived: whether the job must go on and end well; otherwise it must end, and name the machine.
    """

    strike: Callable[[Machine], None]
    survived: bool


FAULTS = {
    "a link slows down to 1/20": LinkFault(lambda machine: machine.link.set(_SLOW_RATE), True),
    "1 % of packets are lost": LinkFault(lambda machine: machine.link.set(_RATE, loss=0.01), True),
    "cut for 5 s": LinkFault(_cut_for_five_seconds, True),
    "cut": LinkFault(lambda machine: machine.link.cut(), False),
    "cut, outgoing only": LinkFault(lambda machine: machine.link.cut("out"), False),
    "cut, incoming only": LinkFault(lambda machine: machine.link.cut("in"), False),
    "a machine loses its power": LinkFault(lambda machine: machine.lose_power(), False),
}


@dataclass(frozen=True)
class LinkOutcome:
    """What came of a job.

    Attributes:
        named_s: seconds until the first error line; infinite without one.
        gone_s: seconds from then (or from the fault) to the end of both agents; infinite if one remained.
        lines: the error lines of all machines.
        codes: exit codes of the agents; of a machine without power None.
        ended_well: number of ranks that reached the last step.
    """

    named_s: float
    gone_s: float
    lines: tuple[str, ...]
    codes: tuple[int | None, ...]
    ended_well: int


@dataclass(frozen=True)
class LinkTrial:
    """One job.

    Attributes:
        name: key of `FAULTS`.
        struck: index of the machine whose link is struck; the first has the job's store.
    """

    name: str
    struck: int

    def run(self) -> LinkOutcome:
        with Cluster(2) as cluster:
            for machine in cluster.machines:
                machine.link.set(_RATE)
            # With a step twice a second, training lasts longer than a cut that is survived.
            jobs = cluster.start_job(2, str(JOB), "nothing", "step", "0", '{"tp_size": 2}', STEP_S="0.5")
            strikes = jobs[0].wait_for(lambda: any("strikes at" in job.out for job in jobs), _START_S)
            assert strikes, "\n".join(job.err for job in jobs)
            began = time.monotonic()
            FAULTS[self.name].strike(cluster.machines[self.struck])
            return self._outcome(jobs, began)

    def _outcome(self, jobs: list[Process], began: float) -> LinkOutcome:
        named = gone = float("inf")
        while time.monotonic() - began < _LIMIT_S and gone == float("inf"):
            now = time.monotonic() - began
            if named == float("inf") and _error_lines(jobs):
                named = now
            if all(job.code is not None for job in jobs):
                gone = now - (named if named < float("inf") else 0.0)
            time.sleep(_POLL_S)
        ended = sum(job.out.count("ends well") for job in jobs)
        return LinkOutcome(named, gone, _error_lines(jobs), tuple(job.code for job in jobs), ended)

    def passes(self, outcome: LinkOutcome) -> bool:
        """Whether everything is as promised."""
        if FAULTS[self.name].survived:
            return not outcome.lines and outcome.codes == (0, 0) and outcome.ended_well == 4
        return self.is_named(outcome) and outcome.named_s <= NAMED_WITHIN_S and 0 not in outcome.codes

    def is_named(self, outcome: LinkOutcome) -> bool:
        """Whether the first line names a rank, both machines and what it waits for."""
        said = outcome.lines[0] if outcome.lines else ""
        return said.startswith("error: rank ") and "node1" in said and "node2" in said


def _error_lines(jobs: Iterable[Process]) -> tuple[str, ...]:
    return tuple(line for job in jobs for line in job.err.splitlines() if line.startswith("error"))


def report(repetitions: int) -> str:
    """Run every fault on both machines in turn; return the results page.

    Raises:
        SystemExit: this machine cannot hold others.
    """
    if problem() is not None:
        raise SystemExit(problem())
    rows, examples = [], []
    for name, fault in FAULTS.items():
        done = []
        for number in range(repetitions):
            trial = LinkTrial(name, (number + 1) % 2)
            outcome = trial.run()
            done.append((trial, outcome))
            print(f"{trial}: {'passes' if trial.passes(outcome) else 'FAILS'} {outcome}", flush=True)
        rows.append(_row(name, fault, done))
        lines = [outcome.lines[0] for _, outcome in done if outcome.lines]
        examples += [f"- {name}: `{lines[0]}`"] if lines else []
    columns = ["Fault", "Jobs", "Promised", "Survived", "Machine named", "Seconds until named (median / max)",
               "Seconds until all have ended (median / max)", "All as promised"]  # fmt: skip
    return _PAGE.format(
        named=NAMED_WITHIN_S,
        torch=torch.__version__,
        cores=os.cpu_count(),
        table=table("What happened", columns, rows),
        examples="\n".join(examples),
    )


def _row(name: str, fault: LinkFault, done: list[tuple[LinkTrial, LinkOutcome]]) -> list[object]:
    named = [outcome.named_s for _, outcome in done if outcome.lines]
    gone = [outcome.gone_s for _, outcome in done]
    return [
        name,
        len(done),
        "survived" if fault.survived else "named",
        sum(outcome.ended_well == 4 and not outcome.lines for _, outcome in done),
        sum(trial.is_named(outcome) for trial, outcome in done),
        f"{statistics.median(named):.1f} / {max(named):.1f}" if named else "-",
        f"{statistics.median(gone):.1f} / {max(gone):.1f}",
        sum(trial.passes(outcome) for trial, outcome in done),
    ]
