"""Decompositions with tables that are kept: the graphs are torch's, and torch is left as it was."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fuseplan.torch import decomposing
from fuseplan.torch.decomposing import NAMES, run_decompositions

pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec:FutureWarning")  # torch's own
aten = torch.ops.aten
TABLE = {aten.copy.default: lambda dst, src, **_: src.expand_as(dst)}


class Mixed(nn.Module):  # type: ignore[misc]
    """Composite operators that stay (linear), others that do not (reshape, square_), and one of the table."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.drop(self.layer(x.reshape(-1, 8)))
        rows = nn.functional.scaled_dot_product_attention(rows[None], rows[None], rows[None])[0]
        rows[0] = rows[1]
        return torch.einsum("ij,kj->ik", rows.clone().square_(), rows)


@pytest.fixture
def program() -> torch.export.ExportedProgram:
    return torch.export.export(Mixed().eval(), (torch.randn(2, 3, 8),), strict=False)


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The tables of this test alone."""
    own: list[Any] = []
    monkeypatch.setattr(decomposing, "_made", own)
    return own


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    library = torch.library.Library("fuseplan_decomposing", "DEF")
    yield library
    library._destroy()


def test_the_graph_is_torchs(program: torch.export.ExportedProgram, made: list[Any]) -> None:
    wanted = program.run_decompositions(dict(TABLE))
    told = [wanted.graph_module.code]
    tables = []
    for _ in range(3):
        found = run_decompositions(program, TABLE)
        told.append(found.graph_module.code)
        tables.append(made[0])
        assert str(found.graph_signature) == str(wanted.graph_signature)
    assert len(set(told)) == 1
    for name in ("aten.linear.default", "aten.einsum.default", "aten.scaled_dot_product_attention.default"):
        assert name in "".join(map(str, (node.target for node in wanted.graph.nodes)))
    assert "aten.copy.default" not in told[0].replace("torch.ops.", "")
    assert tables[0] is tables[1] is tables[2]


def test_torch_is_left_as_it_was(program: torch.export.ExportedProgram) -> None:
    program.run_decompositions(dict(TABLE))  # after the first, torch's own leaves all as it finds it
    functions = [getattr(*each) for each in NAMES]
    fakes = dict(functions[2])
    operators = [aten.linear.default, aten.einsum.default, aten.reshape.default]
    kernels = [dict(each.py_kernels) for each in operators]
    for _ in range(2):
        run_decompositions(program, TABLE)
        assert [getattr(*each) for each in NAMES] == functions
        assert functions[2] == fakes
        assert [dict(each.py_kernels) for each in operators] == kernels
    with pytest.raises(AttributeError):
        run_decompositions(None, TABLE)
    assert [getattr(*each) for each in NAMES] == functions


def test_an_operator_that_is_registered_later_is_seen(
    program: torch.export.ExportedProgram, made: list[Any], library: torch.library.Library
) -> None:
    run_decompositions(program, TABLE)
    first = made[0]
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x + x, "CompositeImplicitAutograd")
    operator = torch.ops.fuseplan_decomposing.twice.default
    found = run_decompositions(program, TABLE)
    assert operator not in first.asked
    assert operator in made[0].asked
    assert found.graph_module.code == program.run_decompositions(dict(TABLE)).graph_module.code


def test_a_torch_of_other_names_makes_its_own_tables(
    program: torch.export.ExportedProgram, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decomposing, "NAMES", ((torch, "no_such_name"),))
    found = run_decompositions(program, TABLE)
    assert found.graph_module.code == program.run_decompositions(dict(TABLE)).graph_module.code
    assert not made
