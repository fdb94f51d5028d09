"""Plans of image, video and audio encoders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from shardformer.loss.heads import own_loss
from shardformer.loss.text import sequence_classification
from shardformer.policies.plans.plan import Plan
from shardformer.stages.stage import IdentityPlaceholder, Received, ReceivedPatches, StagePlaceholder, ZeroEmbedding


class ReceivedChannels(StagePlaceholder):
    """Placeholder for convolutions over audio; returns a dummy hidden state with channels first."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return a dummy [batch, features, seq]."""
        return self.stage_input.dummy().mT


class ReceivedPair(StagePlaceholder):
    """Placeholder for a feature projection that returns both the projection and its input features."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return two dummies shaped like the hidden state."""
        return self.stage_input.dummy(), self.stage_input.dummy()


_QKV = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise"}
_MLP = {"mlp.fc1": "colwise", "mlp.fc2": "rowwise"}
_VIT = Plan(
    {**_QKV, "attention.o_proj": "rowwise", **_MLP},
    {"attention": ("num_attention_heads",)},
    first={"embeddings": ReceivedPatches},
)
_CLIP = Plan(
    {**_QKV, "self_attn.out_proj": "rowwise", **_MLP},
    {"self_attn": ("num_heads", "embed_dim")},
    first={"embeddings": ReceivedPatches},
)
_BERT_STYLES = {
    "attention.query": "colwise",
    "attention.key": "colwise",
    "attention.value": "colwise",
    "output.dense": "rowwise",
    "intermediate.dense": "colwise",
}
_BERT = Plan(
    _BERT_STYLES,
    {"attention.attention": ("num_attention_heads", "all_head_size")},
    first={"embeddings": ReceivedPatches},
)


def _reads_last_layer(model: nn.Module) -> bool:
    """Return whether a head reads the last layer alone, and not a learned sum of the outputs of all."""
    return not getattr(model.config, "use_weighted_layer_sum", False)


def _sound(attention: Mapping[str, str], projection: type[StagePlaceholder], **options: Any) -> Plan:
    """Make the plan of an audio encoder that starts with convolutions over the waveform.

    Args:
        attention: styles of the attention.
        projection: placeholder for the feature projection that follows the convolutions.
        options: further fields of `Plan`.
    """
    feed_forward = {
        "intermediate_dense": "colwise",
        "intermediate_dropout": "dropout",
        "output_dense": "rowwise",
    }
    return Plan(
        {**attention, **feed_forward},
        {"attention": ("num_heads", "embed_dim"), "self_attn": ("num_heads",)},
        first={
            "feature_extractor": ReceivedChannels,
            "feature_projection": projection,
            "encoder.pos_conv_embed": ZeroEmbedding,
        },
        # Runs before the layers in base models, after the layers in large ones.
        every=("encoder.layer_norm",),
        needs={"layerdrop": 0.0},
        pipelined=_reads_last_layer,
        **options,
    )


_SELF_ATTENTION = {**_QKV, "attention.out_proj": "rowwise"}
_CONFORMER = {
    "linear_q": "colwise",
    "linear_k": "colwise",
    "linear_v": "colwise",
    "linear_pos": "colwise",
    "linear_out": "rowwise",
    "pos_bias_u": "colwise",
    "pos_bias_v": "colwise",
    "self_attn.dropout": "dropout",
    "distance_embedding": "replicated_with_grad_allreduce",
}


def _rotates_states(module: nn.Module) -> bool:
    """Return whether an attention rotates whole hidden states, in front of its projections."""
    return getattr(module, "position_embeddings_type", None) == "rotary"


# Depthwise convolutions between the linear layers of a feed-forward process each feature separately.
_CONVOLVED = {"dwconv.dwconv.weight": "first_dim", "dwconv.dwconv.bias": "first_dim"}
_CONVOLVED_LOCAL = {"dwconv.dwconv": ("groups", "in_channels", "out_channels")}
_DENSE = {"mlp.dense1": "colwise", "mlp.dense2": "rowwise"}

_ENCODER_BLOCK = {
    "feed_forward1.linear1": "colwise",
    "feed_forward1.linear2": "rowwise",
    "feed_forward2.linear1": "colwise",
    "feed_forward2.linear2": "rowwise",
}


def _tied_decoder(model: nn.Module) -> tuple[str, ...]:
    """Return the embeddings of tokens of a Perceiver, with which it also decodes; none if it reads no tokens."""
    preprocessor = getattr(getattr(model, model.base_model_prefix, model), "input_preprocessor", None)
    return ("input_preprocessor",) if isinstance(getattr(preprocessor, "embeddings", None), nn.Embedding) else ()


