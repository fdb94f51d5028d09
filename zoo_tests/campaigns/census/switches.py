"""`python -m zoo_tests.campaigns.census.switches`: train families with the switches of their configurations turned.

    python -m zoo_tests.campaigns.census.switches [--only PATTERN] [--every N] [--layouts tp2] [--jobs 1] [--limit S]

The census trains default configurations; real ones turn switches, as norms of queries and keys, or biases.
One class of each family trains with all boolean fields of the architecture turned at once. Where that differs from
plain training, does not run, or does not train plainly, each field is turned alone, and what it does is printed.
"""

from __future__ import annotations

import argparse
import re
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

from zoo_tests.campaigns.census.classes import HeadClass, head_classes
from zoo_tests.campaigns.census.jobs import judged
from zoo_tests.campaigns.census.trained import twin_of

# Fields that say what is returned, kept or read from files, or which kernels run.
_NO_SWITCH = re.compile(
    r"^_|^(output_|return_|use_cache|is_encoder|is_decoder|add_cross_attention|tie_|disable_|use_.*_kernels|freeze_|"
    r"has_relative|quant_mode|use_dummy|use_streaming|convert_sync|is_folding|is_hybrid|is_vqa|reduce_loss|"
    r"use_pretrained|use_timm|features_only|use_weighted)"
)
# Values of fields that are no booleans, and of one that is None or empty in a tiny model: family -> path -> value.
_OTHER_VALUES: Mapping[str, Mapping[str, Any]] = {
    **{family: {"q_lora_rank": None} for family in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3")},
    **{family: {"q_lora_rank": None} for family in ("dots3_note", "kimi_linear", "mistral4", "youtu")},
    **{family: {"mamba_n_groups": 2} for family in ("bamba", "falcon_h1", "granitemoehybrid")},
    **{family: {"clip_qkv": 0.1} for family in ("olmo", "olmoe")},
    "esm": {"position_embedding_type": "rotary"},
    "funnel": {"attention_type": "factorized"},
    "gemma3n": {"activation_sparsity_pattern": [0.95, 0.5, 0.0, 0.3]},
    "idefics": {"alpha_type": "vector"},
    "longt5": {"encoder_attention_type": "transient-global"},
    "mamba2": {"n_groups": 2},
    "molmo2": {"text_config.qk_norm_type": "olmo3"},
    "nemotron_h": {"n_groups": 2},
    "seamless_m4t": {"position_embeddings_type": "rotary"},
    "step3p7": {"text_config.swiglu_limits": [0.1, None, 0.2, None]},
    "wav2vec2_bert": {"position_embeddings_type": "rotary"},
    "wav2vec2_conformer": {"position_embeddings_type": "rotary"},
    "zamba2": {"mamba_ngroups": 2},
}
_KINDS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "ForMaskedLM", "ForImageClassification")


def switches_of(config: Any, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Yield (dotted path, turned value) of the boolean fields of a configuration, and of those inside it."""
    for name, value in vars(config).items():
        if hasattr(value, "to_dict"):
            yield from switches_of(value, f"{prefix}{name}.")
        elif isinstance(value, bool) and not _NO_SWITCH.match(name):
            yield f"{prefix}{name}", not value


def one_of_each_family() -> list[HeadClass]:
    """A class of each family: of the kind that most families have."""
    families = (list(heads) for _, heads in groupby(head_classes(), key=lambda head: head.family))
    return [
        next((head for kind in _KINDS for head in heads if head.name.endswith(kind)), heads[0]) for heads in families
    ]


def turned(head: HeadClass) -> list[HeadClass]:
    """The class with all its switches turned, and with each of its other values; none if it cannot be built."""
    try:
        switches = tuple(switches_of(twin_of(head).config))
    except Exception:  # any of a thousand classes may fail in its own way
        return []
    others = [((path, value),) for path, value in _OTHER_VALUES.get(head.family, {}).items()]
    return [replace(head, switches=each) for each in (switches, *others) if each]


def each_alone(head: HeadClass) -> list[HeadClass]:
    """The class with each of its switches alone."""
    return [replace(head, switches=(switch,)) for switch in head.switches]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression on Family/Class")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="a sample of one family in N")
    parser.add_argument("--layouts", default="tp2")
    parser.add_argument("--jobs", type=int, default=1, help="classes at a time, each with its own ranks")
    parser.add_argument("--limit", type=float, default=240, help="seconds for a class")
    arguments = parser.parse_args()
    layouts = arguments.layouts.split(",")

    def told(heads: list[HeadClass]) -> Iterator[HeadClass]:
        """Judge the classes, print the verdicts, and yield those that are not exact."""
        for head, verdict in judged([(head, layouts, None) for head in heads], arguments.jobs, arguments.limit):
            switches = " ".join(f"{name}={value}" for name, value in head.switches)
            sys.stdout.write(f"{head.family}/{head.name} {verdict} [{switches}]\n")
            sys.stdout.flush()
            if not all(verdict.exact_under(layout) for layout in layouts):
                yield head

    chosen = [head for head in one_of_each_family() if re.search(arguments.only, f"{head.family}/{head.name}")]
    chosen = [head for head in chosen if zlib.crc32(head.family.encode()) % arguments.every == 0]
    together = [each for head in chosen for each in turned(head)]
    failed = list(told(together))
    alone = [replace(head, switches=(switch,)) for head in failed if len(head.switches) > 1 for switch in head.switches]
    wrong = [*(head for head in failed if len(head.switches) == 1), *told(alone)]
    sys.stdout.write(
        f"{len(chosen)} families; {len(failed)} of {len(together)} not exact; {len(wrong)} switches alone\n"
    )


if __name__ == "__main__":
    main()
