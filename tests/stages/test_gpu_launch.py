"""Launches as the driver sees them: arguments, tensor maps, streams, and what is said when it refuses."""

import json
import os
import struct
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from fake_driver import FakeDriver, MapArgument
from fuseplan.backends.triton import compiler
from fuseplan.backends.triton import driver as drivers
from fuseplan.backends.triton.artifact import Artifact
from fuseplan.backends.triton.launch import MAPS_HELD, GpuBlock, LoadedKernel
from fuseplan.backends.triton.launch import load as load_to
from fuseplan.backends.triton.toolchain import types_of
from fuseplan.errors import BuildError
from fuseplan.kernels.emit import Slot, Source, TensorMap
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import parse_target
from fuseplan.plans.plan import FusionPlan
from fuseplan.settings import environment
from toy_templates import HEAD, ToyProduct, ToySteps

ROOT = Path(__file__).resolve().parents[2]
SM_90 = parse_target("triton:sm_90")
PRODUCT = "f16[8x256x16x16, nhwc] -> conv2d(256, kernel=1)"
STRIDED = "bf16[2x16x7x8, nhwc] -> conv2d(16, kernel=1, stride=2)"


@dataclass
class Room:
    address: int


@dataclass
class Queue:
    """Streams and workspaces without a device."""

    device: int = 0
    now: int = 7
    recording: bool = False
    rooms: dict[int, Room] = field(default_factory=dict)

    def stream(self) -> int:
        return self.now

    def is_capturing(self) -> bool:
        return self.recording

    def workspace(self, stream: int, nbytes: int) -> Room:
        assert nbytes == 96
        return self.rooms.setdefault(stream, Room(4096 * (2 + len(self.rooms))))


def load(source: Source, code: bytes, queue: Queue) -> LoadedKernel:
    return load_to(source, code, queue)  # type: ignore[arg-type]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(drivers, "driver", lambda: fake)
    return fake


def block_of(
    template: ToyProduct | ToySteps, plan: str, queue: Queue | None = None
) -> tuple[GpuBlock, Artifact, Source]:
    kernel = lower(match(FusionPlan.parse(plan)))
    source = template.emit(kernel, SM_90)
    artifact = compiler.compile_source(source, types_of(source, kernel, template, SM_90), SM_90)
    return load(source, artifact.pack(), queue or Queue()).block(1), artifact, source


def elementwise(body: str, slots: tuple[Slot, ...], names: str, **frame: object) -> Source:
    text = f"{HEAD}def k({names}):\n    {body}\n"
    return Source(text, "k", slots, language="triton", **frame)  # type: ignore[arg-type]


def test_what_is_launched(driver: FakeDriver) -> None:
    block, artifact, source = block_of(ToyProduct(rows=128, columns=128, depth=64), PRODUCT)
    block.words[0], block.words[1], block.words[2] = 1 << 20, 2 << 20, 3 << 20
    block.launch()
    (launch,) = driver.launches
    assert (launch.grid, launch.block) == ((16, 2, 1), (128, 1, 1))
    assert launch.shared_bytes == artifact.shared_bytes > 0
    assert (launch.stream, launch.device, launch.cooperative) == (7, 0, False)
    for argument, slot, word in zip(launch.arguments, source.slots, block.words, strict=True):
        assert isinstance(argument, MapArgument)
        assert slot.map is not None
        assert argument.encoded.address == word
        assert argument.extents == argument.encoded.extents == slot.map.shape
        assert argument.strides == slot.map.strides
        assert argument.encoded.strides == tuple(2 * stride for stride in slot.map.strides[:-1])
        assert argument.encoded.dtype == 6
        assert argument.encoded.swizzle == 3
    assert launch.arguments[2].encoded.box == (128, 64)


