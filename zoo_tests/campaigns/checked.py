"""What the layout check finds and on what it is silent, without ranks.

    python -m zoo_tests.campaigns.checked faults [--only REGEX] [--log FILE]
    python -m zoo_tests.campaigns.checked classes [--only REGEX] [--log FILE] [--minutes N]
    python -m zoo_tests.campaigns.checked meshes [--only REGEX] [--log FILE]
    python -m zoo_tests.campaigns.checked page --log FILE --output docs/results/layout_check.md

- faults: three kinds, each fault in a process of its own, where the check gets a model and a layout. Mutants of the
  sharding engine and of pipelines that change what a step computes, those of `test_layout_check.py`, and what was
  mended after it had changed training without a word: its mend is taken out. A count of each kind is printed.
- classes: each head class of the census, and each that compares texts with images or sounds, in its default
  configuration, which trains exactly, under six layouts. A finding is a false alarm.
- meshes: the ten largest published configurations on 65,536 ranks, others of all sizes on four, and the seconds of a
  processor for a check.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plugins.hybrid_parallel.verify.before_boost import LayoutReport
from plugins.hybrid_parallel.verify.layout_check import CheckedModel, check_layout
from plugins.hybrid_parallel.verify.random_batch import distance_from_wave
from zoo_tests.campaigns.census.classes import HeadClass, head_classes
from zoo_tests.campaigns.census.trained import twin_of
from zoo_tests.campaigns.census.verdict import add_row, read_rows
from zoo_tests.campaigns.mutations.edits import Edit
from zoo_tests.campaigns.mutations.mutants import MUTANTS
from zoo_tests.campaigns.published import published
from zoo_tests.harness.case import Case

_ID = re.compile(r"(?P<file>[\w/]+)\.py::(?P<test>\w+)\[(?P<case>.+)\]")
# Options of a case that the check leaves to the tests: kernels, precision, files.
_LEFT_OUT = ("seed", "initial_scale", "zero_bucket_size_in_mb")
_SP = {"tp_size": 2, "enable_sequence_parallelism": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2},
    "pp2": {"pp_size": 2, "num_microbatches": 2},
    "sp2": _SP,
    "cp2": {"cp_size": 2},
    "all-to-all": {**_SP, "sequence_parallelism_mode": "all_to_all"},
    "ep2": {"ep_size": 2},
}
_TIMED: dict[str, tuple[dict[str, Any], int]] = {
    "mesh": ({"tp_size": 8, "cp_size": 8, "pp_size": 16, "num_microbatches": 64}, 8 * 8 * 16 * 64),
    "job": ({"tp_size": 2, "pp_size": 2, "num_microbatches": 4}, 4),
}
_OTHER_PARTS = "its parameters are not those"
_LLAMA, _MIXTRAL, _ROUTED = "llama/LlamaForCausalLM", "mixtral/MixtralForCausalLM", {"output_router_logits": True}
_WEIGHTS = "means of micro-batches weigh alike"
_ADDED = "embeddings that attention adds to a slice get one rank's gradient"
# Class, layout and fields of a configuration, None for a tiny one -> mutants whose tests train no case of the zoo.
# Others change no step of a copy: they are about packed documents, dropout, 16 bit, adapters, kernels of GPUs,
# generation, blocks of `reproducible=True`, and proposed plans, which are tried by values before they are used.
_SUBJECTS: tuple[tuple[str, str, dict[str, Any] | None, tuple[str, ...]], ...] = (
    (_LLAMA, "tp2", {"pad_token_id": 0}, ("padding row of a cut embedding learns",)),
    (_LLAMA, "tp2", {}, ("gradient of the head from the last chunk", "maxima of ranks not aligned")),
    (_LLAMA, "tp2 dp2", {}, ("loss reported of one replica", "labels of other replicas not counted")),
    (_LLAMA, "sp2", {}, ("sequence padded in front",)),
    (_LLAMA, "cp2", {}, ("queries meet the later chunk of earlier ranks",)),
    (_LLAMA, "cp3", {}, ("padding of a part has labels",)),
    (_LLAMA, "pp2", {}, ("label behind the end of a sequence", "every micro-batch has the inputs of the first")),
    (_LLAMA, "pp2", {}, ("gradients doubled between stages", "labels counted in the last micro-batch alone")),
    (_LLAMA, "pp2", {}, ("mean of means",)),
    ("llama/LlamaModel", "pp2", {}, (_WEIGHTS,)),
    ("llama/LlamaModel", "cp2", {}, ("parts gathered in the order of ranks",)),
    ("llama/LlamaModel", "cp2", {}, ("every rank of a sequence counts the loss of a criterion",)),
    ("llama/LlamaModel", "cp2", {}, ("labels counted once for every copy of a sequence",)),
    (_MIXTRAL, "ep2", {}, ("rows come back in the order of experts", "routing weights of the other choice")),
    (_MIXTRAL, "ep2", _ROUTED, ("gradient of gathered rows counted once", "loss of routers added by every replica")),
    (_MIXTRAL, "ep2", _ROUTED, ("routers balance padding too",)),
    (_MIXTRAL, "cp2", _ROUTED, ("padding of parts of sequences counts for the loss of routers",)),
    (_MIXTRAL, "pp2 dp2", _ROUTED, ("gradient of routers by the choices of one stage",)),
    ("bert/BertForQuestionAnswering", "pp2", {}, ("start and end of an answer count twice",)),
    ("bart/BartForConditionalGeneration", "tp2", {}, ("gathered logits cut at the wrong end",)),
    (
        "gemma4/Gemma4ForCausalLM",
        "pp2",
        {"num_kv_shared_layers": 2},
        ("keys and values of earlier stages do not arrive",),
    ),
    ("funnel/FunnelForMaskedLM", "pp3", {}, ("outputs of earlier modules do not travel",)),
    ("yolos/YolosForObjectDetection", "pp2", {}, ("loss of a detector's boxes weighted by images",)),
    ("deepseek_v32/DeepseekV32ForCausalLM", "tp2", {}, ("sparse attention takes the entry for another kernel",)),
    (
        "gemma3n/Gemma3nForCausalLM",
        "tp5",
        {"hidden_size": 2560, "num_attention_heads": 10, "num_key_value_heads": 5},
        ("shares of features count alike",),
    ),
    (
        "speech_to_text/Speech2TextForConditionalGeneration",
        "sp2",
        {},
        ("the states of an encoder get one rank's gradient from the decoder's slices",),
    ),
    (
        "detr/DetrForObjectDetection",
        "sp2",
        None,
        (_ADDED,),
    ),
    (
        "megatron_bert/MegatronBertForMaskedLM",
        "sp2",
        {},
        ("norms between the regions of several modules keep one slice's gradient",),
    ),
    ("kimi_linear/KimiLinearForCausalLM", "tp2", {}, ("channels of queries, keys and values cut at once",)),
    ("mamba/MambaForCausalLM", "tp2", {}, ("gradients of shared time steps are partial",)),
    ("bamba/BambaForCausalLM", "tp2", {}, ("gradients of shared kernels are partial",)),
    ("bamba/BambaForCausalLM", "tp2", {}, ("a norm over the features of one rank",)),
    ("muse_spark/MuseSparkForConditionalGeneration", "tp2", {}, ("a norm of experts reads a partial sum",)),
    (
        "openai_privacy_filter/OpenAIPrivacyFilterForTokenClassification",
        "tp2",
        {},
        ("each rank adds the whole bias of experts",),
    ),
)
# What shows with a criterion of the script alone: it may be a mean, and matches no boxes.
_WITH_CRITERION = (_WEIGHTS, _ADDED)
_PLANS = "shardformer.policies.plans"
_BETWEEN = Edit(f"{_PLANS}.stages", "() if root else inputs_between_layers(type(runner), parts[-1])", "()", ())
_COUNTED = Edit(
    "shardformer.utils.source",
    "if forward is None or len(forward.args.args) < 2:\n        return False\n    x",
    "if True:\n        return False\n    x",
    (),
)
_MIXED = Edit(
    "plugins.hybrid_parallel.setup.input_checks",
    "return next((each for each in found if each is not None), None)",
    "return None",
    (),
)
# What changed training without a word: number in its issue; the mend that is taken out, or the mutant that does so;
# class, layouts, and fields or None as above.
_SILENT: tuple[tuple[str, Edit | str, str, tuple[str, ...], dict[str, Any] | None], ...] = (
    (
        "1",
        "the cut-off of a sparse activation is that of a rank's features",
        "gemma3n/Gemma3nForCausalLM",
        ("tp2",),
        {},
    ),
    ("2", _BETWEEN, "qwen3_vl/Qwen3VLForConditionalGeneration", ("pp2",), {}),
    ("2", _BETWEEN, "qwen3_vl_moe/Qwen3VLMoeForConditionalGeneration", ("pp2",), {}),
    ("2", _BETWEEN, "granite4_vision/Granite4VisionForConditionalGeneration", ("pp2",), None),
    ("2", _BETWEEN, "granite_docling/GraniteDoclingForConditionalGeneration", ("pp2",), {}),
    ("3", _COUNTED, "llama4/Llama4ForCausalLM", ("cp2", "all-to-all"), {}),
    (
        "4",
        "each rank's heads read the first norms of a list",
        "stablelm/StableLmForCausalLM",
        ("tp2",),
        {"qk_layernorm": True},
    ),
    (
        "4",
        "norms of heads with a bias get the gradients of one rank's heads",
        "phi/PhiForCausalLM",
        ("tp2",),
        {"qk_layernorm": True},
    ),
    ("7", _MIXED, "doge/DogeForCausalLM", ("pp2", "tp2 dp2"), {"is_moe": True, "num_experts": 16}),
    ("7", _MIXED, "nllb_moe/NllbMoeForConditionalGeneration", ("pp2", "tp2 dp2"), {"expert_capacity": 12}),
    ("7", _MIXED, "xlnet/XLNetLMHeadModel", ("pp2",), {"bi_data": True}),
)
_FAULTS = {
    "mutant": "of the sharding engine and of pipelines, planted by the mutation campaign",
    "planted": "in modeling code, of all kinds",
    "silent": "that had changed training without a word: the mend is taken out",
}
_PAGE = """# The layout check

