"""`--json` of every command that has it: stdout is one document, with the keys that docs/command_line.md lists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from zoo_tests.booster.cli.test_commands import outcome
from zoo_tests.docs.pages import REPOSITORY, rows_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=500,
        architectures=["LlamaForCausalLM"], max_position_embeddings=128,
    )  # fmt: skip
    config.save_pretrained(path)
    return str(path)


def _documented(command: str) -> set[str]:
    rows = rows_of(REPOSITORY / "docs" / "command_line.md", "Command of `--json`")
    [keys] = [keys for name, keys in rows if name == f"`{command}`"]
    return {key.strip(" `") for key in keys.split(",")}


def _document(capsys: pytest.CaptureFixture[str], command: str, *arguments: str, code: int = 0) -> dict[str, Any]:
    """What a command prints with `--json`; it has the documented keys, and nothing else is in stdout."""
    found, out, _ = outcome(capsys, *arguments, "--json")
    assert found == code
    document = json.loads(out)
    assert set(document) == _documented(command)
    return document


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(_document(capsys, "booster --version", "--version").values())


_SIZES = ("--devices", "4", "--global-batch", "8", "--sequence-length", "32")


@pytest.mark.slow
def test_plan(model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "layout.json"
    document = _document(capsys, "booster plan", "plan", model, *_SIZES, "--output", str(file))
    first = document["layouts"][0]
    assert first["options"] == json.loads(file.read_text())
    assert first["seconds"]["total"] > 0 and sum(first["memory_bytes"].values()) > 0
    none = _document(capsys, "booster plan", "plan", model, *_SIZES, "--memory", "100KiB", code=2)
    assert none["layouts"] == [] and none["rejected"]


def test_inspect_a_model(model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    document = _document(capsys, "booster inspect MODEL", "inspect", model, "--tp", "2", "--pp", "2")
    assert [(each["rank"], each["stage"], each["tp_rank"]) for each in document["ranks"]] == [
        (0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1),
    ]  # fmt: skip
    shards = {shard["name"]: shard for shard in document["ranks"][0]["shards"]}
    query = shards["model.layers.0.self_attn.q_proj.weight"]
    assert (query["shape"], query["full_shape"], query["dim"], query["dtype"]) == ([32, 64], [64, 64], 0, "float32")
    assert document["ranks"][0]["bytes"] == sum(shard["bytes"] for shard in shards.values())
    file = tmp_path / "shards.json"
    code, out, _ = outcome(capsys, "inspect", model, "--tp", "2", "--pp", "2", "--json", str(file))
    assert code == 0 and "rank 3" in out, "with a file, the text is printed too"
    assert json.loads(file.read_text()) == document


def test_inspect_a_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("inspect", "--schedule", "1f1b", "--pp", "2", "--microbatches", "2")
    document = _document(capsys, "booster inspect --schedule", *arguments)
    assert (document["length"], document["idle"]) == (9, pytest.approx(1 / 3))
    first, last = document["ranks"]
    assert [each["action"] for each in first["actions"]] == ["forward", "forward", "backward", "backward"]
    assert first["peak_activations"] == 2 and last["peak_activations"] == 1
    assert first["actions"][0] == {"action": "forward", "stage": 0, "microbatch": 0, "begin": 0, "end": 1}


@pytest.mark.slow
def test_verify(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    document = _document(capsys, "booster verify", "verify", model, "--tp", "2", "--steps", "1")
    assert document["equal"] is True and document["ranks"] == 2 and document["options"]["tp_size"] == 2


def test_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    document = _document(capsys, "booster doctor", "doctor")
    assert document["plugins"] == ["hybrid_parallel"] and document["backends"]["gloo"] is True
    assert document["devices"]["cpu"]["cores"] >= 1 and document["links"] == {}
    assert document["optimisations"]["matplotlib"]["available"] is True
    monkeypatch.setattr("booster.cli.doctor._REQUIRED", ("torch", "no-such-distribution"))
    assert _document(capsys, "booster doctor", "doctor", code=1)["versions"]["no-such-distribution"] is None


@pytest.mark.slow
def test_links(capsys: pytest.CaptureFixture[str]) -> None:
    links = _document(capsys, "booster doctor", "doctor", "--nproc-per-node", "2", "--tp", "2")["links"]
    assert links["ranks"] == 2 and links["axes"]["tp"]["num_ranks"] == 2


def test_a_mistake_leaves_stdout_empty(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["plan", model, "--device", "V100"], ["inspect"], ["verify", "/nowhere"], ["doctor", "more"]):
        code, out, err = outcome(capsys, *arguments, "--json")
        assert (code, out, err.count("\n")) == (2, "", 1), arguments


@pytest.mark.parametrize("command", ["plan", "verify", "inspect"])
def test_a_file_that_cannot_be_written(command: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = outcome(capsys, command, model, "--json", "/nowhere/x.json")
    assert (code, out) == (2, "") and err.startswith("error: /nowhere/x.json cannot be written")
