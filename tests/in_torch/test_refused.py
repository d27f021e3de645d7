"""What fuse and the backend of torch.compile refuse, and what the errors say."""

import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn

import fuseplan.torch as fused
from fuseplan.errors import ArgumentError
from fuseplan.torch.dynamo import compile_graph


def _compiled(module: nn.Module, **options: object) -> Callable[..., torch.Tensor]:
    torch._dynamo.reset()
    return torch.compile(module, backend=compile_graph, options=options)  # type: ignore[no-any-return]


def test_modules_that_cannot_be_exported_are_refused() -> None:
    class Forked(nn.Module):  # type: ignore[misc]
        def forward(self, src: torch.Tensor) -> torch.Tensor:
            return src + 1 if src.sum() > 0 else src

    with pytest.raises(ArgumentError, match=r"torch.export does not take Forked: "):
        fused.fuse(Forked(), torch.randn(3))
    with pytest.raises(ArgumentError, match=r"writes into running_mean, .*: call .eval"):
        fused.fuse(nn.BatchNorm2d(3), torch.randn(2, 3, 8, 8))
    with pytest.raises(ArgumentError, match=r"on one device; got cpu, meta"):
        fused.fuse(nn.Linear(3, 3), torch.randn(3, 3, device="meta"))
    with pytest.raises(ArgumentError, match="on one device; got none"):
        fused.fuse(nn.Identity(), 3)
    with pytest.raises(ArgumentError, match=r"does `module\(\*example_inputs\)` run\?"):
        fused.fuse(nn.Linear(3, 3))
    with pytest.raises(ArgumentError, match=r"fuse takes an nn.Module .* got a function"):
        fused.fuse(_compiled, torch.randn(3))


def test_an_example_of_another_shape_is_told_without_logs(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(
        ArgumentError, match=r"same reduction dim.*\n  does `module.*` run\? If so, torch.compile"
    ):
        fused.fuse(nn.Linear(3, 4), torch.zeros(2, 5))
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch's own
def test_a_scripted_submodule_is_for_torch_compile() -> None:
    """torch.export fails within it, by an error such as a call with other arguments gives."""
    module = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(4, 3), nn.ReLU())), nn.Linear(3, 2))
    src = torch.randn(5, 4)
    with pytest.raises(
        ArgumentError, match=r"run\? If so, torch.compile\(module, backend=.fuseplan.\) takes"
    ):
        fused.fuse(module, src)
    with torch.no_grad():
        torch.testing.assert_close(_compiled(module)(src), module(src))


@pytest.mark.parametrize(
    ("axis", "count", "remedy"),
    [(0, 1, "an example with an extent of 2 or more"), (1, 16, "leave it out of")],
)
def test_open_extents_that_are_fixed_are_named(axis: int, count: int, remedy: str) -> None:
    src = torch.randn(1 if axis == 0 else 4, 16)
    with pytest.raises(
        ArgumentError, match=rf"opens rows, and its graph has rows = {count} alone\n.*{remedy}"
    ):
        fused.fuse(nn.Linear(16, 8), src, dynamic_shapes=({axis: torch.export.Dim("rows")},))


def test_results_that_torch_export_does_not_know_are_refused() -> None:
    class Cache:
        kept = torch.ones(3)

    class Caching(nn.Module):  # type: ignore[misc]
        def forward(self, src: torch.Tensor) -> tuple[torch.Tensor, Cache]:
            return src + 1, Cache()

    with pytest.raises(
        ArgumentError, match=r"Cache.*a known type\.\n  return tensors in tuples.*use_cache = False"
    ):
        fused.fuse(Caching(), torch.randn(3))


@pytest.mark.parametrize("options", [{"mode": 1}, {"rest": "eager"}, {"choose": "best"}, {"dryrun": "yes"}])
def test_other_options_of_the_backend_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(Exception, match="has the options rest='torch' or 'inductor', choose='predicted' or"):
        _compiled(nn.ReLU(), **options)(torch.randn(3))
    with pytest.raises(Exception, match="mode='max-autotune' is Inductor's"):
        torch.compile(nn.ReLU(), backend=compile_graph, mode="max-autotune")(torch.randn(3))
