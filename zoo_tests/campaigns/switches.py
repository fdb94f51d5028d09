"""Every switch of the configurations, alone or together: exact, or refused in a sentence, on each axis with two ranks.

    python -m zoo_tests.campaigns.switches [--only REGEX] [--layouts tp2,pp2,sp2,sp2-ulysses,cp2,cp2-ulysses,ep2]
        [--together] [--log FILE] [--minutes N]
        [--output docs/results/switches.md]

Ranks are threads of this process, which cost half the seconds of processes. What is neither exact nor refused there is
trained again on processes, whose verdict counts.

A tiny model of one class of each family is trained plainly with one field of its configuration changed, and sharded:
the loss and every gradient are compared. Fields are truth values; names, with the values that the sources of the family
compare them with; numbers of key heads; sizes that may be absent; and factors of 1. A change after which the
parameters, the loss and the gradients are those of before is left out, and so is ep2 without experts. What is in the
log is not trained again. `--output` adds the log's verdicts to `switches.json`, and writes the page of all that it has.

With `--together`, all fields of a family are changed at once, each to its first other value. Where such a model does
not train plainly, or is not exact, halves of the switches are tried, down to one: what conflicts is told by its name.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import inspect
import re
import sys
import time
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plugins.hybrid_parallel.verify.train import Trace, train_reference
from shardformer.layers.experts import expert_modules
from zoo_tests.campaigns.census.classes import HeadClass, head_classes
from zoo_tests.campaigns.census.trained import PlainRun, plain_run, refusal, sharded_verdict
from zoo_tests.campaigns.census.verdict import EXACT, add_row, kind_of, read_rows
from zoo_tests.campaigns.switches_page import AND, PLAIN, TOGETHER, page, read_kept, with_rows, write_kept
from zoo_tests.harness.poison import poison_fresh_memory
from zoo_tests.harness.ranks import stop_pools

LAYOUTS = ("tp2", "pp2")
_LENGTH = 200
_KINDS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM", "ForSequenceClassification")
# Fields that say nothing about what is computed of a batch with labels.
_NO_SWITCHES = re.compile(
    r"^(_.*|use_cache|output_.*|return_.*|torchscript|chunk_size.*|is_encoder_decoder|pruned_heads|add_cross_attention"
    r"|.*token_id|architectures|dtype|model_type|transformers_version|name_or_path|problem_type|.*drop.*|.*initializer.*"
    r"|.*tokenizer.*|use_pretrained_.*|use_timm.*|id2label|label2id|experts_implementation|attn_implementation)$"
)
_KEY_HEADS = re.compile(r"(.*num_key_value_heads|num_kv_heads|kv_n_heads|.*_key_value_attention_heads)")
_LIMITS = re.compile(r".*(clip|cap|capping)(_.*)?")  # of activations, scores or logits
_FACTORS = re.compile(r".*(scale|scaling|multiplier|factor|alpha|coef)(_.*)?")


@dataclass(frozen=True)
class Switch:
    """A changed field of a configuration.

    Attributes:
        path: of the field, through the parts of the configuration.
        value: the other value.
    """

    path: tuple[str, ...]
    value: Any

    def __str__(self) -> str:
        return f"{'.'.join(self.path)}={self.value!r}"

    def applied_to(self, config: Any) -> Any:
        """A new configuration with the other value; raises whatever its class says about it."""
        return Switches((self,)).applied_to(config)

    @property
    def counts_keys(self) -> bool:
        """Whether it is a number of key heads, which stages do not count."""
        return _KEY_HEADS.match(self.path[-1]) is not None


@dataclass(frozen=True)
class Switches:
    """Changed fields of a configuration, at once."""

    each: tuple[Switch, ...]

    def __str__(self) -> str:
        return AND.join(map(str, self.each))

    def applied_to(self, config: Any) -> Any:
        """A new configuration with the other values; raises whatever its class says about them."""
        values = config.to_dict()
        for switch in self.each:
            part = values
            for name in switch.path[:-1]:
                part = part[name]
            part[switch.path[-1]] = switch.value
        return _made(type(config), values)

    @property
    def counts_keys(self) -> bool:
        """Whether all are numbers of key heads."""
        return all(switch.counts_keys for switch in self.each)

    @property
    def halves(self) -> Iterator[Switches]:
        """The first half of the switches, and the others."""
        middle = len(self.each) // 2
        yield from (Switches(part) for part in (self.each[:middle], self.each[middle:]))


def _made(config_class: type, values: Mapping[str, Any]) -> Any:
    config = config_class(**values)
    config.use_cache = False
    return config


def switches_of(config: Any, source: str, path: tuple[str, ...] = ()) -> Iterator[Switch]:
    """Yield the switches of a configuration and of its parts.

    Args:
        source: of the modeling file of the family.
    """
    hints = _hints(type(config))
    for name, value in {**vars(config)}.items():
        if _NO_SWITCHES.match(name):
            continue
        if hasattr(value, "to_dict"):
            yield from switches_of(value, source, (*path, name))
            continue
        others = _other_values(name, value, source, hints.get(name))
        yield from (Switch((*path, name), other) for other in others if other != value)
    if config is config.get_text_config():  # what its class does not declare, and the models ask for (DeBERTa)
        for name, value in re.findall(r"getattr\((?:self\.)?config, \"(\w+)\", (True|False)\)", source):
            if not hasattr(config, name) and not _NO_SWITCHES.match(name):
                yield Switch((*path, name), value == "False")


def _other_values(name: str, value: Any, source: str, hint: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if _KEY_HEADS.match(name) and isinstance(value, int):
        return [1, 2, 4]
    if _LIMITS.match(name) and (value is None or isinstance(value, float)):
        return [0.1, None]
    if isinstance(value, float):
        return [0.7] if value == 1.0 and _FACTORS.match(name) else []
    if value is None or isinstance(value, str):
        named = [each for each in typing.get_args(hint) if isinstance(each, str)]
        found = [*named, *_compared_with(name, source)]
        return [
            *dict.fromkeys(found),
            *([None] if isinstance(value, str) and type(None) in typing.get_args(hint) else []),
        ]
    if (
        isinstance(value, int)
        and 0 <= value <= 2
        and re.match(r".*(n_group|topk_group|shared_expert|dense_replace)", name)
    ):
        return [0, 1, 2]
    if isinstance(value, int) and type(None) in typing.get_args(hint) and not _KEY_HEADS.match(name):
        return [None]
    return []


def _hints(config_class: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(config_class)
    except Exception:  # names that are imported for type checkers only
        return {}


def _compared_with(name: str, source: str) -> list[str]:
    """The strings that the source compares an attribute with."""
    tests = re.findall(rf"\.{name} *(?:==|!=|in|not in) *([^\n:]*)", source)
    return [text for test in tests for text in re.findall(r"[\"'](\w+)[\"']", test)]


def subject_of(family: str, heads: Sequence[HeadClass]) -> tuple[HeadClass, PlainRun] | None:
    """The class of a family whose switches are tried, and its plain training; None if none has a plan and trains."""
    order = sorted(
        heads, key=lambda head: next((at for at, kind in enumerate(_KINDS) if kind in head.name), len(_KINDS))
    )
    for head in order[:3]:
        if refusal(head) is not None:
            continue
        plain = plain_run(head)
        if isinstance(plain, PlainRun):
            return head, _rebuilt(plain)
    return None


def _rebuilt(plain: PlainRun) -> PlainRun:
    """One step of the training with a configuration that is built of its values, as those of the switches."""
    twin = plain.case.tiny_model
    return _trained(plain, _made(type(twin.config), twin.config.to_dict()))


def _trained(plain: PlainRun, config: Any) -> PlainRun:
    case = replace(plain.case, steps=1, tiny_model=replace(plain.case.tiny_model, config=config))
    return PlainRun(case, train_reference(case), plain.criterion)


def judge(plain: PlainRun, head: HeadClass, switch: Switch | Switches, layouts: Sequence[str]) -> dict[str, str] | None:
    """Layout -> "exact", or the reason; None if the switch changes nothing; or "plain" -> why plain training fails."""
    try:
        switched = _trained(plain, switch.applied_to(plain.case.tiny_model.config))
    except Exception as error:  # a configuration that the class does not take, or a model that does not train
        return {PLAIN: f"{type(error).__name__}: {' '.join(str(error).split())}"[:_LENGTH]}
    if _is_same(plain.trace, switched.trace):
        return None
    if switch.counts_keys:
        layouts = [layout for layout in layouts if layout != "pp2"] or layouts
    has_experts = next(expert_modules(switched.case.tiny_model.build()), None) is not None
    return {
        layout: _verdict(head, layout, switched) for layout in layouts if not layout.startswith("ep2") or has_experts
    }


def _verdict(head: HeadClass, layout: str, plain: PlainRun) -> str:
    """The verdict on threads, or on processes where that is neither exact nor refused."""
    gc.collect()
    gc.freeze()  # imported models, which a collection would walk through
    verdict = sharded_verdict(head, layout, plain, on_threads=True)
    return verdict if kind_of(verdict) in (EXACT, "refused") else sharded_verdict(head, layout, plain)


def judge_together(
    plain: PlainRun, head: HeadClass, switches: Switches, layouts: Sequence[str]
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield switches that were turned at once, and their verdicts, as `judge` has them, or those of halves of them.

    What is not exact is told of one switch, or of all where the class is refused in the same words without them.
    """
    found = judge(plain, head, switches, layouts)
    if found is None:
        return
    told = {
        layout: said
        for layout, said in found.items()
        if said == EXACT
        or len(switches.each) == 1
        or (kind_of(said) == "refused" and said == _verdict(head, layout, plain))
    }
    if told:
        yield str(switches), told
    left = layouts if PLAIN in found else [layout for layout in layouts if layout in found]
    left = [layout for layout in left if layout not in told]
    if left and len(switches.each) > 1:
        for half in switches.halves:
            yield from judge_together(plain, head, half, left)


