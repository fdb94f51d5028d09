"""Generation with a sharded model: every tensor-parallel rank runs transformers' own `generate` on all tokens.

Caches hold the keys and values of a rank's own heads, and the head gathers its logits. Only sampling needs care: if the
ranks drew different tokens, each would continue with a different text, and their caches would not match. Ranks that
share experts have texts of their own, and go on calling the model until the last of these texts ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardformer.distributed.random import adopt_first_generator
from shardformer.shard_config import ShardConfig

_RUNNER = "_generates_as"  # attribute of a model while it generates through the stages of a pipeline
_WHOLE = "_generates_on_all_stages"  # attribute of a stage: `generate` of the model that `boost` returned


def generate_by(model: nn.Module, generate: Callable[..., Any]) -> None:
    """Let `model.generate` of one stage call `generate`, which runs all stages of the pipeline."""
    vars(model)[_WHOLE] = generate


@contextmanager
def generating_as(model: nn.Module, runner: nn.Module) -> Iterator[None]:
    """Let `model.generate` call `runner`, which shares the state of `model`, for each next token."""
    vars(model)[_RUNNER] = runner
    try:
        yield
    finally:
        del vars(model)[_RUNNER]


def generate_in_step(model: nn.Module, config: ShardConfig) -> None:
    """Make `model.generate` sample the same tokens, and end at the same step, on all tensor-parallel ranks.

    The new `generate` raises `RuntimeError` for layouts and options with which it would be wrong or hang.
    """

    def generate(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        manager, runner = config.stage_manager, vars(self).get(_RUNNER, self)
        if manager.num_stages > 1 and runner is self:
            return vars(self)[_WHOLE](*args, **kwargs)
        if config.context is not None:
            raise RuntimeError(
                f"generate() adds tokens to sequences that cp_size={config.context.size} ranks share; boost the model "
                "with cp_size=1 (a checkpoint opens under any layout)"
            )
        if config.uses_ulysses and kwargs.get("use_cache", True):
            raise RuntimeError(
                "sequence_parallelism_mode='all_to_all' leaves no key/value cache to generate with; "
                "use 'split_gather', or generate(use_cache=False)"
            )
        if config.cuts_sequence and _asks_for_hidden_states(self, kwargs):
            raise RuntimeError(
                "generate(output_hidden_states=True) finds parts of sequences under enable_sequence_parallelism=True; "
                "leave that out, or use output_hidden_states=False"
            )
        if config.tensor_parallel_size > 1:
            adopt_first_generator(config.group, next(self.parameters()).device)
        if config.expert_parallel_size > 1:
            from transformers import GenerationMixin

            if type(self).generate is not GenerationMixin.generate:
                raise RuntimeError(
                    f"generate() of {type(self).__name__} is a loop of its own, in which ep_size="
                    f"{config.expert_parallel_size} ranks would wait for those that write shorter texts; boost the "
                    "model with ep_size=1 (a checkpoint opens under any layout)"
                )
            kwargs["synced_gpus"] = True  # tokens of the other ranks may need experts of this one
        return type(runner).generate(runner, *args, **kwargs)

    def criteria(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        runner = vars(self).get(_RUNNER, self)
        found = type(runner)._get_stopping_criteria(runner, *args, **kwargs)
        return found if runner is not self or config.tensor_parallel_size == 1 else decided_first(found, config.group)

    model.generate = generate.__get__(model)
    if hasattr(model, "_get_stopping_criteria"):
        model._get_stopping_criteria = criteria.__get__(model)
    if config.expert_parallel_size > 1 and hasattr(model, "_has_unfinished_sequences"):
        _go_on_for_others(model, config.expert_parallel_process_group)


def _go_on_for_others(model: nn.Module, experts: ProcessGroup) -> None:
    """Let a rank whose texts have ended call the model, as long as ranks with the same experts write theirs."""
    ended = False

    def has_unfinished(self: nn.Module, this_peer_finished: bool, synced_gpus: bool, device: torch.device) -> bool:
        nonlocal ended
        ended = this_peer_finished
        unfinished = torch.tensor(int(not ended), device=device)
        dist.all_reduce(unfinished, dist.ReduceOp.MAX, group=experts)
        return bool(unfinished)

    def update(self: nn.Module, outputs: Any, model_kwargs: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        # Without a cache the ended texts are passed again, and their mask may not outgrow them.
        if ended and not model_kwargs.get("use_cache"):
            return model_kwargs
        return type(self)._update_model_kwargs_for_generation(self, outputs, model_kwargs, **kwargs)

    model._has_unfinished_sequences = has_unfinished.__get__(model)
    model._update_model_kwargs_for_generation = update.__get__(model)


def decided_first(criteria: Any, *groups: ProcessGroup) -> Any:
    """Return stopping criteria with the first rank's answers: clocks differ, and no rank may end alone."""
    own = ("max_length", "eos_token_id")  # transformers looks for these criteria; they are the same on all ranks
    return type(criteria)(
        each if any(hasattr(each, name) for name in own) else _FirstDecides(each, groups) for each in criteria
    )


class _FirstDecides:
    """A stopping criterion whose answer is that of the first rank of its groups."""

    def __init__(self, criterion: Callable[..., Tensor], groups: Sequence[ProcessGroup]) -> None:
        self._criterion, self._groups = criterion, groups

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Return which texts end, [batch]."""
        ends = torch.as_tensor(self._criterion(input_ids, scores, **kwargs), device=input_ids.device)
        ends = ends.expand(len(input_ids)).to(torch.uint8).contiguous()
        for group in self._groups:
            dist.broadcast(ends, group=group, group_src=0)
        return ends.bool()


def _asks_for_hidden_states(model: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Return whether hidden states are requested by the call or, if it does not say, by the generation config."""
    given = kwargs.get("generation_config") or getattr(model, "generation_config", None)
    asked = kwargs.get("output_hidden_states")
    return bool(getattr(given, "output_hidden_states", False) if asked is None else asked)
