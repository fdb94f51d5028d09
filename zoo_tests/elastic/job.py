"""A training script as users write it, for `booster run --elastic`: a Llama under tensor and pipeline parallelism.

Arguments: folder, steps, seconds that each step takes at least.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from booster import launch_from_torch
from zoo_tests.elastic.loop import layouts_or, train

CONFIG = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
SAMPLES = 60
LAYOUTS = [{"tp_size": 2, "pp_size": 2}, {"pp_size": 4}, {"tp_size": 2, "zero_stage": 2}]


def samples() -> list[dict[str, torch.Tensor]]:
    """Distinct samples of one length; losses say which were used."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(61, (SAMPLES, 9), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    """Train for a number of steps, from where the job was before."""
    launch_from_torch(seed=3)
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).double()
    train(layouts_or(LAYOUTS), model, None, samples(), Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))


if __name__ == "__main__":
    main()
