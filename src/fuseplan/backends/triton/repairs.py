"""Errors of Triton and of ptxas: each is found in PTX or cubin, and repaired in PTX.

Each repair names the case that showed the error. `compiler` refuses a kernel that no repair helps.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from fuseplan.backends.triton import sass

# What ptxas leaves in the place of matrix instructions that it drops, HGMMA.64x8x16.F16 RZ, gdesc[URZ], RZ:
# twelve of the 16 bytes, behind which the scheduling is.
DROPPED = bytes.fromhex("f079ff3f00000000ff00000c")
COPY = re.compile(r"mov\.\w+\s+(%\w+), ([-\w%.]+);")
SUMS = re.compile(r"wgmma\.mma_async\S*?\.f32\.[^{]*\{([^}]*)\}")
# An instruction that reads bits, and its operands: the result, and what it reads.
BITS = re.compile(r"((?:@!?%p\d+\s+)?(?<![\w.])(?!mov|selp|st|ld|shfl|wgmma)\w[\w.:]*\.[bsu]32)\s+([^;{]*);")
# A product whose first factor is in registers: {sums}, {first factor}, descriptor of the other.
FROM_REGISTERS = re.compile(r"wgmma\.mma_async[^{]*\{[^}]*\}, *\{")
WAIT = re.compile(r"(wgmma\.wait_group\.sync\.aligned) \d+")
BLOCK_END = re.compile(r"(@!?%\w+\s+)?bra\b|\$\w+:")
COPIED = re.compile(r"cp\.async\.wait_(group|all)\b")
TO_FP8 = re.compile(r"(cvt\.rn\.satfinite\.e\dm\dx2\.f32)\s+(%rs\d+), *(%r\d+), *(%r\d+);")
PAIR_SUM = re.compile(r"add\.s16x2\s+(%r\d+), *(%r\d+), *(%r\d+);")
# Descriptors of matrices in shared memory: their kind, and maybe a distance, added to where a matrix lies.
DESCRIPTOR = re.compile(r"(add\.s64|or\.b64)\s+(%rd\d+), (%rd\d+), (-?\d{10,});")
WORD = 2**32
FENCE = "fence.proxy.async.shared::cta;"


def known(ptx: str) -> str:
    """PTX with every repair that needs no look at the machine code."""
    return as_numbers(in_words(halved(unmerged(fenced(ptx)))))


def fenced(ptx: str) -> str:
    """PTX with a fence between the copies by `cp.async` and the products that read them.

    Products read shared memory through the asynchronous proxy, `cp.async` writes it through the generic one,
    and PTX asks for a fence on the way from one to the other (PTX ISA, proxies and wgmma.mma_async). Triton
    3.6 writes none. Later versions write it in front of the first product behind a wait for copies, and so
    does this. On an H100 the f32 convolutions of gpu_conv take 0.9 % longer with it (geometric mean) and the
    f32 products of gpu_matmul 1.7 %; with the fence directly behind the wait it was 5.5 % and 3.5 %.
    """
    if "wgmma.mma_async" not in ptx or not COPIED.search(ptx):
        return ptx
    lines: list[str] = []
    is_fenced = True  # nothing is copied yet
    for line in ptx.split("\n"):
        told = line.strip()
        if BLOCK_END.match(told) or COPIED.search(told):
            is_fenced = False
        elif told.startswith("fence.proxy.async"):
            is_fenced = True
        elif told.startswith("wgmma.fence") and not is_fenced:
            lines.append(f"\t{FENCE}")
            is_fenced = True
        lines.append(line)
    return "\n".join(lines)


def unmerged(ptx: str) -> str:
    """PTX in which a pair of fp8 numbers that is used more than once passes through 32 bits.

    ptxas 12.8 and 12.9 merge the conversion of a pair with the conversion of the pair that is packed below
    it. One that is packed twice they drop in one place, and half of the word is what a register happened to
    hold. `f8e4m3[1x16] -> elementwise('where(index(n) >= index(), x, 0.5)')` showed it on an H200; 13.0 is
    right.
    """
    times = Counter(re.findall(r"%rs\d+", ptx)) if TO_FP8.search(ptx) else Counter[str]()

    def apart(found: re.Match[str]) -> str:
        convert, pair, *numbers = found.groups()
        if times[pair] <= 2:  # where it is made, and one use
            return found[0]
        return (
            f"{{ .reg .b16 pair; .reg .b32 word; {convert} pair, {', '.join(numbers)};"
            f" cvt.u32.u16 word, pair; cvt.u16.u32 {pair}, word; }}"
        )

    return TO_FP8.sub(apart, ptx)


def halved(ptx: str) -> str:
    """PTX in which pairs of 16-bit integers are added one by one.

    Where one half of such a sum is used, ptxas 12.8 to 13.0 add 0 in the place of a constant. LLVM adds pairs
    where it knows that places fit into 16 bits: `f32[33x2x3, nwc] -> elementwise('where(index(n) >= index(),
    x, 0.5)')` in tiles of 1024 elements showed it on an H200.
    """
    return PAIR_SUM.sub(
        r"{ .reg .b16 a, b, c, d; mov.b32 {a, b}, \2; mov.b32 {c, d}, \3;"
        r" add.s16 a, a, c; add.s16 b, b, d; mov.b32 \1, {a, b}; }",
        ptx,
    )


def in_words(ptx: str) -> str:
    """PTX in which descriptors of several kinds of one place are added up in words of 32 bits.

    ptxas 12.8 adds to uniform registers that nothing was written to where two kinds follow from one place, as
    those of 64 and of 32 elements: `f16[2x6x16x96] -> attention(keys=48, key_heads=2)` gave other numbers on
    an H200, and read memory that was not there. 12.9 is right.
    """
    if "wgmma.mma_async" not in ptx:
        return ptx
    found = DESCRIPTOR.findall(ptx)
    kinds = {(place, int(number) % WORD**2 // WORD) for _, _, place, number in found}
    several = {place for place, count in Counter(place for place, _ in kinds).items() if count > 1}

    def apart(found: re.Match[str]) -> str:
        how, descriptor, place, number = found.groups()
        if how == "or.b64" or place not in several:
            return found[0]
        high, low = divmod(int(number) % WORD**2, WORD)
        return (
            f"{{ .reg .b32 low, high; mov.b64 {{low, high}}, {place}; add.cc.u32 low, low, {low};"
            f" addc.u32 high, high, {high}; mov.b64 {descriptor}, {{low, high}}; }}"
        )

    return DESCRIPTOR.sub(apart, ptx)


def overwrites_factors(ptx: str, cubin: bytes, package: Path) -> bool:
    """Whether code can overwrite registers that a product has not read yet.

    Only a product whose first factor is in registers can show it; reading such code takes 0.3 s.

    Raises:
        BuildError: the disassembler in Triton's package cannot read the code.
    """
    return bool(FROM_REGISTERS.search(ptx) and sass.overwritten(sass.disassembled(cubin, package)))


def settled(ptx: str) -> str:
    """PTX that, where a block of instructions ends, waits for products whose factors are in registers.

    A prologue's result in f16 or bf16 is a first factor in registers. Triton 3.6 and 3.7 split its product in
    parts and, at the end of a step, wait for the first part alone: the next step writes registers that the
    others may not have read (triton-lang/triton#9433). Of 19,208 overlapping launches of
    `bf16[4096x4096] -> gelu -> matmul(4096) -> bias` on an H100 34 were wrong. Later versions copy the
    registers, and ptxas before 13.3 removes the copies (triton-lang/triton#11781). So the last wait of a
    block waits for all; then no launch was wrong, and such kernels take 2 to 11 % longer.
    """
    lines = ptx.split("\n")
    last = None  # wait with no product behind it in its block
    for place, line in enumerate(lines):
        if "wgmma.mma_async" in line:
            last = None
        elif WAIT.search(line):
            last = place
        elif last is not None and BLOCK_END.match(line.strip()):
            lines[last] = WAIT.sub(r"\1 0", lines[last])
            last = None
    return "\n".join(lines)


def as_numbers(ptx: str) -> str:
    """PTX in which operations on the bits of a product's sum read it behind an addition of -0.

    ptxas 12.8 and 12.9 do not count them as uses of the sum. Where they are |sum|, -sum and -|sum| alone,
    products are dropped, and sums taken for 0: of 364 kernels such as `conv2d(kernel=(1, 3)) -> abs -> bias`
    71 were wrong. `f8e5m2[2x96x512] -> conv1d(288, kernel=2, stride=2, groups=96)` lost the signs of its
    results. A NaN may get another payload.
    """
    if "wgmma.mma_async" not in ptx:
        return ptx
    lines = ptx.split("\n")
    sums = _sums([line.partition("//")[0].strip() for line in lines])

    def behind(found: re.Match[str]) -> str:
        told, operands = found.groups()
        result, *read = (each.strip() for each in operands.split(","))
        wholes = {name: f"whole{place}" for place, name in enumerate(dict.fromkeys(read)) if name in sums}
        if not wholes:
            return found[0]
        added = "".join(f" add.rn.f32 {whole}, {name}, 0f80000000;" for name, whole in wholes.items())
        others = ", ".join([result, *(wholes.get(name, name) for name in read)])
        return f"{{ .reg .b32 {', '.join(wholes.values())};{added} {told} {others}; }}"

    return "\n".join(BITS.sub(behind, line) for line in lines)


def lacks_products(cubin: bytes) -> bool:
    """Whether ptxas dropped matrix instructions of sm_90, and took their sums for 0."""
    return DROPPED in cubin


def uses_products(ptx: str) -> bool:
    """Whether anything but copies and further products reads the sums of matrix instructions of sm_90.

    Nothing does where the sum does not matter, as in `matmul -> x**0`: dropping the products is right there.
    """
    lines = [line.partition("//")[0].strip() for line in ptx.splitlines()]
    sums = _sums(lines)
    others = (line for line in lines if not (line.startswith("wgmma.mma_async") or COPY.fullmatch(line)))
    return any(name in sums for line in others for name in re.findall(r"%\w+", line))


def _sums(lines: Iterable[str]) -> set[str]:
    """The registers that hold sums of matrix instructions in f32, and copies of them."""
    sums = {name.strip() for line in lines for each in SUMS.findall(line) for name in each.split(",")}
    copies = [copy.groups() for line in lines if (copy := COPY.fullmatch(line))]
    while copied := {to for to, of in copies if of in sums} - sums:
        sums |= copied
    return sums
