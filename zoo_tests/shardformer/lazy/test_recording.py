"""What `record_module_init` remembers, and what doing it over gives.

What breaks here first: an operation that the recorder takes for a view, or one that it takes to overwrite what it
reads. Look in `shardformer/lazy/recording.py` and `materialize.py`.
"""

from __future__ import annotations

import copy
import importlib
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from shardformer import LazyInitContext, record_module_init
from shardformer.lazy import materialize, waits_for_values
from shardformer.lazy.materialize import LoggedCall
from zoo_tests.harness.families import third_of_families
from zoo_tests.zoo import FAMILIES

_MISTAKE = 1e-7  # chance that a right distribution fails, for one parameter

_FAST = ("bert", "gpt2", "llama", "t5", "vit", "mixtral")  # as many kinds of rules


def _built(family: str) -> nn.Module:
    """As a user builds it: without the noise that the zoo adds."""
    members = FAMILIES[family]
    head, library = members.heads[members.main_head], importlib.import_module(members.module)
    config = getattr(library, members.config_class)(**{**members.config, **head.config})
    return getattr(library, head.model_class)(config)


def _seeded(family: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return _built(family)


def _recorded(family: str, seed: int = 11) -> nn.Module:
    with record_module_init():
        model = _built(family)
    materialize(model, seed=seed)
    return model


def _distance(first: Tensor, second: Tensor) -> float:
    """The Kolmogorov-Smirnov distance: the largest difference of the two cumulative distributions."""
    values = torch.cat([first, second]).sort().values
    shares = [torch.searchsorted(each.sort().values, values, right=True) / len(each) for each in (first, second)]
    return (shares[0] - shares[1]).abs().max().item()


def _check_distribution(name: str, found: Tensor, ordinary: Tensor) -> None:
    count = ordinary.numel()
    limit = (-torch.tensor(_MISTAKE / 2).log() / 2).sqrt().item()
    assert _distance(found, ordinary) < limit * (2 / count) ** 0.5, name
    mean, std = ordinary.mean(), ordinary.std()
    assert abs(found.mean() - mean) < 5.5 * std * (2 / count) ** 0.5, name
    if count >= 500:
        assert 0.75 < found.std() / std < 1.33, name
        for extreme in (torch.amin, torch.amax):
            assert abs(extreme(found) - extreme(ordinary)) < 2 * std, name


@pytest.mark.parametrize("family", [*_FAST, *third_of_families(2, but=_FAST)])
def test_distributions_are_those_of_ordinary_construction(family: str) -> None:
    """Constants (biases, norms, tables) are equal, what is drawn has the same distribution."""
    found, ordinary, other = _recorded(family), _seeded(family, 0), _seeded(family, 1)
    expected, reseeded = ordinary.state_dict(), other.state_dict()
    assert list(found.state_dict()) == list(expected) and not waits_for_values(found)
    drawn = 0
    for name, tensor in found.state_dict().items():
        assert tensor.dtype == expected[name].dtype and tensor.shape == expected[name].shape
        if torch.equal(expected[name], reseeded[name]):
            assert torch.equal(tensor, expected[name]), name
        else:
            drawn += 1
            _check_distribution(name, tensor.flatten(), expected[name].flatten())
    assert drawn
    for (name, buffer), (_, other_buffer) in zip(found.named_buffers(), ordinary.named_buffers(), strict=True):
        assert torch.equal(buffer, other_buffer), name  # those that are not saved, too


def test_values_depend_on_the_seed_alone() -> None:
    first = _recorded("gpt2").state_dict()
    torch.manual_seed(99)
    again, other = _recorded("gpt2").state_dict(), _recorded("gpt2", seed=12).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in first.items())
    assert not torch.equal(other["transformer.wte.weight"], first["transformer.wte.weight"])
    layers = [first[f"transformer.h.{layer}.mlp.c_fc.weight"] for layer in (0, 1)]
    assert not torch.equal(*layers)


def test_nothing_is_drawn_twice() -> None:
    with record_module_init():
        model = _built("llama")
    ordinary = _seeded("llama", 0)
    draws, original = [], LoggedCall.run

    def counted(step: LoggedCall, values: dict, seed: int) -> None:
        draws.extend([step.owner] if step.draws else [])
        original(step, values, seed)

    with mock.patch.object(LoggedCall, "run", counted):
        materialize(model, seed=1)
    matrices = [name for name, parameter in ordinary.named_parameters() if parameter.dim() > 1]
    assert sorted(draws) == sorted((name, 0) for name in matrices)


