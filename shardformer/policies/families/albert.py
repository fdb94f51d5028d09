"""ALBERT: a few groups of layers, each run several times."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import partial

from torch import nn

from shardformer.loss.heads import USUAL_HEAD_LOSSES
from shardformer.loss.text import pretraining
from shardformer.policies.base import ModulePolicyDescription
from shardformer.policies.table import HEADS, TablePolicy, described, rules
from shardformer.sequence_parallel.split_gather import run_whole
from shardformer.stages.stage import IdentityPlaceholder, Received, StageLayout


class RepeatedLayers(nn.ModuleList):
    """A layer list whose length is the depth of the model; the layers keep their names and parameters.

    Args:
        modules: the distinct layers.
        order: index of the layer that runs at each position.
    """

    def __init__(self, modules: nn.ModuleList, order: list[int]) -> None:
        # Distinct objects with the same parameters, because a stage modifies its first layer only.
        self.positions = [_twin(modules[index]) for index in order]
        super().__init__()
        self.order = order
        for name, module in modules.named_children():
            self.add_module(name, module)

    def positions_of(self, index: int) -> list[int]:
        """Return the positions at which layer `index` runs."""
        return [position for position, used in enumerate(self.order) if used == index]

    def keep_used(self) -> None:
        """Delete the layers that this stage does not run at any position."""
        for index in list(self._modules):
            used = {id(child) for layer in self.positions for child in layer._modules.values()}
            if not any(id(child) in used for child in self._modules[index]._modules.values()):
                del self._modules[index]

    def __len__(self) -> int:
        return len(self.positions)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.positions)

    def __getitem__(self, position: int) -> nn.Module:
        return self.positions[position]

    def __setitem__(self, position: int, layer: nn.Module) -> None:
        self.positions[position] = layer


def _twin(module: nn.Module) -> nn.Module:
    twin = copy.copy(module)
    for name in (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_pre_hooks_with_kwargs",
    ):
        twin.__dict__[name] = copy.copy(module.__dict__[name])
    return twin


class AlbertPolicy(TablePolicy):
    """Policy for ALBERT. Stages that run the same group share its parameters."""

    family, prefix = "albert", "Albert"
    heads = (
        "Model",
        "ForPreTraining",
        "ForMaskedLM",
        "ForSequenceClassification",
        "ForTokenClassification",
        "ForQuestionAnswering",
        "ForMultipleChoice",
    )
    supports_sequence_parallel = True
    repeats_layers = True
    stages = StageLayout(
        layers="encoder.albert_layer_groups",
        first={"embeddings": Received, "encoder.embedding_hidden_mapping_in": IdentityPlaceholder},
        last=("pooler",),
    )
    table = {
        "AlbertEmbeddings": [rules.vocab("word_embeddings")],
        "AlbertAttention": [
            rules.column("query", "key", "value", num_heads=HEADS),
            rules.row("dense", num_heads=HEADS),
            rules.layer_norm("LayerNorm"),
            rules.residual_dropout("output_dropout"),
        ],
        "AlbertLayer": [
            rules.column("ffn", gathers_sequence=True),
            rules.row("ffn_output"),
            rules.layer_norm("full_layer_layer_norm"),
        ],
        "AlbertMLMHead": [rules.head("decoder")],
    }
    head_losses = {
        **USUAL_HEAD_LOSSES,
        "ForPreTraining": partial(pretraining, pair_label="sentence_order_label", pair_logits="sop_logits"),
    }

    def preprocess(self) -> nn.Module:
        """Give the list of layer groups the depth of the model if its first and last layer need hooks of their own."""
        encoder = self.model.get_submodule(self.base_path).encoder
        depth, groups = encoder.config.num_hidden_layers, encoder.config.num_hidden_groups
        shards = (self.shard_config.sequence, self.shard_config.context)
        has_hooks = self.shard_config.stage_manager.num_stages > 1 or any(each is not None for each in shards)
        if has_hooks and not isinstance(encoder.albert_layer_groups, RepeatedLayers):
            order = [int(position / (depth / groups)) for position in range(depth)]  # same formula as in transformers
            encoder.albert_layer_groups = RepeatedLayers(encoder.albert_layer_groups, order)
            # The encoder runs group `position * groups / depth` at each position; groups = depth makes it the position.
            encoder.config = copy.copy(encoder.config)
            encoder.config.num_hidden_groups = depth
        return self.model

    def module_policy(self) -> Mapping[str | type[nn.Module], ModulePolicyDescription]:
        """Return the table; attention, which adds its residual and normalises the sum, sees whole sequences."""
        table, config = dict(super().module_policy()), self.shard_config
        if config.sequence is not None and not config.uses_ulysses:
            attention = described(self.table["AlbertAttention"], self, config.without_sequence())
            attention.param_replacement.append(partial(run_whole, region=config.sequence))
            table["AlbertAttention"] = attention
        return table
