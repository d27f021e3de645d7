"""Calls of plans in Inductor's programs: right whatever changed since the call before."""

from __future__ import annotations

import contextlib
import shutil
import unittest.mock
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fuseplan.torch import kernels
from fuseplan.torch.dynamo import compile_graph
from fuseplan.torch.sites import Site
from pretend_gpu import PretendQueue

F = nn.functional
PRODUCT = "linear(16) -> bias -> add -> relu"
Tensors = list[torch.Tensor]


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def _given() -> Tensors:
    return [torch.randn(16, 20), torch.randn(16), torch.randn(5, 16)]


def _wanted(src: torch.Tensor, given: Tensors) -> torch.Tensor:
    weight, bias, other = (each.double() for each in given)
    return F.relu(F.linear(src.double(), weight, bias) + other).float()


def _check(site: Site, src: torch.Tensor, given: Tensors) -> None:
    (made,) = site(PRODUCT, src, given, [])
    torch.testing.assert_close(made, _wanted(src, given), rtol=1e-5, atol=1e-5)


def test_a_site_sees_all_that_changes() -> None:
    site, src, given = Site(), torch.randn(5, 20), _given()
    for _ in range(3):
        _check(site, src, given)
    changes: tuple[Callable[[], object], ...] = (
        lambda: given[0].mul_(2),
        lambda: given[1].fill_(3),
        given[2].neg_,
        lambda: given.__setitem__(0, torch.randn(16, 20)),
        lambda: given.__setitem__(1, torch.randn(16)),
        lambda: given.__setitem__(2, torch.randn(5, 16)),
        lambda: setattr(given[0], "data", torch.randn(16, 20)),
        lambda: given.__setitem__(0, torch.randn(20, 16).t()),
        lambda: given.__setitem__(2, torch.randn(16, 5).t()),
        lambda: given.__setitem__(2, torch.randn(16).expand(5, 16)),
        lambda: given.__setitem__(2, torch._neg_view(torch.randn(5, 16))),
        lambda: given.__setitem__(2, torch.randn(81)[1:].view(5, 16)),
        lambda: given.__setitem__(0, nn.Parameter(torch.randn(16, 20))),
    )
    for change in changes:
        change()
        for _ in range(2):
            _check(site, src, given)
            src = torch.randn(5, 20)
    for other in (torch.randn(20, 5).t(), torch.randn(1, 20).expand(5, 20), torch._neg_view(src)):
        _check(site, other, given)
    given[2] = torch.randn(3, 16)
    _check(site, torch.randn(3, 20), given)
    with torch.inference_mode():
        given = _given()  # count no versions
        for _ in range(3):
            _check(site, torch.randn(3, 20)[:3], [*given[:2], given[2][:3]])
            given[0].mul_(2)
    _check(site, torch.randn(5, 20), _given())


def test_an_axis_of_one_element_has_any_stride() -> None:
    """Inductor writes 0."""
    site, src, weight = Site(), torch.randn(6, 20), torch.randn(16, 20)
    for step in (0, 1, 120, 7, 0):
        (made,) = site("[bsc] -> linear(16)", src.as_strided((1, 6, 20), (step, 20, 1)), [weight], [])
        torch.testing.assert_close(made, F.linear(src, weight)[None], rtol=1e-5, atol=1e-5)


def test_a_site_has_gradients_and_meta_tensors() -> None:
    site, src, given = Site(), torch.randn(5, 20), _given()
    _check(site, src, given)
    src.requires_grad_()
    with torch.enable_grad():
        site(PRODUCT, src, given, [])[0].sum().backward()
        _wanted(other := src.detach().clone().requires_grad_(), given).sum().backward()
    assert src.grad is not None
    torch.testing.assert_close(src.grad, other.grad, rtol=1e-4, atol=1e-5)
    (made,) = site(PRODUCT, src.detach().to("meta"), [each.to("meta") for each in given], [])
    assert made.is_meta
    _check(site, src.detach(), given)


def _outside(site: Site, operators: str, src: torch.Tensor, given: list[torch.Tensor]) -> list[torch.Tensor]:
    return site(operators, src, given, [])


