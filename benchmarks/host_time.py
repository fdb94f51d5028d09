"""Host time that tensor parallelism adds to a Llama layer, forward and backward, without any communication.

A fake process group of two ranks makes collectives free; the sizes are so small that only the time of Python and the
dispatcher remains.
"""

from __future__ import annotations

import copy
import re

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaModel

from benchmarks.harness import medians, table
from shardformer import ShardConfig, ShardFormer

LAYERS, PASSES = 8, 20


def measure(repeats: int) -> dict[str, float]:
    """Return seconds per layer: plain, ours, DTensor, and transformers if this release supports it."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 64}
        whole = LlamaModel(LlamaConfig(num_hidden_layers=LAYERS, **sizes))
        ours, _ = ShardFormer(ShardConfig()).optimize(copy.deepcopy(whole))
        theirs = _with_dtensor(copy.deepcopy(whole))
        hidden = torch.randn(1, 16, 64)
        positions = torch.arange(16)[None]

        def passes(model: nn.Module) -> None:
            rotary = model.rotary_emb(hidden, positions)
            for _ in range(PASSES):
                x = hidden.clone().requires_grad_()
                for layer in model.layers:
                    x = layer(x, position_embeddings=rotary)
                x.sum().backward()
                model.zero_grad()

        ways = {"plain": lambda: passes(whole), "ours": lambda: passes(ours), "dtensor": lambda: passes(theirs)}
        if (planned := _with_tp_plan(copy.deepcopy(whole))) is not None:
            ways["transformers"] = lambda: passes(planned)
        # A barrier on a fake group costs nothing.
        return {name: seconds / PASSES / LAYERS for name, seconds in medians(ways, repeats).items()}
    finally:
        dist.destroy_process_group()


def _with_dtensor(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {f"layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {"layers.*.self_attn.o_proj": RowwiseParallel(), "layers.*.mlp.down_proj": RowwiseParallel()}
    plan |= {f"layers.*.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)


def _with_tp_plan(model: nn.Module) -> nn.Module | None:
    """Shard by transformers' own `tp_plan`; return None if this release cannot shard an existing model."""
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism
    except ImportError:
        return None
    # A style defines how a module's weight is sharded, and what is done around its forward.
    names = [name for module, _ in model.named_modules() for name in (f"{module}.weight", module)]
    styles = {re.escape(key).replace(r"\*", r"\d+"): style for key, style in model.config.base_model_tp_plan.items()}
    plan = {
        name: style
        for key, style in styles.items()
        for name in names
        if re.fullmatch(rf"{key}(\.weight)?", name) and (style.endswith("wise") or not name.endswith(".weight"))
    }
    return apply_tensor_parallelism(model, init_device_mesh("cpu", (2,)), plan)


def report(quick: bool) -> str:
    found = measure(3 if quick else 9)
    rows: list[list[object]] = [
        [name, f"{(found[key] - found['plain']) * 1e3:.2f}", found[key] / found["plain"]]
        for name, key in (("ours", "ours"), ("DTensor", "dtensor"), ("transformers' tp_plan", "transformers"))
        if key in found
    ]
    return table(
        "Host time that tensor parallelism adds to a Llama layer (tp2, fake process group)",
        ["implementation", "added ms per layer", "times the plain layer"],
        rows,
        "The limit is 0.20 ms. CPU only.",
    )
