"""The newest Triton that the project supports, beside the oldest, which is installed: what it makes is sound.

Compiled is one plan of `test_gpu_kinds` of each template and kind of GPU, and, of each template and class of
dtypes that is not among them, one cell of the supported table; cells of each are interpreted, too.
`fuseplan crossbuild --triton` compiles suites.
"""

import os
import sys
import tomllib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.crossbuild import Build, builds, judged
from benchmarks.gate import faults
from cells import taken
from crossbuild.test_gpu_kinds import ALLOWED, KINDS, PLANS, ROOT, name_of
from fuseplan.backends.triton import sass, versions
from fuseplan.backends.triton.artifact import Artifact
from fuseplan.backends.triton.pool import Job, Worker
from fuseplan.backends.triton.template import GpuTemplate
from fuseplan.backends.triton.templates.hopper import Hopper
from fuseplan.backends.triton.templates.product import Product
from fuseplan.backends.triton.toolchain import types_of
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import parse_target
from fuseplan.plans.plan import FusionPlan
from interpreted import assert_interpreted, under

FOLDER = Path(sys.prefix) / f"triton-{versions.NEWEST}"  # where `make test` installs it
MOST = 45  # compiles
FROM_REGISTERS = (
    "f16[1000x768] -> relu -> matmul(1536) -> bias -> add -> relu",
    "f16[8x64x14x14, nhwc] -> relu -> conv2d(128, kernel=3, padding=1) -> bias",
)
NARROW = ("f16", "bf16")  # one class of dtypes: their texts differ in the name of a type

if "CI" not in os.environ and not FOLDER.exists():
    pytest.skip(f"{FOLDER} is not there: make test installs it", allow_module_level=True)


def cells() -> Iterator[tuple[str, type[GpuTemplate], FusionPlan]]:
    """The first cell of each target, template and class of dtypes."""
    seen = set()
    for target in KINDS:
        for turn, cell, kind in taken(target):
            own = target, kind, dtypes(cell.dtype)
            if own not in seen and issubclass(kind, GpuTemplate):
                seen.add(own)
                yield target, kind, cell.plan(turn)


def dtypes(plan: str) -> str:
    """The class of the dtype that a plan begins with."""
    dtype = plan.partition("[")[0]
    return "narrow" if dtype in NARROW else dtype


EVERY = builds(PLANS, [parse_target(kind) for kind in KINDS], triton=FOLDER)
BUILDS = list({(each.target, each.template.name): each for each in EVERY}.values())
BUILT = {(str(each.target), type(each.template), dtypes(each.plan)) for each in BUILDS}
CELLS = {cell: pytest.param(*cell, id=f"{cell[0]}-{cell[1].name}-{cell[2]}") for cell in cells()}
PLAIN = [made for (target, kind, _), made in CELLS.items() if target == KINDS[0] and kind is not Hopper]
LEFT = [
    made for (target, kind, plan), made in CELLS.items() if (target, kind, dtypes(str(plan))) not in BUILT
]


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    made = Worker(FOLDER)
    yield made
    made.stop()


def artifact(worker: Worker, job: Job) -> Artifact:
    found = worker.compile(job)
    assert isinstance(found, bytes), found
    return Artifact.unpack(found)


def job_of(kind: type[GpuTemplate], plan: FusionPlan | str, target: str, place: int = 0) -> Job:
    """A candidate of a template that the newest Triton compiles."""
    text = FusionPlan.parse(plan) if isinstance(plan, str) else plan
    kernel, known = lower(match(text)), parse_target(target)
    every = kind.candidates(kernel, known, "default")
    version = versions.parsed(versions.NEWEST)
    chosen = next(islice((each for each in every if versions.makes(version, each)), place, None))
    assert isinstance(chosen, GpuTemplate)
    source = chosen.emit(kernel, known)
    return Job(source, types_of(source, kernel, chosen, known), known)


@pytest.mark.parametrize("build", BUILDS, ids=name_of)
def test_a_kernel_compiles_and_is_sound(worker: Worker, build: Build) -> None:
    built = judged(build, build.job, worker.compile(build.job), ALLOWED)
    assert not built.faults, f"{build.template.text}\n{build.job.source.text}\n{built.resources}"


@pytest.mark.parametrize(("target", "kind", "plan"), LEFT)
def test_a_cell_compiles(worker: Worker, target: str, kind: type[GpuTemplate], plan: FusionPlan) -> None:
    job = job_of(kind, plan, target)
    used = artifact(worker, job).resources
    assert not list(faults(job.source, job.types, used, job.target))


@pytest.mark.parametrize(("target", "kind", "plan"), PLAIN)
def test_a_cell_is_interpreted(target: str, kind: type[GpuTemplate], plan: FusionPlan) -> None:
    with under(FOLDER):
        assert_interpreted(plan, kind, target)


@pytest.mark.parametrize("plan", FROM_REGISTERS)
def test_no_factor_is_overwritten_before_it_is_read(worker: Worker, plan: str) -> None:
    jobs = [job_of(Product, plan, KINDS[0], place) for place in range(2)]
    codes = [sass.disassembled(artifact(worker, job).binary, FOLDER / "triton") for job in jobs]
    assert all(map(sass.from_registers, codes))
    assert [sass.overwritten(code) for code in codes] == [set(), set()]


def test_threads_take_neighbouring_rows_where_positions_are_odd(worker: Worker) -> None:
    """Without a hint threads take neighbouring channels from Triton 3.7 on, and registers spill."""
    plan, target = "f16[64x64x55x55] -> conv2d(64, kernel=3, padding=1) -> bias", parse_target(KINDS[0])
    kernel = lower(match(FusionPlan.parse(plan)))
    form = Product(256, 64, 32, swapped=True, stages=2, ahead=True, joined=8)
    source = form.emit(kernel, target)
    used = artifact(worker, Job(source, types_of(source, kernel, form, target), target)).resources
    assert used["spill_bytes"] == 0


def test_the_set_is_bounded() -> None:
    assert len(BUILDS) + len(LEFT) <= MOST


def test_the_folder_holds_the_newest() -> None:
    assert versions.version_of(FOLDER) == versions.parsed(versions.NEWEST)


def test_the_project_requires_the_oldest_and_tests_with_it() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = {name: each for name in ("triton", "dev") for each in extras[name] if each.startswith("triton")}
    least = versions.OLDEST.removesuffix(".0")
    assert asked == {
        "triton": f"triton>={least}; sys_platform == 'linux'",
        "dev": f"triton=={versions.OLDEST}; sys_platform == 'linux'",
    }
    assert versions.version_of() == versions.parsed(versions.OLDEST)
