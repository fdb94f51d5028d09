"""Peft's parts in a model, found by peft's own classes: which of them a sharding supports, and their names in files.

Others are refused before a change. Prompts, which peft puts before the tokens, are followed here, too.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardformer.distributed.collectives import split_features
from shardformer.layers import ColumnParallelLinear, MultiQueryLinear, RowParallelLinear
from shardformer.loss.terms import IGNORE_INDEX, HeadLoss, LossTerm
from shardformer.matmul.native import is_linear
from shardformer.policies.base import Policy
from shardformer.shard_config import ShardConfig
from shardformer.shard_spec import Part, ShardSpec
from shardformer.stages.placeholders import StagePlaceholder
from shardformer.stages.stage import PipelineStageManager, StagePartitioner

_CLASSES = {
    "model": ("peft.peft_model", "PeftModel"),
    "mixed model": ("peft.mixed_model", "PeftMixedModel"),
    "tuner": ("peft.tuners.tuners_utils", "BaseTuner"),
    "layer": ("peft.tuners.tuners_utils", "BaseTunerLayer"),
    "lora linear": ("peft.tuners.lora.layer", "Linear"),
    "lora embedding": ("peft.tuners.lora.layer", "Embedding"),
    "lora parameter": ("peft.tuners.lora.layer", "ParamWrapper"),
    "dora": ("peft.tuners.lora.variants", "DoraLinearVariant"),
    "lora 4-bit linear": ("peft.tuners.lora.bnb", "Linear4bit"),
    "lora 8-bit linear": ("peft.tuners.lora.bnb", "Linear8bitLt"),
    "lora torchao linear": ("peft.tuners.lora.torchao", "TorchaoLoraLinear"),
    "ia3 linear": ("peft.tuners.ia3.layer", "Linear"),
    "ia3 4-bit linear": ("peft.tuners.ia3.bnb", "Linear4bit"),
    "ia3 8-bit linear": ("peft.tuners.ia3.bnb", "Linear8bitLt"),
    "prompt encoder": ("peft.tuners.tuners_utils", "BasePromptEncoder"),
    "wrapper": ("peft.utils.other", "AuxiliaryTrainingWrapper"),
    "copied module": ("peft.utils.other", "ModulesToSaveWrapper"),
    "trainable tokens": ("peft.utils.other", "TrainableTokensWrapper"),
}

LORA_LINEAR = ("lora linear", "lora 4-bit linear", "lora 8-bit linear", "lora torchao linear")
IA3_LINEAR = ("ia3 linear", "ia3 4-bit linear", "ia3 8-bit linear")


def peft_class(kind: str) -> type | None:
    """Return a class of peft; None if peft's module is not imported."""
    module, name = _CLASSES[kind]
    return getattr(sys.modules.get(module), name, None)


def is_a(value: Any, kind: str) -> bool:
    """Return whether `value` is an instance of that class of peft, or of a subclass."""
    cls = peft_class(kind)
    return cls is not None and isinstance(value, cls)


def is_exactly(value: Any, *kinds: str) -> bool:
    """Return whether the type of `value` is exactly one of these of peft; a subclass may compute differently."""
    return type(value) in [peft_class(kind) for kind in kinds]


def model_inside(model: nn.Module) -> nn.Module:
    """Return the transformers model inside peft's wrappers; the model itself if there are none."""
    return model.get_base_model() if is_a(model, "model") else model


def adapter_configs(model: nn.Module) -> dict[str, Any]:
    """Return name -> configuration of the adapters, including those added by transformers' `model.add_adapter`."""
    return dict(getattr(model, "peft_config", {})) if peft_class("model") is not None else {}


def kind_of(config: Any) -> str:
    """Return peft's name of a kind of adapter: such as 'LORA' or 'IA3'."""
    return str(getattr(config.peft_type, "value", config.peft_type))


def wrapped_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module of peft) for everything in `model` that wraps a module of the model, outermost first."""
    for path, module in model.named_modules():
        is_layer = is_a(module, "layer") and isinstance(getattr(module, "base_layer", None), nn.Module)
        if (is_layer and not path.endswith(".token_adapter")) or is_a(module, "wrapper"):
            yield path, module


def is_adapter_part(module: nn.Module) -> bool:
    """Return whether a module has an adapter's parameters: a layer, a wrapper or an encoder of virtual tokens."""
    return any(is_a(module, kind) for kind in ("layer", "wrapper", "prompt encoder"))


