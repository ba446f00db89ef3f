"""The extension module: trace-time questions and the custom calls (cc/ffi/module.cc)."""

from typing import Any

UNBOUNDED: int
MAX_BATCH_RANK: int

class Problem:
    """A checked call, by shapes, types and options alone."""

def describe(backward: bool, specs: dict[str, tuple[list[int], str]], attributes: dict[str, Any]) -> Problem:
    """Checks a call given {operand: (shape, dtype name)}. Raises ValueError on the caller's mistake."""

def select(problem: Problem, platform: str, compute_capability: int) -> tuple[str, list[tuple[str, str]]]:
    """(name of the kernel that would run or "", [(other kernel, reason)]).

    `compute_capability` is 10 * major + minor of a CUDA device, 0 elsewhere.
    """

def workspace_bytes(problem: Problem, platform: str, compute_capability: int, num_workers: int) -> int:
    """Bytes of workspace. Raises NotImplementedError with every kernel's reason if none takes the problem."""

def targets() -> dict[str, Any]:
    """{custom call target: capsule} for the CPU platform."""
