"""Modules of the user's around models of transformers, as people write them, and batches for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaModel,
    PreTrainedModel,
    T5Config,
    T5Model,
    ViTConfig,
    ViTModel,
)

HIDDEN, VOCABULARY, ROWS, LENGTH = 24, 37, 5, 7
SIZES = {"hidden_size": HIDDEN, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 20}


def bert(**changes: Any) -> BertModel:
    return BertModel(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **SIZES | changes))


def vit(**changes: Any) -> ViTModel:
    return ViTModel(ViTConfig(image_size=12, patch_size=6, **SIZES | changes), add_pooling_layer=False)


def mean_over(hidden: Tensor, mask: Tensor) -> Tensor:
    """The mean over tokens that count, [batch, hidden]."""
    return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


class TwoHeads(nn.Module):
    """A ViT with two heads, and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.kind, self.vit, self.place = nn.Linear(HIDDEN, 5), vit(), nn.Linear(HIDDEN, 2)

    def forward(self, pixel_values: Tensor, kinds: Tensor, places: Tensor) -> dict[str, Tensor]:
        hidden = self.vit(pixel_values).last_hidden_state
        kind, place = self.kind(hidden[:, 0]), self.place(hidden.mean(1))
        return {"loss": F.cross_entropy(kind, kinds) + 0.3 * F.mse_loss(place, places), "kind": kind, "place": place}


class TwoBackbones(nn.Module):
    """A text and an image, of which one backbone each is read."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text, self.head = vit(num_hidden_layers=1), bert(), nn.Linear(2 * HIDDEN, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, pixel_values: Tensor) -> Tensor:
        text = self.text(input_ids, attention_mask=attention_mask).pooler_output
        return self.head(torch.cat([text, self.image(pixel_values).last_hidden_state[:, 0]], -1))


class FrozenTower(nn.Module):
    """A frozen image tower in front of a text backbone, which reads the image as its first tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.bridge, self.text = vit(num_hidden_layers=1), nn.Linear(HIDDEN, HIDDEN), bert()
        self.head = nn.Linear(HIDDEN, 3)
        self.tower.requires_grad_(False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, pixel_values: Tensor) -> Tensor:
        with torch.no_grad():
            seen = self.tower(pixel_values).last_hidden_state
        words = self.text.get_input_embeddings()(input_ids)
        mask = torch.cat([attention_mask.new_ones(seen.shape[:2]), attention_mask], 1)
        out = self.text(inputs_embeds=torch.cat([self.bridge(seen), words], 1), attention_mask=mask)
        return self.head(mean_over(out.last_hidden_state, mask))


class FrontAndBehind(nn.Module):
    """Values made in front of the backbone are used behind it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.text, self.scale = nn.Linear(6, HIDDEN), bert(), nn.Parameter(torch.ones(HIDDEN))
        self.norm, self.leave = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 3)

    def forward(self, features: Tensor, attention_mask: Tensor) -> Tensor:
        hidden, counts = self.norm(torch.tanh(self.enter(features))), attention_mask.sum(1)
        out = self.text(inputs_embeds=hidden * self.scale, attention_mask=attention_mask).last_hidden_state
        return self.leave(self.norm(mean_over(out + hidden, attention_mask)) * counts[:, None] / 4)


class Tagger(nn.Module):
    """A linear chain of tags with transition scores of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.transitions, self.text = nn.Parameter(torch.zeros(4, 4)), bert()
        self.emit = nn.Sequential(nn.Linear(HIDDEN, 9), nn.GELU(), nn.Linear(9, 4))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, tags: Tensor) -> SimpleNamespace:
        scores = self.emit(self.text(input_ids, attention_mask=attention_mask).last_hidden_state)
        return SimpleNamespace(loss=(self.all_ways(scores, attention_mask) - self.one_way(scores, tags)).mean())

    def one_way(self, scores: Tensor, tags: Tensor) -> Tensor:
        chosen = scores.gather(2, tags.clamp(min=0)[..., None]).squeeze(2)
        steps = self.transitions[tags[:, :-1].clamp(min=0), tags[:, 1:].clamp(min=0)]
        return (chosen * (tags >= 0)).sum(1) + (steps * (tags[:, 1:] >= 0)).sum(1)

    def all_ways(self, scores: Tensor, mask: Tensor) -> Tensor:
        total = scores[:, 0]
        for step in range(1, scores.shape[1]):
            longer = torch.logsumexp(total[:, :, None] + self.transitions, 1) + scores[:, step]
            total = torch.where(mask[:, step, None] > 0, longer, total)
        return total.logsumexp(1)


class Pairs(nn.Module):
    """Pairs of texts, whose distance is trained; both are read in one pass."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.project = bert(), nn.Linear(HIDDEN, 8, bias=False)

    def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        first, second = self.vectors(torch.cat([one, other])).chunk(2)
        return first, second

    def vectors(self, ids: Tensor) -> Tensor:
        return F.normalize(self.project(self.text(ids).last_hidden_state.mean(1)), dim=-1)


class PairsOneByOne(Pairs):
    """The same, each text in a pass of its own: stages cannot."""

    def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return self.vectors(one), self.vectors(other)


class Adapters(nn.Module):
    """A list of adapters behind the backbone, and one in front of it."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.parts = nn.ModuleDict({"text": bert(), "head": nn.Linear(HIDDEN, 3)})

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **others: Any) -> Tensor:
        hidden = self.parts["text"](input_ids, attention_mask).last_hidden_state
        for adapter in self.adapters:
            hidden = hidden + torch.tanh(adapter(hidden))
        return self.parts["head"](mean_over(hidden, attention_mask))


