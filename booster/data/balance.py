"""Cost of documents, and division of documents into parts of equal cost."""

from __future__ import annotations

from collections.abc import Sequence

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