def test_random_state_of_the_user_is_left_alone() -> None:
    before = torch.get_rng_state()
    _recorded("bert")
    assert torch.equal(torch.get_rng_state(), before)


class _Odd(nn.Module):
    """Initialised in ways that models of transformers are not."""

    def __init__(self, size: int, *, scale: float = 2.0) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(size, size))
        self.twin = nn.Parameter(self.first.detach().clone() * scale)  # from the same draws
        self.halves = nn.ParameterList(torch.rand(2, size).unbind())
        self.turned = nn.Parameter(torch.empty(size, 2 * size))
        nn.init.orthogonal_(self.turned)
        nn.init.trunc_normal_(self.turned[0], std=0.1, a=-0.1, b=0.1)
        self.picked = nn.Parameter(torch.zeros(size))
        with torch.no_grad():
            self.picked[torch.tensor([1, 3])] = torch.tensor([5.0, 7.0])
        rates = [rate.item() for rate in torch.linspace(0, 1, size)]
        self.rates, self.listed = rates, torch.arange(size).tolist()
        self.register_buffer("positions", torch.arange(size).expand(1, -1), persistent=False)
        self.table = torch.linspace(0, 1, size)  # neither a parameter nor a buffer
        self.tables = {"long": [torch.ones(size)]}
        self.unset = nn.Parameter(torch.empty(size))
        self.largest = 1 if torch.ones(()) > 0 else 2


def test_odd_ways_to_initialise() -> None:
    with LazyInitContext():
        odd = _Odd(6, scale=3.0)
        assert odd.first.device.type == "cpu"  # what a program in there sees
    assert odd.first.is_meta and odd.positions.is_meta
    assert (odd._init_args, odd._init_kwargs) == ((6,), {"scale": 3.0})
    assert odd.rates == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1]) and odd.listed == [0, 1, 2, 3, 4, 5]
    copied = copy.deepcopy(odd)
    for model in (odd, copied):
        materialize(model, seed=4)
        assert torch.equal(model.twin, model.first * 3)
        assert not torch.equal(*model.halves) and all(half.min() >= 0 and half.max() < 1 for half in model.halves)
        rest = model.turned[1:]
        torch.testing.assert_close(rest @ rest.T, torch.eye(5))
        assert 0 < model.turned[0].abs().max() <= 0.1
        assert model.picked.tolist() == [0, 5, 0, 7, 0, 0]
        assert model.positions.tolist() == [[0, 1, 2, 3, 4, 5]]
        assert torch.equal(model.table, torch.linspace(0, 1, 6)) and torch.equal(model.tables["long"][0], torch.ones(6))
        assert model.unset.tolist() == [0] * 6 and model.largest == 1
    assert all(torch.equal(*pair) for pair in zip(odd.parameters(), copied.parameters(), strict=True))


def test_everything_is_put_back() -> None:
    class Known(nn.Module):
        def __init__(self) -> None:
            super().__init__()

    from transformers import PreTrainedModel

    def patched() -> list[object]:
        return [
            Known.__init__,
            nn.Linear.__init__,
            nn.Module.__dict__.get("__init_subclass__"),
            nn.init._no_grad_trunc_normal_,
            PreTrainedModel._load_pretrained_model,
        ]

    before = patched()
    with pytest.raises(ZeroDivisionError), record_module_init():
        assert patched() != before
        nn.Linear(1, 1 // 0)
    assert patched() == before
    with record_module_init(), record_module_init():

        class Defined(nn.Linear):
            def __init__(self, size: int) -> None:
                super().__init__(size, size)

        inner = Defined(3)
    assert patched() == before and inner.weight.is_meta and inner._init_args == (3,)
    materialize(inner)
    after = Defined(3)
    assert not after.weight.is_meta and not hasattr(after, "_init_args")


def test_changes_after_the_context() -> None:
    with record_module_init():
        whole, half, changed = (nn.Linear(4, 4) for _ in range(3))
    half.half()
    materialize(whole, seed=1)
    materialize(half, seed=1)
    assert half.weight.dtype == torch.float16 and torch.equal(half.weight, whole.weight.half())
    nn.init.zeros_(changed.weight)
    with pytest.raises(ValueError, match="weight was changed while it had no values; change it inside of record_mod"):
        materialize(changed)
    changed.weight = nn.Parameter(torch.empty(5, 4, device="meta"))
    with pytest.raises(ValueError, match=r"weight is on the meta device, and was not made in record_module_init\(\)"):
        materialize(changed)
