"""Head counts and fused-part sizes with which a module's forward splits the features of its layers."""

from __future__ import annotations

import inspect
import re

from torch import nn

from shardformer.attention import uses_registry
from shardformer.utils.source import names_read_by

# Attribute names of head counts: num_heads, n_head_kv, heads, h; not head_dim or num_key_value_groups.
HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
HEADS = re.compile(r"(?!.*(dim|size|group|mask|idx))(.*head.*|n?_?h)")
HEAD_NORM = re.compile(r"(q|k|v|query|key|value)_(layer_?)?norm")
# Functions of all features of a token, which those of one rank cannot tell.
_OF_ALL_FEATURES = frozenset(
    ("mean", "std", "var", "std_mean", "var_mean", "norm", "vector_norm", "normalize", "layer_norm", "rms_norm")
    + ("group_norm", "softmax", "log_softmax", "logsumexp", "cumsum", "cumprod", "topk", "kthvalue", "sort", "argsort")
    + ("median", "quantile", "amax", "amin", "aminmax", "argmax", "argmin")
)
_PRODUCTS = frozenset(("matmul", "bmm", "baddbmm", "einsum", "scaled_dot_product_attention"))


def whole_counts(module: nn.Module, features: int, stride: int) -> dict[str, int]:
    """Return attributes of `module` that shrink when a layer is cut; `stride`: equal parts of its features."""
    part = features // stride
    numbers = {name: value for name, value in vars(module).items() if type(value) is int and value > 1}
    read = names_read(module)
    return {
        name: value
        for name, value in numbers.items()
        if name in read and ((HEADS.fullmatch(name) and part % value == 0) or (stride > 1 and value == part))
    }


def names_read(module: nn.Module) -> set[str]:
    """Return all names that the module's forward, and the module's methods that it calls, look up."""
    found: set[str] = set()
    todo = ["forward"]
    while todo:
        names = names_read_by(getattr(module, todo.pop(), None)) - found
        found |= names
        todo += [name for name in names if inspect.isroutine(getattr(type(module), name, None))]
    return found


def functions_of_all_features(module: nn.Module) -> set[str]:
    """Return the functions of all features that a feed-forward calls itself, or in a part without parameters.

    Attention is no feed-forward: its softmax is one over keys, and its norms are those of a head. One of a user's own
    is told by a product of what its projections return.
    """
    parts = dict(module.named_children())
    if is_attention(module) or _PRODUCTS & (names_read(module) - parts.keys()):
        return set()
    inside = [part for part in parts.values() if not any(True for _ in part.parameters())]
    return _OF_ALL_FEATURES & set.union(names_read(module) - parts.keys(), *map(names_read, inside))


def drops_by_function(module: nn.Module) -> bool:
    """Return whether the forward of `module` calls `nn.functional.dropout`, except through the attention registry."""
    names = names_read(module)
    is_function = "dropout" in names and bool(names & {"functional", "F"})
    is_module = isinstance(getattr(module, "dropout", None), nn.Module)
    return is_function and not is_module and "ALL_ATTENTION_FUNCTIONS" not in names


def is_attention(module: nn.Module) -> bool:
    """Return whether `module` has numbers of heads or features of a head."""
    return any(hasattr(module, name) for name in (*HEAD_COUNTS, "head_dim", "num_key_value_groups", "qk_head_dim"))


def attends(module: nn.Module) -> bool:
    """Return whether `module` is an attention that uses transformers' registry, which linear attention does not."""
    return (
        uses_registry(module)
        and (is_attention(module) or hasattr(module, "head_size"))
        and "ALL_ATTENTION_FUNCTIONS" in names_read_by(type(module).forward)
    )
