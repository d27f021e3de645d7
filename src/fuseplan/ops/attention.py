"""Attention: a softmax of scores, and a product with it; the scores are in no memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import isfinite, sqrt

from fuseplan.errors import PlanError
from fuseplan.language import layouts
from fuseplan.language.attend import Attend, AttendGradient
from fuseplan.language.declarations import Array, Beside, operand, result, word
from fuseplan.language.extents import is_integer, outermost_first
from fuseplan.language.fields import real, refused
from fuseplan.language.formula import parse_expression
from fuseplan.language.indices import EXACT_IN_F32
from fuseplan.language.tensor import Dense, TensorSpec
from fuseplan.messages.excerpt import shown
from fuseplan.op import Given, Op, operator
from fuseplan.ops.expression import written
from fuseplan.scalar import Scalar, indices_of

AXES = "bhst"  # of the scores
COUNTS = ("keys", "key_heads", "features", "window")


@operator
class Attending(Op):
    """What attention and its gradients share: how scores are made, and which keys a query sees."""

    kind = "attention"
    reads = "rows"

    key = operand(lambda op, src: Beside(op.lying(src, op.attend(src).size, op.key_strides)))
    value = operand(lambda op, src: Beside(op.lying(src, op.attend(src).features, op.value_strides)))
    bias = operand(lambda op, src: Beside(op.along(src, op.bias_axes, src.dtype)), when="bias_axes")
    mask = operand(lambda op, src: Beside(op.along(src, op.mask_axes, "bool")), when="mask_axes")
    lengths = operand(lambda op, src: Beside(op.along(src, "b", "i32")), when="is_padded")
    is_causal: bool = False
    keys: int = 0
    key_heads: int = 0
    features: int = 0
    scale: float = 0.0
    offset: int = 0
    window: int = 0
    softcap: float = 0.0
    score: str | Callable[[Scalar], Scalar] = ""
    bias_axes: str = ""
    mask_axes: str = ""
    is_padded: bool = False
    key_strides: tuple[int, ...] = ()
    value_strides: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("key_strides", "value_strides"):
            steps = getattr(self, name)
            is_list = isinstance(steps, tuple | list) and len(steps) in (0, 4)
            if not is_list or not all(is_integer(each) and each > 0 for each in steps):
                raise refused(self.name, name, "must be elements between neighbours along b, h, t and d")
            self._set(name, tuple(map(int, steps)))
        for name in (*COUNTS, "offset"):
            value, least = getattr(self, name), 0 if name in COUNTS else 1 - 2**31
            if not is_integer(value) or not least <= value < 2**31:
                raise refused(self.name, name, f"must be a whole number from {least}", got=shown(value))
            self._set(name, int(value))
        for name in ("scale", "softcap"):
            value = real(self.name, name, getattr(self, name))
            if not isfinite(value) or (name == "softcap" and value < 0):
                raise refused(self.name, name, "must be finite, and a softcap not negative", got=shown(value))
            self._set(name, value)
        for name in ("bias_axes", "mask_axes"):
            self._check_axes(name, getattr(self, name))
        if self.score != "":
            self._set("score", written(self.name, "score", self.score))
            self._check_places(str(self.score))

    def _check_places(self, score: str) -> None:
        other = indices_of(parse_expression(score)) - {f"index({axis})" for axis in AXES}
        if other:
            problem, want = "reads other places than those of scores", "index of b, h, s or t"
            raise refused(self.name, "score", problem, got=min(other), want=want)

    def _check_axes(self, name: str, word: object) -> None:
        is_right = isinstance(word, str) and word == "".join(each for each in AXES if each in word)
        if not is_right or str(word)[-1:] not in ("", "t"):
            want = "letters of bhst in this order, t among them, such as hst"
            raise refused(self.name, name, "must be axes of the scores", got=shown(word), want=want)

    def attend(self, src: TensorSpec) -> Attend:
        """The record of the centre.

        Raises:
            PlanError: src has another rank, or its heads are no multiple of the keys' heads.
        """
        if src.rank != 4:
            want = "four logical axes: images, heads, queries and the elements of a head"
            raise PlanError(f"{self.name} reads tensors of four axes", got=str(src), want=want)
        batch, heads, queries, size = src.shape
        key_heads = self.key_heads or heads
        if heads % key_heads:
            raise refused(self.name, "key_heads", "must divide the heads", got=f"{key_heads}, of {heads}")
        made = Attend(
            batch, heads, queries, size, key_heads, self.keys or queries, self.features or size,
            self.scale or 1 / sqrt(size), self.softcap, self.is_causal, self.window, self.offset,
            self.bias_axes, self.mask_axes, self.is_padded, formula=str(self.score),
        )  # fmt: skip
        most = max((made.extents[axis] for axis in made.places), default=0)
        if most > EXACT_IN_F32 and src.compute_dtype == "f32":
            problem = "has places that are too large for numbers of f32"
            raise refused(self.name, "score", problem, got=str(most), want="at most 2^24")
        return made

    def along(self, src: TensorSpec, axes: str, dtype: str) -> Dense:
        """A tensor with these axes of the scores."""
        known = self.attend(src).extents
        return Dense(tuple(known[axis] for axis in axes), dtype)

    def lying(self, src: TensorSpec, size: int, strides: tuple[int, ...] = ()) -> TensorSpec:
        """How key or value lies: with the strides, else as src, or without gaps in its order.

        Raises:
            PlanError: as `attend`; or elements share memory with these strides.
        """
        made = self.attend(src)
        shape = (made.batch, made.key_heads, made.keys, size)
        if not strides:
            return _like(src, shape)
        return TensorSpec(shape, src.dtype, strides=strides, names=src.names)

    @abstractmethod
    def centre(self, src: TensorSpec) -> Attend | AttendGradient:
        """The record of the kernel's centre."""

    def attended(self, src: TensorSpec) -> TensorSpec:
        """Attention's output: (b, h, s, features) in the order of src, without gaps.

        Raises:
            PlanError: as `attend`.
        """
        shape = (*src.shape[:3], self.attend(src).features)
        return src if shape == src.shape and src.layout else _like(src, shape, is_dense=True)


