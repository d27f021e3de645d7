"""Holds docs/guide/trust.md: each statement names its tests, and what it says of a stranger's plan."""

import ast
import json
import re
import subprocess
from pathlib import Path

from fuseplan.system.child import python, python_environment

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "guide" / "trust.md").read_text()
TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")


def test_each_test_that_the_page_names_is_there() -> None:
    named = TEST.findall(PAGE)
    for file, function in named:
        tree = ast.parse((ROOT / "tests" / file).read_text())
        found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert function in found, f"{file} has no {function}"
    assert len(named) > 30


def test_each_statement_in_a_table_names_a_test() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    held = [row for row in rows if not row.startswith(("| ---", "| rule", "| file", "| statement"))]
    assert len(held) > 25
    assert [row for row in held if not TEST.search(row)] == []


# Each line's twin is read before, so that whatever is imported at a first use has been.
PROGRAM = r"""
import json, sys
from fuseplan import FusionPlan
from fuseplan.errors import FuseplanError

def read(text):
    try:
        (FusionPlan.from_json if text.startswith("{") else FusionPlan.parse)(text)
        return "read"
    except FuseplanError as error:
        assert str(error)  # the message is made too
        return "refused"

usual, hostile = json.loads(sys.stdin.read())
for text in usual:
    read(text)
events = []
sys.addaudithook(lambda event, arguments: events.append(event))
told = [read(text) for text in hostile]
found = sorted(set(events))
print(json.dumps([told, found]))
"""
USUAL = (
    'f32[1x8] -> elementwise("x * 2") -> relu',
    'f32[1x8] -> elementwise("y")',
    'f32[1x8] -> elementwise("f(x)")',
    'f32[1x8] -> elementwise("x.y")',
    "f32[1x8] -> leaky_relu(x)",
    "f32[1x8] -> leaky_relu(f(x))",
    "f32[1x8] -> nothing",
    "f32[1x8] -> relu(",
    '{"src": "f32[1x8]"}',
    '{"src": {"shape": [1, 8], "dtype": "f32"}, "operators": [{"operator": "x"}]}',
)
PLANTED = "__import__('os').system('touch planted')"
HOSTILE = (
    'f32[1x8] -> elementwise("x * 3") -> relu',
    f'f32[1x8] -> elementwise("{PLANTED}")',
    "f32[1x8] -> elementwise(\"open('planted', 'w')\")",
    'f32[1x8] -> elementwise("(lambda: x)()")',
    'f32[1x8] -> elementwise("x.__class__.__mro__")',
    'f32[1x8] -> elementwise("[x for x in ().__class__.__base__.__subclasses__()]")',
    "f32[1x8] -> elementwise(\"exec('import planted')\")",
    f"f32[1x8] -> leaky_relu({PLANTED})",
    "f32[1x8] -> leaky_relu(open('planted', 'w'))",
    f"f32[1x{PLANTED}] -> relu",
    f"f32[1x8] -> {PLANTED}",
    "f32[1x8] -> ../../planted",
    json.dumps({"src": PLANTED, "operators": []}),
    json.dumps({"src": {"shape": [1, 8], "dtype": "f32"}, "operators": [{"operator": PLANTED}]}),
)


def test_reading_a_plan_runs_opens_and_imports_nothing(tmp_path: Path) -> None:
    ran = subprocess.run(
        python("-c", PROGRAM), input=json.dumps([USUAL, HOSTILE]), env=python_environment(),
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    told, events = json.loads(ran.stdout)
    assert told == ["read"] + ["refused"] * (len(HOSTILE) - 1)
    harmless = {"compile", "builtins.id", "object.__getattr__", "sys._getframe"}  # `ast.parse` is a `compile`
    assert set(events) <= harmless
    assert list(tmp_path.iterdir()) == []
