"""The families of the last twelve months are exact, or refused in one sentence, under every axis.

What breaks here first: a family whose new release computes something else between attention and experts. Look in
`shardformer/policies/plans/`. `python -m zoo_tests.campaigns.hot_families` runs all of them.
"""

from __future__ import annotations

import re

import pytest

from zoo_tests.campaigns.hot_families import EXACT, FAMILIES, FEATURES, LAYOUTS, Subject, judge

# (family, feature) -> the layouts under which it is exact
_SAMPLE: dict[tuple[str, str], tuple[str, ...]] = {
    ("gpt_oss", "router"): ("sp2", "ep2"),
    ("deepseek_v3", "packed"): ("cp2", "ep2"),
    ("glm_moe_dsa", "lora"): ("tp2",),
}
_REFUSED = re.compile(
    "needs a policy|cannot share the sequences|mixes tokens outside|makes its masks without|is sharded"
)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "feature"), _SAMPLE)
def test_a_sample_is_exact(family: str, feature: str) -> None:
    layouts = _SAMPLE[family, feature]
    assert dict(judge(Subject(family, feature), layouts)) == dict.fromkeys(layouts, EXACT)


@pytest.mark.campaign
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("family", FAMILIES)
def test_all_are_exact_or_refused(family: str, feature: str) -> None:
    subject = Subject(family, feature)
    if not subject.is_meaningful():
        pytest.skip(f"{family} has no loss of routers")
    layouts = [each for each in LAYOUTS if each != "ep2" or subject.has_experts()]
    verdicts = dict(judge(subject, layouts))
    assert not [each for each in verdicts.values() if each != EXACT and not _REFUSED.search(each)]
