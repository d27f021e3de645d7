"""The chain of the stages, and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

from fuseplan.errors import ArgumentError, BuildError, a_thing
from fuseplan.execution.run import NOT_CARRIED, BoundPlan
from fuseplan.execution.runner import Runner, runner_of
from fuseplan.execution.stages import Records, decide
from fuseplan.kernels.emit import Source
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Accuracy, Traffic
from fuseplan.language.tensor import TensorSpec
from fuseplan.plans.dot import table
from fuseplan.plans.plan import FusionPlan
from fuseplan.system.untraced import untraced
from fuseplan.tensors.arguments import Arguments

if TYPE_CHECKING:
    from fuseplan.execution.build import Program
    from fuseplan.explanation import Explanation
    from fuseplan.tuning.verdict import Verdict

Part = TypeVar("Part")


class RunnablePlan:
    """A plan with its code in this process.

    Attributes:
        plan: the plan that the kernel computes.
        target: the machine that the kernel runs on.

    Any number of threads may call at once.
    """

    plan: FusionPlan
    target: Target
    _refusal = ""

    def __init__(self, runner: Runner | None, source: Source) -> None:
        self._runner, self._source = runner, source
        self._unbound = None if runner is None else _bound(runner, {})

    @property
    def threads(self) -> int:
        """The most threads a launch uses."""
        return self.target.threads

    @property
    def output(self) -> TensorSpec:
        """The tensor that a launch writes."""
        return self.plan.output

    @property
    def workspace_bytes(self) -> int:
        """Memory that a launch needs besides its tensors, exactly; kept between launches."""
        return self._source.workspace(self.threads)

    @untraced
    def __call__(self, src: Any, out: Any = None, *bare: Any, **values: Any) -> Any:
        """Runs the kernel with operands by the plan's keys; packs the operands in each call.

        Args:
            src: a tensor of the plan's `src`: a NumPy array, or anything in host memory with DLPack; on
                a GPU a torch tensor there, or anything with DLPack or `__cuda_array_interface__`.
            out: where to write; a new tensor of src's kind unless given.
            *bare: refused: operands are given by name.
            **values: all operands; parameters where they differ from the plan's; the tensors of results that
                are updated, and of others to have them written there.

        Returns:
            `out`, or the new tensor, of `plan.output`'s shape and layout. Where the plan has results, a named
            tuple of it, `out`, and of them by their keys: what was given, or new tensors of src's kind.

        Raises:
            ArgumentError: a tensor is missing, unknown, not what the plan takes, or overlaps one that is
                written.
        """
        return self._running(self._unbound)(src, out, *bare, **values)

    @untraced
    def execute(self, src: Any, arguments: Arguments, out: Any = None) -> Any:
        """Runs the kernel with an arguments object; packs the operands in each call.

        Raises:
            ArgumentError: as a call does; or the arguments are another plan's.
        """
        return self._running(self._unbound)(src, out, **self._values(arguments))

    @untraced
    def bind(self, arguments: Arguments | None = None, /, **values: Any) -> BoundPlan:
        """Packs constant operands once.

        Args:
            arguments: operands and parameters to keep, and tensors that every call writes results into.
            **values: operands and parameters by the plan's keys; they override those of `arguments`.

        Returns:
            A callable that takes `src`, `out` and the operands that are not bound.

        Raises:
            ArgumentError: one is unknown, or not what the plan takes.
        """
        runner = self._running(self._runner)
        return _bound(runner, ({} if arguments is None else self._values(arguments)) | values)

    def borrow(self, values: Mapping[str, Any]) -> BoundPlan:
        """Binds without copying operands that lie as the kernel reads them.

        Args:
            values: operands and parameters by the plan's keys. The caller keeps the operands alive; each call
                reads their values of that time.

        Raises:
            ArgumentError: as `bind` does.
        """
        return _bound(self._running(self._runner), values, borrow=True)

    def _running(self, part: Part | None) -> Part:
        """A part that there is where the code runs on this machine.

        Raises:
            BuildError: it does not.
        """
        if part is None:
            raise BuildError(self._refusal)
        return part

    def _values(self, arguments: Arguments) -> dict[str, Any]:
        if not isinstance(arguments, Arguments):
            raise ArgumentError(
                f"want Arguments(plan), got {a_thing(arguments)}; operands by name are given as "
                "compiled(src, weight=w)"
            )
        if arguments.plan != self.plan:
            raise ArgumentError(
                f"the arguments are of another plan\n  got {arguments.plan}\n  want {self.plan}"
            )
        return arguments.values

    def __copy__(self) -> RunnablePlan:
        return self  # nothing of it changes

    def __deepcopy__(self, memo: dict[int, Any]) -> RunnablePlan:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(NOT_CARRIED)


def _bound(runner: Runner, values: Mapping[str, Any], borrow: bool = False) -> BoundPlan:
    if not runner.plan.is_open:
        return BoundPlan(runner, values, borrow)
    from fuseplan.execution.open_run import OpenBoundPlan

    return OpenBoundPlan(runner, values, borrow)


class CompiledPlan(RunnablePlan):
    """A plan's kernel, loaded, with the record of every stage.

    Attributes:
        plan: the plan that the kernel computes.
        target: the machine that the kernel runs on.
        match: the rule that fused the plan.
        kernel: the computation of one launch.
        choice: the template, its knobs, and the other templates with their refusals or times.
        program: the loaded code.

    Any number of threads may call at once.
    """

    def __init__(self, records: Records, program: Program) -> None:
        self.records, self.program = records, program
        self.plan, self.target = records.plan, program.target
        self.match, self.kernel, self.choice = records.match, records.kernel, records.choice
        super().__init__(runner_of(self.plan, self.kernel, self.choice.template, program), program.source)
        self._refusal = (
            f"code for {self.target} does not run here: {program.refusal}\n"
            "  The plan was compiled for another machine: `source` is its source, `program.code` its "
            "code, `program.resources` the registers and memory that the code uses"
        )

    @property
    def source(self) -> Source:
        """The generated source; emitted now, where the object code came from the cache."""
        return self.program.source if self.program.source.text else self.records.source

    @property
    def kernels(self) -> int:
        """How many kernels a call launches."""
        return 1

    @property
    def traffic(self) -> Traffic:
        """Bytes that a launch moves."""
        return self.choice.template.traffic(self.kernel, self.target)

    def save(self, path: str | PathLike[str]) -> str:
        """Writes code, packing and checks to a file, which `fuseplan.load` runs without any compiler.

        Code for a CPU is compiled anew, for every machine of the target's kind, such as `cpu:avx2`.
        Operands are not in the file. The file is code: load no file that somebody else could write.

        Returns:
            The file's sha256, in hexadecimal, for `fuseplan.load(path, sha256=...)`.

        Raises:
            BuildError: code for the target cannot be saved, or the toolchain failed; it says why.
            OSError: the file cannot be written.
        """
        from fuseplan.execution.saved import save

        return save(self.records, self.program, path)

    @untraced
    def verdict(self, seed: int = 0, *, patience: float = 0.0) -> Verdict:
        """Measures on this machine whether fusing pays, on random tensors, and keeps the answer.

        The fused kernel runs beside the plan's operators one at a time, each our own kernel, and beside
        eager PyTorch where that is installed. `explain` shows the last verdict; it says so if fusing loses.
        Times that were taken while other programs used the machine give no verdict: `disturbance` says
        why, `speedup` and `pays` are None, and nothing is kept.

        Args:
            seed: seed of the random tensors.
            patience: seconds to wait for other programs to rest.

        Raises:
            BuildError: the code does not run on this machine.
            ArgumentError: the fused kernel's result is wrong here.
            MemoryError: the tensors, or what float64 needs besides, do not fit.
        """
        from fuseplan.measure.ground import ground_of
        from fuseplan.tuning.verdict import verdict_on

        runner = self._running(self._runner)
        ground = ground_of(self.plan, self.target, seed)
        return verdict_on(replace(self.records, target=self.target), runner, ground, patience)

    def explain(self) -> Explanation:
        """The decisions with their reasons, the savings, and the distance from the machine's limits."""
        from fuseplan.explanation import explain_records

        return explain_records(self.records, self.program.resources)

    def to_json(self) -> dict[str, Any]:
        """The explanation and the program, as JSON values."""
        return {
            **self.explain().to_json(),
            "program": self.program.to_json(),
            "workspace_bytes": self.workspace_bytes,
        }

    def __repr__(self) -> str:
        return f"<compiled for {self.target}: {self.plan}>"

    def _repr_html_(self) -> str:
        moved = f"{self.traffic.total} bytes"
        facts = (str(self.target), self.target.shape, self.choice.template.text, moved)
        return self.plan._repr_html_() + table(("target", "runs on", "template", "moves"), [facts])


