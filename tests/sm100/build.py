"""Builds programs for sm_100a so that they run on a Hopper GPU.

    python tests/sm100/build.py OUT --cutlass cutlass_library/source [--include DIR] SOURCE...   # one program

The program is OUT, beside it OUT.sites, which names the instructions that reports speak of.
"""

import argparse
import concurrent.futures
import os
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path

import rewrite
import toolchain

HERE = Path(__file__).resolve().parent
EMULATOR = (HERE / "emulator.cu", HERE / "emulator.h", HERE / "rewrite.py")
WRAPPED = (
    "cudaLaunchKernel",
    "__cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cudaGetDeviceProperties",
    "cudaMalloc",
    "cudaFree",
)


def is_stale(target: Path, *sources: Path) -> bool:
    return not target.exists() or any(target.stat().st_mtime < s.stat().st_mtime for s in sources)


def first_site(source: Path) -> int:
    """Sites of different modules differ, because a fault is planted in one of them."""
    return 1 + 10000 * (zlib.crc32(source.stem.encode()) % 100000)


class Builder:
    """Builds into `folder`, and again only what has changed."""

    def __init__(self, folder: Path, cutlass: Path, includes: Sequence[Path] = ()):
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.flags = toolchain.flags(cutlass, includes)
        nvcc = Path(shutil.which("nvcc") or "nvcc").resolve()
        toolkit = Path(os.environ.get("CUDA_HOME", toolchain.toolkit(nvcc)))
        self.link_flags = [f"-L{toolkit / name}" for name in ("lib64", "lib")]
        self.link_flags += ["-lcudart_static", "-lrt", "-lpthread", "-ldl"]
        self.host_flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", f"-I{toolkit / 'include'}"]

    def emulator(self) -> str:
        ptx, source = self.folder / "emulator.ptx", HERE / "emulator.cu"
        if is_stale(ptx, source, HERE / "emulator.h"):
            options = ["-O3", "-std=c++17", "-rdc=true", "-gencode", "arch=compute_90a,code=compute_90a"]
            toolchain.run(["nvcc", *options, "--ptx", "-o", str(ptx), str(source)])
        return ptx.read_text()

    def host(self) -> Path:
        target, source = self.folder / "host.o", HERE / "host.cc"
        if is_stale(target, source, HERE / "emulator.h"):
            toolchain.run(["g++", *self.host_flags, "-c", str(source), "-o", str(target)])
        return target

    def compile(
        self, name: str, source: Path, options: Sequence[str] = (), first_site: int = 1, **rewriting
    ) -> toolchain.Compilation:
        """The object file of a CUDA source for sm_100a, and the list of its sites."""
        compilation = toolchain.Compilation(source, self.folder / f"{name}.steps", [*self.flags, *options])
        ptx = compilation.compile()
        if is_stale(compilation.object, ptx, *EMULATOR) or not compilation.sites.exists():
            result = rewrite.rewrite(ptx.read_text(), self.emulator(), first_site=first_site, **rewriting)
            compilation.assemble(result.text)
            compilation.sites.write_text("".join(f"{site}\n" for site in result.sites))
        return compilation

    def compile_plain(self, name: str, source: Path, options: Sequence[str]) -> Path:
        """The object file of a source that is compiled as it is."""
        target = self.folder / f"{name}.steps" / ("-".join(source.parts[-3:]) + ".o")
        target.parent.mkdir(parents=True, exist_ok=True)
        command = ["nvcc", *self.flags, *options, "-gencode", "arch=compute_90a,code=sm_90a"]
        toolchain.run([*command, "-c", str(source), "-o", str(target)])
        return target

    def compile_all(
        self, name: str, sources: Sequence[Path], options: Sequence[str] = (), jobs: int = 1, **rewriting
    ) -> list[toolchain.Compilation]:
        self.emulator()  # which every job pastes
        with concurrent.futures.ProcessPoolExecutor(jobs) as pool:
            running = [
                pool.submit(self.compile, name, source, options, first_site(source), **rewriting)
                for source in sources
            ]
            return [job.result() for job in running]

    def build(
        self,
        name: str,
        sources: Sequence[Path],
        options: Sequence[str] = (),
        plain: Sequence[Path] = (),
        jobs: int = 1,
        **rewriting,
    ) -> Path:
        """One program from CUDA sources for sm_100a, and others that are compiled as they are. Gives it back."""
        compilations = self.compile_all(name, sources, options, jobs, **rewriting)
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            others = list(pool.map(lambda source: self.compile_plain(name, source, options), plain))
        objects = [self.host(), *(compilation.object for compilation in compilations), *others]
        sites = "".join(compilation.sites.read_text() for compilation in compilations)
        wraps = [f"-Wl,--wrap={function}" for function in WRAPPED]
        program = self.folder / name
        toolchain.run(["g++", "-o", str(program), *map(str, objects), *wraps, *self.link_flags])
        program.with_name(f"{name}.sites").write_text(sites)
        return program


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("source", type=Path)
    parser.add_argument("--cutlass", type=Path, required=True)
    parser.add_argument("--include", type=Path, action="append", default=[])
    arguments, options = parser.parse_known_args()
    builder = Builder(arguments.out.parent, arguments.cutlass, arguments.include)
    print(builder.build(arguments.out.name, [arguments.source], options))


if __name__ == "__main__":
    main()
