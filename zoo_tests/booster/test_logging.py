"""What importing the library changes in the log of others: one line of bitsandbytes, and nothing else."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
import logging
import booster
import bitsandbytes
log = logging.getLogger("bitsandbytes.backends.cpu.ops")  # says the line by itself on CPUs with AVX512-BF16 only

def say():
    log.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s.", "No module named 'kernels'")
    log.warning("another warning")

say()
logging.basicConfig(level="INFO")
say()
"""


def test_a_missing_kernel_of_bitsandbytes_is_said_to_those_who_log_at_info() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], stderr=subprocess.PIPE, text=True, check=True)
    quiet, line, other = done.stderr.splitlines()
    assert quiet == "another warning" and "gemm_4bit_forward" in line and other.endswith("another warning")