@untraced
def compile(
    plan: FusionPlan | str,
    target: Target | str = "cpu",
    *,
    threads: int | None = None,
    accuracy: Accuracy = "default",
    template: str | None = None,
    cache: bool = True,
    tune: float | Literal["near"] | None = None,
) -> CompiledPlan:
    """Makes one kernel of a plan and loads it.

        layer = fuseplan.compile("f32[8x64] -> matmul(32) -> bias -> gelu").bind(weight=w, bias=b)
        y = layer(x)

    Args:
        plan: the plan, or its text.
        target: `cpu` (this machine), `cuda` (torch's current GPU), `cuda:1`, a kind of machine such as
            `cpu:avx2` or `triton:sm_90`, or `reference`. For a kind of GPU that is not here, source and
            binary are made, and a call says why it cannot run.
        threads: the most threads a launch uses; the `FUSEPLAN_THREADS` setting or all cores unless given. Not
            for a GPU.
        accuracy: `default`; `strict`, no Winograd except F(2x2, 3x3); or the largest error bound
            allowed, as `explain` tells it: for direct convolution |error| <= bound * sum of |src||weight|.
        template: the only one to consider: a name (`direct`), or a candidate as `explain` prints it
            (`direct(rows=8, vectors=2, ...)`); the cost model chooses among all unless given.
        cache: look for the object code, and keep it, in memory and on disk.
        tune: seconds, about, to measure candidates on this machine first, unless a measurement is stored, or
            `near`, for those alone that the cost model does not tell apart; only stored measurements decide
            unless given. See `fuseplan.tune`.

    Returns:
        A callable of src and the plan's operands; `bind` packs constant ones once.

    Raises:
        PlanError: the text is no plan.
        Unsupported: nothing fuses the plan, or no template of the target computes it; it says why.
        BuildError: the target is not this machine, the toolchain failed, or no candidate's code passes its
            checks.
        ArgumentError: the target, the threads, the accuracy, the template or the cache cannot be; or there is
            something to tune and the target is another machine.
        MemoryError: this process holds so many kernels that it has few memory maps left.
    """
    if not isinstance(cache, bool):
        raise ArgumentError(f"`cache` must be True or False; got {cache!r}")
    if tune is None:
        records = decide(plan, target, threads=threads, accuracy=accuracy, template=template, use_cache=cache)
    else:
        from fuseplan.tuning.tune import tuned_records

        records = tuned_records(plan, target, tune, threads=threads, accuracy=accuracy, template=template)
    from fuseplan.execution.build import build_sound  # with the cache and all that reads files

    return CompiledPlan(*build_sound(records, use_cache=cache))
