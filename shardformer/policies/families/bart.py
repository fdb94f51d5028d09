"""BART, encoder-decoders with the same structure, and Whisper."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from shardformer.attention.own_attention import MvpRegistryAttention
from shardformer.distributed.random import draw_per_rank
from shardformer.loss.heads import USUAL_HEAD_LOSSES
from shardformer.loss.text import masked_lm
from shardformer.policies.base import ModulePolicyDescription, Policy
from shardformer.policies.module_edits import drop_behind_activation
from shardformer.policies.rules import ShardingRules
from shardformer.stages.stage import IdentityPlaceholder, Received, StageLayout, StagePlaceholder, ZeroEmbedding

# Decoders without an encoder take labels that are already shifted to the next token.
_HEAD_LOSSES = {**USUAL_HEAD_LOSSES, "ForCausalLM": masked_lm}


class BartPolicy(Policy):
    """Policy for BART, and base class for encoder-decoders with the same layers.

    The layers have q_proj, k_proj, v_proj, out_proj, fc1 and fc2.
    """

    family, prefix = "bart", "Bart"
    splits_towers = True
    heads: tuple[str, ...] = (
        "Model",
        "ForConditionalGeneration",
        "ForSequenceClassification",
        "ForQuestionAnswering",
        "ForCausalLM",
    )
    head_names: tuple[str, ...] = ("lm_head", "classification_head", "qa_outputs")
    encoder_first: Mapping[str, type[StagePlaceholder]] = {
        "shared": Received,
        "encoder.embed_tokens": Received,
        "encoder.embed_positions": ZeroEmbedding,
        "encoder.layernorm_embedding": IdentityPlaceholder,
    }
    supports_sequence_parallel = True
    head_losses = _HEAD_LOSSES

    @property
    def stages(self) -> StageLayout:
        """The stage layout of the towers that the model has."""
        base = self.model.get_submodule(self.base_path)
        # Modules that a class does not have (a tower, a norm) may be named: the partitioner skips them.
        decoder = StageLayout(
            layers="decoder.layers",
            first={
                "decoder.embed_tokens": Received,
                "decoder.embed_positions": ZeroEmbedding,
                "decoder.layernorm_embedding": IdentityPlaceholder,
            },
            last=("decoder.layer_norm", *self.head_names),
        )
        if not hasattr(base, "encoder"):
            return decoder
        return StageLayout(
            layers="encoder.layers",
            first=self.encoder_first,
            last=("encoder.layer_norm", *(() if hasattr(base, "decoder") else self.head_names)),
            finished_towers={"encoder": ("last_hidden_state",)} if hasattr(base, "decoder") else {},
            next_layers=decoder if hasattr(base, "decoder") else None,
        )

    def head_counts(self) -> Mapping[str, int]:
        """Return the head counts of encoder and decoder."""
        config = self.model.config
        return {name: getattr(config, name) for name in ("encoder_attention_heads", "decoder_attention_heads")}

    def check(self) -> list[str]:
        """Return why the model cannot be sharded; a pipeline cannot skip layers at random."""
        problems = super().check()
        config = self.model.config
        for name in ("encoder_layerdrop", "decoder_layerdrop"):
            value = getattr(config, name, 0.0)
            if value and self.shard_config.stage_manager.num_stages > 1:
                problems.append(f"{name}={value} skips layers at random, which a pipeline cannot; use {name}=0.0")
        return problems

    def module_policy(self) -> Mapping[str, ModulePolicyDescription]:
        """Return the table of the family's modules."""
        rules = ShardingRules(self.shard_config)

        def attention(name: str, heads: int, *read_together: str) -> list:
            query = [] if "q_proj" in read_together else rules.column(f"{name}.q_proj", num_heads=heads)
            together = [f"{name}.{projection}" for projection in read_together]
            return [
                *query,
                *rules.column(*together, num_heads=heads, reads_whole="q_proj" not in read_together),
                *rules.row(f"{name}.out_proj", num_heads=heads),
                *rules.layer_norm(f"{name}_layer_norm"),
            ]

        def layer(*attentions: list) -> ModulePolicyDescription:
            dense = [*rules.column("fc1", gathers_sequence=True), *rules.row("fc2")]
            return ModulePolicyDescription(
                param_replacement=[self._drop_behind_activation, self._drop_own_slice],
                sub_module_replacement=[*sum(attentions, []), *dense, *rules.layer_norm("final_layer_norm")],
            )

        config = self.model.config
        encoder_heads, decoder_heads = config.encoder_attention_heads, config.decoder_attention_heads
        # A bias is added to the logits after the head, so the logits must be gathered.
        head = rules.gathered_lm_head if hasattr(self.model, "final_logits_bias") else rules.head
        heads = [*rules.vocab("shared?"), *(head("lm_head?")), *(rules.head("proj_out?"))]
        return {
            f"{self.prefix}Encoder": ModulePolicyDescription(sub_module_replacement=rules.vocab("embed_tokens?")),
            f"{self.prefix}Decoder": ModulePolicyDescription(sub_module_replacement=rules.vocab("embed_tokens")),
            f"{self.prefix}Attention": ModulePolicyDescription(
                param_replacement=[self._keep_local_heads], gathers_sequence=True
            ),
            f"{self.prefix}EncoderLayer": layer(attention("self_attn", encoder_heads, "q_proj", "k_proj", "v_proj")),
            f"{self.prefix}DecoderLayer": layer(
                attention("self_attn", decoder_heads, "q_proj", "k_proj", "v_proj"),
                attention("encoder_attn", decoder_heads, "k_proj", "v_proj"),
            ),
            **{f"{self.prefix}{name}": ModulePolicyDescription(sub_module_replacement=heads) for name in self.heads},
        }

    def _keep_local_heads(self, attention: nn.Module) -> nn.Module:
        attention.num_heads //= self.tp_size  # the towers may have different numbers of heads
        attention.embed_dim //= self.tp_size
        return attention

    def _drop_behind_activation(self, layer: nn.Module) -> None:
        if self.tp_size > 1:
            drop_behind_activation(layer, self.shard_config.group.rank())

    def _drop_own_slice(self, layer: nn.Module) -> nn.Module:
        """Draw functional dropout between the regions per rank, because each rank holds its own sequence slice."""
        sees_slice = self.shard_config.sequence is not None
        return draw_per_rank(layer, self.shard_config.group.rank()) if sees_slice else layer