PLANS = {
    "convnextv2": Plan({}, layers="encoder.stages"),  # normalises over all features
    "focalnet": Plan(_MLP, layers="encoder.stages.*.layers", changes_shapes=True),
    "hiera": Plan(
        _MLP, layers="encoder.stages.*.layers", changes_shapes=True, head_losses={"HieraForPreTraining": own_loss}
    ),
    "lasr": Plan(_ENCODER_BLOCK, layers="encoder.layers", changes_shapes=True),
    "perceiver": Plan(
        _DENSE,
        layers="encoder.self_attends",
        changes_shapes=True,
        every=_tied_decoder,
        # Layers run once; the decoder of optical flow reads what the encoder has read, which its derived stages send.
        pipelined=lambda model: model.config.num_blocks == 1 and type(model).__name__ != "PerceiverForOpticalFlow",
    ),
    "pvt": Plan(_DENSE, layers="encoder.block.*", changes_shapes=True),
    "pvt_v2": Plan({**_DENSE, **_CONVOLVED}, _CONVOLVED_LOCAL, layers="encoder.layers.*.blocks", changes_shapes=True),
    "segformer": Plan(
        {**_MLP, **_CONVOLVED},
        _CONVOLVED_LOCAL,
        layers="stages.*.blocks",
        kept_outputs={"layer_norm": 0},  # the head for segmentation reads the outputs of all lists
        changes_shapes=True,
    ),
    "sew": Plan(
        {**_QKV, "attention.out_proj": "rowwise", "intermediate_dense": "colwise", "output_dense": "rowwise"}
        | {"intermediate_dropout": "dropout"},
        {"attention": ("num_heads", "embed_dim")},
        layers="encoder.layers",
        changes_shapes=True,
        pipelined=_reads_last_layer,
    ),
    "sew_d": Plan(
        {"intermediate.dense": "colwise", "layer.*.output.dense": "rowwise"},
        layers="encoder.encoder.layer",
        every=("rel_embeddings", "encoder.encoder.LayerNorm"),
        changes_shapes=True,
        pipelined=_reads_last_layer,
    ),
    "vilt": replace(
        _BERT,
        first={},
        kept_outputs={"embeddings": 2},  # the hidden state and a mask
        # One head runs the whole model for each image of a sample.
        pipelined=lambda model: type(model).__name__ != "ViltForImagesAndTextClassification",
        head_losses={"ViltForQuestionAnswering": own_loss},
    ),
    "vjepa2": Plan(
        {"attention.query": "colwise", "attention.key": "colwise", "attention.value": "colwise"}
        | {"attention.proj": "rowwise", **_MLP},
        {"attention": ("num_attention_heads", "all_head_size")},
        layers="encoder.layer",
        changes_shapes=True,
    ),
    "audio_spectrogram_transformer": replace(_VIT, head_losses={"ASTForAudioClassification": sequence_classification}),
    "convnext": Plan({"pwconv1": "colwise", "pwconv2": "rowwise"}, layers="encoder.stages"),
    "dinov2": _VIT,
    "dinov2_with_registers": _VIT,
    "dinov3_vit": replace(
        _VIT,
        styles={
            **{**_QKV, "attention.o_proj": "rowwise"},
            **{"mlp.gate_proj": "colwise", "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise"},
        },
        local={"attention": ("num_heads",)},
        layers="model.layer",
        pipelined=False,  # a pass draws the coordinates of patches once, which stages would draw again
    ),
    "hubert": _sound(_SELF_ATTENTION, Received),
    "ijepa": _VIT,
    "metaclip_2": _CLIP,
    "omniasr_ctc": replace(
        _sound(_SELF_ATTENTION, Received),
        layers="audio_tower.layers",
        first={"audio_tower.subsampling": Received, "audio_tower.encode_positions": IdentityPlaceholder},
        every=(),
    ),
    "siglip": _CLIP,
    # A pass of the whole model reads the sizes of images on stages that do not run its image tower.
    "siglip2": replace(_CLIP, pipelined=lambda model: type(model).__name__ != "Siglip2Model"),
    "timesformer": Plan(
        {
            "intermediate.dense": "colwise",
            "output.dense": "rowwise",
            "attention.output.dense": "replicate",
            "temporal_attention.output.dense": "replicate",
        },
        first={"embeddings": ReceivedPatches},
    ),
    "unispeech": _sound(_SELF_ATTENTION, ReceivedPair, head_losses={"UniSpeechForPreTraining": own_loss}),
    "unispeech_sat": _sound(_SELF_ATTENTION, ReceivedPair, head_losses={"UniSpeechSatForPreTraining": own_loss}),
    "videomae": replace(_BERT, head_losses={"VideoMAEForPreTraining": own_loss}),
    "vit_msn": _VIT,
    "vivit": _VIT,
    "wav2vec2": _sound(_SELF_ATTENTION, ReceivedPair, head_losses={"Wav2Vec2ForPreTraining": own_loss}),
    "wav2vec2_bert": _sound(_CONFORMER, ReceivedPair, keeps_whole=_rotates_states),
    "wav2vec2_conformer": _sound(
        _CONFORMER,
        ReceivedPair,
        head_losses={"Wav2Vec2ConformerForPreTraining": own_loss},
        keeps_whole=_rotates_states,
    ),
    # Its attention passes full weights to a PyTorch function, so they are replicated.
    "wavlm": _sound({}, ReceivedPair, carried_inputs=("position_bias",)),
    "yolos": replace(_BERT, every=("encoder.interpolation",)),  # its sums are added after each layer
}
