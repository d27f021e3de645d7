"""Runs the tests of this folder in several processes at once, where pytest-xdist is not installed.

    python tests/device/shares.py 15 [pytest's arguments ...]

Each process takes every n-th test: `--share 2/15` are the second, the seventeenth, ... Their outputs are
printed one after the other. Ends with status 1 where a process fails.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent


def main(count: int, arguments: Sequence[str]) -> int:
    places = [each for each in arguments if Path(each.split("::")[0]).exists()]
    command = [sys.executable, "-m", "pytest", "-q", *([] if places else [str(HERE)]), *arguments]
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / str(number) for number in range(1, count + 1)]
        started = []
        for number, log in enumerate(logs, 1):
            with log.open("w") as told:
                share = [*command, "--share", f"{number}/{count}"]
                started.append(subprocess.Popen(share, stdout=told, stderr=subprocess.STDOUT))
        statuses = []
        for number, (process, log) in enumerate(zip(started, logs, strict=True), 1):
            statuses.append(process.wait())
            print(
                f"share {number}/{count}, status {statuses[-1]}\n{log.read_text(errors='replace')}",
                flush=True,
            )
    return int(any(status not in NO_FAILURE for status in statuses))


NO_FAILURE = (0, 5)  # all passed; a share without tests

if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
