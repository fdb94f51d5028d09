"""flash-attn through sharded models, against stand-ins with the real signatures that compute on CPUs.

What breaks here first: a release of transformers whose flash attention finds its package in another way than by
`module.config._attn_implementation`, see `shardformer/attention/registry.py`.
"""

from __future__ import annotations

import copy
import logging
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from plugins.hybrid_parallel.boosted.forward_options import ForwardOptions
from shardformer import ShardConfig, ShardFormer
from shardformer.attention import backend, recompute_attention
from shardformer.attention.packed_documents import FlashWithSinks
from shardformer.attention.registry import use_backend, use_sharded_attention
from zoo_tests.harness.kernel_packages import Calls, flash_attn, torch_flash, torch_varlen
from zoo_tests.harness.ranks import distributed

FP16 = torch.float16
_SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 64}
_SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0}
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "use_cache": False}
# name -> class, configuration, the implementation to compare with
_MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "Llama": ("LlamaForCausalLM", _GROUPED, "sdpa"),
    "Mistral": ("MistralForCausalLM", {**_GROUPED, "sliding_window": 3}, "sdpa"),
    "Bert": ("BertForMaskedLM", {**_SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, "sdpa"),
    "GptOss": (
        "GptOssForCausalLM",
        {**_GROUPED, "head_dim": 16, "sliding_window": 3, "num_local_experts": 2, "num_experts_per_tok": 1},
        "eager",
    ),
    "Gemma2": (
        "Gemma2ForCausalLM",
        {**_GROUPED, "head_dim": 16, "sliding_window": 3, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 7},
        "eager",
    ),
}


def _model(name: str, implementation: str | None = None, **changes: Any) -> nn.Module:
    head, options, native = _MODELS[name]
    config_class = getattr(transformers, head).config_class
    torch.manual_seed(0)
    model = getattr(transformers, head)(config_class(**options | changes))
    for parameter in model.parameters():  # scores far from uniform
        parameter.data.mul_(4.0 if parameter.dim() > 1 else 1.0)
    model = model.to(FP16)
    model.config._attn_implementation = implementation or native
    return model


def _batch(name: str, padded: bool = True) -> dict[str, Tensor]:
    ids = torch.randint(1, 64, (3, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 7:] = 0
        mask[2, :4] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[2, 4] = -100  # predicted by a padding token, whose output kernels do not define
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _packed() -> dict[str, Tensor]:
    ids = torch.randint(1, 64, (1, 12), generator=torch.Generator().manual_seed(2))
    return {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]]), "labels": ids}


def _sharded(model: nn.Module, **options: Any) -> nn.Module:
    config = ShardConfig(device=torch.device("cuda"), compute_dtype=FP16, **options)
    return ShardFormer(config).optimize(model)[0]


def _assert_alike(sharded: nn.Module, native: nn.Module, batch: dict[str, Tensor]) -> None:
    """Loss, and its gradient by the first norm, which every attention has part in."""
    expected, found = native(**batch).loss, sharded(**batch).loss
    torch.testing.assert_close(found, expected, rtol=3e-3, atol=3e-3)
    expected.backward()
    found.backward()
    norms = [
        next(param.grad for name, param in model.named_parameters() if "norm" in name.lower() and "0" in name)
        for model in (sharded, native)
    ]
    assert (norms[0] - norms[1]).norm() < 0.03 * norms[1].norm()


def _kernels(calls: Calls) -> set[str]:
    return {call["kernel"] for call in calls}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", [name for name in _MODELS if name != "GptOss"])
@pytest.mark.parametrize("version", [2, 3])
def test_a_model_runs_on_flash_attn(version: int, name: str, padded: bool) -> None:
    """Causal and bidirectional, grouped heads, windows, soft-capped scores and own scales, with and without padding."""
    native, batch = _model(name), _batch(name, padded)
    with flash_attn(version, capability=(9, 0)) as calls:
        sharded = _sharded(copy.deepcopy(native), enable_tensor_parallelism=False, enable_flash_attention=True)
        _assert_alike(sharded, native, batch)
    assert _kernels(calls) == {f"flash {version} varlen" if padded else f"flash {version}"}
    assert {call["causal"] for call in calls} == {name != "Bert"}
    windows = {"Mistral": {(2, 2)}, "Gemma2": {(2, 2), (-1, -1)}}  # the number of keys behind and ahead
    assert {call["window_size"] for call in calls} == windows.get(name, {(-1, -1)})
    assert {call["softcap"] for call in calls} == {0.5 if name == "Gemma2" else 0.0}
    assert {call["scale"] for call in calls} == {7**-0.5 if name == "Gemma2" else 16**-0.5}


