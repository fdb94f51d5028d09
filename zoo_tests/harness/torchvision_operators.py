"""Make torchvision importable beside a torch that its compiled operators do not fit.

The wheels of the package index are compiled for CUDA. Beside torch for CPUs their operators cannot be loaded, and then
torchvision cannot be imported, because it registers kernels for two of them. timm and transformers call neither in the
models that are trained here: it is enough to declare them.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

_SUPPRESSIONS = ("nms", "qnms")  # of boxes that overlap


def declare_operators() -> None:
    """Declare operators of torchvision that its import needs, if it is installed and cannot load its own."""
    found = importlib.util.find_spec("torchvision")
    if found is None or hasattr(torch.ops.torchvision, _SUPPRESSIONS[0]):
        return
    try:
        torch.ops.load_library(next(Path(found.origin).parent.glob("_C*.so")))
    except (OSError, StopIteration):  # linked against CUDA
        for name in _SUPPRESSIONS:
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
