"""Functions of an element's index as text of Triton or Gluon: whole numbers, and words in uint32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from fuseplan.backends.triton.storage import Storage, named
from fuseplan.backends.triton.text import Text
from fuseplan.language.words import NUMPY_WORDS, uniform

Table = dict[str, Callable[..., str]]


class Words:
    """The meaning of each function of `words.WORDS`, and of `number` and `random`; of numbers, a number.

    Args:
        namespace: `tl` or `gl`.
        compute: the compute dtype.
        table: the meaning of the other functions.
    """

    def __init__(self, text: Text, namespace: str, compute: str, table: Table) -> None:
        self.text, self.ns = text, namespace
        self._storage = Storage(text, namespace, compute)
        number = named(compute, namespace)
        self.rows: Table = {
            "number": lambda x: text.let("number", f"{x}.to({number})"),
            "low": lambda index: text.let("low", f"{index}.to({namespace}.uint32)"),
            "high": lambda index: text.let(
                "high", f"({index}.to({namespace}.int64) >> 32).to({namespace}.uint32)"
            ),
            "word": self._word,
            "bits": str,
            "mul_low": partial(self._row, "mul_low", "{} * {}"),
            "mul_high": partial(self._row, "mul_high", f"{namespace}.umulhi({{}}, {{}})"),
            "plus": partial(self._row, "plus", "{} + {}"),
            "xor": partial(self._row, "xor", "{} ^ {}"),
            "spread": lambda x: text.let("sign", f"({self._signed(x)} >> 31).to({namespace}.uint32)"),
        }
        self._table = table | self.rows

    def _row(self, name: str, text: str, x: str, y: str) -> str:
        if x.isdigit() and y.isdigit():
            return str(NUMPY_WORDS[name](*map(np.uint64, (x, y))))
        if y == "0" and name in ("plus", "xor"):
            return x
        return self.text.let(name, text.format(x, y))

    def _signed(self, x: str) -> str:
        return f"{x}.to({self.ns}.int32, bitcast=True)"

    def _word(self, x: str) -> str:
        if not x.isidentifier():
            return str(NUMPY_WORDS["word"](float(x)))
        return self.text.let("word", f"{self._storage.narrow('i32', x)}.to({self.ns}.uint32)")

    def random(self, index: str, seed: str, offset: str) -> str:
        """A call of a function of random numbers, which is written once for variable words."""
        words = {"seed": self._word(seed), "offset": self._word(offset)}
        given = {name: word for name, word in words.items() if not word.isdigit()}
        own = {name: name if name in given else word for name, word in words.items()}
        name = "_".join(["random", *(word for word in words.values() if word.isdigit())])

        def write() -> list[str]:
            return [uniform(self._table, "index", own["seed"], own["offset"])]

        return self.text.call(name, {"index": index, **given}, write, [self.text.name("drawn")])[0]
