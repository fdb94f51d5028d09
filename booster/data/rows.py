"""How many samples a batch has, how replicas share rows so that they have equal work, and documents in packed rows.

The entries of most batches have a row for each sample. Others list the parts of all samples, as the nodes of graphs,
crops or boxes do. The model's main input and texts are known to have a row for each sample; where entries disagree and
none is known, the labels tell. Where nothing tells, the batch is refused as soon as its samples must be counted.

Documents are put into rows of at most a number of tokens by first fit, and batches of one row into one order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import Sampler

from booster.errors import ConfigurationError

_TEXTS = ("input_ids", "inputs_embeds", "prompt_ids", "prompt_input_ids")
_LABELS = "labels"


class ItemCount(Tensor):
    """Number of items (labels that count) of a batch, 0-d; it notes whether a loss reads it, and what it divides.

    Attributes:
        quotient: what the latest division by it has given; None if there was none.
    """

    was_read, quotient = False, None

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Note the use, and compute as plain tensors do."""
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, cls) and function.__name__ != "__get__":  # dtype or device
                each.was_read = True
                each.quotient = result if "div" in function.__name__ else each.quotient
        return result

    def divides_sum(self, loss: Tensor) -> bool:
        """Return whether a loss is what the latest division gave, and not of a mean, as far as its graph tells."""
        node = loss.grad_fn and loss.grad_fn.next_functions[0][0]
        is_mean = node is not None and (node.name().startswith("Mean") or getattr(node, "_saved_reduction", 0) == 1)
        return loss is self.quotient and not is_mean

    def plain(self) -> Tensor:
        """Return the number as a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)


def main_input_of(model: Any) -> str | None:
    """Return the name of a model's main input, `main_input_name`, which has a row a sample; None if none."""
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
    """Return the number of samples of a batch; `batch`, `main`: see `rows_of`."""
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
    """Return a document's relative cost: linear, plus attention, which is as large at `attention_length`."""
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


Document = dict[str, Tensor]
IGNORE_INDEX = -100


def parts_of(index: int, length: int, max_tokens: int, too_long: str, longest: int = 0) -> Iterator[tuple[int, int]]:
    """Yield (first token, token behind the last) of a document's packed parts; `longest`: of all documents."""
    if length > max_tokens and too_long == "refuse":
        raise ConfigurationError(
            f"document {index} has {length} tokens, more than max_tokens={max_tokens}; use "
            f"max_tokens={max(length, longest)}, too_long='truncate' or too_long='split'"
        )
    whole = min(length, max_tokens) if too_long == "truncate" else length
    for start in range(0, whole, max_tokens):
        yield start, min(start + max_tokens, whole)


def ids_of(item: Any) -> Any:
    """Return the token ids of an item of a data set."""
    if isinstance(item, Mapping) and "input_ids" not in item:
        raise ConfigurationError(
            f"an item of the data set has {', '.join(map(str, item))}, and no input_ids; give pack() tokens, or "
            "tokenize="
        )
    return item["input_ids"] if isinstance(item, Mapping) else item


def labels_of(item: Any, ids: Tensor, name: str, least: int = 0) -> Tensor:
    """Return an item's labels, by default its `ids`, one for each; `name`: for the refusal; `least`: tokens."""
    given = item.get("labels") if isinstance(item, Mapping) else None
    labels = ids if given is None else torch.as_tensor(given, dtype=torch.long)
    if len(ids) < least or labels.shape != ids.shape:
        raise ConfigurationError(
            f"{name} has {len(ids)} input_ids and {len(labels)} labels, and was packed as a document of "
            f"{least or len(ids)} tokens or more; give each token a label, and pack() the true lengths"
        )
    return labels


class PackedSampler(Sampler[int]):
    """Yields the numbers of rows, in groups of similar cost that come in random order.

    The replicas of a step then have equal work. The order depends on the seed, the epoch and the size of a group, and
    not on the number of replicas, so that training can resume under another layout.

    Args:
        costs: cost of each row.
        seed: of the order; None to yield the rows in their own order.

    Attributes:
        epoch: of the next iteration; it is counted by itself, and set by `set_epoch`.
    """

    def __init__(self, costs: Sequence[int], group: int, seed: int | None) -> None:
        self._costs, self._group, self._seed = costs, group, seed
        self.epoch = 0

    def __len__(self) -> int:
        return len(self._costs)

    def __iter__(self) -> Iterator[int]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        if self._seed is None:
            yield from range(len(self))
            return
        generator = torch.Generator().manual_seed(mixed(self._seed, epoch))
        # Rows of equal cost are in random order first, so that they meet others in each epoch.
        shuffled = torch.randperm(len(self), generator=generator).tolist()
        by_cost = sorted(shuffled, key=lambda row: self._costs[row])
        # The one short group comes last: otherwise steps behind it would take from two groups.
        whole = len(self) // self._group
        first = int(torch.randint(whole + 1, (), generator=generator)) * self._group
        rest = len(self) % self._group
        last, by_cost = by_cost[first : first + rest], by_cost[:first] + by_cost[first + rest :]
        groups = [by_cost[start : start + self._group] for start in range(0, len(by_cost), self._group)]
        order = torch.randperm(len(groups), generator=generator).tolist()
        yield from itertools.chain.from_iterable([*(groups[index] for index in order), last])

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch of the next iteration, and what the order of rows depends on."""
        return {"epoch": self.epoch, "seed": self._seed, "group": self._group}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the epoch of the next iteration to a saved one; rows are ordered as those of the saved run."""
        self.epoch = state["epoch"]
        self._seed, self._group = state.get("seed", self._seed), state.get("group", self._group)


