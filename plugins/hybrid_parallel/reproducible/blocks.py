"""The number of blocks that tensor-parallel layers are computed in, so that bits do not depend on the layout."""

from __future__ import annotations

from torch import nn
from torch.distributed import ProcessGroup

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.distributed.mesh import HybridMesh, block_group
from plugins.hybrid_parallel.reproducible.feature import separate_use
from shardformer.sharder import ModelSharder
from shardformer.transforms.layout_checks import InBlocks, block_problems

_COUNTS = (4, 2)  # without an option, the first that the model takes


def tensor_group(model: nn.Module, config: HybridParallelConfig, mesh: HybridMesh) -> ProcessGroup:
    """Return the tensor-parallel group for a whole model; all ranks of the world must call this.

    Raises:
        ConfigurationError: if the model cannot be computed in the blocks that are asked for, or that `tp_size` needs.
    """
    count = _num_blocks(model, config)
    sequence_count = _num_sequence_blocks(model, config, count)
    return mesh.group("tp") if count == 1 else block_group(mesh, count, separate_use, sequence_count)


def _num_sequence_blocks(model: nn.Module, config: HybridParallelConfig, count: int) -> int:
    """Return the number of blocks of each sequence, which must not depend on the layout.

    Args:
        count: number of blocks of the layers.
    """
    asked = config.debugging.reproducible_sequence_blocks
    if asked == 1 or (asked is None and count == 1):
        return 1
    if count == 1:
        problem = _problem(model, config, _COUNTS[-1]) or "its layers are computed at once"
    else:
        problem = _problem(model, config, count, cuts_sequences=True)
    if not problem:
        return asked or count
    if asked is None:  # under sequence parallelism the model is refused for the same reason
        return 1
    raise ConfigurationError(
        f"reproducible_sequence_blocks={asked} cannot divide the sequences of {type(model).__name__}: "
        f"{problem.split(';')[0]}; use reproducible_sequence_blocks=1 without sequence parallelism, or "
        "reproducible=False"
    )


def _num_blocks(model: nn.Module, config: HybridParallelConfig) -> int:
    """Return the number of blocks of the layers, which must not depend on the layout."""
    asked, tp_size, name = config.debugging.reproducible_blocks, config.parallel.tp_size, type(model).__name__
    counts = _COUNTS if asked is None else (asked,)
    reasons = {count: _problem(model, config, count) for count in counts if count > 1}
    count = next((count for count, reason in reasons.items() if not reason), 1)
    if asked is not None and count != asked:
        raise ConfigurationError(
            f"reproducible_blocks={asked} cannot divide the layers of {name}: {reasons[asked]}; use "
            "reproducible_blocks=1 with tp_size=1, or reproducible=False"
        )
    if count % tp_size:
        why = next((f", because {reason}" for size, reason in reasons.items() if reason and size <= tp_size), "")
        takes = not why and asked is None and tp_size.bit_count() == 1
        other = f"reproducible_blocks={tp_size} in every layout" if takes else "reproducible=False"
        raise ConfigurationError(
            f"tp_size*cp_size={tp_size} does not divide the reproducible_blocks={count} of {name}{why}; use a product "
            f"that divides {count}, or {other}"
        )
    return count


def _problem(model: nn.Module, config: HybridParallelConfig, count: int, cuts_sequences: bool = False) -> str:
    """Return the first reason why the model cannot be computed in blocks; empty if it can.

    Args:
        cuts_sequences: in blocks of the sequence too, which need what sequence parallelism needs.
    """
    policy, kernels = config.policy, config.kernels
    options = {
        "custom_policy": policy.custom_policy is not None,
        "tp_info": policy.tp_info is not None,
        "sharding_dim": policy.sharding_dim is not None,
        "enable_jit_fused=True": kernels.enable_jit_fused,
        "enable_all_optimization=True": kernels.enable_all_optimization,
    }
    opaque = next((option for option, is_set in options.items() if is_set), None)
    if opaque is not None:
        return f"{opaque} does not tell how to compute a layer in blocks"
    shard_config = InBlocks(enable_sequence_parallelism=cuts_sequences)
    shard_config.count = count
    try:
        sharder = ModelSharder(model, shard_config)
        sharder.check()
        problems = block_problems(sharder, count)
    except ValueError as error:  # no policy, or a layer that cannot be divided
        problems = [str(error)]
    problem = next(iter(problems), "").replace("tp_size=", "reproducible_blocks=")
    return problem.replace("enable_sequence_parallelism=True", "reproducible_sequence_blocks")