class MBartPolicy(BartPolicy):
    """Policy for mBART."""

    family, prefix = "mbart", "MBart"
    head_losses = _HEAD_LOSSES


class MvpPolicy(BartPolicy):
    """Policy for MVP, without prompts before the keys and values of its layers."""

    family, prefix = "mvp", "Mvp"
    own_attention = {"MvpAttention": MvpRegistryAttention}
    head_losses = _HEAD_LOSSES

    def _keep_local_heads(self, attention: nn.Module) -> nn.Module:
        super()._keep_local_heads(attention)
        # The model computes attention, with its dropout, itself.
        return draw_per_rank(attention, self.shard_config.group.rank()) if self.tp_size > 1 else attention

    def check(self) -> list[str]:
        """Return why the model cannot be sharded; prompts are not supported."""
        prompts = ["use_prompt=True is not supported for MVP; use use_prompt=False"]
        return super().check() + (prompts if self.model.config.use_prompt else [])


class PLBartPolicy(BartPolicy):
    """Policy for PLBART."""

    family, prefix = "plbart", "PLBart"
    heads = ("Model", "ForConditionalGeneration", "ForSequenceClassification", "ForCausalLM")
    head_losses = _HEAD_LOSSES


class PegasusPolicy(BartPolicy):
    """Policy for Pegasus."""

    family, prefix = "pegasus", "Pegasus"
    heads = ("Model", "ForConditionalGeneration", "ForCausalLM")
    head_losses = _HEAD_LOSSES


class BlenderbotPolicy(PegasusPolicy):
    """Policy for Blenderbot."""

    family, prefix = "blenderbot", "Blenderbot"
    head_losses = _HEAD_LOSSES


class BlenderbotSmallPolicy(PegasusPolicy):
    """Policy for BlenderbotSmall."""

    family, prefix = "blenderbot_small", "BlenderbotSmall"
    head_losses = _HEAD_LOSSES


class MarianPolicy(BartPolicy):
    """Policy for Marian."""

    family, prefix = "marian", "Marian"
    heads = ("Model", "MTModel", "ForCausalLM")
    head_losses = _HEAD_LOSSES


class M2M100Policy(BartPolicy):
    """Policy for M2M-100 and NLLB."""

    family, prefix = "m2m_100", "M2M100"
    heads = ("Model", "ForConditionalGeneration")
    head_losses = _HEAD_LOSSES


class WhisperPolicy(BartPolicy):
    """Policy for Whisper, whose encoder starts with convolutions instead of an embedding."""

    family, prefix = "whisper", "Whisper"
    heads = ("Model", "ForConditionalGeneration", "ForCausalLM", "ForAudioClassification")
    head_names = ("projector", "classifier", "proj_out", "layer_weights")
    encoder_first = {
        "encoder.conv1": Received,
        "encoder.conv2": Received,
        "encoder.embed_positions": ZeroEmbedding,
    }
    head_losses = _HEAD_LOSSES

    def check(self) -> list[str]:
        """Return why the model cannot be sharded; no rank can sum the outputs of all layers if it has parts of them."""
        problems = super().check()
        sums_layers = getattr(self.model.config, "use_weighted_layer_sum", False) and hasattr(
            self.model, "layer_weights"
        )
        if sums_layers and self.shard_config.stage_manager.num_stages > 1:
            problems.append("use_weighted_layer_sum=True reads the outputs of all layers; use pp_size=1 or False")
        elif sums_layers:
            problems += self.check_hidden_states((type(self.model).__name__,))
        return problems
