"""Peak memory of a rank while a Llama is built, sharded, given values and saved, in each way to do so.

Each way runs in new processes that have boosted a tiny model before. The peak is `VmHWM` of `/proc/self/status`, and
includes pages of mapped files; it counts from the moment before the model is built.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import run_ranks, table
from booster import Booster, record_module_init
from plugins.hybrid_parallel import HybridParallelPlugin
from shardformer.distributed.process_groups import all_gather_json

Way = Literal["drawn", "from_pretrained", "load_model", "built before boost"]
WAYS: tuple[Way, ...] = ("drawn", "from_pretrained", "load_model", "built before boost")
# Models whose whole tensors used to leave many holes in the heap, with layouts.
CASES: tuple[tuple[dict[str, int], dict[str, int]], ...] = (
    (
        {"vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 4096, "heads": 16, "layers": 13},
        {"tp_size": 2, "pp_size": 2},
    ),
    (
        {"vocab_size": 16000, "hidden_size": 1280, "intermediate_size": 3584, "heads": 16, "layers": 13},
        {"tp_size": 2, "pp_size": 2},
    ),
    ({"vocab_size": 12383, "hidden_size": 368, "intermediate_size": 5354, "heads": 4, "layers": 20}, {"tp_size": 2}),
    ({"vocab_size": 7927, "hidden_size": 512, "intermediate_size": 4258, "heads": 4, "layers": 17}, {"tp_size": 4}),
    (
        {"vocab_size": 2204, "hidden_size": 528, "intermediate_size": 382, "heads": 4, "layers": 24},
        {"tp_size": 2, "pp_size": 2},
    ),
)
# Layouts of ZeRO stage 3 with an AdamW, on the number of ranks.
SIZES_OF_STAGE_3 = CASES[1][0]
STAGE_3: tuple[tuple[int, dict[str, Any]], ...] = (
    (2, {}),
    (2, {"precision": "bf16"}),
    (4, {}),
    (4, {"precision": "bf16"}),
    (4, {"tp_size": 2}),
)
_TINY = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "heads": 4, "layers": 4}


@dataclass(frozen=True)
class Construction:
    """Bytes of the whole model, of its largest tensor, of its largest layer, and of one rank.

    Attributes:
        shard: what the rank holds in the end: parameters, and master weights where there are any.
        peak: the most that was resident.
        resident: what is resident in the end.
        saving: the most that was resident while it was saved; 0 if it was not.
    """

    whole: int
    largest: int
    layer: int
    shard: int
    peak: int
    resident: int
    saving: int = 0

    @property
    def peak_shards(self) -> float:
        """The peak beyond the largest tensor, in shards."""
        return (self.peak - self.largest) / self.shard


def measure(
    way: Way,
    sizes: dict[str, int],
    options: dict[str, Any],
    directory: Path | None,
    trains: bool = False,
    save: Path | None = None,
) -> Construction:
    """Build and boost a model on this rank.

    Args:
        way: where the values come from; "built before boost" builds the whole model on every rank.
        sizes: see `CASES`.
        options: options of the plugin.
        directory: directory to read, for "from_pretrained" and "load_model".
        trains: whether to boost an AdamW together with the model.
        save: directory to save the model to, afterwards.
    """
    booster = Booster(plugin=HybridParallelPlugin(**options, seed=3))
    with record_module_init():
        tiny = _llama(_TINY)
    booster.boost(tiny)  # imports what it needs
    start_peak()
    before = status_bytes("VmRSS")
    if way == "built before boost":
        model = _llama(sizes)
    else:
        with record_module_init():
            model = _llama(sizes) if way != "from_pretrained" else LlamaForCausalLM.from_pretrained(directory)
    parameters = list(model.parameters())
    whole, largest = _bytes(parameters), max(parameter.nbytes for parameter in parameters)
    layer = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    del parameters
    if trains:
        model, optimizer = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        held = [*model.parameters(), *model.gathers.shards]
        held += [each for group in optimizer.param_groups for each in group["params"]]
    else:
        model = booster.boost(model)
        held = list(model.parameters())
    if way == "load_model":
        start_peak()
        booster.load_model(model, str(directory))
    peak, resident, saving = status_bytes("VmHWM") - before, status_bytes("VmRSS") - before, 0
    if save is not None:
        start_peak()
        booster.save_model(model, str(save), size_per_shard="400MB")
        saving = status_bytes("VmHWM") - before
    return Construction(whole, largest, layer, _bytes(held), peak, resident, saving)


def _llama(sizes: dict[str, int]) -> LlamaForCausalLM:
    sizes = {"num_attention_heads": sizes["heads"], "num_hidden_layers": sizes["layers"], **sizes}
    return LlamaForCausalLM(LlamaConfig(**{name: size for name, size in sizes.items() if "_" in name}))


def _bytes(tensors: list[torch.Tensor]) -> int:
    """Count the bytes of storages, each once; parameters in a bucket share one."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def start_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def status_bytes(field: str) -> int:
    """Return the bytes of a line of /proc/self/status."""
    return 1024 * int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text()).group(1))


