"""Fusion plans by MIOpen's calls: operators are added to a plan, and a handle compiles it."""

from __future__ import annotations

from fuseplan.errors import PlanError, counted
from fuseplan.match import match
from fuseplan.miopen.activations import activation
from fuseplan.miopen.algorithms import algorithms, template_by
from fuseplan.miopen.call import Object, Ref, api, bad_parameter
from fuseplan.miopen.convolutions import miopenConvolutionDescriptor_t
from fuseplan.miopen.enums import (
    miopenActivationMode_t,
    miopenBatchNormMode_t,
    miopenConvFwdAlgorithm_t,
    miopenFusionDirection_t,
)
from fuseplan.miopen.handle import miopenHandle_t
from fuseplan.miopen.operators import (
    ACTIVATION,
    ACTIVATION_BACKWARD,
    BACKWARD,
    BIAS,
    CONVOLUTION,
    INFERENCE,
    TRAINING,
    Kind,
    Lowered,
    Operator,
    lowered,
)
from fuseplan.miopen.tensors import MODE_WORDS, miopenTensorDescriptor_t, parameters_shape
from fuseplan.ops.affine import BatchNorm, Bias
from fuseplan.ops.training import ActivationBackward, BatchNormBackward, BatchNormTraining
from fuseplan.plan import FusionPlan
from fuseplan.stages import decide
from fuseplan.target import Target, parse_target
from fuseplan.tensor import TensorSpec


class miopenFusionOpDescriptor_t(Object):
    """An operator at its place in a plan; it lives as long as the plan."""

    def __init__(self, plan: miopenFusionPlanDescriptor_t, index: int, operator: Operator) -> None:
        super().__init__()
        self.plan, self.index, self.operator = plan, index, operator

    @property
    def is_alive(self) -> bool:
        """Whether the plan is."""
        return self.plan.is_alive

    def check(self, kind: Kind) -> None:
        """Checks that it is an operator of a kind.

        Raises:
            StatusError: it is of another.
        """
        own = self.operator.kind
        if own is not kind:
            raise bad_parameter(
                f"operator {self.index} is of the kind {own.name}, whose arguments {own.set_args} sets; "
                f"this call is for {kind.name}"
            )

    def follows(self, kind: Kind) -> bool:
        """Whether the operator before it is of a kind."""
        return self.index > 0 and self.plan.operators[self.index - 1].operator.kind is kind


class miopenFusionPlanDescriptor_t(Object):
    """An input and operators, and the handles that compiled them as they are now."""

    def __init__(self, direction: miopenFusionDirection_t, src: TensorSpec) -> None:
        super().__init__()
        self.direction, self.src = direction, src
        self.operators: list[miopenFusionOpDescriptor_t] = []
        self.algorithm: miopenConvFwdAlgorithm_t | None = None
        self.handles: list[miopenHandle_t] = []
        self._lowered: dict[frozenset[int], Lowered] = {}

    @property
    def is_horizontal(self) -> bool:
        """Whether every operator takes the input, instead of the result of the one before."""
        return self.direction is miopenFusionDirection_t.miopenHorizontalFusion

    @property
    def place(self) -> TensorSpec:
        """What the next operator takes."""
        return self.src if self.is_horizontal or not self.operators else self.lowered().plan.output

    def lowered(self, scaled: frozenset[int] = frozenset()) -> Lowered:
        """The operators as a fusion plan, with a factor behind each of the scaled ones.

        Raises:
            Unsupported: the plan is horizontal.
        """
        if self.is_horizontal:
            FusionPlan(self.src, direction="horizontal")
        made = self._lowered.get(scaled)
        if made is None:
            made = lowered(self.src, [each.operator for each in self.operators], scaled)
            self._lowered[scaled] = made
        return made

    def add(self, operator: Operator) -> miopenFusionOpDescriptor_t:
        """Appends an operator; what was compiled is to be compiled again.

        Raises:
            PlanError: it cannot take what comes before it.
            Unsupported: no kernel computes it behind what comes before it. The plan stays as it was.
        """
        if self.is_horizontal:
            operator.op.output(self.src)
        else:
            match(lowered(self.src, [*(each.operator for each in self.operators), operator]).plan)
        self.operators.append(miopenFusionOpDescriptor_t(self, len(self.operators), operator))
        self.change()
        return self.operators[-1]

    def change(self) -> None:
        """Forgets what was compiled."""
        self.handles.clear()
        self._lowered.clear()

    def compile(self, handle: miopenHandle_t) -> None:
        """Makes the kernel for a handle's target."""
        self.handles = [each for each in self.handles if each is not handle and each.is_alive]
        handle.kernel(self.lowered().plan, self.algorithm)
        self.handles.append(handle)

    def target(self, handle: miopenHandle_t | None) -> Target:
        """Where questions are about: the handle's target, or the last that compiled it, or this CPU."""
        asked = handle or (self.handles[-1] if self.handles else None)
        return asked.target if asked else parse_target("cpu")

    def require_convolution(self) -> None:
        """Checks that there is one to have an algorithm.

        Raises:
            StatusError: there is none.
        """
        if all(each.operator.kind is not CONVOLUTION for each in self.operators):
            raise bad_parameter("the plan has no convolution, and only a convolution has an algorithm")


