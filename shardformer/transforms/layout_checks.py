"""Reasons why a layout conflicts with what a model computes across tokens, layers or heads.

Context parallelism inside of layers: parts of sequences between attentions, whole sequences around the layers.

For models whose inputs cannot be sharded as one sequence: encoder-decoders, and models that embed or mask their tokens
in their own way. Attention exchanges parts of sequences for heads (DeepSpeed-Ulysses, arXiv 2309.14509), as
`sequence_parallel/ulysses.py` does between tensor-parallel ranks.
"""

from __future__ import annotations

from torch import Tensor, nn

from shardformer.attention import uses_registry
from shardformer.distributed.collectives import all_gather, local_slice
from shardformer.loss.routers import router_loss_of
from shardformer.policies.base import Policy
from shardformer.sequence_parallel.split_gather import SEQ_DIM, SequenceParallel
from shardformer.shard_config import ShardConfig
from shardformer.transforms.context_parallel import counting_reasons


def router_problems(model: nn.Module, config: ShardConfig) -> list[str]:
    """Return layouts that conflict with a load-balancing loss, which reads the scores of all layers and tokens."""
    routers = router_loss_of(model)
    adds_up = routers is not None and routers.adds_up
    stages = config.stage_manager.num_stages
    spread = {
        f"pp_size={stages}": stages > 1 and not adds_up,
        "cp_size above 1": config.context is not None and not adds_up,
        "sequence_parallelism_mode='all_to_all'": config.uses_ulysses and not adds_up,
    }
    return [
        f"output_router_logits=True adds a loss over the router scores of all layers and tokens, which {what} "
        "spreads over ranks; use output_router_logits=False, or another layout"
        for what, is_asked in spread.items()
        if is_asked
    ]


def exchange_problems(model: nn.Module, policy: Policy, config: ShardConfig) -> list[str]:
    """Return what keeps `all_to_all` from exchanging heads: it needs attention that uses the registry."""
    mode, name = "sequence_parallelism_mode='all_to_all'", type(model).__name__
    attends = policy.own_attention or any(uses_registry(module) for module in model.modules())
    if not attends or not policy.supports_ulysses:
        return [f"{mode} cannot reach the attention of {name}; use 'split_gather' or no sequence parallelism"]
    if policy.stages is not None and (reason := next(counting_reasons(model, policy), None)) is not None:
        return [
            f"{mode} cannot divide the sequences of {name}, {reason}; use 'split_gather' or no sequence parallelism"
        ]
    size = config.tensor_parallel_size
    kv_heads = getattr(model.config, "num_key_value_heads", None) or size
    if kv_heads % size and size % kv_heads:
        return [f"{mode} with tp_size={size} neither divides num_key_value_heads={kv_heads} nor is a multiple of it"]
    return []


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
