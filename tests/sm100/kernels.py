"""Builds the project's Blackwell kernels, with the checks of cc/tests/sm100/driver.cu, to run on a Hopper GPU.

python tests/sm100/kernels.py FOLDER --cutlass cutlass_library/source [--only REGEX]
FOLDER/forward_driver check 200 0        # there; environment variables of host.cc apply
"""

import argparse
import re
from pathlib import Path

from build import Builder

ROOT = Path(__file__).resolve().parents[2]


def instances(folder: Path, out: Path, only: str) -> list[Path]:
    """One source per row of instances.def, as cmake/Instantiate.cmake makes them."""
    template, sources = (folder / "instance.cu.in").read_text(), []
    for row in re.findall(
        r"^[A-Z_]+\((.*), (.*), (.*), (.*)\)", (folder / "instances.def").read_text(), re.MULTILINE
    ):
        name = "_".join(row)
        if not re.search(only, name):
            continue
        text = template
        for key, value in zip(("dtype", "mode", "head_dim", "head_dim_v"), row, strict=True):
            text = text.replace(f"@{key}@", value)
        path = out / f"{name}.cu"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
        sources.append(path)
    return sources


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cutlass", type=Path, required=True)
    parser.add_argument("--only", default="", help="instances whose name matches; the others are left out")
    arguments = parser.parse_args()
    cc = ROOT / "cc"
    sources = instances(cc / "sm100/forward", arguments.folder / "instances", arguments.only)
    names = {source.stem for source in sources}
    # The dispatch lists what is built.
    definition = arguments.folder / "include/cc/sm100/forward/instances.def"
    definition.parent.mkdir(parents=True, exist_ok=True)
    rows = [f"FORWARD_INSTANCE({', '.join(name.split('_'))})\n" for name in sorted(names)]
    definition.write_text("".join(rows))
    plain = [
        "tests/sm100/driver.cu",
        "sm100/forward/forward.cc",
        "sm100/forward/empty.cu",
        "gpu/segment_plan.cu",
    ]
    plain += ["core/problem.cc"]
    options = [f"-I{arguments.folder.resolve() / 'include'}", f"-I{ROOT}"]
    builder = Builder(arguments.folder, arguments.cutlass)
    print(builder.build("forward_driver", sources, options, [cc / path for path in plain]))


if __name__ == "__main__":
    main()
