"""Builds the project's Blackwell kernels, with the checks of cc/tests/sm100/driver.cu, to run on a Hopper GPU.

python tests/sm100/kernels.py FOLDER [--only REGEX] [--cutlass cutlass_library/source]
FOLDER/driver check 200        # there; environment variables of host.cc apply
"""

import argparse
import os
import re
from pathlib import Path

import toolchain
from build import Builder

ROOT = Path(__file__).resolve().parents[2]


def instances(folder: Path, out: Path, only: str) -> list[Path]:
    """One source per row of instances.def, named by pass and row, where cmake/Instantiate.cmake has one for several."""
    template, sources = (folder / "unit.cu.in").read_text(), []
    newest = max(p.stat().st_mtime for p in (ROOT / "cc").rglob("*.*") if p.suffix in (".h", ".cuh", ".in"))
    for row in re.findall(r"^[A-Z_]+\(.*\)$", (folder / "instances.def").read_text(), re.MULTILINE):
        name = "_".join([folder.name, *re.findall(r"\w+", row)[1:]])
        if not re.search(only, name):
            continue
        text = template.replace("@rows@", row)
        path = out / f"{name}.cu"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
        if path.stat().st_mtime < newest:
            path.touch()  # what it includes has changed
        sources.append(path)
    return sources


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cutlass", type=Path, default=toolchain.installed_cutlass())
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="sources compiled at a time")
    parser.add_argument("--only", default="", help="instances whose name matches; the others are left out")
    parser.add_argument("--compile-only", action="store_true", help="compile instances, and do not link")
    arguments = parser.parse_args()
    cc = ROOT / "cc"
    sources, definitions = [], {}
    # What takes longest is compiled first.
    for name, macro in (("backward", "BACKWARD_INSTANCE"), ("forward", "FORWARD_INSTANCE")):
        built = instances(cc / "sm100" / name, arguments.folder / "instances", arguments.only)
        rows = (source.stem.removeprefix(f"{name}_").replace("_", ", ") for source in built)
        definitions[name] = "".join(f"{macro}({row})\n" for row in rows)
        sources += built
    include = arguments.folder.resolve() / "include"
    options = [f"-I{include}", f"-I{ROOT}"]
    builder = Builder(arguments.folder, arguments.cutlass)
    if arguments.compile_only:
        for compilation in builder.compile_all("driver", sources, options, arguments.jobs):
            print(compilation.object)
        return
    # The dispatch lists what is built.
    for name, definition in definitions.items():
        path = include / "cc/sm100" / name / "instances.def"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(definition)
    plain = [
        "tests/sm100/driver.cu",
        "sm100/forward/forward.cc",
        "sm100/backward/backward.cc",
        "sm90/forward/forward.cc",
        "sm90/backward/backward.cc",
        "sm90/not_linked.cc",
        "gpu/bias_gradient.cu",
        "gpu/empty_forward.cu",
        "gpu/empty_backward.cu",
        "gpu/mask_plan.cu",
        "gpu/segment_plan.cu",
        "gpu/sink_gradient.cu",
        "gpu/turns.cu",
        "core/problem.cc",
        "dispatch/registry.cc",
    ]
    print(builder.build("driver", sources, options, [cc / path for path in plain], arguments.jobs))


if __name__ == "__main__":
    main()
