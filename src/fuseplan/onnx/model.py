"""A model of ONNX that runs: `load(path).run(None, inputs)`."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import numpy as np
from onnx import inliner

from fuseplan.errors import ArgumentError, BuildError, a_thing
from fuseplan.execution.stages import decide
from fuseplan.graph.choose import checked_mode
from fuseplan.graph.cut import Cut
from fuseplan.graph.opened import OpenKernels
from fuseplan.graph.packed import Packs
from fuseplan.graph.place import Call, place
from fuseplan.graph.rules import Rule
from fuseplan.graph.schedule import schedule
from fuseplan.graph.session import Session, room_on
from fuseplan.graph.type import Type, is_array, types_of
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Accuracy
from fuseplan.language.tensor import MAX_BYTES
from fuseplan.onnx.choosing import NONE, How, cut_of
from fuseplan.onnx.files import model_of
from fuseplan.onnx.profiling import seconds_of
from fuseplan.onnx.protos import LIBRARY
from fuseplan.onnx.reader import ReadModel, input_types, open_kernels, read
from fuseplan.onnx.runtime import RUNTIME, Onnx, evaluator, problem, runtime_of
from fuseplan.onnx.stored import release, whole
from fuseplan.onnx.writing import Written, written
from fuseplan.reports.books import report_of
from fuseplan.reports.comparison import Comparison, compared
from fuseplan.reports.profile import Profile, profiled
from fuseplan.reports.report import Report
from fuseplan.reports.tried import Tried, tried
from fuseplan.system import limits
from fuseplan.system.locks import Lock
from fuseplan.tensors.arrays import is_torch


class Prepared:
    """A model for given types of its inputs.

    Attributes:
        model: the graph, and the model's outputs.
        session: its plans, compiled.
        library: what runs the other operators.
    """

    def __init__(
        self,
        proto: Any,
        types: Mapping[str, Type],
        how: How,
        example: Mapping[str, Any],
        kernels: OpenKernels,
        packs: Packs,
    ) -> None:
        self.model, cut = cut_of(proto, types, how, example=example, opened=kernels.serve)
        self.library = Onnx(proto, how.threads)
        self.session = Session(cut, {LIBRARY: self.library}, release, packs, room_on(how.target))
        release()


class OnnxModel:
    """A model of ONNX; `run` is that of onnxruntime.InferenceSession.

    Made by `fuseplan.onnx.load`. The model is read, cut into plans and compiled for the shapes of a call's
    inputs; calls with the same shapes share that. Where the model leaves the outermost extent of an input
    open, its batch, a plan's kernel serves every batch: another batch compiles little or nothing. The report
    names the plans that cannot. Any number of threads may call.

    Attributes:
        inputs: the types of the inputs, as the model declares them; of unknown shape where an extent is none.
        outputs: the names of the outputs.
    """

    def __init__(self, proto: Any, how: How) -> None:
        self._proto = inliner.inline_local_functions(proto) if proto.functions else proto
        self._how = how
        self._prepared: OrderedDict[tuple[tuple[str, Type], ...], Prepared] = OrderedDict()
        self._guard = Lock()
        self._kernels: OpenKernels | None = None
        self._packs = Packs()
        self.inputs = input_types(self._proto)
        self._known = input_types(self._proto, stored=True)
        self._dims = _dims(*(input_types(self._proto, extent, stored=True) for extent in (1, 2)))
        self.outputs = tuple(each.name for each in self._proto.graph.output)

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any]) -> list[Any]:
        """Runs the model.

        Args:
            output_names: which outputs; None for all.
            input_feed: arrays by the names of the inputs; of a model on a GPU, also torch's tensors.

        Returns:
            The outputs in that order, in memory of their own: NumPy's arrays; of a model on a GPU, torch's
            tensors there where an input is one.

        Raises:
            ArgumentError: an input or output is missing or unknown, or an input has another type than the
                model declares.
            BuildError: nothing runs one of its operators.
        """
        if isinstance(output_names, str):
            raise ArgumentError(f"output_names={output_names!r} is one name; want a list: [{output_names!r}]")
        wanted = self.outputs if output_names is None else output_names
        unknown = [name for name in wanted if name not in self.outputs]
        if unknown:
            raise ArgumentError(f"no output is named {unknown[0]!r}; want of {', '.join(self.outputs)}")
        given, types = self._read(input_feed)
        prepared = self.prepare(types, given)
        made = prepared.session(given)
        found = [made[prepared.model.outputs[name]] for name in wanted]
        return found if any(map(is_torch, given.values())) else [*map(prepared.session.to_host, found)]

    def prepare(self, types: Mapping[str, Type] | None = None, example: Mapping[str, Any] = NONE) -> Prepared:
        """The model read, cut and compiled for types of its inputs; as declared unless given.

        Args:
            types: of the inputs, by name.
            example: arrays of these types, which plans are measured with; random ones unless given.

        Raises:
            ArgumentError: an input is missing, unknown or another tensor; or no types are given, and the
                model declares an extent that is no number.
        """
        found = self._checked(self.inputs if types is None else types)
        key = tuple(found.items())
        with self._guard:
            prepared = self._prepared.pop(key, None)
            if prepared is None:
                opened = self._opened(found)
                prepared = Prepared(self._proto, found, self._how, example, opened, self._packs)
            self._prepared[key] = prepared
            while len(self._prepared) > limits.SHAPES_KEPT:
                self._prepared.popitem(last=False)
        return prepared

    def report(self, types: Mapping[str, Type] | None = None) -> Report:
        """What becomes of each operator, for types as `prepare` takes them; no plan is compiled.

        Operators that no plan computes are given to ONNX Runtime, so that the report names what runs them; an
        operator that nothing runs is `onnx`'s.

        Raises:
            ArgumentError: as for `prepare`.
        """
        prepared, _, cut = self._cut(types)
        if prepared is not None:
            return report_of(prepared.session.placement, self._how.target, prepared.library.names)
        placement, library = place(cut, schedule(cut)), Onnx(self._proto, self._how.threads)
        for step in placement.steps:
            if isinstance(step, Call):
                with contextlib.suppress(BuildError):
                    library.prepare(cut.graph, step.unit)
        return report_of(placement, self._how.target, library.names)

    def tried(self, name: str, types: Mapping[str, Type] | None = None) -> Tried:
        """All plans that were tried for an operator of the model; nothing is compiled.

        Args:
            name: of the operator, as the report has it.
            types: as for `prepare`.

        Raises:
            ArgumentError: the model has no operator of this name; or as for `prepare`.
        """
        _, _, cut = self._cut(types)
        return tried(cut, name)

    def profile(self, input_feed: Mapping[str, Any]) -> Profile:
        """The time of each operator, by ONNX Runtime with its fusions off, and the plans that would pay.

        Nothing of ours is compiled. The model runs ten times.

        Args:
            input_feed: as for `run`.

        Raises:
            ArgumentError: as for `run`; or the model is for a GPU.
            BuildError: ONNX Runtime is not installed.
        """
        if not self.is_on_cpu:
            raise ArgumentError("operators are timed by ONNX Runtime on the cpu: load the model for 'cpu'")
        given = {name: _array(each) for name, each in input_feed.items()}
        _, found, cut = self._cut(types_of(given))
        seconds = seconds_of(whole(self._proto), found.protos, given, self._how.threads)
        told = report_of(place(cut, schedule(cut)), self._how.target)
        return profiled(told, found.graph, self._how.target, RUNTIME, seconds)

    def fused(self, types: Mapping[str, Type] | None = None) -> Written:
        """The model as ONNX's message with a function for each plan, which any runtime of ONNX runs.

        A function has the model's own nodes as its body, and the plan's text as its `doc_string`. Nothing is
        compiled.

        Args:
            types: as for `prepare`; the functions do not depend on extents that the model leaves open.

        Raises:
            ArgumentError: as for `prepare`.
        """
        _, found, cut = self._cut(types)
        return written(whole(self._proto), found, cut)

    def _cut(self, types: Mapping[str, Type] | None) -> tuple[Prepared | None, ReadModel, Cut]:
        """The model where it is compiled for these types, what was read of it, and its plans."""
        found = self._checked(self.inputs if types is None else types)
        prepared = self._prepared.get(tuple(found.items()))
        if prepared is not None:
            return prepared, prepared.model, prepared.session.cut
        how, opened = replace(self._how, choose="predicted"), self._opened(found).serve
        return None, *cut_of(self._proto, found, how, is_built=False, opened=opened)

    def _opened(self, types: Mapping[str, Type]) -> OpenKernels:
        """The kernels that serve every batch, where the model leaves it open."""
        if self._kernels is None:
            self._kernels = open_kernels(self._proto, types)
        return self._kernels

    @property
    def is_on_cpu(self) -> bool:
        """Whether the model is compiled for a CPU."""
        return not self._how.target.processors

    @property
    def example(self) -> dict[str, Type]:
        """The types of the inputs, with 1 for the extents that the model leaves open."""
        return input_types(self._proto, 1)

    def exact(self, input_feed: Mapping[str, Any]) -> list[Any]:
        """All outputs in float64, operator by operator; others than ours by ONNX Runtime, if it can.

        Raises:
            ArgumentError: as for `run`.
        """
        given, types = self._read(input_feed)
        found = read(self._proto, self._checked(types))
        made = found.graph.evaluate(given, {LIBRARY: evaluator(self._proto)})
        return [made[found.outputs[name]] for name in self.outputs]

    def compare(self, input_feed: Mapping[str, Any], tolerance: float | None = None) -> Comparison:
        """Runs the model step by step beside float64; tells the first step that is too far from it.

        Args:
            input_feed: as for `run`.
            tolerance: the most that a value may be away, over its largest element; by its dtype unless given.

        Raises:
            ArgumentError: as for `run`.
            BuildError: nothing runs one of its operators.
        """
        given, types = self._read(input_feed)
        prepared, exact = self.prepare(types), read(self._proto, types)
        run = {LIBRARY: evaluator(self._proto)}
        return compared(prepared.session, exact.graph, given, run, prepared.model.outputs, tolerance)

    def peer(self, input_feed: Mapping[str, Any]) -> Callable[[], list[Any]]:
        """ONNX Runtime's run of the whole model on these arrays, with as many threads.

        Raises:
            BuildError: ONNX Runtime is not installed, or does not run the model.
        """
        try:
            call = runtime_of(whole(self._proto), self._how.threads, left_out=())
            call(self.outputs, input_feed)
        except BuildError:
            raise
        except Exception as error:  # ONNX Runtime has errors of its own
            raise BuildError(problem(RUNTIME, error)) from error
        return lambda: list(call(self.outputs, input_feed))

    def _read(self, input_feed: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Type]]:
        """The arrays of a call by name, and their types."""
        if not isinstance(input_feed, Mapping):
            raise ArgumentError(f"inputs are a dictionary of arrays by name; got {a_thing(input_feed)}")
        given = {
            name: _array(each) if self.is_on_cpu or not is_torch(each) else each
            for name, each in input_feed.items()
        }
        for name, each in given.items():
            want = self.inputs.get(name)
            if want and want.dtype != "?" and not is_array(each):
                raise ArgumentError(f"the input {name!r} is {a_thing(each)}; want an array of {want}")
        return given, types_of(given)

    def _checked(self, types: Mapping[str, Type]) -> dict[str, Type]:
        types = types_of(types)
        listed = ", ".join(f"{name}: {made}" for name, made in self.inputs.items()) or "no inputs"
        for name in (*types, *self.inputs):
            if name not in self._known or name not in types:
                problem = "is missing" if name in self.inputs else "is not the model's"
                raise ArgumentError(f"the input {name!r} {problem}\n  want {listed}")
            want, got = self._known[name], types[name]
            dims = self._dims[name]
            is_shape = dims is None or got.shape is None or _is_of(got.shape, dims)
            if want.dtype not in ("?", got.dtype) or not is_shape:
                told = want if dims is None else f"{want.dtype}[{'x'.join(map(str, dims))}]"
                raise ArgumentError(f"the input {name!r} is another tensor\n  got {got}; want {told}")
            if got.nbytes > MAX_BYTES:
                raise ArgumentError(f"the input {name!r} is larger than memory can be\n  got {got}")
            if got.shape is None and got.dtype != "?":
                shape = self.example.get(name, want).shape or "its shape"
                remedy = f"give it, as in {{{name!r}: fuseplan.onnx.Type({shape}, {got.dtype!r})}}"
                raise ArgumentError(f"the shape of the input {name!r} is not known: {remedy}")
        return {name: types[name] for name in self._known if name in types}


def _dims(ones: Mapping[str, Type], twos: Mapping[str, Type]) -> dict[str, tuple[int | str, ...] | None]:
    """The extents of inputs, by their types with two numbers for open ones, which get question marks."""
    shapes = {name: (made.shape, twos[name].shape) for name, made in ones.items()}
    return {
        name: None
        if one is None or two is None
        else tuple(each if each == other else "?" for each, other in zip(one, two, strict=True))
        for name, (one, two) in shapes.items()
    }


def _is_of(shape: Sequence[int], dims: Sequence[int | str]) -> bool:
    """Whether a shape has these extents, of which question marks stand for any."""
    return len(shape) == len(dims) and all(want in ("?", got) for got, want in zip(shape, dims, strict=True))


def _array(value: Any) -> Any:
    is_tensor = hasattr(value, "dtype") and hasattr(value, "shape")
    return np.asarray(value) if is_tensor else value


def load(
    model: str | PathLike[str] | Any,
    target: Target | str = "cpu",
    *,
    threads: int | None = None,
    accuracy: Accuracy = "default",
    choose: str = "predicted",
    rules: Sequence[Rule] = (),
) -> OnnxModel:
    """Reads a model of ONNX; it is compiled for the shapes of its first call.

        y = fuseplan.onnx.load("model.onnx").run(None, {"x": x})[0]

    Args:
        model: the path of a file, whose external data lies in the file's folder; or an onnx.ModelProto.
        target: `cpu`, this machine; or `cuda` or `cuda:1`, a GPU of it: values lie there, and operators that
            no plan computes are ONNX Runtime's on the CPU. From the second call on, a model without such
            operators is one CUDA graph. A kind of GPU, such as `triton:sm_90`, is for reports alone.
        threads: the most threads of a launch; the `FUSEPLAN_THREADS` setting or all cores unless given.
        accuracy: as for `fuseplan.compile`.
        choose: `predicted`: each plan that has a kernel computes its operators, except where a stored
            measurement is against it. `measured`: when the model is compiled, plans without a stored
            measurement are checked against float64 and timed beside ONNX Runtime's run of the same operators,
            on the values that the first call has there, some 0.1 s each, and the result is stored. A plan
            that is slower, wrong or not to be built is left to ONNX Runtime: the report tells why.
        rules: what `fuseplan.rule` made: operators of plans for formulas that they are to stand for.

    Raises:
        ArgumentError: the file is no model, or its external data lies elsewhere; or the target or `choose`
            cannot be.
        OSError: the file cannot be read.
    """
    known = decide("f32[1x1] -> relu", target, threads=threads).target
    if known.backend == "reference":
        raise ArgumentError(f"models run on the cpu and on GPUs; got {known}. `exact` computes in float64")
    if known.processors and choose != "predicted":
        raise ArgumentError("plans are measured beside ONNX Runtime on the cpu: want choose='predicted'")
    return OnnxModel(model_of(model), How(known, accuracy, checked_mode(choose), tuple(rules)))
