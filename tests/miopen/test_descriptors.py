"""Descriptors and handles that cannot be, and what they say of themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fuseplan import miopen
from fuseplan.miopen import Ref
from miopen_calls import activation, convolution, created, fails, ok, tensor


def descriptor() -> Ref:
    return created(miopen.miopenCreateTensorDescriptor)


def convolution_descriptor() -> Ref:
    return created(miopen.miopenCreateConvolutionDescriptor)


FLOAT = miopen.miopenFloat
DESCRIPTORS: dict[str, tuple[Callable[[], Any], str, tuple[str, ...]]] = {
    "zero length": (
        lambda: miopen.miopenSet4dTensorDescriptor(descriptor(), FLOAT, 4, 0, 9, 9),
        "BadParm",
        ("positive",),
    ),
    "one axis": (
        lambda: miopen.miopenSetTensorDescriptor(descriptor(), FLOAT, 1, (4,), None),
        "BadParm",
        ("2 to 5 axes",),
    ),
    "lengths": (
        lambda: miopen.miopenSetTensorDescriptor(descriptor(), FLOAT, 3, (4, 5), None),
        "BadParm",
        ("`dimsA` has 2 numbers; want nbDims = 3",),
    ),
    "strides": (
        lambda: miopen.miopenSetTensorDescriptorV2(descriptor(), FLOAT, 2, (4, 5), (5,)),
        "BadParm",
        ("`stridesA` has 1 number;",),
    ),
    "shared storage": (
        lambda: miopen.miopenSetTensorDescriptor(descriptor(), FLOAT, 2, (4, 5), (4, 1)),
        "BadParm",
        ("share storage",),
    ),
    "integers": (
        lambda: miopen.miopenSet4dTensorDescriptor(descriptor(), miopen.miopenInt8, 4, 8, 9, 9),
        "NotImplemented",
        ("miopenInt8 is not supported",),
    ),
    "lens": (
        lambda: miopen.miopenSetNdTensorDescriptorWithLayout(
            descriptor(), FLOAT, miopen.miopenTensorNHWC, (1, 2, 3, 4), 5
        ),
        "BadParm",
        ("`lens` has 4 numbers",),
    ),
    "a layout of another rank": (
        lambda: miopen.miopenSetNdTensorDescriptorWithLayout(
            descriptor(), FLOAT, miopen.miopenTensorNCDHW, (1, 2, 3, 4), 4
        ),
        "BadParm",
        ("no layout of 4 axes is named 'ncdhw'",),
    ),
    "not set": (
        lambda: miopen.miopenGetTensorDescriptorSize(descriptor(), Ref()),
        "NotInitialized",
        ("was never set",),
    ),
    "four axes": (
        lambda: miopen.miopenGet4dTensorDescriptor(tensor(1, 2, 3), *(Ref() for _ in range(9))),
        "BadParm",
        ("has 3 axes",),
    ),
    "negative padding": (
        lambda: miopen.miopenInitConvolutionDescriptor(convolution_descriptor(), 0, -1, 0, 1, 1, 1, 1),
        "BadParm",
        ("pad is 0 or more",),
    ),
    "no stride": (
        lambda: miopen.miopenInitConvolutionDescriptor(convolution_descriptor(), 0, 0, 0, 1, 0, 1, 1),
        "BadParm",
        ("stride is 1 or more",),
    ),
    "spatial axes": (
        lambda: miopen.miopenInitConvolutionNdDescriptor(convolution_descriptor(), 4, (0,), (1,), (1,), 0),
        "BadParm",
        ("`spatialDim` is 1 to 3",),
    ),
    "numbers an axis": (
        lambda: miopen.miopenInitConvolutionNdDescriptor(
            convolution_descriptor(), 2, (0, 0), (1,), (1, 1), 0
        ),
        "BadParm",
        ("`strideA` has 1 number;",),
    ),
    "no groups": (
        lambda: miopen.miopenSetConvolutionGroupCount(convolution(), 0),
        "BadParm",
        ("`groupCount` is 1 or more",),
    ),
    "attribute": (
        lambda: miopen.miopenSetConvolutionAttribute(
            convolution(), miopen.MIOPEN_CONVOLUTION_ATTRIB_FP8_ROUNDING_MODE, 1
        ),
        "BadParm",
        ("there are no f8 tensors",),
    ),
    "two axes": (
        lambda: miopen.miopenGetConvolutionDescriptor(convolution(3), *(Ref() for _ in range(7))),
        "BadParm",
        ("has 3 spatial axes; want 2",),
    ),
    "requested axes": (
        lambda: miopen.miopenGetConvolutionNdDescriptor(convolution(), -1, *(Ref() for _ in range(5))),
        "BadParm",
        ("`requestedSpatialDim`",),
    ),
    "activation": (
        lambda: miopen.miopenGetActivationDescriptor(
            created(miopen.miopenCreateActivationDescriptor), *(Ref() for _ in range(4))
        ),
        "NotInitialized",
        ("was never set",),
    ),
    "target": (lambda: miopen.miopenCreate(Ref(), "gpu"), "BadParm", ("no target is named 'gpu'",)),
    "no target": (lambda: miopen.miopenCreate(Ref(), 3), "BadParm", ("`target` is a Target or its name",)),
}


@pytest.mark.parametrize("what", DESCRIPTORS)
def test_descriptors_and_handles(what: str) -> None:
    call, status, told = DESCRIPTORS[what]
    fails(call(), status, *told)


@pytest.mark.parametrize("word", ["Int32", "Int8", "Int64", "Float8_fnuz", "BFloat8_fnuz"])
def test_types_that_nothing_computes_with(word: str) -> None:
    described, kind = descriptor(), miopen.miopenDataType_t[f"miopen{word}"]
    status = miopen.miopenSetTensorDescriptor(described, kind, 2, (4, 8), None)
    fails(status, "NotImplemented", f"{kind.name} is not supported; want one of miopenHalf, miopenFloat")
    fails(miopen.miopenGetTensorDescriptorSize(described, Ref()), "NotInitialized", "never set")


def test_statuses_have_names() -> None:
    for status in miopen.miopenStatus_t:
        assert miopen.miopenGetErrorString(status) == status.name
    assert miopen.miopenGetErrorString(99) == "Unknown error status"


def test_an_activation_needs_its_descriptor_to_be_set() -> None:
    unset = created(miopen.miopenCreateActivationDescriptor)
    status = miopen.miopenCreateActivationProblem(Ref(), unset, miopen.miopenProblemDirectionForward)
    fails(status, "NotInitialized", "miopenSetActivationDescriptor")
    assert activation(miopen.miopenActivationELU, 0.5).value.told[1] == 0.5


def test_descriptors_are_read_as_they_were_set() -> None:
    kind, *cells = (Ref() for _ in range(9))
    made = tensor(2, 3, 4, 5, dtype=miopen.miopenBFloat16, layout=miopen.miopenTensorNHWC)
    ok(miopen.miopenGet4dTensorDescriptor(made, kind, *cells))
    assert kind.value is miopen.miopenBFloat16
    assert [cell.value for cell in cells] == [2, 3, 4, 5, 60, 1, 15, 3]
    size, lengths, strides, count = (Ref() for _ in range(4))
    ok(miopen.miopenGetTensorDescriptor(made, None, lengths, strides))
    ok(miopen.miopenGetTensorDescriptorSize(made, size))
    ok(miopen.miopenGetTensorNumBytes(made, count))
    assert (lengths.value, strides.value, size.value) == ((2, 3, 4, 5), (60, 1, 15, 3), 4)
    assert count.value == 240
    ok(miopen.miopenSet4dTensorDescriptorEx(made, miopen.miopenFloat, 2, 3, 4, 5, 100, 30, 6, 1))
    ok(miopen.miopenGetTensorNumBytes(made, count))
    assert count.value == 4 * (100 + 60 + 18 + 4 + 1), "gaps between elements are counted"


def test_convolutions_are_read_as_they_were_set() -> None:
    made = convolution(pad=1, stride=2, dilation=3, groups=2, mode=miopen.miopenGroupConv)
    mode, groups, axes, *cells = (Ref() for _ in range(9))
    ok(miopen.miopenGetConvolutionDescriptor(made, mode, *cells))
    assert mode.value is miopen.miopenConvolution
    assert [cell.value for cell in cells] == [1, 1, 2, 2, 3, 3]
    ok(miopen.miopenGetConvolutionGroupCount(made, groups))
    ok(miopen.miopenGetConvolutionNdDescriptor(made, 1, axes, *cells[:3], mode))
    assert [cell.value for cell in (groups, axes, *cells[:3])] == [2, 2, (1,), (2,), (3,)]
    ok(miopen.miopenGetConvolutionSpatialDim(made, axes))
    value, attribute = Ref(), miopen.MIOPEN_CONVOLUTION_ATTRIB_DETERMINISTIC
    ok(miopen.miopenSetConvolutionAttribute(made, attribute, 1))
    ok(miopen.miopenGetConvolutionAttribute(made, attribute, value))
    assert (axes.value, value.value) == (2, 1)


def test_the_output_of_a_convolution() -> None:
    cells = [Ref() for _ in range(4)]
    made = convolution(pad=1, stride=2, groups=2)
    ok(miopen.miopenGetConvolutionForwardOutputDim(made, tensor(4, 8, 9, 11), tensor(6, 4, 3, 3), *cells))
    assert [cell.value for cell in cells] == [4, 6, 5, 6]
    rank, shape = Ref(), Ref()
    volume = tensor(4, 8, 9, 11, 5)
    made = convolution(3, pad=1)
    ok(miopen.miopenGetConvolutionNdForwardOutputDim(made, volume, tensor(6, 8, 3, 3, 3), rank, shape))
    assert (rank.value, shape.value) == (5, (4, 6, 9, 11, 5))


def test_tf32_is_a_matter_of_the_math_type() -> None:
    made, src, weight = convolution(), tensor(4, 8, 9, 9).value.spec, tensor(16, 8, 3, 3).value.spec
    assert made.value.operator(src, weight).precision == "full"
    attribute = miopen.MIOPEN_CONVOLUTION_ATTRIB_MATH_TYPE
    ok(miopen.miopenSetConvolutionAttribute(made, attribute, miopen.miopenMathDefault))
    assert made.value.operator(src, weight).precision == "tf32"


def test_the_version_is_that_of_the_interface() -> None:
    numbers = [Ref() for _ in range(3)]
    ok(miopen.miopenGetVersion(*numbers))
    ok(miopen.miopenGetVersion(None, None, None))
    assert [each.value for each in numbers] == [3, 5, 0]


def test_names_are_those_of_the_module() -> None:
    assert "miopenFusionPlanGetOp" in dir(miopen)
    assert set(miopen.__all__) == set(dir(miopen))
    with pytest.raises(AttributeError, match="miopenFusionPlan"):
        _ = miopen.miopenFusionPlan
