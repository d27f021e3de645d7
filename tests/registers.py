"""Counts the kernels for sm_90 whose code overwrites registers that a product has not read yet.

    PYTHONPATH=src:tests:. python tests/registers.py --details FILE --ptxas PTXAS ... [--share 3/16]
    PYTHONPATH=src:tests:. python tests/registers.py --details FILE --record RESULTS

The first form adds a line a kernel, and goes on where it was ended; it runs under each Triton of interest.
Several processes share the kernels, each with a file of its own. The second form adds up a file of all
lines. The kernels are those of suites, shipped choices and device tests, by the template `product`: others
take no factor from registers. Each is assembled as Triton wrote it and, where that shows the error, again
with `repairs.settled`.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import triton

from benchmarks.suite import load, names
from cells import taken
from conformance import sized
from fuseplan.backends.triton import compiler, repairs, sass
from fuseplan.backends.triton.assembler import Assembler, _asked, own_assembler
from fuseplan.backends.triton.template import GpuTemplate
from fuseplan.backends.triton.toolchain import types_of
from fuseplan.errors import FuseplanError
from fuseplan.execution.select import select
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import parse_target
from fuseplan.kernels.template import Template
from fuseplan.measure.machine import commit, machine, versions
from fuseplan.plans.plan import FusionPlan
from fuseplan.stores.tuned import SHIPPED, read
from orders import orders

SM_90 = parse_target("triton:sm_90")
READER = "product"  # the template that can take a factor from registers

Found = tuple[str, Kernel, Template]


def kernel_of(plan: FusionPlan | str) -> Kernel:
    return lower(match(FusionPlan.parse(plan) if isinstance(plan, str) else plan))


def listed() -> Iterator[Found]:
    """(plan, kernel, template) of suites, shipped choices and device tests."""
    from device import test_numeric  # a quarter of a minute, which tests of `summary` need not take

    suites = [name for name in names() if name.startswith("gpu_") or name.endswith("_cuda")]
    plans = [case.plan for name in suites for case in load(name).cases]
    plans += [str(each.plan) for each in sized()]
    plans += [str(plan) for plan, _ in orders("f32", "f16", "bf16")]
    for plan in dict.fromkeys(plans):
        yield from _selected(plan, None)
    for choice in (choice for place in sorted(SHIPPED.glob("*.jsonl")) for choice in read(place)):
        for text in (choice.template, choice.untuned):
            yield from _selected(choice.plan, text)
    for kind, place, plan in (case.values for case in test_numeric.CASES):
        yield plan, kernel_of(plan), test_numeric._candidates(kind, plan, SM_90)[place]
    for turn, cell, kind in taken(str(SM_90)):
        kernel = kernel_of(plan := str(cell.plan(turn)))
        yield plan, kernel, next(iter(kind.candidates(kernel, SM_90, "default")))


def _selected(plan: str, template: str | None) -> Iterator[Found]:
    """The choice for a plan, if a GPU computes it and such a template is still there."""
    try:
        kernel = kernel_of(plan)
        yield plan, kernel, select(kernel, SM_90, template=template).template
    except FuseplanError:
        return


def looked_at(
    known: set[str], assemblers: Iterable[Assembler], share: tuple[int, int]
) -> Iterator[dict[str, Any]]:
    """A line for each kernel of this process's share whose key is not known yet."""
    mine, processes = share
    for plan, kernel, template in listed():
        if template.name != READER or not isinstance(template, GpuTemplate):
            continue
        source = template.emit(kernel, SM_90)
        key = hashlib.sha256(source.text.encode() + repr(source.options).encode()).hexdigest()[:16]
        if key in known or int(key, 16) % processes != mine:
            continue
        known.add(key)
        artifact = compiler.compile_source(
            source, types_of(source, kernel, template, SM_90), SM_90, assembly=True
        )
        ptx = artifact.assembly
        line = {"triton": triton.__version__, "key": key, "plan": plan, "template": template.text}
        line["factors"] = len(repairs.FROM_REGISTERS.findall(ptx))
        line["overwritten"] = {
            each.version: list(_counted(ptx, each)) for each in assemblers if line["factors"]
        }
        yield line


def _counted(ptx: str, assembler: Assembler) -> Iterator[int]:
    """Overwritten registers as it is and, where there are any, with waits."""
    for text in (ptx, repairs.settled(ptx)):
        code = sass.disassembled(assembler.assembled(text, 90)[0], compiler.PACKAGE)
        found = len(sass.overwritten(code))
        yield found
        if not found:
            return


def summary(lines: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """How many kernels show the error, by Triton's version, assembler, and whether there is a prologue."""
    groups: dict[tuple[str, str, str], list[list[int]]] = {}
    for line in lines:
        steps = FusionPlan.parse(line["plan"]).steps
        what = "f32, f64" if line["plan"].startswith(("f32", "f64")) else "f16, bf16"
        what += ", a prologue" if steps[0].op.kind != "contraction" else ""
        for ptxas, counts in line["overwritten"].items():
            groups.setdefault((line["triton"], ptxas, what), []).append(counts)
    for (version, ptxas, what), counts in sorted(groups.items()):
        yield {
            "triton": version,
            "ptxas": ptxas,
            "kernels of": what,
            "kernels": len(counts),
            "overwriting": sum(each[0] > 0 for each in counts),
            "overwriting with waits": sum(each[-1] > 0 for each in counts),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--details", type=Path, required=True, help="file of a JSON line a kernel")
    parser.add_argument("--ptxas", type=Path, nargs="+", default=[], help="Triton's own unless given")
    parser.add_argument("--share", default="0/1", help="this process's number from 0, and how many there are")
    parser.add_argument("--record", type=Path, help="file of results that a line is appended to")
    given = parser.parse_args()
    text = given.details.read_text(encoding="utf-8") if given.details.exists() else ""
    lines = [json.loads(each) for each in text.splitlines()]
    if given.record:
        record = {
            "benchmark": "registers",
            "run": datetime.now(UTC).isoformat(timespec="seconds"),
            "looked_at": len({each["key"] for each in lines}),
            "found": list(summary(lines)),
            "machine": machine().to_json(),
            "versions": versions("triton"),
            "commit": commit(),
        }
        with given.record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        return 0
    asked = [_asked(place) for place in given.ptxas] or [own_assembler(compiler.PACKAGE)]
    if None in asked:
        parser.error("each --ptxas has to be an assembler of NVIDIA's")
    known = {each["key"] for each in lines if each["triton"] == triton.__version__}
    setattr(compiler, "assembler", own_assembler)  # noqa: B010 - the module exports no such name
    repairs.overwrites_factors = lambda *_: False  # Triton's own code is looked at
    with given.details.open("a", encoding="utf-8") as file:
        mine, processes = (int(number) for number in given.share.split("/"))
        for line in looked_at(known, [each for each in asked if each], (mine, processes)):
            print(json.dumps(line), file=file, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
