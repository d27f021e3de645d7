"""Attention as a record: the extents of its tensors, which keys a query sees, and what its scores are.

The float64 meaning is written here once, for NumPy's arrays and torch's tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import Any

import numpy as np

from fuseplan.language.arithmetic import ARRAYS, Arithmetic
from fuseplan.language.formula import parse_expression
from fuseplan.language.slopes import slopes
from fuseplan.scalar import Scalar, fold, indices_of, leaf, replaced, tanh
from fuseplan.system.locks import cached_property

ROWS = 512  # queries of one head whose scores the float64 meaning has in memory at once


@dataclass(frozen=True)
class Attend:
    """dst[b, h, s] = sum over t of softmax(score)[t] * value[b, g, t], where g = h // (heads // key_heads).

    score = scale * sum over d of src[b, h, s, d] * key[b, g, t, d], then softcap * tanh(score / softcap)
    where there is a softcap, then the formula of it, then plus the bias.

    Attributes:
        batch, heads, queries, size: extents of src: b, h, s, d.
        key_heads, keys: extents of key and value: g, t.
        features: elements of a row of value and of dst.
        scale: of the products.
        softcap: the bound of the scores; 0 for none.
        is_causal: a query at place p sees the keys up to p.
        window: it sees the keys less than `window` places away; 0 for all.
        offset: the place of the first query, counted in keys.
        bias_axes, mask_axes: the axes among b, h, s, t of what is added to the scores, and of a mask that is
            true where a query sees a key; "" for none.
        is_padded: each image has a length, and no query sees the keys from there on.
        nan_unseen: the result of a query that sees no key is NaN, as its softmax is, not 0.
        rotary: elements of a row of src and of key that are turned by its place, in front; 0 for none.
        interleaved: the elements of a pair are neighbours, not half of `rotary` apart.
        formula: of a score `x` and its places `index(b)`, `index(h)`, `index(s)` and `index(t)`; "" for none.
    """

    batch: int
    heads: int
    queries: int
    size: int
    key_heads: int
    keys: int
    features: int
    scale: float
    softcap: float
    is_causal: bool
    window: int
    offset: int
    bias_axes: str
    mask_axes: str
    is_padded: bool
    nan_unseen: bool = False
    rotary: int = 0
    interleaved: bool = False
    formula: str = ""

    @property
    def text(self) -> str:
        """All fields in one line; those of scores and masks only where they are not as usual."""
        query, key = (
            f"{heads}x{rows}x{self.size}"
            for heads, rows in ((self.heads, self.queries), (self.key_heads, self.keys))
        )
        line = f"attention {query} key={key} features={self.features} scale={self.scale!r}"
        unusual = (
            ("causal", self.is_causal),
            (f"window={self.window}", self.window),
            (f"offset={self.offset}", self.offset and (self.is_causal or self.window)),
            (f"softcap={self.softcap!r}", self.softcap),
            (f"bias={self.bias_axes}", self.bias_axes),
            (f"mask={self.mask_axes}", self.mask_axes),
            ("lengths", self.is_padded),
            ("nan_unseen", self.nan_unseen),
            (f"rotary={self.rotary}", self.rotary),
            ("interleaved", self.interleaved),
            (f"score={self.formula!r}", self.formula),
        )
        return " ".join([line, *(words for words, applies in unusual if applies)])

    @property
    def group(self) -> int:
        """Heads of src that read the same keys."""
        return self.heads // self.key_heads

    @property
    def extents(self) -> Mapping[str, int]:
        """Of the scores, by the letter of the axis."""
        return {"b": self.batch, "h": self.heads, "s": self.queries, "t": self.keys}

    @property
    def is_scaled(self) -> bool:
        """Whether a score is its sum of products times the scale, and no more."""
        return not (self.softcap or self.formula)

    @cached_property
    def score(self) -> Scalar:
        """A score before its bias, of the sum of products `x` and the score's places."""
        score = leaf("x") * self.scale
        if self.softcap:
            score = tanh(leaf("x") * (self.scale / self.softcap)) * self.softcap
        return replaced(parse_expression(self.formula, ("x",)), {"x": score}) if self.formula else score

    @property
    def places(self) -> str:
        """The axes among b, h, s, t whose places the formula reads."""
        read = indices_of(self.score)
        return "".join(axis for axis in "bhst" if f"index({axis})" in read)

    @cached_property
    def slope(self) -> Scalar:
        """The derivative of a score along the sum of products `x`."""
        return slopes.derivative(self.score)

    @property
    def angles(self) -> tuple[int, int]:
        """The extents of the cosines and sines: a place among the keys, and a pair."""
        return max(self.keys, self.queries + self.offset), self.rotary // 2

    @property
    def pair_steps(self) -> tuple[int, int]:
        """Elements from one pair to the next, and from the first of a pair to the second."""
        return (2, 1) if self.interleaved else (1, self.rotary // 2)

    @property
    def is_banded(self) -> bool:
        """Whether the keys that a query sees depend on its place."""
        return self.is_causal or bool(self.window)

    def seen(self, first: int, count: int = 1) -> tuple[int, int]:
        """The first key that some of `count` queries from `first` on may see, and the one past the last.

        Lengths and masks are not counted.
        """
        low, high = 0, self.keys
        if self.window:
            low = max(low, first + self.offset - self.window + 1)
            high = min(high, first + count - 1 + self.offset + self.window)
        if self.is_causal:
            high = min(high, first + count + self.offset)
        return low, max(low, high)

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it may see, over all heads."""
        spans = (self.seen(query) for query in range(self.queries))
        each = sum(end - begin for begin, end in spans) if self.is_banded else self.queries * self.keys
        return self.batch * self.heads * each

    @property
    def flops(self) -> int:
        """Two a product, of the pairs that the places allow."""
        return 2 * self.pairs * (self.size + self.features)

    def evaluate(self, given: Mapping[str, Any], by: Arithmetic = ARRAYS) -> tuple[Any, Any]:
        """dst (b, h, s, features), and the logarithm of each query's sum of exponentials (b, h, s).

        Args:
            given: `query` (b, h, s, d), `key`, `value`, and `bias`, `mask`, `lengths` where there are such.
            by: the arithmetic of these tensors.
        """
        where, largest, around = by.table["where"], by.joins["maximum"], tuple(given["query"].shape[:3])
        dst, sums = by.empty((*around, self.features)), by.empty(around)
        for batch, head, rows, keys, _, scores in self._scored(given, by):
            value = given["value"][batch, head // self.group][keys]
            top = largest(scores, 1, keepdims=True) if scores.shape[1] else scores.sum(1)[:, None] - inf
            top = where(top == -inf, 0.0, top)
            weights = by.table["exp"](scores - top)
            total = weights.sum(1)[:, None]
            divisor = total if self.nan_unseen else where(total == 0, 1.0, total)
            dst[batch, head, rows] = weights @ value / divisor
            sums[batch, head, rows] = (by.table["log"](total) + top)[:, 0]
        return dst, sums

    def differentiate(self, given: Mapping[str, Any], by: Arithmetic = ARRAYS) -> dict[str, Any]:
        """The gradients of query, key and value, in float64.

        Args:
            given: as for `evaluate`, and `grad` (b, h, s, features), `lse` and `delta` (b, h, s).
            by: as for `evaluate`.
        """
        gradients = {name: by.zeros(tuple(given[name].shape)) for name in ("query", "key", "value")}
        for batch, head, rows, keys, known, scores in self._scored(given, by):
            own, at = (batch, head, rows), (batch, head // self.group, keys)
            lse, delta = given["lse"][own][:, None], given["delta"][own][:, None]
            weights = by.table["exp"](scores - by.table["where"](lse == -inf, 0.0, lse))
            by_weights = given["grad"][own] @ given["value"][at].swapaxes(0, 1)
            by_scores = weights * (by_weights - delta) * fold(self.slope, known, by.table)
            gradients["query"][own] += by_scores @ given["key"][at]
            gradients["key"][at] += by_scores.swapaxes(0, 1) @ given["query"][own]
            gradients["value"][at] += weights.swapaxes(0, 1) @ given["grad"][own]
        return gradients

    def _scored(
        self, given: Mapping[str, Any], by: Arithmetic
    ) -> Iterator[tuple[int, int, slice, slice, Mapping[str, Any], Any]]:
        """Image, head, some queries and the keys of the image; the leaves of their scores, and the scores."""
        where, query, keys_of = by.table["where"], given["query"], given["key"]
        if self.rotary:
            query, keys_of = self._turned(query, self.offset, given, by), self._turned(keys_of, 0, given, by)
        for batch, head, rows in self._blocks():
            at = {"b": batch, "h": head, "s": rows, "t": slice(None)}
            keys = slice(max(0, int(given["lengths"][batch])) if self.is_padded else None)
            key = keys_of[batch, head // self.group][keys]
            products = query[batch, head, rows] @ key.swapaxes(0, 1)
            places: dict[str, Any] = {"b": batch, "h": head}
            places["s"] = np.arange(rows.start, rows.stop)[:, None]
            places["t"] = np.arange(self.keys)[None, keys]
            known = {f"index({axis})": by.table["const"](places[axis] * 1.0) for axis in self.places}
            known["x"] = products
            scores = fold(self.score, known, by.table)
            if self.bias_axes:
                scores = scores + given["bias"][tuple(at[axis] for axis in self.bias_axes)][..., keys]
            if self.mask_axes:
                mask = given["mask"][tuple(at[axis] for axis in self.mask_axes)][..., keys]
                scores = where(mask == 0, -inf, scores)
            if self.is_banded:
                scores = where(by.table["const"](self._hidden(rows))[..., keys] > 0, -inf, scores)
            yield batch, head, rows, keys, known, scores

    def _turned(self, rows: Any, first: int, given: Mapping[str, Any], by: Arithmetic) -> Any:
        """Rows whose pairs are turned by the angles of their places, from `first` on."""
        cos, sin = (given[name][first : first + rows.shape[2]] for name in ("cos", "sin"))
        (step, apart), count = self.pair_steps, self.rotary // 2
        one, other = (slice(begin, begin + step * (count - 1) + 1, step) for begin in (0, apart))
        made = by.empty(tuple(rows.shape))
        made[...] = rows
        made[..., one] = rows[..., one] * cos - rows[..., other] * sin
        made[..., other] = rows[..., other] * cos + rows[..., one] * sin
        return made

    def _blocks(self) -> Iterator[tuple[int, int, slice]]:
        """Some queries of one head at a time."""
        firsts = range(0, self.queries, ROWS)
        for batch, head, first in product(range(self.batch), range(self.heads), firsts):
            yield batch, head, slice(first, min(first + ROWS, self.queries))

    def _hidden(self, rows: slice) -> Any:
        """1 for each key that a query's place hides from it, else 0."""
        apart = np.arange(self.keys) - np.arange(rows.start, rows.stop)[:, None] - self.offset
        hidden = apart > 0 if self.is_causal else np.zeros(apart.shape, bool)
        return (hidden | (abs(apart) >= self.window) if self.window else hidden).astype(np.float64)


@dataclass(frozen=True)
class AttendGradient:
    """The gradient of attention by its queries, or by its keys and values.

    With weights = exp(score - lse) and by_scores = weights * (grad . value - delta) * slope, the gradient of
    query is the sum of by_scores * key over the keys, that of key the sum of by_scores * query and that of
    value the sum of weights * grad over the queries that see a key, of all heads that read it.

    Attributes:
        attend: the attention.
        by: `query`; or `key`, for key and value.
    """

    attend: Attend
    by: str

    def evaluate(self, given: Mapping[str, Any], by: Arithmetic = ARRAYS) -> tuple[Any, Any]:
        """The gradient, and that of value besides; the arguments are as for `Attend.differentiate`."""
        made = self.attend.differentiate(given, by)
        return made[self.by], made["value"]

    @property
    def text(self) -> str:
        """All fields in one line."""
        return f"gradient by {self.by} of {self.attend.text}"

    @property
    def flops(self) -> int:
        """Two a product: scores, grad . value, and one or two sums."""
        made, is_key = self.attend, self.by == "key"
        return 2 * made.pairs * (2 * made.size + made.features * (1 + is_key))