def inner_module(wrapped: nn.Module) -> nn.Module:
    """Return the module of the model that a module of peft wraps."""
    return wrapped.original_module if is_a(wrapped, "wrapper") else wrapped.base_layer


def put_inside(wrapped: nn.Module, module: nn.Module) -> None:
    """Set the module that a module of peft wraps."""
    if is_a(wrapped, "trainable tokens"):
        wrapped.token_adapter.base_layer = module
    elif is_a(wrapped, "wrapper"):
        wrapped.original_module = module
    else:
        wrapped.base_layer = module


def name_of(wrapped: nn.Module) -> str:
    """Return a readable name of a class of peft: such as 'lora.Linear' or 'lokr.Linear'."""
    cls = type(wrapped)
    parts = cls.__module__.split(".")
    return f"{parts[2]}.{cls.__name__}" if parts[:2] == ["peft", "tuners"] else cls.__name__


def task_of(config: Any) -> str | None:
    """Return peft's name of the task of an adapter: such as 'CAUSAL_LM' or 'SEQ_CLS'."""
    return None if config.task_type is None else str(getattr(config.task_type, "value", config.task_type))


class PromptedEmbedding(nn.Module):
    """The embedding of a sharded model, as peft's prompt tuning calls it before the model.

    On later stages of a pipeline peft puts virtual tokens in front of zeros: only the shape of that is used.

    Args:
        model: the transformers model, which is no sub-module of this one.
        width: features of a token; models may project them to the width of their layers.
    """

    def __init__(self, model: nn.Module, path: str, width: int) -> None:
        super().__init__()
        self._place, self.width = (model, path), width

    @property
    def _embedding(self) -> nn.Module:
        """The embedding, or the placeholder of it or of a module around it, such as BERT's `embeddings`."""
        found, path = self._place
        for name in path.split("."):
            found = found if isinstance(found, StagePlaceholder) else getattr(found, name)
        return found

    @property
    def weight(self) -> Tensor:
        """The weight of the embedding, of which peft reads the device."""
        return self._embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Look up [batch, seq] -> [batch, seq, width]."""
        embedding = self._embedding
        if not isinstance(embedding, StagePlaceholder):
            return embedding(ids)
        return embedding.stage_input.dummy().new_zeros(*ids.shape, self.width)


@contextmanager
def prompts_followed(model: nn.Module, config: ShardConfig, policy: Policy) -> Iterator[None]:
    """Let peft's virtual tokens follow the model, which is sharded in this context.

    Tokens are looked up in what replaces the embedding, and prefixes are those of this rank's heads.

    Raises:
        ValueError: this model's attention has no heads of its own on each rank; nothing is changed then.
    """
    inside, own = model_inside(model), getattr(model, "word_embeddings", None) if is_a(model, "model") else None
    path = next((path for path, module in inside.named_modules() if module is own), None)
    has_prefixes = any(kind_of(each) == "PREFIX_TUNING" for each in adapter_configs(model).values())
    if has_prefixes and config.tensor_parallel_size > 1:
        if config.uses_ulysses or not policy.cuts_attention:
            raise ValueError(
                "peft's PREFIX_TUNING needs keys and values of whole sequences and of this rank's heads, which "
                f"tp_size={config.tensor_parallel_size} does not leave a {type(inside).__name__} here; use "
                "sequence_parallelism_mode='split_gather', tp_size=1 (dp, pp work), or LORA"
            )
        model.get_prompt = partial(_of_local_heads, model.get_prompt, inside, config.group)
    yield
    if path is not None:
        model.word_embeddings = PromptedEmbedding(inside, path, own.weight.shape[-1])


def _of_local_heads(
    get_prompt: Callable[..., Any], model: nn.Module, group: ProcessGroup, *args: Any, **kwargs: Any
) -> Any:
    """Take this rank's heads of a cache, of virtual tokens; all where attention gathers all heads (Phi-3)."""
    prompt = get_prompt(*args, **kwargs)
    whole = {each.layer_idx for each in model.modules() if getattr(each, "attention_is_replicated", False)}
    for index, layer in enumerate(getattr(prompt, "layers", ())):
        if index not in whole:
            layer.keys, layer.values = (_local_heads(each, group) for each in (layer.keys, layer.values))
    return prompt