def test_a_site_reads_parameters_and_gives_results() -> None:
    site, src = Site(), torch.randn(3, 16)
    for slope in (0.5, 0.25):
        (made,) = site("leaky_relu(0.125)", src, [], [slope])
        torch.testing.assert_close(made, F.leaky_relu(src, slope))
    given, called = [torch.randn(4, 16)], Site()
    for _ in range(3):
        for run in (partial(_outside, site), called.inside):
            made, before = run("linear(4) -> save(before) -> relu", src, given)
            torch.testing.assert_close(before, F.linear(src, *given), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(made, F.relu(before))
        src = torch.randn(3, 16)
    assert site._known is not None
    assert called._known is not None


def test_a_site_copies_operands_that_lie_otherwise() -> None:
    site, src = Site(), torch.randn(5, 20)
    for _ in range(3):
        given = [*_given()[:2], torch.randn(16, 5).t()]
        _check(site, src, given)
        assert site._known is not None
        assert [*site._known.moved] == [2]
    _check(site, src, _given())
    known: Any = site._known  # another one than before
    assert not known.moved


@pytest.mark.parametrize("is_expanded", [False, True])
def test_a_site_knows_ranges_that_begin_anywhere_and_repeated_rows(is_expanded: bool) -> None:
    """A CPU's kernel reads elements wherever they lie; it reads a copy of those that share memory."""
    site, whole, other = Site(), torch.randn(6, 9), torch.randn(6, 8)
    how: dict[str, Any] = {"autospec": True, "side_effect": Site._learnt}
    with unittest.mock.patch.object(Site, "_learnt", **how) as learnt:
        for _ in range(3):
            whole.uniform_()
            src = whole[:1, 1:].expand(6, 8) if is_expanded else whole[:, 1:]
            (made,) = site("mul", src, [other], [])
            torch.testing.assert_close(made, src * other)
    assert learnt.call_count == 1


def test_a_site_updates_no_result_of_the_call_before() -> None:
    """Running statistics: each call copies the old ones, and gives new ones."""
    site, norm = Site(), nn.BatchNorm2d(6)
    for _ in range(3):
        src, old = torch.randn(4, 6, 5, 5), [norm.running_mean.clone(), norm.running_var.clone()]
        given = [norm.weight, norm.bias, *map(torch.clone, old)]
        made, *results = site("batch_norm_training(running=True, saved=False)", src, given, [])
        torch.testing.assert_close(made, norm(src), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(results, [norm.running_mean, norm.running_var])
        torch.testing.assert_close(given[2:], old)
    assert site._known is not None


def test_a_site_of_an_open_plan_has_a_kernel_for_all_extents() -> None:
    site, given = Site(), [torch.randn(8, 16), torch.randn(8)]
    for rows in (3, 3, 5, 3):
        src = torch.randn(rows, 16)
        (made,) = site("[*mc] -> linear(8) -> bias", src, given, [])
        torch.testing.assert_close(made, F.linear(src, *given), rtol=1e-5, atol=1e-5)


def test_statistics_that_torch_writes_without_counting_are_seen() -> None:
    site, norm, src = Site(), nn.BatchNorm2d(6), torch.randn(4, 6, 5, 5)
    for _ in range(3):
        norm.train()(torch.randn(4, 6, 5, 5))
        given = [norm.running_mean, norm.running_var, norm.weight, norm.bias]
        norm.eval()
        (made,) = site("batch_norm", src, given, [])
        torch.testing.assert_close(made, norm(src), rtol=1e-4, atol=1e-5)


def test_threads_share_a_site() -> None:
    site, sets = Site(), [(torch.randn(5, 20), _given()) for _ in range(2)]

    def call(which: int) -> None:
        with torch.no_grad():
            for _ in range(200):
                _check(site, *sets[which])

    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(call, which) for which in range(2)]:
            each.result()


def test_weights_that_a_graph_packs_are_packed_again_for_other_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = PretendQueue(0)
    monkeypatch.setattr(kernels, "_queue", lambda target: queue)
    with contextlib.ExitStack() as stack:
        for each in (kernels._kernel_of, kernels._compiled):
            each.cache_clear()
            stack.callback(each.cache_clear)
        site, src, given = Site(), torch.randn(5, 20), _given()
        queue.capturing = True
        for _ in range(2):
            _check(site, src, given)
        assert site._last is None
        queue.capturing = False
        for _ in range(2):
            _check(site, src, given)
        assert site._last is not None


def test_tables_that_each_call_makes_anew_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's kernel that takes an operand as torch stores it is not bound again for another one."""
    monkeypatch.setattr(kernels, "_queue", lambda target: PretendQueue(0))
    with contextlib.ExitStack() as stack:
        for each in (kernels._kernel_of, kernels._compiled):
            each.cache_clear()
            stack.callback(each.cache_clear)
        site = Site()
        for _ in range(4):
            src, angles = torch.randn(2, 3, 64, 32), torch.randn(64, 16)
            (made,) = site("[bhsd] -> rotary", src, [angles.cos(), angles.sin()], [])
            first, second = src.chunk(2, -1)
            turned = (
                first * angles.cos() - second * angles.sin(),
                second * angles.cos() + first * angles.sin(),
            )
            torch.testing.assert_close(made, torch.cat(turned, -1))
        assert site._known is not None
        assert not site._known.packed
        assert not site._known.kernel._packed


class Sums(nn.Module):  # type: ignore[misc]
    """Operators of which no plan has a row, one behind the other."""

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        return src.cumprod(-1).cumprod(-2)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, of Inductor's imports
def test_where_plans_leave_nothing_to_fuse_inductor_compiles_nothing() -> None:
    module = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 8), nn.Softmax(-1))
    torch._dynamo.reset()
    compiled = torch.compile(module, backend=compile_graph, dynamic=False, options={"rest": "inductor"})
    with unittest.mock.patch("fuseplan.torch.inductor.compiled", side_effect=AssertionError):
        for _ in range(3):
            src = torch.randn(5, 20)
            torch.testing.assert_close(compiled(src), module(src))
            module[0].weight.mul_(1.5)


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles kernels for the CPU with g++")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, of Inductor's imports
def test_inductors_programs_have_sites() -> None:
    from torch._inductor.utils import run_and_get_code

    module = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 8), Sums())
    torch._dynamo.reset()
    compiled = torch.compile(module, backend=compile_graph, dynamic=False, options={"rest": "inductor"})
    src = torch.randn(5, 20)
    with torch._inductor.config.patch(fx_graph_cache=False):
        made, (text, *_) = run_and_get_code(compiled, src)
    assert text.count("FuseplanSite()") == 2
    assert "= torch.ops.fuseplan.run" not in text
    for _ in range(3):
        torch.testing.assert_close(made, module(src))
        src = torch.randn(5, 20)
        module[0].weight.mul_(1.5)
        made = compiled(src)
