"""Format the verdict of a comparison as text."""

from __future__ import annotations

from plugins.hybrid_parallel.verify.compare import TOLERANCES, Difference, Verdict, Worst


def to_text(verdict: Verdict, precision: str) -> list[str]:
    """Return lines of text: "equal" or the first difference, then the largest difference of each kind."""
    first, untrained = verdict.first, verdict.untrained
    lines = [_in_a_line(first)]
    for worst in verdict.worst:
        where = f" ({worst.name})" if worst.name and worst.value > 0 else ""
        gap = f"largest relative difference {worst.value:.1e}, allowed {allowed(worst, precision):.0e}"
        lines.append(f"  {worst.count:>4} {worst.what:<22} {gap}{where}")
    if untrained:
        lines.append(f"  {len(untrained):>4} parameters that the batch does not reach were not judged ({untrained[0]})")
    return lines


def allowed(worst: Worst, precision: str) -> float:
    """Return the largest relative difference that is tolerated for this kind."""
    tolerance = TOLERANCES[precision]
    return tolerance.loss if worst.what == "losses" else tolerance.tensor


def _in_a_line(first: Difference | None) -> str:
    if first is None:
        return "equal"
    return f"failed: {first.text}" if first.what == "failure" else f"different: step {first.step}, {first.text}"
