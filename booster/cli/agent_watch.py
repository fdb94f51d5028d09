"""End of an agent that waits for a rendezvous which it cannot reach any more.

When a job fails, torchrun's agent says so in the rendezvous. On a machine that is cut off, that waits for minutes.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

_POLL_S = 1.0
# Longer than ranks take to end: they get SIGTERM first, and SIGKILL 5 s later.
_PATIENCE_S = 15.0


def end_after_report(report: Path) -> None:
    """End this process some seconds after a rank has reported the job's failure, unless it ends by itself.

    Args:
        report: the file that a rank writes its report to.
    """
    threading.Thread(target=_watch, args=(report,), name="booster-agent-watch", daemon=True).start()


def _watch(report: Path) -> None:
    while not report.exists():
        time.sleep(_POLL_S)
    time.sleep(_PATIENCE_S)
    os._exit(1)
