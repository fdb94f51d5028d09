"""The seam of features: a further one is asked at every point, and the core names none.

What breaks here first: a loop that enters a pass without its features, see `plugins/hybrid_parallel/step/passes.py`.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.features import feature
from plugins.hybrid_parallel.features.feature import FEATURES, Feature, Parts, features_of
from plugins.hybrid_parallel.zero.reducer import GradientReducer
from zoo_tests.harness.ranks import distributed

_CORE = ("plugin.py", "setup/model.py", "boosted/model.py")
_LIBRARY = Path(feature.__file__).parents[1]
# Words of what features are about -> what the core may say: its public methods, and experts on an axis of the mesh.
_WORDS = re.compile(
    r"elastic|offload|reproduc|fp8|recomput|gradient_checkpointing|compile_|quantis|router_bias|expert|\bdebug\b"
)
_MAY_SAY = re.compile(
    r"expert_load|count_expert_load=|expert_parallel|expert_capacity_factor|is_compiler|"
    r"hybrid_parallel\.(debug|reproducible)\."
)

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


class OwnReducer(GradientReducer):
    """A part that the toy replaces."""


class Toy(Feature):
    """Writes down where it is asked, and how many parameters are there."""

    asked: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    refuses = False

    def note(self, point: str, model: nn.Module | None = None) -> None:
        Toy.asked += (point,)
        Toy.sizes += () if model is None else (sum(param.numel() for param in model.parameters()),)

    def check(self, model: nn.Module, optimizers: Any, mesh: Any) -> None:
        self.note("check", model)
        if Toy.refuses:
            raise ConfigurationError("the toy refuses; use none")

    def prepare(self, model: nn.Module) -> None:
        self.note("prepare", model)

    def sharded(self, parts: Parts) -> None:
        self.note("sharded", parts.module)
        parts.reducer = OwnReducer

    def boosted(self, model: Any) -> None:
        self.note("boosted", model.unwrap())
        assert not model.optimizers
        model.around_passes.append(self.around_pass)

    def finished(self, model: Any) -> None:
        self.note("finished", model.unwrap())
        assert len(model.optimizers) == 1

    def after_step(self, optimizer: Any, model: Any) -> None:
        self.note("after step")

    @contextmanager
    def around_pass(self, this: Any) -> Iterator[None]:
        self.note(this.kind.value)
        yield


@contextmanager
def listed(refuses: bool = False) -> Iterator[None]:
    """List the toy as the last feature."""
    Toy.asked, Toy.sizes, Toy.refuses = (), (), refuses
    line = (f"{__name__}.Toy", lambda config, model: True)
    with mock.patch.object(feature, "FEATURES", (*FEATURES, line)):
        yield


def boost(**options: Any) -> tuple[Booster, Any, Any]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    booster = Booster(plugin=HybridParallelPlugin(check_layout="off", **options))
    model, optimizer, *_ = booster.boost(model, optimizer)
    return booster, model, optimizer


@distributed(2)
def test_a_further_feature_is_asked_at_every_point() -> None:
    ids = torch.arange(8).view(2, 4)
    batch = {"input_ids": ids, "labels": ids}
    with listed():
        booster, model, optimizer = boost(tp_size=2)
    assert Toy.asked == ("check", "prepare", "sharded", "boosted", "finished")
    whole, prepared, *shard = Toy.sizes
    assert whole == prepared > shard[0] == shard[1] == shard[2], "whole at first, then this rank's shard"
    assert type(optimizer.reducer) is OwnReducer
    Toy.asked = ()
    booster.execute_pipeline(iter([batch]), model, optimizer=optimizer)
    optimizer.step()
    booster.backward(model(**batch).loss, optimizer)
    optimizer.step()
    model.eval()
    with torch.no_grad():
        model(**batch)
    model.generate(ids, max_new_tokens=1)
    booster.execute_pipeline(iter([batch]), model)
    assert Toy.asked == ("step", "after step", "train", "after step", "evaluate", "generate", "evaluate")


@distributed(2)
def test_the_backward_pass_of_a_pipeline_is_one_too() -> None:
    ids = torch.arange(8).view(2, 4)
    with listed():
        booster, model, optimizer = boost(pp_size=2, num_microbatches=2)
    Toy.asked = ()
    booster.backward(model(input_ids=ids, labels=ids).loss, optimizer)
    assert Toy.asked == ("train", "backward")


@distributed(1)
def test_what_a_feature_refuses_is_not_changed() -> None:
    with listed(refuses=True), pytest.raises(ConfigurationError, match="the toy refuses; use none"):
        boost(zero_stage=3)
    assert Toy.asked == ("check",)


def test_the_list_names_features_whose_methods_are_the_points() -> None:
    points = {name for name in vars(Feature) if not name.startswith("_")}
    used: Counter[str] = Counter()
    for path, _ in FEATURES:
        module, _, name = path.rpartition(".")
        listed_class = getattr(import_module(module), name)
        assert issubclass(listed_class, Feature)
        own = {name for name in vars(listed_class) if not name.startswith("_")}
        assert own and own <= points, f"{path} has {own - points}, which nobody asks"
        used.update(own)
    assert {point for point in points if used[point] < 2} <= {"finished"}, "a point for one feature alone is none"


def test_a_plain_job_has_no_feature_and_options_have_theirs_in_order() -> None:
    model = nn.Linear(2, 2)
    assert features_of(HybridParallelConfig(), model) == ()
    options = {"debug": True, "precision": "fp8", "gradient_checkpointing": "full", "offload_activations": "cpu"}
    found = features_of(HybridParallelConfig.from_options(**options, count_expert_load=True), model)
    names = [type(each).__name__ for each in found]
    assert names == ["CountedExperts", "Recomputation", "Debug", "Offload", "Float8Products"]


def said_in(tree: ast.Module) -> Iterator[str]:
    """Names, imports and strings of a file, without its docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield f"{node.module}."
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)
        elif isinstance(node, ast.Name | ast.FunctionDef | ast.keyword | ast.arg):
            yield str(getattr(node, "id", None) or getattr(node, "name", None) or getattr(node, "arg", ""))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
            yield node.value


@pytest.mark.parametrize("file", _CORE)
def test_the_core_names_no_feature(file: str) -> None:
    tree = ast.parse((_LIBRARY / file).read_text(encoding="utf-8"))
    documented = {ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, _DOCUMENTED)}
    said = {text for text in said_in(tree) if text not in documented}
    assert not {text for text in said if _WORDS.search(_MAY_SAY.sub("", text))}


def test_names_of_features_are_found() -> None:
    tree = ast.parse("if config.kernels.compile_layers:\n    x.offload_activations('fp8 is here')\n")
    assert {text for text in said_in(tree) if _WORDS.search(text)} >= {"config.kernels.compile_layers", "fp8 is here"}
