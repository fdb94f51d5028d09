"""One rank of a larger job: the local work of a rank of tp 2, 4, 8, with a fake group whose collectives cost nothing.

Time beyond 1/tp of the unsharded step is work that tensor parallelism does not distribute (norms, residuals, Python,
matrices that become thin); communication would come on top. The bytes saved for the backward pass are compared with
the planner's prediction.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import medians, table
from plugins.hybrid_parallel.planner.device import PRESETS
from plugins.hybrid_parallel.planner.layout import Layout
from plugins.hybrid_parallel.planner.predict import Predictor
from plugins.hybrid_parallel.planner.profile import Profiler
from plugins.hybrid_parallel.planner.stage_map import ModelMap
from shardformer import ShardConfig, ShardFormer
from shardformer.layers.embedding import parallel_logits
from shardformer.policies.registry import head_loss_of

_CPU = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "vocab_size": 4096}
_GPU = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def build() -> LlamaForCausalLM:
    """Create an 8B-shaped model of few layers on a GPU, a small one elsewhere."""
    torch.manual_seed(0)
    sizes = _GPU if torch.cuda.is_available() else _CPU
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=4, use_cache=False))


def local_model(tp_size: int, sequence: bool) -> nn.Module:
    """Create the shard of rank 0 of `tp_size`."""
    config = ShardConfig(enable_tensor_parallelism=tp_size > 1, enable_sequence_parallelism=sequence)
    return ShardFormer(config).optimize(build())[0]


def step(model: nn.Module, ids: Tensor) -> None:
    """Run forward, loss and backward."""
    loss = head_loss_of(model)
    batch = {"input_ids": ids, "labels": ids}
    with parallel_logits(model):
        outputs = model(**loss.inputs(batch))
        loss.weighted_sum(outputs, batch, loss.counts(batch)).backward()
    model.zero_grad()
    if ids.is_cuda:
        torch.cuda.synchronize()


def kept_bytes(model: nn.Module, ids: Tensor) -> int:
    """Return the bytes that a forward pass saves for its backward pass, without parameters."""
    own = {param.untyped_storage()._cdata for param in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in own:
            kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        step(model, ids)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def measure(tp_size: int, sequence: bool, length: int, repeats: int) -> dict[str, float]:
    """Return a rank's step time as a share of the unsharded one, and the bytes that it saves for backward."""
    dist.init_process_group("fake", rank=0, world_size=tp_size, store=FakeStore())
    try:
        torch.set_num_threads(1)
        on_gpu = torch.cuda.is_available()
        device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
        whole, local = build().to(device, dtype), local_model(tp_size, sequence).to(device, dtype)
        ids = torch.randint(4096, (1, length), device=device)
        times = medians({"whole": partial(step, whole, ids), "local": partial(step, local, ids)}, repeats)
        return {"share": times["local"] / times["whole"], "kept": kept_bytes(local, ids)}
    finally:
        dist.destroy_process_group()


def predicted_bytes(tp_size: int, sequence: bool, length: int) -> float:
    """Return the planner's prediction of the bytes that a rank saves for backward."""
    precision = "bf16" if torch.cuda.is_available() else "fp32"
    predictor = Predictor(ModelMap(build), Profiler(build, length, PRESETS["H200"], precision))
    layout = Layout(1, tp_size, 1, sequence=sequence, rows=1, precision=precision)
    return predictor.memories(layout)[0].activations


def report(quick: bool) -> str:
    length = 4096 if torch.cuda.is_available() else (128 if quick else 1024)
    rows: list[list[object]] = []
    for tp_size in (2, 4, 8):
        for sequence in (False, True):
            found = measure(tp_size, sequence, length, 3 if quick else 9)
            name = f"tp{tp_size}" + (", sequence parallel" if sequence else "")
            kept = predicted_bytes(tp_size, sequence, length) / found["kept"]
            rows.append([name, found["share"], 1 / tp_size / found["share"], kept])
    where = "one GPU" if torch.cuda.is_available() else "CPU, one thread; GPU: not measured"
    return table(
        f"One rank of a larger job ({where}): Llama, 4 layers, {length} tokens, no communication",
        ["rank of", "time of the unsharded step", "of the ideal 1/tp", "kept bytes, predicted / measured"],
        rows,
    )
