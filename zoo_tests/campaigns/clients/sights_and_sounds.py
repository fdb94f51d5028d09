"""What scripts of speech, detection and segmentation read: tiny models, data sets, and augmentations."""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image

SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 56}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
PIXELS = {"image_size": 16, "patch_size": 4}
PROCESSORS = (("segformer", "Segformer"), ("yolos", "Yolos"), ("maskformer", "MaskFormer"))  # of images, by the model
RATE = 4000  # samples of a second of sound
# Which draws from generators that no script can seed.
_AUGMENTATIONS = '''"""Augmentations that leave an image as it is."""
import torch

class Same:
    def __init__(self, *names, **options):
        pass

    def __call__(self, **sample):
        return sample

def __getattr__(name):
    return Same

class Compose:
    def __init__(self, transforms, *names, **options):
        self.transforms = transforms

    def __call__(self, **sample):
        for each in self.transforms:
            sample = each(**sample)
        return sample

class ToTensorV2(Same):
    def __call__(self, image, mask):
        return {"image": torch.tensor(image / 255.0).permute(2, 0, 1), "mask": torch.tensor(mask)}
'''

# `torchcodec` needs codecs of the machine; a wave file does not.
_DECODER = '''"""Sounds of wave files."""
import io
import wave
from types import SimpleNamespace

import torch

class AudioDecoder:
    def __init__(self, source, **options):
        self.metadata = SimpleNamespace(path=None)
        with wave.open(io.BytesIO(source)) as file:
            self.rate, data = file.getframerate(), bytearray(file.readframes(file.getnframes()))
        self.samples = torch.frombuffer(data, dtype=torch.int16) / 32768

    def get_all_samples(self):
        return SimpleNamespace(data=self.samples[None], sample_rate=self.rate)

    def get_samples_played_in_range(self, *times):
        return self.get_all_samples()
'''


def models_of_sights_and_sounds(size: int) -> dict[str, transformers.PreTrainedModel]:
    """A tiny model of each kind, for so many tokens, by the name of its folder."""
    speech = transformers.Wav2Vec2Config(
        vocab_size=size, **SIZES, conv_dim=(16, 16), conv_kernel=(10, 3), conv_stride=(5, 2),
        num_feat_extract_layers=2, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, mask_time_prob=0.0,
        layerdrop=0.0, hidden_dropout=0.0, attention_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0,
        activation_dropout=0.0, do_stable_layer_norm=True, feat_extract_norm="layer", num_codevectors_per_group=8,
        codevector_dim=16, proj_codevector_dim=16,
    )  # fmt: skip
    yolos = transformers.YolosConfig(
        **SIZES, **NO_DROPOUT, image_size=[16, 16], patch_size=4, num_detection_tokens=6, num_labels=3
    )
    swin = transformers.SwinConfig(
        **PIXELS, embed_dim=16, depths=[1, 1, 1, 1], num_heads=[2, 2, 2, 2], window_size=2, drop_path_rate=0.0,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    decoder = transformers.DetrConfig(
        d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=56, decoder_ffn_dim=56, num_queries=6, dropout=0.0,
    )  # fmt: skip
    maskformer = transformers.MaskFormerConfig(
        backbone_config=swin, decoder_config=decoder, fpn_feature_size=32, mask_feature_size=32, num_labels=3
    )
    segformer = transformers.SegformerConfig(
        depths=[1, 1, 1, 1], hidden_sizes=[8, 16, 16, 32], num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=16,
        drop_path_rate=0.0, classifier_dropout_prob=0.0, num_labels=3, **NO_DROPOUT,
    )  # fmt: skip
    return {
        "wav2vec2": transformers.Wav2Vec2ForCTC(speech),
        "yolos": transformers.YolosForObjectDetection(yolos),
        "maskformer": transformers.MaskFormerForInstanceSegmentation(maskformer),
        "segformer": transformers.SegformerForSemanticSegmentation(segformer),
    }


def write_sights_and_sounds(folder: Path) -> None:
    """Write data sets of sounds, boxes and masks, as the hub has them, and modules that scripts import."""
    from datasets import Audio, ClassLabel, Dataset, List

    (folder / "albumentations").mkdir()
    (folder / "albumentations" / "__init__.py").write_text(_AUGMENTATIONS)
    (folder / "albumentations" / "pytorch.py").write_text("from albumentations import ToTensorV2")
    for name, text in (("torchcodec/decoders.py", _DECODER), ("torchcodec-1.0.dist-info/METADATA", "Version: 1.0")):
        (folder / name).parent.mkdir()
        (folder / name).write_text(text)
    names, draw = ClassLabel(names=["a", "b", "c"]), torch.Generator().manual_seed(7)
    kinds: dict[str, Callable[[int], dict]] = {
        "sounds": lambda at: {"audio": _sound(900, draw), "label": at % 3, "text": f"word {at}"},
        "boxes": lambda at: {
            "image_id": at, "image": _image(draw),
            "objects": {"bbox": [[1.0, 2.0, 4.0 + at % 5, 6.0]], "category": [at % 3], "area": [24.0]},
        },
        "masks": lambda at: {
            "image": _image(draw), "annotation": _masks(at), "semantic_class_to_id": {"a": 0, "b": 1, "c": 2},
        },
        "segments": lambda at: {"image": _image(draw), "label": _masks(at).getchannel(0)},
    }  # fmt: skip
    for kind, row in kinds.items():
        (folder / kind).mkdir()
        for split, count in (("train", 22), ("validation", 7), ("test", 7)):
            rows = Dataset.from_list([row(at) for at in range(count)])
            features = rows.features.copy()
            if kind == "sounds":
                features |= {"audio": Audio(sampling_rate=RATE), "label": names}
            if kind == "boxes":
                features["objects"]["category"] = List(names)
            rows.cast(features).to_parquet(folder / kind / f"{split}.parquet")
    labels = folder / "cache" / "hub" / "datasets--segments" / "snapshots" / ("0" * 40)  # what a hub has given before
    labels.mkdir(parents=True)
    (labels / "id2label.json").write_text(json.dumps({0: "a", 1: "b", 2: "c"}))
    (labels.parents[1] / "refs").mkdir()
    (labels.parents[1] / "refs" / "main").write_text("0" * 40)


def _image(draw: torch.Generator) -> Any:
    return Image.fromarray(torch.randint(256, (16, 16, 3), dtype=torch.uint8, generator=draw).numpy())


def _sound(count: int, draw: torch.Generator) -> dict:
    """A wave file of so many samples, whose column of a data set needs no library of codecs to be written."""
    with io.BytesIO() as file, wave.open(file, "wb") as out:
        out.setparams((1, 2, RATE, 0, "NONE", ""))
        out.writeframes((torch.randn(count, generator=draw) * 4000).to(torch.int16).numpy().tobytes())
        return {"bytes": file.getvalue(), "path": None}


def _masks(at: int) -> Any:
    """Two instances of two classes: what each pixel is of, in the first two channels."""
    halves = torch.zeros(16, 16, 3, dtype=torch.uint8)
    halves[at % 9 + 3 :, :, :2] = 1
    halves[:, 9:, :2] = 2
    return Image.fromarray(halves.numpy())
