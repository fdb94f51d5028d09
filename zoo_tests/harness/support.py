"""The support matrix: what the tests of this run have proved, family by family.

`pytest zoo_tests/parity --write-support` writes the page from what passed; a run of a part of the directory (`-k`)
writes the rows of the families that it trained. A run of the whole directory fails when the committed page says
anything else, and a run of its sample when the page denies what the sample proved. What no test proved reads "no", with
the number of the sentence of `support_reasons` that says why.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

from zoo_tests.harness.case import Case
from zoo_tests.harness.support_reasons import REASONS, SENTENCES

PAGE = Path(__file__).parents[2] / "docs" / "results" / "support.md"
_ROW = re.compile(r"\| \w+ \| (yes|no) ")
_PROOF = "proof"  # the property of a report that travels from the process of the test
FEATURES = (
    "tensor parallel",
    "pipeline",
    "tp · pp",
    "split-gather",
    "all-to-all",
    "attention backends",
    "fused norms",
    "fused operators",
    "recomputation",
    "heads",
)


class SupportMatrix:
    """Collects what passed; one object a process of the session, of which the one that hears all reports counts.

    Args:
        write: whether the page is written, and not compared.
        is_worker: whether another process hears the reports of this one.
    """

    def __init__(self, write: bool, is_worker: bool) -> None:
        self.write, self.is_worker = write, is_worker
        self.proved: dict[str, set[str]] = defaultdict(set)
        self.heads: dict[str, set[str]] = defaultdict(set)
        self.failed = False

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            case = getattr(item, "callspec", None) and item.callspec.params.get("case")
            if isinstance(case, Case):
                proof = (case.recipe.family, case.recipe.zoo_head.model_class, sorted(features_of(case)))
                item.user_properties.append((_PROOF, proof))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        proof = dict(report.user_properties).get(_PROOF)
        if report.when != "call" or proof is None:
            return
        if report.failed:
            self.failed = True
        if report.passed:
            family, model_class, features = proof
            self.proved[family].update(features)
            self.heads[family].add(model_class)

    def page(self, other_rows: str = "") -> str:
        """The page that this run proves, with the rows of the families that it did not train from another page."""
        lines = [
            "# What is supported, family by family",
            "",
            "Written by the tests from what passed: `pytest zoo_tests/parity --write-support`; do not edit. Each cell",
            "is training compared with plain transformers: losses, every gradient and every weight. A cell that no",
            'test proved reads "no", with the number of the reason, below the table.',
            "",
            f"| Family | {' | '.join(FEATURES)} |",
            "|---" * (len(FEATURES) + 1) + "|",
        ]
        rows = {line.split()[1]: line for line in other_rows.splitlines() if _ROW.match(line)}
        for family in self.proved:
            proved = self.proved[family]
            cells = ["yes" if feature in proved else _no(family, feature) for feature in FEATURES[:-1]]
            rows[family] = f"| {family} | {' | '.join(cells)} | {len(self.heads[family])} |"
        reasons = [f"{number}. {sentence}" for number, sentence in enumerate(SENTENCES, start=1)]
        return "\n".join([*lines, *(rows[family] for family in sorted(rows)), "", *reasons]) + "\n"

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.is_worker:
            return
        committed = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
        if self.write:
            PAGE.write_text(self.page("" if self._ran_everything(session) else committed), encoding="utf-8")
        elif self._ran_everything(session) and not self.failed and not self._agrees(session, committed):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            reporter = session.config.pluginmanager.get_plugin("terminalreporter")
            reporter.write_line(
                f"{PAGE.name} is not what these tests prove; run pytest zoo_tests/parity --write-support"
            )

    def _agrees(self, session: pytest.Session, committed: str) -> bool:
        if not session.config.option.sample:
            return committed == self.page()
        cells = cells_of(committed)
        proved = {(family, feature) for family, features in self.proved.items() for feature in features}
        return all(cells.get(where) == "yes" for where in proved)

    def _ran_everything(self, session: pytest.Session) -> bool:
        options, parity = session.config.option, Path(__file__).parents[1] / "parity"
        if options.keyword or options.markexpr or options.ignore or options.collectonly or session.shouldstop:
            return False
        return any(parity.is_relative_to(Path(arg.split("::")[0]).resolve()) for arg in session.config.args)


def cells_of(page: str) -> dict[tuple[str, str], str]:
    """(family, column) -> cell of a support page, without the column that counts heads."""
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if _ROW.match(line)]
    return {(row[0], column): cell for row in rows for column, cell in zip(FEATURES[:-1], row[1:-1], strict=True)}


def _no(family: str, feature: str) -> str:
    """The cell of what no test proved; without a number where no sentence says why, which the page's test refuses."""
    reason = REASONS.get((family, feature))
    return "no" if reason is None else f"no ({SENTENCES.index(reason) + 1})"


def features_of(case: Case) -> set[str]:
    """What a passing case proves."""
    sizes, options = case.sizes, dict(case.options)
    splits = case.sequence_parallel or options.get("sequence_parallelism_mode") == "split_gather"
    proofs = {
        "tensor parallel": sizes.tp_size > 1,
        "pipeline": sizes.pp_size > 1,
        "tp · pp": sizes.tp_size > 1 and sizes.pp_size > 1,
        "split-gather": splits,
        "all-to-all": options.get("sequence_parallelism_mode") == "all_to_all",
        "attention backends": bool(options.get("enable_flash_attention")),
        "fused norms": bool(options.get("enable_fused_normalization")),
        "fused operators": bool(options.get("enable_jit_fused")),
        "recomputation": options.get("gradient_checkpointing") == "full",
    }
    return {feature for feature, proved in proofs.items() if proved}
