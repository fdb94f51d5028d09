"""The census as a tool: what it counts, what a killed run leaves behind, and what it says of releases.

What fails here first: a reason that is counted as another outcome, and a page that does not read back.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from zoo_tests.campaigns.census.classes import HeadClass, head_classes
from zoo_tests.campaigns.census.jobs import judged
from zoo_tests.campaigns.census.known import known_from
from zoo_tests.campaigns.census.page import write_page
from zoo_tests.campaigns.census.releases import difference
from zoo_tests.campaigns.census.verdict import NO_ANSWER, NO_PLAN, Share, Verdict, append, kind_of, read_log

_LAYOUTS = ["tp2pp2", "tp2", "pp2"]
_REFUSAL = "booster.errors.ConfigurationError: X cannot be cut into pipeline stages; use pp_size=1"
_FAILING = Verdict(
    "exact", {"tp2pp2": _REFUSAL, "tp2": "exact", "pp2": "out[0] (Linear) is the first that differs"}, Share(0.5, 1.0)
)


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        ("exact", "exact"),
        (NO_PLAN, "refused"),
        (_REFUSAL, "refused"),
        ("RuntimeError: mat1 and mat2 shapes cannot be multiplied", "crashed"),
        ("torch.AcceleratorError: no", "crashed"),
        ("process ended: exit code -11", "crashed"),
        (f"{NO_ANSWER} within 240 s", "no answer"),
        ("the output of h.0 (Linear) is the first that differs, by 2e-01: 3 outputs before it agree", "differs"),
    ],
)
def test_outcomes_are_counted_apart(reason: str, outcome: str) -> None:
    assert kind_of(reason) == outcome


def test_what_both_axes_prove_is_not_trained_again() -> None:
    exact = Verdict("exact", {"tp2pp2": "exact"})
    assert exact.missing([*_LAYOUTS, "cp2"]) == ["cp2"]
    assert exact.outcome("tp2") == "exact" and exact.outcome("cp2") is None
    assert Verdict("no loss").missing(_LAYOUTS) == [] and Verdict("no loss").outcome("pp2") == "does not train plainly"


def test_a_log_that_was_cut_short_is_read_and_continued(tmp_path: Path) -> None:
    log = tmp_path / "census.jsonl"
    append(log, "a/A", Verdict("exact", {"tp2pp2": _REFUSAL}))
    with log.open("a") as file:
        file.write('{"class": "b/B", "pla')  # killed here
    append(log, "c/C", _FAILING)
    append(log, "a/A", _FAILING)
    assert read_log(log) == {"a/A": _FAILING, "c/C": _FAILING}


def test_the_page_reads_back(tmp_path: Path) -> None:
    page, heads = tmp_path / "page.md", head_classes()[:5]
    told = [_FAILING, Verdict("needs [a][b]"), Verdict("exact", {"tp2pp2": "exact"}, Share(0.25, None, 0.75))]
    refused = [f"booster.errors.ConfigurationError: cp_size=2 cannot share {head.name}[0]" for head in heads]
    told.append(Verdict("exact", {"tp2pp2": "exact", "cp2": refused[3]}))
    told.append(Verdict("exact", {"tp2pp2": "exact", "cp2": "exact"}, criterion="transformers: [a][b] has no loss"))
    told[0].layouts["cp2"], told[2].layouts["cp2"] = refused[0], "exact"
    write_page(page, dict(zip(heads, told, strict=True)), "5.0", [*_LAYOUTS, "cp2"])
    assert "| tp2 | 3 | 1 | 0 | 0 | 0 | 0 | 1 |" in page.read_text()
    assert "| cp2 | 1 | 1 | 0 | 2 | 0 | 0 | 1 |" in page.read_text()
    assert "**2** of them" in page.read_text() and "3 together" in page.read_text()
    both = f"| 2 | `{heads[0].name}`, `{heads[3].name}` |"
    assert rf"| cp2 | booster.errors.ConfigurationError: cp_size=2 cannot share CLASS\[0] {both}" in page.read_text()
    found = known_from(page, [*_LAYOUTS, "sp2", "cp2"])  # the page says nothing of sp2
    assert [found[f"{head.family}/{head.name}"] for head in heads] == told


def test_releases_are_compared() -> None:
    exact, refused = Verdict("exact", {"tp2pp2": "exact"}), Verdict("exact", {"tp2pp2": _REFUSAL, "tp2": "exact"})
    lines = difference(
        {"5.1": {"a": exact, "b": exact, "d": exact}, "5.2": {"a": refused, "c": exact, "d": exact}}, _LAYOUTS
    )
    assert lines[lines.index("## From 5.1 to 5.2") + 4 :] == [
        "| `c` | new | exact |",
        "| `b` | exact | gone |",
        "| `a` | exact | tp2pp2 refused, tp2 exact |",
    ]


@pytest.mark.campaign
def test_a_class_that_does_not_answer_is_given_up_and_others_go_on() -> None:
    """Neither a class without a module nor one over its time ends the census."""
    heads = [HeadClass("bert", "NoSuchFor"), HeadClass("bert", "BertForMultipleChoice")]
    [(_, missing), (_, exact)] = judged([(head, ["tp2"], None) for head in heads], num_jobs=1, limit_s=90)
    assert "NoSuchFor" in missing.plain and exact.layouts == {"tp2": "exact"} and exact.share.flops > 0.9
    [(_, late)] = judged([(heads[1], ["tp2"], None)], num_jobs=1, limit_s=0.05)
    assert late.outcome("tp2") == "no answer"