Written by `python -m zoo_tests.campaigns.checked page`; do not edit.

## What it finds

Each fault is put into a process of its own, where the check gets a model and a layout.

| Faults | Found | Of all | Not found |
|---|---|---|---|
{faults}

## False alarms

Head classes of transformers, and models of texts beside images, in their default configurations, without ranks;
{no_model} are not built so. A layout is refused by a sentence with a way out, as `boost` refuses it. It is not tried
where no small copy trains plainly: the class does not train, draws numbers, or stays large. Either is told in one line,
and is no finding.

| Layout | Classes | exact | refused | not tried | false alarms |
|---|---|---|---|---|---|
{rows}

{told}

## Large meshes

Published configurations under tp8, cp8, pp16 and dp64, with true sizes: seconds of one processor for the check.

| Checkpoint | Parameters | Seconds | |
|---|---|---|---|
{mesh}

## Seconds by size

Published configurations under tp2 and pp2 with four micro-batches, with the vocabulary of their classes by
default: seconds of one processor for the check.

| Checkpoint | Parameters | Seconds | |
|---|---|---|---|
{job}
"""
_PAIRS = (
    *("align/AlignModel", "altclip/AltCLIPModel", "blip/BlipModel", "chinese_clip/ChineseCLIPModel", "clap/ClapModel"),
    *("clip/CLIPModel", "clipseg/CLIPSegModel", "groupvit/GroupViTModel", "metaclip_2/MetaClip2Model"),
    *("owlv2/Owlv2Model", "owlvit/OwlViTModel", "siglip/SiglipModel", "siglip2/Siglip2Model", "tipsv2/Tipsv2Model"),
    "x_clip/XCLIPModel",
)
LARGEST = (
    *("Kimi K2", "Llama 4 Maverick", "DeepSeek-V3", "DeepSeek-R1", "MiniMax-Text-01", "GLM-4.5", "MiniMax-M2"),
    *("dots.llm1", "Command R+", "GLM-4.5-Air"),
)
OF_ALL_SIZES = (
    *("BERT base", "Llama 3.2 1B", "Llama 3.1 8B", "Qwen3-VL 8B", "Qwen3 30B-A3B", "Qwen3 32B", "Llama 2 70B"),
    *("GLM-4.5-Air", "DeepSeek-V3"),
)


def layout_of(name: str) -> tuple[dict[str, Any], int]:
    """Options and number of ranks of a layout such as "sp2", "cp3" or "tp2 dp2"."""
    first, _, replicas = name.partition(" dp")
    options = LAYOUTS.get(first) or {f"{first[:2]}_size": int(first[2:])}
    return options, int(first[2:] if first[2:].isdigit() else 2) * int(replicas or 1)


def faults() -> Iterator[tuple[str, tuple[str, Any, Callable[[], nn.Module], dict[str, Any], int]]]:
    """Yield a name of each fault, and its kind, what plants it, and the model, options and ranks for the check."""
    from zoo_tests.hybrid_parallel.verify import test_layout_check as planted

    for name, case in cases():
        options = {key: value for key, value in case.plugin_options.items() if key not in _LEFT_OUT}
        yield name, ("mutant", MUTANTS[name].apply, case.recipe.model, options, case.sizes.world_size)
    for head, layout, fields, names in _SUBJECTS:
        for name in names:
            yield name, ("mutant", MUTANTS[name].apply, partial(model_of, head, fields), *layout_of(layout))
    for name, (owner, forward, layouts) in planted.FAULTS.items():
        for index, options in enumerate(layouts):
            build = planted.mixtral if options is planted.EP else planted.llama
            yield f"{name}-{index}", ("planted", partial(setattr, owner, "forward", forward), build, options, 2)
    for number, mend, head, layouts, fields in _SILENT:
        edit = MUTANTS[mend] if isinstance(mend, str) else mend
        for layout in layouts:
            fault = ("silent", edit.apply, partial(model_of, head, fields), *layout_of(layout))
            yield f"{number}, {head}, {layout}", fault


def cases() -> Iterator[tuple[str, Case]]:
    """Yield each mutant of the sharding engine with the case of one of its tests, if that has more than replicas."""
    for name, mutant in MUTANTS.items():
        if not getattr(mutant, "module", "shardformer.").startswith("shardformer."):
            continue
        found = next(filter(None, map(_case_of, mutant.tests)), None)
        if found is not None and found.sizes.world_size > found.sizes.dp_size and found.recipe.precision != "fp16":
            yield name, found


def _case_of(test: str) -> Case | None:
    """Return the case that a test trains; None if it trains none."""
    parts = _ID.fullmatch(test)
    if parts is None:
        return None
    module = importlib.import_module(parts["file"].replace("/", "."))
    marks = getattr(getattr(module, parts["test"]), "pytestmark", ())
    params = [each for mark in marks if mark.name == "parametrize" for each in mark.args[1]]
    given = [param.values[0] if hasattr(param, "marks") else param for param in params]
    return next((case for case in given if isinstance(case, Case) and str(case) == parts["case"]), None)


def verdict_of(name: str) -> dict[str, str]:
    """Plant a fault into this process, and return its kind and what the check says of a model and a layout."""
    kind, plant, build, options, world_size = dict(faults())[name]
    try:
        plant()
        model = build()
    except Exception as error:  # a line or a class may be no longer there
        return {kind: f"not planted: {type(error).__name__}: {error}"[:200]}
    criterion = _mean_distance if name in _WITH_CRITERION else None
    return {kind: _text(check_layout(CheckedModel(model, criterion), options, world_size))}


def _mean_distance(outputs: Any, batch: Mapping[str, Any]) -> Tensor:
    """A criterion that is a mean over samples."""
    total, count = distance_from_wave(outputs, batch)
    return total / count


def _text(report: LayoutReport) -> str:
    if report.findings:
        return f"found: {report.findings[0]}"
    return "exact" if report.proved else f"no copy trains: {report.not_checked[0]}"


def model_of(name: str, fields: Mapping[str, Any] | None) -> nn.Module:
    """The model of Family/Class and the fields of its configuration, without values; a tiny one without fields."""
    head = HeadClass(*name.split("/"))
    if fields is None:
        return twin_of(head).build()
    model_class = getattr(importlib.import_module(head.module), head.name)
    with torch.device("meta"):
        return model_class(model_class.config_class(**fields))


def class_verdicts(name: str) -> dict[str, str]:
    """Layout -> what the check says of the default configuration of Family/Class; or "model" -> why there is none."""
    try:
        model = model_of(name, {})
    except Exception as error:  # any of a thousand classes may fail in its own way
        return {"model": f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]}
    found = _verdicts(model)
    if any(_OTHER_PARTS in verdict for verdict in found.values()):  # a part that the small copy has not
        with suppress(Exception):
            found = _verdicts(model_of(name, None))
    return found


def _verdicts(model: nn.Module) -> dict[str, str]:
    has_experts = any(".experts." in each for each, _ in model.named_parameters())
    return {
        layout: _text(check_layout(CheckedModel(model), options, 2))
        for layout, options in LAYOUTS.items()
        if layout != "ep2" or has_experts
    }


def timed_verdict(name: str, kind: str) -> dict[str, str]:
    """What the check says of a published configuration on a large mesh or in a job of four ranks: cells of the page."""
    facts = published()[name]
    model = model_of(facts["class"], facts["config"])
    start = time.process_time()
    report = check_layout(CheckedModel(model), *_TIMED[kind])
    seconds, count = time.process_time() - start, sum(param.numel() for param in model.parameters())
    said = "; ".join([f"exact, {len(report.proved)} layouts", *report.findings, *report.not_checked])
    return {kind: f"{count / 1e9:.{int(count < 1e10)}f} billion | {seconds:.1f} | {said}"}


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a process of its own, which may change what it likes."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork"), torch.set_num_threads, (1,)) as process:
        return process.submit(function, *arguments).result()


def _kind(verdict: str) -> str:
    """Return "exact", "found", "refused" where the reason says what would do, or "not tried"."""
    kind = verdict.partition(":")[0]
    if kind != "no copy trains":
        return kind
    return "refused" if "; use " in verdict else "not tried"


def fault_rows(found: Mapping[str, Mapping[str, str]]) -> Iterator[tuple[str, int, int, str]]:
    """Yield what kind of faults there are, how many are found, of how many, and the others."""
    for kind, words in _FAULTS.items():
        verdicts = {name: each[kind] for name, each in found.items() if kind in each}
        missed = [f"{name} ({_kind(verdict)})" for name, verdict in verdicts.items() if _kind(verdict) != "found"]
        yield words, len(verdicts) - len(missed), len(verdicts), "; ".join(missed)


def _cells(found: Mapping[str, Mapping[str, str]], kind: str) -> str:
    return "\n".join(f"| {name.removeprefix('job:')} | {each[kind]} |" for name, each in found.items() if kind in each)


def page(found: Mapping[str, Mapping[str, str]]) -> str:
    """The page of the documentation."""
    rows, told = [], []
    for layout in LAYOUTS:
        verdicts = {name: each[layout] for name, each in found.items() if layout in each}
        kinds = Counter(_kind(verdict) for verdict in verdicts.values())
        counts = " | ".join(str(kinds[kind]) for kind in ("exact", "refused", "not tried", "found"))
        rows.append(f"| {layout} | {len(verdicts)} | {counts} |")
        verdicts = {name: re.sub(r"of \S*site-packages/", "of ", verdict) for name, verdict in verdicts.items()}
        told += [f"- {name}, {layout}: {verdict}" for name, verdict in verdicts.items() if verdict.startswith("found")]
    return _PAGE.format(
        faults="\n".join(f"| {' | '.join(map(str, row))} |" for row in fault_rows(found)),
        no_model=sum("model" in each for each in found.values()),
        rows="\n".join(rows),
        told="\n".join(told) or "No false alarm.",
        **{kind: _cells(found, kind) for kind in _TIMED},
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("faults", "classes", "meshes", "page"))
    parser.add_argument("--only", default="", metavar="REGEX", help="of the names of faults, Family/Class, checkpoints")
    parser.add_argument("--log", type=Path, help="log (.jsonl): written after each class or mesh, read at first")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after so long; the same command goes on")
    parser.add_argument("--output", type=Path, help="page to write")
    given = parser.parse_args()
    found: dict[str, dict[str, str]] = dict(read_rows(given.log))
    work: dict[str, tuple[Any, ...]] = {}
    if given.what == "faults":
        work = {name: (verdict_of, name) for name, _ in faults()}
    elif given.what == "classes":
        names = [*(f"{head.family}/{head.name}" for head in head_classes()), *_PAIRS]
        work = {name: (class_verdicts, name) for name in names}
    elif given.what == "meshes":
        work = {name: (timed_verdict, name, "mesh") for name in LARGEST}
        work |= {f"job:{name}": (timed_verdict, name, "job") for name in OF_ALL_SIZES}
    end = time.monotonic() + 60 * given.minutes
    for name, task in work.items():
        if name in found or not re.search(given.only, name) or time.monotonic() > end:
            continue
        found[name] = alone(*task)
        print(f"{name}: {found[name]}", flush=True)
        add_row(given.log, [name, found[name]])
    if given.what == "faults":
        print(*fault_rows(found), sep="\n")
    if given.output:
        given.output.write_text(page(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