class Encoder(nn.Module):
    """A backbone with something in front of it and behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.behind, self.model, self.front = nn.Linear(HIDDEN, HIDDEN), vit(), nn.Conv2d(3, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        return torch.tanh(self.behind(self.model(pixel_values=self.front(images)).last_hidden_state[:, 0]))


class TwoLevels(nn.Module):
    """The backbone is two levels below the module."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.encoder = nn.Linear(HIDDEN, 3), Encoder()

    def forward(self, pixel_values: Tensor) -> SimpleNamespace:
        return SimpleNamespace(found=self.head(self.encoder(pixel_values)))


class TiedHead(PreTrainedModel):
    """A model with a configuration, and a vocabulary head that is tied to the embedding of its backbone."""

    config_class = LlamaConfig

    def __init__(self, config: LlamaConfig | None = None) -> None:
        sizes = SIZES | {"num_key_value_heads": 2}
        super().__init__(config or LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=False, **sizes))
        self.decoder, self.words = LlamaModel(self.config), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.post_init()
        self.words.weight = self.decoder.embed_tokens.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.words(self.decoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state)


class ReadsWeights(TiedHead):
    """The same, with the embedding's weight read in the forward."""

    def __init__(self, config: LlamaConfig | None = None) -> None:
        super().__init__(config)
        del self.words

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.decoder(input_ids=input_ids, attention_mask=attention_mask)[0]
        return F.linear(hidden, self.decoder.embed_tokens.weight)


class ValueHead(nn.Module):
    """A language model with a value for each token."""

    def __init__(self) -> None:
        super().__init__()
        config = GPT2Config(vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=3, n_head=4, n_positions=16)
        self.lm, self.value = GPT2LMHeadModel(config), nn.Linear(VOCABULARY, 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits = self.lm(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        return torch.cat([logits, self.value(torch.tanh(logits))], -1)


class Translator(nn.Module):
    """An encoder-decoder with a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        config = T5Config(
            vocab_size=VOCABULARY,
            d_model=HIDDEN,
            d_kv=6,
            d_ff=20,
            num_layers=2,
            num_heads=4,
            num_decoder_layers=2,
            dropout_rate=0.0,
        )
        self.model, self.words = T5Model(config), nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor) -> Tensor:
        given = {"attention_mask": attention_mask, "decoder_input_ids": decoder_input_ids}
        return self.words(self.model(input_ids=input_ids, **given).last_hidden_state)


# ----- criteria: what they read of the batch is no argument of the forward -----


def of_kinds(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(getattr(outputs, "found", outputs), batch["kinds"])


def of_words(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The loss of each token that counts, with weights of its own; (sum, count)."""
    scores, words = outputs[..., :VOCABULARY], batch["words"]
    loss = F.cross_entropy(scores.transpose(1, 2), words, reduction="none") * batch["weights"]
    return loss.sum() + 0.1 * outputs[..., VOCABULARY:].square().sum(), (words >= 0).sum()


def of_pairs(outputs: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return F.cosine_embedding_loss(*outputs, batch["same"], margin=0.3)


TEXT, IMAGE = ("input_ids", "attention_mask"), ("pixel_values",)
# Module -> (entries of the batch, criterion)
MODULES: dict[type[nn.Module], tuple[tuple[str, ...], Any]] = {
    TwoHeads: (("pixel_values", "kinds", "places"), None),
    TwoBackbones: ((*TEXT, *IMAGE, "kinds"), of_kinds),
    FrozenTower: ((*TEXT, *IMAGE, "kinds"), of_kinds),
    FrontAndBehind: (("features", "attention_mask", "kinds"), of_kinds),
    Tagger: ((*TEXT, "tags"), None),
    Pairs: (("one", "other", "same"), of_pairs),
    Adapters: ((*TEXT, "kinds"), of_kinds),
    TwoLevels: ((*IMAGE, "kinds"), of_kinds),
    TiedHead: ((*TEXT, "words", "weights"), of_words),
    ReadsWeights: ((*TEXT, "words", "weights"), of_words),
    ValueHead: ((*TEXT, "words", "weights"), of_words),
    Translator: ((*TEXT, "decoder_input_ids", "words", "weights"), of_words),
}


def batch_of(names: tuple[str, ...]) -> dict[str, Tensor]:
    """Rows of several lengths, which are all different."""
    generator = torch.Generator().manual_seed(3)

    def draw(high: int, *shape: int) -> Tensor:
        return torch.randint(1, high, shape, generator=generator)

    lengths = torch.tensor([7, 3, 5, 6, 4])
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    entries = {
        "input_ids": draw(VOCABULARY, ROWS, LENGTH) * mask,
        "attention_mask": mask,
        "pixel_values": torch.randn(ROWS, 3, 12, 12, generator=generator),
        "features": torch.randn(ROWS, LENGTH, 6, generator=generator),
        "kinds": draw(3, ROWS),
        "places": torch.randn(ROWS, 2, generator=generator),
        "tags": draw(4, ROWS, LENGTH).masked_fill(mask == 0, -100),
        "words": draw(VOCABULARY, ROWS, LENGTH).masked_fill(mask == 0, -100),
        "weights": torch.rand(ROWS, LENGTH, generator=generator),
        "one": draw(VOCABULARY, ROWS, LENGTH),
        "other": draw(VOCABULARY, ROWS, LENGTH),
        "same": torch.tensor([1, -1, 1, -1, -1]),
        "decoder_input_ids": draw(VOCABULARY, ROWS, LENGTH),
    }
    return {name: entries[name] for name in names}


def built(kind: type[nn.Module]) -> nn.Module:
    """The module with weights that are all different; norms and biases are not 1 and 0."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = kind()
        for parameter in model.parameters():
            parameter.data += 0.2 * torch.randn(parameter.shape)
    return model
