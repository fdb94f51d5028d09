"""A boosted model beside the plain one, for the rows of the table in `docs/boosted_model.md`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from shardformer.shard_spec import spec_of
from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.train_sharded import Boosted

RECIPE = Recipe(family="llama", head="causal_lm", config=(("num_hidden_layers", 2),))
# transformers takes the logits of a language model for its loss in fp32.
CLOSE = {"rtol": 1e-6, "atol": 1e-8}


def options_of(layout: str) -> dict[str, Any]:
    return Case(recipe=RECIPE, layout=layout).plugin_options


class Sides:
    """A boosted model, the plain one, and a batch of both."""

    def __init__(self, layout: str, folder: str, before: Callable[[nn.Module], Any] = lambda model: None) -> None:
        self.layout, self.folder = layout, Path(folder)
        self.is_cut = layout != "dp2"
        self.plain, given = RECIPE.model(), RECIPE.model()
        self.before = [before(model) for model in (given, self.plain)]
        plugin = HybridParallelPlugin(**options_of(layout))
        self.booster = Booster(plugin=plugin)
        self.model, self.optimizer = self.booster.boost(given, torch.optim.SGD(given.parameters(), lr=0.3))
        self.batch = RECIPE.batch(0)
        self.share = Boosted(plugin, self.booster, self.model, self.optimizer, None).share(self.batch)

    @property
    def models(self) -> list[Any]:
        """Both, the boosted one first."""
        return [self.model, self.plain]

    def losses(self, *models: Any) -> list[Tensor]:
        """Of one batch; the boosted model (or its copy) first."""
        ours, plain = models or self.models
        return [ours(**self.share).loss, plain(**self.batch).loss]

    def check_losses(self, *models: Any) -> None:
        torch.testing.assert_close(*self.losses(*models), **CLOSE, check_dtype=False)

    def backward(self) -> None:
        ours, plain = self.losses()
        self.booster.backward(ours, self.optimizer)
        plain.backward()

    def check_gradients(self, passes: int = 1) -> None:
        close = CLOSE | {"atol": CLOSE["atol"] * passes}
        found = self.optimizer.full_gradients()
        names = {name for name, _ in self.model.named_parameters()}
        assert set(found) == {name for name, each in self.plain.named_parameters() if each.grad is not None} & names
        for name, gradient in found.items():
            expected = self.plain.get_parameter(name).grad
            torch.testing.assert_close(gradient, expected, **close, msg=lambda text, name=name: f"{name}: {text}")

    def check_step(self) -> None:
        """One step leaves the weights of the plain script."""
        self.backward()
        for optimizer in (self.optimizer, torch.optim.SGD(self.plain.parameters(), lr=0.3)):
            optimizer.step()
        for name, param in self.model.named_parameters():
            torch.testing.assert_close(param, spec_of(param).shard(self.plain.get_parameter(name)), **CLOSE)

    def refused(self, words: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        with pytest.raises(ConfigurationError, match=words):
            call(*args, **kwargs)

    def holds(self, name: str) -> bool:
        """Whether this rank has the parameter."""
        return name in dict(self.model.named_parameters())
