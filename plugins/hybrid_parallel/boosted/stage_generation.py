"""Generation in a pipeline: every rank runs transformers' own `generate`, token by token through the stages.

The model that `generate` calls is an object of a derived class, whose call receives hidden states from the stage
before, runs the layers of this rank with their part of the cache, sends on, and returns the logits of the last stage.
So all ranks choose the same next token.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster import failure
from booster.errors import ConfigurationError
from plugins.hybrid_parallel.data.microbatch import signature
from plugins.hybrid_parallel.distributed.agreement import checksum, checksum_of
from plugins.hybrid_parallel.pipeline.p2p import Channel
from plugins.hybrid_parallel.pipeline.runtime import PipelineRuntime
from plugins.hybrid_parallel.step.user_loop import agree
from shardformer.distributed.process_groups import all_gather_json, broadcast_json
from shardformer.distributed.random import adopt_first_generator
from shardformer.generation import decided_first, generating_as
from shardformer.peft import adapter_configs, kind_of, model_inside
from shardformer.stages.placeholders import CachedTower, StageMessage
from shardformer.stages.stage import run_stage
from shardformer.utils.derived_modules import derive
from shardformer.utils.module_paths import cache_name


class StageCache:
    """One pass of this rank's stages over a cache of transformers.

    Models read from some layer of a cache how many tokens came before; it need not be a layer of theirs. So layers of
    other stages are filled with keys of one element per token. They have the class of the layer: it crops, reorders and
    counts them like its own keys.

    Args:
        cache: a dynamic cache, or transformers' pair of caches of an encoder-decoder; None if there is none.
        size: samples and tokens of this pass.
        device: of the keys.

    Raises:
        ConfigurationError: if it holds something else than keys and values of growing length.
    """

    def __init__(self, cache: Any, size: tuple[int, int], device: torch.device) -> None:
        self.cache = getattr(cache, "self_attention_cache", cache)
        self._before = [] if cache is None else list(self.cache.layers)
        from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

        for layer in self._before:
            if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
                raise ConfigurationError(
                    f"generate() of a pipeline keeps keys and values in caches that grow, and this cache has a "
                    f"{type(layer).__name__}; leave out this cache, or cache_implementation, or use use_cache=False"
                )
        self._keys = torch.ones(size[0], 1, size[1], 1, dtype=torch.bool, device=device)
        self._filled: dict[int, Any] = {}

    def run(self, stage: Callable[[], Any]) -> Any:
        """Run one stage; it sees all layers as they were before this pass, and fills its own."""
        if self.cache is None:
            return stage()
        self.cache.layers[:] = map(copy.copy, self._before)
        result = stage()
        for index, layer in enumerate(self.cache.layers):
            length_before = self._before[index].get_seq_length() if index < len(self._before) else 0
            if layer.get_seq_length() != length_before:
                self._filled[index] = layer
        return result

    def finish(self) -> None:
        """Keep what the stages of this rank have filled; count the tokens of this pass in all other layers."""
        if self.cache is None:
            return
        # A cache without a configuration makes its layers when they are filled.
        layers = [*self._before, *self.cache.layers[len(self._before) :]]
        self.cache.layers[:] = [self._filled.get(index, layer) for index, layer in enumerate(layers)]
        for index, layer in enumerate(self.cache.layers):
            if index not in self._filled:
                layer.update(self._keys, self._keys)


# Inputs that have a token of each position of a pass.
_TOKENS = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")

_CALLS = "_calls_of_stages"  # attribute of the model while it generates

# Option -> the values that a pipeline can do.
_POSSIBLE: Mapping[str, tuple[Any, ...]] = {
    "assistant_model": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "custom_generate": (None,),
    "cache_implementation": (None, "dynamic"),
    "guidance_scale": (None, 1, 1.0),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
}


@failure.guard("model.generate")
def generate_through_stages(model: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run `generate` of a model whose layers are on several ranks; all ranks of the pipeline return all tokens.

    Args:
        args, kwargs: of transformers' `generate`.

    Raises:
        ConfigurationError: if the ranks of the pipeline do not all ask for the same, or for what it cannot do; raised
            on all of them.
    """
    from transformers import GenerationMixin

    inside = model_inside(model.module)
    agree(model.mesh, f"calls model.generate({_description(args, kwargs)})")
    if type(inside).generate is not GenerationMixin.generate:
        raise ConfigurationError(
            f"{type(inside).__name__}.generate is a loop of its own, which reads modules that are on other stages; "
            "load the model with pp_size=1 (a checkpoint opens under any layout)"
        )
    configs = kwargs.get("generation_config"), getattr(inside, "generation_config", None)
    for name, possible in _POSSIBLE.items():
        given = kwargs.get(name)
        for config in configs:
            given = getattr(config, name, None) if given is None else given
        if given not in possible:
            raise ConfigurationError(
                f"generate() of a pipeline cannot do {name}={_text(given)}; leave it out, or load the model with "
                "pp_size=1 (a checkpoint opens under any layout)"
            )
    prompts = [kind_of(config) for config in adapter_configs(model.module).values() if config.is_prompt_learning]
    if prompts:
        raise ConfigurationError(
            f"generate() of a pipeline cannot put the virtual tokens of peft's {prompts[0]} in front of a prompt; load "
            "the model with pp_size=1 (its adapter opens under any layout)"
        )
    adopt_first_generator(model.mesh.group("pp"), model.mesh.device)
    runner = derive(inside, _ThroughStages)
    vars(inside)[_CALLS] = calls = StageCalls(inside, model.runtime)
    try:
        with generating_as(inside, runner):
            return model.module.generate(*args, **kwargs)
    finally:
        del vars(inside)[_CALLS]
        calls.runtime.flush()


