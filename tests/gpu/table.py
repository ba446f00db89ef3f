"""The table of cases on a CUDA device, over poisoned memory: each result right, or refused with a reason.

    python tests/gpu/table.py --head-dims own 128,128 --shard 0/8

The kernels take head dims that are multiples of 8; `own` rounds each case's up to that. The cases of other sizes are
asked as they are, too: they must be refused, not served by something else. Prints one JSON object per line.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_fmha
import support
from cases import CASES, Case, Inputs

KERNELS = ("sm90_forward", "sm90_backward")
# Cases that are worth running again for every size of tile: those that have several, and combinations.
REPEATED = ("tiles", "mix", "decode", "gqa", "no_keys", "sinks")


def cases(head_dims: str) -> list[Case]:
    if head_dims == "own":
        unfit = [case for case in CASES if fitted(case) != case]
        return [*map(fitted, CASES), *(dataclasses.replace(c, name=c.name + " as it is") for c in unfit)]
    H, Hv = map(int, head_dims.split(","))
    return [
        dataclasses.replace(case, name=f"{case.name} {H}/{Hv}", H=H, Hv=Hv)
        for case in CASES
        if case.name.startswith(REPEATED)
    ]


def fitted(case: Case) -> Case:
    H, Hv = (min(256, max(8, -(-x // 8) * 8)) for x in (case.H, case.Hv))
    return dataclasses.replace(case, H=H, Hv=Hv)


def poison() -> None:
    """Leaves NaN in most of the memory that results and workspace will come from."""
    limit = jax.local_devices()[0].memory_stats()["bytes_limit"]
    jnp.full((int(0.7 * limit) // 4,), np.nan, jnp.float32).block_until_ready().delete()


def attempt(inputs: Inputs, wanted: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Out, lse and the gradients of the operands `wanted`. Raises NotImplementedError where a kernel refuses."""
    primals = {name: inputs.operands[name] for name in wanted}

    def f(primals: Any, rest: Any, dout: Any, dlse: Any) -> dict[str, Any]:
        def attend(p: Any) -> Any:
            return support.attention({**rest, **p}, inputs.options, "sm90")

        (out, lse), pullback = jax.vjp(attend, primals)
        results = {"out": out, "lse": lse}
        if wanted:
            (grads,) = pullback((dout, jnp.zeros_like(lse) if dlse is None else dlse.astype(lse.dtype)))
            results |= {"d" + name: g for name, g in grads.items()}
        return results

    rest = {name: x for name, x in inputs.operands.items() if name not in wanted}
    compiled = jax.jit(f).lower(primals, rest, inputs.dout, inputs.dlse).compile()
    # XLA drops a call of which nothing is left.
    calls, is_empty = support.calls(compiled), inputs.dout.size == 0
    assert is_empty or calls["forward"] >= 1, "the program has no call of ours"
    assert is_empty or not wanted or calls["backward"] >= 1, "the program has no backward of ours"
    poison()
    return {name: np.asarray(x) for name, x in compiled(primals, rest, inputs.dout, inputs.dlse).items()}


def reason_of(error: NotImplementedError) -> str:
    """What the CUDA kernel said."""
    lines = [line for line in str(error).splitlines() if line.strip().startswith("sm90_")]
    return "; ".join(line.strip() for line in lines) or str(error)


def judge(case: Case, dtype: str) -> dict[str, Any]:
    """Runs a case with all gradients, without that of bias, or forward alone, whichever is served first."""
    inputs = case.make(jnp.dtype(dtype))
    differentiable = tuple(inputs.differentiable())
    asked = [differentiable, tuple(n for n in differentiable if n != "bias"), ()]
    refused: list[str] = []
    for wanted in dict.fromkeys(asked):
        try:
            got = attempt(inputs, wanted)
        except NotImplementedError as error:
            reason = reason_of(error)
            if reason not in refused:
                refused.append(reason)
            continue
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            for name, x in got.items():
                support.check_result(name, x, case, dtype)
        explained = jax_fmha.explain(**inputs.operands, **inputs.options, platform="cuda").kernel
        assert explained[0] == KERNELS[0], explained
        assert wanted != differentiable or explained[1] == KERNELS[1], explained
        return {"results": sorted(got), "refused": refused}
    return {"results": [], "refused": refused}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head-dims", nargs="+", default=["own"])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16"])
    parser.add_argument("--shard", default="0/1")
    args = parser.parse_args()
    shard, shards = map(int, args.shard.split("/"))
    todo = [(c, d) for dims in args.head_dims for c in cases(dims) for d in args.dtypes]
    for case, dtype in todo[shard::shards]:
        begin = time.perf_counter()
        result: dict[str, Any] = {"case": case.name, "dtype": dtype}
        try:
            result |= judge(case, dtype)
        except Exception:
            result["error"] = traceback.format_exc(limit=4)[-1500:]
        result["seconds"] = round(time.perf_counter() - begin, 2)
        print(json.dumps(result), flush=True)
        if "CUDA_ERROR" in result.get("error", "") or "illegal" in result.get("error", ""):
            return 1  # the device's context is lost
    return 0


if __name__ == "__main__":
    sys.exit(main())
