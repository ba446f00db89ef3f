"""Rewrites PTX for sm_100a so that it runs on sm_90a: what Hopper lacks becomes code around emulator.cu.

Only instructions that Hopper does not have change their meaning. Waits, arrivals and loads are kept and get hooks:
a hang is reported, warps can be delayed, and a fault can be planted at any instruction while the program runs. A
tcgen05 instruction that is not known here is an error; whatever else Hopper lacks, ptxas refuses.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

# emulator.h asserts these offsets.
NUM_REPORTS, FAULT, FAULT_SITE, DELAYED_WARPS, FAULT_VALUE, DELAY = 16, 20, 24, 28, 32, 40
REPORTS, TENSOR_MEMORY = 8, 4096
LANES, COLUMNS = 128, 512
UNWRITTEN, PENDING = "0x7fc0dead", "0x7fc0beef"
OUTSIDE, NOT_ALLOCATED, WRONG_LANES, READ_UNWRITTEN, READ_PENDING = 4, 5, 6, 7, 8  # Code
DROP, TWICE, HALVE, ADD, PARITY = 1, 3, 4, 5, 11  # Fault
A_IN_TENSOR_MEMORY, TWO_CTAS, MULTICAST, ACCUMULATES = 16, 32, 64, 256
KINDS = {"f16": 0, "tf32": 1, "f8f6f4": 2}

TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|/\*.*?\*/)
      | (?P<loc>\.loc\b[^\n]*)
      | (?P<brace>[{}])
      | (?P<label>[$%\w]+:(?!:))
      | (?P<statement>[^;]*;)""",
    re.VERBOSE | re.DOTALL,
)
INSTRUCTION = re.compile(
    r"(?:@(?P<negated>!?)(?P<guard>[%$\w]+)\s+)?(?P<op>[A-Za-z][\w.:]*)\s*(?P<operands>.*);", re.DOTALL
)
FUNCTION = re.compile(r"^(?:\.visible |\.weak |\.extern )*\.(entry|func)\b", re.MULTILINE)
LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)(?:.*inlined_at\s+(\d+)\s+(\d+)\s+(\d+))?")
FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.MULTILINE)

