"""Programs that are known to be right on Blackwell: CUTLASS's example 77, as the nvidia-cutlass wheel has it.

Kernels and headers are those of the wheel. Only the list of kernels that each main function instantiates is cut, since
compiling all of them takes an hour.
"""

import re
from dataclasses import dataclass
from pathlib import Path

EXAMPLE = Path("examples/77_blackwell_fmha")
# One run each, not a benchmark.
ONCE = ["--verify", "--warmup_iterations=1", "--iterations=0"]


@dataclass(frozen=True)
class Program:
    name: str
    source: str
    edits: tuple[tuple[str, str], ...]  # regular expressions and what takes their place; each must be found
    options: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()  # arguments
    findings: str = ""  # reports that these kernels are known to earn, see docs/sm100-on-sm90.md

    def write(self, cutlass: Path, folder: Path) -> Path:
        text = (cutlass / EXAMPLE / self.source).read_text()
        for pattern, replacement in self.edits:
            text, count = re.subn(pattern, replacement, text, flags=re.DOTALL)
            if count == 0:
                raise SystemExit(f"{self.source}: {pattern!r} is not there; this edits CUTLASS 4.2")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.cu"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
        return path

    def commands(self) -> list[list[str]]:
        return [[*case.split(), *ONCE] for case in self.cases]


def calls(*functions: str) -> tuple[tuple[str, str], ...]:
    """Takes calls out of a main function."""
    return tuple((rf"\b{function}\([^()]*\);", "") for function in functions)


def masks(*names: str) -> tuple[tuple[str, str], ...]:
    return tuple((rf"\bfn\({re.escape(name)}\{{\}}\);", "") for name in names)


FORWARD = calls(r"run_fwd_32", r"run_fwd_64")
VARLEN = ((r"FwdRunner<false, ", "FwdRunner<true, "),)
FIXED_LENGTH = ((r"FwdRunner<true, ", "FwdRunner<false, "),)
INDIVIDUAL = ((r'(persistent", Option<Tag::kIsPersistent, )true_type', r"\1false_type"),)
PERSISTENT = ((r'(individual", Option<Tag::kIsPersistent, )false_type', r"\1true_type"),)
VARLEN_CASE = "--persistent --varlen --d=128 --h=4"
FIXED_BACKWARD = ((r"return fn\(std::true_type\{\}\);", "return fn(std::false_type{});"),)

PROGRAMS = (
    Program(
        "forward",
        "77_blackwell_fmha.cu",
        (*FORWARD, *FIXED_LENGTH, *INDIVIDUAL, *masks("CausalMask", "CausalMask<false>", "ResidualMask")),
        ("-DFP16",),
        ("--b=1 --h=2 --q=256 --k=1152 --d=128", "--b=1 --h=4 --h_k=2 --q=512 --k=512 --d=128"),
    ),
    Program(
        "forward_varlen",
        "77_blackwell_fmha.cu",
        (*FORWARD, *VARLEN, *PERSISTENT, *masks("NoMask", "CausalMask")),
        ("-DFP16",),
        (
            f"{VARLEN_CASE} --mask=causal --causal-type=qend --varlen-q=177:766 --varlen-k=257:845",
            f"{VARLEN_CASE} --mask=causal --causal-type=qend --varlen-q=17 --varlen-k=257",
            f"{VARLEN_CASE} --mask=residual --h_k=2 --varlen-q=3:2 --varlen-k=2:5",
            f"{VARLEN_CASE} --mask=residual --varlen-q=256:256 --varlen-k=512:512",
        ),
    ),
    Program(
        "forward_fp8",
        "77_blackwell_fmha.cu",
        (*FORWARD, *FIXED_LENGTH, *INDIVIDUAL, *masks("CausalMask", "CausalMask<false>", "ResidualMask")),
        ("-DFP8",),
        ("--b=1 --h=2 --q=256 --k=512 --d=128",),
    ),
    Program(
        "backward",
        "77_blackwell_fmha_bwd.cu",
        (*calls("run_bwd_64", "run_bwd_mla_192"), *FIXED_BACKWARD, *masks("ResidualMaskForBackward")),
        ("-DFP16",),
        (
            "--b=1 --h=2 --q=256 --k=256 --d=128 --mask=no",
            "--b=1 --h=2 --q=512 --k=512 --d=128 --mask=causal",
        ),
        "dealloc-while-pending,not-allocated",
    ),
    Program(
        "decode_mla",
        "77_blackwell_mla.cu",
        ((r"run\(Shape<NumHeads, Blocking, HeadDim>\{\}, \(name \+ individual\)[^;]*;", ""),),
        ("-DFP16",),
        ("--b=1 --k=512 --page=128", "--b=1 --k=4096 --split_kv=8 --page=128"),
    ),
)