def _is_same(one: Trace, other: Trace) -> bool:
    gradients, others = one.steps[0].gradients, other.steps[0].gradients
    return (
        one.steps[0].loss == other.steps[0].loss
        and gradients.keys() == others.keys()
        and all(gradients[name].shape == others[name].shape for name in gradients)
        and all((gradients[name] == others[name]).all() for name in gradients)
    )


def source_of(head: HeadClass) -> str:
    """The sources of the family's models."""
    return inspect.getsource(importlib.import_module(head.module))


def sweep(
    families: Mapping[str, Sequence[HeadClass]],
    layouts: Sequence[str],
    known: Collection[str],
    until: float,
    together: bool = False,
) -> Iterator[tuple[str, str, dict[str, str] | None]]:
    """Yield class, switch and verdicts of what is not known; after each class an empty switch, or `TOGETHER`."""
    mark = TOGETHER if together else ""
    for family, heads in families.items():
        if f"{family} {mark}" in known:
            continue
        subject = subject_of(family, heads)
        name = family if subject is None else f"{family}/{subject[0].name}"
        if subject is not None:
            head, plain = subject
            each = list(switches_of(plain.case.tiny_model.config, source_of(head)))
            if together:
                firsts = Switches(tuple({switch.path: switch for switch in reversed(each)}.values())[::-1])
                yield from ((name, *verdicts) for verdicts in judge_together(plain, head, firsts, layouts))
            for switch in () if together else each:
                if f"{family} {switch}" in known:
                    continue
                yield name, str(switch), judge(plain, head, switch, layouts)
                if time.monotonic() > until:
                    return
        yield name, mark, {} if subject is not None else {PLAIN: "no class with a plan trains"}
        if time.monotonic() > until:
            return