class StageCalls:
    """The calls of the model, and of its encoder, by one `generate`.

    Args:
        model: the transformers model, reduced to the stages of this rank.
        runtime: what connects them.
    """

    def __init__(self, model: nn.Module, runtime: PipelineRuntime) -> None:
        self.model, self.runtime, self.mesh = model, runtime, runtime.mesh
        # Tokens enter where the embedding of the decoder is: on the stage that ends the encoder.
        self.entry = self._last_stage_of_encoder() if model.config.is_encoder_decoder else 0
        self._logits: list[Any] | None = None  # size of the vocabulary, and dtype

    def encode(self, inputs: dict[str, Any]) -> Any:
        """Run the encoder; return its last hidden state on all ranks of the pipeline, in transformers' class."""
        from transformers.modeling_outputs import BaseModelOutput

        encoder = self.model.get_encoder()
        found = self._through(
            range(self.entry + 1),
            lambda stage, message: run_stage(self.model, message, inputs, stage, encoder),
            ("encode", signature(inputs)),
        )
        hidden = None if found is None else found[0].contiguous()
        source = self._rank_of(self.entry)
        header = broadcast_json(None if hidden is None else _header(hidden), self.mesh.group("pp"), source)
        return BaseModelOutput(last_hidden_state=self._broadcast(hidden, header, source))

    def decode(self, inputs: dict[str, Any]) -> Any:
        """Run the model for the next tokens.

        Returns:
            On all ranks of the pipeline: the logits of the last position, [batch, 1, vocabulary], and the cache.
        """
        from transformers.modeling_outputs import CausalLMOutputWithPast, Seq2SeqLMOutput

        cache = inputs.get(cache_name(inputs))
        if cache is None and inputs.get("use_cache"):
            raise ConfigurationError(
                f"generate() of a pipeline passes a cache to {type(self.model).__name__}, which makes its own; "
                "use generate(use_cache=False)"
            )
        ids = next(inputs[name] for name in _TOKENS if inputs.get(name) is not None)
        caches = StageCache(cache, ids.shape[:2], self.mesh.device)
        length = 0 if cache is None else cache.get_seq_length()  # determines the shape of position biases
        outputs = self._through(
            range(self.entry, self.runtime.num_stages),
            lambda stage, message: caches.run(lambda: run_stage(self.model, message, inputs, stage)),
            ("decode", length, signature(inputs)),
        )
        caches.finish()
        logits = self._last_logits(None if outputs is None else outputs["logits"], ids.shape[0])
        cls = Seq2SeqLMOutput if self.model.config.is_encoder_decoder else CausalLMOutputWithPast
        return cls(None, logits, cache)  # by place: a release may rename the cache

    def _through(self, stages: range, run: Callable[[int, StageMessage | None], Any], key: tuple) -> Any | None:
        """Run this rank's stages among `stages`; return the last one's result on its rank; `key`: of sent shapes."""
        result, key = None, (*key, self.runtime.dtype)
        for stage in sorted(set(self.runtime.stages).intersection(stages)):
            links = self.runtime.links[stage]
            result = run(stage, None if stage == stages.start else _receive(links.activations_in, key))
            if stage != stages.stop - 1:
                links.activations_out.send(result, key)
                result = None
            self.runtime.release_sent()
        return result

    def _last_logits(self, logits: Tensor | None, batch: int) -> Tensor:
        """Broadcast the logits of the last position from the last stage."""
        source = self.runtime.rank_of_last_stage
        last = None if logits is None else logits[:, -1:].contiguous()
        if self._logits is None:
            self._logits = broadcast_json(None if last is None else _header(last), self.mesh.group("pp"), source)
        return self._broadcast(last, [[batch, *self._logits[0][1:]], self._logits[1]], source)

    def _broadcast(self, tensor: Tensor | None, header: list[Any], source: int) -> Tensor:
        shape, dtype = header
        if tensor is None:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.mesh.device)
        dist.broadcast(tensor, source, group=self.mesh.group("pp"))
        return tensor

    def _rank_of(self, stage: int) -> int:
        return self.mesh.stage_ranks[self.runtime.schedule.rank_of(stage, self.mesh.size("pp"))]

    def _last_stage_of_encoder(self) -> int:
        runs = [stage for stage in self.runtime.stages if self._has_encoder(stage)]
        return max(max(each, default=0) for each in all_gather_json(runs, self.mesh.group("pp")))

    def _has_encoder(self, stage: int) -> bool:
        with self.model.stage_views.running(stage, None):
            return not isinstance(self.model.get_encoder(), CachedTower)


