"""Context parallelism inside of layers: parts of sequences between attentions, whole sequences around the layers.

For models whose inputs cannot be sharded as one sequence: encoder-decoders, and models that embed or mask their tokens
in their own way. Attention exchanges parts of sequences for heads (DeepSpeed-Ulysses, arXiv 2309.14509), as
`sequence_parallel/ulysses.py` does between tensor-parallel ranks.
"""

from __future__ import annotations

from torch import Tensor

from shardformer.distributed.collectives import all_gather, local_slice
from shardformer.sequence_parallel.split_gather import SEQ_DIM, SequenceParallel


class LayerSequence(SequenceParallel):
    """The parts of sequences that context-parallel ranks have inside of layers.

    What is around the layers is computed on every rank, with a copy of the loss that is divided by the number of ranks.
    So a rank has a summand of each gradient, which are added up with those of the replicas.
    """

    def split(self, x: Tensor) -> Tensor:
        """Split [batch, seq, hidden] -> [batch, seq/cp, hidden]; the gradient of other parts is zero on this rank."""
        return local_slice(x, SEQ_DIM, self.group)

    def _gather_whole(self, x: Tensor) -> Tensor:
        return all_gather(x, SEQ_DIM, self.group, self.length)