def test_a_box_with_steps_spans_them(driver: FakeDriver) -> None:
    block, _, _ = block_of(ToySteps(), STRIDED)
    block.words[0], block.words[1] = 1 << 20, 2 << 20
    block.launch()
    source, dst = driver.encodings
    assert (source.dtype, source.steps, source.box) == (9, (1, 2, 2, 1), (1, 8, 8, 16))
    assert (dst.steps, dst.box) == ((1, 1, 1, 1), (1, 4, 4, 16))


def test_maps_are_made_when_an_address_changes_and_not_otherwise(driver: FakeDriver) -> None:
    block, _, _ = block_of(ToyProduct(rows=128, columns=128, depth=64), PRODUCT)
    block.words[0], block.words[1], block.words[2] = 1 << 20, 2 << 20, 3 << 20
    for _ in range(3):
        block.launch()
    assert len(driver.encodings) == 3
    block.words[2] = 4 << 20
    block.launch()
    assert len(driver.encodings) == 4
    assert [each.encoded.address for each in driver.launches[-1].arguments] == [1 << 20, 2 << 20, 4 << 20]


def test_tensors_that_take_turns_are_encoded_once(driver: FakeDriver) -> None:
    block, _, _ = block_of(ToySteps(), STRIDED)
    block.words[1] = 2 << 20
    turns = [(3 + index % 5) << 20 for index in range(20)]
    for address in turns:
        block.words[0] = address
        block.launch()
    assert len(driver.encodings) == 6
    assert [launch.arguments[0].encoded.address for launch in driver.launches] == turns


def test_maps_do_not_pile_up(driver: FakeDriver) -> None:
    block, _, _ = block_of(ToySteps(), STRIDED)
    block.words[1] = 2 << 20
    turns = [(3 + index % (MAPS_HELD + 1)) << 20 for index in range(3 * MAPS_HELD)]
    for address in turns:
        block.words[0] = address
        block.launch()
    assert len(driver.encodings) > MAPS_HELD + 2
    assert [launch.arguments[0].encoded.address for launch in driver.launches] == turns


def test_addresses_above_the_middle_of_memory(driver: FakeDriver) -> None:
    block, _, _ = block_of(ToySteps(), STRIDED)
    high = 2**64 - 4096
    block.words[0], block.words[1] = high - 2**64, 1 << 20
    block.launch()
    assert driver.encodings[0].address == high


def test_slots_of_one_tensor_have_one_word(driver: FakeDriver) -> None:
    mapped = TensorMap("f32", (64, 64), (64, 1), (32, 32), (1, 1))
    slots = (
        Slot("src", map=mapped),
        Slot("src"),
        Slot("dst"),
        Slot("src", map=replace(mapped, box=(16, 16))),
    )
    body = "tl.store(dst, tl.load(src) + tl.sum(a.load([0, 0])) + tl.sum(b.load([0, 0])))"
    source = elementwise(body, slots, "a, src, dst, b")
    types = ("tensordesc<fp32[32, 32]>", "*fp32", "*fp32", "tensordesc<fp32[16, 16]>")
    block = load(source, compiler.compile_source(source, types, SM_90).pack(), Queue()).block(1)
    block.words[3], block.words[2] = 1 << 20, 2 << 20  # the last of src's slots is the one that is set
    block.launch()
    first, pointer, dst, second = driver.launches[0].arguments
    assert (first.encoded.address, pointer, dst, second.encoded.address) == (
        1 << 20,
        1 << 20,
        2 << 20,
        1 << 20,
    )
    assert (first.encoded.box, second.encoded.box) == ((32, 32), (16, 16))


@pytest.mark.parametrize(("dtype", "code"), [("fp32", "<f4x"), ("fp64", "<d")])
def test_numbers_are_passed_by_value(driver: FakeDriver, dtype: str, code: str) -> None:
    slots = (Slot("dst"), Slot("parameter", "eps"))
    source = elementwise("tl.store(dst, par_eps)", slots, "dst, par_eps")
    artifact = compiler.compile_source(source, (f"*{dtype}", dtype), SM_90)
    block = load(source, artifact.pack(), Queue()).block(1)
    block.words[0], block.words[1] = 1 << 20, struct.unpack("<q", struct.pack(code, 0.1))[0]
    block.launch()
    want = 0.1 if dtype == "fp64" else struct.unpack("<f", struct.pack("<f", 0.1))[0]
    assert driver.launches[0].arguments == (1 << 20, want)


