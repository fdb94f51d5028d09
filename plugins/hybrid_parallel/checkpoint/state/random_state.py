"""Random states of a rank (torch, the model's stream, Python, numpy) as tensors under a per-rank prefix."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plugins.hybrid_parallel.boosted.model import HybridParallelModel
from plugins.hybrid_parallel.checkpoint.state.global_tensor import GlobalTensor

PREFIX = "random/"
_STREAM = "stream_"
_PYTHON_VERSION = 3  # version number in the tuple of random.getstate


def random_tensors(model: HybridParallelModel | None) -> dict[str, GlobalTensor]:
    """Return the current random states of this rank."""
    states = {"torch_cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["torch_cuda"] = torch.cuda.get_rng_state()
    if model is not None and model.stream is not None:
        states |= {f"{_STREAM}{key}": value for key, value in model.stream.state_dict().items()}
    _, words, gauss = random.getstate()
    states["python"] = torch.tensor(words, dtype=torch.int64)
    states["python_gauss"] = _optional(gauss)
    if "numpy" in sys.modules:
        _, words, position, has_gauss, gauss = sys.modules["numpy"].random.get_state()
        states["numpy"] = torch.tensor([*words.tolist(), position, has_gauss], dtype=torch.int64)
        states["numpy_gauss"] = torch.tensor(gauss, dtype=torch.float64)
    return {f"{_own_prefix()}{key}": GlobalTensor.whole(value.clone()) for key, value in states.items()}


class RandomLoad:
    """Random states of this rank that are being loaded: buffers to fill, then to apply.

    Args:
        model: the boosted model.
        saved: name -> saved tensor, for all tensors of the checkpoint.
    """

    def __init__(self, model: HybridParallelModel | None, saved: Any) -> None:
        self.model = model
        prefix = _own_prefix()
        self._states = {
            name.removeprefix(prefix): torch.empty(tensor.shape, dtype=tensor.torch_dtype)
            for name, tensor in saved.items()
            if name.startswith(prefix)
        }
        self.tensors = {f"{prefix}{key}": GlobalTensor.whole(value) for key, value in self._states.items()}

    def apply(self) -> None:
        """Set the generators to the loaded states; a generator without a saved state is not changed."""
        states = self._states
        if "torch_cpu" in states:
            torch.set_rng_state(states["torch_cpu"])
        if "torch_cuda" in states and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(states["torch_cuda"])
        stream = {key.removeprefix(_STREAM): value for key, value in states.items() if key.startswith(_STREAM)}
        if self.model is not None and self.model.stream is not None and stream:
            self.model.stream.load_state_dict(stream)
        if "python" in states:
            gauss = states["python_gauss"].tolist()
            random.setstate((_PYTHON_VERSION, tuple(states["python"].tolist()), gauss[0] if gauss else None))
        if "numpy" in states:
            import numpy as np

            *words, position, has_gauss = states["numpy"].tolist()
            words = np.array(words, dtype=np.uint32)
            np.random.set_state(("MT19937", words, position, has_gauss, states["numpy_gauss"].item()))


def _own_prefix() -> str:
    return f"{PREFIX}{dist.get_rank()}/"


def _optional(number: float | None) -> Tensor:
    return torch.tensor([] if number is None else [number], dtype=torch.float64)