@api
def miopenCreateFusionPlan(
    fusePlanDesc: Ref, fuseDirection: miopenFusionDirection_t, inputDesc: miopenTensorDescriptor_t
) -> None:
    """Makes a plan for an input. A horizontal plan takes operators; compiling it says that none is fused."""
    fusePlanDesc.value = miopenFusionPlanDescriptor_t(fuseDirection, inputDesc.spec)


@api
def miopenDestroyFusionPlan(fusePlanDesc: miopenFusionPlanDescriptor_t) -> None:
    """Ends a plan and its operators."""
    fusePlanDesc.destroy()


@api
def miopenFusionPlanGetOp(fusePlanDesc: miopenFusionPlanDescriptor_t, op_idx: int, op: Ref) -> None:
    """Reads the operator at a place, counted from 0."""
    count = len(fusePlanDesc.operators)
    if not 0 <= op_idx < count:
        raise bad_parameter(
            f"`op_idx` is out of bounds: {op_idx}, counted from 0; the plan has {counted(count, 'operator')}"
        )
    op.value = fusePlanDesc.operators[op_idx]


@api
def miopenCreateOpConvForward(
    fusePlanDesc: miopenFusionPlanDescriptor_t,
    convOp: Ref,
    convDesc: miopenConvolutionDescriptor_t,
    wDesc: miopenTensorDescriptor_t,
) -> None:
    """Appends a convolution by a weight of this shape: features, channels of a group, kernel."""
    made = convDesc.operator(fusePlanDesc.place, wDesc.spec)
    convOp.value = fusePlanDesc.add(Operator(CONVOLUTION, made))


@api
def miopenCreateOpConvForwardAlgo(
    fusePlanDesc: miopenFusionPlanDescriptor_t,
    convOp: Ref,
    convDesc: miopenConvolutionDescriptor_t,
    fwdAlgo: miopenConvFwdAlgorithm_t,
    wDesc: miopenTensorDescriptor_t,
) -> None:
    """Appends a convolution and binds its algorithm: the first versions' call."""
    made = convDesc.operator(fusePlanDesc.place, wDesc.spec)
    convOp.value = fusePlanDesc.add(Operator(CONVOLUTION, made))
    fusePlanDesc.algorithm = fwdAlgo


@api
def miopenCreateOpBiasForward(
    fusePlanDesc: miopenFusionPlanDescriptor_t, biasOp: Ref, bDesc: miopenTensorDescriptor_t
) -> None:
    """Appends a bias, 1xCx1x1."""
    check_parameters("bDesc", bDesc.spec, fusePlanDesc.place, miopenBatchNormMode_t.miopenBNSpatial)
    biasOp.value = fusePlanDesc.add(Operator(BIAS, Bias()))


@api
def miopenCreateOpActivationForward(
    fusePlanDesc: miopenFusionPlanDescriptor_t, activFwdOp: Ref, mode: miopenActivationMode_t
) -> None:
    """Appends an activation; its numbers are arguments."""
    activFwdOp.value = fusePlanDesc.add(forward(mode, fusePlanDesc.src.dtype))


def forward(mode: miopenActivationMode_t, dtype: str) -> Operator:
    """The activation of a mode."""
    made = activation(mode, dtype)
    return Operator(ACTIVATION, made.op, made.parameters)


def backward(mode: miopenActivationMode_t, dtype: str) -> Operator:
    """The backward pass of the activation of a mode."""
    made = activation(mode, dtype)
    return Operator(ACTIVATION_BACKWARD, ActivationBackward(made.op), made.parameters)


@api
def miopenCreateOpActivationBackward(
    fusePlanDesc: miopenFusionPlanDescriptor_t, activBwdOp: Ref, mode: miopenActivationMode_t
) -> None:
    """Appends the backward pass of an activation: of the one behind a batch normalization whose is before."""
    activBwdOp.value = fusePlanDesc.add(backward(mode, fusePlanDesc.src.dtype))


