"""The last stage: tensors into an argument block, and the launch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from fuseplan.backends.backend import Addresses, Packed
from fuseplan.backends.host import HostMemory
from fuseplan.errors import ArgumentError
from fuseplan.execution.passed import NONE, Look, like_before, look_of
from fuseplan.execution.runner import Given, Runner, Words
from fuseplan.system.untraced import skip_frames, untraced
from fuseplan.tensors.arguments import (
    OUT,
    SRC,
    bare_values,
    check_apart,
    check_keys,
    fitting,
    index_check,
    may_share,
    meets,
    missing_text,
    operand_buffer,
    parameter_value,
    result_buffer,
)
from fuseplan.tensors.arrays import Buffer, mark_written

Placed = tuple[int, Any, Callable[[Any], tuple[Any, int]] | None]  # its word, the tensor, or what makes one
_Taken = tuple[dict[str, float], Words, list[Packed], dict[str, Buffer]]
NOT_CARRIED = (
    "a compiled plan is code of this process and cannot be pickled: keep the text of its plan and the "
    "operands, and compile and bind them where they are loaded; the cache makes that quick. Or "
    "`compiled.save(path)`, and `fuseplan.load(path)` there, which needs no compiler"
)


class BoundPlan:
    """A compiled plan with packed operands: a call only launches the kernel.

    Made by `CompiledPlan.bind`. Bound operands were copied when they were bound, but for operands per element
    (residuals), which the kernel reads where they lie. Bound results are written by every call. Any number of
    threads may call at once.

    Args:
        runner: the compiled plan.
        values: operands, parameters and tensors for results, by key.
        borrow: operands that lie as the kernel reads them are not copied; the caller keeps them alive.
        base: the plan with other extents of its open axes, which has packed all values without these.
    """

    def __init__(
        self, runner: Runner, values: Mapping[str, Any], borrow: bool = False, base: BoundPlan | None = None
    ) -> None:
        plan = runner.plan
        skip_frames()
        check_keys(plan, values)
        self._runner, self._free_blocks, self._memory = runner, runner.free, runner.memory
        self._src_word, self._dst_word = runner.required("src"), runner.required("dst")
        self._src_bytes, self._dst_bytes = (spec.span * spec.itemsize for spec in (plan.src, plan.output))
        self._base, self._borrows = base, borrow
        self._numbers: dict[str, float] = base._numbers if base else {}
        # Borrowed operands are not kept alive, so they are not `_in_place`.
        self._lent: set[str] = {*base._lent} if base else set()
        self._numbers, words, self._keep, in_place = self._taken(values, keep=True)
        if self._keep:
            self._memory.settle()
        self._makers = {key: self._memory.maker(each.spec) for key, each in runner.results.items()}
        self._hold(values, words, in_place)
        needed = (*runner.operands, *(key for key, each in runner.results.items() if each.updated))
        unbound = needed if base is None else base._missing
        self._missing: tuple[str, ...] = tuple(key for key in unbound if key not in values)
        self._make = self._memory.maker(plan.output)
        self._address: Callable[[Any], int] = lambda _: 0  # of a tensor like the src that passed
        self._addresses: Addresses = lambda _, __, /: (0, 0, None)  # and of such an out
        self._check = index_check(plan) if isinstance(self._memory, HostMemory) else None
        self._passed: dict[str, Look] = {}  # how operands of a call looked that passed

    def _hold(self, values: Mapping[str, Any], words: Words, in_place: dict[str, Buffer]) -> None:
        """Keeps the words of all calls, and the tensors that calls read and write where they lie."""
        self._in_place, self._bound = in_place, self._given(values)
        earlier = self._base._words if self._base else []
        if self._base:
            self._in_place, self._bound = self._base._in_place | in_place, self._base._bound | self._bound
        self._results, places = self._placed(self._bound)
        self._words: Words = [*earlier, *words, *self._runner.extent, *places]
        written = self._runner.written(self._bound)
        check_apart(written, self._runner.read(self._in_place))
        self._written = [buffer.bounds for _, buffer in written]
        self._held = [*self._written, *(buffer.bounds for buffer in self._in_place.values())]

    @property
    def lent(self) -> set[str]:
        """The bound operands that every call reads where they lie."""
        return self._lent | self._in_place.keys()

    @property
    def missing(self) -> tuple[str, ...]:
        """The operands, and the results that are updated, that each call has to give."""
        return self._missing

    def further(self, values: Mapping[str, Any], borrow: bool = False) -> BoundPlan:
        """The plan with operands bound besides, which are not packed: each call reads them where they lie."""
        return BoundPlan(self._runner, values, borrow, base=self) if values else self

    @untraced
    def __call__(self, src: Any, out: Any = None, *bare: Any, **free: Any) -> Any:
        """Runs the kernel.

        Args:
            src: a tensor of the plan's `src`: a NumPy array, or anything in host memory with DLPack; on
                a GPU a torch tensor there, or anything with DLPack or `__cuda_array_interface__`.
            out: where to write; a new tensor of src's kind unless given.
            *bare: refused: operands are given by name.
            **free: operands that were not bound, and operands or parameters to take instead of bound ones;
                tensors for results, which are new ones unless given or bound.

        Returns:
            `out`, or the new tensor, of `plan.output`'s shape and layout. Where the plan has results or
            views, a named tuple of it, `out`, and of them by their keys.

        Raises:
            ArgumentError: a tensor is missing, does not match the plan, or overlaps one that is written.
        """
        operands = NONE
        if free or bare or self._passed:
            found = None if bare else like_before(self._passed, free)
            if found is None:
                return self._checked(src, out, free, len(bare))
            operands = found
        if out is None:
            begin = self._address(src)
            if not begin or (self._written and meets(begin, begin + self._src_bytes, self._written)):
                return self._checked(src, out, free)
            out, target = self._make(src)
            wrote = None
        else:
            begin, target, wrote = self._addresses(src, out)
            meet = begin < target + self._dst_bytes and target < begin + self._src_bytes
            is_near = (self._held or free) and self._hits(begin, target, operands.begins)
            if meet or not begin or not target or is_near:
                return self._checked(src, out, free)
        if self._results:
            outcome = self._launch(src, begin, out, target, self._results, [*operands.words])
        else:
            self._run(begin, target, operands.words)
            outcome = self._runner.outcome(out) if self._runner.views else out
        if wrote is not None:
            wrote((out,))
        return outcome

    def unchecked(
        self, src: Any, address: int, operands: Words, given: tuple[Any, int] | None = None, old: Any = None
    ) -> list[Any]:
        """The output, and new results, of a call on memory that the caller has checked.

        Args:
            src: a tensor of the plan's `src`.
            address: where it lies.
            operands: the words of all that is not bound, as `word_of` names their places. No result is.
            given: the output and where it lies; a new one otherwise.
            old: by the words of results that are updated, tensors of torch's with the values before.
        """
        out, target = given or self._make(src)
        made, words = [out], operands
        for place, _, make in self._results:
            tensor, begin = make(src)  # type: ignore[misc]
            if old and place in old:
                tensor.copy_(old[place])
            made.append(tensor)
            words = [*words, (place, begin)]
        self._run(address, target, words)
        return made

    def places(self) -> dict[str, tuple[int, int]]:
        """Of operands that the last call read where they lay: the word, and what its address divides."""
        return {key: (each.place, each.step) for key, each in self._passed.items() if each.step}

    def look(self, key: str, tensor: Any) -> Look | None:
        """How an operand looks, which is checked; None for kinds that are checked anew each time."""
        return look_of(self._runner, key, tensor, is_in_place=False)

    def word_of(self, key: str) -> tuple[int, Any]:
        """The place of the word with the address of a result, or an operand as it is read; its packing."""
        if key in self._makers:
            return self._runner.required("result", key), None
        return self._runner.required("operand", key), self._runner.operands[key]

    def __copy__(self) -> BoundPlan:
        return self  # nothing of it changes

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundPlan:
        """Itself; where it holds tensors that calls read or write in place, the same with copies of them."""
        own = {key: buffer.owner for key, buffer in self._in_place.items()}
        own |= {key: tensor for key, (tensor, _) in self._bound.items()}
        if not own:
            return self
        own = copy.deepcopy(own, memo)
        _, words, _, in_place = self._taken(own)
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        made._hold(own, [*self._words, *words], in_place)  # of two words for one place, the later one stands
        return made

    def __reduce__(self) -> NoReturn:
        raise TypeError(NOT_CARRIED)

    def __repr__(self) -> str:
        missing = f", each call gives {', '.join(self._missing)}" if self._missing else ""
        return f"<bound{missing}: {self._runner.plan}>"

    def _hits(self, src: int, target: int, begins: Sequence[int]) -> bool:
        """Whether `out` meets a tensor that stays put, or one of the call's, or src one that is written."""
        reaches = (each.reach for each in self._passed.values())
        given = [(begin + low, begin + end) for begin, (low, end) in zip(begins, reaches, strict=False)]
        if meets(target, target + self._dst_bytes, [*self._held, *given]):
            return True
        return bool(self._written) and meets(src, src + self._src_bytes, self._written)

    def _given(self, values: Mapping[str, Any]) -> dict[str, Given]:
        """The tensors given for results, each with how it lies."""
        runner, view = self._runner, self._memory.view
        return {
            key: (values[key], result_buffer(runner.plan, result, values[key], view))
            for key, result in runner.results.items()
            if key in values
        }

    def _placed(self, given: Mapping[str, Given]) -> tuple[list[Placed], Words]:
        """Each result's word, tensor, and what makes one where none is given; the words of given ones."""
        places = {key: self._runner.required("result", key) for key in self._makers}
        results: list[Placed] = [
            (place, given[key][0], None) if key in given else (place, None, self._makers[key])
            for key, place in places.items()
        ]
        return results, [(places[key], buffer.address) for key, (_, buffer) in given.items()]

    def _launch(
        self, src: Any, begin: int, out: Any, target: int, results: list[Placed], words: Words
    ) -> Any:
        """A launch with results: what is given, and new ones in the place of the others."""
        tensors = []
        for place, given, make in results:
            if make is None:
                tensors.append(given)
                continue
            made, address = make(src)
            words.append((place, address))
            tensors.append(made)
        self._run(begin, target, words)
        for _, given, _ in results:
            mark_written(given)
        return self._runner.outcome(out, *tensors)

    def _run(self, src: int, dst: int, words: Words | tuple[()] = ()) -> None:
        if self._check:
            self._check(src)
        try:
            block = self._free_blocks.pop()  # atomic, so two threads never get the same
        except IndexError:
            block = self._runner.block()
        try:
            listed = block.words
            constants = self._words
            if block.bound is not constants:
                for index, word in constants:
                    listed[index] = word
                block.bound = constants  # not the plan: that has the block, and would not be freed
            if words:
                block.bound = None  # the words of one call are nobody's constants
                for index, word in words:
                    listed[index] = word
            listed[self._src_word] = src
            listed[self._dst_word] = dst
            block.launch()
        finally:
            self._free_blocks.append(block)

    def _checked(self, src: Any, out: Any, free: Mapping[str, Any], bare: int = 0) -> Any:
        """The call with every check, from scratch; how the tensors that passed look is remembered."""
        plan = self._runner.plan
        if bare:
            raise bare_values(plan, bare)
        check_keys(plan, free)
        read = fitting(self._memory.view, src, SRC, plan.src)
        missing = [key for key in self._missing if key not in free]
        if missing:
            raise ArgumentError(missing_text(plan, missing))
        _, words, keep, in_place = self._taken(free)
        result = self._make(src)[0] if out is None else out
        target = fitting(self._memory.view, result, OUT, plan.output)
        given = self._given(free)
        self._check_ends(read, None if out is None else target, free, given)
        if self._results:
            results, places = self._placed(self._bound | given)
            outcome = self._launch(src, read.address, result, target.address, results, words + places)
        else:
            self._run(read.address, target.address, words)
            outcome = self._runner.outcome(result)
        if out is not None:
            mark_written(out)
        self._remember(src, result, free, in_place)
        del keep, in_place  # the packed operands lived until the kernel had read them
        return outcome

    def _check_ends(
        self, read: Buffer, out: Buffer | None, free: Mapping[str, Any], given: dict[str, Given]
    ) -> None:
        """Checks that a call may write into `out`, and that nothing it writes overlaps what it reads.

        Raises:
            ArgumentError: it may not, or something does.
        """
        if out is not None and out.readonly:
            raise ArgumentError(OUT, " is read-only: pass a writable array")
        runner, view = self._runner, self._memory.view
        written = runner.written(self._bound | given)
        if out is not None:
            written.insert(0, (OUT, out))
        if not written:
            return
        named = {
            key: view(free[key], runner.plan_operands[key], in_place=False)
            for key in free
            if key in runner.operands
        }
        shares = out is not None and read.address == out.address and may_share(runner.plan)
        given_src = [] if shares else [(SRC, read)]
        check_apart(written, [*given_src, *runner.read(self._in_place | named)])

    def launcher(self, src: Any, out: Any) -> Callable[[], object]:
        """A call on two tensors that the caller keeps alive, which are checked now.

        On a GPU, it launches on the stream that is current now. A call of a small plan takes 0.8 us of the
        host this way and 2.6 us otherwise.

        Raises:
            ArgumentError: a tensor does not match the plan, or overlaps one that is written.
        """
        if self._results or self._missing:
            return partial(self, src, out)
        read = fitting(self._memory.view, src, SRC, self._runner.plan.src)
        target = fitting(self._memory.view, out, OUT, self._runner.plan.output)
        self._check_ends(read, target, {}, {})
        ends = [(self._src_word, read.address), (self._dst_word, target.address)]
        fixed = self._runner.fixed([*self._words, *ends], self)
        return fixed or partial(self._run, read.address, target.address)

    def _remember(self, src: Any, out: Any, free: Mapping[str, Any], in_place: Mapping[str, Buffer]) -> None:
        """Lets calls with tensors that look like these pass by less.

        Where each call gives operands alone, and the kernel writes no bound results.
        """
        runner = self._runner
        is_all = set(self._missing) == free.keys() <= runner.operands.keys()
        if not is_all or (free and self._written):
            return
        form, pair = self._memory.form_of(src), self._memory.pair_of(src, out)
        looks = {key: look_of(runner, key, tensor, key in in_place) for key, tensor in free.items()}
        if form is None or pair is None or None in looks.values():
            return
        self._passed = {key: look for key, look in looks.items() if look}
        self._address, self._addresses = form.address, pair

    def _taken(self, values: Mapping[str, Any], *, keep: bool = False) -> _Taken:
        """Operands and parameters as the kernel reads them: numbers, words, their memory, what stays put."""
        runner = self._runner
        words: Words = []
        held: list[Packed] = []
        in_place: dict[str, Buffer] = {}
        for key, packing in runner.operands.items():
            place = runner.place("operand", key)
            if key not in values or place is None:
                continue
            buffer = operand_buffer(runner.plan, runner.plan_operands[key], values[key], self._memory.view)
            if packing is None:
                in_place[key] = buffer
                words.append((place, buffer.address))
                continue
            stands = keep and not self._borrows
            packed = runner.memory.packed(packing, buffer, keep=stands, lasts=keep)
            words.append((place, packed.address))
            if packed.address == buffer.address and keep:
                self._lent.add(key)
            elif packed.address == buffer.address:
                in_place[key] = buffer
            if not self._borrows or packed.address != buffer.address:
                held.append(packed)
        given = {each.key: values[each.key] for each in runner.plan.parameters if each.key in values}
        numbers = self._numbers | {key: parameter_value(runner.plan, key, given[key]) for key in given}
        if given or keep:
            more, memory = runner.parameters(numbers)
            words += more
            held += memory
        return numbers, words, held, in_place
