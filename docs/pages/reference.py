"""The reference pages and the index of codes: `python -m docs.pages.reference docs`.

What the pages say is read off the declarations: operators' classes and samples, rules' conditions, templates'
docstrings and limits, the catalogue of reasons, the tables of settings and of limits, the command line's
options, and the docstrings of public names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, cast

from docs.pages.docstrings import between, markdown, parse, prose
from docs.pages.manual import command_line, public_names
from docs.pages.miopen_names import miopen_names
from docs.pages.reports import reports
from fuseplan.backends import BACKENDS
from fuseplan.bench.markdown import table
from fuseplan.errors import PlanError
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import RULES, conditions, match
from fuseplan.kernels.target import parse_target
from fuseplan.kernels.template import Template
from fuseplan.language.declarations import Operand, Result
from fuseplan.language.layouts import LAYOUTS, ROWS
from fuseplan.language.tensor import Dense, TensorSpec
from fuseplan.messages.reasons import Claim, Reason
from fuseplan.op import Elementwise, Op
from fuseplan.ops import OPERATORS
from fuseplan.ops.normalization import Names, Normalization
from fuseplan.plans.plan import FusionPlan
from fuseplan.plans.text import operator_text, value_text
from fuseplan.scalar import DERIVED, FUNCTIONS, number, text
from fuseplan.settings import VARIABLES
from fuseplan.system.limits import limits

WRITTEN = "<!-- Written by `make docs` from the code: change it there. -->"
CODES = "<!-- codes: written by `make docs` -->", "<!-- end of codes -->"  # around the index
# Limits hardly depend on which machine of a backend: one that needs no look at this one.
MACHINES = {"cpu": "cpu:avx2", "triton": "triton:sm_90"}
OF_A_RULE = ("before", "after", "saves")
OF_A_TEMPLATE = ("reads", "writes", "chosen")

Lines = Iterator[str]


def operators() -> Lines:
    """Each operator: formula, fields, operands, results, and its samples."""
    yield "An operand is a tensor given at run time. A parameter is a number given at run time; its default"
    yield "is in the plan. An attribute is fixed in the plan. An activation as an attribute is an elementwise"
    yield "operator without operands, and brings its parameters."
    yield ""
    yield "A result is a tensor that the operator gives besides its output, in the compute dtype. The caller"
    yield "gives the tensors of updated results."
    yield ""
    yield "Weights, and operands of the shape of src, have src's dtype. Other operands have the compute dtype"
    yield "(f64 for f64, else f32); kernels widen them where they have src's dtype."
    for kind in OPERATORS:
        yield from _operator(kind)
    yield from ("", "## Functions of formulas", "")
    yield "`elementwise` takes numbers, `x`, its parameters, `inf`, `+ - * / **`, `> >= < <=` inside `where`,"
    yield "and these functions, with the number of their arguments:"
    yield ""
    counts = FUNCTIONS | dict.fromkeys(DERIVED, 1)
    yield ", ".join(f"`{name}` {count}" for name, count in counts.items()) + "."


def _operator(kind: type[Op]) -> Lines:
    told = parse(kind.__doc__)
    samples = [(FusionPlan(src, op).src, op) for src, op in kind.samples()]
    yield from ("", f"## {kind.name}", "", "```text", told.summary, "```")
    yield from markdown(told)
    names = [f"Class `{kind.__name__}`, {kind.kind}"]
    names += [f"{whose} `{word}`" for whose, word in (("ONNX", kind.onnx), ("PyTorch", kind.torch)) if word]
    yield from ("", f"{'; '.join(names)}.")
    fields = list(_fields(kind))
    if fields:
        yield ""
        yield from table(["field", "is", "default"], fields)
    yield ""
    head = ["plan", "operands", "output", *(["results"] if any(op.results_made for _, op in samples) else [])]
    yield from table(head, [_sample(src, op)[: len(head)] for src, op in samples])
    formulas = dict.fromkeys(line for src, op in samples for line in _formulas(src, op))
    if formulas:
        yield from ("", "Computed as:", "", "```text", *formulas, "```")


def _formulas(src: TensorSpec, op: Op) -> Lines:
    """What an element is, and before it the statistics and the results that come of them."""
    if isinstance(op, Elementwise):
        yield ", ".join(map(text, op.formulas(src)))
    if isinstance(op, Normalization):
        lines = [f"{each.text}, per {op.per}" for each in op.reductions(Names(), src)]
        lines += [f"{name} = {text(made)}" for name, made in op.result_formulas(Names(), src).items()]
        yield "\n  ".join([f"{operator_text(op)}:", *lines, text(op.formula(Names(), src))])


def _fields(kind: type[Op]) -> Iterator[list[str]]:
    """The fields as the class declares them; a formula's parameters have the names it gives them."""
    declared = dataclasses.fields(cast(Any, kind))
    parameters = {each.name for each in declared if "parameter" in each.metadata}
    activations = kind.inner_names()
    for each in inspect.signature(kind).parameters.values():
        if each.kind is inspect.Parameter.VAR_KEYWORD:
            yield ["any other name", "parameter", "required"]
            continue
        what = "parameter" if each.name in parameters else "attribute"
        what += ", an activation" if each.name in activations else ""
        what = "name of a saved value to read as this operand" if each.name in kind.operand_fields else what
        is_required = each.default is inspect.Parameter.empty
        yield [f"`{each.name}`", what, "required" if is_required else f"`{_value(each.default)}`"]