def test_packed_documents_stay_apart() -> None:
    native = _model("Llama")
    with flash_attn(2) as calls:
        sharded = _sharded(copy.deepcopy(native), enable_tensor_parallelism=False, enable_flash_attention=True)
        _assert_alike(sharded, native, _packed())
    assert _kernels(calls) == {"flash 2 varlen"}


@pytest.mark.parametrize("name", ["Llama", "Bert"])
@distributed(1)
def test_it_is_told_of_documents_in_several_rows(name: str) -> None:
    """transformers looks for documents in batches of one row only; encoders keep them apart with flash-attn alone."""
    lengths = [[5, 3, 4], [2, 10]]
    ids = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(2))
    positions = torch.tensor([[place for length in row for place in range(length)] for row in lengths])
    native = _model(name)
    with flash_attn(2) as calls:
        sharded = _sharded(copy.deepcopy(native), enable_tensor_parallelism=False, enable_flash_attention=True)
        inputs = ForwardOptions(sharded, _OneRank()).inputs({"input_ids": ids, "position_ids": positions})
        found = sharded(**inputs).logits
    assert _kernels(calls) == {"flash 2 varlen"}
    for row, found_row, several in zip(ids, found, lengths, strict=True):
        alone = [native(input_ids=document[None]).logits[0] for document in row.split(several)]
        torch.testing.assert_close(found_row, torch.cat(alone), rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("takes_groups", [True, False])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Bert"])
def test_without_a_package_documents_run_on_the_kernel_of_torch(name: str, takes_groups: bool) -> None:
    """No mask of a row is made, also for windows; a row of one document keeps SDPA."""
    lengths = [[5, 3, 4], [2, 10]]
    ids = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(2))
    positions = torch.tensor([[place for length in row for place in range(length)] for row in lengths])
    native = _model(name)
    sharded = _sharded(copy.deepcopy(native), enable_tensor_parallelism=False, enable_flash_attention=True)
    assert sharded.config._attn_implementation == "sharded_flash_varlen"
    inputs = ForwardOptions(sharded, _OneRank()).inputs({"input_ids": ids, "position_ids": positions})
    with torch_varlen(takes_groups) as calls, mock.patch.object(backend.MaskIfRead, "mask", None):
        found = sharded(**inputs).logits
        assert len(calls) == 2
        assert {call["window_size"] for call in calls} == {{"Bert": (-1, -1), "Mistral": (2, 0)}.get(name, (-1, 0))}
        assert {call["heads"] for call in calls} == {(4, 2) if takes_groups and name != "Bert" else (4, 4)}
    for row, found_row, several in zip(ids, found, lengths, strict=True):
        alone = [native(input_ids=document[None]).logits[0] for document in row.split(several)]
        torch.testing.assert_close(found_row, torch.cat(alone), rtol=1e-2, atol=2e-2)
    with torch_varlen() as calls:
        for batch in (_batch(name), _batch(name, padded=False)):
            _assert_alike(sharded, native, batch)
        if name != "Bert":
            _assert_alike(sharded, native, _packed())  # by hand, without arguments that tell of documents
    assert not calls


@pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(), reason="torch 2.15 asks the driver for a kernel"
)
def test_the_kernel_of_torch_runs_on_fake_tensors() -> None:
    """With the signature of this torch, and grouped heads."""
    mask = backend.MaskIfRead(lambda: pytest.fail("a mask was made"))
    with FakeTensorMode():
        query, key = (torch.empty(1, heads, 32768, 64, dtype=FP16, device="cuda") for heads in (8, 2))
        borders = torch.empty(9, dtype=torch.int32, device="cuda")
        told = {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": 4096, "max_length_k": 4096}
        found, _ = backend.varlen_attention(nn.Identity(), query, key, key, mask, is_causal=True, **told)
    assert found.shape == (1, 32768, 8, 64)


@pytest.mark.parametrize("window", [(-1, 0), (2, 0), (-1, -1)])
def test_sinks_scale_what_the_kernel_of_torch_finds(window: tuple[int, int]) -> None:
    """In fp64, with every gradient: two documents, grouped heads, causal, windowed and bidirectional."""
    generator, borders = torch.Generator().manual_seed(0), torch.tensor([0, 5, 12], dtype=torch.int32)
    shapes = ((12, 4, 8), (12, 2, 8), (12, 2, 8), (4,))
    inputs = [torch.randn(shape, generator=generator).double().requires_grad_() for shape in shapes]
    query, key, value, sinks = inputs
    with torch_flash():
        found = FlashWithSinks.apply(*inputs, (borders, borders, 7, 7), 0.3, window)
        factor = torch.randn(found.shape, generator=generator).double()
        grads = torch.autograd.grad(found, inputs, factor)
    rows = []
    for tokens in (slice(0, 5), slice(5, 12)):
        q, k, v = query[tokens], *(x[tokens].repeat_interleave(2, 1) for x in (key, value))
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
        hidden = (distance < 0 if window[1] == 0 else distance < -99) | (
            distance > window[0] if window[0] > 0 else False
        )
        scores = (torch.einsum("qhd,khd->hqk", q, k) * 0.3).masked_fill(hidden, -torch.inf)
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], -1)
        rows.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :-1], v))
    expected = torch.cat(rows)
    torch.testing.assert_close(found, expected)
    for mine, plain in zip(grads, torch.autograd.grad(expected, inputs, factor), strict=True):
        torch.testing.assert_close(mine, plain)


def test_a_model_with_sinks_runs_on_the_kernel_of_torch() -> None:
    """Whole rows, causal and windowed, make no mask; padded ones run the model's own code."""
    native, sharded = _model("GptOss"), _model("GptOss")
    use_backend(sharded, True, torch.device("cuda"), FP16)
    use_sharded_attention(sharded, None)
    assert sharded.config._attn_implementation == "sharded_flash_varlen"
    with torch_flash() as calls, mock.patch.object(backend.MaskIfRead, "mask", None):
        _assert_alike(sharded, native, _batch("GptOss", padded=False))
    assert [call["window_size"] for call in calls] == [(2, 0), (-1, 0)]
    native.zero_grad(), sharded.zero_grad()
    with torch_flash() as calls:
        _assert_alike(sharded, native, _batch("GptOss"))
        assert not calls
        ids, found = _batch("GptOss", padded=False)["input_ids"], []
        for model in (sharded, native):
            prompt = model(ids, use_cache=True)
            found.append(model(ids[:, :1], past_key_values=prompt.past_key_values, use_cache=True).logits)
    torch.testing.assert_close(*found, rtol=1e-2, atol=1e-2)
    assert len(calls) == 2, "more than a prompt"


class _OneRank:
    """The mesh of a single rank, of which only sizes are asked."""

    def size(self, axis: str) -> int:
        return 1


@pytest.mark.parametrize("name", ["Llama", "Bert", "Gemma2"])
@distributed(2)
def test_ranks_run_it_on_their_heads(name: str) -> None:
    """The option, a model that was built with flash-attn, and selective recomputation."""
    native, batch = _model(name), _batch(name)
    with flash_attn(2, 3) as calls:
        _assert_alike(_sharded(copy.deepcopy(native), enable_flash_attention="flash_attention_3"), native, batch)
        assert _kernels(calls) == {"flash 3 varlen"}
        calls.clear()
        built_with_it = _sharded(_model(name, "flash_attention_2"))
        recompute_attention(built_with_it)
        native.zero_grad()
        _assert_alike(built_with_it, native, batch)
        assert _kernels(calls) == {"flash 2 varlen"} and len(calls) == 2, "flash-attn keeps no scores"


