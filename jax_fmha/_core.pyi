"""The extension module: trace-time questions and the custom calls (cc/ffi/module.cc)."""

from typing import Any

UNBOUNDED: int
MAX_BATCH_RANK: int

class Problem:
    """A checked call, by shapes, types and options alone."""

def describe(backward: bool, specs: dict[str, tuple[list[int], str]], attributes: dict[str, Any]) -> Problem:
    """Checks a call given {operand: (shape, dtype name)}. Raises ValueError on the caller's mistake."""

class Device:
    """Where a call would run.

    `compute_capability` is 10 * major + minor of a CUDA device, or 0 if a program is made for any; 0 elsewhere.
    """

    def __init__(
        self, platform: str, compute_capability: int, has_cuda_kernels: bool, num_workers: int
    ) -> None: ...

def select(problem: Problem, device: Device) -> tuple[str, list[tuple[str, str]]]:
    """(name of the kernel that would run or "", [(other kernel, reason)])."""

def workspace_bytes(problem: Problem, device: Device) -> int:
    """Bytes of workspace. Raises NotImplementedError with every kernel's reason if none takes the problem."""

def has_cuda_kernels() -> bool:
    """Whether this installation was built with the CUDA kernels."""

def targets() -> dict[str, dict[str, Any]]:
    """{platform: {custom call target: capsule}}."""
