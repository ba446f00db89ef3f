"""nvcc's own steps, with one more between the compiler and the assembler: the rewriting of PTX.

`nvcc --dryrun` lists the commands that compile a source for sm_100a. They run as listed, except that the PTX is
rewritten before it is assembled, and that assembler and fat binary are told sm_90a. The host part is what nvcc makes
of the unchanged source: kernels are launched, and found by the runtime, as ever.
"""

import importlib.util
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

ARCHITECTURE = "arch=compute_100a,code=sm_100a"
VARIABLE = re.compile(r"([A-Z_]+)=(.*)")


def run(command: Sequence[str], **options) -> str:
    """Runs a command and gives back what it printed; a failure shows it."""
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
    if done.returncode != 0:
        raise SystemExit(f"{shlex.join(command)}\n{done.stdout[:4000]}\nexit status {done.returncode}")
    return done.stdout


def installed_cutlass() -> Path:
    """`cutlass_library/source` of the nvidia-cutlass wheel that this interpreter finds."""
    spec = importlib.util.find_spec("cutlass_library")
    if spec is None or spec.origin is None:
        return Path("cutlass_library/source")
    return Path(spec.origin).parent / "source"


def flags(cutlass: Path, includes: Sequence[Path] = ()) -> list[str]:
    """Flags for sources that include CUTLASS, from `cutlass_library/source` of the nvidia-cutlass wheel."""
    folders = [
        cutlass / "include",
        cutlass / "tools/util/include",
        cutlass / "examples/common",
        cutlass / "examples/77_blackwell_fmha",
        *includes,
    ]
    options = [
        "-std=c++17",
        "-O3",
        "-DNDEBUG",
        "-lineinfo",
        "--expt-relaxed-constexpr",
        "--expt-extended-lambda",
    ]
    return options + [f"-I{folder}" for folder in folders]


class Compilation:
    """One source on its way to an object file. Files of earlier steps stay in `folder` and are used again."""

    def __init__(self, source: Path, folder: Path, options: Sequence[str]):
        folder.mkdir(parents=True, exist_ok=True)
        self.source, self.folder, self.name = source.resolve(), folder.resolve(), source.stem
        self.object = self.folder / f"{self.name}.o"
        self.sites = self.folder / f"{self.name}.sites"
        command = ["nvcc", "--dryrun", "--keep", "--keep-dir", str(self.folder), *options]
        command += ["-gencode", ARCHITECTURE, "-c", str(self.source), "-o", str(self.object)]
        self._front: list[str] = []
        self._back: list[str] = []
        self._environment = dict(os.environ)
        for line in run(command).splitlines():
            line = line.removeprefix("#$ ").strip()
            if match := VARIABLE.fullmatch(line):
                # Values may hold quoted lists of options, which the commands refer to.
                self._environment[match[1]] = match[2] or " " if match[1] == "_SPACE_" else match[2]
            elif line and not line.startswith("rm "):
                after = self._back or line.startswith("ptxas ")
                (self._back if after else self._front).append(line)

    @property
    def ptx(self) -> Path:
        return self.folder / f"{self.name}.ptx"

    def compile(self) -> Path:
        """Source to PTX for compute_100a."""
        if not self.ptx.exists() or self.ptx.stat().st_mtime < self.source.stat().st_mtime:
            self._run(self._front)
        return self.ptx

    def assemble(self, text: str) -> Path:
        """Rewritten PTX to an object file with machine code for sm_90a."""
        rewritten = self.folder / f"{self.name}.sm90.ptx"
        rewritten.write_text(text)
        self._run(
            line.replace("sm_100a", "sm_90a")
            .replace("sm=100a", "sm=90a")
            .replace(str(self.ptx), str(rewritten))
            for line in self._back
        )
        return self.object

    def _run(self, lines) -> None:
        for line in lines:
            # The shell expands what nvcc wrote with its own variables, of which some hold quotes.
            expanded = re.sub(
                r"\$(INCLUDES|SYSTEM_INCLUDES|LIBRARIES|CUDAFE_FLAGS|PTXAS_FLAGS)\b",
                lambda m: self._environment.get(m[1], ""),
                line,
            )
            run(["bash", "-c", expanded], env=self._environment, cwd=self.folder)


def toolkit(nvcc: Path) -> Path:
    """The CUDA toolkit's folder; nvcc may be a script that leads there."""
    for line in run([str(nvcc), "--dryrun", "-c", "-x", "cu", "/dev/null"]).splitlines():
        if match := re.match(r"#\$ TOP=(.*)", line):
            return Path(match[1]).resolve()
    return nvcc.parent.parent
