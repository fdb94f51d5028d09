"""TrainingParser: a mistake on the command line is one sentence, once; what is right is transformers' own parsing."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from transformers import HfArgumentParser, TrainingArguments

from booster.integrations.arguments import TrainingParser


@dataclass
class Options:
    tp_size: int = 1
    tiny: bool = False


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--what", "3"], "error: unrecognized arguments: --what 3\n"),
        (["--learning_rat", "3"], "error: unrecognized arguments: --learning_rat 3\n"),
        (["--tp_size", "x"], "error: argument --tp_size/--tp-size: invalid int value: 'x'\n"),
        (["--eval_strategy", "often"], "error: argument --eval_strategy/--eval-strategy: invalid choice: 'often' "),
    ],
)
def test_a_mistake_is_one_sentence(
    arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as ended:
            TrainingParser((Options, TrainingArguments)).parse(arguments)
        assert ended.value.code == 2
        err = capsys.readouterr().err
        assert (err.startswith(sentence) and err.count("\n") == 1) if rank == "0" else not err


def test_what_is_right_is_parsed_as_by_transformers() -> None:
    arguments = ["--tp-size", "2", "--tiny", "--learning_rate", "0.5", "--output_dir", "out", "--use_cpu"]
    plain = HfArgumentParser((Options, TrainingArguments)).parse_args_into_dataclasses(arguments)
    options, args = TrainingParser((Options, TrainingArguments)).parse(arguments)
    assert options == plain[0] == Options(2, True)
    assert args.to_dict() == plain[1].to_dict() and args.learning_rate == 0.5
