"""A loaded kernel's launches: one foreign call each, of arguments that stay where they are.

The arguments' words are read by the driver where they lie; nothing is copied or converted between calls. Of a
tensor map the kernel is given 128 encoded bytes, made once for each address of the memory, and then its
extents (int32) and strides (int64); after all arguments come two pointers to scratch memory, which are null.
"""

from __future__ import annotations

import copy
import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fuseplan.backends.triton import driver as drivers
from fuseplan.backends.triton.artifact import Artifact
from fuseplan.backends.triton.driver import COOPERATIVE, LaunchAttribute, LaunchConfig
from fuseplan.errors import BuildError
from fuseplan.kernels.emit import Source

if TYPE_CHECKING:
    from fuseplan.backends.triton.memory import Queue

UNSIGNED = 2**64 - 1
MAPS_HELD = 64  # of each slot: tensors that take turns, as an allocator hands them out, are encoded once
_SCRATCH = ctypes.c_int64(0)  # Triton's last two arguments: none is needed
LARGEST_GRID = (2**31 - 1, 65535, 65535)
MOST_MAPPED = 2**31 - 2**12  # elements of a mapped axis: where a tile begins behind them, 32 bits tell


class LoadedKernel:
    """An artifact's function on a device.

    Attributes:
        source: what it was made of; perhaps without its text.
        artifact: what it was loaded from.
        function: the driver's handle.
        words: for each slot, the place of its word: slots of the same tensor share the last one's.

    The module is unloaded after the kernel is gone, when the next one is loaded.
    """

    def __init__(self, source: Source, artifact: Artifact, queue: Queue) -> None:
        self.source, self.artifact, self.queue = source, artifact, queue
        self.driver = drivers.driver()
        self._whole: LoadedKernel | None = None  # the one that keeps the module, of one for some extent
        if not queue.is_capturing():
            self.driver.unload(queue.device)
        self.function = self.driver.load(artifact, queue.device)
        self._dropped = weakref.finalize(self, self.driver.drop, self.function, queue.device)
        self._dropped.atexit = False
        last = {(slot.kind, slot.key): place for place, slot in enumerate(source.slots)}
        self.words = tuple(last[slot.kind, slot.key] for slot in source.slots)

    def stay(self) -> None:
        """Keeps the module for as long as the process lives."""
        self._dropped.detach()

    def at(self, source: Source, extent: int) -> LoadedKernel:
        """The same function with the source of launches on one extent of its open axes.

        Raises:
            BuildError: a launch would have more programs than the driver takes.
        """
        _check_grid(source)
        made = copy.copy(self)
        made.source, made._whole = source, self
        return made

    def block(self, threads: int) -> GpuBlock:
        """New arguments; how many threads there are is the artifact's to say."""
        return GpuBlock(self)

    def fixed(self, words: Sequence[tuple[int, int]], held: object) -> Callable[[], None]:
        """A launch on the stream that is current now, with a workspace there: one foreign call alone.

        It keeps alive what `held` is.

        Raises:
            BuildError: the driver refuses a tensor map.
        """
        block = GpuBlock(self)
        for place, word in words:
            block.words[place] = word
        return block.fixed(held)


def load(source: Source, code: bytes, queue: Queue) -> LoadedKernel:
    """Loads a packed artifact.

    Raises:
        BuildError: it is none, it has other slots than the source, or the driver refuses it.
    """
    artifact = Artifact.unpack(code)
    mapped = [place for place, slot in enumerate(source.slots) if slot.map is not None]
    if len(artifact.types) != len(source.slots) or sorted(artifact.maps) != mapped:
        raise BuildError("the kernel's object code has other arguments than its source")
    _check_grid(source)
    return LoadedKernel(source, artifact, queue)


def _check_grid(source: Source) -> None:
    longest = max((extent for slot in source.slots if slot.map for extent in slot.map.shape), default=0)
    if longest > MOST_MAPPED:
        raise BuildError(f"an axis of {longest} positions is longer than the copy engine's coordinates reach")
    if any(not 1 <= extent <= most for extent, most in zip(source.grid, LARGEST_GRID, strict=True)):
        raise BuildError(
            f"a launch of {'x'.join(map(str, source.grid))} programs is more than the driver takes"
        )