def _value(value: object) -> str:
    return number(value) if isinstance(value, float) else value_text(value)


def _sample(src: TensorSpec, op: Op) -> list[str]:
    output = op.output(src).text(names_layout=src.has_channel_names)
    return [f"`{FusionPlan(src, op)}`", _tensors(op.operands(src)), f"`{output}`", _tensors(op.results(src))]


def _tensors(made: Iterable[Operand | Result]) -> str:
    return " ".join(f"`{each.name}: {Dense(each.shape, each.dtype)}`" for each in made) or "none"


def rules() -> Lines:
    """Each rule: what it fuses, what that saves, its conditions."""
    yield "The first rule whose conditions hold makes the kernel; they are tried in this order."
    for rule, said in RULES.items():
        told = parse(said.description, OF_A_RULE)
        yield from ("", f"## {rule}", "", prose(told.summary))
        yield from _entries(told.named)
        yield from ("", "Conditions, in order:", "")
        yield from _claims(_conditions(rule))


def _conditions(rule: str) -> list[Claim]:
    """All claims of a rule: those made about the sample that keeps the most of them."""
    return max((list(conditions(rule, plan)) for plan in _sample_plans()), key=len)


def _entries(named: Iterable[tuple[str, str]]) -> Lines:
    listed = [f"- {name}: {prose(said)}" for name, said in named]
    if listed:
        yield from ("", *listed)


def _claims(claims: Iterable[Claim]) -> Lines:
    reasons = dict.fromkeys(each.reason for each in claims)
    yield from (f"- {prose(each.sentence)} [`{each.code}`](reasons.md#{each.code})" for each in reasons)
    if not reasons:
        yield "- none"


def templates() -> Lines:
    """Each backend's templates: what they compute, read and write, their knobs and limits."""
    yield "Several templates may support a kernel; the template with the least estimated time runs it."
    yield "`fuseplan supported` prints the same declarations."
    for backend in BACKENDS:
        yield from ("", f"## {backend.name}", "", f"{backend.summary[0].upper()}{backend.summary[1:]}.")
        for template in backend.templates:
            yield from _template(template, _machine(backend.name))


def _template(template: type[Template], target: str) -> Lines:
    told = parse(template.__doc__, OF_A_TEMPLATE)
    claims, taken = _limits(template, target)
    yield from ("", f"### {template.name}", "", prose(told.summary))
    yield from markdown(dataclasses.replace(told, sections={}))
    yield from _entries(told.named)
    bound = parse((template.error_bound if template.bound is Template.bound else template.bound).__doc__)
    yield from ("", f"Error bound, as a share of {prose(template.error_scale)}: {prose(bound.summary)}")
    # Knobs are told where they are declared, which may be in front of the template's search space.
    listed = (parse(each.__doc__).sections.get("Attributes", ()) for each in template.__mro__)
    knobs = next(filter(None, listed), ())
    if knobs:
        yield from ("", "Knobs:", "", *(f"- `{name}`: {prose(said)}" for name, said in knobs))
    yield from ("", "Limits, in order:", "")
    yield from _claims(claims)
    yield from ("", f"Supported single operators: {', '.join(f'`{name}`' for name in taken)}.")


@cache
def _limits(template: type[Template], target: str) -> tuple[list[Claim], list[str]]:
    """All claims of a template, and the operators of which it takes a sample in one layout or the other."""
    most: list[Claim] = []
    taken: dict[str, None] = {}
    for name, kernel in _sample_kernels():
        claims = list(_until_refused(template, kernel, target))
        most = max(most, claims, key=len)
        if all(each.holds for each in claims):
            taken[name] = None
    return most, list(taken)


def _machine(backend: str) -> str:
    return MACHINES.get(backend, backend)


def _until_refused(template: type[Template], kernel: Kernel, target: str) -> Iterator[Claim]:
    """Claims up to the first that does not hold: those behind it may rely on it."""
    for each in template.limits(kernel, parse_target(target), "default"):
        yield each
        if not each.holds:
            return


@cache
def _sample_kernels() -> list[tuple[str, Kernel]]:
    """The kernels of the samples, each with the name of its operator."""
    return [(plan[0].op.name, lower(match(plan))) for plan in _sample_plans()]