def test_each_stream_has_a_workspace(driver: FakeDriver) -> None:
    slots = (Slot("dst"), Slot("workspace"))
    source = elementwise("tl.store(dst, tl.load(workspace))", slots, "dst, workspace", workspace_bytes=96)
    artifact = compiler.compile_source(source, ("*i32", "*i32"), SM_90)
    queue = Queue()
    block = load(source, artifact.pack(), queue).block(1)
    block.words[0] = 1 << 20
    for stream in (7, 7, 9, 9):
        queue.now = stream
        block.launch()
    assert [launch.arguments[1] for launch in driver.launches] == [8192, 8192, 12288, 12288]
    assert [launch.stream for launch in driver.launches] == [7, 7, 9, 9]


def test_a_map_of_the_workspace_begins_behind_the_counters(driver: FakeDriver) -> None:
    mapped = TensorMap("f32", (64, 64), (64, 1), (32, 32), (1, 1), begin=4096)
    slots = (Slot("workspace", map=mapped), Slot("dst"), Slot("workspace"))
    body = "tl.store(dst, tl.sum(a.load([0, 0])) + tl.load(workspace))"
    source = elementwise(body, slots, "a, dst, workspace", workspace_bytes=96)
    types = ("tensordesc<fp32[32, 32]>", "*fp32", "*i32")
    block = load(source, compiler.compile_source(source, types, SM_90).pack(), Queue()).block(1)
    block.words[1] = 1 << 20
    block.launch()
    copied, _, workspace = driver.launches[0].arguments
    assert copied.encoded.address == workspace + 4096


def test_a_cooperative_launch(driver: FakeDriver) -> None:
    options = (("num_warps", 8), ("cooperative", 1))
    source = elementwise("tl.store(dst, 1)", (Slot("dst"),), "dst", options=options, grid=(3, 2, 1))
    artifact = compiler.compile_source(source, ("*i32",), SM_90)
    block = load(source, artifact.pack(), Queue()).block(1)
    block.words[0] = 1 << 20
    block.launch()
    (launch,) = driver.launches
    assert (launch.cooperative, launch.block, launch.grid) == (True, (256, 1, 1), (3, 2, 1))


def launched_and_dropped(queue: Queue) -> None:
    block, _, _ = block_of(ToySteps(), STRIDED, queue)
    block.words[0], block.words[1] = 1 << 20, 2 << 20
    block.launch()


def test_a_module_goes_when_the_next_is_loaded(driver: FakeDriver) -> None:
    queue = Queue(now=0)
    launched_and_dropped(queue)
    assert (driver.dropped, driver.unloaded) == ([1], []), "a finalizer calls nothing of the driver's"
    kept, _, _ = block_of(ToySteps(), STRIDED, queue)
    assert driver.unloaded == [1]
    kept.words[0], kept.words[1] = 1 << 20, 2 << 20
    launch = kept.launch
    del kept
    block_of(ToySteps(), STRIDED, queue)
    assert driver.unloaded == [1], "whoever can launch a kernel holds it"
    launch()


def test_a_graph_may_hold_what_was_launched_on_another_stream(driver: FakeDriver) -> None:
    launched_and_dropped(Queue(now=7))
    block_of(ToySteps(), STRIDED, Queue(now=0))
    assert driver.unloaded == []


def test_nothing_is_unloaded_while_a_stream_records(driver: FakeDriver) -> None:
    launched_and_dropped(Queue(now=0))
    queue = Queue(now=0, recording=True)
    block_of(ToySteps(), STRIDED, queue)
    assert driver.unloaded == []
    block_of(ToySteps(), STRIDED, Queue(now=0))
    assert driver.unloaded == [1, 2]


