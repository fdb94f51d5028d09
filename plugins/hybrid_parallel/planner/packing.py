"""What packing changes in the cost of attention: tokens of a row belong to documents that do not see each other."""

from __future__ import annotations

from dataclasses import dataclass, replace

from plugins.hybrid_parallel.planner.op_recorder import Operator


@dataclass(frozen=True)
class Packing:
    """Rows of several documents each.

    Attributes:
        document: mean number of tokens of a document, weighted by tokens; a row is one sample.
        length: tokens of a row.
        is_varlen: whether attention computes the pairs of tokens of one document alone, as flash-attn does. All other
            kernels compute all pairs of a row under a mask.
    """

    document: float
    length: int
    is_varlen: bool

    @property
    def share(self) -> float:
        """Part of the pairs of tokens of a row that are of one document."""
        return min(1.0, self.document / self.length)

    def executed(self, operator: Operator) -> Operator:
        """Return an operator with the FLOPs that a device computes for packed rows."""
        if operator.kind != "attention":
            return operator
        # A kernel that gets a mask does not know that half of it is empty.
        factor = self.share if self.is_varlen else 2.0 if operator.is_causal else 1.0
        return replace(operator, flops=operator.flops * factor)

    def useful(self, operator: Operator) -> float:
        """Return the FLOPs of an operator between tokens of one document."""
        return operator.flops * (self.share if operator.kind == "attention" else 1.0)

    def mask_bytes(self, rows: int, itemsize: int) -> tuple[int, int]:
        """Return the bytes of the mask of a micro-batch, and those that each attention layer saves of it.

        The mask is boolean, [rows, 1, length, length]; torch saves it in the dtype of the scores with every layer.
        """
        pairs = 0 if self.is_varlen else rows * self.length**2
        return pairs, pairs * itemsize