# Where a thread's first word lies in the matrix, and register i relative to it: (column, lane), as in the
# register layouts of CuTe's Copy_Traits for these instructions.
SHAPES: dict[str, tuple[int, Callable[[int], tuple[int, int]]]] = {
    "32x32b": (1, lambda i: (i, 0)),
    "16x64b": (1, lambda i: (2 * i, 0)),
    "16x128b": (2, lambda i: (i // 2 * 4, 8 * (i & 1))),
    "16x256b": (4, lambda i: (i // 4 * 8 + (i & 1), 8 * (i >> 1 & 1))),
    "16x32bx2": (1, lambda i: (i, 0)),
}
WIDTHS = {"32x32b": 1, "16x64b": 2, "16x128b": 4, "16x256b": 8, "16x32bx2": 1}
FIRST_WORD = {  # %sc: column, %sl: lane, from the lane number in %sn
    "32x32b": "mov.u32 %sc, 0;\nmov.u32 %sl, %sn;",
    "16x64b": "bfe.u32 %sc, %sn, 1, 1;\nand.b32 %sl, %sn, 1;\nshl.b32 %sl, %sl, 3;\nshr.u32 %st, %sn, 2;\n"
    "add.u32 %sl, %sl, %st;",
    "16x128b": "and.b32 %sc, %sn, 3;\nshr.u32 %sl, %sn, 2;",
    "16x256b": "and.b32 %sc, %sn, 3;\nshl.b32 %sc, %sc, 1;\nshr.u32 %sl, %sn, 2;",
    "16x32bx2": "shr.u32 %sc, %sn, 4;\nmul.lo.u32 %sc, %sc, SPLIT;\nand.b32 %sl, %sn, 15;",
}


class Unknown(Exception):
    """An instruction that the emulator does not know."""


@dataclass(frozen=True)
class Site:
    """An instruction that the emulator knows by number."""

    number: int
    kernel: str
    op: str
    places: tuple[str, ...]  # file:line, innermost first

    @property
    def place(self) -> str:
        """Where a kernel asks for it, behind the wrappers of CuTe and CUTLASS."""
        own = [p for p in self.places if "/include/cute/" not in p and "/include/cutlass/" not in p]
        return " < ".join(Path(p).name for p in (own or list(self.places) or ["?"])[:3])

    def __str__(self) -> str:
        return "\t".join([str(self.number), self.kernel, self.op, self.place])


@dataclass
class Access:
    """A tcgen05.ld or tcgen05.st on its way: issued, not yet waited for."""

    site: int
    address: str  # register with the thread's first word
    registers: list[str]
    offsets: list[int]
    registers_and_copies: set[str] = field(default_factory=set)
    dropped_at: int = 0  # the wait that completed it, unless a fault drops that wait
    moves: list[str] = field(default_factory=list)  # copies of its registers, which happen when it is done


@dataclass
class Rewriting:
    """One module: its text and what was learned about it."""

    text: str
    sites: list[Site]
    counts: Counter = field(default_factory=Counter)
    unwaited: list[int] = field(default_factory=list)  # stores that no wait follows


def split_operands(text: str) -> list[str]:
    parts, depth, current = [], 0, ""
    for c in text:
        depth += (c in "[{(") - (c in "]})")
        if c == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += c
    return [*parts, current.strip()] if current.strip() else parts


def call(function: str, *arguments: tuple[str, str], result: str = "") -> str:
    lines = ["{"]
    for i, (kind, value) in enumerate(arguments):
        lines += [f".param .{kind} sm100_p{i};", f"st.param.{kind} [sm100_p{i}], {value};"]
    parameters = ", ".join(f"sm100_p{i}" for i in range(len(arguments)))
    if result:
        lines += [".param .b64 sm100_r;", f"call (sm100_r), {function}, ({parameters});"]
        lines += [f"ld.param.b64 {result}, [sm100_r];"]
    else:
        lines += [f"call {function}, ({parameters});"]
    return "\n".join([*lines, "}"])


class Rewriter:
    def __init__(self, text: str, first_site: int = 1, keeps_unwaited_stores_pending: bool = True):
        self.files = {int(n): path for n, path in FILE.findall(text)}
        self.input = text
        self.result = Rewriting("", [])
        self.strict = keeps_unwaited_stores_pending
        self.first_site = first_site
        self.kernel = ""
        self.label = 0
        self.inlined: dict[tuple[int, ...], tuple[int, ...] | None] = {}
        self.place: tuple[int, ...] | None = None

    # Sites and pieces of code
    # ---------------------------------------------------------------------------------------------------------------

    def locate(self, line: str) -> None:
        numbers = [int(x) for x in LOC.match(line).groups("0")]
        here, outer = tuple(numbers[:3]), tuple(numbers[3:])
        self.inlined[here] = outer if any(outer) else None
        self.place = here

    def new_site(self, op: str) -> int:
        places, at = [], self.place
        while at is not None and len(places) < 12:
            places.append(f"{self.files.get(at[0], '?')}:{at[1]}")
            at = self.inlined.get(at)
        site = Site(self.first_site + len(self.result.sites), self.kernel, op, tuple(places))
        self.result.sites.append(site)
        self.result.counts[op] += 1
        return site.number

    def new_label(self) -> str:
        self.label += 1
        return f"SM100_{self.label}"

    def guarded(self, negated: str | None, guard: str | None, body: str) -> str:
        """Runs the body only where the instruction's predicate holds."""
        if guard is None:
            return body
        label = self.new_label()
        return f"{{\n@{'' if negated else '!'}{guard} bra {label};\n{body}\n{label}:\n}}"

    @staticmethod
    def delay() -> str:
        """Sleeps if this warp is one of those to delay. No branch: warps must not diverge here."""
        # An instruction sleeps no longer than a millisecond.
        sleep = "\n".join(
            ["min.u32 %sd1, %sd2, 1000000;", "sub.u32 %sd2, %sd2, %sd1;", "nanosleep.u32 %sd1;"] * 4
        )
        return f"""{{
.reg .b32 %sd<4>;
ld.global.u32 %sd0, [sm100_control+{DELAYED_WARPS}];
mov.u32 %sd1, %tid.x;
shr.u32 %sd1, %sd1, 5;
shr.u32 %sd0, %sd0, %sd1;
and.b32 %sd0, %sd0, 1;
neg.s32 %sd0, %sd0;
mov.u32 %sd2, %clock;
mul.lo.u32 %sd2, %sd2, 0x9e3779b1;
shr.u32 %sd2, %sd2, 10;
ld.global.u32 %sd3, [sm100_control+{DELAY}];
and.b32 %sd2, %sd2, %sd3;
and.b32 %sd2, %sd2, %sd0;
{sleep}
}}"""

    @staticmethod
    def fault(site: int) -> str:
        """%sk: the fault planted at this site, 0 for none. For use inside a scope."""
        return f"""
.reg .b32 %sk, %skn;
.reg .pred %skp, %skq;
ld.global.u32 %sk, [sm100_control+{FAULT}];
ld.global.u32 %skn, [sm100_control+{FAULT_SITE}];
setp.eq.u32 %skp, %skn, {site};
selp.b32 %sk, %sk, 0, %skp;"""

    def report(self, condition: str, code: int, site: int, a: str = "0", b: str = "0") -> str:
        """Writes a report where the predicate holds, without a call, which would cost every path registers."""
        label = self.new_label()
        return f"""{{
@!{condition} bra {label};
.reg .b32 %si, %sj, %sx;
.reg .b64 %sp, %sq;
.reg .pred %sr;
atom.global.add.u32 %si, [sm100_control+{NUM_REPORTS}], 1;
setp.ge.u32 %sr, %si, 256;
@%sr bra {label};
ld.global.u64 %sp, [sm100_control+{REPORTS}];
mul.wide.u32 %sq, %si, 32;
add.u64 %sp, %sp, %sq;
mov.u32 %si, %ctaid.z;
mov.u32 %sj, %nctaid.y;
mov.u32 %sx, %ctaid.y;
mad.lo.u32 %si, %si, %sj, %sx;
mov.u32 %sj, %nctaid.x;
mov.u32 %sx, %ctaid.x;
mad.lo.u32 %si, %si, %sj, %sx;
st.volatile.u32 [%sp+8], %si;
mov.u32 %si, %tid.x;
st.volatile.u32 [%sp+12], %si;
st.volatile.u32 [%sp+4], {site};
st.volatile.u32 [%sp+16], {a};
st.volatile.u32 [%sp+20], {b};
fence.acq_rel.sys;
st.volatile.u32 [%sp], {code};
fence.acq_rel.sys;
{label}:
}}"""

    # Instructions
    # ---------------------------------------------------------------------------------------------------------------

    def function(self, header: str, body: str, is_entry: bool) -> str:
        self.kernel = re.search(
            r"([$\w]+)\s*\(", header.split(")", 1)[-1] if header.count(")") > 1 else header
        )[1]
        used_before = len(self.result.sites)
        out = self.body(body, is_entry)
        if len(self.result.sites) == used_before:
            # Nothing here that the emulator is to know about, which would not know this kernel either.
            return header + "{" + "".join(self.body(body, is_entry, has_sites=False)) + "}"
        registers = "\n.reg .b64 %sm100_cta;\n"
        if self.addresses:
            registers += f".reg .b64 %sm100_a<{self.addresses}>;\n"
        if self.copies:
            registers += f".reg .b32 %sm100_c<{self.copies}>;\n"
        return header + "{" + registers + call("sm100_enter", result="%sm100_cta") + "".join(out) + "}"

    def body(self, text: str, is_entry: bool, has_sites: bool = True) -> list[str]:
        self.addresses = self.copies = 0
        self.has_sites = has_sites
        self.loads: list[Access] = []
        self.stores: list[Access] = []
        out: list[str] = []
        tokens = list(TOKEN.finditer(text))
        if tokens and tokens[-1].end() != len(text):
            raise Unknown(f"{self.kernel}: {text[tokens[-1].end() :][:80]!r}")
        for at, token in enumerate(tokens):
            kind, part = token.lastgroup, token.group()
            if kind == "loc":
                self.locate(part)
                out.append(part)
            elif kind == "label":
                out += [self.finish_block(), part]
            elif kind == "statement":
                out.append(self.statement(part, is_entry, tokens, at))
            else:
                out.append(part)
        return out

    def statement(self, text: str, is_entry: bool, tokens: list, at: int) -> str:
        match = INSTRUCTION.fullmatch(text)
        if match is None:  # .reg and its like
            return text
        negated, guard, op, operands = match["negated"], match["guard"], match["op"], match["operands"]
        before = ""
        # A load is done when it is waited for, or else when a register is used. Copies in front of the wait do not
        # count as use; behind it they do, since what is done once more if the wait was dropped is else skipped.
        used = set(re.findall(r"%[\w$]+", text))
        waits = op.startswith("tcgen05.wait::ld")
        if (last := self.last_used(used)) >= 0 and not waits:
            access = self.loads[last]
            if op.startswith("mov.") and guard is None and not access.dropped_at:
                access.moves.append(text)
                access.registers_and_copies.update(re.findall(r"%[\w$]+", text))
                return ""
            before = self.complete_loads(last + 1)

        if op.startswith("tcgen05."):
            return before + self.tcgen05(negated, guard, op, operands, tokens, at)
        if op.endswith(".f32x2"):
            self.result.counts[op] += 1
            return before + self.guarded(negated, guard, self.packed(op, split_operands(operands)))
        if re.fullmatch(r"(min|max)(\.\w+)*\.f32", op) and len(arguments := split_operands(operands)) == 4:
            self.result.counts[op + " of three"] += 1
            d, a, b, c = arguments
            body = f"{{\n.reg .f32 %smx;\n{op} %smx, {a}, {b};\n{op} {d}, %smx, {c};\n}}"
            return before + self.guarded(negated, guard, body)
        if not self.has_sites:
            return before + text
        if op.startswith("setmaxnreg"):
            # Registers are what ptxas gives everybody; calls rule out sharing them out anew.
            self.result.counts[op] += 1
            return before + f"// {op}"
        if op.startswith("elect.sync"):
            self.result.counts[op] += 1
            return before + self.delay() + "\n" + call("sm100_serve", ("b64", "%sm100_cta")) + "\n" + text
        if op.startswith(("barrier.cluster", "barrier.sync", "bar.sync", "griddepcontrol.wait")):
            # The warp may block here, and others may wait for its work.
            return before + call("sm100_leave", ("b64", "%sm100_cta")) + "\n" + text
        if op.startswith(("mbarrier.try_wait", "mbarrier.test_wait")):
            return before + self.wait(text, negated, guard, op, operands)
        if op.startswith(("mbarrier.arrive", "mbarrier.expect_tx")):
            return before + self.arrive(negated, guard, op, operands)
        if op.startswith("cp.async.bulk.tensor") and ".shared::cluster.global" in op:
            return before + self.tensor_load(negated, guard, op, operands)
        if "cta_group" in op:
            raise Unknown(f"{op} {operands}")
        if op in ("bra", "bra.uni", "brx.idx", "brx.idx.uni", "ret", "exit") and not op.startswith("call"):
            ending = self.finish_block()
            if op in ("ret", "exit") and is_entry:
                leave = self.guarded(negated, guard, call("sm100_leave", ("b64", "%sm100_cta")))
                return before + ending + leave + text
            return before + ending + text
        return before + text

    @staticmethod
    def packed(op: str, arguments: list[str]) -> str:
        """f32x2 arithmetic as two operations. A rounding mode is spelled out, or a product might be contracted."""
        name, modifiers = re.fullmatch(r"(add|sub|mul|fma)((?:\.\w+)*)\.f32x2", op).groups()
        if not re.search(r"\.r[nzmp]\b", modifiers):
            modifiers = ".rn" + modifiers
        d, sources = arguments[0], arguments[1:]
        lines = ["{", ".reg .f32 " + ", ".join(f"%sv{i}" for i in range(2 * len(sources))) + ";"]
        lines += [f"mov.b64 {{%sv{2 * i}, %sv{2 * i + 1}}}, {a};" for i, a in enumerate(sources)]
        for half in (0, 1):
            inputs = ", ".join(f"%sv{2 * i + half}" for i in range(len(sources)))
            lines.append(f"{name}{modifiers}.f32 %sv{half}, {inputs};")
        return "\n".join([*lines, f"mov.b64 {d}, {{%sv0, %sv1}};", "}"])

    def wait(self, text: str, negated: str | None, guard: str | None, op: str, operands: str) -> str:
        site = self.new_site(op)
        done, barrier, parity, *rest = split_operands(operands)
        if ".parity" not in op:
            raise Unknown(f"{op}: only waits for a phase's parity are known")
        label = self.new_label()
        address = barrier.strip("[] ")
        body = f"""{{{self.fault(site)}
.reg .b32 %swp, %swa;
mov.b32 %swp, {parity};
mov.b32 %swa, {address.replace("+", ";add.u32 %swa, %swa, ")};
setp.eq.u32 %skq, %sk, {PARITY};
selp.b32 %skn, 1, 0, %skq;
xor.b32 %swp, %swp, %skn;
{op} {", ".join([done, "[%swa]", "%swp", *rest])};
setp.eq.or.u32 {done}, %sk, {DROP}, {done};
@{done} bra {label};
.reg .b64 %swr;
{call("sm100_wait", ("b64", "%sm100_cta"), ("b32", str(site)), ("b32", "%swa"), ("b32", "%swp"), result="%swr")}
setp.ne.u64 {done}, %swr, 0;
{label}:
}}"""
        return self.delay() + "\n" + self.guarded(negated, guard, body)

    def arrive(self, negated: str | None, guard: str | None, op: str, operands: str) -> str:
        site = self.new_site(op)
        arguments = split_operands(operands)
        lines = [f"{{{self.fault(site)}"]
        if "expect_tx" in op:
            lines += [
                ".reg .b32 %sab;",
                f"mov.b32 %sab, {arguments[-1]};",
                f"setp.eq.u32 %skq, %sk, {HALVE};",
            ]
            lines += ["@%skq shr.u32 %sab, %sab, 1;"]
            arguments[-1] = "%sab"
        instruction = f"{op} {', '.join(arguments)};"
        lines += [f"setp.ne.u32 %skq, %sk, {DROP};"]
        if guard is not None:
            lines += [
                f"and.pred %skq, %skq, {guard};"
                if not negated
                else f"not.pred %skp, {guard};\nand.pred %skq, %skq, %skp;"
            ]
        lines += [f"@%skq {instruction}"]
        if op.startswith("mbarrier.arrive") and "expect_tx" not in op:
            lines += [f"setp.eq.and.u32 %skq, %sk, {TWICE}, %skq;", f"@%skq {instruction}"]
        return self.delay() + "\n" + "\n".join([*lines, "}"])

    def tensor_load(self, negated: str | None, guard: str | None, op: str, operands: str) -> str:
        site = self.new_site(op)
        to, source, barrier, *rest = split_operands(operands)
        tensor, coordinates = split_operands(source[1:-1])
        coordinates = split_operands(coordinates[1:-1])
        row = min(1, len(coordinates) - 1)
        # Straight code: with a branch the load could be issued by more than one thread of the warp.
        lines = [f"{{{self.fault(site)}", ".reg .b32 %str, %stv;"]
        lines += [f"ld.global.u32 %stv, [sm100_control+{FAULT_VALUE}];", f"setp.eq.u32 %skq, %sk, {ADD};"]
        lines += ["selp.b32 %stv, %stv, 0, %skq;", f"add.s32 %str, {coordinates[row]}, %stv;"]
        coordinates[row] = "%str"
        prefix = f"@{negated}{guard} " if guard else ""
        if "cta_group::2" not in op:
            new_op = op.replace(".cta_group::1", "")
            loaded = ", ".join([to, f"[{tensor}, {{{', '.join(coordinates)}}}]", barrier, *rest])
            return self.delay() + "\n".join([*lines, f"{prefix}{new_op} {loaded};", "}"])
        if not re.fullmatch(
            r"cp\.async\.bulk\.tensor\.[2-5]d\.cta_group::2\.shared::cluster\.global(\.tile)?"
            r"\.mbarrier::complete_tx::bytes(\.L2::cache_hint)?",
            op,
        ):
            raise Unknown(op)
        self.result.counts["pair loads"] += 1
        padded = coordinates + ["0"] * (5 - len(coordinates))
        place = [("b32", str(site)), ("b32", to.strip("[] ")), ("b64", tensor), ("b32", barrier.strip("[] "))]
        rank = [("b32", "%sts"), ("b32", str(len(coordinates)))]
        body = call("sm100_pair_load", *place, *rank, *[("b32", c) for c in padded])
        lines += [".reg .b32 %sts;", "mov.u32 %sts, sm100_barriers;"]
        return self.delay() + "\n".join([*lines, self.guarded(negated, guard, body), "}"])

    # tcgen05
    # ---------------------------------------------------------------------------------------------------------------

    def tcgen05(
        self, negated: str | None, guard: str | None, op: str, operands: str, tokens: list, at: int
    ) -> str:
        name = op.split(".")[1]
        arguments = split_operands(operands)
        two_ctas = TWO_CTAS if "cta_group::2" in op else 0
        if name in ("ld", "st"):
            if guard is not None:
                raise Unknown(f"predicated {op}")
            return self.access(op, operands, tokens, at)
        if name in ("wait::ld", "wait::st"):
            if guard is not None:
                raise Unknown(f"predicated {op}")
            return self.wait_for_access(op)
        if name.startswith("fence"):
            # Emulated tensor memory is ordinary memory, ordered by the barriers around it.
            self.result.counts[op] += 1
            return f"// {op}"
        site = self.new_site(op)
        first = [("b64", "%sm100_cta"), ("b32", str(site))]
        if name == "alloc":
            body = call(
                "sm100_alloc",
                *first,
                ("b32", arguments[0].strip("[] ")),
                ("b32", arguments[1]),
                ("b32", str(two_ctas)),
            )
        elif name == "dealloc":
            body = call("sm100_dealloc", *first, ("b32", arguments[0]), ("b32", arguments[1]))
        elif name == "relinquish_alloc_permit":
            body = call("sm100_relinquish", first[0])
        elif name == "commit":
            body = self.commit(op, arguments, first, two_ctas)
        elif name == "mma":
            body = self.mma(op, arguments, first, two_ctas)
        elif name == "cp":
            body = self.copy(op, arguments, first, two_ctas)
        else:
            raise Unknown(f"{op} {operands}")
        if name in ("alloc", "dealloc"):
            label = self.new_label()
            dropped = f"{self.fault(site)}\nsetp.eq.u32 %skq, %sk, {DROP};\n@%skq bra {label};"
            body = f"{self.delay()}\n{{{dropped}\n{body}\n{label}:\n}}"
        return self.guarded(negated, guard, body)

    @staticmethod
    def commit(op: str, arguments: list[str], first: list, two_ctas: int) -> str:
        barrier = arguments[0].strip("[] ")
        if ".multicast::cluster" not in op:
            return call("sm100_commit", *first, ("b32", barrier), ("b32", str(two_ctas)), ("b32", "0"))
        body = call(
            "sm100_commit", *first, ("b32", barrier), ("b32", str(two_ctas | MULTICAST)), ("b32", "%smc")
        )
        return f"{{\n.reg .b32 %smc;\ncvt.u32.u16 %smc, {arguments[1]};\n{body}\n}}"

    @staticmethod
    def mma(op: str, arguments: list[str], first: list, two_ctas: int) -> str:
        kind = re.search(r"kind::(\w+)", op)
        plain = re.fullmatch(r"tcgen05\.mma\.cta_group::[12]\.kind::\w+(\.collector::a::discard)?", op)
        if kind is None or kind[1] not in KINDS or plain is None:
            raise Unknown(op)
        flags = KINDS[kind[1]] | two_ctas
        d, a, b, idesc, *rest = arguments
        lanes = ["0"] * 8
        if rest[0].startswith("{"):
            given = split_operands(rest.pop(0)[1:-1])
            lanes[: len(given)] = given
        accumulates, *scale = rest
        lines = [
            "{",
            ".reg .b32 %smf;",
            ".reg .b64 %sma;",
            f"selp.b32 %smf, {ACCUMULATES}, 0, {accumulates};",
        ]
        if a.startswith("["):
            flags |= A_IN_TENSOR_MEMORY
            lines.append(f"cvt.u64.u32 %sma, {a.strip('[] ')};")
        else:
            lines.append(f"mov.b64 %sma, {a};")
        lines.append(f"or.b32 %smf, %smf, {flags};")
        lines.append(
            call(
                "sm100_mma",
                *first,
                ("b32", d.strip("[] ")),
                ("b64", "%sma"),
                ("b64", b),
                ("b32", idesc),
                ("b32", "%smf"),
                ("b32", scale[0] if scale else "0"),
                *[("b32", x) for x in lanes],
            )
        )
        return "\n".join([*lines, "}"])

    @staticmethod
    def copy(op: str, arguments: list[str], first: list, two_ctas: int) -> str:
        shapes = {  # rows, 16-byte chunks, how rows spread over the warps' lanes
            "128x256b": (128, 2, 0),
            "128x128b": (128, 1, 0),
            "4x256b": (4, 2, 0),
            "64x128b.warpx2::02_13": (64, 1, 1),
            "64x128b.warpx2::01_23": (64, 1, 2),
            "32x128b.warpx4": (32, 1, 3),
        }
        match = re.fullmatch(r"tcgen05\.cp\.cta_group::[12]\.([\w.:]+)", op)
        if match is None or match[1] not in shapes:
            raise Unknown(op)
        rows, chunks, spread = shapes[match[1]]
        shape = rows | chunks << 8 | spread << 12
        d, source = arguments
        return call(
            "sm100_copy",
            *first,
            ("b32", d.strip("[] ")),
            ("b64", source),
            ("b32", str(shape)),
            ("b32", str(two_ctas)),
        )

    # Loads and stores of tensor memory
    # ---------------------------------------------------------------------------------------------------------------

    def access(self, op: str, operands: str, tokens: list, at: int) -> str:
        match = re.fullmatch(r"tcgen05\.(ld|st)\.sync\.aligned\.(\w+)\.x(\d+)\.b32", op)
        if match is None or match[2] not in SHAPES:
            raise Unknown(op)
        direction, shape, repeats = match[1], match[2], int(match[3])
        arguments = split_operands(operands)
        split = "0"
        if direction == "ld":
            registers, address, *rest = arguments
        else:
            address, *rest, registers = arguments
        if shape == "16x32bx2":
            split = rest.pop(0)
        if rest:
            raise Unknown(f"{op} {operands}")
        per_repeat, place = SHAPES[shape]
        names = split_operands(registers.strip("{} \n\t"))
        if len(names) != per_repeat * repeats:
            raise Unknown(f"{op} with {len(names)} registers")
        columns = WIDTHS[shape] * repeats
        site = self.new_site(op)
        pointer = f"%sm100_a{self.addresses}"
        self.addresses += 1
        base, _, offset = address.strip("[] ").partition("+")
        head = f"""{{{self.fault(site)}
.reg .b32 %sa, %sc, %sl, %sn, %st, %sm;
.reg .b64 %so;
.reg .pred %sbad;
mov.b32 %sa, {base};
add.u32 %sa, %sa, {offset or "0"};
ld.global.u32 %st, [sm100_control+{FAULT_VALUE}];
setp.eq.u32 %skq, %sk, {ADD};
@%skq add.u32 %sa, %sa, %st;
mov.u32 %sn, %tid.x;
shl.b32 %st, %sn, 16;
xor.b32 %st, %st, %sa;
and.b32 %st, %st, 0x600000;
setp.ne.u32 %sbad, %st, 0;
{self.report("%sbad", WRONG_LANES, site, "%sa", "%sn")}
and.b32 %sc, %sa, 0xffff;
add.u32 %sm, %sc, {columns};
setp.gt.u32 %sbad, %sm, {COLUMNS};
{self.report("%sbad", OUTSIDE, site, "%sa", str(columns))}
@%sbad mov.u32 %sa, 0;
sub.u32 %sm, %sm, 1;
shr.u32 %sm, %sm, 5;
mov.u32 %st, 2;
shl.b32 %st, %st, %sm;
shr.u32 %sm, %sc, 5;
mov.u32 %sl, 1;
shl.b32 %sm, %sl, %sm;
sub.u32 %st, %st, %sm;
ld.volatile.global.u32 %sm, [%sm100_cta];
and.b32 %sm, %sm, %st;
setp.ne.u32 %sbad, %sm, %st;
{self.report("%sbad", NOT_ALLOCATED, site, "%sa", str(columns))}
mov.u32 %sn, %laneid;
{FIRST_WORD[shape].replace("SPLIT", split)}
bfe.u32 %st, %sa, 16, 7;
add.u32 %sl, %sl, %st;
and.b32 %st, %sa, 0x1ff;
add.u32 %sc, %sc, %st;
mad.lo.u32 %sc, %sc, {LANES}, %sl;
mul.wide.u32 %so, %sc, 4;
add.u64 {pointer}, %sm100_cta, %so;
"""
        offsets = [
            TENSOR_MEMORY + 4 * (column * LANES + lane) for column, lane in map(place, range(len(names)))
        ]
        access = Access(site, pointer, names, offsets, set(names))
        if direction == "ld":
            self.loads.append(access)
            return self.delay() + "\n" + head + "}"
        if not self.is_waited_for(tokens, at):
            self.result.unwaited.append(site)
            if not self.strict:
                body = "\n".join(
                    f"st.relaxed.gpu.global.b32 [{pointer}+{o}], {r};"
                    for r, o in zip(names, offsets, strict=True)
                )
                return self.delay() + "\n" + head + body + "\n}"
        access.registers = [f"%sm100_c{self.copies + i}" for i in range(len(names))]
        self.copies += len(names)
        body = [f"mov.b32 {copy}, {r};" for copy, r in zip(access.registers, names, strict=True)]
        body += [f"st.relaxed.gpu.global.b32 [{pointer}+{o}], {PENDING};" for o in offsets]
        self.stores.append(access)
        return self.delay() + "\n" + head + "\n".join(body) + "\n}"

    @staticmethod
    def is_waited_for(tokens: list, at: int) -> bool:
        """Whether tcgen05.wait::st follows in the same block."""
        for token in tokens[at + 1 :]:
            if token.lastgroup == "label":
                return False
            if token.lastgroup == "statement" and (m := INSTRUCTION.fullmatch(token.group())):
                if m["op"].startswith("tcgen05.wait::st"):
                    return True
                if m["op"].split(".")[0] in ("bra", "brx", "ret", "exit"):
                    return False
        return False

    def last_used(self, registers: set[str]) -> int:
        for i in reversed(range(len(self.loads))):
            if self.loads[i].registers_and_copies & registers:
                return i
        return -1

    def complete_loads(self, count: int) -> str:
        """The first `count` loads that are under way."""
        text = "".join(self.complete_load(x) for x in self.loads[:count])
        self.loads = self.loads[count:]
        return text

    def complete_load(self, access: Access) -> str:
        lines = ["", *access.moves]
        lines[:0] = [
            f"ld.relaxed.gpu.global.b32 {r}, [{access.address}+{o}];"
            for r, o in zip(access.registers, access.offsets, strict=True)
        ]
        lines += ["{", ".reg .pred %su, %sw;", "setp.ne.u32 %su, 0, 0;", "setp.ne.u32 %sw, 0, 0;"]
        for r in access.registers:
            lines += [
                f"setp.eq.or.b32 %su, {r}, {UNWRITTEN}, %su;",
                f"setp.eq.or.b32 %sw, {r}, {PENDING}, %sw;",
            ]
        lines += [
            self.report("%su", READ_UNWRITTEN, access.site),
            self.report("%sw", READ_PENDING, access.site),
            "}",
        ]
        text = "\n".join(lines) + "\n"
        if access.dropped_at:
            label = self.new_label()
            skip = (
                f"{{{self.fault(access.dropped_at)}\nsetp.ne.u32 %skq, %sk, {DROP};\n@%skq bra {label};\n}}\n"
            )
            text = f"{skip}{text}{label}:\n"
        return text

    @staticmethod
    def complete_store(access: Access) -> str:
        return (
            "\n".join(
                f"st.relaxed.gpu.global.b32 [{access.address}+{o}], {r};"
                for r, o in zip(access.registers, access.offsets, strict=True)
            )
            + "\n"
        )

    def wait_for_access(self, op: str) -> str:
        site = self.new_site(op)
        label = self.new_label()
        if op.startswith("tcgen05.wait::ld"):
            body = "".join(self.complete_load(x) for x in self.loads)
            # Done, unless this wait is dropped; then the next use completes them.
            for x in self.loads:
                x.dropped_at = site
        else:
            body = "".join(self.complete_store(x) for x in self.stores) + "fence.acq_rel.gpu;\n"
            self.stores = []
        dropped = f"{self.fault(site)}\nsetp.eq.u32 %skq, %sk, {DROP};\n@%skq bra {label};"
        return f"{self.delay()}\n{{{dropped}\n{body}{label}:\n}}"

    def finish_block(self) -> str:
        """Accesses that are waited for elsewhere are done at the end of their block."""
        elsewhere = sum(not x.dropped_at for x in self.loads) + len(self.stores)
        self.result.counts["accesses waited for in another block"] += elsewhere
        text = (
            "\n" + self.complete_loads(len(self.loads)) + "".join(self.complete_store(x) for x in self.stores)
        )
        self.stores = []
        return text

    # Module
    # ---------------------------------------------------------------------------------------------------------------

    def module(self, emulator: str) -> Rewriting:
        out, at = [], 0
        text = self.input
        for match in FUNCTION.finditer(text):
            if match.start() < at:
                continue
            # The body opens with the first brace after the parameters; a declaration ends with a semicolon before it.
            opening = text.find("{", match.end())
            if opening < 0 or ";" in re.sub(r"\([^)]*\)", "", text[match.end() : opening]):
                continue
            closing = self.end_of(text, opening)
            out.append(text[at : match.start()])
            out.append(
                self.function(text[match.start() : opening], text[opening + 1 : closing], match[1] == "entry")
            )
            at = closing + 1
        out.append(text[at:])
        module = re.sub(r"^\.target\s+sm_100a", ".target sm_90a", "".join(out), flags=re.MULTILINE)
        bare = re.sub(r"//[^\n]*", "", module)
        if left := sorted(set(re.findall(r"tcgen05\.[\w.:]+|[\w.]+\.f32x2|[\w.:]*cta_group[\w.:]*", bare))):
            raise Unknown(f"not rewritten: {left}")
        emulator = re.sub(
            r"^(//.*|\.version.*|\.target.*|\.address_size.*)$", "", emulator, flags=re.MULTILINE
        )
        emulator = emulator.replace(".visible .func", ".func")
        if self.result.counts["pair loads"]:
            # A whole kilobyte, so that what follows keeps its alignment and with it its swizzle.
            emulator += "\n.shared .align 1024 .b8 sm100_barriers[1024];\n"
        header = re.search(r"\.address_size\s+64", module).end()
        self.result.text = module[:header] + "\n" + emulator + "\n" + module[header:]
        return self.result

    @staticmethod
    def end_of(text: str, opening: int) -> int:
        depth = 0
        for match in re.compile(r"//[^\n]*|\"[^\"\n]*\"|[{}]").finditer(text, opening):
            depth += (match.group() == "{") - (match.group() == "}")
            if depth == 0:
                return match.start()
        raise Unknown("unbalanced braces")


def rewrite(text: str, emulator: str, **options) -> Rewriting:
    return Rewriter(text, **options).module(emulator)
