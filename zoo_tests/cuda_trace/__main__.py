"""Traces steps: answers each line of standard input, a `steps.Trace` in JSON, with the counts of a step in JSON."""

from __future__ import annotations

from zoo_tests.cuda_trace import guard

if __name__ == "__main__":
    guard.load()  # before torch

    from zoo_tests.cuda_trace.run import main

    main()
