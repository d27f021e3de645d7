"""A plan as text and as JSON, read back as the same plan; its kernel comes from the disk cache.

A plan is a value: equal plans are equal, print the same text and have the same hash. Object code is stored by
what it was made of, so another process that loads the plan does not compile it again.
"""

from pathlib import Path

import fuseplan
from fuseplan import Bias, Conv2d, FusionPlan, Gelu


def main() -> None:
    plan = FusionPlan("f16[8x64x28x28, nhwc]", Conv2d(96, kernel=3, stride=2, padding="same"), Bias(), Gelu())

    place = Path("plan.txt")
    place.write_text(str(plan))
    print(f"text: {place.read_text()}")
    loaded = FusionPlan.parse(place.read_text())

    place = Path("plan.json")
    place.write_text(plan.to_json())
    print(f"JSON: {place.read_text()}")
    print(f"equal: {loaded == plan == FusionPlan.from_json(place.read_text())}")

    before = fuseplan.cache_info()
    first = fuseplan.compile(plan).program
    again = fuseplan.compile(loaded).program
    after = fuseplan.cache_info()
    print(f"compiled in {first.load_seconds * 1e3:.0f} ms ({first.origin}), then from {again.origin}")
    print(f"looked up on disk: {after.hits - before.hits} hits, {after.misses - before.misses} misses")


if __name__ == "__main__":
    main()