@api
def miopenCreateOpBatchNormInference(
    fusePlanDesc: miopenFusionPlanDescriptor_t,
    bnOp: Ref,
    bn_mode: miopenBatchNormMode_t,
    bnScaleBiasMeanVarDesc: miopenTensorDescriptor_t,
) -> None:
    """Appends batch normalization by frozen statistics, 1xCx1x1 or 1xCxHxW."""
    check_parameters("bnScaleBiasMeanVarDesc", bnScaleBiasMeanVarDesc.spec, fusePlanDesc.place, bn_mode)
    bnOp.value = fusePlanDesc.add(Operator(INFERENCE, BatchNorm(MODE_WORDS[bn_mode])))


@api
def miopenCreateOpBatchNormForward(
    fusePlanDesc: miopenFusionPlanDescriptor_t,
    bnFwdOp: Ref,
    bn_mode: miopenBatchNormMode_t,
    runningMeanVariance: bool,
) -> None:
    """Appends batch normalization by the batch's statistics; running ones are updated only if asked."""
    made = BatchNormTraining(MODE_WORDS[bn_mode], running=runningMeanVariance)
    bnFwdOp.value = fusePlanDesc.add(Operator(TRAINING, made))


@api
def miopenCreateOpBatchNormBackward(
    fusePlanDesc: miopenFusionPlanDescriptor_t, bnBwdOp: Ref, bn_mode: miopenBatchNormMode_t
) -> None:
    """Appends the backward pass of batch normalization: the plan's input is dy, its output dx."""
    made = BatchNormBackward(mode=MODE_WORDS[bn_mode])
    bnBwdOp.value = fusePlanDesc.add(Operator(BACKWARD, made))


def check_parameters(name: str, given: TensorSpec, place: TensorSpec, mode: miopenBatchNormMode_t) -> None:
    """Checks the shape and type of a bias, or of batch normalization's parameters.

    Raises:
        PlanError: it has others.
    """
    wanted = [
        TensorSpec(parameters_shape(place, mode), dtype)
        for dtype in dict.fromkeys((place.compute_dtype, place.dtype))
    ]
    if all((given.shape, given.dtype) != (each.shape, each.dtype) for each in wanted):
        raise PlanError(
            f"`{name}` does not describe the tensor that {place} takes",
            got=given,
            want=" or ".join(map(str, wanted)),
        )


@api
def miopenCompileFusionPlan(handle: miopenHandle_t, fusePlanDesc: miopenFusionPlanDescriptor_t) -> None:
    """Makes the plan's kernel for the handle's target, by the algorithm that is bound if one is."""
    fusePlanDesc.compile(handle)


@api
def miopenFusionPlanGetWorkSpaceSize(
    handle: miopenHandle_t,
    fusePlanDesc: miopenFusionPlanDescriptor_t,
    workSpaceSize: Ref,
    algo: miopenConvFwdAlgorithm_t,
) -> None:
    """Reads the bytes that the kernel needs besides its tensors, exactly; fuseplan keeps that memory itself.

    The kernel is the one that the plan is compiled to, or would be; `algo` chooses none, as in MIOpen:
    miopenFusionPlanConvolutionSetAlgo does.
    """
    plan = fusePlanDesc.lowered().plan
    bound = fusePlanDesc.algorithm
    wanted = None if bound is None else template_by(plan, handle.target, bound).text
    records = decide(plan, handle.target, template=wanted)
    workSpaceSize.value = records.source.workspace(handle.target.threads)


@api
def miopenFusionPlanConvolutionGetAlgo(
    fusePlanDesc: miopenFusionPlanDescriptor_t,
    requestAlgoCount: int,
    returnedAlgoCount: Ref,
    returnedAlgos: Ref,
    handle: miopenHandle_t | None = None,
) -> None:
    """Reads the algorithms of the templates that take the plan, the preferred first, as a tuple.

    They are a target's: that of `handle`, which MIOpen does not have; or else of the handle that compiled
    the plan last, or else this CPU.
    """
    fusePlanDesc.require_convolution()
    if requestAlgoCount < 1:
        raise bad_parameter(f"`requestAlgoCount` is 1 or more; got {requestAlgoCount}")
    found = algorithms(fusePlanDesc.lowered().plan, fusePlanDesc.target(handle))[:requestAlgoCount]
    returnedAlgoCount.value, returnedAlgos.value = len(found), tuple(found)


@api
def miopenFusionPlanConvolutionSetAlgo(
    fusePlanDesc: miopenFusionPlanDescriptor_t, algo: miopenConvFwdAlgorithm_t
) -> None:
    """Binds the convolution's algorithm: compiling then takes its templates alone, or says why none can."""
    fusePlanDesc.require_convolution()
    fusePlanDesc.algorithm = algo
    fusePlanDesc.change()
