"""Scripts of which no line is changed: `booster run --layout`, and `BOOSTER_LAYOUT` under other launchers.

What breaks here first: a class that a library defines in another module than before; see `booster/takeover.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from booster import ConfigurationError
from booster.cli.run import main
from booster.failure.diagnosis import LAYOUT_VARIABLE, Failure
from booster.takeover import VARIABLE, Takeover, install
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.config.options import options_of_text
from zoo_tests.harness.environment import REPOSITORY, environment_of_a_job
from zoo_tests.harness.ranks import under_load

_JOB = Path(__file__).with_name("takeover_job.py")
_START = REPOSITORY / "hybrid_booster" / "site"
_EXACT = {"rtol": 0.0, "atol": 2e-6}  # Lightning and TRL compute parts of a loss in fp32


def run(start: list[str], kind: str, folder: Path, **variables: str) -> subprocess.CompletedProcess:
    folder.mkdir(exist_ok=True)
    environment = environment_of_a_job(**variables)
    command = [sys.executable, *start, str(_JOB), kind, str(folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=under_load(400), cwd=folder)


def booster_run(layout: str, kind: str, folder: Path, ranks: int = 2) -> subprocess.CompletedProcess:
    return run(["-m", "booster", "run", "--nproc-per-node", str(ranks), "--layout", layout], kind, folder)


def losses_in(folder: Path) -> torch.Tensor:
    return torch.tensor(json.loads((folder / "losses.json").read_text()))


# ----- without ranks -----


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("tp=2,pp=2", {"tp_size": 2, "pp_size": 2}),
        ("dp=4, ep=2,cp=1", {"dp_size": 4, "ep_size": 2, "cp_size": 1}),
        ("tp=2,sp=2", {"tp_size": 2, "sp_size": 2, "enable_sequence_parallelism": True}),
        ("pp=2,layers_per_stage=[3,1],precision=bf16", {"pp_size": 2, "layers_per_stage": [3, 1], "precision": "bf16"}),
        ("max_norm=0.5,enable_flash_attention=true,tp_size=1", None),
        ("zero_stage=3,offload_optimizer=/some/folder,dp_size=none", None),
    ],
)
def test_text_gives_options(text: str, options: dict | None) -> None:
    found = options_of_text(text)
    assert options is None or found == options
    HybridParallelPlugin.from_config(text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("tpp=2", "a layout has no option 'tpp'; use tp"),
        ("tp=2,zero_stge=1", "a layout has no option 'zero_stge'; use zero_stage"),
        ("tp=two", "tp_size='two' is not a positive integer"),
        ("tp=2,tp_size=2", "gives tp_size twice"),
        ("tp=", "where option=value is due"),
        ("tp2", "'tp2' is no file; give one of"),
        ("", "'' is no file"),
        ("tp=3", "world size 2 is not a multiple of tp_size"),
        ("auto,memory=much", "'much' is no amount of memory"),
    ],
)
def test_a_wrong_layout_starts_nothing(text: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ConfigurationError, match=None) as error:
        main(["--nproc-per-node", "2", "--layout", text, str(_JOB)])
    assert sentence in str(error.value) and VARIABLE not in os.environ


def test_two_layouts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "pp=2")
    with pytest.raises(ConfigurationError, match="--layout tp=2 and BOOSTER_LAYOUT=pp=2 are two layouts"):
        main(["--nproc-per-node", "2", "--layout", "tp=2", str(_JOB)])


def test_a_second_layout_in_one_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setenv(VARIABLE, "tp=2")
    install()
    install()
    monkeypatch.setenv(VARIABLE, "pp=2")
    with pytest.raises(ConfigurationError, match="BOOSTER_LAYOUT=pp=2 is a second layout of a process that runs under"):
        install()


def test_objects_are_made_of_derived_classes() -> None:
    """Of the class itself and of later subclasses, each of one derived class; nothing else changes."""

    class Known:
        def __init__(self, value: int) -> None:
            self.value = value

    takeover = Takeover("tp=2")
    takeover._make_by(Known, lambda given: type(given.__name__, (given,), {"is_boosted": True}))
    Later = type("Later", (Known,), {})  # noqa: N806
    made = [Known(1), Known(2), Later(3)]
    assert [each.value for each in made] == [1, 2, 3] and all(each.is_boosted for each in made)
    assert type(made[0]) is type(made[1]) and isinstance(made[2], Later) and not hasattr(Known, "is_boosted")
    with takeover._paused():
        assert type(Known(4)) is Known


def test_messages_have_the_words_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ConfigurationError("leave it out, or use HybridParallelPlugin(tp_size=2, precision='bf16')")
    assert Failure.of(error, "", 0).message.startswith(f"{error} (")
    monkeypatch.setenv(LAYOUT_VARIABLE, "1")
    assert Failure.of(error, "", 0).line() == "error: leave it out, or use --layout tp_size=2,precision=bf16"


def test_a_layout_that_no_start_has_read_is_refused(tmp_path: Path) -> None:
    """Without the installed file, in a script that joins the job by itself."""
    code = (
        "import os; os.environ['BOOSTER_LAYOUT'] = 'tp=2'; from booster import launch_from_torch; launch_from_torch()"
    )
    ended = subprocess.run([sys.executable, "-c", code], env=environment_of_a_job(), capture_output=True, text=True)
    assert ended.returncode == 1 and ended.stderr.startswith("error: BOOSTER_LAYOUT=tp=2 has no effect"), ended.stderr


def test_a_class_that_another_library_has_put_there_is_refused() -> None:
    module = ModuleType("accelerate.accelerator")
    module.Accelerator = type("Other", (), {"__module__": "elsewhere"})
    with pytest.raises(ConfigurationError, match=r"accelerate.accelerator.Other is elsewhere.Other in this process"):
        Takeover("tp=2")._take(module)


# ----- on ranks -----


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Losses of scripts in one process, each run when it is first asked for."""

    class Plain(dict):
        def __missing__(self, kind: str) -> torch.Tensor:
            folder = tmp_path_factory.mktemp(kind)
            ended = run([], kind, folder)
            assert ended.returncode == 0, ended.stderr
            self[kind] = losses_in(folder)
            return self[kind]

    return Plain()


