"""Cases of each template under compute-sanitizer: `python tests/device/sanitize.py --record FILE`.

`memcheck` finds accesses outside of what was allocated, `racecheck` shared memory that two warps touch
without a barrier between, `initcheck` device memory that was read before it was written, `synccheck` barriers
used wrongly. Each case runs in a process of its own, first without a tool, which also fills the cache, so
that no compiler runs under one.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[2] / "src")]

from device.plans import texts  # noqa: E402 - found on the path set above
from fuseplan.backends import backend_of  # noqa: E402
from fuseplan.kernels.lower import lower  # noqa: E402
from fuseplan.kernels.match import match  # noqa: E402
from fuseplan.kernels.target import Target, parse_target  # noqa: E402
from fuseplan.kernels.template import Template  # noqa: E402
from fuseplan.measure.ground import ground_of  # noqa: E402
from fuseplan.messages.reasons import first_refusal  # noqa: E402
from fuseplan.plans.plan import FusionPlan  # noqa: E402

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
WRONG = 9  # the exit status of the tool where it found something
AT_ONCE = 12  # processes on the GPU
SECONDS = 150  # a process may take
# Plans of templates that `texts` has none of, and of kernels whose programs meet.
MORE = (
    "f16[16x64x28x28, nhwc] -> batch_norm_training(running=True) -> relu",
    "f16[65x300] -> add -> save(sum) -> layer_norm -> bias",
    "f16[37x515] -> softmax",
    "f32[3000x70] -> sum(0)",
    "f16[33x520] -> layer_norm_backward(affine=True)",
    "f16[19x1000] -> cross_entropy",
    "f16[5x70x33] -> cumsum(-1)",
    "f16[2x4x100x64, bhsd] -> attention(is_causal=True)",
    "f16[2x8x1x64, bhsd] -> attention(keys=777, key_heads=2)",
    "f16[2x4x100x64, bhsd] -> attention_gradient(keys=100, is_causal=True, by=key)",
    "f16[2x4x100x64, bhsd] -> attention_gradient(keys=100, is_causal=True)",
    "f16[33x128] -> linear(1000) -> cross_entropy",
)
SMALL = 1 << 22  # elements: larger plans take the tools minutes


def cases() -> Iterator[tuple[str, str]]:
    """(template, plan): of each template the first small plan in f16 that it takes, and those of `MORE`."""
    target = parse_target("triton:sm_90")
    listed = sorted(texts(), key=lambda text: not text.startswith("f16"))
    for kind in backend_of("triton").templates:
        takes = partial(_takes, kind, target)
        yield from ((kind.name, text) for text in (*filter(takes, MORE), *islice(filter(takes, listed), 1)))


def _takes(kind: type[Template], target: Target, text: str) -> bool:
    kernel = lower(match(FusionPlan.parse(text)))
    is_small = kernel.src.size + kernel.dst.size <= SMALL
    return is_small and first_refusal(kind.limits(kernel, target, "default"), kind.name) is None


def run_one(template: str, text: str, is_judged: bool) -> None:
    """The plan on that template, beside float64 where it is judged: that runs torch's kernels too."""
    import torch

    from fuseplan.compile import compile as compile_plan
    from random_checks import compare

    torch.set_grad_enabled(False)
    compiled = compile_plan(text, "cuda", template=template)
    ground = ground_of(compiled.plan, compiled.target, 1)
    if is_judged:
        compare(compiled, compiled.plan, ground)
    else:
        ground.call(compiled.bind)()
        torch.cuda.synchronize()


def checked(tool: str, template: str, text: str) -> dict[str, object]:
    """What a tool, or "plain" for none, says of a case."""
    own = [sys.executable, str(HERE), "--run", template, text]
    own += [] if tool == "plain" else ["--unjudged"]
    under = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(WRONG), "--print-limit", "5"]
    try:
        ran = subprocess.run(
            own if tool == "plain" else [*under, *own],
            capture_output=True, text=True, check=False, timeout=SECONDS,
        )  # fmt: skip
        status, said = ran.returncode, ran.stdout + ran.stderr
    except subprocess.TimeoutExpired:
        status, said = -1, f"took more than {SECONDS} seconds"
    summary = [line for line in said.splitlines() if "SUMMARY" in line] or said.splitlines()[-1:]
    found = {"tool": tool, "template": template, "plan": text, "status": status, "said": summary}
    print(status, tool, template, text, *summary, sep="  ", flush=True)
    if status:
        print(said[-3000:], flush=True)
    return found


def main() -> int:
    """Runs all; the exit status is 1 where a tool found something."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", type=Path, help="file to append a JSON line to")
    parser.add_argument(
        "--commit", default="", help="what the record says was run; the checkout's unless given"
    )
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--run", nargs=2, metavar=("TEMPLATE", "PLAN"), help="run one case, without a tool")
    parser.add_argument("--unjudged", action="store_true", help="with --run: the result is not looked at")
    given = parser.parse_args()
    if given.run:
        run_one(given.run[0], given.run[1], is_judged=not given.unjudged)
        return 0
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    listed = list(cases())
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(lambda case: checked("plain", *case), listed))
        pairs = [(tool, *case) for tool in given.tools.split(",") for case in listed]
        found += list(pool.map(lambda pair: checked(*pair), pairs))
    if given.record:
        record(given.record, found, given.commit)
    return int(any(each["status"] for each in found))


def record(place: Path, found: list[dict[str, object]], stamped: str) -> None:
    """Appends the findings with the stamp of the machine."""
    from fuseplan.measure.machine import commit, gpu_machine, gpu_versions

    line = {
        "benchmark": "sanitize",
        "run": datetime.now(UTC).isoformat(timespec="seconds"),
        "found": found,
        "machine": gpu_machine().to_json(),
        "versions": gpu_versions(),
        "commit": stamped or commit(),
    }
    with place.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(main())
