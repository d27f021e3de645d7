"""What a backend is to the pipeline: templates, a toolchain, and the memory that its tensors lie in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from numpy.typing import NDArray

from fuseplan.errors import BuildError
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Template
from fuseplan.language.tensor import Dense, TensorSpec
from fuseplan.tensors.arrays import Buffer

if TYPE_CHECKING:
    from fuseplan.kernels.packing import Packing
    from fuseplan.tensors.dlpack import Wrote

Addresses = Callable[[Any, Any], "tuple[int, int, Wrote | None]"]
# From a tensor and its address: the address of the packed operand, and the owner of that memory.
Packer = Callable[[Any, int], tuple[int, object]]
# From a view's shape, steps and bytes an element: a function of two addresses that copies it, or None.
Copier = Callable[[Sequence[int], Sequence[int], int], Callable[[int, int], None] | None]


class Words(Protocol):
    """The arguments of a launch: one 64-bit word a slot, in the order of `Source.slots`.

    A word is an address or, for a slot of kind `parameter`, the bits of the number, zeros above them. Where
    the slot has a tensor map, the word is still the address of the memory that is mapped.
    """

    def __getitem__(self, index: int, /) -> int:
        """The word, as a signed number."""

    def __setitem__(self, index: int, word: int, /) -> None:
        """Sets the word; of a workspace nobody but the block itself does."""


class Block(Protocol):
    """The arguments of one launch; one launch at a time owns it."""

    bound: object  # whose constant words the block holds; the caller's to set

    @property
    def words(self) -> Words:
        """What the next launch is given."""

    def launch(self) -> None:
        """Runs the kernel on the words: to its end on a CPU, onto the device's current stream on a GPU.

        Words that did not change since the launch before cost nothing. The block may be used again as soon
        as this returns.

        Raises:
            BuildError: the driver refuses the launch; nothing that was passed can be the reason, since all
                of it was checked.
        """


class Loaded(Protocol):
    """Code in this process, ready to run; any number of threads may ask it for blocks."""

    def at(self, source: Source, extent: int) -> Loaded:
        """The same code with the source of launches on one extent of its open axes."""

    def block(self, threads: int) -> Block:
        """A new block, its workspace seen to, for launches on at most so many threads (a GPU ignores it)."""

    def fixed(self, words: Sequence[tuple[int, int]], held: object) -> Callable[[], None] | None:
        """A launch, on the current stream, of words that never change: pairs of a slot's place and its word.

        It keeps alive what `held` is. None where a block costs as little.
        """


class Packed(Protocol):
    """An operand or a vector of parameters as a kernel reads it; it lives as long as this object."""

    @property
    def address(self) -> int:
        """Where it begins."""


class Form(Protocol):
    """What a tensor that was accepted looks like: others that look the same need no further check."""

    def address(self, tensor: Any, writes: bool = False, /) -> int:
        """Where the tensor begins; 0 if it looks different, or must not be written though `writes` asks."""


class Memory(Protocol):
    """Where a target's tensors lie: the host's memory, or one GPU's."""

    def view(self, tensor: Any, what: object, *, in_place: bool = True) -> Buffer:
        """The caller's tensor where it lies, never copied; `what` is what messages call it.

        What a kernel does not read in place, because it is packed before, may begin anywhere.

        Raises:
            ArgumentError: it is no tensor, is in other memory, or a kernel cannot read it there.
        """

    def form_of(self, tensor: Any) -> Form | None:
        """The form of an accepted tensor; None for kinds that are checked anew each time."""

    def pair_of(self, src: Any, out: Any) -> Addresses | None:
        """The forms of an accepted `src` and `out` together; None where one has none.

        Returns:
            Where others that look the same begin; one is 0 if it looks different, or must not be written.
            And what tells autograd that `out` was written, where it has a version counter.
        """

    def maker(self, spec: TensorSpec | Dense) -> Callable[[Any], tuple[Any, int]]:
        """Makes new tensors of the spec, of the kind of a given one, and says where each begins."""

    def packed(self, packing: Packing, buffer: Buffer, *, keep: bool, lasts: bool = False) -> Packed:
        """An operand as a kernel reads it; a copy of its own if it is to be kept; calls share what lasts."""

    def packer(self, packing: Packing, buffer: Buffer) -> Packer:
        """Packs, for one call, operands that look like one that was accepted and lie as it does."""

    def kept(self, values: NDArray[Any]) -> Packed:
        """A copy of a small array, dense: the kernel's parameters."""

    def settle(self) -> None:
        """Returns when every launch, on whichever stream, may read what was packed so far."""


