"""What happens when a rank fails: the job ends with one line that names it, instead of leaving the other ranks waiting.

Found are ranks that raise, die, are stopped or leave a collective out. A thread on every rank looks at the processes of
its machine, at the stack of its own main thread and into the job's store, and ends its process even where the main
thread is blocked in a collective. This is not error handling: nothing is retried or recovered. Until `install` was
called (by `booster.launch`), everything here does nothing.
"""

from booster.failure.failure_report import Failure
from booster.failure.hooks import guard, install, publish, report_uncaught, staying_outermost

__all__ = ["Failure", "guard", "install", "publish", "report_uncaught", "staying_outermost"]
