"""The kernel that rounds a matrix to FP8 and transposes it, in Triton's interpreter, to the bit against torch.

The interpreter converts subnormal numbers, and mantissas that round up to the next power of two, wrongly; conversions
are torch's here. Skipped without Triton, which a CPU build of torch does not bring.
"""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from typing import Any

import pytest
import torch

SHAPES = ((48, 80), (1, 16), (70, 64))
SIZES = {"normal": 3.0, "none": 0.0, "subnormal": 1e-38}


def check() -> None:
    import numpy as np
    from triton.runtime import interpreter

    from shardformer.matmul.float8 import Rounded, round_on_gpus

    convert = interpreter._convert_float
    to = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2, "fp32": torch.float32}

    def by_torch(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if str(target) not in to or str(source) not in ("fp32", "bf16"):
            return convert(values, source, target, rounding)
        values = torch.from_numpy(np.ascontiguousarray(values))
        values = values.view(torch.float32 if str(source) == "fp32" else torch.bfloat16).to(to[str(target)])
        return values.numpy() if str(target) == "fp32" else values.view(torch.uint8).numpy()

    interpreter._convert_float = by_torch
    torch.manual_seed(0)
    for shape, dtype, is_gradient, size in product(SHAPES, (torch.bfloat16, torch.float32), (False, True), SIZES):
        x = (torch.randn(shape) * SIZES[size]).to(dtype)
        expected, (values, columns, scale) = Rounded(x, is_gradient), round_on_gpus()(x, is_gradient, None)
        bits, case = expected.values.view(torch.uint8), f"{shape} {dtype} {is_gradient} {size}"
        assert torch.equal(scale, expected.scale), case
        assert torch.equal(values.view(torch.uint8), bits) and torch.equal(columns.view(torch.uint8), bits.t()), case


def test_bits_are_those_of_torch() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "zoo_tests.shardformer.matmul.test_float8_cast"]
    subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, check=True)


if __name__ == "__main__":
    check()
