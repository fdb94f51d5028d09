"""Train models of texts and images with images in their batches, sharded and plainly.

    python -m zoo_tests.campaigns.images [--layouts tp2pp2,tp2,pp2,sp2,cp2] [--only PATTERN] [--log FILE]
        [--output docs/results/images.md]

The census gives such models texts alone. Here each sample begins with an image, in the first of the forms of
`image_twin.STYLES` in which it reaches the loss and the weights of the tower of images. The log is read at first: what
is there is not trained again.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from plugins.hybrid_parallel.verify.train import train_reference
from zoo_tests.campaigns.census.classes import HeadClass, head_classes
from zoo_tests.campaigns.census.trained import PlainRun, plain_run, sharded_verdict, twin_of
from zoo_tests.campaigns.census.verdict import EXACT, Verdict, append, kind_of, read_log, reasons
from zoo_tests.harness.image_twin import image_twin_of
from zoo_tests.harness.ranks import stop_pools

_LAYOUTS = ("tp2pp2", "tp2", "pp2", "sp2", "cp2")
_IMAGES = ("pixel_values", "image_pixel_values")
_NO_BATCH = "no batch in which an image reaches the loss"
_HEAD = """# Images in the batches

Head classes of transformers that take texts and images, trained with an image in each sample and compared with plain
training: every loss, gradient and weight. The [census](coverage.md) gives these classes texts alone. {number} classes
take images. For {tried} of them a batch was made in which the image reaches the loss and the gradients of the tower.

```bash
{command}
```

| | {titles} |
|---|{lines}
| exact | {counts} |

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
        head = _HEAD.format(
            command=command,
            number=len(self.verdicts),
            tried=len(tried),
            titles=" | ".join(layouts),
            lines="---|" * len(layouts),
            counts=" | ".join(f"{count} of {len(tried)}" for count in exact),
        )
        rows = [["Class", *layouts], ["---"] * (len(layouts) + 1)]
        rows += [[name, *(kind_of(each.get(layout, EXACT)) for layout in layouts)] for name, each in tried.items()]
        table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
        others = "\n".join(f"- {name}" for name in self.verdicts if name not in tried)
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
        for head in classes_with_images():
            name = f"{head.family}/{head.name}"
            if re.search(arguments.only, name):
                known = log.get(name) or Verdict(_NO_BATCH)
                if any(layout not in known.layouts for layout in layouts) and (name not in log or known.plain == EXACT):
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


def classes_with_images() -> list[HeadClass]:
    """Head classes of texts and images whose batches in the census have none."""
    found = []
    for head in head_classes():
        try:
            twin = twin_of(head)
            model = twin.build()
            taken = inspect.signature(model.forward).parameters
            missing = [name for name in _IMAGES if name in taken and name not in twin.batch(model, 0, 2)]
        except Exception:  # forwards and configurations raise arbitrary exception types
            continue
        if "input_ids" in taken and missing:
            found.append(head)
    return found


def train(head: HeadClass, layouts: list[str], known: Verdict) -> None:
    """Train a class in each layout that is not known yet."""
    plain = _plain_with_images(head)
    if plain is None:
        return
    known.plain = EXACT
    for layout in layouts:
        if layout not in known.layouts:
            known.layouts[layout] = sharded_verdict(head, layout, plain)


def _plain_with_images(head: HeadClass) -> PlainRun | None:
    without = plain_run(head)
    twin = None if isinstance(without, str) else image_twin_of(without.case.tiny_model)
    if twin is None:
        return None
    case = replace(without.case, tiny_model=twin)
    return PlainRun(case, train_reference(case))


if __name__ == "__main__":
    sys.exit(main())
