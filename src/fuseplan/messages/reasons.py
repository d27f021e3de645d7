"""The catalogue of reasons for refusing a plan, and the records of claims and refusals.

A rule's conditions and a template's limits are flat runs of claims. The first claim that does not hold
becomes a `Refusal`: data that errors print and `explain` shows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum, unique
from typing import NamedTuple

GENERAL = "`direct` on the CPU and `product` on a GPU"

OTHERS = (
    "`pointwise` takes elementwise operators alone; the rule `contraction`, and of its templates "
    f"{GENERAL}, take one contraction"
)


class Catalogue(Enum):
    """Reasons: the sentence with the cause, and the remedy. A reason's code in messages is its name."""

    def __init__(self, sentence: str, remedy: str) -> None:
        self.sentence, self.remedy = sentence, remedy

    @property
    def code(self) -> str:
        """The name in small letters, with dashes."""
        return self.name.lower().replace("_", "-")


@unique
class Reason(Catalogue):
    """The catalogue of refusals. A name in backticks in a remedy is a rule's or a template's."""

    # Plans that no rule fuses.
    EMPTY_PLAN = ("the plan has no operator", "Add an operator: plan.add(Relu())")
    HORIZONTAL = (
        "operators are fused one after the other, not side by side",
        "Make one vertical plan for each branch",
    )
    NO_GRADIENT = (
        "there are no plans of this gradient",
        "Leave its tensors out of `wrt`, or let the framework differentiate this operator",
    )
    INDEX = (
        "indices are counted behind a contraction, and behind the parts of its result, not in front of them",
        "Split the plan in front of that operator, or behind it where it is the first",
    )
    NO_CONTRACTION = (
        "the plan has no convolution, matrix product or pool",
        "`pointwise` takes elementwise operators alone; `normalization` and `reduction` take statistics",
    )
    SEVERAL_CONTRACTIONS = (
        "one kernel holds one convolution, matrix product or pool",
        "Split the plan in front of the second of them",
    )
    CENTRE_IN_POINTWISE = (
        "a pointwise kernel holds elementwise operators alone",
        "The rules and templates `contraction`, `direct` and `product` take a contraction, `normalization` "
        "and `reduction` statistics, `attention` attention, `scan` a scan",
    )
    NO_NORMALIZATION = (
        "the plan has no statistics per channel or activation, such as batch_norm_training's",
        f"`reduction` takes statistics over any axes; {OTHERS}",
    )
    SEVERAL_NORMALIZATIONS = (
        "one kernel holds one operator with statistics, or several with statistics of the same rows or cells",
        "Split the plan in front of the second of them",
    )
    NO_REDUCTION = (
        "the plan has no statistics over axes of its own choice, such as softmax's",
        f"`normalization` takes statistics per channel or activation on a GPU; {OTHERS}",
    )
    CONTRACTION_AND_NORMALIZATION = (
        "one kernel holds a contraction or an operator with statistics, not both",
        "Split the plan in front of the second of the two",
    )
    ONE_FEATURE = (
        "a product with one feature does not tell features from positions: it has no statistics of them",
        "Split the plan in front of the statistics; a kernel of their own takes them",
    )
    RESULT_AGAIN = (
        "a contraction's result is in no memory: statistics of it may leave their numbers alone",
        "Split the plan in front of the statistics; those of sum, logsumexp or cross_entropy are read once",
    )
    BESIDE_SUMMARY = (
        "beside a contraction whose result has statistics there are no parts, indices or kept values",
        "Split the plan in front of that operator, or in front of the statistics where it is before them",
    )
    NO_SUMMARY = (
        "the kernel has no statistics of a contraction's result",
        f"`normalization` and `reduction` take statistics of src, `attention` takes one; {OTHERS}",
    )
    SUMMED_PRODUCT = (
        "statistics of a contraction's result are those of a matrix product's rows, one weight for all",
        "Split the plan in front of the operator with statistics",
    )
    ROW_TILES = (
        "programs count to the end of each tile of rows, and there is a fixed number of counters",
        "Give fewer rows at a time, or split the plan in front of the operator with statistics",
    )
    NO_ATTENTION = (
        "the plan has no attention",
        f"`attention` takes one; `normalization` and `reduction` take statistics; {OTHERS}",
    )
    ATTENTION_DTYPE = (
        "the template multiplies elements of 16 or 32 bits and computes in f32",
        "Compile for the CPU, whose `attention` computes f64 too",
    )
    HEAD_SIZE = (
        "the queries, keys and values of a tile do not fit the registers of a GPU's program",
        "Compile for the CPU, whose `attention` takes heads of any size",
    )
    BEFORE_ATTENTION = (
        "the kernel reads src as the factor of the scores, without an operator in front of attention",
        "Run the operators in front as a plan of their own",
    )
    BESIDE_ATTENTION = (
        "one kernel holds one attention, and no contraction or statistics beside it",
        "Split the plan in front of the second of the two",
    )
    NO_SCAN = (
        "the plan has no sums along an axis up to each element, such as cumsum's",
        f"`scan` takes one cumsum; `normalization` and `reduction` take statistics; {OTHERS}",
    )
    BESIDE_SCAN = (
        "one kernel holds one scan, and no other operator but elementwise ones beside it",
        "Split the plan in front of the second of the two",
    )
    SEVERAL_PARTS = (
        "one kernel reads one axis in parts, once",
        "Split the plan in front of the second operator that reads parts",
    )
    LOOKUP = (
        "rows of a table are src of a kernel of elementwise operators or statistics, in front of all others",
        "Split the plan behind the embedding, or in front of it where it is not the first",
    )
    BESIDE_GRADIENT = (
        "operators beside a weight's gradient have no tensors of their own, and read no parts of an axis",
        "Split the plan in front of the second of the two",
    )
    SCATTERED_ROWS = (
        "the gradient of a weight is summed over rows that are evenly spaced",
        "Copy src into a dense tensor whose last axis is innermost, and give the plan a src without strides",
    )
    SUMMED_ROWS = (
        "sums over all rows beside statistics of each take rows whose elements are one run of memory",
        "Give rows of several elements with their last axis innermost, or ask for the gradient of src alone",
    )
    RUNS = (
        "statistics of blocks behind those of whole rows are GPU kernels', of blocks of 2**n elements",
        "Split the plan in front of the second operator with statistics",
    )
    PARTS_BESIDE = (
        "parts are read behind a contraction, among elementwise operators, or beside statistics of all parts",
        "Split the plan in front of the second of the two; `pointwise` takes elementwise operators alone",
    )

    OPEN_AXES = (
        "open axes are rows or images: no operator sums over them, and each tensor has all of them or none",
        "Write plan.with_extents(...) for the plan with numbers in the place of its open axes",
    )

    # Kernels that a backend has no template for.
    KNOWN_EXTENTS = (
        "the template is written for extents that are numbers",
        "Say `opens` in a template whose text reads the extent; plan.with_extents(...) has no open axes",
    )
    RANGE = (
        "a range of features is written behind a contraction, features innermost, and no other tensor of its "
        "size is read or written behind it",
        "Leave the operator out, and copy the result into its range; `direct`, `winograd` and `depthwise` on "
        "CPUs write ranges",
    )
    STRIDED_PROLOGUE = (
        "in front of a contraction or parts, an operand per element or activation needs a named layout",
        "Copy src into a named layout, and make the plan for that layout",
    )
    SAVED_PROLOGUE = (
        "a value in front of a contraction, or of parts of an axis, is not saved: it lies otherwise than dst",
        "Save it in a plan of the operators in front, whose output another plan takes",
    )
    ACCURACY = (
        "the algorithm's error bound is above the accuracy asked for",
        "Allow a larger bound with accuracy=, or make the plan in f64 (without precision=tf32)",
    )
    POOL = (
        "this kernel sums products with a weight, and a pool has none",
        "`depthwise`, and on the CPU `depthwise_planes`, compute pools",
    )
    TRANSPOSED = (
        "outputs of a transposed convolution with a stride have other taps than their neighbours",
        f"{GENERAL} take it; with stride 1 it is a convolution",
    )
    NOT_DEPTHWISE = ("a depthwise kernel has one channel in each group", f"{GENERAL} take any groups")
    MANY_TAPS = ("the template has separate code for each tap", "`product` takes kernels of any size")
    GROUP_WIDTH = (
        "the template packs several narrow groups into a vector",
        "`direct` takes groups of any width",
    )
    NO_GRADIENT_OF_GROUPS = ("the template computes gradients of grouped weights", "`direct` takes others")
    CHANNEL_MULTIPLIER = (
        "the template makes few features from each channel",
        "`direct` takes any number of features",
    )
    NO_TRANSFORM = (
        "the transforms are for 2-D convolutions with kernel 3 or 5, stride 1, dilation 1 and one group",
        "`direct` takes any convolution",
    )
    FLOAT64 = ("the template computes with numbers of f32", "`direct` computes f64 plans, and integers")
    CHANNELS_FIRST = (
        "the template writes channels last",
        "Give src a layout with its channels innermost, such as nhwc",
    )
    CHANNELS_LAST = (
        "the template writes channels first",
        "Give src a layout with its pixels innermost, such as nchw",
    )

    PARTS_OF_FEATURES = (
        "behind a contraction, a template reads no parts but gate and value of features in one group",
        "`direct` and `product` compute gated products; `pointwise` takes the operator in a plan of its own",
    )
    OPERANDS_BETWEEN = (
        "between contraction and gated product, operands are per channel or shared, and nothing is saved",
        "Split the plan in front of the operator: `pointwise` takes it and the gated product",
    )
    NOT_POINT_CONVOLUTION = (
        "the template takes 1x1 convolutions with stride 1, no padding and one group",
        "`direct` on the CPU and `product` on a GPU take any convolution",
    )
    NO_TILES = (
        "the target has no products by tiles (AMX), or Linux does not let this process use them",
        "`direct` runs on any processor",
    )
    TILE_DTYPE = ("tiles multiply f32 by f32, bf16 by bf16, or i8 by i8", "`direct` takes any dtype")
    SCATTERED_POSITIONS = (
        "the template reads the positions of a channel side by side",
        "Give src the default layout (ncw, nchw or ncdhw)",
    )
    WEIGHT_PER_BATCH = (
        "the template reads one weight for all images",
        "`direct` on the CPU and `product` on a GPU take a weight for each image",
    )

    UNNAMED_DST = (
        "the template writes the axes in an order that a layout of n, c and spatial axes has",
        "Give src the order of its logical axes, as bsc and bhsc have it",
    )
    BLOCKS = (
        "the template reads operands along whole axes, not one element for a block of neighbours",
        "Run that operator in a plan of its own",
    )
    RESULT_DTYPE = (
        "the template writes results besides the output in the dtype that the plan computes in",
        "Run the operators up to that one, and the others, as plans of their own",
    )
    PADDED_SRC = (
        "the template copies src with its padding, and a process cannot address such a copy",
        "Reduce padding and dilation, or choose a GPU: there `product` reads src without a copy",
    )

    # Kernels that the template for Hopper leaves to others.
    NOT_HOPPER = (
        "the template uses copies and products that only sm_90 has",
        "`product` and `attention` run on any GPU",
    )
    NOT_HALF = (
        "the template multiplies f16 and bf16, and outside of attention f32 that may be rounded to TF32",
        "`product` takes any dtype, and `attention` f32; precision=tf32 allows rounded factors",
    )
    PROLOGUE = (
        "the template multiplies src as it lies, without an operator in front of the contraction",
        "`product` on a GPU and `direct` on the CPU compute operators in front of it",
    )
    SAVED = (
        "the template copies dst out of shared memory, and saves nothing, or values of dst's dtype alone",
        "`product` and `attention` save values behind their products",
    )
    COPY_ALIGNMENT = (
        "channels, features and strides have to be multiples of 16 bytes, the unit of the copy engine",
        "Pad them to a multiple of 8; `product` and `attention` take any size",
    )
    BESIDE_KEYS = (
        "beside attention's own tensors the template reads operands per channel, and nothing else",
        "`attention` reads operands per element",
    )
    TURNED_COPIES = "keys come by copies, which turn no pairs", "`attention` turns keys as it loads them"
    UNSEEN_KEYS = (
        "64 queries in a row see a key of every block that the template multiplies",
        "`attention` has tiles of 16 queries; or leave out the queries that see no key",
    )
    CAPPED_SLOPES = (
        "sums of keys and of values of more than 64 elements leave no registers for a formula of scores",
        "`attention_gradient` has smaller tiles",
    )
    DRAWN = ("random numbers leave no registers for 128 sums a thread", "`product` draws them")
    COPY_STEP = ("the copy engine steps over at most 8 positions", "`product` takes any stride")
    COPY_AXES = ("the copy engine reads tensors of at most 5 axes", "`product` takes any number of axes")
    GROUP_TILES = (
        "a group needs whole tiles: a multiple of 16 channels and of 16 features",
        "`product` takes groups of any width",
    )


