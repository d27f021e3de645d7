"""Values that lie otherwise than a plan has them, and values that torch has no name for."""

import copy

import pytest
import torch
from torch import fx, nn

import fuseplan.torch as fused
from fuseplan.torch import cutting
from fuseplan.torch.exporting import exported
from fuseplan.torch.lifetimes import Lifetimes
from fuseplan.torch.lying import beside

F = nn.functional


class Lying(nn.Module):  # type: ignore[misc]
    """A product of rows behind a value that lies as the input does, which has another reader."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)

    def forward(self, src: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        src = src.clamp(-1, 2)
        return src, self.linear(src)


def test_a_value_lies_as_each_call_has_it() -> None:
    module, last = Lying(), torch.channels_last
    src, other = torch.randn(2, 2, 3, 8, 6)
    for example, given in ((src.to(memory_format=last), other), (src, other.to(memory_format=last))):
        made = fused.fuse(module, example)
        for each in (example, given):
            with torch.no_grad():
                torch.testing.assert_close(made(each), module(each))


class Inverted(nn.Module):  # type: ignore[misc]
    """MobileNet's block: torch pads in front of a convolution of each channel, and pools behind the last."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.each = nn.Conv2d(8, 16, 1), nn.Conv2d(16, 16, 3, groups=16)
        self.narrow, self.last = nn.Conv2d(16, 8, 1), nn.Conv2d(8, 24, 1)
        self.norms = nn.ModuleList(map(nn.BatchNorm2d, (16, 16, 8)))

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        src = F.relu(self.last(src))[:, :8] + src
        made = F.relu6(self.norms[0](self.wide(src)))
        made = F.relu6(self.norms[1](self.each(F.pad(made, (1, 1, 1, 1)))))
        made = self.norms[2](self.narrow(made)) + src
        return F.adaptive_avg_pool2d(self.last(made), 1)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, of Inductor's imports
def test_convolutions_beside_each_other_lie_alike_beside_inductor() -> None:
    """Whatever Inductor computes between two of them: it writes and reads tensors in any order."""
    from fuseplan.torch import inductor

    module, src = Inverted().eval(), torch.randn(2, 8, 12, 12)
    given = exported(module, (src,), {})
    made = cutting.fused(given.graph, torch.device("cpu"), is_built=False, **inductor.HOW)
    convolutions = [site.plan.src for site in made.cut.sites if "conv2d" in str(site.plan)]
    assert len(convolutions) == 5
    assert all(each.is_channels_last for each in convolutions[1:-1])
    want = copy.deepcopy(module).double()(src.double())
    (found,) = made.module(*given.held(module).tensors, src)
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-6)


class Split(nn.Module):  # type: ignore[misc]
    """A product whose value in front of its bias would be a plan's: torch has no name for it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv1d(4, 6, 3, padding=1), nn.Linear(16, 16)

    def forward(self, src: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = self.linear(self.conv(src).abs())
        return made.unsqueeze(0).expand(2, 1, 6, 16).reshape(2, 6, 16), F.log_softmax(made, 0)


def test_plans_read_values_that_torch_has() -> None:
    module, src = Split(), torch.randn(1, 4, 16)
    with torch.no_grad():
        torch.testing.assert_close(fused.fuse(module, src)(src), module(src))


def test_elements_may_share_memory() -> None:
    module, dense = nn.Sequential(nn.Softmax(0), nn.GELU()), torch.randn(3, 5, 8)
    shared = torch.randn(100).as_strided((3, 5, 8), (10, 4, 1))
    for example, given in ((shared, dense), (dense, shared)):
        made = fused.fuse(module, example)
        for each in (example, given, example[:1].expand(3, 5, 8)):
            with torch.no_grad():
                torch.testing.assert_close(made(each), module(each))


def test_values_beside_each_other_are_a_view_whether_or_not_torch_records_gradients() -> None:
    """As of a module that is fused outside of `torch.no_grad()`, and called inside."""
    graph = fx.Graph()
    whole = graph.placeholder("whole")
    whole.meta["val"] = torch.empty(2, 6, 4, device="meta")
    halves = [graph.call_function(torch.ops.aten.slice.Tensor, (whole, 1, at, at + 3)) for at in (0, 3)]
    made = graph.call_function(beside, (halves, 1))
    graph.output([graph.call_function(torch.ops.aten.relu.default, (made,))])
    assert torch.is_grad_enabled()
    lives = Lifetimes.of(fx.GraphModule(nn.Module(), graph), [whole], on_gpu=False)
    assert made in lives.constant
    assert made not in lives.buffers
    assert lives.neighbours(graph) == []
