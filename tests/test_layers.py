"""The layer rules of docs/design.md, read off the sources, and the stub against the extension."""

import ast
import re
from pathlib import Path

import pytest

from jax_fmha import _core

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = {".h", ".cc", ".cu", ".cuh"}
ARCHITECTURES = ("cpu", "sm90", "sm100")

# What each folder of cc/ may include of the others; every folder may include itself, and anybody std.
ALLOWED = {
    "core": set(),
    "cpu": {"core"},
    "gpu": {"core"},
    "sm90": {"core", "gpu"},
    "sm100": {"core", "gpu"},
    "dispatch": {"core", "gpu", *ARCHITECTURES},
    "ffi": {"core", "dispatch"},
    "tests": {"core", "dispatch", *ARCHITECTURES},
}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
STD = re.compile(r"^[a-z0-9_]+$")  # <vector>, but neither <immintrin.h> nor <nanobind/nanobind.h>

pytestmark = pytest.mark.skipif(not (ROOT / "cc").is_dir(), reason="needs the source tree")


def sources(folder: str) -> list[Path]:
    return sorted(p for p in (ROOT / "cc" / folder).rglob("*") if p.suffix in SUFFIXES)


def includes(path: Path) -> list[tuple[str, str]]:
    """(bracket or quote, path) of every include."""
    return INCLUDE.findall(path.read_text())


def test_every_folder_has_a_rule():
    folders = {p.relative_to(ROOT / "cc").parts[0] for p in (ROOT / "cc").rglob("*") if p.suffix in SUFFIXES}
    assert folders <= set(ALLOWED)
    assert {"core", "cpu", "dispatch", "ffi"} <= folders


@pytest.mark.parametrize("folder", ALLOWED)
def test_folders_include_only_what_is_below_them(folder):
    for path in sources(folder):
        for quote, included in includes(path):
            if quote == '"' and included.startswith("cc/"):
                assert included.split("/")[1] in ALLOWED[folder] | {folder}, f"{path}: {included}"


def test_core_and_dispatch_include_only_std():
    for path in sources("core") + sources("dispatch"):
        for quote, included in includes(path):
            assert included.startswith("cc/") if quote == '"' else STD.match(included), f"{path}: {included}"


def test_only_ffi_includes_xla_and_only_module_includes_nanobind():
    found = {"xla": set(), "nanobind": set(), "Python.h": set()}
    for folder in ALLOWED:
        for path in sources(folder):
            for _, included in includes(path):
                head = included.split("/")[0]
                if head in found:
                    found[head].add(path.relative_to(ROOT).as_posix())
    assert found["xla"]
    assert all(path.startswith("cc/ffi/") for path in found["xla"])
    assert found["nanobind"] == {"cc/ffi/module.cc"}
    assert not found["Python.h"]


def test_headers_guard_themselves_and_never_export_a_namespace():
    for folder in ALLOWED:
        for path in sources(folder):
            text = path.read_text()
            if path.suffix in {".h", ".cuh"}:
                assert "#pragma once" in text, path
                # Kernels are written in CuTe's vocabulary; their headers are included by instances only.
                exported = re.findall(r"^using namespace (\w+)", text, re.MULTILINE)
                assert set(exported) <= ({"cute"} if path.name == "kernel.cuh" else set()), path


def test_ffi_call_has_one_site():
    sites = [
        path.name
        for path in (ROOT / "jax_fmha").rglob("*.py")
        if re.search(r"\bffi_call\(", path.read_text())
    ]
    assert sites == ["_ffi.py"]


def test_no_source_asks_for_the_build_machine():
    files = [ROOT / "CMakeLists.txt", ROOT / "pyproject.toml", *(ROOT / "cc").rglob("CMakeLists.txt")]
    for path in files:
        assert "-march=native" not in path.read_text(), path


def test_stub_names_what_the_extension_has():
    tree = ast.parse((ROOT / "jax_fmha" / "_core.pyi").read_text())
    stub = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            stub.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            stub.add(node.target.id)
    assert stub == {name for name in dir(_core) if not name.startswith("_")}


def test_stub_names_the_arguments_of_the_extension():
    """nanobind writes each function's signature into the first line of its docstring."""
    tree = ast.parse((ROOT / "jax_fmha" / "_core.pyi").read_text())
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            signature = getattr(_core, node.name).__doc__.splitlines()[0]
            for argument in node.args.args:
                assert f"{argument.arg}: " in signature, (node.name, signature)
            assert signature.count(": ") == len(node.args.args), signature
