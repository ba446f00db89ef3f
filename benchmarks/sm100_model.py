"""What limits the Blackwell kernels, from their machine code. A model: nothing here was measured on hardware.

    python benchmarks/sm100_model.py OBJECT_OR_LIBRARY...

Of each main kernel for sm_100 in the files, the main loop of the warps with the exponentials is found, and the
instructions counted that one step costs: in the forward a tile of 128 keys and two groups of 128 query rows, in the
backward 128 keys and 128 queries. Each unit's share follows from published rates per multiprocessor and clock; the
largest is the limiter, and tensor work over it the predicted fraction of the tensor cores' peak. Shared memory's share
is what products read and loads write, what the backward's gradients pass through it, and one clock for each load of
row statistics; additions to device memory are counted with it, as they take the same way. What is not modelled:
latencies, dependencies between roles, and clocks. CUTLASS's example 77 can be read in the same way.

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
    # Conversions of single values are as slow.
    ("mufu", re.compile(r"MUFU|F2F\.")),
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
        # Some of them may lie on ways that are seldom taken.
        path: list[int] = []
        for middle in (marked[len(marked) * i // 4] for i in (1, 2, 3)):
            before = shortest(lines, loop, loop.first, middle)
            after = shortest(lines, loop, middle, loop.last)
            if before and after and (not path or len(before) + len(after) - 1 < len(path)):
                path = [*before, *after[1:]]
        # Waits that are spun behind the end of the code look like loops around it.
        if sum(lines[i].opcode.startswith(marker) for i in path) < least:
            continue
        units: Counter = Counter()
        for i in path:
            units["issue"] += 1
            units["tensor"] += lines[i].opcode.startswith("UTCHMMA")
            units["local"] += lines[i].opcode.startswith(("LDL", "STL"))
            units["shared loads"] += lines[i].opcode.startswith("LDS")
            units["exponentials"] += lines[i].opcode.startswith("MUFU.EX2")
            for unit, pattern in UNITS:
                if pattern.match(lines[i].opcode):
                    units[unit] += 1
                    break
        return units
    return None


@dataclass(frozen=True)
class Kernel:
    label: str
    is_backward: bool
    head_dim: int
    head_dim_v: int
    is_example: bool = False

    @staticmethod
    def of(function: str) -> "Kernel | None":
        """The main kernel of that name in the object file."""
        if ours := re.search(
            r"sm100\w*?(Forward|Backward)KernelI.*?(bfloat16_t|half_t)ELNS\w*?ForwardModeE(\d)ELi(\d+)ELi(\d+)",
            function,
        ):
            mode = ("kDense", "kInterval", "kGeneral")[int(ours[3])]
            label = f"{ours[1].lower()} {ours[2].removesuffix('_t')} {mode} {ours[4]}/{ours[5]}"
            return Kernel(label, ours[1] == "Backward", int(ours[4]), int(ours[5]))
        if "Sm100FmhaFwdKernelTmaWarpspecialized" in function:
            return Kernel("example 77, forward, float16 128", False, 128, 128, True)
        if "Sm100FmhaBwdMlaKernelTmaWarpSpecialized" in function:
            return Kernel("example 77, backward, float16 192/128", True, 192, 128, True)
        if "Sm100FmhaBwdKernelTmaWarpSpecialized" in function:
            return Kernel("example 77, backward, float16 128", True, 128, 128, True)
        return None

    def products(self) -> int:
        if self.is_backward:  # S, dP, dv, dk, dq
            return ROWS * KEYS * (3 * self.head_dim + 2 * self.head_dim_v)
        return GROUPS * ROWS * KEYS * (self.head_dim + self.head_dim_v)

    def shared_bytes(self) -> int:
        h, hv = self.head_dim, self.head_dim_v
        if not self.is_backward:
            # Queries and keys of the score product, values of the other; keys and values arrive once for both groups.
            return GROUPS * 2 * (ROWS * h + KEYS * h + KEYS * hv) + 2 * KEYS * (h + hv)
        # Both operands of S, dP and dq, the second of dv and dk; queries and output gradients arrive, dS is stored.
        pairs = 2 * ROWS * KEYS
        read = 2 * (ROWS + KEYS) * (h + hv) + pairs + 2 * KEYS * h + 2 * ROWS * (h + hv)
        written = 2 * ROWS * (h + hv) + pairs
        dq = 4 * ROWS * h  # to device memory
        if self.is_example:  # dS is dk's operand, too; dq is staged; with head dim 192 P is stored and read
            read += pairs
            dq *= 2
            if h > 128:
                read += pairs
                written += pairs
        return read + written + dq


def model(lines: list[Line], kernel: Kernel) -> dict[str, float] | None:
    loop = count(lines, "MUFU.EX2", 64)
    if loop is None:
        return None
    warps = 8  # that share a step's exponentials, in both passes and in example 77
    if kernel.is_backward:  # A pass of the loop may be part of a step.
        passes = ROWS * KEYS / (32 * warps * loop["exponentials"])
        loop = {unit: passes * number for unit, number in loop.items()}
    issue = warps * loop["issue"]
    if kernel.is_backward and (adds := count(lines, "REDG", 16)) is not None:
        issue += 4 * adds["issue"]
    return {
        "tensor": kernel.products() / TENSOR,
        "mufu": warps * 32 * loop["mufu"] / MUFU,
        "fma": warps * 32 * loop["fma"] / FMA,
        "alu": warps * 32 * loop["alu"] / ALU,
        "issue": issue / ISSUE,
        "shared": kernel.shared_bytes() / SHARED + kernel.is_backward * warps * loop["shared loads"],
        "local": loop["local"],
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
            if (kernel := Kernel.of(name)) is None:
                continue
            if (clocks := model(lines, kernel)) is None:
                # A short kernel around the main one, as convert is.
                continue
            limiter = max(units, key=lambda unit: clocks[unit])
            cells = " | ".join(f"{clocks[unit]:.0f}" for unit in units)
            share = clocks["tensor"] / clocks[limiter]
            print(f"| {kernel.label} | {cells} | {limiter} | {share:.0%} | {clocks['local']:.0f} |")


if __name__ == "__main__":
    main()
