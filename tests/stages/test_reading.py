"""What comes from outside: within bounds, and of the declared types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fuseplan.compat.miopen_driver.sweep import lines_of
from fuseplan.errors import ArgumentError
from fuseplan.system import limits
from fuseplan.system.reading import bytes_of, json_lines, json_of, record, text_of


@dataclass(frozen=True)
class Inner:
    name: str


@dataclass(frozen=True)
class Whole:
    name: str
    count: int
    share: float | None
    pairs: tuple[tuple[str, int], ...]
    times: Mapping[str, float]
    inners: tuple[Inner, ...] = ()


TOLD = {"name": "a", "count": 1, "share": 2, "pairs": [["b", 3]], "times": {"c": 4}}


def test_a_record_is_what_its_type_declares() -> None:
    found = record(Whole, {**TOLD, "inners": [{"name": "d"}]})
    assert found == Whole("a", 1, 2.0, (("b", 3),), {"c": 4.0}, (Inner("d"),))
    assert type(found.share) is type(found.times["c"]) is float
    assert record(Whole, {**TOLD, "share": None}).share is None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"name": 3}, "name is 3; want a text"),
        ({"name": None}, "name is None; want a text"),
        ({"name": "\x1b[2J"}, r"name is '\x1b[2J'; want a text"),
        ({"name": "\ud800"}, r"name is '\ud800'; want a text"),
        ({"count": True}, "count is True; want a whole number"),
        ({"count": 1.5}, "count is 1.5; want a whole number"),
        ({"share": "2"}, "share is '2'; want a finite number"),
        ({"share": float("inf")}, "share is inf; want a finite number"),
        ({"pairs": 3}, "pairs is 3; want a list"),
        ({"pairs": [["b"]]}, "pairs[0] is ['b']; want 2 values"),
        ({"pairs": [["b", "c"]]}, "pairs[0][1] is 'c'; want a whole number"),
        ({"times": [1]}, "times is [1]; want a list"),
        ({"times": {"c": {}}}, "times is {}; want a finite number"),
        ({"inners": [{"nam": "d"}]}, "inners[0] has an unknown member 'nam'; want name"),
        ({"inners": [3]}, "inners[0] is 3; want an object"),
        ({"more": 1}, "it has an unknown member 'more'"),
        ({"name": ["x" * 1000]}, "name is ['" + "x" * 55 + "...; want a text"),
    ],
)
def test_a_member_of_another_type_is_refused_by_its_place(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the whole message is compared below
        record(Whole, {**TOLD, **change})
    assert str(raised.value).startswith(told)


def test_a_missing_member_is_named() -> None:
    with pytest.raises(ValueError, match="it has no 'count'"):
        record(Whole, {"name": "a"})
    with pytest.raises(ValueError, match=r"it is \[\]; want an object"):
        record(Whole, [])


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"\xff", "line 1: byte 0xff is not UTF-8 text"),
        (b'"a\n\xc3"', "line 2: byte 0xc3 is not UTF-8 text"),
        (b"[" * 100_000, "nested deeper than 32 levels"),
        (b'{"a":' * 100_000, "nested deeper than 32 levels"),
        (b'"\\"' * 300_000 + b"[" * 40, "Extra data"),
        (b"NaN", "NaN is not a number in JSON"),
        (b"[-Infinity]", "-Infinity is not a number in JSON"),
        (b"1" * 5000, "digit"),
        (b"", "Expecting value"),
    ],
)
def test_what_is_no_json_within_bounds_is_a_value_error(data: bytes, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        json_of(data)


def test_brackets_in_strings_are_no_levels() -> None:
    text = b'{"a": "' + b"[" * 100 + b'\\"{", "b": ' + b"[" * 31 + b"]" * 31 + b"}"
    assert json_of(text)["a"] == "[" * 100 + '"{'


def test_a_line_that_is_none_does_not_hide_the_others() -> None:
    long = b'"' + b"x" * limits.LINE_BYTES + b'"'
    found = {}
    for number, told in json_lines(b"1\n\n\xff\n" + long + b"\n[\n2"):
        try:
            found[number] = told()
        except ValueError as error:
            found[number] = str(error)[:14]
    assert found == {1: 1, 3: "line 1: byte 0", 4: "it has more th", 5: "Expecting valu", 6: 2}


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_bytes(b"\xef\xbb\xbfab")
    assert text_of(bytes_of(place, 5)) == "ab"
    with pytest.raises(ValueError, match="it has more than 4 bytes"):
        bytes_of(place, 4)
    with pytest.raises(ValueError, match="it has more than 4 bytes"):
        bytes_of(Path("/dev/zero"), 4)


def test_a_sweep_that_is_no_text_or_never_ends_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lines").write_bytes(b"CBAInfer\n\xff")
    with pytest.raises(ArgumentError, match="line 2: byte 0xff is not UTF-8 text; want lines of UTF-8 text"):
        lines_of(tmp_path / "lines")
    monkeypatch.setattr(limits, "SWEEP_BYTES", 1000)
    with pytest.raises(ArgumentError, match="it has more than 1000 bytes"):
        lines_of(Path("/dev/zero"))
