"""Solutions of Find 2.0: kernels of a problem, each by another template, measured, run, saved and loaded."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from fuseplan.compat.miopen.algorithms import preferred
from fuseplan.compat.miopen.call import (
    Object,
    StatusError,
    bad_parameter,
    check_of,
    checked,
    held,
    invalid_value,
    not_implemented,
    told,
)
from fuseplan.compat.miopen.enums import miopenFindResultsOrder_t, miopenStatus_t, miopenTensorArgumentId_t
from fuseplan.compat.miopen.execute import check_workspace, workspace_size
from fuseplan.compat.miopen.handle import miopenHandle_t
from fuseplan.compat.miopen.operators import check_described, without_ones
from fuseplan.compat.miopen.problems import Posed, miopenProblem_t
from fuseplan.compat.miopen.tensors import check_same, miopenTensorDescriptor_t
from fuseplan.errors import ArgumentError, counted
from fuseplan.execution.stages import decide
from fuseplan.measure.ground import ground_of
from fuseplan.plans.plan import FusionPlan
from fuseplan.system.reading import json_of, record
from fuseplan.tensors.arguments import OUT, SRC
from fuseplan.tuning.tune import tune

Id = miopenTensorArgumentId_t
TUNING_SECONDS = 10.0
FORMAT = 1


class miopenFindOptions_t(Object):
    """How solutions are found: whether candidates are tuned first, the order, and the most workspace."""

    def __init__(self) -> None:
        super().__init__()
        self.is_tuning = False
        self.order = miopenFindResultsOrder_t.miopenFindResultsOrderByTime
        self.most_workspace: int | None = None

    def attach_binaries(self, attach: int) -> None:
        """Takes 0."""
        if attach:
            raise not_implemented("a saved solution holds no binaries: kernels are in the cache on disk")


@dataclass(frozen=True)
class Found(Posed):
    """A solution as it is saved.

    Attributes:
        target: of the handle that found it.
        template: the candidate, as `explain` prints it.
        milliseconds: of one launch, measured.
        workspace: bytes that the kernel needs besides its tensors.
    """

    target: str
    template: str
    milliseconds: float
    workspace: int


class miopenSolution_t(Object):
    """A kernel of a problem."""

    def __init__(self, found: Found) -> None:
        super().__init__()
        self.found, self.plan = found, FusionPlan.from_json(found.plan)

    @property
    def saved(self) -> bytes:
        """The solution as bytes: a line with format and checksum, then JSON."""
        body = json.dumps(asdict(self.found)).encode()
        return _head(FORMAT, body) + body

    @classmethod
    def load(cls, data: bytes, size: int) -> miopenSolution_t:
        """The solution of bytes that were saved.

        Raises:
            StatusError: they were not, were changed, or are in another format.
        """
        if size != len(data):
            raise bad_parameter(f"`data` has {counted(len(data), 'byte')}; size is {size}")
        head, _, body = data.partition(b"\n")
        match = re.fullmatch(rb"fuseplan solution (\d{1,9}) [0-9a-f]{8}", head)
        if match is None:
            raise invalid_value("`data` was not written by miopenSaveSolution")
        if int(match[1]) != FORMAT:
            raise StatusError(
                miopenStatus_t.miopenStatusVersionMismatch,
                f"the solution was saved in format {int(match[1])}; this is format {FORMAT}: find it again",
            )
        if _head(FORMAT, body) != head + b"\n":
            raise invalid_value("`data` was changed after miopenSaveSolution wrote it")
        try:
            return cls(record(Found, json_of(body)))
        except ValueError as error:
            raise invalid_value(f"`data` was not written by miopenSaveSolution: {error}") from None

    @property
    def solver(self) -> int:
        """A number for the template: the CRC-32 of its name."""
        return zlib.crc32(self.found.template.partition("(")[0].encode())


def _head(version: int, body: bytes) -> bytes:
    return f"fuseplan solution {version} {zlib.crc32(body):08x}\n".encode()


@dataclass(frozen=True)
class miopenTensorArgument_t:
    """A tensor of a problem, or a number; without a descriptor it is as the problem describes it."""

    id: miopenTensorArgumentId_t
    descriptor: Any
    buffer: Any


def arguments_of(name: str, value: Any) -> tuple[miopenTensorArgument_t, ...]:
    """Checks a sequence of arguments."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise bad_parameter(f"`{name}` is a sequence of miopenTensorArgument_t; got {told(value)}")
    check = check_of(miopenTensorArgument_t)
    return tuple(checked(f"{name}[{place}]", each, check) for place, each in enumerate(value))


