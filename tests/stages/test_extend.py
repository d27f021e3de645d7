"""Operators and templates from outside the package."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest

import fuseplan
from fuseplan import ops
from fuseplan.backends import backend_of
from fuseplan.backends.cpu.templates.pointwise import Pointwise
from fuseplan.errors import ArgumentError, PlanError
from fuseplan.kernels.template import Template
from fuseplan.language.declarations import operand, parameter
from fuseplan.op import Elementwise, Op, operator
from fuseplan.scalar import Scalar
from fuseplan.stores import foreign

PLUGIN = """
from dataclasses import dataclass
from typing import ClassVar

from fuseplan.backends.cpu.templates.pointwise import Pointwise


@dataclass(frozen=True)
class Plugged(Pointwise):
    name: ClassVar[str] = "plugged"

    @classmethod
    def candidates(cls, kernel, target, accuracy):
        for known in Pointwise.candidates(kernel, target, accuracy):
            yield cls({vectors}, known.repeat, known.block_rows, known.block_run, known.stream)
"""


pytestmark = pytest.mark.usefixtures("registries")


def tripled(factor: float = 3.0, name: str = "tripled") -> type[Elementwise]:
    @operator
    class Tripled(Elementwise):
        """y = factor * x + shift * power"""

        shift = operand("channel")
        power: float = parameter(default=1.0)

        def apply(self, x: Scalar, shift: Scalar, power: Scalar) -> Scalar:
            return x * factor + shift * power

    Tripled.name = name
    return Tripled


def test_a_registered_operator_is_one_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = tripled()
    assert fuseplan.register_operator(kind) is kind
    text = "f32[2x3] -> matmul(4) -> tripled(0.5) -> relu"
    plan = fuseplan.FusionPlan.parse(text)
    assert str(plan) == text
    assert fuseplan.FusionPlan.from_json(plan.to_json()) == plan
    rng = np.random.default_rng(0)
    src = rng.standard_normal((2, 3)).astype(np.float32)
    given = {"weight": rng.standard_normal((3, 4)).astype(np.float32), "shift": np.ones(4, np.float32)}
    want = np.maximum(3 * (src @ given["weight"]) + 0.5, 0)
    for target in ("cpu", "reference"):
        got = fuseplan.compile(plan, target)(src, **given)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert fuseplan.explain(plan, "triton:sm_90").is_fused
    with pytest.raises(PlanError, match="`tripled`"):
        fuseplan.FusionPlan.parse("f32[2x3] -> trippled")


def test_an_operators_formula_is_in_the_key_of_its_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path / "cache"))
    src, shift = np.ones((2, 3), np.float32), np.zeros(3, np.float32)
    keys = set()
    for factor in (3.0, 5.0):
        fuseplan.register_operator(tripled(factor))  # defined again, as a notebook's cell is
        compiled = fuseplan.compile("f32[2x3] -> tripled")
        np.testing.assert_array_equal(compiled(src, shift=shift), np.full((2, 3), factor, np.float32))
        keys.add(compiled.program.key)
    assert len(keys) == 2


class Undecorated(Elementwise):
    """y = x"""

    name = "undecorated"

    def apply(self, x: Scalar) -> Scalar:
        return x


@operator
class Forgetful(Elementwise):
    """y = x"""

    def apply(self, x: Scalar) -> Scalar:
        raise KeyError("nothing here")


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (tripled(name="relu"), r"`relu` is an operator already, fuseplan\.ops\.activation\.Relu"),
        (tripled(name="two words"), "is a word in a plan's text; got 'two words'"),
        (tripled(name="x"), "is a word in a plan's text; got 'x'"),
        (Undecorated, "decorate it with fuseplan.op.operator"),
        (Forgetful, "a sample of forgetful fails: 'nothing here'"),
        (ops.BY_NAME["conv2d"], "is not an elementwise operator"),
        (tripled()(), "is not an elementwise operator"),
        (int, "is not an elementwise operator"),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", "an object"),
)
def test_what_cannot_be_an_operator_is_refused(kind: Any, says: str) -> None:
    before = dict(ops.BY_NAME)
    with pytest.raises(ArgumentError, match=says):
        fuseplan.register_operator(kind)
    assert before == ops.BY_NAME


def test_another_class_of_a_registered_name_is_refused() -> None:
    fuseplan.register_operator(tripled())

    @operator
    class Other(Elementwise):
        """y = x"""

        name: ClassVar[str] = "tripled"

        def apply(self, x: Scalar) -> Scalar:
            return x

    with pytest.raises(ArgumentError, match=r"`tripled` is an operator already, .*Tripled"):
        fuseplan.register_operator(Other)
    assert ops.BY_NAME["tripled"].__name__ == "Tripled"


# ---- templates


def plugin(folder: Path, vectors: int) -> ModuleType:
    """A module outside of fuseplan with a template, as its file says now."""
    (folder / "plugin_of_a_test.py").write_text(PLUGIN.format(vectors=vectors))
    importlib.invalidate_caches()
    sys.modules.pop("plugin_of_a_test", None)
    return importlib.import_module("plugin_of_a_test")


def test_a_registered_template_is_chosen_among_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path / "cache"))
    src = np.linspace(-1, 1, 256, dtype=np.float32).reshape(4, 64)
    keys = set()
    for vectors in (2, 8):
        kind = plugin(tmp_path, vectors).Plugged
        assert fuseplan.register_template(kind) is kind
        compiled = fuseplan.compile("f32[4x64] -> relu", template="plugged")
        assert compiled.choice.template.knobs["vectors"] == vectors
        np.testing.assert_array_equal(compiled(src), np.maximum(src, 0))
        keys.add(compiled.program.key)
    assert len(keys) == 2
    names = [each.name for each in backend_of("cpu").templates]
    assert names.count("plugged") == 1, "defined again, it replaces itself"
    told = str(fuseplan.explain("f32[4x64] -> relu"))
    assert "plugged(" in told
    assert "pointwise(" in told


def test_the_sources_of_a_template_from_outside_are_in_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    plain, same = plugin(tmp_path, 2).Plugged, plugin(tmp_path, 2).Plugged
    changed = PLUGIN.format(vectors=2) + "# and a comment"
    first, second = foreign.fingerprint(plain), foreign.fingerprint(same)
    assert first == second
    (tmp_path / "plugin_of_a_test.py").write_text(changed)
    sys.modules.pop("plugin_of_a_test")
    third = foreign.fingerprint(importlib.import_module("plugin_of_a_test").Plugged)
    assert third not in (first, "")
    assert foreign.fingerprint(Pointwise) == "", "fuseplan's own sources are in every key"


def test_every_file_of_a_package_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "package_of_a_test"
    folder.mkdir()
    (folder / "__init__.py").write_text(PLUGIN.format(vectors=2))
    (folder / "writer.py").write_text("")
    kind = importlib.import_module("package_of_a_test").Plugged
    before = foreign.fingerprint(kind)
    foreign.fingerprint.cache_clear()
    (folder / "writer.py").write_text("STEP = 2")
    assert foreign.fingerprint(kind) != before


def test_a_template_without_a_file_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    namespace: dict[str, Any] = {"__name__": "cell_of_a_notebook"}
    monkeypatch.setitem(sys.modules, "cell_of_a_notebook", ModuleType("cell_of_a_notebook"))
    exec(compile(PLUGIN.format(vectors=2), "a cell", "exec", dont_inherit=True), namespace)
    fuseplan.register_template(namespace["Plugged"])
    program = fuseplan.compile("f32[4x64] -> relu", template="plugged").program
    assert (program.key, program.origin) == ("", "compiled")


@dataclass(frozen=True)
class Unfinished(Template):
    """A template without methods."""

    name: ClassVar[str] = "unfinished"


@dataclass(frozen=True)
class Namesake(Pointwise):
    """A template of a name that there is."""


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Unfinished, "is not a template: .* with all its methods"),
        (Op, "is not a template"),
        (Namesake, r"`pointwise` is a template of cpu already, fuseplan\..*\.Pointwise"),
    ],
)
def test_what_cannot_be_a_template_is_refused(kind: Any, says: str) -> None:
    before = backend_of("cpu").templates
    with pytest.raises(ArgumentError, match=says):
        fuseplan.register_template(kind)
    assert backend_of("cpu").templates == before
    with pytest.raises(ArgumentError, match="no backend is named 'cuda'"):
        fuseplan.register_template(Namesake, backend="cuda")
