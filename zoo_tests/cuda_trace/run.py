"""Runs the traces that the command reads."""

from __future__ import annotations

import json
import sys
import time
import traceback

from booster.errors import ConfigurationError
from zoo_tests.cuda_trace import other_systems, steps
from zoo_tests.cuda_trace.steps import Trace


def main() -> None:
    for line in sys.stdin:
        start = time.perf_counter()
        try:
            trace = Trace(**json.loads(line))
            answer = (steps if trace.system == "ours" else other_systems).counts_of(trace).as_json()
        except ConfigurationError as error:
            answer = {"error": str(error), "refused": True}
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-8:]
            answer = {"error": f"{type(error).__name__}: {error}", "where": [f"{f.filename}:{f.lineno}" for f in last]}
        answer["seconds"] = time.perf_counter() - start
        print(json.dumps(answer), flush=True)
