"""Changes a plain script the way the README asks: launch, a plugin, `boost`, and `booster.backward` or a pipeline.

The changes are mechanical. What a script needs beyond them is a line of `EDITS`, which a reader of the porting guide
would write too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

PLAIN = Path(__file__).parent / "plain"
NAMES = sorted(path.stem for path in PLAIN.glob("*.py"))
LAYOUTS = {"dp2": "", "tp2": "tp_size=2", "pp2": "pp_size=2, num_microbatches=2"}

_LOADERS = ("loader", "train_loader", "trainloader", "train_dataloader", "valid_loader", "test_loader")
_BOOSTED = ("model", "net", "optimizer", "optim", "head_optimizer", "scheduler", *_LOADERS)
_PASS = re.compile(
    r"^(?P<indent> +)(?:loss = model\(\*\*batch\)\.loss"
    r"|(?P<outputs>outputs) = model\(\*\*batch\)\n +loss = outputs(?:\.loss|\[0\]))\n +loss\.backward\(\)\n",
    re.MULTILINE,
)
_PIPELINED = r"\g<indent>loss = booster.execute_pipeline(iter([batch]), model, optimizer=optimizer).loss\n"


@dataclass(frozen=True)
class Port:
    """What a script needs beyond the usual lines.

    Attributes:
        edits: plain text -> ported text, under every layout.
        options: of the plugin, as source.
    """

    edits: dict[str, str] = field(default_factory=dict)
    options: str = ""


EDITS = {
    "clip_gradients": Port(
        edits={"torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)": "model.clip_grad_norm_(0.2)"},
    ),
    "new_tokens": Port(edits={'model.save_pretrained("grown")': 'booster.save_model(model, "grown")'}),
    "save_and_resume": Port(
        edits={
            'torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")': (
                'booster.save_checkpoint("checkpoint", model=model, optimizer=optimizer)'
            ),
            'checkpoint = torch.load("checkpoint.pt")\n': "",
            'model.load_state_dict(checkpoint["model"])\n': "",
            'optimizer.load_state_dict(checkpoint["optimizer"])': (
                'booster.load_checkpoint("checkpoint", model=model, optimizer=optimizer)'
            ),
        }
    ),
}


def plain(name: str) -> str:
    """The source of a script."""
    return (PLAIN / f"{name}.py").read_text(encoding="utf-8")


def ported(name: str, layout: str) -> str:
    """The source of a script for a layout of two ranks."""
    port = EDITS.get(name, Port())
    source = plain(name)
    for old, new in port.edits.items():
        assert source.count(old) == 1, f"{name}: {old!r} is there {source.count(old)} times"
        source = source.replace(old, new)
    boosted = [each for each in _BOOSTED if re.search(rf"^(\w+, )?{each}\b.* = ", source, re.MULTILINE)]
    source = _share_batches(source) if layout == "dp2" else source
    source = _insert_boost(source, boosted)
    if layout == "pp2" and "outputs." not in _PASS.sub("", source):  # what reads them keeps the ordinary loop
        source = _PASS.sub(_PIPELINED, source)
    source = re.sub(r"^( +)(.+)\.backward\(\)$", _backward(boosted), source, flags=re.MULTILINE)
    return _insert_launch(source, ", ".join(filter(None, (LAYOUTS[layout], port.options))))


def _share_batches(source: str) -> str:
    """`batch_size` is that of one of the two replicas."""
    return re.sub(r"\bbatch_size=(\d+)", lambda found: f"batch_size={int(found[1]) // 2}", source)


def _insert_boost(source: str, boosted: list[str]) -> str:
    """Behind the line that makes the last of the objects."""
    lines = source.splitlines(keepends=True)
    made = rf"^(\w+, )?({'|'.join(boosted)})\b[^(]* = "
    first_loop = next(index for index, line in enumerate(lines) if line.startswith("for ") and _trains(lines, index))
    last = max(index for index, line in enumerate(lines[:first_loop]) if re.match(made, line))
    while not lines[last].rstrip().removesuffix("# fmt: skip").rstrip().endswith((")", "]")):
        last += 1
    names = ", ".join(boosted)
    return "".join([*lines[: last + 1], f"{names} = booster.boost({names})\n", *lines[last + 1 :]])


def _trains(lines: list[str], index: int) -> bool:
    body = []
    for line in lines[index + 1 :]:
        if line.strip() and not line.startswith(" "):
            break
        body.append(line)
    return ".backward()" in "".join(body)


def _backward(boosted: list[str]):
    optimizer = next(name for name in boosted if name.startswith("optim"))
    return rf"\g<1>booster.backward(\g<2>, {optimizer})"


def _insert_launch(source: str, options: str) -> str:
    docstring, rest = source.split("\n", 1)
    return "\n".join(
        [
            docstring,
            "from booster import Booster, launch_from_torch",
            "from plugins.hybrid_parallel import HybridParallelPlugin",
            "launch_from_torch()",
            f"booster = Booster(plugin=HybridParallelPlugin({options}))",
            rest,
        ]
    )
