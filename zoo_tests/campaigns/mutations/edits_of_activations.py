"""Mutants that change one line of what moves activations out of memory and back."""

from __future__ import annotations

from zoo_tests.campaigns.mutations.edits import Edit

_BITS = "zoo_tests/parity/test_offload_activations.py::test_trains_to_the_same_bits"
_PIPELINE = f"{_BITS}[gpt2-lm_head-pp2-zero1-adamw-fp32-clip]"

EDITS_OF_ACTIVATIONS: dict[str, Edit] = {
    "a saved view starts where its memory starts": Edit(
        "plugins.hybrid_parallel.offload.activations",
        "whole.as_strided(self._shape, self._stride, self._offset)",
        "whole.as_strided(self._shape, self._stride, 0)",
        (_PIPELINE,),
    ),
    "memory that has left is taken for what follows at its address": Edit(
        "plugins.hybrid_parallel.offload.activations",
        "for key, storage in self._known.items() if storage.is_resident}",
        "for key, storage in self._known.items()}",
        (f"{_BITS}[bert-masked_lm-single-zero1-fp32-clip-num_hidden_layers=4]",),
    ),
    "what is left of a range overlaps what was taken": Edit(
        "plugins.hybrid_parallel.offload.stores",
        "(offset + length, free - length)",
        "(offset, free)",
        (_PIPELINE,),
    ),
}
