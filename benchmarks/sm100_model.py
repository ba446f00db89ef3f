"""What limits the Blackwell forward kernels, from their machine code. A model: nothing here was measured on hardware.

    python benchmarks/sm100_model.py OBJECT_OR_LIBRARY...

Of each forward kernel for sm_100 in the files, the main loop of the softmax is found and the instructions counted that
one key tile of two groups of 128 query rows costs. Each unit's share follows from published rates per multiprocessor
and clock; the largest is the limiter, and tensor work over it the predicted fraction of the tensor cores' peak. What is
not modelled: latencies, dependencies between roles, and clocks. CUTLASS's example 77 can be read in the same way.

cuobjdump is taken from PATH, from CUOBJDUMP, or from the wheel nvidia-cuda-cuobjdump, with nvdisasm beside it.
"""

import argparse
import heapq
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

ROWS = KEYS = 128
GROUPS = 2
# Of compute capability 10.0, per multiprocessor and clock: products of 16-bit elements, results of the other units,
# warp instructions, bytes of shared memory.
TENSOR, MUFU, FMA, ALU, ISSUE, SHARED = 4096, 16, 128, 64, 4, 128

INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.a-z]*)([^;]*);")
UNITS = (
    ("mufu", re.compile(r"MUFU")),
    ("fma", re.compile(r"(FFMA|FMUL|FADD)2?(\.|$)")),
    # Comparisons, selections, conversions, logic and integers.
    (
        "alu",
        re.compile(
            r"(FMNMX|FSEL|FSETP|F2FP|SEL|ISETP|IADD|LOP3|SHF|PRMT|VIADD|VIMNMX|IMNMX|LEA|PLOP3|I2F|F2I)"
        ),
    ),
)


@dataclass(frozen=True)
class Line:
    address: int
    opcode: str
    target: int | None


@dataclass(frozen=True)
class Loop:
    first: int  # indices of lines
    last: int

    def __len__(self) -> int:
        return self.last - self.first + 1


def functions(path: str) -> Iterator[tuple[str, list[Line]]]:
    tool = os.environ.get("CUOBJDUMP", "cuobjdump")
    text = subprocess.run([tool, "--dump-sass", path], check=True, capture_output=True, text=True).stdout
    for part in re.split(r"^\s*Function : ", text, flags=re.MULTILINE)[1:]:
        name, _, body = part.partition("\n")
        lines = []
        for line in body.splitlines():
            if match := INSTRUCTION.match(line):
                target = re.search(r"0x([0-9a-f]+)\s*$", match[3]) if match[2].startswith("BRA") else None
                lines.append(Line(int(match[1], 16), match[2], int(target[1], 16) if target else None))
        yield name.strip(), lines


def loops(lines: list[Line]) -> list[Loop]:
    index = {line.address: i for i, line in enumerate(lines)}
    found = (
        Loop(index[x.target], i)
        for i, x in enumerate(lines)
        if x.target is not None and x.target <= x.address
    )
    return sorted(found, key=len)


def shortest(lines: list[Line], loop: Loop, start: int, end: int) -> list[int] | None:
    """The path of fewest instructions: what a tile costs that needs no mask and no rescaling."""
    index = {line.address: i for i, line in enumerate(lines)}
    queue, seen = [(0, start, (start,))], set()
    while queue:
        cost, at, path = heapq.heappop(queue)
        if at == end:
            return list(path)
        if at in seen:
            continue
        seen.add(at)
        line = lines[at]
        following = []
        if line.target is not None:
            following.append(index[line.target])
        if not (
            line.opcode.startswith("BRA") and line.target is not None and line.opcode == "BRA.UNCONDITIONAL"
        ):
            following.append(at + 1)
        for to in following:
            if loop.first <= to <= loop.last and to not in seen:
                heapq.heappush(queue, (cost + 1, to, (*path, to)))
    return None


def count(lines: list[Line], marker: str, least: int) -> Counter | None:
    """Units used by one pass of the smallest loop with at least `least` instructions that begin with `marker`."""
    for loop in loops(lines):
        marked = [i for i in range(loop.first, loop.last + 1) if lines[i].opcode.startswith(marker)]
        if len(marked) < least:
            continue
        middle = marked[len(marked) // 2]
        before, after = shortest(lines, loop, loop.first, middle), shortest(lines, loop, middle, loop.last)
        if before is None or after is None:
            continue
        units: Counter = Counter()
        for i in [*before, *after[1:]]:
            units["issue"] += 1
            units["tensor"] += lines[i].opcode.startswith("UTCHMMA")
            units["local"] += lines[i].opcode.startswith(("LDL", "STL"))
            for unit, pattern in UNITS:
                if pattern.match(lines[i].opcode):
                    units[unit] += 1
                    break
        return units
    return None


def model(lines: list[Line], head_dim: int, head_dim_v: int) -> dict[str, float] | None:
    softmax = count(lines, "MUFU.EX2", 64)
    if softmax is None:
        return None
    warps = GROUPS * ROWS // 32
    products = GROUPS * ROWS * KEYS * (head_dim + head_dim_v)
    # Queries and keys of the score product, values of the other; keys and values arrive once for both groups.
    read = GROUPS * 2 * (ROWS * head_dim + KEYS * head_dim + KEYS * head_dim_v)
    written = 2 * KEYS * (head_dim + head_dim_v)
    return {
        "tensor": products / TENSOR,
        "mufu": warps * 32 * softmax["mufu"] / MUFU,
        "fma": warps * 32 * softmax["fma"] / FMA,
        "alu": warps * 32 * softmax["alu"] / ALU,
        "issue": warps * softmax["issue"] / ISSUE,
        "shared": (read + written) / SHARED,
        "local": softmax["local"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+")
    arguments = parser.parse_args()
    units = ("tensor", "mufu", "fma", "alu", "issue", "shared")
    print("| kernel | " + " | ".join(units) + " | limiter | of tensor peak | local memory in the loop |")
    print("|---" * (len(units) + 4) + "|")
    for path in arguments.files:
        for name, lines in functions(path):
            if ours := re.search(
                r"ForwardKernelI.*?(bfloat16_t|half_t)ELNS\w*?ForwardModeE(\d)ELi(\d+)ELi(\d+)", name
            ):
                mode = ("kDense", "kInterval", "kGeneral")[int(ours[2])]
                label, head_dim, head_dim_v = (
                    f"{ours[1]} {mode} {ours[3]}/{ours[4]}",
                    int(ours[3]),
                    int(ours[4]),
                )
            elif "Sm100FmhaFwdKernelTmaWarpspecialized" in name:
                label, head_dim, head_dim_v = "example 77, float16 128", 128, 128
            else:
                continue
            if (clocks := model(lines, head_dim, head_dim_v)) is None:
                print(f"| {label} |" + " |" * (len(units) + 3))
                continue
            limiter = max(units, key=lambda unit: clocks[unit])
            cells = " | ".join(f"{clocks[unit]:.0f}" for unit in units)
            share = clocks["tensor"] / clocks[limiter]
            print(f"| {label} | {cells} | {limiter} | {share:.0%} | {clocks['local']:.0f} |")


if __name__ == "__main__":
    main()
