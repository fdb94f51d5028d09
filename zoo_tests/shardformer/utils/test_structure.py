import dataclasses

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import CausalLMOutputWithPast, Seq2SeqLMOutput

from shardformer.utils.module_paths import CACHE_NAMES, cache_name


@pytest.mark.parametrize("name", [*CACHE_NAMES, "as_a_later_release_calls_it"])
def test_a_cache_is_found_under_any_name(name: str) -> None:
    pair = EncoderDecoderCache(DynamicCache(), DynamicCache())
    for cache in (DynamicCache(), pair):
        assert cache_name({"input_ids": torch.ones(1, 2), "use_cache": True, name: cache}) == name


def test_other_inputs_are_no_caches() -> None:
    assert cache_name({"input_ids": torch.ones(1, 2), "cache": torch.ones(1), "past_key_values": None}) is None


def test_the_installed_release_calls_caches_by_a_known_name() -> None:
    """A model's output is made with the cache in the third place (`stage_generation`)."""
    for cls in (CausalLMOutputWithPast, Seq2SeqLMOutput):
        assert dataclasses.fields(cls)[2].name in CACHE_NAMES