def _of_all_ranks(*arguments: Any) -> list[Construction]:
    return [Construction(*sizes) for sizes in all_gather_json(astuple(measure(*arguments)))]


def report(quick: bool) -> str:
    rows: list[list[object]] = []
    for sizes, layout in CASES:
        sizes = {**sizes, "layers": 4} if quick else sizes
        ranks = layout["tp_size"] * layout.get("pp_size", 1)
        name = "-".join(map(str, sizes.values()))
        with tempfile.TemporaryDirectory() as directory:
            for way in WAYS:
                save = Path(directory) if way == "drawn" else None
                found = run_ranks(_of_all_ranks, ranks, way, sizes, layout, Path(directory), False, save)
                most = max(found, key=lambda each: each.peak_shards)
                mebibytes = [round(size / 2**20) for size in (most.shard, most.largest, most.peak, most.resident)]
                shards = ["whole model" if way == "built before boost" else most.peak_shards]
                rows.append(
                    [
                        name,
                        " ".join(f"{axis.removesuffix('_size')}{size}" for axis, size in layout.items()),
                        way,
                        *mebibytes,
                        *shards,
                        most.resident / most.shard,
                    ]
                )
    return _table(rows) + "\n" + _report_of_stage_3(quick)


def _report_of_stage_3(quick: bool) -> str:
    sizes = {**SIZES_OF_STAGE_3, "layers": 4} if quick else SIZES_OF_STAGE_3
    rows: list[list[object]] = []
    for ranks, options in STAGE_3:
        with tempfile.TemporaryDirectory() as directory:
            for way in ("drawn", "from_pretrained", "built before boost"):
                given = (way, sizes, {"zero_stage": 3, **options}, Path(directory), True, Path(directory))
                most = max(run_ranks(_of_all_ranks, ranks, *given), key=lambda each: each.peak)
                layout = f"tp{options['tp_size']} dp{ranks // 2}" if "tp_size" in options else f"dp{ranks}"
                numbers = (most.whole, most.layer, most.shard, most.peak, most.resident, most.saving)
                rows.append([layout, options.get("precision", "fp32"), way, *(round(size / 2**20) for size in numbers)])
    return table(
        "Peak memory of a rank under ZeRO stage 3",
        ["layout", "precision", "way", "model MiB", "layer MiB", "shards MiB", "peak MiB", "after MiB", "save MiB"],
        rows,
        f"Of the rank with the highest peak, of a Llama of {'-'.join(map(str, sizes.values()))}, with an AdamW. Model "
        "and layer: in fp32. Shards: of the parameters, and in bf16 of their master weights.",
    )


def _table(rows: list[list[object]]) -> str:
    return table(
        "Peak memory of a rank while a model is built",
        ["Llama", "layout", "way", "shard MiB", "largest tensor MiB", "peak MiB", "after MiB", "peak", "after"],
        rows,
        "Of the rank with the highest peak. Llama: vocabulary, hidden size, intermediate size, heads, layers. Peak: "
        "beyond the largest tensor, in shards; after: in shards. A model that is built before `boost` is whole on "
        "every rank until then.",
    )
