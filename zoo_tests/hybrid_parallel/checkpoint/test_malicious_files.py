"""A corpus of model directories that were made to harm: each is refused in one sentence, and none runs anything.

Whatever is executed by mistake would make the file `canary`. What fails here first is a reader that trusts a file.
Look in `shardformer/lazy/weight_files.py` and `shardformer/utils/typed_json.py`.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from booster.errors import ConfigurationError
from booster.plugin import load_lr_scheduler
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.ranks import distributed
from zoo_tests.harness.train_sharded import boost

_CASE = Case(recipe=Recipe(family="bert", head="masked_lm", steps=1), layout="single")
_NAME = "bert.embeddings.word_embeddings.weight"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


class _Payload:
    """Unpickled, it makes a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.canary,))


def _header(directory: Path, header: bytes, data: bytes = b"", length: int | None = None) -> None:
    size = (len(header) if length is None else length).to_bytes(8, "little")
    (directory / _WEIGHTS).write_bytes(size + header + data)


def _entries(directory: Path, **entries: Any) -> None:
    header = {name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | entry for name, entry in entries.items()}
    _header(directory, json.dumps(header).encode(), bytes(16))


def _index(directory: Path, file: Any) -> None:
    (directory / _INDEX).write_text(json.dumps({"weight_map": {_NAME: file}}))


def _index_text(directory: Path, text: str) -> None:
    (directory / _INDEX).write_text(text)


def _link(directory: Path, name: str) -> None:
    """A link to a good file elsewhere."""
    outside = directory.with_name("outside")
    outside.mkdir(exist_ok=True)
    shutil.move(directory / _WEIGHTS, outside / _WEIGHTS)
    (directory / name).symlink_to(outside / _WEIGHTS)


def _link_in_index(directory: Path) -> None:
    _link(directory, "part.safetensors")
    names = load_file(directory / "part.safetensors")
    (directory / _INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "part.safetensors")}))


def _pickle(directory: Path, name: str) -> None:
    (directory / _WEIGHTS).unlink()
    (directory / name).write_bytes(pickle.dumps({_NAME: _Payload(directory.parent / "canary")}))


def _torch_save(directory: Path, name: str) -> None:
    (directory / _WEIGHTS).unlink()
    torch.save({_NAME: _Payload(directory.parent / "canary")}, directory / name)


def _pickle_in_index(directory: Path) -> None:
    _pickle(directory, "part.bin")
    _index(directory, "part.bin")


