"""`booster inspect --schedule`: text, picture and trace of a schedule, and one sentence for each mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zoo_tests.booster.cli.test_commands import outcome


def test_a_schedule_in_text(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = outcome(capsys, "inspect", "--schedule", "1f1b", "--pp", "2", "--microbatches", "2")
    assert (code, err) == (0, "")
    assert out == (
        "1f1b, 2 ranks, 2 micro-batches\n\n"
        "  0 |F0 F1       B0---    B1--- \n"
        "  1 |   F0 B0--- F1 B1--- \n\n"
        "rank 0: idle  33.3%, at most 2 activations of stages\n"
        "rank 1: idle  33.3%, at most 1 activations of stages\n"
        "all ranks: idle 33.3% of 9\n"
    )


def test_times_that_the_user_gives(capsys: pytest.CaptureFixture[str]) -> None:
    times = ("--forward", "2", "--backward", "3", "--weights", "1", "--send", "0.5")
    _, out, _ = outcome(capsys, "inspect", "--schedule", "gpipe", "--pp", "2", "--microbatches", "1", *times)
    assert "all ranks: idle 53.8% of 13\n" in out  # 2 + 0.5 + 2 + 4 + 0.5 + 4, of which each rank works 6


def test_chunks_share_the_time_of_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    for chunks, length in ((2, 25.5), (4, 24.75)):
        _, out, _ = outcome(capsys, "inspect", "--schedule", "zero_bubble", "--chunks", str(chunks))
        assert f"of {length:g}\n" in out


def test_a_long_schedule_is_only_counted(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = outcome(capsys, "inspect", "--schedule", "zbv", "--pp", "8", "--microbatches", "64")
    assert "F0" not in out and "rank 7: idle" in out


def test_a_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "zbv.json"
    code, _, _ = outcome(capsys, "inspect", "--schedule", "zbv", "--trace", str(trace))
    assert code == 0
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert len(events) == 4 * 8 * 2 * 3  # ranks x micro-batches x chunks x kinds of passes
    assert {event["tid"] for event in events} == {0, 1, 2, 3}
    assert min(event["ts"] for event in events) == 0
    assert all(event["dur"] == 500 for event in events)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "nothing was asked for; use a model's directory, --schedule 1f1b, or --recorded DIRECTORY"),
        (["--schedule", "zb"], "argument --schedule: invalid choice: 'zb'"),
        (["--schedule", "1f1b", "--pp", "0"], "argument --pp: '0' is not a positive integer, such as 4"),
        (["--schedule", "1f1b", "--send", "nan"], "argument --send: 'nan' is no time; use a number such as 0.5"),
        (["--schedule", "1f1b", "--chunks", "2"], "num_model_chunks=2 does not fit pp_style='1f1b'"),
        (
            ["a-model", "--trace", "x.json"],
            "--trace has no effect on a model; what is used there: --head, --tp, ",
        ),
        (["a-model", "--schedule", "zbv"], "--schedule zbv has no effect without a pipeline; add --pp 2, or more"),
        (["--schedule", "1f1b", "--html", "x.html"], "--html has no effect on a schedule; what is used there: "),
        (["--recorded", "here", "--pp", "2"], "--pp has no effect on a recording; what is used there: --recorded, "),
        (["--schedule", "1f1b", "--trace", "/nowhere/x.json"], "/nowhere/x.json cannot be written"),
        (["--recorded", "/nowhere"], "/nowhere holds no recording; train with HybridParallelPlugin(record_schedule="),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = outcome(capsys, "inspect", *arguments)
    assert code == 2
    assert err.startswith(f"error: {sentence}")
    assert err.count("\n") == 1
