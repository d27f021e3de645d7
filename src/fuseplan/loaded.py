"""A compiled plan from a file, ready to run."""

from __future__ import annotations

import hashlib
from os import PathLike
from pathlib import Path

from fuseplan.backends import backend_of
from fuseplan.compile import RunnablePlan
from fuseplan.errors import BuildError, refusing
from fuseplan.execution.runner import Runner
from fuseplan.execution.saved import Saved, portable
from fuseplan.system import limits, reading
from fuseplan.system.untraced import untraced


class LoadedPlan(RunnablePlan):
    """A plan from a file, which runs as a `CompiledPlan` does.

    Attributes:
        plan: the plan that the kernel computes.
        target: the machine that the kernel runs on.
        template: the template's choice that the kernel was made by.
        toolchain: the versions that made the code.

    Any number of threads may call at once.
    """

    def __init__(self, saved: Saved) -> None:
        self.plan, self.template, self.toolchain = saved.plan, saved.template, saved.toolchain
        self.target, loaded = portable(saved.target).loaded(saved.source, saved.code, saved.target)
        memory = backend_of(self.target.backend).memory(self.target)
        runner = Runner(self.plan, saved.packings, saved.source, loaded, memory, self.target.threads)
        super().__init__(runner, saved.source)

    def __repr__(self) -> str:
        return f"<loaded for {self.target}: {self.plan}>"


@untraced
def load(path: str | PathLike[str], *, sha256: str | None = None) -> LoadedPlan:
    """Loads a plan that `CompiledPlan.save` wrote; neither llvmlite nor triton is imported.

    The file is code, and runs with this process's rights: load no file that somebody else could write, or
    give the sha256 that `save` returned.

    Args:
        path: the file.
        sha256: the only file to accept, by the hexadecimal digest of all its bytes.

    Returns:
        A callable of src and the plan's operands; `bind` packs constant ones once.

    Raises:
        ArgumentError: the file cannot be read, is no saved plan, is damaged or another than `sha256` says, or
            is of a format that this version does not read.
        BuildError: the code is for another kind of machine.
    """
    with refusing(f"{path} cannot be loaded", (OSError, ValueError)):
        data = reading.bytes_of(Path(path), limits.SAVED_BYTES)
        found = hashlib.sha256(data).hexdigest()
        if sha256 is not None and found != str(sha256).lower():
            raise ValueError(f"it is another file\n  got sha256 {found}\n  want       {sha256}")
        saved = Saved.unpack(data)
    try:
        return LoadedPlan(saved)
    except BuildError as error:
        raise BuildError(f"{path} cannot be loaded: {error}") from error
