"""Fusion plans by MIOpen's calls: operators are added to a plan, and a handle compiles it."""

from __future__ import annotations

from fuseplan.compat.miopen.algorithms import algorithms, template_by
from fuseplan.compat.miopen.call import Object, bad_parameter
from fuseplan.compat.miopen.convolutions import miopenConvolutionDescriptor_t as Convolution
from fuseplan.compat.miopen.enums import miopenBatchNormMode_t as Mode
from fuseplan.compat.miopen.enums import miopenConvFwdAlgorithm_t as Algorithm
from fuseplan.compat.miopen.enums import miopenFusionDirection_t as Direction
from fuseplan.compat.miopen.handle import miopenHandle_t as Handle
from fuseplan.compat.miopen.kinds import BIAS, CONVOLUTION, INFERENCE, Kind
from fuseplan.compat.miopen.operators import Lowered, Operator, lowered, normalization
from fuseplan.compat.miopen.tensors import check_parameters
from fuseplan.compat.miopen.tensors import miopenTensorDescriptor_t as Tensor
from fuseplan.errors import counted
from fuseplan.execution.stages import decide
from fuseplan.kernels.match import match
from fuseplan.kernels.target import parse_target
from fuseplan.language.tensor import TensorSpec
from fuseplan.ops.affine import Bias
from fuseplan.plans.plan import FusionPlan


class miopenFusionOpDescriptor_t(Object):
    """An operator at its place in a plan; it lives as long as the plan."""

    def __init__(self, plan: miopenFusionPlanDescriptor_t, index: int, operator: Operator) -> None:
        super().__init__()
        self.plan, self.index, self.operator = plan, index, operator

    @property
    def is_alive(self) -> bool:
        return self.plan.is_alive

    def check(self, kind: Kind) -> None:
        """Checks that it is an operator of a kind; a StatusError where it is of another."""
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

    def __init__(self, direction: Direction, src: TensorSpec) -> None:
        super().__init__()
        self.direction, self.src = direction, src
        self.operators: list[miopenFusionOpDescriptor_t] = []
        self.algorithm: Algorithm | None = None
        self.handles: list[Handle] = []
        self._lowered: dict[frozenset[int], Lowered] = {}

    @property
    def is_horizontal(self) -> bool:
        """Whether every operator takes the input, instead of the result of the one before."""
        return self.direction is Direction.miopenHorizontalFusion

    @property
    def place(self) -> TensorSpec:
        """The input of the next operator."""
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
        """Appends an operator; the plan has to be compiled again.

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

    def add_convolution(
        self, convolution: Convolution, weight: Tensor, algorithm: Algorithm | None = None
    ) -> miopenFusionOpDescriptor_t:
        """Appends a convolution, and binds its algorithm where one is given."""
        made = self.add(Operator(CONVOLUTION, convolution.operator(self.place, weight.spec)))
        self.algorithm = algorithm or self.algorithm
        return made

    def add_bias(self, bias: Tensor) -> miopenFusionOpDescriptor_t:
        """Appends a bias."""
        check_parameters("bDesc", bias.spec, self.place, Mode.miopenBNSpatial)
        return self.add(Operator(BIAS, Bias()))

    def add_inference(self, mode: Mode, parameters: Tensor) -> miopenFusionOpDescriptor_t:
        """Appends batch normalization by frozen statistics."""
        check_parameters("bnScaleBiasMeanVarDesc", parameters.spec, self.place, mode)
        return self.add(normalization(INFERENCE, mode))

    def operator(self, place: int) -> miopenFusionOpDescriptor_t:
        """The operator at a place; a StatusError where there is none."""
        count = len(self.operators)
        if not 0 <= place < count:
            raise bad_parameter(
                f"`op_idx` is out of bounds: {place}, counted from 0; the plan has "
                f"{counted(count, 'operator')}"
            )
        return self.operators[place]

    def change(self) -> None:
        """Forgets the compiled kernels."""
        self.handles.clear()
        self._lowered.clear()

    def compile(self, handle: Handle) -> None:
        """Makes the kernel for a handle's target."""
        self.handles = [each for each in self.handles if each is not handle and each.is_alive]
        handle.kernel(self.lowered().plan, self.algorithm)
        self.handles.append(handle)

    def workspace(self, handle: Handle) -> int:
        """Bytes of workspace of the kernel that the plan is compiled to, or would be."""
        plan, bound = self.lowered().plan, self.algorithm
        wanted = None if bound is None else template_by(plan, handle.target, bound).text
        return decide(plan, handle.target, template=wanted).source.workspace(handle.target.threads)

    def algorithms(self, most: int, handle: Handle | None) -> tuple[int, tuple[Algorithm, ...]]:
        """The algorithms of the templates that take the plan, at most so many: their number, and each.

        They are the ones on the handle's target, or the last's that compiled the plan, or on this CPU.
        """
        self._require_convolution()
        asked = handle or (self.handles[-1] if self.handles else None)
        target = asked.target if asked else parse_target("cpu")
        found = tuple(algorithms(self.lowered().plan, target)[:most])
        return len(found), found

    def bind(self, algorithm: Algorithm) -> None:
        """Binds the convolution's algorithm; the plan has to be compiled again."""
        self._require_convolution()
        self.algorithm = algorithm
        self.change()

    def _require_convolution(self) -> None:
        if all(each.operator.kind is not CONVOLUTION for each in self.operators):
            raise bad_parameter("the plan has no convolution, and only a convolution has an algorithm")