def mixed(seed: int, epoch: int) -> int:
    """Return a seed for one epoch: neighbouring seeds and epochs have different ones."""
    return (seed * 1_000_003 + epoch) % 2**63


class PackingCollator:
    """Puts rows of documents one behind the other into a batch of one row, [1, tokens].

    Args:
        cu_seq_lens: whether to add the borders of the documents, `cu_seq_lens_q/k` [documents + 1] (int32), and the
            length of the longest one, `max_length_q/k`, for a plain model with flash-attn.
    """

    def __init__(self, cu_seq_lens: bool = False) -> None:
        self.cu_seq_lens = cu_seq_lens

    def __call__(self, rows: Sequence[Sequence[Mapping[str, Tensor]]]) -> dict[str, Any]:
        """Return `input_ids`, `labels` and `position_ids`, each [1, tokens] (int64).

        Positions restart at each document, and the label of its first token is -100: the loss of heads that predict
        the next token crosses no border.

        Args:
            rows: items of a `PackedDataset`: for each row the `input_ids` and `labels`, [tokens], of its documents.
        """
        documents = [document for row in rows for document in row]
        ids = [document["input_ids"] for document in documents]
        labels = [F.pad(document["labels"][1:], (1, 0), value=IGNORE_INDEX) for document in documents]
        lengths = torch.tensor([len(each) for each in ids])
        batch: dict[str, Any] = {
            "input_ids": torch.cat(ids)[None],
            "labels": torch.cat(labels)[None],
            "position_ids": torch.cat([torch.arange(length) for length in lengths.tolist()])[None],
        }
        if self.cu_seq_lens:
            borders = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
            longest = int(lengths.max())
            batch |= {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders.clone()}
            batch |= {"max_length_q": longest, "max_length_k": longest}
        return batch


# ----- first-fit packing: each document goes into the first row that has room for it -----


def first_fit(lengths: Iterable[int], room: int) -> list[list[int]]:
    """Put lengths into rows, each into the first row that has room.

    The number of rows is at most 1.7 times the least possible (Dósa, Sgall: First Fit bin packing: a tight analysis,
    2013), and close to it where most lengths are small. A tree of the rooms that are left finds the row in
    logarithmic time.

    Args:
        lengths: positive, and at most `room`.
        room: tokens of a row.

    Returns:
        For each row, indices of its lengths in their order.
    """
    rows: list[list[int]] = []
    left = MostRoom(room)
    for index, length in enumerate(lengths):
        row = left.first_with(length)
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        left.take(row, length)
    return rows


class MostRoom:
    """Binary tree over rows, whose inner nodes hold the most room that a row below them has; it grows as needed."""

    def __init__(self, room: int) -> None:
        self._room, self._num_leaves = room, 1
        self._most = [0, room]

    def first_with(self, length: int) -> int:
        """Return the first row that has room for `length`; a row that was not used yet has all of its room."""
        if self._most[1] < length:
            self._grow()
        node = 1
        while node < self._num_leaves:
            node = 2 * node if self._most[2 * node] >= length else 2 * node + 1
        return node - self._num_leaves

    def take(self, row: int, length: int) -> None:
        """Use `length` of the room of a row."""
        node = row + self._num_leaves
        self._most[node] -= length
        while node > 1:
            node //= 2
            self._most[node] = max(self._most[2 * node], self._most[2 * node + 1])

    def _grow(self) -> None:
        """Double the number of rows."""
        leaves = self._most[self._num_leaves :] + [self._room] * self._num_leaves
        self._num_leaves *= 2
        self._most = [0] * self._num_leaves + leaves
        for node in range(self._num_leaves - 1, 0, -1):
            self._most[node] = max(self._most[2 * node], self._most[2 * node + 1])