class _Mapped:
    """A slot's tensor map: the memory it is of changes with the slot's word, all else stays.

    Attributes:
        place: of the slot.
        word: place of the word that it follows.
        seen: what that word was when the parameters were last set.
        encoding: all of the map but the memory.
    """

    __slots__ = ("_extents", "_held", "_strides", "encoding", "place", "seen", "word")

    def __init__(self, kernel: LoadedKernel, place: int) -> None:
        mapped = kernel.source.slots[place].map
        if mapped is None:
            raise ValueError(f"slot {place} has no tensor map")
        self.place, self.word = place, kernel.words[place]
        self.seen = -1  # of no memory yet
        self.encoding = drivers.MapEncoding(mapped, kernel.artifact.maps[place])
        self._extents = (ctypes.c_int32 * len(mapped.shape))(*mapped.shape)
        self._strides = (ctypes.c_int64 * len(mapped.strides))(*mapped.strides)
        self._held: dict[int, tuple[Any, int]] = {}

    @property
    def pointers(self) -> list[int]:
        """Addresses of what the kernel is given: the map, of nothing yet; each extent; each stride."""
        extents, strides = ctypes.addressof(self._extents), ctypes.addressof(self._strides)
        axes = range(len(self._extents))
        return [0, *(extents + 4 * axis for axis in axes), *(strides + 8 * axis for axis in axes)]

    def held(self, word: int) -> int:
        """Where the encoded map of the memory at that address lies; 0 if it has not been made."""
        return self._held.get(word, (None, 0))[1]

    def room(self, word: int) -> int:
        """Where the map of the memory at that address is to be written."""
        if len(self._held) >= MAPS_HELD:
            self._held.clear()
        storage = (ctypes.c_char * (drivers.ENCODED_BYTES + drivers.ALIGNMENT))()
        start = ctypes.addressof(storage)
        address = start + -start % drivers.ALIGNMENT
        self._held[word] = (storage, address)
        return address

    def drop(self, word: int) -> None:
        """Forgets a map that could not be made."""
        del self._held[word]