class Backend(ABC):
    """Templates, and the toolchain that makes code of their source; that is imported when first used.

    A method that is not abstract suits a toolchain that works in this process, for this machine alone.

    Attributes:
        name: the first word of its targets.
        summary: what it is, in a few words.
        compiles_apart: whether `compile_all` has processes of its own.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    compiles_apart: ClassVar[bool] = False

    @property
    @abstractmethod
    def templates(self) -> tuple[type[Template], ...]:
        """Its templates, the best first; whoever asks first loads their modules. A cached property."""

    @property
    def templates_met(self) -> tuple[type[Template], ...]:
        """The templates as far as they are loaded: only then may there be one from outside the package."""
        return tuple(vars(self).get("templates", ()))

    def fingerprint(self) -> str | None:
        """The toolchain's versions, part of the cache's key; None where there is no code worth storing."""
        return None

    def refuses(self, target: Target) -> str | None:
        """Why code for a target of this backend cannot run on this machine; None if it can."""
        return None

    def compiles_for(self, target: Target) -> bool:
        """Whether code for a target that does not run on this machine can be made here."""
        return False

    def makes(self, template: Template) -> bool:
        """Whether the toolchain that is installed makes code of a choice; of every one where none is."""
        return True

    def placed(self, target: Target) -> Target:
        """A target that runs here, with the device of this machine that it runs on."""
        return target

    @abstractmethod
    def compile_object(self, source: Source, kernel: Kernel, template: Template, target: Target) -> bytes:
        """What `template.emit(kernel, target)` becomes: all that a launch needs besides the source's frame.

        Raises:
            BuildError: the toolchain is missing, or refuses the source.
        """

    def compile_all(
        self, pairs: Sequence[tuple[Kernel, Template]], target: Target, *, workers: int, seconds: float
    ) -> Iterator[tuple[Source, bytes | BuildError]]:
        """What `compile_object` makes of each kernel by its template, with its source, in order.

        Compilers run in `workers` processes where the toolchain has such; there, one that takes more than
        `seconds` for a kernel, or dies, is that kernel's error.

        Raises:
            BuildError: the toolchain is missing.
        """
        for kernel, template in pairs:
            source = template.emit(kernel, target)
            try:
                yield source, self.compile_object(source, kernel, template, target)
            except BuildError as error:
                yield source, error

    def resources(self, code: bytes) -> Mapping[str, int]:
        """What a program of the object code uses, where the toolchain says: registers, spills, ..."""
        return {}

    def listings(self, target: Target) -> tuple[str, ...]:
        """The kinds of assembly that code for the target has: `asm`, `ptx`, `sass`."""
        return ()

    def listing(self, kind: str, source: Source, kernel: Kernel, template: Template, target: Target) -> str:
        """The instructions that the source becomes, as one of the target's `listings`; compiled anew.

        Raises:
            BuildError: the toolchain is missing, or refuses the source.
        """
        raise ValueError(kind)

    @abstractmethod
    def load(self, kernel: Kernel, source: Source, code: bytes, target: Target) -> Loaded:
        """Loads object code onto a placed target; `source` may be without text. No toolchain is imported.

        Raises:
            BuildError: the code is not what this toolchain makes, or the driver refuses it.
        """

    def saved(self, source: Source, code: bytes, target: Target) -> bytes:
        """Code for a file, of what `compile_object` made; for all machines of the target's kind.

        Raises:
            BuildError: there is none for the target, or the toolchain failed.
        """
        return code

    def loaded(self, source: Source, code: bytes, target: Target) -> tuple[Target, Loaded]:
        """The target on this machine, and a file's code on it; no toolchain is imported.

        Raises:
            BuildError: this machine is of another kind, or the code is broken.
        """
        raise BuildError(f"the {self.name} backend interprets plans: it has no code to load")

    @abstractmethod
    def memory(self, target: Target) -> Memory:
        """The memory of a placed target."""
