"""Replicas that share experts generate the tokens of the unsharded model, each for prompts of its own.

What breaks here first: a rank whose texts have ended, and whose experts others wait for. Look in
`shardformer/generation.py`.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.ranks import run_on_ranks
from zoo_tests.zoo import FAMILIES

_WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False, "max_new_tokens": 9},
    "beams": {"do_sample": False, "num_beams": 3, "max_new_tokens": 6},
    "sampling": {"do_sample": True, "top_k": 20, "num_return_sequences": 2, "max_new_tokens": 5},
    "no cache": {"do_sample": False, "max_new_tokens": 4, "use_cache": False},
}


def _prompt(family: str, replica: int) -> dict[str, Tensor]:
    """One prompt on the first replica, two longer ones on the second."""
    prompt = FAMILIES[family].batch(FAMILIES[family].main_head, 0, 3)
    rows, start = (slice(0, 1), 4) if replica == 0 else (slice(1, 3), 0)
    return {key: prompt[key][rows, start:] for key in ("input_ids", "attention_mask")}


def _lengths(family: str, options: dict[str, Any], expected_to_end: int) -> dict[str, int]:
    """Compare the tokens of this rank with plain generation; return how long its texts are."""
    native: nn.Module = FAMILIES[family].build(FAMILIES[family].main_head, torch.float32).eval()
    booster = Booster(plugin=HybridParallelPlugin(**options))
    boosted = booster.boost(copy.deepcopy(native)).eval()
    prompt, lengths = _prompt(family, booster.plugin.dp_rank), {}
    for name, way in _WAYS.items():
        given = {"pad_token_id": 0, "eos_token_id": expected_to_end, **way}
        torch.manual_seed(3 + booster.plugin.dp_rank)
        plain = native.generate(**prompt, **given)
        torch.manual_seed(3 + booster.plugin.dp_rank)
        assert torch.equal(boosted.generate(**prompt, **given), plain), (name, dist.get_rank())
        lengths[name] = plain.shape[1] - prompt["input_ids"].shape[1]
    return lengths


def _early_token(family: str) -> int:
    """The third token that the first replica writes, at which its text is to end."""
    native: nn.Module = FAMILIES[family].build(FAMILIES[family].main_head, torch.float32).eval()
    tokens = native.generate(**_prompt(family, 0), do_sample=False, max_new_tokens=3, min_new_tokens=3, pad_token_id=0)
    return int(tokens[0, -1])


@pytest.mark.parametrize(
    ("ranks", "family", "options"),
    [
        (2, "mixtral", {"ep_size": 2}),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                (4, "mixtral", {"ep_size": 2, "tp_size": 2}),
                (4, "qwen3_moe", {"ep_size": 2, "pp_size": 2}),
                (2, "qwen3_moe", {"ep_size": 2}),
            )
        ),
    ],
)
def test_tokens_are_those_of_plain_generation(ranks: int, family: str, options: dict[str, Any]) -> None:
    lengths = run_on_ranks(ranks, _lengths, family, options, _early_token(family))
    assert len({each["greedy"] for each in lengths}) > 1  # one replica has ended earlier