_DEEP = "[" * 100_000 + "]" * 100_000
# What is done to a good directory, and what of the sentence is expected.
CORPUS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a pickle by another name": (lambda d: _pickle(d, _WEIGHTS), f"{_WEIGHTS} is not a complete safetensors file"),
    "a torch.save by another name": (lambda d: _torch_save(d, _WEIGHTS), f"{_WEIGHTS} is not a complete safetensors"),
    "a pickle": (lambda d: _pickle(d, "pytorch_model.bin"), f"neither {_WEIGHTS} nor {_INDEX}"),
    "a torch.save": (lambda d: _torch_save(d, "pytorch_model.bin"), f"neither {_WEIGHTS} nor {_INDEX}"),
    "a pickle in the index": (_pickle_in_index, "names the file 'part.bin', no safetensors file"),
    "a path above": (lambda d: _index(d, "../outside.safetensors"), "outside the directory; do not load it"),
    "a path below": (lambda d: _index(d, "below/../../model.safetensors"), "outside the directory; do not load it"),
    "an absolute path": (lambda d: _index(d, "/etc/passwd"), "names the file '/etc/passwd' outside the directory"),
    "the directory above": (lambda d: _index(d, ".."), f"{_INDEX} names the file '..'"),
    "no file at all": (lambda d: _index(d, ""), f"{_INDEX} names the file ''"),
    "a number for a file": (lambda d: _index(d, 7), f"{_INDEX} is not a complete index"),
    "a list for a file": (lambda d: _index(d, ["x"]), f"{_INDEX} is not a complete index"),
    "a zero byte": (lambda d: _index(d, "x\0y"), _INDEX),
    "a link": (lambda d: _link(d, _WEIGHTS), "is a link to .*, outside the directory; do not load it"),
    "a link in the index": (_link_in_index, "is a link to .*, outside the directory; do not load it"),
    "an index of another kind": (lambda d: _index_text(d, "[]"), f"{_INDEX} holds a list"),
    "a deep index": (lambda d: _index_text(d, _DEEP), f"{_INDEX} is nested too deeply"),
    "a key that is there twice": (
        lambda d: _index_text(d, f'{{"weight_map": {{"{_NAME}": "a", "{_NAME}": "model.safetensors"}}}}'),
        f"the key '{_NAME}' is there twice",
    ),
    "an index that is no text": (lambda d: (d / _INDEX).write_bytes(b"\xff\xfe\x00{"), f"{_INDEX} is not valid JSON"),
    "a gigantic header": (lambda d: _header(d, b"{}", length=2**62), f"{_WEIGHTS} is not a complete safetensors file"),
    "a header beyond the file": (lambda d: _header(d, b"{}", length=10**6), f"{_WEIGHTS} is not a complete"),
    "a deep header": (lambda d: _header(d, _DEEP.encode()), f"{_WEIGHTS} is not a complete safetensors file"),
    "a header that is no text": (lambda d: _header(d, b"\xff" * 64), f"{_WEIGHTS} is not a complete safetensors file"),
    "no bytes": (lambda d: (d / _WEIGHTS).write_bytes(b""), f"{_WEIGHTS} is not a complete safetensors file"),
    "offsets that overlap": (
        lambda d: _entries(d, a={"data_offsets": [0, 4]}, b={"data_offsets": [2, 6]}),
        f"{_WEIGHTS} is not a complete",
    ),
    "negative offsets": (lambda d: _entries(d, a={"data_offsets": [-4, 0]}), f"{_WEIGHTS} is not a complete"),
    "offsets that turn back": (lambda d: _entries(d, a={"data_offsets": [4, 0]}), f"{_WEIGHTS} is not a complete"),
    "offsets that are no numbers": (
        lambda d: _header(d, b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[NaN,4]}}', bytes(4)),
        f"{_WEIGHTS} is not a complete",
    ),
    "a huge shape": (lambda d: _entries(d, a={"shape": [2**40, 2**40]}), f"{_WEIGHTS} is not a complete"),
    "a shape below zero": (lambda d: _entries(d, a={"shape": [-1]}), f"{_WEIGHTS} is not a complete"),
    "an unknown dtype": (lambda d: _entries(d, a={"dtype": "PICKLE"}), f"{_WEIGHTS} is not a complete"),
    "bytes behind the tensors": (
        lambda d: _header(d, b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(400)),
        f"{_WEIGHTS} is not a complete",
    ),
}


@distributed(1)
def test_the_corpus_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    boosted = boost(_CASE)
    good = tmp_path / "good"
    _CASE.recipe.model().save_pretrained(good)
    before = {name: tensor.clone() for name, tensor in boosted.model.unwrap().state_dict().items()}
    limit = sys.getrecursionlimit()
    for kind, (harm, message) in CORPUS.items():
        directory = tmp_path / "bad"
        shutil.copytree(good, directory)
        harm(directory)
        for options in ({}, {"strict": False}):
            with pytest.raises(ConfigurationError, match=message) as raised:
                boosted.booster.load_model(boosted.model, directory, **options)
            assert "\n" not in str(raised.value), kind
        shutil.rmtree(directory)
        shutil.rmtree(tmp_path / "outside", ignore_errors=True)
    assert not (tmp_path / "canary").exists() and sys.getrecursionlimit() == limit
    after = boosted.model.unwrap().state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    boosted.booster.load_model(boosted.model, good)  # it is the harm that was refused


def test_the_payload_would_make_the_canary(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(_Payload(tmp_path / "canary")))
    assert (tmp_path / "canary").exists()


@distributed(1)
def test_a_pickle_runs_nothing_even_where_bin_files_are_allowed(tmp_path: Path) -> None:
    boosted = boost(_CASE)
    _CASE.recipe.model().save_pretrained(tmp_path / "bad")
    _torch_save(tmp_path / "bad", "pytorch_model.bin")
    with pytest.raises(ConfigurationError, match=r"pytorch_model.bin holds '.*', whose code would run"):
        boosted.booster.load_model(boosted.model, tmp_path / "bad", allow_bin=True)
    assert not (tmp_path / "canary").exists()


