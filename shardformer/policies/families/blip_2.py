"""BLIP-2: an image encoder, followed by a querying transformer and a language model of another family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from torch import nn

from shardformer.loss.text import language_of_images
from shardformer.policies.base import ModulePolicyDescription, Policy
from shardformer.policies.table import GATHERS, Entry, TablePolicy, described, rules
from shardformer.stages.stage import IdentityPlaceholder, Received, StageLayout


def _qformer_heads(policy: Policy) -> int:
    return policy.model.config.qformer_config.num_attention_heads


def _attention(reads_image: bool) -> list[Entry]:
    # Keys and values of a cross-attention read the image, so they do not share the query's input.
    return [
        GATHERS,
        rules.column("query", num_heads=_qformer_heads),
        rules.column("key", "value", num_heads=_qformer_heads, reads_whole=reads_image),
    ]


_OUTPUT = [rules.layer_norm("LayerNorm"), rules.residual_dropout("dropout")]


class Blip2Policy(TablePolicy):
    """Policy for BLIP-2. The language model is sharded by the policy of its own family."""

    family, prefix = "blip_2", "Blip2"
    heads = ("ForConditionalGeneration", "Model")
    supports_sequence_parallel = True
    splits_towers = True
    head_losses = dict.fromkeys(("Blip2ForConditionalGeneration", "Blip2Model"), language_of_images)

    @cached_property
    def language_policy(self) -> Policy:
        """The policy of the language model."""
        from shardformer.policies.registry import policy_for

        policy = policy_for(self.model.language_model)
        policy.set_model(self.model.language_model)
        policy.set_shard_config(self.shard_config)
        return policy

    @property
    def stages(self) -> StageLayout:
        """The stage layout: image encoder, querying transformer, then the layers of the language model."""
        language = _below(self._language_path, self.language_policy.stages)
        base = self.language_policy.base_path.split(".")[0]
        if base:  # the head of the language model runs after its base model
            names = [name for name, _ in self.model.language_model.named_children() if name != base]
            language = _with_last(language, tuple(f"language_model.{name}" for name in names))
        queries = StageLayout(
            layers="qformer.encoder.layer",
            first={"qformer.layernorm": IdentityPlaceholder},
            last=("language_projection",),
            # No fields: its output is turned into embeddings of the language model, which later stages do not need.
            finished_towers={"qformer": ()},
            next_layers=language,
        )
        return StageLayout(
            layers="vision_model.encoder.layers",
            first={"vision_model.embeddings": Received},
            every=("query_tokens",),
            last=("vision_model.post_layernorm",),
            finished_towers={"vision_model": ("last_hidden_state",)},
            next_layers=queries,
        )

    @property
    def _language_path(self) -> str:
        return ".".join(filter(None, ("language_model", self.language_policy.base_path)))

    def _cross_attentions(self) -> list[str]:
        paths = [path for path, _ in self.model.named_modules()]
        return [path for path in paths if path.startswith("qformer.") and path.endswith(".crossattention.attention")]

    def head_counts(self) -> Mapping[str, int]:
        """Return the head counts of the image encoder and the querying transformer."""
        config = self.model.config
        return {
            f"{tower}.num_attention_heads": getattr(config, tower).num_attention_heads
            for tower in ("vision_config", "qformer_config")
        }

    def check(self) -> list[str]:
        """Return why the model or its language model cannot be sharded."""
        return [*super().check(), *self.language_policy.check()]

    table = {
        # It reshapes by the size of its input, so weights are sharded but every rank computes all heads.
        "Blip2Attention": [rules.run_whole(), rules.gathered("qkv"), rules.row_split_input("projection")],
        "Blip2MLP": [GATHERS, rules.column("fc1"), rules.row("fc2")],
        "Blip2EncoderLayer": [rules.layer_norm("layer_norm1", "layer_norm2")],
        "Blip2QFormerMultiHeadAttention": _attention(reads_image=False),
        "Blip2QFormerSelfOutput": [rules.row("dense", num_heads=_qformer_heads), *_OUTPUT],
        "Blip2QFormerIntermediate": [GATHERS, rules.column("dense")],
        "Blip2QFormerOutput": [rules.row("dense"), *_OUTPUT],
    }

    def module_policy(self) -> Mapping[str | type[nn.Module], ModulePolicyDescription]:
        """Return the table, with cross-attentions by path, and that of the language model."""
        table = dict(super().module_policy())
        table |= {path: described(_attention(reads_image=True), self) for path in self._cross_attentions()}
        if not self.shard_config.uses_ulysses:
            table["Blip2Attention"].attribute_replacement["attention_is_replicated"] = True
        return table | self.language_policy.module_policy()

    def preprocess(self) -> nn.Module:
        """Prepare the language model for its policy."""
        self.language_policy.preprocess()
        return self.model


def _below(path: str, layout: StageLayout | None) -> StageLayout | None:
    """Return the layout of a model that is at `path` inside a larger one."""
    if layout is None:
        return None
    return replace(
        layout,
        layers=f"{path}.{layout.layers}",
        first={f"{path}.{name}": placeholder for name, placeholder in layout.first.items()},
        every=tuple(f"{path}.{name}" for name in layout.every),
        last=tuple(f"{path}.{name}" for name in layout.last),
        finished_towers={f"{path}.{name}": fields for name, fields in layout.finished_towers.items()},
        next_layers=_below(path, layout.next_layers),
    )


def _with_last(layout: StageLayout, names: tuple[str, ...]) -> StageLayout:
    """Return the layout with `names` added to the modules after its last layer list."""
    if layout.next_layers is not None:
        return replace(layout, next_layers=_with_last(layout.next_layers, names))
    return replace(layout, last=(*layout.last, *names))
