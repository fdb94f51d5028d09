"""Models as Hugging Face directories: what one layout saves, plain transformers and every other layout open.

What breaks here first: tied weights, padded vocabularies and the index of several files. Look in
`save.py` and `load.py` of `plugins/hybrid_parallel/checkpoint`.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.ranks import distributed, run_on_ranks
from zoo_tests.harness.reference import loss_of
from zoo_tests.harness.train_sharded import Boosted, boost

HEADS = {"bert": "masked_lm", "llama": "causal_lm", "gpt2": "lm_head"}


def _case(family: str, layout: str, head: str | None = None, **config: object) -> Case:
    recipe = Recipe(family=family, head=head or HEADS[family], config=tuple(config.items()), stages=2)
    return Case(recipe=recipe, layout=layout)


def _logits(boosted: Boosted, case: Case) -> Tensor:
    batch = {key: value for key, value in boosted.share(case.recipe.batch(0)).items() if key != "labels"}
    return boosted.booster.execute_pipeline(iter([batch]), boosted.model, return_outputs=True).outputs.logits


def _save(case: Case, directory: Path, size_per_shard: str) -> None:
    boosted = boost(case)
    boosted.booster.save_model(boosted.model, directory, size_per_shard=size_per_shard)


def _load(case: Case, directory: Path) -> list[Tensor]:
    """Logits of a model with other weights, after loading; they belong to the weights that were saved."""
    boosted = boost(case)
    with torch.no_grad():
        for param in boosted.model.parameters():
            param.normal_()
    boosted.booster.load_model(boosted.model, directory)
    return _logits(boosted, case)


@pytest.mark.slow
@pytest.mark.parametrize("size_per_shard", ["5GB", "60KB"])
@pytest.mark.parametrize(
    ("family", "tied", "saved", "loaded"),
    [
        ("bert", True, "tp2", "pp2"),
        ("llama", True, "pp2", "tp2"),
        ("llama", False, "tp2", "dp2"),
        ("gpt2", True, "tp2", "pp2"),
        ("gpt2", False, "pp2", "tp2"),
        ("bert", False, "dp2", "tp2"),
    ],
)
def test_round_trip(family: str, tied: bool, saved: str, loaded: str, size_per_shard: str, tmp_path: Path) -> None:
    case = _case(family, saved, tie_word_embeddings=tied)
    run_on_ranks(2, _save, case, tmp_path, size_per_shard)
    plain = case.recipe.model()
    # Plain transformers opens it without a word.
    reopened, info = type(plain).from_pretrained(tmp_path, dtype=torch.float64, output_loading_info=True)
    assert not any(info.values()), info
    for (name, param), (_, other) in zip(plain.named_parameters(), reopened.named_parameters(), strict=True):
        assert torch.equal(param, other), name
    _check_files(tmp_path, split=size_per_shard != "5GB" or "pp" in saved)
    # Another layout does, too.
    batch = case.recipe.batch(0)
    with torch.no_grad():
        expected = plain(input_ids=batch["input_ids"], **_rest(batch)).logits
    shares = run_on_ranks(2, _load, case.but(layout=loaded), tmp_path)
    found = torch.cat(shares) if loaded == "dp2" else shares[0]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def _shared_by_hand() -> torch.nn.Module:
    """A weight in two layers (or stages), one in two kinds of layers, and a head that its class does not tie."""
    model = Recipe(family="llama", head="causal_lm", stages=2, config=(("tie_word_embeddings", False),)).model()
    first, last = model.model.layers[0], model.model.layers[-1]
    last.mlp.up_proj.weight, last.self_attn.o_proj.weight = first.mlp.up_proj.weight, first.self_attn.q_proj.weight
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


@pytest.mark.parametrize("options", [{"tp_size": 2}, {"pp_size": 2}, {"zero_stage": 3}], ids=str)
@distributed(2)
def test_weights_shared_by_hand_have_all_their_names(options: dict[str, int], tmp_path: Path) -> None:
    plain, model, recipe = _shared_by_hand(), _shared_by_hand(), _case("llama", "tp2").recipe
    batch = recipe.batch(0)
    loss_of(plain, recipe.zoo_head, batch).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    booster = Booster(plugin=HybridParallelPlugin(**options))
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.execute_pipeline(iter([batch]), model, optimizer=optimizer)
    optimizer.step()
    booster.save_model(model, tmp_path)
    reopened, info = type(plain).from_pretrained(tmp_path, dtype=torch.float64, output_loading_info=True)
    assert not any(info.values()), info
    torch.testing.assert_close(reopened.state_dict(), plain.state_dict(), rtol=1e-9, atol=1e-12)
    dist.barrier()
    with torch.no_grad(), model.summon_full_params():
        for parameter in model.parameters():
            parameter.normal_()
    booster.load_model(model, tmp_path)
    booster.save_model(model, tmp_path / "again")
    again = {
        name: value for path in (tmp_path / "again").glob("*.safetensors") for name, value in load_file(path).items()
    }
    assert again.keys() == plain.state_dict().keys()
    torch.testing.assert_close(again, dict(plain.state_dict()), rtol=1e-9, atol=1e-12)


def _rest(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in batch.items() if key not in ("input_ids", "labels")}


def _check_files(directory: Path, split: bool) -> None:
    files = sorted(path.name for path in directory.glob("*.safetensors"))
    index = directory / "model.safetensors.index.json"
    assert index.exists() == split and not list(directory.glob(".*"))
    if not split:
        assert files == ["model.safetensors"]
        return
    content = json.loads(index.read_text())
    assert sorted(set(content["weight_map"].values())) == files
    tensors = {name: file for file in files for name in load_file(directory / file)}
    assert content["weight_map"] == tensors
    size = sum(value.numel() * value.element_size() for file in files for value in load_file(directory / file).values())
    assert content["metadata"]["total_size"] == size


@distributed(2)
def test_a_smaller_save_removes_the_files_of_a_larger_one(tmp_path: Path) -> None:
    case = _case("bert", "tp2")
    boosted = boost(case)
    for size in ("60KB", "5GB"):
        boosted.booster.save_model(boosted.model, tmp_path, size_per_shard=size)
    assert [path.name for path in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]


@distributed(2)
def test_dtype_of_the_files(tmp_path: Path) -> None:
    boosted = boost(_case("gpt2", "tp2"))
    boosted.booster.save_model(boosted.model, tmp_path, dtype=torch.bfloat16)
    values = load_file(tmp_path / "model.safetensors").values()
    assert {value.dtype for value in values if value.is_floating_point()} == {torch.bfloat16}
    assert boosted.model.dtype == torch.float64


@distributed(2)
def test_options_that_a_script_sets_after_boost_are_saved_and_move(tmp_path: Path) -> None:
    boosted = boost(_case("gpt2", "tp2"))
    boosted.model.config.id2label, boosted.model.generation_config.max_new_tokens = {0: "no", 1: "yes"}, 7
    objects = boosted.model, boosted.optimizer, boosted.scheduler
    moved = boosted.booster.relayout(HybridParallelPlugin(pp_size=2), *objects)[0]
    boosted.booster.save_model(moved, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["id2label"] == {"0": "no", "1": "yes"}
    assert json.loads((tmp_path / "generation_config.json").read_text())["max_new_tokens"] == 7


# ----- what is refused -----


def _loading_is_refused(case: Case, directory: Path, message: str) -> None:
    boosted = boost(case)
    with torch.no_grad():
        for parameter in boosted.model.parameters():
            parameter.add_(1)
    before = {name: tensor.clone() for name, tensor in boosted.model.unwrap().state_dict().items()}
    with pytest.raises(ConfigurationError, match=message):
        boosted.booster.load_model(boosted.model, directory)
    after = boosted.model.unwrap().state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())  # nothing is overwritten


def _refuse(case: Case, directory: Path, message: str) -> None:
    run_on_ranks(2, _loading_is_refused, case, directory, message)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_other_files_are_refused_on_every_rank(layout: str, tmp_path: Path) -> None:
    case = _case("bert", layout)
    _refuse(case, tmp_path / "nothing", "has neither model.safetensors nor model.safetensors.index.json; give a")
    model = case.recipe.model()
    model.save_pretrained(tmp_path / "good")
    classifier = _case("bert", layout, head="sequence")
    _refuse(classifier, tmp_path / "good", r"does not fit the model: missing \[.*classifier.*unexpected \['cls")
    larger = _case("bert", layout, vocab_size=1022)
    _refuse(larger, tmp_path / "good", r"word_embeddings.weight has shape \(1021, 48\) in .* but \(1022, 48\) in the")
    deeper = _case("bert", layout, num_hidden_layers=6)
    _refuse(deeper, tmp_path / "good", r"missing \['bert.encoder.layer.3")


def test_broken_and_hostile_files_are_refused(tmp_path: Path) -> None:
    case = _case("bert", "tp2")
    case.recipe.model().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    _refuse(case, tmp_path, "model.safetensors is not a complete safetensors file")
    weights.unlink()
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"bert.pooler": "../elsewhere.safetensors"}}))
    _refuse(case, tmp_path, r"names the file '../elsewhere.safetensors' outside the directory; do not load it")
    index.write_text(json.dumps({"weight_map": {"bert.pooler": "gone.safetensors"}}))
    _refuse(case, tmp_path, "gone.safetensors is missing; save the model again")


def _load_leniently(case: Case, directory: Path) -> bool:
    boosted = boost(case)
    boosted.booster.load_model(boosted.model, directory, strict=False)
    reference = transformers.BertForMaskedLM.from_pretrained(directory, dtype=torch.float64)
    name = "bert.encoder.layer.0.output.LayerNorm.weight"
    return torch.equal(boosted.model.unwrap().get_parameter(name), reference.get_parameter(name))


def test_not_strict_takes_what_fits(tmp_path: Path) -> None:
    case = _case("bert", "tp2")
    case.recipe.model().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name: value + 1 for name, value in tensors.items() if "pooler" not in name}
    save_file(tensors | {"extra": torch.ones(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert all(run_on_ranks(2, _load_leniently, case, tmp_path))


@distributed(2)
def test_saving_to_where_a_file_is_in_the_way(tmp_path: Path) -> None:
    boosted = boost(_case("bert", "tp2"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="file"):
        boosted.booster.save_model(boosted.model, tmp_path / "file")
    for name, value, message in (
        ("size_per_shard", "many", "size_per_shard='many' is not a size; use for example '5GB'"),
        ("size_per_shard", 5, "size_per_shard=5 is not a size; use for example '5GB'"),
        ("dtype", "bf16", "dtype='bf16' is no floating-point dtype of torch.*use torch.bfloat16"),
        ("dtype", torch.int8, "dtype=torch.int8 is no floating-point dtype of torch"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            boosted.booster.save_model(boosted.model, tmp_path / "model", **{name: value})


# ----- what goes wrong while saving -----


def _save_twice(case: Case, directory: Path, fault: str, rank: int) -> float:
    """Save, change the weights, save again with a fault on one rank.

    Returns:
        Seconds until the error.
    """
    boosted = boost(case)
    boosted.booster.save_model(boosted.model, directory, size_per_shard="60KB")
    with torch.no_grad():
        for param in boosted.model.parameters():
            param.add_(1)
    began = time.perf_counter()
    with ExitStack() as faults:
        if dist.get_rank() == rank:
            faults.enter_context(
                mock.patch(f"os.{fault}", side_effect=OSError(errno.ENOSPC, "No space left on device"))
            )
        with pytest.raises(ConfigurationError, match="No space left on device"):
            boosted.booster.save_model(boosted.model, directory, size_per_shard="60KB")
    seconds = time.perf_counter() - began
    dist.barrier()
    return seconds


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["pwrite", "fsync", "posix_fallocate", "open"])
@pytest.mark.parametrize(("layout", "rank"), [("pp2", 1), ("tp2", 0), ("dp2", 1)])
def test_an_error_on_one_rank_leaves_the_earlier_model(layout: str, rank: int, fault: str, tmp_path: Path) -> None:
    case = _case("bert", layout)
    seconds = run_on_ranks(2, _save_twice, case, tmp_path, fault, rank)
    assert max(seconds) < 10
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]  # nothing is left
    plain = case.recipe.model()
    reopened = type(plain).from_pretrained(tmp_path, dtype=torch.float64)
    for (name, param), (_, other) in zip(plain.named_parameters(), reopened.named_parameters(), strict=True):
        assert torch.equal(param, other), name


@pytest.mark.slow
@distributed(1)
def test_at_every_step_a_directory_opens_as_the_old_model_or_the_new(tmp_path: Path) -> None:
    """Saves of one file and of several over one another, looked at before and after every change of a name."""
    boosted = boost(_case("bert", "single", num_hidden_layers=2))
    inside = boosted.model.unwrap()
    seen: list[float] = []

    def look(function: Callable[..., Any]) -> Callable[..., Any]:
        def between(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            tensors = type(inside).from_pretrained(tmp_path, dtype=torch.float64).state_dict()
            values = {float((tensors[name] - value).mean()) for name, value in base.items()}
            assert len({round(value, 6) for value in values}) == 1, "a mixture"
            seen.append(round(values.pop(), 6))
            return result

        return between

    base = {name: param.detach().clone() for name, param in inside.named_parameters()}
    boosted.booster.save_model(boosted.model, tmp_path, size_per_shard="60KB")
    for number, size in enumerate(("60KB", "5GB", "5GB", "60KB", "60KB"), start=1):
        with torch.no_grad():
            for name, param in inside.named_parameters():
                param.copy_(base[name] + number)
        seen.clear()
        with mock.patch("os.replace", look(os.replace)), mock.patch.object(Path, "unlink", look(Path.unlink)):
            boosted.booster.save_model(boosted.model, tmp_path, size_per_shard=size)
        assert seen == sorted(seen) and set(seen) <= {number - 1, number} and seen[-1] == number


def _peak_while_saving(directory: Path) -> tuple[int, int]:
    """(growth of this process's memory while saving, bytes of all weights)."""
    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=2048, num_hidden_layers=24, num_attention_heads=8, vocab_size=1024
    )
    plugin = HybridParallelPlugin(tp_size=2, num_microbatches=1)
    booster = Booster(plugin=plugin)
    model = booster.boost(transformers.LlamaForCausalLM(config))
    watch = Peak()
    with watch:
        booster.save_model(model, directory / "model")
    return watch.growth, sum(path.stat().st_size for path in (directory / "model").glob("*.safetensors"))


@pytest.mark.slow
def test_a_save_holds_a_few_tensors_and_not_the_file(tmp_path: Path) -> None:
    for growth, size in run_on_ranks(2, _peak_while_saving, tmp_path):
        # The largest tensor has 4 MiB: one whole, the pieces of it and of the next, and the margin of a reading of RSS.
        assert size > 350 * 2**20 and growth < 64 * 2**20, (growth, size)


class Peak:
    """The largest growth of resident memory in a `with` block, looked at all the time."""

    growth = 0

    def __enter__(self) -> Peak:
        self._before, self._done = _resident(), threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(0.002):
            self.growth = max(self.growth, _resident() - self._before)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
