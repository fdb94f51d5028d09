"""Documents of random lengths: one by one through the plain model, and packed into rows for a sharded one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

VOCABULARY = 67
Documents = Sequence[Sequence[int]]
_SIZES: dict[str, dict[str, Any]] = {
    "GPT2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    **dict.fromkeys(
        ("Llama", "Qwen2", "Qwen3", "Mistral", "Mixtral"),
        {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48},
    ),
}
# Linear attention in three layers of four, over documents that are shorter and longer than its convolution.
_SIZES["Qwen3Next"] = {
    **_SIZES["Qwen3"],
    **{"num_hidden_layers": 3, "full_attention_interval": 2, "num_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "experts_implementation": "eager"},
    **{"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
# Full attention and windows, with sinks, whose masks transformers makes without positions.
_SIZES["GptOss"] = {
    **_SIZES["Mixtral"],
    **{"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 3, "experts_implementation": "eager"},
}
_SIZES["GraniteMoe"] = {**_SIZES["Mixtral"], "num_local_experts": 4, "experts_implementation": "eager"}
_SIZES["Mistral"] = {**_SIZES["Mistral"], "sliding_window": 3}
_SIZES["Mixtral"] = {**_SIZES["Mixtral"], "num_local_experts": 4, "experts_implementation": "eager"}
# Chunks of five tokens, and a temperature of the layer without rotary embedding that changes from the sixth on.
_SIZES["Llama4"] = {
    **{**_SIZES["Mixtral"], "num_local_experts": 2, "intermediate_size_mlp": 48, "pad_token_id": 0},
    **{"attention_chunk_size": 5, "no_rope_layer_interval": 2, "floor_scale": 6, "attn_scale": 0.5},
}
# The norms of the others compute in fp32, whatever the dtype of the model.
TOLERANCE = {"GPT2": 1e-9, "Llama": 1e-6, "Qwen2": 1e-6, "Qwen3": 1e-6, "Mistral": 1e-6, "Mixtral": 1e-6}
TOLERANCE["GptOss"] = 1e-6
TOLERANCE["Qwen3Next"] = 1e-4  # its linear attention computes in fp32


def language_model(family: str, **config: Any) -> nn.Module:
    """Always the same model of a family, in fp64, whose configuration fills a cache as by default."""
    sizes = {"vocab_size": VOCABULARY, **_SIZES[family], **config}
    if family != "GPT2":
        sizes = {"num_hidden_layers": 2, "head_dim": 8, **sizes}
    torch.manual_seed(0)
    head = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    head_class = getattr(transformers, head)
    model = head_class(head_class.config_class(**sizes)).double()
    for name, parameter in model.named_parameters():  # attention far from uniform, so that a leak is seen
        parameter.data.mul_(4.0 if parameter.dim() > 1 else 1.0)
        if name.endswith("proj_bias"):  # of experts; zero otherwise
            parameter.data.normal_()
    return model


def random_documents(seed: int, least: int = 1, most: int = 12, longest: int = 9) -> list[list[int]]:
    """Documents of 1 to `longest` tokens; at least one has two, so that there is a label."""
    source = random.Random(seed)
    lengths = [source.randint(1, longest) for _ in range(source.randint(least, most))]
    lengths[source.randrange(len(lengths))] = longest
    return [[source.randrange(1, VOCABULARY) for _ in range(length)] for length in lengths]


def one_by_one(model: nn.Module, documents: Documents) -> tuple[float, dict[str, Tensor]]:
    """The sum of the losses of all documents over the number of labels, and its gradients."""
    count = sum(len(each) - 1 for each in documents)
    total = torch.zeros((), dtype=torch.float64)
    for document in documents:
        ids = torch.tensor([document])
        logits = model(input_ids=ids).logits
        total = total + F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum")
    loss = total / count
    model.zero_grad()
    loss.backward()
    return loss.item(), {name: param.grad.clone() for name, param in model.named_parameters(remove_duplicate=False)}


def one_row(documents: Documents, tells: str = "positions") -> dict[str, Any]:
    """A batch of one row without padding, in which no label asks for the first token of a document.

    Args:
        tells: what tells documents apart: "positions", "borders" (`cu_seq_lens_q/k`), or "both" with `seq_idx`.
    """
    row = {
        "input_ids": torch.tensor([[token for each in documents for token in each]]),
        "labels": torch.tensor([[label for each in documents for label in (-100, *each[1:])]]),
    }
    if tells != "borders":
        row["position_ids"] = torch.tensor([[place for each in documents for place in range(len(each))]])
    if tells != "positions":
        borders = torch.tensor([0, *map(len, documents)]).cumsum(0).to(torch.int32)
        longest = max(map(len, documents))
        row |= {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": longest, "max_length_k": longest}
    if tells == "both":
        row["seq_idx"] = torch.tensor([[index for index, each in enumerate(documents) for _ in each]]).int()
    return row


def several_rows(documents: Documents, length: int) -> dict[str, Any]:
    """A batch of rows of one length; a document without labels fills what is left of a row."""
    rows: list[list[Sequence[int]]] = [[]]
    for document in documents:
        if sum(map(len, rows[-1])) + len(document) > length:
            rows.append([])
        rows[-1].append(document)
    batches = []
    for row in rows:
        filling = length - sum(map(len, row))
        whole = one_row([*row, *([[1] * filling] if filling else [])])
        if filling:
            whole["labels"][0, -filling:] = -100
        batches.append(whole)
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of gradients, relative to the largest value of each."""
    return max(
        ((gradient.cpu() - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1e-3)).item()
        for name, gradient in found.items()
    )
