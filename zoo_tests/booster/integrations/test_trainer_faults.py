"""A callback that runs on one rank alone and calls what all ranks must call ends the job with a sentence, and no hang.

What breaks here first: the failure monitor does not watch a process group that `TrainingArguments` has made
(`booster/launch.py`). `pytest --campaigns` starts the same jobs by `booster run`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from zoo_tests.booster.integrations import trainer_alone
from zoo_tests.campaigns.faults.campaign import GONE_WITHIN_S, NAMED_WITHIN_S
from zoo_tests.campaigns.faults.watch import WatchedJob
from zoo_tests.harness.ended_ranks import run_to_the_end

_TP2, _PP2, _DP2 = '{"tp_size": 2}', '{"pp_size": 2}', "{}"
_SAVED = "error: rank 0 skipped a collective: it is in booster.save_model (call"
_EVALUATED = "error: rank 0 skipped a collective: it is in booster.boost (call"  # of the loader


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "layout", "sentence"), [("save_model", _DP2, _SAVED), ("evaluate", _PP2, _EVALUATED)]
)
def test_a_callback_on_one_rank_alone_ends_the_job(action: str, layout: str, sentence: str, tmp_path: Path) -> None:
    ranks = run_to_the_end(2, trainer_alone.main, action, layout, str(tmp_path / "out"), folder=tmp_path / "ranks")
    [line] = "".join(rank.err for rank in ranks).splitlines()
    assert line.startswith(sentence)
    assert ", while rank 1 is " in line
    assert [rank.code for rank in ranks] == [1, 1]
    assert "strikes at" in ranks[0].out


@pytest.mark.slow
def test_the_process_group_of_training_arguments_is_left_as_it_is(tmp_path: Path) -> None:
    ranks = run_to_the_end(2, trainer_alone.main, "nothing", _TP2, str(tmp_path / "out"), folder=tmp_path / "ranks")
    for rank in ranks:
        assert (rank.code, rank.err, rank.out) == (0, "", "ends well, True, 2\n")


@pytest.mark.campaign
@pytest.mark.parametrize("layout", [_TP2, _PP2, _DP2])
@pytest.mark.parametrize(("action", "sentence"), [("save_model", _SAVED), ("evaluate", _EVALUATED)])
def test_booster_run_ends_in_time(action: str, layout: str, sentence: str, tmp_path: Path) -> None:
    job = WatchedJob(
        action,
        layout,
        str(tmp_path),
        script=Path(trainer_alone.__file__),
        launcher=("-m", "booster", "run", "--nproc-per-node", "2"),
    )
    outcome = job.outcome()
    [line] = outcome.lines
    assert line.startswith(sentence)
    assert outcome.named_s < NAMED_WITHIN_S and outcome.gone_s < GONE_WITHIN_S, outcome
    assert outcome.code != 0
