"""What a notebook shows of plans and what comes of them, and what completion offers."""

from __future__ import annotations

import dataclasses
from html.parser import HTMLParser

import pytest

import fuseplan
from fuseplan.kernels.target import KINDS

PLAN = 'f32[2x8] -> matmul(4) -> bias -> elementwise("where(x > a, x, -x) * 1", a=0.5)'


class Reader(HTMLParser):
    """Collects the text of HTML, and checks that every tag is closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        assert tag in ("table", "tr", "th", "td", "code", "pre"), "no scripts, images or links"
        assert not attrs
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data + " "


def test_a_plan_is_a_table_of_its_operators() -> None:
    html = fuseplan.FusionPlan.parse(PLAN)._repr_html_()
    words = Reader(html).words
    for told in ("matmul(4)", "weight: f32[8x4]", "bias: f32[4]", "f32[2x4]", "where(x > a, x, -x) * 1"):
        assert told in words
    assert "x &gt; a" in html, "escaped"
    assert len(html) < 1500


def test_a_compiled_plan_says_where_and_how_it_runs() -> None:
    compiled = fuseplan.compile(PLAN, "reference")
    words = Reader(compiled._repr_html_()).words
    for told in ("reference", compiled.choice.template.text, "matmul(4)"):
        assert told in words


@pytest.mark.parametrize("text", [PLAN, "f32[2x8] -> matmul(4) -> matmul(4)"], ids=["fused", "refused"])
def test_an_explanation_is_its_text(text: str) -> None:
    told = fuseplan.explain(text, "cpu:avx2")
    assert Reader(told._repr_html_()).words.strip() == str(told)


def test_a_source_shows_its_text() -> None:
    compiled = fuseplan.compile(PLAN)
    source = compiled.source
    assert repr(source) == source.text
    assert "define" in repr(source)
    assert repr(dataclasses.replace(source, text="")).startswith(f"<source of {source.entry}, whose text")
    assert source.text not in repr(compiled.program)


def test_a_target_is_shown_in_a_line() -> None:
    assert repr(KINDS["triton:sm_90"]) == "<target triton:sm_90: NVIDIA H100 80GB HBM3, 132 processors>"
    assert repr(KINDS["reference"]) == "<target reference: 1 thread>"
    assert "+avx2" not in repr(fuseplan.compile(PLAN).target)


def test_completion_shows_public_names_alone() -> None:
    assert dir(fuseplan) == sorted([*fuseplan.__all__, "__version__", "op", "scalar"])
    assert all(hasattr(fuseplan, name) for name in dir(fuseplan))
    with pytest.raises(AttributeError, match="no attribute 'register_rule'"):
        getattr(fuseplan, "register_rule")  # noqa: B009
