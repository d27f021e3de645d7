"""Exported graphs that are kept: read where a call computes what it did, exported again where it does not."""

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

import fuseplan.torch as fused
from fuseplan.settings import environment
from fuseplan.torch import exporting

F = nn.functional
SCALE = [2.0]


class Straight(torch.autograd.Function):  # type: ignore[misc]
    """Rounding with the gradient of the identity."""

    @staticmethod
    def forward(ctx: object, src: torch.Tensor) -> torch.Tensor:
        return src.round()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Model(nn.Module):  # type: ignore[misc]
    """What a record has to tell: settings, closures, globals, literals, in-place writes, several results."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 4)
        self.limit, self.sizes, self.rounded = 3.0, [4, 1], torch.round
        factor = 0.5
        self.scaled: Callable[[torch.Tensor], torch.Tensor] = lambda src: src * factor * SCALE[0]

    def forward(self, src: torch.Tensor, shift: float = 0.25) -> dict[str, torch.Tensor]:
        inner = self.norm(self.conv(src)).relu_().clamp(max=self.limit)
        inner = self.scaled(inner).mean((2, 3)) + torch.tensor([0.5, 1.0, -1.0, shift])
        return {"inner": inner, "out": self.rounded(self.head(inner)).view(-1, *self.sizes)}


def _noted(
    given: list[nn.Module], export: Callable[..., exporting.Exported]
) -> Callable[..., exporting.Exported]:
    def noted(module: nn.Module, *rest: object) -> exporting.Exported:
        given.append(module)
        return export(module, *rest)

    return noted


@pytest.fixture
def exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[nn.Module]]:
    """The modules that torch.export is given from now on, in a cache folder of their own."""
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path / "cache"))
    given: list[nn.Module] = []
    plain = exporting._exported
    with patch.object(exporting, "_exported", _noted(given, plain)):
        yield given


@pytest.fixture(scope="module")
def small() -> exporting.Exported:
    """An exported graph that no test looks at."""
    return exporting._exported(nn.ReLU(), (torch.ones(2),), {}, torch.device("cpu"))


@pytest.fixture
def looks(exports: list[nn.Module], small: exporting.Exported) -> Iterator[list[nn.Module]]:
    """Likewise, and nothing is exported."""
    with patch.object(exporting, "_exported", _noted(exports, lambda *_: small)):
        yield exports


def _same(module: nn.Module, made: nn.Module, src: torch.Tensor) -> None:
    """Values and gradients are the module's own."""
    found = []
    for each in (module, made):
        module.zero_grad()
        results = each(src)
        sum(each.square().sum() for each in results.values()).backward()
        found.append([*results.values(), *(each.grad.clone() for each in module.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_a_call_that_computes_the_same_is_not_exported_again(exports: list[nn.Module]) -> None:
    module, src = Model().eval(), torch.randn(2, 3, 6, 6)
    first, again = fused.fuse(module, src), fused.fuse(module, src)
    twin = fused.fuse(Model().eval(), torch.randn(2, 3, 6, 6))
    assert exports == [module]
    for made in (again, twin):
        assert str(made.fusion.cut.graph) == str(first.fusion.cut.graph)
        assert made.report == first.report
        assert [site.plan for site in made.fusion.cut.sites] == [site.plan for site in first.fusion.cut.sites]
    _same(module, again, src)


class Choosing(nn.Module):  # type: ignore[misc]
    """It asks operators for numbers, alone and beside tensors, as attention on a GPU does."""

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        kernel = torch.ops.aten._fused_sdp_choice(src, src, src)
        made, _, length, *_ = torch.ops.choosing.attention(src, 3)
        return made * (2.0 if kernel == 0 else 3.0) * length


@pytest.fixture
def choosing() -> Iterator[None]:
    """An operator that returns a tensor, None, and a number."""
    with torch.library._scoped_library("choosing", "FRAGMENT") as library:
        library.define("attention(Tensor src, int length) -> (Tensor, Tensor, SymInt)")
        library.impl("attention", lambda src, length: (src * 1, src + 1, length), "CompositeExplicitAutograd")
        yield


@pytest.mark.usefixtures("choosing")
def test_numbers_that_operators_return_are_told(looks: list[nn.Module]) -> None:
    module, src = Choosing(), torch.ones(1, 2, 8, 8)
    exporting.exported(module, (src,), {})
    exporting.exported(module, (src,), {})
    assert len(looks) == 1


def _limit(module: Model) -> None:
    module.limit = 0.5


def _sizes(module: Model) -> None:
    module.sizes = [2, 2]


def _closure(module: Model) -> None:
    factor = 3.0
    module.scaled = lambda src: src * factor * SCALE[0]


def _hook(module: Model) -> None:
    module.norm.register_forward_hook(lambda _, __, made: made + 1)


def _gradient(module: Model) -> None:
    module.rounded = Straight.apply


def _unrecorded(module: Model) -> None:
    plain = module.scaled
    module.scaled = torch.no_grad()(plain)


def _tied(module: Model) -> None:
    module.head.bias = module.norm.bias


def _frozen(module: Model) -> None:
    module.conv.weight.requires_grad_(False)


def _forward(module: Model) -> None:
    plain = module.conv.forward
    module.conv.forward = lambda src: plain(src.flip(-1)) if torch.compiler.is_exporting() else None


def _cast(module: Model) -> None:
    module.scaled = lambda src: (src.double() * 1.5).float()


CHANGES = (_limit, _sizes, _closure, _hook, _gradient, _unrecorded, _tied, _frozen, _forward, _cast)


def _looked_up(module: nn.Module, *inputs: object) -> None:
    exporting.exported(module, inputs, {})


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_call_that_computes_something_else_is_exported(
    change: Callable[[Model], None], looks: list[nn.Module]
) -> None:
    module, src = Model().eval(), torch.randn(2, 3, 6, 6)
    _looked_up(module, src)
    change(module)
    for _ in range(2):
        _looked_up(module, src)
        assert looks == [module, module]


def test_globals_patched_functions_and_other_examples_are_seen(
    looks: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, src = Model().eval(), torch.randn(2, 3, 6, 6)
    _looked_up(module, src)
    monkeypatch.setitem(globals(), "SCALE", [0.125])
    _looked_up(module, src)
    plain = F.linear
    monkeypatch.setattr(F, "linear", lambda *args: plain(*args) * 2)
    _looked_up(module, src)
    assert len(looks) == 3
    for other in ((src[:1],), (src.to(memory_format=torch.channels_last),), (src, 0.5)):
        count = len(looks)
        _looked_up(module, *other)
        _looked_up(module, *other)
        assert len(looks) == count + 1


class Unseen(nn.Module):  # type: ignore[misc]
    """A tensor that is no buffer, or a call that writes into a list."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.calls, self.seen = 0, list[int]()
        self.writes, self.table = writes, torch.ones(4)

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        if self.writes:
            self.calls += 1
            self.seen.append(self.calls)
        return (src * 2).relu() if self.writes else (src * self.table).relu()


@pytest.mark.parametrize("writes", [True, False])
def test_calls_that_no_record_tells_are_exported_each_time(looks: list[nn.Module], writes: bool) -> None:
    module, src = Unseen(writes=writes), torch.randn(3, 4)
    for count in (1, 2):
        _looked_up(module, src)
        assert len(looks) == count
    assert (module.calls, module.seen) == (0, [])


@pytest.mark.parametrize(("writes", "why"), [(True, "the call writes into a list"), (False, "Tensor")])
def test_a_report_tells_why_a_start_is_not_kept(exports: list[nn.Module], writes: bool, why: str) -> None:
    src = torch.randn(3, 4)
    for _ in range(2):
        report = fused.fuse(Unseen(writes=writes), src).report
        assert why in report.unkept
        assert f"the next start exports the model again: {report.unkept}" in str(report)
    assert len(exports) == 2
    assert fused.fuse(nn.ReLU(), src).report.unkept == ""


def test_a_report_tells_that_open_extents_are_not_kept(exports: list[nn.Module]) -> None:
    batch = ({0: torch.export.Dim("batch")},)
    assert "open" in fused.fuse(nn.Linear(4, 4), torch.randn(3, 4), dynamic_shapes=batch).report.unkept


class Windows(nn.Module):  # type: ignore[misc]
    """It writes the size of a window, and pools along one axis of an image that lies channels-last.

    torch's average calls `as_strided_` on its result there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.size = 7

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        self.size = min(self.size, src.shape[1])
        parts = src.unflatten(1, (-1, self.size)).relu().flatten(1, 2)
        return F.adaptive_avg_pool1d(parts.transpose(1, 2), 1).flatten(1)


def test_written_numbers_and_changed_strides_are_told(exports: list[nn.Module]) -> None:
    src = torch.randn(2, 5, 6)
    for _ in range(2):
        module = Windows()
        made = fused.fuse(module, src)
        assert made.report.unkept == ""
        torch.testing.assert_close(made(src), Windows()(src))
    assert len(exports) == 1
    small = Windows()
    small.size = 1
    fused.fuse(small, src)
    assert len(exports) == 2


class Restrided(nn.Module):  # type: ignore[misc]
    """A tensor of the call that is given other extents in place."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = [length]

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        made = src * 2
        made.transpose_(0, 1).unsqueeze_(0)
        return made[:, : self.length[0]].relu()


def test_operators_that_change_extents_in_place_are_told(exports: list[nn.Module]) -> None:
    src = torch.randn(3, 4)
    for length, count in ((2, 1), (2, 1), (3, 2)):
        made = fused.fuse(Restrided(length), src)
        torch.testing.assert_close(made(src), Restrided(length)(src))
        assert (made.report.unkept, len(exports)) == ("", count)


MODEL = """
import sys, torch
from torch import nn

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(128, 4)
        self.other, self.one, self.two = nn.Conv2d(3, 4, 3), nn.Linear(4, 8), nn.Linear(4, 8)

    def forward(self, src):
        src = nn.functional.interpolate(src, scale_factor=2.0)
        joined = torch.cat([self.norm(self.conv(src)).relu(), self.other(src)], 1)
        made = self.head(joined.flatten(1)).softmax(-1)
        return self.one(made).softmax(-1), self.two(made).softmax(-1)
"""
CHILD = """
import fuseplan.torch
module = Own().eval()
made = fuseplan.torch.fuse(module, torch.ones(1, 3, 3, 3))
print([name for name in ("sympy", "torch._dynamo", "torch.export._trace") if name in sys.modules])
print(len(made.fusion.cut.sites))
"""


def test_a_second_start_imports_neither_a_tracer_nor_a_solver(
    exports: list[nn.Module], tmp_path: Path
) -> None:
    (tmp_path / "own_model.py").write_text(MODEL)
    with patch.object(sys, "path", [str(tmp_path), *sys.path]):
        made = importlib.import_module("own_model").Own().eval()
        sites = fused.fuse(made, torch.ones(1, 3, 3, 3)).fusion.cut.sites
    folders = f"{tmp_path}:{environment().get('PYTHONPATH', '')}"
    command = [sys.executable, "-c", "import sys, torch\nfrom own_model import Own" + CHILD]
    child = subprocess.run(
        command, env=environment(PYTHONPATH=folders), capture_output=True, text=True, check=False
    )
    assert child.stdout.split("\n")[:2] == ["[]", str(len(sites))], child.stderr
    assert len(exports) == 1
