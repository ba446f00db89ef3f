"""Promise 3: no padding asked of the caller or done for the kernel, no copies of query, key, value or out."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import pytest

import jax_fmha
import oracle
from cases import Case
from support import check_close, each_implementation, equations, run_attention

SIZES = [(0, 0), (0, 3), (3, 0), (1, 1), (1, 2), (2, 1), (7, 5), (16, 17), (31, 33), (65, 64), (127, 257)]


@each_implementation
@pytest.mark.parametrize(("T", "S"), SIZES)
def test_any_length(T: int, S: int, implementation: str | None):
    case = Case(
        f"length_{T}_{S}",
        batch=(1,),
        T=T,
        S=S,
        N=2,
        K=1,
        H=8,
        Hv=8,
        is_causal=True,
        offset="scalar",
        dlse=True,
    )
    inputs = case.make(np.float32)
    check_close(run_attention(inputs, implementation), oracle.reference(inputs))


@pytest.mark.parametrize("head_dim", [1, 2, 3, 7, 12, 33, 63, 65, 100, 129, 192, 256, 320])
def test_any_head_dim(head_dim: int):
    case = Case(f"head_dim_{head_dim}", batch=(1,), T=9, S=18, N=2, K=2, H=head_dim, Hv=head_dim + 3)
    inputs = case.make(np.float32)
    check_close(run_attention(inputs, None), oracle.reference(inputs))


def specs(**kwargs: Any) -> list[jax.ShapeDtypeStruct]:
    """Odd sizes, so that padding to anything would show."""
    shapes = (3, 1001, 6, 40), (3, 1013, 2, 40), (3, 1013, 2, 56)
    return [jax.ShapeDtypeStruct(shape, kwargs.get("dtype", np.float32)) for shape in shapes]


def step(q: Any, k: Any, v: Any) -> Any:
    def loss(q: Any, k: Any, v: Any) -> Any:
        return jax_fmha.attention(q, k, v, is_causal=True, query_offset=12).astype(np.float32).sum()

    return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)


def test_no_operation_on_operands_besides_the_kernels():
    """Between the arguments and the two calls nothing touches an array of operand size but what the loss does."""
    jaxpr = jax.make_jaxpr(step)(*specs())
    moving = {
        "pad",
        "concatenate",
        "transpose",
        "copy",
        "gather",
        "dynamic_slice",
        "slice",
        "broadcast_in_dim",
        "rev",
    }
    smallest = min(x.size for x in specs())
    out_size = 3 * 1001 * 6 * 56
    for eqn in equations(jaxpr.jaxpr):
        for x in eqn.invars:
            if getattr(x.aval, "size", 0) >= smallest:
                assert eqn.primitive.name not in moving, eqn
        for x in eqn.outvars:  # the loss broadcasts its cotangent to out's shape
            if eqn.primitive.name == "broadcast_in_dim":
                assert x.aval.size in (out_size,) or x.aval.size < smallest, eqn


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_copies_in_the_compiled_program(dtype: str):
    text = jax.jit(step).lower(*specs(dtype=dtype)).compile().as_text()
    assert 'custom_call_target="jax_fmha_backward"' in text
    element = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    operand = (
        rf"{element}\[3,10(01|13),[26],(40|56)\]\S* (copy|pad|transpose|concatenate|slice|reshape|convert)\("
    )
    assert not re.search(operand, text), re.search(operand, text)