def _angles(op: Attention, src: TensorSpec) -> Beside:
    return Beside(Dense(op.centre(src).angles, src.dtype))


@operator
class Attention(Attending):
    """sum over t of softmax(score)[t] * value[b, g, t]; score = scale * src . key[b, g, t]

    As torch.nn.functional.scaled_dot_product_attention. src has the logical axes b, h, s and d: images,
    heads, queries and the elements of a head; `bshd of bhsd` has the heads inside of the queries. key is (b,
    key_heads, keys, d), value (b, key_heads, keys, features), dst (b, h, s, features). They lie in the order
    of src: with its strides where they have its shape, else without gaps. Where `key_strides` or
    `value_strides` are told, key or value lies so: a range of a product that makes all three. Of the heads
    h, h // key_heads neighbours read one head of key and value (torch's enable_gqa). A query that sees no key
    gives zeros.

    Attributes of 0 are as usual: as many `keys`, `key_heads` and `features` as src has, a `scale` of
    1 / sqrt(d), no `softcap`, and no `window`.

    The query s is at place s + offset among the keys. With `is_causal` it sees the keys up to its place:
    torch's upper left corner; an `offset` of keys - s is the lower right one. With a `window` it sees those
    less than so many places away. With `is_padded`, `lengths` (b) has the number of keys of each image; those
    behind are not read.

    `softcap` bounds the scores: softcap * tanh(score / softcap). `score` is a formula of your own, of the
    bounded score x and its places: `score='x - 0.25 * (index(s) - index(t))'` with the letters b, h, s
    and t, or a Python function of Scalars. A score of minus infinity hides the key. `elementwise` says what
    formulas are made of. After it, `bias` is added; `bias_axes` are
    its axes, of b, h, s, t (t are the keys): `hst` is one for all images. `mask`, with `mask_axes`, is true
    where a query sees a key. With `return_lse` the plan gives `lse` (b, h, s): the logarithm of each sum of
    exponentials, in the compute dtype; minus infinity where no key is seen. With `nan_unseen` the result of
    a query that sees no key is NaN, as a softmax of nothing but minus infinity.

    With `rotary`, so many elements of the rows of src and key are turned as they are read, as the operator
    `rotary` turns them: a key t by the angles of t, a query s by the angles of its place s + offset. cos and
    sin are (places, rotary / 2), for all keys and queries. The elements of a pair are rotary / 2 apart, or
    neighbours with `interleaved`.
    """

    torch = "scaled_dot_product_attention"
    onnx = "Attention"

    cos = operand(_angles, when="rotary")
    sin = operand(_angles, when="rotary")
    lse = result("row", when="return_lse")
    return_lse: bool = False
    nan_unseen: bool = False
    rotary: int = 0
    interleaved: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_integer(self.rotary) or self.rotary < 0 or self.rotary % 2:
            raise refused(self.name, "rotary", "must be an even number of elements", got=shown(self.rotary))
        if self.rotary and self.offset < 0:
            raise refused(self.name, "offset", "has no angles in front of the first key", got=self.offset)

    def centre(self, src: TensorSpec) -> Attend:
        made = super().attend(src)
        if self.rotary > made.size:
            raise refused(
                self.name, "rotary", "turns more than a row", got=self.rotary, want=f"at most {made.size}"
            )
        return replace(made, nan_unseen=self.nan_unseen, rotary=self.rotary, interleaved=self.interleaved)

    def output(self, src: TensorSpec) -> TensorSpec:
        """(b, h, s, features) in the order of src, without gaps; a PlanError as `attend`."""
        return self.attended(src)

    def meaning(self, given: Given) -> tuple[Array, dict[str, Array]]:
        known = {**given.operands, "query": given.src}
        dst, sums = self.centre(given.spec).evaluate(known, given.by)
        return dst, {"lse": sums} if self.return_lse else {}

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield "f32[2x3x5x8, bhsd]", cls()
        yield "f32[2x3x5x7, bhsd]", cls(is_causal=True, return_lse=True)
        yield "f32[1x4x19x8, bshd of bhsd]", cls(keys=23, key_heads=2, features=5, offset=4, window=6)
        yield "f32[2x2x3x16, bhsd]", cls(keys=9, softcap=1.5, bias_axes="hst", mask_axes="bt")
        yield "f32[2x2x3x16, bhsd]", cls(keys=9, score="where(index(t) > index(s), -inf, x - index(h))")
        yield "f32[3x2x1x8, bhsd]", cls(keys=40, key_heads=1, is_padded=True, scale=0.5)
        yield "f32[2x3x5x8, bhsd]", cls(keys=4, mask_axes="bt", nan_unseen=True)
        yield "f32[2x4x5x8, bhsd]", cls(keys=9, offset=6, key_heads=2, rotary=8)
        yield "f32[1x2x7x8, bshd of bhsd]", cls(is_causal=True, rotary=6, interleaved=True)
        yield "f32[2x4x5x8, bshd of bhsd]", cls(key_heads=2, value_strides=(320, 8, 64, 1))


