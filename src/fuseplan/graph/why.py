"""The catalogue of reasons why an operator is in no plan, or why a plan ends where it does."""

from __future__ import annotations

from dataclasses import dataclass
from enum import unique

from fuseplan.messages.reasons import Catalogue, Refusal


@unique
class Why(Catalogue):
    """The catalogue of reports."""

    NOT_IN_TABLE = (
        "the operator has no row in the table of its front end, and its library runs it",
        "Write it in operators that have a row, or leave it to the library",
    )
    NO_PLAN = (
        "no plan says joins, padding, conversions alone and reductions of many axes: the library runs them",
        "Leave it to the library",
    )
    WEIGHT_NOT_CONSTANT = (
        "the second factor of a product is computed at run time",
        "Make it a parameter or an initializer, or leave the product to the library",
    )
    DTYPE = (
        "plans compute tensors of f64, f32, f16 and bf16",
        "Cast the input of the operator to one of them",
    )
    SHAPE = (
        "plans are found for tensors of 2 to 5 axes without an extent of 0, whose shapes are known",
        "Reshape the input of the operator",
    )
    BROADCAST = (
        "an operand of a plan has the first axis and any others, all but the first, the channels', or none",
        "Expand it to the shape of the other input",
    )
    FORMULA = (
        "no run of a plan's operators computes this formula of several tensors",
        "Write it as a sum, product or quotient of two tensors, and functions of one",
    )
    EXTERNAL_CONSUMER = (
        "another operator reads the value",
        "Several readers need the value in memory: nothing is to be done",
    )
    GRAPH_OUTPUT = (
        "the value is an output of the model",
        "Take it from the model's outputs if nobody needs it",
    )
    CONSUMER = ("the operator that reads the value is no formula of its elements", "Nothing is to be done")
    CLAIMED = (
        "the operator that reads the value is in another plan",
        "Nothing is to be done: that plan reads it as an operand",
    )
    REFUSED = (
        "a rule or the templates of the target refuse the plan",
        "See `fuseplan explain` of the plan that the report shows",
    )
    SLOWER = (
        "the framework's own operators are faster here, measured",
        "Nothing is to be done; `fuseplan tune` of the plan may find a faster kernel",
    )
    COPIED = (
        "the plan reads copies of values that lie with gaps, which take longer than it is estimated to save",
        "choose='measured' times both and keeps the faster one",
    )
    HOST = (
        "calls of plans take the host longer than the plans are estimated to save",
        "choose='measured' times both and keeps the faster one",
    )
    JOINED = (
        "ONNX Runtime computes it with a sum of integers in one kernel",
        "Nothing is to be done",
    )
    UNMEASURED = (
        "the kernel is not hopper_attention, and cuDNN's takes 0.52 to 0.94 of its time on an H100",
        "choose='measured' times both and keeps the faster one",
    )
    ALONE = (
        "a product of a training step has nothing to be fused with but a bias: on an H200 cuBLAS takes 0.98 "
        "to 1.02 of the plan's time, and 0.42 to 0.56 of that of a weight's gradient",
        "choose='measured' times both and keeps the faster one",
    )
    PACKED = (
        "the kernel multiplies by a copy of the weight, which each step of training would have to make anew",
        "Nothing is to be done: the framework's operators read the weight where it lies",
    )
    INACCURATE = (
        "the plan's result is further from float64 than twice the framework's and the kernel's bound",
        "Report this with the plan and the machine",
    )
    DISAGREES = (
        "the framework's own operators compute another result than the graph means in float64",
        "Report this with the model: an operator may be read in a wrong way",
    )
    FAILED = (
        "the plan's kernel is not built, or does not run",
        "Compile the plan by itself for the whole error",
    )
    UNREADABLE = (
        "the operator has attributes or inputs that it does not take",
        "Repair the operator: `onnx.checker.check_model(model, full_check=True)` may tell more",
    )
    APART = (
        "products of one input that differ in more than features, or take longer as one, stay apart",
        "Nothing is to be done",
    )
    INNER_VALUE = (
        "the plan would end inside an operator of the framework, whose last value is wanted",
        "Nothing is to be done",
    )
    OPEN_EXTENT = (
        "a number of the plan depends on an extent that is open",
        "Fix this extent: leave it out of dynamic_shapes, or write its number into the model",
    )
    INDUCTOR = (
        "operators without a product, a convolution or attention are Inductor's here",
        "Nothing is to be done; without the option rest='inductor' they are a plan",
    )

    @classmethod
    def of(cls, code: str) -> Why:
        """The entry with a code.

        Raises:
            KeyError: there is none.
        """
        return {each.code: each for each in cls}[code]


@dataclass(frozen=True)
class Reason:
    """An entry of the catalogue with the evidence.

    Attributes:
        why: the entry.
        got: the value, operator or plan to blame.
        refusals: of the rules and templates that refused the plan, the nearest miss first; the first of them
            tells code, sentence and remedy.
    """

    why: Why
    got: str = ""
    refusals: tuple[Refusal, ...] = ()

    @property
    def code(self) -> str:
        """The code."""
        return self._entry.code

    @property
    def sentence(self) -> str:
        """The cause."""
        return self._entry.sentence

    @property
    def remedy(self) -> str:
        """The advice."""
        return self._entry.remedy

    @property
    def _entry(self) -> Why | Refusal:
        return self.refusals[0] if self.refusals else self.why

    def __str__(self) -> str:
        return f"{self.sentence}: {self.got}" if self.got else self.sentence


class LeftError(Exception):
    """The row of a front end's table does not hold for a node: the framework runs it."""

    def __init__(self, why: Why, got: object = "") -> None:
        super().__init__(str(got))
        self.reason = Reason(why, str(got))