def test_a_plain_model_recomputes_with_it() -> None:
    native, model = _model("Llama"), _model("Llama", "flash_attention_2")
    with flash_attn(2) as calls:
        recompute_attention(model)
        _assert_alike(model, native, _batch("Llama"))
    assert len(calls) == 2


@pytest.mark.parametrize("packed", [False, True])
@distributed(2)
def test_all_to_all_over_tensor_parallel_ranks(packed: bool) -> None:
    native, batch = _model("Llama"), _packed() if packed else _batch("Llama")
    with flash_attn(2) as calls:
        options = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all"}
        sharded = _sharded(copy.deepcopy(native), enable_flash_attention=True, **options)
        torch.testing.assert_close(sharded(**batch).loss, native(**batch).loss, rtol=3e-3, atol=3e-3)
    assert _kernels(calls) == {"flash 2 varlen"}


@pytest.mark.parametrize("kind", ["plain", "padded", "packed"])
@distributed(2)
def test_all_to_all_over_context_parallel_ranks(kind: str) -> None:
    """Batches of one row: from its part of the positions alone, a rank would take its two chunks for two documents."""
    native = _model("Llama")
    batch = _packed() if kind == "packed" else {name: x[1:2] for name, x in _batch("Llama", kind == "padded").items()}
    batch.pop("labels")
    with flash_attn(2) as calls:
        options = {"context_parallel_process_group": torch.distributed.group.WORLD, "enable_tensor_parallelism": False}
        sharded = _sharded(
            copy.deepcopy(native), enable_flash_attention=True, context_parallel_mode="all_to_all", **options
        )
        found, axis = sharded(**batch).logits, sharded.context_axis
    expected = native(**batch).logits
    expected = axis.take(expected) if found.shape != expected.shape else expected
    real = axis.take(batch["attention_mask"]) if "attention_mask" in batch else torch.ones(found.shape[:2])
    torch.testing.assert_close(found[real.bool()], expected[real.bool()], rtol=1e-2, atol=2e-2)
    assert _kernels(calls) == {"flash 2 varlen" if kind != "plain" else "flash 2"}


@pytest.mark.parametrize(
    ("versions", "expected", "message"),
    [
        ((2, 3), "flash_attention_2", "flash_attention_3 has no dropout, and the model drops attention weights"),
        ((3,), backend.SDPA, "runs torch's SDPA: flash_attention_3 has no dropout"),
    ],
)
def test_dropout_reaches_a_kernel_that_has_it(
    versions: tuple[int, ...], expected: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    backend._log_once.cache_clear()
    model = _model("Llama", attention_dropout=0.25)
    with flash_attn(*versions, capability=(9, 0)) as calls, caplog.at_level(logging.WARNING):
        sharded = _sharded(model, enable_tensor_parallelism=False, enable_flash_attention=True)
        assert sharded.config._attn_implementation == f"sharded_{expected}"
        sharded.train()(**_batch("Llama"))
        sharded.eval()(**_batch("Llama"))
    assert [call["dropout_p"] for call in calls] == ([0.25, 0.25, 0.0, 0.0] if 2 in versions else [])
    assert caplog.text.count(message) == 1
    with flash_attn(3, capability=(9, 0)), pytest.raises(ValueError, match="'flash_attention_3' has no dropout"):
        _sharded(model, enable_tensor_parallelism=False, enable_flash_attention="flash_attention_3")


def test_a_layout_on_cpus_gets_no_kernel_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine has a GPU, which the process group cannot use."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = ShardConfig(
        enable_tensor_parallelism=False, enable_flash_attention=True, device=torch.device("cpu"), compute_dtype=FP16
    )
    with flash_attn(2):
        model, _ = ShardFormer(config).optimize(_model("Llama"))
    assert model.config._attn_implementation == f"sharded_{backend.SDPA}"


def test_lost_dropout_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A model that was built with flash-attn 3 loses its dropout in plain transformers too, but not in silence here."""
    backend._log_once.cache_clear()
    model = _model("Llama", "flash_attention_3", attention_dropout=0.25)
    with flash_attn(3), caplog.at_level(logging.WARNING):
        recompute_attention(model)
        model.train()(**_batch("Llama"))
    assert caplog.text.count("drops no attention weights: flash_attention_3 has no dropout") == 1
