"""Holds the shape of the code: layers, budgets, docstrings, and what an import may cost.

The budgets are 400 lines a module, 50 lines a function (its docstring not counted), three levels of nesting;
ruff holds the complexity (10) and the line length. What is over a budget stands in `allowed_excess.toml`
with its exact size and its reason: the list may only shrink.
"""

import ast
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from fuseplan.op import Elementwise, Op
from fuseplan.ops import UNARY
from fuseplan.ops.conversion import Dequantize, Quantize
from fuseplan.ops.dropout import Dropout
from fuseplan.ops.dynamic import DynamicQuantize
from fuseplan.ops.losses import LOSSES
from fuseplan.ops.parts import PARTED
from fuseplan.stores.cache import NO_KERNELS, fingerprint_of
from fuseplan.system.limits import limits

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "fuseplan"
MODULES = sorted(PACKAGE.rglob("*.py"))
PYTHON_FILES = sorted(
    path
    for folder in ("src", "tests", "examples", "benchmarks", "docs")
    for path in (ROOT / folder).rglob("*.py")
)

# Imports go up only, or stay in a row; a row has no cycle.
LAYERS = (
    ("errors", "messages", "settings", "system"),
    ("language", "op", "scalar"),
    ("ops",),
    ("plans",),
    ("kernels",),
    ("tensors",),
    ("stores",),
    ("backends",),
    ("measure",),
    ("execution", "export"),
    ("tuning",),
    ("compile", "explanation", "extend", "loaded"),
    ("graph",),
    ("backward",),
    ("reports",),
    ("onnx", "torch"),
    ("bench", "compat", "miopen", "cli"),
)
RANK = {name: rank for rank, row in enumerate(LAYERS) for name in row}
ENTRANCES = {"__init__", "__main__"}  # the package's own front door may import any of it

LINES_A_MODULE = 400
LINES_A_FUNCTION = 50
NESTING = 3
FACTS_IN_CLASS = (*UNARY, *PARTED, *LOSSES, Quantize, Dequantize, DynamicQuantize, Dropout)
FILES_AN_OPERATOR = 8
LINES_AN_IMPORT = 14_821  # of the 84,000 that there are; a millisecond is about a hundred
EXCESSES_AT_MOST = 0  # lower this when an entry of allowed_excess.toml goes; never raise it


def dotted(path: Path) -> str:
    """`src/fuseplan/ops/affine.py` as `fuseplan.ops.affine`."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {dotted(path): path for path in MODULES}
# The tools of a checkout. They are no part of the package, and keep the same rules.
TOOLS = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in ("benchmarks", "docs/pages")
    for path in sorted((ROOT / folder).rglob("*.py"))
}


def statements(path: Path) -> Iterator[ast.AST]:
    """All statements of a file: a tenth of its nodes. Imports and functions are among them."""
    ahead: list[ast.AST] = [ast.parse(path.read_text())]
    while ahead:
        node = ahead.pop()
        yield node
        ahead += _held(node)


def _held(node: ast.AST) -> Iterator[ast.AST]:
    """The statements in a block, or the handlers and cases that have them."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        yield from getattr(node, name, ())