class GpuBlock:
    """The arguments of one launch, and the launch.

    Attributes:
        words: one a slot: an address, or the bits of a number.
        bound: whose constant words it holds.
        launch: runs the kernel on the current stream of its queue. It holds the kernel, and not the block.
    """

    __slots__ = (
        "_attribute",
        "_config",
        "_kernel",
        "_map_places",
        "_maps",
        "_parameters",
        "bound",
        "launch",
        "words",
    )

    def __init__(self, kernel: LoadedKernel) -> None:
        slots = kernel.source.slots
        self._kernel = kernel
        self.words: ctypes.Array[ctypes.c_int64] = (ctypes.c_int64 * max(1, len(slots)))()
        self.bound: object = None
        self._maps = [_Mapped(kernel, place) for place, slot in enumerate(slots) if slot.map is not None]
        self._map_places: list[int] = []
        self._parameters = self._pointers()
        self._attribute = LaunchAttribute(COOPERATIVE, 0, (1,))
        self._config = self._configured()
        self.launch: Callable[[], None] = self._launcher()

    def _pointers(self) -> Any:
        """Where the driver finds each argument."""
        first = ctypes.addressof(self.words)
        mapped = {each.place: each for each in self._maps}
        listed: list[int] = []
        for place, word in enumerate(self._kernel.words):
            if place in mapped:
                self._map_places.append(len(listed))
                listed += mapped[place].pointers
            else:
                listed.append(first + 8 * word)
        listed += [ctypes.addressof(_SCRATCH)] * 2
        return (ctypes.c_void_p * len(listed))(*listed)

    def _configured(self) -> LaunchConfig:
        source, artifact = self._kernel.source, self._kernel.artifact
        config = LaunchConfig()
        config.grid[:] = source.grid
        config.block[:] = (artifact.threads, 1, 1)
        config.shared_bytes = artifact.shared_bytes
        if dict(source.options).get("cooperative"):
            config.attributes = ctypes.pointer(self._attribute)
            config.attribute_count = 1
        return config

    def _launcher(self) -> Callable[[], None]:
        """The launch as a closure: every lookup that can be done before is."""
        kernel, words, config = self._kernel, self.words, self._config
        mapped = tuple(zip(self._maps, self._map_places, strict=True))
        go, stream_of = kernel.driver.launch, kernel.queue.stream
        reference, function = ctypes.byref(config), ctypes.c_void_p(kernel.function)
        parameters, places = self._parameters, self._workspaces()
        room, nbytes = kernel.queue.workspace, kernel.source.workspace(1)

        seen: int | None = None  # the stream that the configuration names
        view, known = memoryview(words), b""  # the words that the maps were set for

        def launch() -> None:
            nonlocal seen, known
            stream = stream_of()
            if places:
                held = room(stream, nbytes)  # kept until the launch was made
                for place in places:
                    words[place] = held.address
            if mapped and (state := view.tobytes()) != known:
                for each, place in mapped:
                    word = words[each.word]
                    if word != each.seen:
                        parameters[place] = each.held(word) or _encoded(kernel, each, word)
                        each.seen = word
                known = state
            if stream != seen:
                config.stream = seen = stream
                if stream:  # any but the default one may be recording: the graph does not hold the module
                    kernel.stay()
            status = go(reference, function, parameters, None)
            if status:
                _again(kernel, status, reference, function, parameters)

        return launch

    def fixed(self, held: object) -> Callable[[], None]:
        """The launch of the words as they are, which must not change, on the stream that is current now."""
        kernel, stream = self._kernel, self._kernel.queue.stream()
        # Launches that take turns on a stream share the memory, though a larger one may have followed it.
        places, nbytes = self._workspaces(), kernel.source.workspace(1)
        rooms = [kernel.queue.workspace(stream, nbytes) for _ in places[:1]]
        for place in places:
            self.words[place] = rooms[0].address
        for each, place in zip(self._maps, self._map_places, strict=True):
            self._parameters[place] = _encoded(kernel, each, self.words[each.word])
        self._config.stream = stream
        if stream:
            kernel.stay()
        go, function, parameters = kernel.driver.launch, ctypes.c_void_p(kernel.function), self._parameters
        reference = ctypes.byref(self._config)

        def launch(_kept: object = (self, rooms, held)) -> None:
            status = go(reference, function, parameters, None)
            if status:
                _again(kernel, status, reference, function, parameters)

        return launch

    def _workspaces(self) -> list[int]:
        slots = self._kernel.source.slots
        return [place for place, slot in enumerate(slots) if slot.kind == "workspace"]


def _encoded(kernel: LoadedKernel, mapped: _Mapped, word: int) -> int:
    """Address of the new map of the memory that the slot's word names.

    Raises:
        BuildError: the driver refuses it.
    """
    room = mapped.room(word)
    with kernel.driver.current(kernel.queue.device):
        status = kernel.driver.encode(room, mapped.encoding, (word & UNSIGNED) + mapped.encoding.begin)
    if status:
        mapped.drop(word)
        slot = kernel.source.slots[mapped.place]
        raise BuildError(f"the driver refuses the tensor map of {slot}: {kernel.driver.told(status)}")
    return room


def _again(kernel: LoadedKernel, status: int, reference: Any, function: Any, parameters: Any) -> None:
    """A launch that failed because the thread has another context, or none, is made in the right one.

    Raises:
        BuildError: it is refused there as well, or for another reason.
    """
    if status in drivers.WRONG_CONTEXT:
        with kernel.driver.current(kernel.queue.device):
            status = kernel.driver.launch(reference, function, parameters, None)
        if not status:
            return
    earlier = status in drivers.OF_AN_EARLIER_KERNEL
    why = "; a kernel launched before this one failed" if earlier else ""
    grid = "x".join(map(str, kernel.source.grid))
    raise BuildError(
        f"the driver refuses to launch {kernel.artifact.entry} on device {kernel.queue.device}: "
        f"{kernel.driver.told(status)}{why}\n  {grid} programs of {kernel.artifact.threads} threads and "
        f"{kernel.artifact.shared_bytes} bytes of shared memory"
    )
