"""Sequences that ranks share, beyond what the zoo trains: packed documents, criteria, memory, checkpoints.

What breaks here first: a criterion or an output that sees a part of a sequence. Look in
`shardformer/context_parallel/zigzag.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from shardformer.context_parallel.zigzag import ZigzagSharding, cut_batch
from zoo_tests.harness.ranks import distributed, run_on_ranks

_SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
_MODES = ("ring_attn", "all_to_all")


def _model(**config: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**_SIZES, "num_hidden_layers": 2, "vocab_size": 67, **config})).double()


def _boost(model: nn.Module, **options: Any) -> tuple[Booster, Any, Any]:
    booster = Booster(plugin=HybridParallelPlugin(**options))
    return booster, *booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))


def _close_gradients(optimizer: Any, plain: nn.Module) -> None:
    expected = dict(plain.named_parameters())
    for name, gradient in optimizer.full_gradients().items():
        # Llama's norms compute in fp32, whatever the model's dtype.
        wrong = (gradient - expected[name].grad).abs().max() / expected[name].grad.abs().max()
        assert wrong < 1e-6, f"the gradient of {name} is off by {wrong:.1e} of its largest value"


def _ids(rows: int = 3, length: int = 13) -> Tensor:
    return torch.randint(1, 67, (rows, length), generator=torch.Generator().manual_seed(5))


def _sum_of_squares(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    """A loss that couples the places of a sequence: a rank has to see all of them."""
    return outputs.logits.cumsum(1).square().mean() + outputs.logits[:, -1].sum() / len(batch["input_ids"])


def _by_count(outputs: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    kept = batch["input_ids"] > 20
    return outputs.logits[kept].square().sum(), kept.sum()


def _check_packed(mode: str) -> None:
    """Documents one behind the other, told by their positions, do not see each other."""
    ids = _ids(rows=2)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 4, 5, 0]]).expand(2, -1).contiguous()
    batch = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    plain = _model()
    expected = plain(**batch).logits
    F.cross_entropy(expected[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    together = plain(input_ids=ids, position_ids=positions, attention_mask=torch.ones_like(ids)).logits
    assert not torch.allclose(expected, together), "the documents are not told apart"
    booster, model, optimizer = _boost(_model(), cp_size=2, sequence_parallelism_mode=mode)
    batch["labels"] = ids
    result = booster.execute_pipeline(iter([batch]), model, optimizer=optimizer, return_outputs=True)
    assert torch.allclose(result.outputs.logits, expected, atol=1e-10)
    _close_gradients(optimizer, plain)


@distributed(2)
def test_packed_documents_do_not_see_each_other() -> None:
    for mode in _MODES:
        _check_packed(mode)


@distributed(2)
def test_a_criterion_sees_whole_sequences() -> None:
    batch = {"input_ids": _ids()}
    for criterion in (_sum_of_squares, _by_count):
        plain = _model()
        value = criterion(plain(**batch), batch)
        value = value[0] / value[1] if isinstance(value, tuple) else value
        value.backward()
        booster, model, optimizer = _boost(_model(), cp_size=2)
        result = booster.execute_pipeline(iter([batch]), model, criterion, optimizer)
        assert torch.allclose(result.loss.double(), value, rtol=1e-6)
        _close_gradients(optimizer, plain)


@pytest.mark.slow
@distributed(2)
def test_a_loss_of_ones_own_sees_whole_sequences() -> None:
    batch = {"input_ids": _ids()}
    plain = _model()
    _sum_of_squares(plain(**batch), batch).backward()
    booster, model, optimizer = _boost(_model(), cp_size=2)
    booster.backward(_sum_of_squares(model(**batch), batch), optimizer)
    _close_gradients(optimizer, plain)


@pytest.mark.slow
@distributed(2)
def test_embeddings_in_the_place_of_tokens() -> None:
    embeds = torch.randn(3, 11, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    batch = {"inputs_embeds": embeds.detach().clone().requires_grad_(), "labels": _ids(length=11)}
    plain = _model()
    logits = plain(inputs_embeds=embeds).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()).backward()
    booster, model, optimizer = _boost(_model(), cp_size=2)
    booster.execute_pipeline(iter([batch]), model, optimizer=optimizer)
    _close_gradients(optimizer, plain)
    torch.testing.assert_close(batch["inputs_embeds"].grad, embeds.grad, rtol=1e-5, atol=1e-7)


@distributed(2)
def test_embeddings_are_padded_with_the_last_token() -> None:
    """Gemma 3n takes the root of the norm of each token: of zeros, its derivative is not finite."""
    axis = ZigzagSharding(dist.group.WORLD)
    embeds = torch.arange(1.0, 7.0).reshape(1, 3, 2)
    part = cut_batch({"inputs_embeds": embeds}, axis, lambda _: None)["inputs_embeds"]
    assert part[0].tolist() == ([[1, 2], [5, 6]] if axis.rank == 0 else [[3, 4], [5, 6]])


@distributed(2)
def test_what_a_sequence_cannot_be_cut_with_is_refused() -> None:
    booster, model, optimizer = _boost(_model(), cp_size=2)
    mask = torch.ones(3, 1, 13, 13, dtype=torch.bool)
    batch = {"input_ids": _ids(), "attention_mask": mask, "labels": _ids()}
    problem = r"cp_size=2 cannot cut an attention_mask of shape \(3, 1, 13, 13\); use one of shape .*, or cp_size=1"
    with pytest.raises(ConfigurationError, match=problem):
        booster.execute_pipeline(iter([batch]), model, optimizer=optimizer)
    with pytest.raises(RuntimeError, match="boost the model with cp_size=1"):
        model.generate(_ids(), max_new_tokens=2)


def _kept_bytes(length: int, **options: Any) -> int:
    """Bytes that a forward pass keeps for its backward pass on this rank, parameters not counted."""
    booster, model, optimizer = _boost(_model(num_hidden_layers=4), **options)
    own = {param.untyped_storage().data_ptr() for param in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    batch = {"input_ids": _ids(2, length), "labels": _ids(2, length)}
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        booster.execute_pipeline(iter([batch]), model, optimizer=optimizer)
    return sum(kept.values())


def _measure(length: int, options: dict[str, Any]) -> int:
    return _kept_bytes(length, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "more"), [("ring_attn", 1.03), ("all_to_all", 1.15)])
def test_activations_of_a_rank_fall_with_the_number_of_ranks(mode: str, more: float) -> None:
    """What attention finds is there twice where heads are exchanged: by heads for its backward pass, and by tokens."""
    whole = run_on_ranks(1, _measure, 256, {})[0]
    for cp_size in (2, 4):
        options = {"cp_size": cp_size, "sequence_parallelism_mode": mode}
        share = max(run_on_ranks(cp_size, _measure, 256, options)) / whole
        assert share < more / cp_size, f"{share:.3f} of the whole on each of {cp_size} ranks"


def _save(folder: Path) -> None:
    booster, model, optimizer = _boost(_model(), cp_size=2, tp_size=2)
    _step(booster, model, optimizer)
    booster.save_checkpoint(folder / "state", model=model, optimizer=optimizer)
    booster.save_model(model, folder / "model")


def _step(booster: Booster, model: Any, optimizer: Any) -> float:
    batch = {"input_ids": _ids(), "labels": _ids()}
    loss = booster.execute_pipeline(iter([batch]), model, optimizer=optimizer).loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _open(folder: Path, options: dict[str, Any]) -> float:
    booster, model, optimizer = _boost(_model(), **options)
    booster.load_checkpoint(folder / "state", model=model, optimizer=optimizer)
    return _step(booster, model, optimizer)


@pytest.mark.slow
def test_a_checkpoint_opens_under_any_other_layout(tmp_path: Path) -> None:
    run_on_ranks(4, _save, tmp_path)
    plain = LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
    expected = plain(input_ids=_ids(), labels=_ids()).loss.item()
    for options in ({"cp_size": 2}, {"pp_size": 2}, {"cp_size": 2, "sequence_parallelism_mode": "all_to_all"}):
        for loss in run_on_ranks(2, _open, tmp_path, options):
            assert abs(loss - expected) < 1e-6


def _replicas() -> list[int]:
    """Two axes of two: who has the parameters of whom, and who reads which samples."""
    plugin = HybridParallelPlugin(cp_size=2)
    assert plugin.mesh.mesh_dim_names == ("pp", "dp", "cp", "tp") and plugin.dp_size == 2
    return [plugin.dp_rank, plugin.grid.rank("cp"), plugin.grid.rank("dp_cp"), dist.get_rank()]


def test_the_ranks_of_a_sequence_read_the_same_samples() -> None:
    assert run_on_ranks(4, _replicas) == [[0, 0, 0, 0], [0, 1, 1, 1], [1, 0, 2, 2], [1, 1, 3, 3]]


def _sp_size() -> list[int]:
    plugins = [
        HybridParallelPlugin(sp_size=2, enable_sequence_parallelism=True, sequence_parallelism_mode=mode)
        for mode in _MODES
    ]
    return [plugin.config.parallel.cp_size for plugin in plugins]


def test_sp_size_names_the_same_ranks() -> None:
    assert run_on_ranks(2, _sp_size) == [[2, 2]] * 2
