"""How many samples a batch has, and how rows are shared so that replicas have equal work.

The entries of most batches have a row for each sample. Others list the parts of all samples, as the nodes of graphs,
crops or boxes do. The model's main input and texts are known to have a row for each sample; where entries disagree and
none is known, the labels tell. Where nothing tells, the batch is refused as soon as its samples must be counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from booster.errors import ConfigurationError

_TEXTS = ("input_ids", "inputs_embeds", "prompt_ids", "prompt_input_ids")
_LABELS = "labels"


def main_input_of(model: Any) -> str | None:
    """Return the name of a model's main input, its attribute `main_input_name`, as transformers has it; None if none.

    A module of one's own may set it to any entry of its batches that has a row for each sample.
    """
    name = getattr(model, "main_input_name", None)
    name = name[0] if isinstance(name, list | tuple) and name else name
    return name if isinstance(name, str) else None


def rows_of(batch: Mapping[Any, Any], main: str | None = None) -> int | None:
    """Return the number of samples of a batch; None if it does not tell.

    Args:
        batch: name -> entry. Tensors count; where there is none, what is nested, and lists with an item for
            each sample.
        main: name of the model's main input, see `main_input_of`.
    """
    for name in (main, *_TEXTS):
        if _has_rows(batch.get(name)):
            return len(batch[name])
    sizes = {size for _, size in _sizes(batch)}
    if len(sizes) > 1 and _has_rows(batch.get(_LABELS)):
        return len(batch[_LABELS])
    return sizes.pop() if len(sizes) == 1 else None


def rows_of_call(args: tuple, kwargs: Mapping[str, Any], main: str | None = None) -> int | None:
    """Return the number of samples that a model is called with, 1 if it takes no batch; None if they do not tell."""
    given = {**dict(enumerate(args)), **kwargs}
    return rows_of(given, main) if _sizes(given) else 1


def num_rows(batch: Mapping[Any, Any], main: str | None = None) -> int:
    """Return the number of samples of a batch.

    Args:
        batch, main: see `rows_of`.
    """
    rows = rows_of(batch, main)
    if rows is None:
        raise unknown_rows(batch)
    return rows


def is_empty(batch: Mapping[Any, Any], main: str | None = None) -> bool:
    """Return whether a batch is the share of a replica that has no samples of it: all its entries have no rows."""
    return rows_of(batch, main) == 0


def unknown_rows(batch: Mapping[Any, Any] | None = None) -> ConfigurationError:
    """Return the refusal of a batch whose samples must be counted; None for that of another replica."""
    way_out = (
        "set main_input_name of the model to the entry that has a row for each sample, give labels, or use one "
        "micro-batch and a loss of the form (sum, count)"
    )
    if batch is None or rows_of(batch) is not None:
        return ConfigurationError(f"the entries of a replica's batch have different numbers of rows; {way_out}")
    sizes = [f"{name} has {size}" for name, size in _sizes(batch)]
    if not sizes:
        return ConfigurationError(
            f"the batch has no tensor among {sorted(map(str, batch))}; give at least the model's main input"
        )
    return ConfigurationError(
        f"the entries of the batch have different numbers of rows ({', '.join(sizes)}), and none is known to have one "
        f"for each sample; {way_out}"
    )


def is_shared(name: str, value: Tensor) -> bool:
    """Return whether all samples share a tensor: a number, positions without a batch, a mask [1, ...] or [seq, seq]."""
    if value.dim() == 0 or name == "cache_position" or (name == "position_ids" and value.dim() == 1):
        return True
    is_one = len(value) == 1 and ("mask" in name or "position" in name)
    return is_one or ("mask" in name and value.dim() == 2 and value.shape[0] == value.shape[1])


def sample_dim(name: str, value: Tensor) -> int:
    """Return the dim along which an entry may have its samples: multimodal rotary positions are [3, batch, seq]."""
    return 1 if name == "position_ids" and value.dim() == 3 else 0


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _sizes(batch: Mapping[Any, Any]) -> list[tuple[str, int]]:
    """Return the names of entries, and how many rows they have; of those that all samples share only if all are."""
    tensors = [(str(name), value) for name, value in batch.items() if _has_rows(value)]
    own = [each for each in tensors if not is_shared(*each)] or tensors
    return [(name, value.shape[sample_dim(name, value)]) for name, value in own] or list(_inner_sizes("", batch))


def _inner_sizes(path: str, value: Any) -> Iterator[tuple[str, int]]:
    """Yield what the rows of nested entries may be: a tuple holds items of samples, or tensors of all of them."""
    if _has_rows(value):
        yield path, len(value)
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _inner_sizes(f"{path}.{name}" if path else str(name), each)
    elif isinstance(value, list | tuple):
        yield path, len(value)
        for index, each in enumerate(value if isinstance(value, tuple) else ()):
            yield from _inner_sizes(f"{path}[{index}]", each)


# At this length, attention costs as much as the linear layers of a model of hidden size 768.
ATTENTION_LENGTH = 12 * 768


def attention_length_of(hidden_size: int) -> int:
    """Return the length of a document at which attention costs as much as the linear layers.

    A layer has about 12 * hidden_size**2 weights, that is 24 * hidden_size**2 operations for each token. Causal
    attention takes 2 * hidden_size * length operations for each token: scores and values, of half of the pairs. See
    arXiv 2001.08361, section 2.1.
    """
    return 12 * hidden_size


def cost_of(length: int, attention_length: int = ATTENTION_LENGTH) -> int:
    """Return the relative cost of a document: its linear layers, and the square of its length for attention.

    Args:
        length: tokens of the document.
        attention_length: length at which both cost the same.
    """
    return length * (attention_length + length)


def cuts_of(costs: Sequence[int], parts: int) -> list[int]:
    """Cut a sequence of costs into consecutive parts whose largest sum is as small as possible.

    Args:
        costs: positive costs, one or more.
        parts: number of parts, at most as many as there are costs; none is empty.

    Returns:
        [parts + 1] indices, from 0 to len(costs).
    """
    least, most = max(costs), sum(costs)
    while least < most:
        limit = (least + most) // 2
        if len(_filled(costs, limit, 1)) - 1 <= parts:
            most = limit
        else:
            least = limit + 1
    return _filled(costs, least, parts)


def _filled(costs: Sequence[int], limit: int, parts: int) -> list[int]:
    """Fill parts up to `limit`, one after the other; leave a cost for each of `parts` that is not begun yet."""
    cuts, held = [0], 0
    for index, cost in enumerate(costs):
        is_needed = len(costs) - index <= parts - len(cuts)
        if index > cuts[-1] and (held + cost > limit or is_needed):
            cuts.append(index)
            held = 0
        held += cost
    return [*cuts, len(costs)]