def main() -> int:
    """Train; return 1 if a switch is neither exact nor refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression on families")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--together", action="store_true", help="turn all switches of a family at once")
    parser.add_argument(
        "--log", type=Path, help="log (.jsonl): written after each switch, read at first; families in it are done"
    )
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after so long; the same command goes on")
    parser.add_argument("--output", type=Path, help="page to write")
    given = parser.parse_args()
    poison_fresh_memory()
    entries = read_rows(given.log)
    known = {f"{name.partition('/')[0]} {switch}" for name, switch, _ in entries}
    families: dict[str, list[HeadClass]] = {}
    for head in sorted(head_classes(), key=lambda head: "ForCausalLM" not in head.name):
        if re.search(given.only, head.family):
            families.setdefault(head.family, []).append(head)
    layouts, until = given.layouts.split(","), time.monotonic() + 60 * given.minutes
    try:
        for entry in sweep(families, layouts, known, until, given.together):
            entries.append(entry)
            add_row(given.log, entry)
            if entry[2]:
                print(f"{entry[0]} {entry[1]}: {entry[2]}", flush=True)
    finally:
        stop_pools()
    if given.output:
        kept = with_rows(read_kept(), entries, given.together)
        write_kept(kept)
        given.output.write_text(page(kept), encoding="utf-8")
    verdicts = [said for *_, each in entries for layout, said in (each or {}).items() if layout != PLAIN]
    return int(any(kind_of(said) not in (EXACT, "refused") for said in verdicts))


if __name__ == "__main__":
    # Ranks import the classes of their task by the name of this module.
    sys.exit(importlib.import_module("zoo_tests.campaigns.switches").main())
