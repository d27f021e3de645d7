"""A process that compiles: LLVM may abort and ptxas may never end, and neither may end the caller.

`python -m fuseplan.backends.triton.worker` answers requests on its standard input, each a pickled `Job`
behind its length, with a pickled packed artifact or error on its standard output.
"""

from __future__ import annotations

import os
import pickle
import struct
import sys
from dataclasses import dataclass
from typing import Any, BinaryIO

from fuseplan.errors import BuildError
from fuseplan.kernels.emit import Source
from fuseplan.kernels.target import Target

LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Job:
    """What is to be compiled.

    Attributes:
        source: the text and what it says of its arguments.
        types: of the arguments, from `signature.types_of`.
        target: what for.
        assembly: keep the PTX or amdgcn.
    """

    source: Source
    types: tuple[str, ...]
    target: Target
    assembly: bool = False


def send(stream: BinaryIO, value: Any) -> None:
    """Writes a value behind its length."""
    data = pickle.dumps(value)
    stream.write(LENGTH.pack(len(data)) + data)
    stream.flush()


def received(stream: BinaryIO) -> Any:
    """The next value; None at the end, or where the other side died."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    data = stream.read(*LENGTH.unpack(head))
    return pickle.loads(data) if len(data) == LENGTH.unpack(head)[0] else None


def answer(job: Job) -> bytes | BuildError:
    """The packed artifact, or why there is none."""
    from fuseplan.backends.triton.compiler import compile_source

    try:
        return compile_source(job.source, job.types, job.target, assembly=job.assembly).pack()
    except BuildError as error:
        return error


def main() -> None:
    """Answers until the input ends."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what compilers print must not come between the replies
    while (job := received(sys.stdin.buffer)) is not None:
        send(replies, answer(job))


if __name__ == "__main__":
    main()
