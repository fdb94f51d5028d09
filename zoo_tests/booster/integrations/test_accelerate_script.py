"""A script for accelerate runs under a layout with two changed lines, and finds the same numbers.

What breaks here first: something of accelerate's that scripts import together with `Accelerator`.
"""

from __future__ import annotations

import difflib
import io
import json
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
import torch

from booster.integrations.accelerate import variables_of_this_rank
from zoo_tests.booster.integrations.accelerate_loop import fresh_accelerate
from zoo_tests.harness.ranks import run_on_ranks

_SCRIPT = Path(__file__).with_name("classification_script.py")
_CHANGES = {
    "from accelerate import Accelerator, DistributedType": "from booster.integrations.accelerate import Accelerator, "
    "DistributedType, load_plugin",
    "Accelerator(cpu=args.cpu,": 'Accelerator(plugin=load_plugin("hybrid_parallel", OPTIONS), cpu=args.cpu,',
}
_OPTIONS = {"tp2": "tp_size=2", "pp2": "pp_size=2, num_microbatches=2", "dp2": "dp_size=2"}


def changed(options: str) -> str:
    """The script for a layout."""
    text = _SCRIPT.read_text()
    for old, new in _CHANGES.items():
        assert text.count(old) == 1
        text = text.replace(old, new.replace("OPTIONS", options))
    return text


def _run(script: str, output: str) -> str:
    """Run a script on this rank, as `python script` does; return what it printed."""
    printed = io.StringIO()
    argv = [script, "--cpu", "--output", output]
    with fresh_accelerate(), variables_of_this_rank(), mock.patch.object(sys, "argv", argv), redirect_stdout(printed):
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


def test_two_lines_change() -> None:
    before, after = _SCRIPT.read_text().splitlines(), changed("tp_size=2").splitlines()
    differences = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    assert [line[0] for line in differences] == ["-", "+"] * 2, "two lines, and no further ones"


@pytest.mark.slow
@pytest.mark.parametrize("layout", _OPTIONS)
def test_the_script_finds_the_same(layout: str, tmp_path: Path) -> None:
    """Data-parallel replicas are compared with as many processes of accelerate's own, all else with one."""
    script = tmp_path / "script.py"
    script.write_text(changed(_OPTIONS[layout]))
    processes = 2 if layout == "dp2" else 1
    first = run_on_ranks(processes, _run, str(_SCRIPT), str(tmp_path / "plain.json"))
    second = run_on_ranks(2, _run, str(script), str(tmp_path / "boosted.json"))
    expected, found = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("plain", "boosted"))
    assert second[0] == first[0] and second[1] == "" and second[0].count("accuracy") == 2, "one rank prints"
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    assert len(found[0]["logits"]) == 16 and found[0]["lr"] != found[1]["lr"]
