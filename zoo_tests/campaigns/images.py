"""Train models of texts and images, or sounds, with these in their batches, sharded and plainly.

    python -m zoo_tests.campaigns.images [--layouts tp2pp2,tp2,pp2,sp2,cp2,pp2-some,dp2-some] [--only PATTERN]
        [--log FILE] [--output docs/results/images.md]

The census gives such models texts alone. Here each sample begins with an image, in the first of the forms of
`image_twin.STYLES` in which it reaches the loss and the weights of the tower of images, or with a sound. In layouts
that end in "-some", the first half of the samples has neither. The log is read at first: what is there is not trained
again.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from plugins.hybrid_parallel.verify.image_twin import NoMediaError
from plugins.hybrid_parallel.verify.propose import share_cut
from plugins.hybrid_parallel.verify.train import train_reference
from zoo_tests.campaigns.census.classes import HeadClass, head_classes
from zoo_tests.campaigns.census.trained import PlainRun, plain_run, sharded_verdict, twin_of
from zoo_tests.campaigns.census.verdict import EXACT, Verdict, append, kind_of, read_log, reasons
from zoo_tests.harness.ranks import stop_pools
from zoo_tests.harness.sound_twin import media_twin_of

_SOME = "-some"
_LAYOUTS = ("tp2pp2", "tp2", "pp2", "sp2", "cp2", f"pp2{_SOME}", f"dp2{_SOME}")
_INPUTS = ("pixel_values", "image_pixel_values", "input_features")
_NO_BATCH = "no batch in which an image or a sound reaches the loss"
_HEAD = """# Images and sounds in the batches

Head classes of transformers that take texts and images, or sounds, trained with one in each sample and compared with
plain training: every loss, gradient and weight. The [census](coverage.md) gives these classes texts alone. {number}
classes take images or sounds. For {tried} of them a batch was made in which these reach the loss and the gradients of
the tower. In the columns "-some" the first half of the samples has none: that is a whole micro-batch of pp2, and the
whole share of a replica of dp2.

```bash
{command}
```

| | {titles} |
|---|{lines}
| exact | {counts} |

Two tensor-parallel ranks divide {flops:.0%} of the FLOPs of these tiny models and {parameters:.0%} of their parameters
(medians).

"""


@dataclass
class Images:
    """What was found.

    Attributes:
        verdicts: Family/Class -> verdict of each layout; of no layout where no batch was made.
    """

    verdicts: dict[str, Verdict] = field(default_factory=dict)

    def page(self, layouts: list[str], command: str) -> str:
        """The page of the documentation."""
        tried = {name: each.layouts for name, each in self.verdicts.items() if each.plain == EXACT}
        exact = [sum(each.get(layout) == EXACT for each in tried.values()) for layout in layouts]
        shares = [each.share for each in self.verdicts.values() if each.plain == EXACT]
        head = _HEAD.format(
            parameters=median(share.parameters for share in shares if share.parameters is not None),
            flops=median(share.flops for share in shares if share.flops is not None),
            command=command,
            number=len(self.verdicts),
            tried=len(tried),
            titles=" | ".join(layouts),
            lines="---|" * len(layouts),
            counts=" | ".join(f"{count} of {len(tried)}" for count in exact),
        )
        rows = [["Class", *layouts, "FLOPs"], ["---"] * (len(layouts) + 2)]
        rows += [
            [name, *(kind_of(each.get(layout, EXACT)) for layout in layouts), _percent(self.verdicts[name].share.flops)]
            for name, each in tried.items()
        ]
        table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
        others = "\n".join(f"- {name}: {each.plain}" for name, each in self.verdicts.items() if name not in tried)
        return f"{head}{table}\n\n## Reasons\n\n{reasons(tried)}\n\n## Without a batch\n\n{others}\n"


def main() -> int:
    """Train the classes; return 1 if one differs or fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", default=",".join(_LAYOUTS), help=f"of {', '.join(_LAYOUTS)}")
    parser.add_argument("--only", default="", help="regular expression on Family/Class")
    parser.add_argument("--log", type=Path, help="log (.jsonl): written after each class, read at first")
    parser.add_argument("--output", type=Path, help="page to write")
    arguments = parser.parse_args()
    log = read_log(arguments.log) if arguments.log is not None and arguments.log.exists() else {}
    layouts, found = arguments.layouts.split(","), Images()
    try:
        for head in classes_with_towers():
            name = f"{head.family}/{head.name}"
            if re.search(arguments.only, name):
                known = log.get(name) or Verdict(_NO_BATCH)
                is_new = name not in log or (known.plain == EXACT and known.share.parameters is None)
                if is_new or (known.plain == EXACT and any(layout not in known.layouts for layout in layouts)):
                    train(head, layouts, known)
                    if arguments.log is not None:
                        append(arguments.log, name, known)
                found.verdicts[name] = known
                sys.stdout.write(f"{name}: {known.plain}; {known.layouts}\n")
                sys.stdout.flush()
    finally:
        stop_pools()
    if arguments.output is not None:
        command = f"python -m zoo_tests.campaigns.images --layouts {arguments.layouts}"
        arguments.output.write_text(found.page(layouts, command), encoding="utf-8")
    verdicts = [verdict for each in found.verdicts.values() for verdict in each.layouts.values()]
    return int(any("differs" in each or "crash" in each for each in verdicts))


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def classes_with_towers() -> list[HeadClass]:
    """Head classes of texts and images, or sounds, whose batches in the census have none."""
    found = []
    for head in head_classes():
        try:
            twin = twin_of(head)
            model = twin.build()
            taken = inspect.signature(model.forward).parameters
            missing = [name for name in _INPUTS if name in taken and name not in twin.batch(model, 0, 2)]
        except Exception:  # forwards and configurations raise arbitrary exception types
            continue
        if "input_ids" in taken and missing:
            found.append(head)
    return found


def train(head: HeadClass, layouts: list[str], known: Verdict) -> None:
    """Train a class in each layout that is not known yet, and measure what two tensor-parallel ranks divide."""
    try:
        plain = plain_with_inputs(head, in_some=False)
    except NoMediaError as error:
        known.plain = str(error)
        return
    known.plain = EXACT
    missing = [layout for layout in layouts if layout not in known.layouts]
    some = plain_with_inputs(head, in_some=True) if any(each.endswith(_SOME) for each in missing) else plain
    for layout in missing:
        known.layouts[layout] = sharded_verdict(
            head, layout.removesuffix(_SOME), some if layout.endswith(_SOME) else plain
        )
    twin = plain.case.tiny_model
    cut = share_cut(twin.build, twin.batch(twin.build(), 0, 2))
    known.share.parameters, known.share.flops = cut.parameters, cut.flops


def plain_with_inputs(head: HeadClass, in_some: bool) -> PlainRun:
    """Plain training with images or sounds, of half of the samples or all.

    Raises:
        NoMediaError: no batch for them was made.
    """
    without = plain_run(head)
    if isinstance(without, str):
        raise NoMediaError(without)
    case = replace(without.case, tiny_model=replace(media_twin_of(without.case.tiny_model), in_some=in_some))
    return PlainRun(case, train_reference(case))


if __name__ == "__main__":
    sys.exit(main())
