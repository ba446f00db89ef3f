"""Reads the machine code of the CUDA kernels: what the compiler made of them, not what it was asked for.

    python cc/tests/check_machine_code.py build/cuda/libjax_fmha_cuda.so
    python cc/tests/check_machine_code.py build/cuda/libjax_fmha_cuda.so --instances 'kBF16, .*, 128, 128'

For every row of each instances.def (that matches `--instances`) the main kernel must multiply on the tensor cores of
its architecture (HGMMA on Hopper, UTCHMMA on Blackwell), move registers between its warpgroups (USETMAXREG: a
compiler that gives up on it only warns), and keep local memory (LDL, STL: spilled registers) out of the innermost
loops of every role: on Hopper those that multiply, on Blackwell also those that read or write tensor memory, as there
one warp multiplies and others compute. cuobjdump is taken from PATH or from the wheel nvidia-cuda-cuobjdump, with
nvdisasm beside it. Exit code 1 if an instance fails or is missing.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

CC = Path(__file__).resolve().parents[1]
MULTIPLY = {"sm90": "HGMMA", "sm100": "UTCHMMA"}
# What tells the loop of a role.
ROLES = {"sm90": ("HGMMA",), "sm100": ("UTCHMMA", "LDTM", "STTM")}

# (architecture, pass, dtype, mode, head_dim, head_dim_v), the latter four as in instances.def.
Instance = tuple[str, str, str, str, int, int]

# Local loads and stores that a role's loop may have for now: {(architecture, pass, mode): (how many, why)}. No more
# than these may come in.
ALLOWED = {
    ("sm90", "forward", "kInterval"): (
        16,
        "three consumer warpgroups leave 160 registers each; head_dim 256 takes 128 for out",
    ),
    ("sm90", "forward", "kGeneral"): (
        32,
        "addresses of mask, bias and positions, one set for each element of a thread",
    ),
    ("sm90", "backward", "kInterval"): (
        16,
        "dk and dv of head_dim 192 with head_dim_v 128 take 160 of 240 registers",
    ),
    ("sm90", "backward", "kGeneral"): (64, "addresses of mask, bias and its gradient"),
}

NAME = re.compile(
    r"(sm90|sm100)\w*?(Forward|Backward)MainI.*?(bfloat16_t|half_t)ELNS\w*?_11ForwardModeE(\d)ELi(\d+)ELi(\d+)"
)
MODES = ("kDense", "kInterval", "kGeneral")
DTYPES = {"bfloat16_t": "kBF16", "half_t": "kF16"}
INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z0-9_]+)([^;]*);")
BRANCH = re.compile(r"^[.\w]*\s+(.*?)0x([0-9a-f]+)\s*$")


@dataclasses.dataclass(frozen=True)
class Line:
    address: int
    opcode: str
    target: int | None  # of a branch
    falls_through: bool  # the next instruction may follow


@dataclasses.dataclass(frozen=True)
class Code:
    """What is counted in a main kernel."""

    instructions: int
    multiplies: int
    setmaxreg: int
    local: int
    main_loops: int
    local_in_loops: int

    @classmethod
    def of(cls, lines: list[Line], architecture: str) -> Code:
        multiply = MULTIPLY[architecture]
        roles = [loop for marker in ROLES[architecture] for loop in innermost(lines, marker)]
        return cls(
            instructions=len(lines),
            multiplies=count(lines, multiply),
            setmaxreg=count(lines, "USETMAXREG"),
            local=count(lines, "LDL", "STL"),
            main_loops=len(innermost(lines, multiply)),
            local_in_loops=max((count(loop, "LDL", "STL") for loop in roles), default=0),
        )


def count(lines: list[Line], *opcodes: str) -> int:
    return sum(line.opcode in opcodes for line in lines)


def innermost(lines: list[Line], opcode: str) -> list[list[Line]]:
    """Bodies of the loops that have this instruction and hold no smaller loop that does.

    Blocks that are seldom run lie far from their loop, so that a span of addresses says nothing: a loop is what the
    flow graph says, a head and all from which the head is reached again without leaving its dominance.
    """
    blocks, successors = flow_graph(lines)
    predecessors: list[set[int]] = [set() for _ in blocks]
    for block, following in enumerate(successors):
        for other in following:
            predecessors[other].add(block)
    dominators = dominators_of(predecessors)
    loops: dict[int, set[int]] = {}
    for block, following in enumerate(successors):
        for head in following:
            if dominators[block] >> head & 1:
                body = loops.setdefault(head, {head})
                todo = [block]
                while todo:
                    if (at := todo.pop()) not in body:
                        body.add(at)
                        todo.extend(predecessors[at])
    marked = [body for body in loops.values() if any(count(blocks[b], opcode) for b in body)]
    smallest = [body for body in marked if not any(other < body for other in marked)]
    return [[line for b in sorted(body) for line in blocks[b]] for body in smallest]


def flow_graph(lines: list[Line]) -> tuple[list[list[Line]], list[set[int]]]:
    """(basic blocks, indices of the blocks that may follow each)."""
    targets = {line.target for line in lines if line.target is not None}
    blocks: list[list[Line]] = []
    starts_block = True
    for line in lines:
        if starts_block or line.address in targets:
            blocks.append([])
        blocks[-1].append(line)
        starts_block = line.target is not None or not line.falls_through
    at = {block[0].address: i for i, block in enumerate(blocks)}
    successors = []
    for i, block in enumerate(blocks):
        last = block[-1]
        following = {at[last.target]} if last.target in at else set()
        if last.falls_through and i + 1 < len(blocks):
            following.add(i + 1)
        successors.append(following)
    return blocks, successors


def dominators_of(predecessors: list[set[int]]) -> list[int]:
    """For each block a bit set of the blocks that every way to it passes. Block 0 is the entry."""
    everything = (1 << len(predecessors)) - 1
    dominators = [1, *([everything] * (len(predecessors) - 1))]
    changed = True
    while changed:
        changed = False
        for block in range(1, len(predecessors)):
            common = everything
            for before in predecessors[block]:
                common &= dominators[before]
            common |= 1 << block
            changed |= common != dominators[block]
            dominators[block] = common
    return dominators


def disassemble(path: Path, cuobjdump: str) -> Iterator[tuple[str, list[Line]]]:
    """(mangled name, instructions) of each function in an object file or library."""
    # cuobjdump looks for nvdisasm on PATH.
    env = os.environ | {"PATH": f"{Path(cuobjdump).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    done = subprocess.run([cuobjdump, "-sass", str(path)], env=env, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{path}: cuobjdump: {done.stderr.strip()}")
    name, lines = "", []
    for text in done.stdout.splitlines():
        if "Function :" in text:
            if name:
                yield name, lines
            name, lines = text.split(":", 1)[1].strip(), []
        elif match := INSTRUCTION.match(text):
            address, predicate, opcode, rest = match.groups()
            branch = BRANCH.match(rest) if opcode == "BRA" else None
            ends = opcode in ("EXIT", "RET", "BRX", "BRA") and predicate is None
            # A branch may have its condition among its operands.
            falls_through = not ends or (branch is not None and branch[1].strip() != "")
            target = int(branch[2], 16) if branch else None
            lines.append(Line(int(address, 16), opcode, target, falls_through))
    if name:
        yield name, lines


def instance_of(name: str) -> Instance | None:
    match = NAME.search(name)
    if match is None:
        return None
    architecture, which, dtype, mode, head_dim, head_dim_v = match.groups()
    return architecture, which.lower(), DTYPES[dtype], MODES[int(mode)], int(head_dim), int(head_dim_v)


def expected(pattern: str) -> set[Instance]:
    rows: set[Instance] = set()
    for path in CC.glob("sm*/*/instances.def"):
        for row in path.read_text().splitlines():
            match = re.match(r"[A-Z_]+\((\w+), (\w+), (\d+), (\d+)\)", row)
            if match and re.search(pattern, row):
                dtype, mode, head_dim, head_dim_v = match.groups()
                rows.add((path.parts[-3], path.parts[-2], dtype, mode, int(head_dim), int(head_dim_v)))
    return rows


def faults(instance: Instance, code: Code) -> list[str]:
    architecture, which, _, mode, _, _ = instance
    found = []
    if code.multiplies == 0:
        found.append(f"no {MULTIPLY[architecture]}")
    if code.setmaxreg == 0:
        found.append("no USETMAXREG: the compiler ignored setmaxnreg")
    if code.main_loops == 0:
        found.append("no loop that multiplies")
    allowed, _ = ALLOWED.get((architecture, which, mode), (0, ""))
    if code.local_in_loops > allowed:
        found.append(f"{code.local_in_loops} local loads and stores in a loop of a role, allowed {allowed}")
    return found


def find_cuobjdump() -> str:
    found = shutil.which("cuobjdump")
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations if spec and spec.submodule_search_locations else ():
        found = found or next(map(str, Path(folder).glob("*/bin/cuobjdump")), None)
    if found is None:
        raise SystemExit("needs cuobjdump: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="library or object files")
    parser.add_argument("--instances", default="", help="regular expression: rows that must be there (all)")
    args = parser.parse_args()
    cuobjdump = find_cuobjdump()
    seen: dict[Instance, Code] = {}
    for path in args.files:
        for name, lines in disassemble(path, cuobjdump):
            if instance := instance_of(name):
                seen[instance] = Code.of(lines, instance[0])
    print(f"{'instance':46} {'code':>6} {'MMA':>6} {'loops':>6} {'local':>6} {'in loops':>9}")
    bad = 0
    for instance, code in sorted(seen.items()):
        label = "{} {} {} {} {}/{}".format(*instance)
        print(
            f"{label:46} {code.instructions:6} {code.multiplies:6} {code.main_loops:6} {code.local:6} "
            f"{code.local_in_loops:9}"
        )
        for fault in faults(instance, code):
            bad += 1
            print(f"  FAULT {fault}")
    missing = expected(args.instances) - seen.keys()
    for instance in sorted(missing):
        print("  MISSING {} {} {} {} {}/{}".format(*instance))
    if not seen:
        print("no main kernel found")
    for instance_kind, (number, reason) in ALLOWED.items():
        print(f"allowed: {number} local loads and stores in a loop of {' '.join(instance_kind)}: {reason}")
    return int(bool(bad or missing or not seen))


if __name__ == "__main__":
    sys.exit(main())