def _sample_plans() -> Iterator[FusionPlan]:
    """Each operator's samples as plans, in each layout and in f16; and three that pass every limit."""
    for src, op in (sample for kind in OPERATORS for sample in kind.samples()):
        spec = TensorSpec.parse(src)
        layouts = (ROWS[spec.rank],) if op.reads == "rows" else LAYOUTS[spec.rank]
        for layout, dtype in product(layouts, dict.fromkeys((spec.dtype, "f16"))):
            with contextlib.suppress(PlanError):  # what is for f32 alone
                yield FusionPlan(TensorSpec(spec.shape, dtype, layout), op)
    yield FusionPlan.parse("f16[1x16x8x8, nhwc] -> conv2d(16, kernel=3)")
    yield FusionPlan.parse("f16[16x16] -> linear(16) -> logsumexp(-1)")
    yield FusionPlan.parse("bf16[16x16] -> linear(16)")


def reasons() -> Lines:
    """The catalogue of reasons, and who gives each."""
    yield "A refusal has one of these codes, the value found and the value wanted, the index of the operator"
    yield "to blame, and a remedy. `fuseplan.explain(plan).to_json()` has them as data."
    givers = _givers()
    for reason in Reason:
        yield from ("", f"## {reason.code}", "", f"{prose(reason.sentence)}.", "")
        yield f"- what to do: {prose(reason.remedy)}"
        yield f"- given by: {', '.join(givers[reason]) if reason in givers else 'nothing'}"


def _givers() -> dict[Reason, list[str]]:
    found: dict[Reason, dict[str, None]] = {
        Reason.HORIZONTAL: {"`FusionPlan`, when it is made": None},
        Reason.NO_GRADIENT: {"`FusionPlan.backward`": None},
        Reason.OPEN_AXES: {"`match`, of a plan with open axes": None},
        Reason.KNOWN_EXTENTS: {"templates from outside that do not say `opens`": None},
    }
    for rule in RULES:
        for each in _conditions(rule):
            found.setdefault(each.reason, {})[f"rule `{rule}`"] = None
    for backend in BACKENDS:
        for template in backend.templates:
            for each in _limits(template, _machine(backend.name))[0]:
                found.setdefault(each.reason, {})[f"template `{template.name}`"] = None
    return {reason: list(names) for reason, names in found.items()}


def settings() -> Lines:
    """The environment variables."""
    yield "Settings are environment variables, read at each use. An empty variable counts as unset."
    yield ""
    yield from table(["variable", "meaning"], [[f"`{each.name}`", prose(each.meaning)] for each in VARIABLES])


def bounds() -> Lines:
    """The bounds on text, files and answers from outside."""
    yield "Bounds on text, files and answers from outside, and the behaviour beyond each bound. The table is"
    yield "declared in `fuseplan/system/limits.py`."
    yield ""
    rows = [
        [f"`{name}`", each.subject, f"{each:,} {each.unit}", each.beyond] for name, each in limits().items()
    ]
    yield from table(["name", "of what", "at most", "beyond"], rows)


PAGES: dict[str, tuple[str, Callable[[], Lines]]] = {
    "operators.md": ("Operators", operators),
    "rules.md": ("Rules", rules),
    "templates.md": ("Templates", templates),
    "reasons.md": ("Reasons to refuse", reasons),
    "reports.md": ("Reports on models", reports),
    "settings.md": ("Settings", settings),
    "limits.md": ("Limits", bounds),
    "command_line.md": ("The command line", command_line),
    "python.md": ("Python", public_names),
    "miopen.md": ("MIOpen's names", miopen_names),
}


def pages() -> dict[str, str]:
    """The text of each page by its file's name, with an index."""
    made = {name: _page(title, lines()) for name, (title, lines) in PAGES.items()}
    index = [f"- [{title}]({name})" for name, (title, _) in PAGES.items()]
    return {"README.md": _page("Reference", iter(index)), **made}


def _page(title: str, lines: Lines) -> str:
    return "\n".join([WRITTEN, "", f"# {title}", "", *lines]) + "\n"


def write(folder: Path) -> None:
    """Writes the pages; a page that is no longer made is removed.

    Raises:
        OSError: a file cannot be written.
    """
    made = pages()
    folder.mkdir(parents=True, exist_ok=True)
    for stale in {path.name for path in folder.glob("*.md")} - made.keys():
        (folder / stale).unlink()
    for name, page in made.items():
        (folder / name).write_text(page)


def indexed(troubleshooting: str) -> str:
    """The troubleshooting page with its index of codes made anew.

    Raises:
        ValueError: the page lacks the lines that enclose the index.
    """
    rows = [
        [f"[`{each.code}`](../reference/reasons.md#{each.code})", prose(each.sentence), prose(each.remedy)]
        for each in Reason
    ]
    return between(troubleshooting, *CODES, "\n".join(table(["code", "means", "what to do"], rows)))


if __name__ == "__main__":
    docs = Path(sys.argv[1])
    write(docs / "reference")
    page = docs / "guide" / "troubleshooting.md"
    page.write_text(indexed(page.read_text(encoding="utf-8")), encoding="utf-8")
