"""Run a job on two machines whose links change when it asks: `run_at_rates RANKS FOLDER SCRIPT MODE RATE...`.

Each machine has RANKS ranks. The script gets FOLDER, MODE and the rates. For each rate in turn it writes
`FOLDER/wants-RATE`, and goes on when `FOLDER/has-RATE` is there. The rate "none" is no limit.
"""

from __future__ import annotations

import sys
from pathlib import Path

from zoo_tests.cluster.cluster import Cluster
from zoo_tests.cluster.namespaces import problem

_LIMIT_S = 1500.0


def main() -> None:
    if problem() is not None:
        raise SystemExit(problem())
    ranks, folder, script, mode, *rates = sys.argv[1:]
    with Cluster(2, shared=Path(folder)) as cluster:
        jobs = cluster.start_job(int(ranks), script, folder, mode, *rates)
        for rate in rates:
            asks = jobs[0].wait_for(Path(folder, f"wants-{rate}").exists, _LIMIT_S)
            assert asks, "\n".join(job.err[-3000:] for job in jobs)
            for machine in cluster.machines:
                machine.link.set(None if rate == "none" else rate)
            Path(folder, f"has-{rate}").touch()
        codes = [job.wait(_LIMIT_S) for job in jobs]
        assert codes == [0] * len(jobs), "\n".join(job.err[-3000:] for job in jobs)


if __name__ == "__main__":
    main()