@cache
def imported(path: Path) -> frozenset[str]:
    """The modules of the package that a file imports, at any level of its code."""
    found: set[str] = set()
    for node in statements(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            below = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (below & NAMES.keys()) or {node.module}
    return frozenset(name for name in found if name.split(".")[0] == "fuseplan") - {dotted(path)}


def component(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in statements(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function from its `def`, without its docstring."""
    first = function.body[0]
    is_told = ast.get_docstring(function) is not None
    docstring = (first.end_lineno or 0) - first.lineno + 1 if is_told else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)


def nesting(node: ast.AST, depth: int = 0) -> int:
    """The deepest block in `node`; an `elif` is no deeper than its `if`, an inner function starts again."""
    deepest = depth
    for child in _held(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, nesting(child, depth + (isinstance(child, BLOCKS) and not is_elif)))
    return deepest


def excesses() -> Iterator[tuple[str, int]]:
    """What is over a budget: where and of what kind, and its size."""
    for path in PYTHON_FILES:
        where = path.relative_to(ROOT).as_posix()
        lines = path.read_text().count("\n")
        if lines > LINES_A_MODULE:
            yield f"{where} lines", lines
        for function in functions(path):
            if length(function) > LINES_A_FUNCTION:
                yield f"{where}:{function.name} lines", length(function)
            if nesting(function) > NESTING:
                yield f"{where}:{function.name} nesting", nesting(function)


def test_every_module_has_a_layer() -> None:
    homeless = {component(name) for name in NAMES} - RANK.keys() - ENTRANCES
    assert not homeless, f"add {sorted(homeless)} to LAYERS"


def test_imports_go_up_only() -> None:
    inner = {name: path for name, path in NAMES.items() if component(name) not in ENTRANCES}
    for name, other in ((name, other) for name, path in inner.items() for other in sorted(imported(path))):
        assert component(other) not in ENTRANCES, f"{name} imports the front door, not the module"
        assert RANK[component(other)] <= RANK[component(name)], f"{name} imports {other}, which is below it"


def test_no_import_goes_round() -> None:
    edges = {name: imported(path) & NAMES.keys() for name, path in NAMES.items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, "import cycle: " + " -> ".join((*trail[trail.index(name) :], name))
        if name in done:
            return
        for other in edges[name]:
            visit(other, (*trail, name))
        done.add(name)

    for name in NAMES:
        visit(name, ())


def test_kernels_follow_from_nothing_that_the_cache_leaves_out() -> None:
    """All that choosing, emitting and building a kernel imports is in the cache's keys."""
    met: set[str] = set()
    ahead = [name for name in NAMES if component(name) in ("backends", "build", "select", "lower", "export")]
    while ahead:
        name = ahead.pop()
        if name not in met:
            met.add(name)
            ahead += imported(NAMES[name]) & NAMES.keys()
    assert "fuseplan.scalar" in met
    assert not {component(name) for name in met} & set(NO_KERNELS)
    assert all((PACKAGE / name).is_dir() for name in NO_KERNELS)


def test_a_table_is_no_part_of_the_fingerprint(tmp_path: Path) -> None:
    for name in (*NO_KERNELS, "backends"):
        (tmp_path / name).mkdir()
    first = fingerprint_of(tmp_path, NO_KERNELS)
    (tmp_path / "bench" / "table.py").write_text("1")
    assert fingerprint_of(tmp_path, NO_KERNELS) == first
    (tmp_path / "backends" / "bench").mkdir()
    (tmp_path / "backends" / "bench" / "table.py").write_text("1")
    assert fingerprint_of(tmp_path, NO_KERNELS) != first


def test_budgets_are_kept() -> None:
    allowed = tomllib.loads((ROOT / "tests" / "allowed_excess.toml").read_text()).get("excess", [])
    assert all(entry["reason"].strip() for entry in allowed), "each entry gives its reason"
    assert len(allowed) <= EXCESSES_AT_MOST, "the list may only shrink"
    found = dict(excesses())
    listed = {entry["what"]: entry["size"] for entry in allowed}
    assert found == listed, "over budget, or smaller than its entry: bring the code or the list up to date"


@pytest.mark.parametrize("op", FACTS_IN_CLASS, ids=lambda op: op.name)
def test_few_files_know_an_operator_whose_class_has_the_facts(op: type[Op]) -> None:
    known = re.compile(rf"""\b{op.__name__}\b|["']{op.name}["']|^{op.name} = """, re.MULTILINE)
    files = [*MODULES, *PACKAGE.rglob("*.toml")]
    found = [str(path.relative_to(PACKAGE)) for path in files if known.search(path.read_text())]
    assert len(found) <= FILES_AN_OPERATOR, found


def undocumented(module: ModuleType) -> Iterator[str]:
    """Public functions, classes and methods without a docstring; a method may have its base's.

    An operator's `apply` has none: the class's docstring begins with its formula.
    """
    own = {
        name: value
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__
    }
    for name, value in own.items():
        if name.startswith("_") or not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        if not inspect.getdoc(value):
            yield name
        if not inspect.isclass(value):
            continue
        for method in vars(value):
            member = getattr(value, method)
            is_told = inspect.isfunction(member) or inspect.ismethod(member) or isinstance(member, property)
            is_formula = method == "apply" and issubclass(value, Elementwise)
            if is_told and not (method.startswith("_") or is_formula or inspect.getdoc(member)):
                yield f"{name}.{method}"


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, of Inductor's imports
def test_public_names_have_docstrings() -> None:
    for name in sorted(NAMES | TOOLS):
        module = importlib.import_module(name)
        assert module.__doc__, f"{name} does not say what it is for"
        bare = list(undocumented(module))
        assert not bare, f"{name}: {', '.join(bare)} without a docstring"


def naming(words: str, but: str) -> Iterator[tuple[str, ast.AST]]:
    """The nodes of each module whose text has one of the words, except one module's; with its name."""
    for name, path in (NAMES | TOOLS).items():
        if name != but and re.search(words, text := path.read_text()):
            yield from ((name, node) for node in ast.walk(ast.parse(text)))


def test_only_settings_reads_the_environment() -> None:
    for name, node in naming("env", but="fuseplan.settings"):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            assert node.attr not in ("environ", "getenv", "environb", "putenv"), f"{name}:{node.lineno}"
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            assert not {alias.name for alias in node.names} & {"environ", "getenv"}, f"{name}:{node.lineno}"


def test_only_locks_makes_locks() -> None:
    """A forked child would wait for ever for one that another thread of its parent held."""
    for name, node in naming("Lock|Condition|cached_property", but="fuseplan.system.locks"):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "threading"
        ):
            assert node.attr not in ("Lock", "RLock", "Condition"), f"{name}:{node.lineno}"
        if isinstance(node, ast.ImportFrom) and node.module in ("threading", "functools"):
            assert not {alias.name for alias in node.names} & {"Lock", "RLock", "cached_property"}, name


def test_every_limit_is_some_readers() -> None:
    written = "".join(path.read_text() for path in (*MODULES, *TOOLS.values()))
    assert [name for name in limits() if f"limits.{name}" not in written] == []


def loaded_by_importing() -> set[str]:
    """The modules that `import fuseplan` loads into a new interpreter."""
    program = "import sys, fuseplan; print(*sys.modules)"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert printed.returncode == 0, printed.stderr
    return set(printed.stdout.split())


def test_importing_the_package_is_cheap() -> None:
    """Counted, since a time depends on the machine: half of an import's time goes with the lines."""
    loaded = loaded_by_importing()
    toolchains = {"llvmlite", "torch", "triton", "onnx", "matplotlib", "rich", "click", "ml_dtypes"}
    slow = {"importlib.metadata", "email", "statistics", "fractions", "unittest"}  # 1 to 20 ms each
    assert not loaded & (toolchains | slow)
    assert not [name for name in loaded if ".templates" in name], "a backend loads them when it is asked"
    late = ("fuseplan.measure", "fuseplan.tuning")
    assert not [name for name in loaded if name.startswith(late)], "compiling measures nothing"
    lines = sum(NAMES[name].read_text().count("\n") for name in loaded & NAMES.keys())
    assert lines <= LINES_AN_IMPORT


def test_the_map_names_every_module() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    here = [place for place in (ROOT / "src" / "fuseplan").iterdir() if not place.name.startswith("_")]
    names = [f"{each.name}/" if each.is_dir() else each.name for each in here if each.suffix in ("", ".py")]
    assert [name for name in sorted(names) if f"`{name}" not in page] == []


def test_every_data_file_is_packaged() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    packaged = {place for pattern in declared["fuseplan"] for place in PACKAGE.glob(pattern)}
    found = {each for each in PACKAGE.rglob("*.*") if each.is_file() and each.suffix not in (".py", ".pyc")}
    assert found == packaged
