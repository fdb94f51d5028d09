"""Failure monitor: if a rank fails, the job ends with one line that names it, instead of hanging.

It detects ranks that raise, die, are stopped or skip a collective. A thread on every rank checks the processes of its
machine, the stack of its own main thread and the job's store, and ends its process even if the main thread is blocked
in a collective. This is not error handling: nothing is retried or recovered. Everything here is a no-op until
`booster.launch` calls `install`.
"""

from booster.failure.diagnosis import Failure
from booster.failure.hooks import (
    begin_batch,
    destroy_at_exit,
    guard,
    install,
    is_watching,
    publish,
    report_uncaught,
    requests,
    staying_outermost,
)

__all__ = [
    "Failure",
    "begin_batch",
    "destroy_at_exit",
    "guard",
    "install",
    "is_watching",
    "publish",
    "report_uncaught",
    "requests",
    "staying_outermost",
]
