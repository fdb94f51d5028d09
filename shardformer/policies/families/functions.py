"""What rows of `declared.json` name: placeholders of single families, losses, and what only a model can tell."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from shardformer.loss.heads import with_further_entries
from shardformer.loss.terms import HeadLoss
from shardformer.loss.text import causal_lm, classes_of_marked, conditional_generation, masked_lm
from shardformer.stages.stage import Received, StagePlaceholder


class ReceivedTable(Received):
    """Placeholder for an embedding of which the model reads a row, the one of padding."""

    num_embeddings, embedding_dim = 1, 1

    @property
    def weight(self) -> Tensor:
        """A dummy table [vocab, hidden]."""
        return self.stage_input.dummy().new_zeros(()).expand(self.num_embeddings, self.embedding_dim)


class ReceivedTokens(Received):
    """Placeholder for an embedding whose token table the model calls directly."""

    @property
    def tok_embeddings(self) -> Received:
        """The placeholder itself."""
        return self


class ReceivedUnscaled(Received):
    """Placeholder for an embedding that returns the factor of its quantised values, too."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Return a dummy shaped like the hidden state; None, as nothing is quantised."""
        return self.stage_input.dummy(), None


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


def shared_keys_and_values(model: nn.Module) -> dict[str, tuple[str | int, ...]]:
    """Return the names of Gemma 3n's shared keys and values: kinds of layers, or up to transformers 5.21 layers."""
    sources = {getattr(module, "kv_shared_layer_index", None) for module in model.modules()} - {None}
    return {"shared_kv_states": tuple(sorted(sources)) or ("full_attention", "sliding_attention")}


def block_inputs(model: nn.Module) -> dict[str, int]:
    """Return the modules whose outputs are the inputs of blocks; attention in all later layers reads these."""
    block = model.config.get_text_config().n_layers_per_attn_res_block
    count = model.config.get_text_config().num_hidden_layers
    return {"embed_tokens": 0} | {f"layers.{index - 1}": 0 for index in range(block, count, block)}


def first_block(model: nn.Module) -> dict[str, int]:
    """Return the last layer of Funnel's first block, which the decoder reads, too."""
    config = model.config
    return {f"encoder.blocks.0.{config.block_sizes[0] - 1}": 1}


def runs_layers_once(model: nn.Module) -> bool:
    """Return whether no block of Funnel runs several times."""
    return all(count == 1 for count in model.config.block_repeats)


def runs_blocks_once(model: nn.Module) -> bool:
    """Return whether a Perceiver runs its layers once; its derived stages send what the decoder of flow reads."""
    return model.config.num_blocks == 1 and type(model).__name__ != "PerceiverForOpticalFlow"


def tied_decoder(model: nn.Module) -> tuple[str, ...]:
    """Return the embeddings of tokens of a Perceiver, with which it also decodes; none if it reads no tokens."""
    preprocessor = getattr(getattr(model, model.base_model_prefix, model), "input_preprocessor", None)
    return ("input_preprocessor",) if isinstance(getattr(preprocessor, "embeddings", None), nn.Embedding) else ()


def reads_last_layer(model: nn.Module) -> bool:
    """Return whether a head reads the last layer alone, and not a learned sum of the outputs of all."""
    return not getattr(model.config, "use_weighted_layer_sum", False)


def sees_one_image(model: nn.Module) -> bool:
    """Return whether a head of ViLT runs the model once, and not for each image of a sample."""
    return type(model).__name__ != "ViltForImagesAndTextClassification"


def has_one_tower(model: nn.Module) -> bool:
    """Return whether a SigLIP 2 lacks a tower; a pass of both reads the sizes of images on stages without images."""
    return type(model).__name__ != "Siglip2Model"


def seamless_towers(model: nn.Module) -> tuple[str, ...]:
    """Return the layer lists of Seamless for text: of the whole model, or of its part from text to units of speech."""
    return tuple(f"{'text_' if makes_no_units(model) else ''}{tower}.layers" for tower in ("encoder", "decoder"))


def makes_no_units(model: nn.Module) -> bool:
    """Return whether a Seamless is more than its part from text to units of speech.

    The decoder to units repeats its inputs as often as durations say that an encoder's output determines.
    """
    return "TextToUnitForConditionalGeneration" not in type(model).__name__


def has_old_head(model: nn.Module) -> bool:
    """Return whether no head of a DeBERTa reads the weight of the embedding; with `legacy=False`, one does."""
    return not hasattr(model, "lm_predictions")


def embedding_of_new_head(model: nn.Module) -> tuple[str, ...]:
    """Return the embedding of a DeBERTa with whose whole weight its head multiplies."""
    return () if has_old_head(model) else ("embeddings.word_embeddings",)


def has_grouped_layers(part: nn.Module) -> bool:
    """Return whether a part of ConvBERT has linear layers in groups."""
    return type(getattr(part, "dense", None)).__name__ == "GroupedLinearLayer"


def rotates_states(module: nn.Module) -> bool:
    """Return whether an attention rotates whole hidden states, in front of its projections."""
    return getattr(module, "position_embeddings_type", None) == "rotary"


def causal_lm_without_z_loss(model: nn.Module) -> HeadLoss | None:
    """Return the causal loss, unless the model adds the squared normalisers of its logits to it."""
    return None if model.z_loss_coefficient else causal_lm(model)


classes_of_first_tokens = partial(classes_of_marked, "bbox_first_token_mask")
masked_lm_of_words = with_further_entries(masked_lm, "entity_labels")
speech_of_text = with_further_entries(conditional_generation, "acoustic_loss_mask")