@distributed(1)
def test_a_link_into_the_store_of_a_hub_cache_is_followed(tmp_path: Path) -> None:
    boosted = boost(_CASE)
    snapshot = tmp_path / "snapshots" / "0123"
    _CASE.recipe.model().save_pretrained(snapshot)
    (tmp_path / "blobs").mkdir()
    shutil.move(snapshot / _WEIGHTS, tmp_path / "blobs" / "abcd")
    (snapshot / _WEIGHTS).symlink_to("../../blobs/abcd")
    boosted.booster.load_model(boosted.model, snapshot)


@distributed(1)
def test_code_in_a_model_directory_is_not_run(tmp_path: Path) -> None:
    """`auto_map` names code beside the weights: it is run only for who says `trust_remote_code=True`."""
    from transformers import AutoConfig, AutoModelForMaskedLM

    boosted = boost(_CASE)
    _CASE.recipe.model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["model_type"] = "unheard_of"
    config["auto_map"] = {"AutoConfig": "evil.EvilConfig", "AutoModelForMaskedLM": "evil.Evil"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'canary')!r}).touch()\n")
    boosted.booster.load_model(boosted.model, tmp_path)  # the weights are read, the code is not
    for auto in (AutoConfig, AutoModelForMaskedLM):
        with pytest.raises(ValueError, match="trust_remote_code"):
            auto.from_pretrained(tmp_path, trust_remote_code=False)
    assert not (tmp_path / "canary").exists()
    # Who trusts it runs it: the canary would sing.
    os.environ["HF_MODULES_CACHE"] = str(tmp_path / "modules")
    with pytest.raises((AttributeError, ImportError, ValueError, OSError)):
        AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    assert (tmp_path / "canary").exists()


@pytest.mark.parametrize("text", [_DEEP, '{"tp_size": 1, "tp_size": 2}', '{"tp_size": ', "[1]", "\x00"])
def test_options_and_schedulers_that_are_no_json(text: str, tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(ConfigurationError, match=r"file\.json"):
        HybridParallelPlugin.from_config(tmp_path / "file.json")
    with pytest.raises(ConfigurationError, match=r"file\.json"):
        load_lr_scheduler(None, str(tmp_path / "file.json"))


@pytest.mark.slow
@distributed(2)
def test_nothing_is_unpickled_from_boost_to_load(tmp_path: Path) -> None:
    """Python announces every class that an unpickler looks up, whoever runs it."""
    found: list[str] = []
    watching = True

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if watching and event == "pickle.find_class":
            found.append(".".join(map(str, args)))

    sys.addaudithook(hook)  # for good, so that it can only be told to be quiet
    try:
        boosted = boost(_CASE.but(layout="tp2"))
        boosted.pipeline_backward(boosted.share(_CASE.recipe.batch(0)))
        boosted.finish_step()
        boosted.booster.save_model(boosted.model, tmp_path / "model")
        boosted.booster.load_model(boosted.model, tmp_path / "model")
        boosted.booster.save_checkpoint(tmp_path / "state", model=boosted.model, optimizer=boosted.optimizer)
        boosted.booster.load_checkpoint(tmp_path / "state", model=boosted.model, optimizer=boosted.optimizer)
        assert not found, found
        pickle.loads(pickle.dumps(Path()))
        assert found  # the hook is there
        dist.barrier()
    finally:
        watching = False


@distributed(1)
def test_an_adapter_that_is_a_pickle(tmp_path: Path) -> None:
    case = Case(recipe=Recipe(family="bert", head="masked_lm", adapters=("query",)), layout="single")
    boosted = boost(case)
    boosted.booster.save_model(boosted.model, tmp_path / "bad")
    (tmp_path / "bad" / "adapter_model.safetensors").write_bytes(pickle.dumps(_Payload(tmp_path / "canary")))
    with pytest.raises(ConfigurationError, match="adapter_model.safetensors is not a complete safetensors file"):
        boosted.booster.load_model(boosted.model, tmp_path / "bad")
    save_file({"a": torch.ones(1)}, tmp_path / "elsewhere")
    (tmp_path / "bad" / "adapter_model.safetensors").unlink()
    (tmp_path / "bad" / "adapter_model.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigurationError, match="is a link to .*, outside the directory; do not load it"):
        boosted.booster.load_model(boosted.model, tmp_path / "bad")
    assert not (tmp_path / "canary").exists()
