"""A training script as users write it, for `booster run --elastic`: it appends each step's loss to a file.

Arguments: folder, steps, seconds that each step takes at least.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from booster import Booster, launch_from_torch
from plugins.hybrid_parallel import HybridParallelPlugin

GLOBAL_BATCH, SAMPLES = 12, 60
CONFIG = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def samples() -> list[dict[str, torch.Tensor]]:
    """Distinct samples of one length; their order says which were used."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(61, (SAMPLES, 9), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    """Train for a number of steps, from where the job was before."""
    folder, steps, least_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    launch_from_torch(seed=3)
    with open(folder / "pids", "a", encoding="utf-8") as file:
        line = [int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), dist.get_rank(), os.getpid()]
        file.write(json.dumps(line) + "\n")
    sizes = json.loads(os.environ.get("JOB_LAYOUT", '{"tp_size": 2, "pp_size": 2}'))
    plugin = HybridParallelPlugin(**sizes, seed=3)
    booster = Booster(plugin=plugin)
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=100)
    loader = DataLoader(samples(), batch_size=GLOBAL_BATCH // plugin.dp_size, shuffle=True)
    model, optimizer, scheduler, loader = booster.boost(model, optimizer, scheduler, loader)
    state = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler, "dataloader": loader}
    step = 0
    if booster.latest_checkpoint(folder):
        step = booster.load_checkpoint(folder, **state, resume="latest")["step"]
    while step < steps:
        for batch in loader:
            began = time.monotonic()
            loss = booster.execute_pipeline(iter([batch]), model, optimizer=optimizer).loss.item()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            if dist.get_rank() == 0:
                with open(folder / "losses", "a", encoding="utf-8") as file:
                    file.write(json.dumps([step, loss, dist.get_world_size()]) + "\n")
            booster.snapshot(folder, **state, step=step)
            time.sleep(max(0.0, least_s - (time.monotonic() - began)))
            if step == steps:
                break


if __name__ == "__main__":
    main()
