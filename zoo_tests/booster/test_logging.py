"""What importing the library changes in the log of others: one line of bitsandbytes, and nothing else."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
import logging
import booster
{configured}
import bitsandbytes
log = logging.getLogger("bitsandbytes.backends.cpu.ops")  # says the line by itself on CPUs with AVX512-BF16 only
log.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s.", "No module named 'kernels'")
log.warning("another warning")
"""


def _says(configured: str) -> str:
    script = _SCRIPT.format(configured=configured)
    return subprocess.run([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, check=True).stderr


def test_a_missing_kernel_of_bitsandbytes_is_no_warning() -> None:
    assert _says("") == "another warning\n"


def test_it_is_said_to_those_who_log_at_info() -> None:
    assert "gemm_4bit_forward" in _says("logging.basicConfig(level='INFO')")