@pytest.mark.parametrize("status", drivers.WRONG_CONTEXT)
def test_a_thread_without_the_context_launches_in_it(driver: FakeDriver, status: int) -> None:
    block, _, _ = block_of(ToySteps(), STRIDED)
    block.words[0], block.words[1] = 1 << 20, 2 << 20
    driver.statuses = [status]
    block.launch()
    assert len(driver.launches) == 1
    driver.statuses = [status, status]
    with pytest.raises(BuildError, match=f"CUDA_ERROR_{status}"):
        block.launch()


@pytest.mark.parametrize(("status", "said"), [(1, "of shared memory"), (700, "before this one failed")])
def test_a_refused_launch_is_told_and_the_next_goes_on(driver: FakeDriver, status: int, said: str) -> None:
    block, _, _ = block_of(ToySteps(), STRIDED)
    block.words[0], block.words[1] = 1 << 20, 2 << 20
    driver.statuses = [status]
    with pytest.raises(BuildError, match=f"refuses to launch toy on device 0: CUDA_ERROR_{status}") as caught:
        block.launch()
    assert said in str(caught.value)
    block.launch()
    assert len(driver.launches) == 1


def test_a_refused_map_is_told_and_made_the_next_time(driver: FakeDriver) -> None:
    block, _, _ = block_of(ToySteps(), STRIDED)
    block.words[0], block.words[1] = 1 << 20, 2 << 20
    driver.refuses_maps = True
    with pytest.raises(BuildError, match="refuses the tensor map of src"):
        block.launch()
    driver.refuses_maps = False
    block.launch()
    assert len(driver.launches) == 1


def test_what_does_not_belong_to_the_source_is_not_loaded(driver: FakeDriver) -> None:
    _, artifact, source = block_of(ToySteps(), STRIDED)
    with pytest.raises(BuildError, match="other arguments than its source"):
        load(source, replace(artifact, maps={}).pack(), Queue())
    with pytest.raises(BuildError, match="other arguments than its source"):
        load(replace(source, slots=source.slots[:1]), artifact.pack(), Queue())
    with pytest.raises(BuildError, match="1x65536x1 programs is more than the driver takes"):
        load(replace(source, grid=(1, 65536, 1)), artifact.pack(), Queue())


def test_what_was_compiled_before_loads_without_triton(tmp_path: Path) -> None:
    """A cached kernel must not wait for a compiler to be imported."""
    kernel = lower(match(FusionPlan.parse(STRIDED)))
    template = ToySteps()
    source = template.emit(kernel, SM_90)
    artifact = compiler.compile_source(source, types_of(source, kernel, template, SM_90), SM_90)
    place = tmp_path / "artifact"
    place.write_bytes(artifact.pack())
    program = (
        "import sys, json, pathlib\n"
        "from fake_driver import FakeDriver\n"
        "from fuseplan.backends.triton import driver, launch, toolchain\n"
        "from fuseplan.kernels.emit import Source\n"
        "driver.driver = FakeDriver\n"
        f"source = Source.from_frame(json.loads({json.dumps(json.dumps(source.frame))}))\n"
        "queue = type('Queue', (), {'device': 0, 'stream': int, 'workspace': None, 'is_capturing': bool})\n"
        f"block = launch.load(source, pathlib.Path({str(place)!r}).read_bytes(), queue).block(1)\n"
        "block.words[0], block.words[1] = 1 << 20, 2 << 20\n"
        "block.launch()\n"
        "assert toolchain.fingerprint().startswith('triton ')\n"
        "print([name for name in ('triton', 'torch') if name in sys.modules])\n"
    )
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("src", "tests"))
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env=environment(PYTHONPATH=paths),
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "[]"


def test_a_machine_without_a_driver_says_so() -> None:
    drivers.driver.cache_clear()
    try:
        found = drivers.driver()
    except BuildError as error:
        assert "no NVIDIA driver" in str(error)  # noqa: PT017 - a machine with one has nothing to say
    else:
        assert found.told(1).startswith("CUDA_ERROR_INVALID_VALUE")