class Claim(NamedTuple):
    """A condition; if it does not hold: the reason, both sides, and the operator to blame."""

    holds: bool
    reason: Reason
    got: str | None = None
    want: str | None = None
    operator: int | None = None


def claim(
    holds: bool, reason: Reason, *, got: object = None, want: object = None, operator: int | None = None
) -> Claim:
    """A claim; `got` and `want` are anything that prints, `operator` is an index into the plan."""
    told = None if holds or got is None else str(got), None if holds or want is None else str(want)
    return Claim(bool(holds), reason, *told, operator)


@dataclass(frozen=True)
class Refusal:
    """A claim that did not hold.

    Attributes:
        reason: its entry in the catalogue.
        got: the plan's side; None where the reason's sentence is enough.
        want: the side of the rule or template.
        operator: index of the operator to blame; None for the plan as a whole.
        tried: the rule or template that refused.
        held: number of its claims that held before this one. A refusal with more is a nearer miss.
    """

    reason: Reason
    got: str | None = None
    want: str | None = None
    operator: int | None = None
    tried: str = ""
    held: int = 0

    def is_like(self, other: Refusal) -> bool:
        """Whether both give the same reason with the same values, by any rule or template."""
        return replace(self, tried="", held=0) == replace(other, tried="", held=0)

    @property
    def code(self) -> str:
        """The reason's code, in kebab-case."""
        return self.reason.code

    @property
    def sentence(self) -> str:
        """The cause, as the catalogue has it."""
        return self.reason.sentence

    @property
    def remedy(self) -> str:
        """The advice, as the catalogue has it."""
        return self.reason.remedy

    def __str__(self) -> str:
        met = f"{self.got}; " if self.got is not None else ""
        wanted = f"; want {self.want}" if self.want is not None else ""
        return f"{met}{self.sentence}{wanted}"

    def to_json(self) -> dict[str, object]:
        """The refusal as JSON values."""
        return {
            "code": self.code,
            "sentence": self.sentence,
            "remedy": self.remedy,
            "got": self.got,
            "want": self.want,
            "operator": self.operator,
            "tried": self.tried,
        }


def first_refusal(claims: Iterable[Claim], tried: str = "") -> Refusal | None:
    """The first claim that does not hold, or None; later ones are not asked: they may rely on the earlier."""
    for held, made in enumerate(claims):
        if not made.holds:
            return Refusal(made.reason, made.got, made.want, made.operator, tried, held)
    return None


def splits(remedy: str) -> bool:
    """Whether a remedy makes several plans of the plan: a template that it names takes one of these."""
    return "Split the plan" in remedy or "plan of its own" in remedy


def named(remedy: str) -> tuple[str, ...]:
    """The rules and templates that a remedy names as alternatives."""
    return tuple(re.findall(r"`(\w+)`", remedy))