def find(
    handle: miopenHandle_t, problem: miopenProblem_t, options: miopenFindOptions_t | None, most: int
) -> tuple[tuple[miopenSolution_t, ...], int]:
    """The best candidate of every template that takes the problem, timed in turns on random tensors.

    Returns:
        At most so many solutions, and their number.

    Raises:
        StatusError: the problem is not fully described.
        Unsupported: nothing computes it on the handle's target.
        BuildError: the target is not this machine, or the toolchain failed.
        MemoryError: the tensors do not fit.
    """
    posed, options = problem.posed(), options or miopenFindOptions_t()
    plan = FusionPlan.from_json(posed.plan)
    if options.is_tuning:
        tune(plan, handle.target, seconds=TUNING_SECONDS)
    best = {each.name: each.text for each in reversed(list(preferred(decide(plan, handle.target).choice)))}
    ground = ground_of(plan, handle.target)
    kernels = {text: handle.kernel(plan, text) for text in best.values()}
    calls = {text: ground.call(compiled.bind) for text, compiled in kernels.items()}
    found = [
        Found(
            **vars(posed),
            target=str(handle.target),
            template=text,
            milliseconds=1e3 * timing.median,
            workspace=kernels[text].workspace_bytes,
        )
        for text, timing in ground.times(calls).items()
    ]
    solutions = tuple(map(miopenSolution_t, _ordered(found, options)[:most]))
    return solutions, len(solutions)


def _ordered(found: list[Found], options: miopenFindOptions_t) -> list[Found]:
    """The ones within the limit, sorted."""
    is_by_time = options.order is miopenFindResultsOrder_t.miopenFindResultsOrderByTime
    limit = inf if options.most_workspace is None else options.most_workspace
    return sorted(
        (each for each in found if each.workspace <= limit),
        key=lambda each: each.milliseconds if is_by_time else each.workspace,
    )


def run(
    handle: miopenHandle_t,
    solution: miopenSolution_t,
    count: int,
    tensors: Sequence[miopenTensorArgument_t],
    workspace: Any,
    size: int,
) -> None:
    """Runs a solution on tensors by their ids, and numbers likewise."""
    found, plan = solution.found, solution.plan
    if count != len(tensors):
        raise bad_parameter(f"`tensors` has {len(tensors)} entries; nInputs is {count}")
    if found.target != str(handle.target):
        raise bad_parameter(f"the solution is for {found.target}; the handle's target is {handle.target}")
    check_workspace(workspace_size(workspace, size), found.workspace)
    ends: dict[int, Any] = {}
    values: dict[str, Any] = dict(found.numbers)
    seen: set[Id] = set()
    for each in tensors:
        name = _take(each, solution, ends, values)
        if name in seen:
            raise bad_parameter(f"{name.name} is given twice")
        seen.add(name)
    missing = [Id(end).name for end in (found.src, found.dst) if end not in ends]
    if missing:
        raise bad_parameter(f"the solution needs {' and '.join(missing)}")
    names = {SRC.key: Id(found.src).name, OUT.key: Id(found.dst).name}
    names |= {key: name for name, key in found.keys.items()}
    try:
        handle.run(handle.kernel(plan, found.template), ends[found.src], ends[found.dst], values)
    except ArgumentError as error:
        raise bad_parameter(error.told(lambda tensor: names.get(tensor.key, str(tensor)))) from error


def _take(
    given: miopenTensorArgument_t, solution: miopenSolution_t, ends: dict[int, Any], values: dict[str, Any]
) -> Id:
    """Puts a tensor or a number where it belongs; its id.

    Raises:
        StatusError: it belongs nowhere, is null, or is described as the problem does not describe it.
    """
    found, plan = solution.found, solution.plan
    name: Id = checked("miopenTensorArgument_t.id", given.id, check_of(Id))
    buffer = held(given.buffer)
    if buffer is None:
        raise bad_parameter(f"{name.name} is null")
    check = check_of(miopenTensorDescriptor_t)
    descriptor = checked(f"{name.name}'s descriptor", given.descriptor, check, is_nullable=True)
    if name in (found.src, found.dst):
        if descriptor is not None:
            check_same(name.name, descriptor.spec, plan.src if name == found.src else plan.output)
        ends[name] = buffer
        return name
    if name.name not in found.keys:
        raise bad_parameter(f"the solution has no {name.name}; it has {', '.join(found.keys)}")
    key = found.keys[name.name]
    if key:
        if descriptor is not None:
            check_described(plan, key, name.name, descriptor.spec)
        values[key] = without_ones(plan, key, buffer)
    return name