_LIBRARIES = (
    "with_trainer",
    "with_subclass",
    "with_sft",
    "with_grpo",
    "with_accelerate",
    "with_lightning",
    "with_fabric",
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", _LIBRARIES)
@pytest.mark.parametrize("layout", ["tp=2", "pp=2,num_microbatches=2"])
def test_a_script_trains_the_same(kind: str, layout: str, plain: dict, tmp_path: Path) -> None:
    ended = booster_run(layout, kind, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert f"is boosted: tp {2 if 'tp' in layout else 1} x pp" in ended.stderr
    assert ended.stderr.count("is boosted") == 1
    torch.testing.assert_close(losses_in(tmp_path), plain[kind], **_EXACT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "start",
    [
        ["-m", "torch.distributed.run", "--nproc-per-node", "2"],
        ["-m", "booster", "run", "--elastic", "--max-ranks", "2"],
    ],
)
def test_the_variable_does_the_same(start: list[str], plain: dict, tmp_path: Path) -> None:
    """The folder on the path stands for the installed file, whose line calls the same."""
    paths = os.pathsep.join([str(_START), str(REPOSITORY)])
    ended = run(start, "with_trainer", tmp_path, **{VARIABLE: "tp=2", "PYTHONPATH": paths})
    assert ended.returncode == 0 and "is boosted: tp 2" in ended.stderr, ended.stderr
    torch.testing.assert_close(losses_in(tmp_path), plain["with_trainer"], **_EXACT)


@pytest.mark.slow
def test_accelerate_launch_does_the_same(plain: dict, tmp_path: Path) -> None:
    """`--multi_gpu` starts several ranks, also without GPUs."""
    start = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    paths = os.pathsep.join([str(_START), str(REPOSITORY)])
    ended = run(start, "with_accelerate", tmp_path, **{VARIABLE: "tp=2", "PYTHONPATH": paths})
    assert ended.returncode == 0 and "is boosted: tp 2" in ended.stderr, ended.stderr
    torch.testing.assert_close(losses_in(tmp_path), plain["with_accelerate"], **_EXACT)


def test_the_installed_file_calls_the_takeover() -> None:
    """As `site` reads it, twice as `booster run` does, without importing torch."""
    read = f"site.addsitedir({str(_START)!r}); "
    source = f"import site, sys; {read * 2}print(sys.meta_path, 'torch' in sys.modules)"
    for layout in ("tp=2", None):
        environment = environment_of_a_job(**({} if layout is None else {VARIABLE: layout}))
        out = subprocess.run([sys.executable, "-c", source], env=environment, capture_output=True, text=True).stdout
        assert ("Takeover" in out) == (layout is not None) and out.endswith("False\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sentence", "code"),
    [
        ("with_ddp", "steps an optimizer (SGD) in a loop of its own with a process group of its own", 2),
        ("with_fsdp", "TrainingArguments(fsdp=", 2),
        ("with_own_plugin", "gives a layout to a script that gives a plugin to BoostedTrainer", 2),
        ("with_replaced_trainer", "after transformers.Trainer was replaced by __main__", 2),
        ("with_error_on_one_rank", "error on rank 1: ZeroDivisionError", 1),
        ("without_training", "note: BOOSTER_LAYOUT=tp=2 was not used", 0),
    ],
)
def test_what_cannot_be_taken_over_is_said_once(kind: str, sentence: str, code: int, tmp_path: Path) -> None:
    ended = booster_run("tp=2", kind, tmp_path)
    assert (ended.returncode, ended.stderr.count(sentence)) == (code, 1), ended.stderr
    assert code == 1 or "Traceback" not in ended.stderr


@pytest.mark.slow
def test_a_model_that_does_not_allow_the_layout_is_refused(tmp_path: Path) -> None:
    ended = booster_run("tp=3", "with_trainer", tmp_path, ranks=3)
    assert ended.returncode == 2 and "num_attention_heads=4" in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.slow
def test_the_planner_chooses(plain: dict, tmp_path: Path) -> None:
    ended = booster_run("auto,memory=24GiB", "with_trainer", tmp_path)
    assert ended.returncode == 0 and "is boosted: tp" in ended.stderr, ended.stderr
    if "dp 1" in ended.stderr:
        torch.testing.assert_close(losses_in(tmp_path), plain["with_trainer"], **_EXACT)
