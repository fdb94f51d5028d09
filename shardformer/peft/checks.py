"""Check which adapters of peft are supported by the requested parallelism; others are refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from shardformer.peft.kinds import adapter_configs, is_a, kind_of, model_inside, peft_class
from shardformer.peft.prompts import task_of

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