def _local_heads(states: Tensor, group: ProcessGroup) -> Tensor:
    """Cut [batch, heads, virtual tokens, head_dim] like the heads of a projection of keys."""
    heads, size = states.shape[1], dist.get_world_size(group)
    spec = ShardSpec((heads,), 0, (Part(heads),), dist.get_rank(group), size, max(1, size // heads))
    return split_features(states.movedim(1, -1), spec, group).movedim(-1, 1)


def prompts_on_stages(model: nn.Module, stages: PipelineStageManager) -> list[dict[int, Tensor]]:
    """Return the parameters of virtual tokens, which all stages hold: stage -> parameter, or meta tensors elsewhere."""
    if not is_a(model, "model") or stages.num_stages == 1:
        return []
    encoders = nn.ModuleList(module for module in model.modules() if is_a(module, "prompt encoder"))
    here, elsewhere = stages.held, torch.empty(0, device="meta")
    return [
        {stage: parameter if stage in here else elsewhere for stage in range(stages.num_stages)}
        for parameter in encoders.parameters()
    ]


def prompt_config(model: nn.Module) -> Any:
    """Return the configuration of the active adapter if it puts virtual tokens, or a prefix, in front of sequences."""
    active = getattr(model, "active_adapter", None) if is_a(model, "model") else None
    config = adapter_configs(model).get(active) if isinstance(active, str) else None
    return config if config is not None and config.is_prompt_learning else None


def virtual_tokens(model: nn.Module) -> int:
    """Return how many tokens the active adapter puts in front of each sequence; 0 while it is disabled."""
    config = prompt_config(model)
    return 0 if config is None or model._adapters_disabled else config.num_virtual_tokens


def behind_prompts(model: nn.Module, head_loss: HeadLoss | None) -> HeadLoss | None:
    """Adapt a head's loss to outputs that start with those of virtual tokens, which have no labels.

    Prefixes are keys and values of attention and have no outputs; a classifier's outputs are per sequence.
    """
    config = prompt_config(model)
    has_outputs = config is not None and kind_of(config) != "PREFIX_TUNING"
    if head_loss is None or not has_outputs or task_of(config) != "CAUSAL_LM":
        return head_loss
    behind = copy.copy(head_loss)
    behind.terms = tuple(_behind(term, config.num_virtual_tokens) for term in head_loss.terms)
    return behind


def _behind(term: LossTerm, length: int) -> LossTerm:
    def prepare(labels: Tensor, batch: Any) -> Tensor:
        labels = F.pad(labels, (length, 0), value=IGNORE_INDEX)
        return labels if term.prepare is None else term.prepare(labels, batch)

    return replace(term, prepare=prepare)


Layers = Mapping[str, nn.Module]


def check_layers(model: nn.Module, layers: Layers, config: ShardConfig, policy: Policy) -> None:
    """Raise ValueError, with all reasons, if layers of peft in `model` do not support its sharding."""
    problems = []
    if layers and config.sequence is not None and config.enable_sequence_overlap:
        problems.append(
            "enable_sequence_overlap=True does not support adapters, which read tokens before they have arrived; "
            "use enable_sequence_overlap=False"
        )
    if layers and policy.repeats_layers and config.stage_manager.num_stages > 1:
        problems.append("adapters of layers that several pipeline stages run are not summed over them; use pp_size=1")
    if config.stage_manager.num_stages > 1:
        problems += _problems_of_stages(layers, policy)
        if layers and policy.stages is not None and not problems:
            problems += _shared_by_stages(model, config, policy)
    if config.tensor_parallel_size > 1:
        problems += _problems_of_cuts(layers, f"tp_size={config.tensor_parallel_size}")
    if config.tensor_parallel_size > 1 or config.shards_experts:
        of_parameters = [path for path, layer in layers.items() if is_a(layer, "lora parameter")]
        problems += _about(
            layers,
            of_parameters,
            "target_parameters reaches parameters of {path}, which tp_size and ep_size shard; "
            "use tp_size=1 and ep_size=1",
        )
    if problems:
        raise ValueError("; ".join(problems))


def _problems_of_stages(layers: Layers, policy: Policy) -> list[str]:
    around = [path for path in layers if any(f"{each}.".startswith(f"{path}.") for each in policy.layer_lists)]
    tokens = [path for path, layer in layers.items() if is_a(layer, "trainable tokens")]
    tied = [path for path in tokens if layers[path].token_adapter.tied_adapter is not None]
    return [
        *_tied_adapters(layers, "pp_size"),
        *_about(
            layers,
            around,
            "modules_to_save reaches {path}, whose layers pp_size distributes over stages; name modules inside "
            "of the layers",
        ),
        *_about(
            layers,
            tied,
            "trainable_token_indices changes {path}, which is tied to the embedding of another stage; use pp_size=1, "
            "or a model with tie_word_embeddings=False",
        ),
    ]


def _shared_by_stages(model: nn.Module, config: ShardConfig, policy: Policy) -> list[str]:
    """Report an adapter inside of a module that the script has put on several stages."""
    stages = StagePartitioner(model, policy.base_path, policy.stages, config.stage_manager)
    places: dict[int, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        first = places.setdefault(id(module), path) if is_adapter_part(module) else path
        if first != path and stages.holders(first) != stages.holders(path):
            return [
                f"{first} and {path} are one object with one adapter, whose gradients pp_size does not sum over its "
                "stages; use pp_size=1, or give each place an object of its own"
            ]
    return []


_CUT = (*LORA_LINEAR, *IA3_LINEAR, "lora embedding", "copied module")
_SAID_ELSEWHERE = ("trainable tokens", "lora parameter")


def _problems_of_cuts(layers: Layers, cut_by: str) -> list[str]:
    rest = "use tp_size=1 (dp, pp work), or"
    unknown = [path for path, layer in layers.items() if not is_exactly(layer, *_CUT, *_SAID_ELSEWHERE)]
    tokens = [path for path, layer in layers.items() if is_a(layer, "trainable tokens") and not _looks_up_rows(layer)]
    variants = [path for path, layer in layers.items() if _has_unknown_variant(layer)]
    dropped = [path for path, layer in layers.items() if _drops_out_with_dora(layer)]
    no_linear = [path for path, layer in layers.items() if not _fits(layer)]
    return [
        *_tied_adapters(layers, cut_by),
        *_about(layers, unknown, f"peft's {{name}} on {{path}} cannot be cut over {cut_by}; {rest} LoRA or IA3"),
        *_about(
            layers,
            tokens,
            f"trainable_token_indices changes rows of {{path}}, a {{base}} of which {cut_by} leaves each rank a part; "
            f"{rest} modules_to_save with the name of the embedding",
        ),
        *_about(layers, variants, f"peft's {{variant}} on {{path}} cannot be cut over {cut_by}; {rest} plain LoRA"),
        *_about(
            layers,
            dropped,
            "use_dora=True with lora_dropout above 0 multiplies by the whole weight of {path}, of which "
            f"{cut_by} leaves each rank a part; {rest} lora_dropout=0",
        ),
        *_about(
            layers,
            no_linear,
            "the adapter of {path} adds to {base}, which is not a linear layer; leave it out of target_modules",
        ),
    ]


def _about(layers: Layers, paths: Sequence[str], text: str) -> list[str]:
    """Return a sentence about the first of these layers and the number of others; an empty list if there are none."""
    if not paths:
        return []
    layer = layers[paths[0]]
    more = f" (and {len(paths) - 1} more)" if len(paths) > 1 else ""
    variants = sorted({type(each).__name__ for each in getattr(layer, "lora_variant", {}).values()})
    base = type(inner_module(layer)).__name__
    return [text.format(path=f"{paths[0]}{more}", name=name_of(layer), base=base, variant=" and ".join(variants))]


def _tied_adapters(layers: Layers, cut_by: str) -> list[str]:
    """Report an adapter shared by tied layers, because ranks hold different shards of the two layers."""
    owners: dict[int, str] = {}
    for path, layer in layers.items():
        if is_a(layer, "trainable tokens"):  # peft ties these unasked; they have sentences of their own
            continue
        of_model = {id(each) for each in inner_module(layer).parameters()}
        for parameter in layer.parameters():
            owner = owners.setdefault(id(parameter), path)
            if id(parameter) not in of_model and owner != path and not path.startswith(f"{owner}."):
                return [
                    f"ensure_weight_tying=True gives {owner} and {path} one adapter, of which {cut_by} leaves ranks "
                    "other parts; use ensure_weight_tying=False"
                ]
    return []


def _has_unknown_variant(layer: nn.Module) -> bool:
    variants = getattr(layer, "lora_variant", {}).values()
    return not all(is_exactly(each, "dora") and is_exactly(layer, *LORA_LINEAR) for each in variants)


def _looks_up_rows(layer: nn.Module) -> bool:
    """Return whether trained rows belong to a plain embedding; heads that are tied to one multiply by them."""
    inner = inner_module(layer)
    is_tied = layer.token_adapter.tied_adapter is not None
    return isinstance(inner, nn.Embedding) and type(inner).forward is nn.Embedding.forward and not is_tied


def _drops_out_with_dora(layer: nn.Module) -> bool:
    return any(isinstance(layer.lora_dropout[name], nn.Dropout) for name in getattr(layer, "lora_variant", {}))


def _fits(layer: nn.Module) -> bool:
    """Return whether the module wrapped by a layer of a known kind can be sharded."""
    if is_exactly(layer, "lora embedding"):
        return isinstance(layer.base_layer, nn.Embedding)
    return is_linear(inner_module(layer)) or not is_exactly(layer, *LORA_LINEAR, *IA3_LINEAR)


# peft's names of the kinds whose layers are self-contained, so that a pipeline stage may hold some of them.
LAYER_KINDS = frozenset(
    (
        *("LORA", "IA3", "LOHA", "LOKR", "OFT", "BOFT", "HRA", "VERA", "FOURIERFT", "MISS", "DELORA"),
        *("LN_TUNING", "TRAINABLE_TOKENS"),
    )
)
# Kinds that put virtual tokens in front of each sequence.
PROMPT_KINDS = frozenset(("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING"))


def check_adapters(model: nn.Module, cuts: Sequence[str]) -> None:
    """Check that each kind of adapter in `model`, which may be wrapped by peft, trains the same as in peft.

    Args:
        cuts: the options that shard the model, such as `tp_size=2`; none if every rank holds the whole model.

    Raises:
        ValueError: an adapter would train differently.
    """
    inside = model_inside(model)
    if is_a(model, "mixed model") or (inside is not model and is_a(inside, "model")):
        raise ValueError(
            f"a {type(model).__name__} around adapters of several kinds is not supported; wrap the model once, by "
            "peft's get_peft_model"
        )
    for name, config in adapter_configs(model).items():
        problem = _problem_of_kind(model, config, cuts)
        if problem:
            raise ValueError(f"the adapter '{name}' is of peft's kind {kind_of(config)}, {problem}")


def _problem_of_kind(model: nn.Module, config: Any, cuts: Sequence[str]) -> str | None:
    kind, whole = kind_of(config), "tp_size=1, pp_size=1 and cp_size=1 (dp works)"
    cut_by = cuts[0] if cuts else None
    if config.is_prompt_learning:
        if kind not in PROMPT_KINDS:
            return f"whose loss is not the model's own; use {', '.join(sorted(PROMPT_KINDS))} or LORA"
        is_decoder = not getattr(getattr(model_inside(model), "config", None), "is_encoder_decoder", False)
        known = ("CAUSAL_LM", "SEQ_CLS") if is_decoder else ("SEQ_CLS",)
        if task_of(config) not in known:
            use = ", ".join(map(repr, known))
            return f"whose outputs of task_type={task_of(config)} are not known here; use {use}, or LORA"
        return _problem_of_prompts(cuts)
    tuner = getattr(model, "base_model", None) if is_a(model, "model") else None
    if tuner is not None and not _only_wraps(tuner):
        return "which changes the model's forward or reads gradients between steps; use LORA or IA3"
    if cut_by and kind not in LAYER_KINDS:
        return f"of which it is not known that {cut_by} leaves it what it is; use {whole}, or LORA or IA3"
    return None


def _problem_of_prompts(cuts: Sequence[str]) -> str | None:
    others = [cut for cut in cuts if not cut.startswith(("tp_size", "pp_size"))]
    if not others:
        return None
    return (
        f"whose virtual tokens need whole sequences on each rank, which {others[0]} cuts; use cp_size=1 and ep_size=1 "
        "(dp, tp and pp work), or LORA"
    )


def _only_wraps(tuner: nn.Module) -> bool:
    """Return whether a tuner calls the model unchanged and needs no call from the training loop."""
    base = peft_class("tuner")
    return isinstance(tuner, base) and type(tuner).forward is base.forward and not hasattr(tuner, "update_and_allocate")


# Name in a model -> name in an adapter file.
FileNames = Mapping[str, str]


def file_names(model: nn.Module) -> dict[str, FileNames]:
    """Return peft's file names of each adapter's tensors, for kinds that hold parameters and buffers alone."""
    if not is_a(model, "model"):
        return {}
    # One tensor per name, even if parameters are tied: shows which tensors peft wants, and under which names.
    state = {
        name: torch.empty(each.shape, dtype=each.dtype, device="meta")
        for name, each in model.state_dict(keep_vars=True).items()
    }
    own = {id(tensor): name for name, tensor in state.items()}
    found = {}
    for adapter, config in adapter_configs(model).items():
        if kind_of(config) in LAYER_KINDS:
            saved = adapter_tensors(model, adapter, state)
            found[adapter] = {own[id(tensor)]: name for name, tensor in saved.items()}
    return found


def adapter_tensors(model: nn.Module, adapter: str, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return name in the file -> tensor of a whole adapter; `state`: to choose from; None for the model's own."""
    from peft import get_peft_model_state_dict  # already imported, as the model is one of peft's

    saves_embeddings = _saves_embeddings(model, model.peft_config[adapter])
    return get_peft_model_state_dict(
        model, state_dict=state, adapter_name=adapter, save_embedding_layers=saves_embeddings
    )


def _saves_embeddings(model: nn.Module, config: Any) -> bool:
    """Return whether peft saves embeddings: those that have an adapter, and those that were resized.

    peft's own 'auto' asks the hub for the original size; this function uses local files only.
    """
    if config.is_prompt_learning or getattr(config, "trainable_token_indices", None) is not None:
        return False
    if kind_of(config) == "TRAINABLE_TOKENS" or not hasattr(model, "get_input_embeddings"):
        return False
    if is_a(model.get_input_embeddings(), "layer") or is_a(model.get_output_embeddings(), "layer"):
        return _targets_embeddings(config)
    return _is_resized(model, config)


def _targets_embeddings(config: Any) -> bool:
    """Return whether the targets include embeddings, by the names that peft uses for them."""
    from peft.utils.other import EMBEDDING_LAYER_NAMES

    targets = config.target_modules  # a string is a regular expression
    return isinstance(targets, str) or any(name in targets for name in EMBEDDING_LAYER_NAMES)


def _is_resized(model: nn.Module, config: Any) -> bool:
    own, path = getattr(model, "config", None), config.base_model_name_or_path
    if not path or not hasattr(own, "vocab_size"):
        return False
    try:
        return type(own).from_pretrained(path, local_files_only=True).vocab_size != own.vocab_size
    except (OSError, ValueError):
        return False


def check_shape_of_cut(base: nn.Module, path: str, what: str) -> None:
    """Refuse layers that return or take whole tensors on every rank although their weight is sharded."""
    if isinstance(base, RowParallelLinear) and base.outputs is not None:
        raise ValueError(
            f"tp_size cuts the {base.kernel.name} weight of {path} between outputs, which is incompatible with "
            f"peft's {what}, or tp_size=1 (dp, pp work)"
        )
    gathers = isinstance(base, ColumnParallelLinear) and base.gather_output
    splits = isinstance(base, RowParallelLinear) and base.splits_input
    if gathers or splits or isinstance(base, MultiQueryLinear):
        raise ValueError(
            f"tp_size cuts {path} in a way that is incompatible with peft's {what}, or tp_size=1 (dp, pp work)"
        )


def refuse_merge(name: str, what: str, *args: Any, **kwargs: Any) -> None:
    """Replace `merge` of a layer whose weight cannot take its adapter."""
    raise ValueError(
        f"peft's {name} cannot be merged into {what}; save the adapter with booster.save_model and merge it into the "
        "whole model, by PeftModel.from_pretrained(...).merge_and_unload()"
    )
