"""`booster plan`: the table, the file that `from_config` reads, and one sentence for each mistake.

What breaks here first: an option, or what a refused model says. Look in `plugins/hybrid_parallel/cli/plan.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig

from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.planner import op_recorder, profile
from zoo_tests.booster.cli.test_commands import outcome


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=500,
        architectures=["LlamaForCausalLM"], max_position_embeddings=128,
    )  # fmt: skip
    config.save_pretrained(path)
    return str(path)


_SIZES = ("--devices", "4", "--global-batch", "8", "--sequence-length", "32")


@pytest.mark.slow
def test_the_chosen_row_is_what_booster_runs(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen, table = tmp_path / "plan.json", tmp_path / "table.json"
    files = ("--output", str(chosen), "--table", str(table), "--choose", "2")
    code, out, err = outcome(capsys, "plan", model, *_SIZES, "--device", "H200", *files)
    assert (code, err) == (0, "")
    assert "on 4 x H200, 8 samples of 32 tokens, bf16" in out and "layouts fit" in out
    rows = json.loads(table.read_text())["layouts"]
    sizes = HybridParallelPlugin.from_config(chosen).config.parallel
    assert json.loads(chosen.read_text()) == rows[1]["options"]
    assert sizes.tp_size * sizes.pp_size * sizes.dp_size == 4
    seconds = [row["seconds"]["total"] for row in rows[:10]]
    assert seconds == sorted(seconds)


@pytest.mark.slow
def test_a_device_as_the_user_describes_it(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, fast, _ = outcome(capsys, "plan", model, *_SIZES, "--inter", "1000", "--intra", "1000", "--top", "1")
    code, slow, _ = outcome(capsys, "plan", model, *_SIZES, "--inter", "0.01", "--intra", "0.01", "--top", "1")
    assert code == 0
    assert fast.splitlines()[3] != slow.splitlines()[3]


@pytest.mark.slow
def test_nothing_fits(model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    code, out, err = outcome(capsys, "plan", model, *_SIZES, "--memory", "100KiB", "--table", str(table))
    assert (code, out) == (2, "") and err.count("\n") == 1
    rejected = [row["memory"] for row in json.loads(table.read_text())["rejected"] if row["memory"] is not None]
    assert any(memory["host"] for memory in rejected), "layouts with offload were tried too"
    assert err.startswith("error: no layout fits the 100 KiB of a device: the nearest, dp1 tp4+sp pp1 ")
    assert " optimizer to cpu" in err and " more, and " in err and "; use " in err


@pytest.mark.slow
def test_offload_where_nothing_else_fits(model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A budget between the need of the smallest layout without offload and that of the smallest with it."""
    table, chosen = tmp_path / "table.json", tmp_path / "plan.json"
    sizes = ("--devices", "2", "--global-batch", "2", "--sequence-length", "32", "--max-tp", "1")
    outcome(capsys, "plan", model, *sizes, "--memory", "1KiB", "--table", str(table))
    needs: dict[bool, list[float]] = {False: [], True: []}
    for row in json.loads(table.read_text())["rejected"]:
        if row["memory"] is not None:
            parts = [size for part, size in row["memory"].items() if part != "host"]
            needs[bool(row["memory"]["host"])].append(sum(parts))
    budget = int(min(needs[False]))  # without the reserve
    assert min(needs[True]) < 0.8 * budget
    files = ("--output", str(chosen), "--table", str(table))
    code, out, _ = outcome(capsys, "plan", model, *sizes, "--memory", f"{budget / 1024}KiB", *files)
    assert code == 0 and " to cpu" in out
    config = HybridParallelPlugin.from_config(chosen).config
    assert "cpu" in (config.offload.offload_optimizer, config.offload.offload_activations)
    rows = json.loads(table.read_text())["layouts"]
    assert all(row["memory_bytes"]["needed"] <= budget for row in rows)


@pytest.mark.slow
def test_this_machine_is_measured(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--devices", "2", "--global-batch", "4", "--sequence-length", "32", "--precision", "fp32")
    code, out, err = outcome(capsys, "plan", model, *sizes, "--device", "this-machine")
    assert (code, err) == (0, "")
    assert "on 2 x this-machine" in out and "layouts fit" in out


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--device", "V100"), "no device 'V100' is known; use A100, H100, H200, B200 or this-machine"),
        (("--device", "this-machine", "--flops", "4"), "--flops changes what this-machine is measured to be"),
        (("--memory", "24 gigs"), "'24 gigs' is no amount of memory, such as 24GiB, 24GB or 24"),
        (("--memory", "0"), "'0' is no amount of memory, such as 24GiB, 24GB or 24"),
        (("--quantised", "nf4"), "a base in nf4 is frozen, and nothing else would be trained; give --adapter"),
        (("--adapter", "/nowhere"), "/nowhere has no adapter_config.json; give the directory of an adapter that peft"),
        (("--varlen",), "--varlen is about documents of packed rows; give their mean length, --packed-documents"),
        (("--devices", "0"), "'0' is not a positive integer"),
        (("--inter", "fast"), "'fast' is not a positive number, such as 80"),
        (("--head", "LlamaForNothing"), "transformers has no model class 'LlamaForNothing'"),
        (("--sequence-length", "4096"), "longer than the 128 positions of LlamaForCausalLM; use 128 or fewer"),
        (("--devices", "1", "--choose", "9999", "--output", "never.json"), "--choose 9999 is beyond the"),
        (("--choose", "2"), "--choose 2 says which row is written, and no file is; add --output"),
        (("--output", "/nowhere/plan.json"), "/nowhere/plan.json cannot be written, /nowhere is no directory"),
    ],
)
def test_mistakes(options: tuple[str, ...], sentence: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = outcome(capsys, "plan", model, *_SIZES, *options)
    assert code == 2
    assert err.startswith("error: ") and sentence in err and err.count("\n") == 1


@pytest.mark.slow
def test_a_model_that_scans_its_tokens_is_refused_in_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (op_recorder, profile):
        monkeypatch.setattr(module, "MOST_OPERATORS", 5_000)  # a tenth: the test would take ten times as long
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 64, "state_size": 4}
    config = {"model_type": "mamba", "architectures": ["MambaForCausalLM"], **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, _, err = outcome(capsys, "plan", str(tmp_path), "--sequence-length", "4096", "--max-tp", "1")
    assert code == 2
    assert "MambaForCausalLM runs its tokens one after the other" in err and "plan for" in err


@pytest.mark.slow
def test_goodput_of_the_chosen_row(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failing = ("--device-mtbf", "1000", "--storage", "0.01", "--restart-seconds", "600", "--repair-hours", "2")
    code, out, err = outcome(capsys, "plan", model, *_SIZES, *failing, "--json", str(tmp_path / "plan.json"))
    assert (code, err) == (0, "")
    assert "a failure every 10.4 d on 1 machine" in out and "restart from disk" in out
    ways = json.loads((tmp_path / "plan.json").read_text())["goodput"]
    assert len(ways) == 3 and all(0.9 < way["useful"] < 1 for way in ways.values())
    code, out, err = outcome(capsys, "plan", model, *_SIZES, "--device-mtbf", "never")
    assert (code, out) == (2, "") and "'never' is not a positive number" in err