def _delta(op: Attending, src: TensorSpec) -> Beside:
    """As a sum over the features of attention's output lies."""
    order = [axis for axis in outermost_first(src.element_strides) if axis < 3]
    strides = layouts.dense(src.shape[:3], order)
    return Beside(TensorSpec(src.shape[:3], src.compute_dtype, strides=strides))


def _is_by_key(op: AttentionGradient) -> bool:
    return op.by == "key"


@operator
class AttentionGradient(Attending):
    """sum over t of slope[s, t] * key[b, g, t]; slope = weight * (grad[b, h, s] . value[b, g, t] - delta)

    The gradients of src, key and value of `attention` with the same attributes; src is attention's src, its
    queries. weight = exp(score - lse), and slope has the factor d score / d (src . key) too. Scores are
    computed again, a block at a time. By `query`, dst is the gradient of src, shaped like src. By `key`, dst
    is that of key, the sum over queries s and the heads h of a group of slope[s, t] * src[b, h, s]; and
    `value_gradient` that of value, the sum of weight * grad[b, h, s].

    grad (b, h, s, features) is the gradient of attention's output, lse (b, h, s) its result, and delta
    (b, h, s), in the order of src, the sum of grad times the output over the features. bias and mask have no
    gradient.
    """

    lse = operand(lambda op, src: Beside(Dense(src.shape[:3], src.compute_dtype)))
    delta = operand(_delta)
    grad = operand(lambda op, src: Beside(op.attended(src)))
    value_gradient = result(
        lambda op, src: Beside(_like(src, op.lying(src, op.attend(src).features).shape, is_dense=True)),
        when=_is_by_key,
    )
    by: str = word(("query", "key"), default="query")

    def centre(self, src: TensorSpec) -> AttendGradient:
        return AttendGradient(self.attend(src), self.by)

    def output(self, src: TensorSpec) -> TensorSpec:
        """The shape of src or of key, which lies as `attention` reads it, without gaps."""
        shape = self.lying(src, self.attend(src).size).shape if _is_by_key(self) else src.shape
        return src if shape == src.shape and src.layout else _like(src, shape, is_dense=True)

    def meaning(self, given: Given) -> tuple[Array, dict[str, Array]]:
        known = {**given.operands, "query": given.src}
        dst, value = self.centre(given.spec).evaluate(known, given.by)
        return dst, {"value_gradient": value} if _is_by_key(self) else {}

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield "f32[2x3x5x8, bhsd]", cls()
        yield "f32[2x3x5x7, bhsd]", cls(is_causal=True, by="key")
        yield "f32[1x4x19x8, bshd of bhsd]", cls(keys=23, key_heads=2, features=5, offset=4, window=6)
        grouped = cls(keys=23, key_heads=2, features=5, offset=4, window=6, by="key")
        yield "f32[1x4x19x8, bshd of bhsd]", grouped
        capped = cls(keys=9, softcap=1.5, bias_axes="hst", mask_axes="bt")
        yield "f32[2x2x3x16, bhsd]", capped
        yield "f32[2x2x3x16, bhsd]", replace(capped, by="key", is_padded=True)


def _like(src: TensorSpec, shape: tuple[int, ...], *, is_dense: bool = False) -> TensorSpec:
    """A tensor with the strides of src where it has its shape, else in the same order without gaps."""
    if shape == src.shape and not is_dense:
        return src
    strides = layouts.dense(shape, outermost_first(src.element_strides))
    return TensorSpec(shape, src.dtype, strides=strides, names=src.names)