class _ThroughStages(nn.Module):
    """Methods of a model whose calls run through the stages of a pipeline."""

    def __call__(self, **inputs: Any) -> Any:
        return vars(self)[_CALLS].decode(inputs)

    def get_encoder(self, *args: Any, **kwargs: Any) -> Any:
        return _Encoder(super().get_encoder(*args, **kwargs), vars(self)[_CALLS])

    def _get_stopping_criteria(self, *args: Any, **kwargs: Any) -> Any:
        criteria, mesh = super()._get_stopping_criteria(*args, **kwargs), vars(self)[_CALLS].mesh
        return decided_first(criteria, mesh.group("pp"), mesh.group("tp"))


class _Encoder:
    """The encoder that transformers calls: it runs through the stages."""

    def __init__(self, encoder: nn.Module, calls: StageCalls) -> None:
        self._encoder, self._calls = encoder, calls

    @property
    def forward(self) -> Callable[..., Any]:
        """The forward of the encoder, whose signature transformers reads."""
        return self._encoder.forward

    def __call__(self, **inputs: Any) -> Any:
        return self._calls.encode(inputs)


def _receive(source: Any, key: tuple) -> StageMessage:
    if not isinstance(source, Channel):
        return source.wait()  # from another stage of this rank
    receive = source.prepare_receive(key, 0)
    receive.post()
    return receive.wait()


def _header(tensor: Tensor) -> list[Any]:
    return [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]


def _description(args: tuple, kwargs: Mapping[str, Any]) -> str:
    """Describe what `generate` is asked for; objects that one rank alone may have (a streamer) are left out."""
    given = {str(index): value for index, value in enumerate(args)} | dict(kwargs)
    described = {name: _text(value) for name, value in sorted(given.items()) if name != "streamer"}
    return ", ".join(f"{name}={text}" for name, text in described.items())


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} of checksum {checksum(value)}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    if value is None or isinstance(value, int | float | str):
        return repr(value)
    if hasattr(value, "to_json_string"):
        return f"a configuration of checksum {checksum_of(value.to_json_string())}"
    return type(value).__name__
