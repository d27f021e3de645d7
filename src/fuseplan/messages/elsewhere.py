"""Names that other libraries have for operators, fields, dtypes and layouts, read from `elsewhere.toml`."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

Answers = Mapping[str, str]

# Layouts: the first of a rank's, or the last.
LAYOUTS = {"channelsfirst": 0, "ncl": 0, "channelslast": -1, "nlc": -1}


def folded(name: str) -> str:
    """The name without case, spaces, underscores, dots and dashes: `LayerNorm` is `layer_norm`."""
    return re.sub(r"[\s_.-]", "", name).casefold()


@functools.cache
def answers(kind: str) -> Answers:
    """By other libraries' folded names of `operators`, `fields` or `dtypes`, the name in a plan.

    Where no plan has such a thing, the answer is a sentence that tells what there is instead.
    """
    told = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    listed = [*((names, own) for own, names in told[kind].items()), *told["lacking"].get(kind, ())]
    return {name: answer for names, answer in listed for name in names.split()}
