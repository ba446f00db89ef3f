"""What the table of cases does not show: programs, streams, devices, sizes. Runs every `check_*` on CUDA devices.

    python tests/gpu/behaviour.py [name ...]

Prints one JSON object per line: {"check", "error": null or a traceback, "note"}.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fmha
from cases import BY_NAME, Inputs
from support import calls, check_close, check_equal, run
from table import fitted
from test_promise_02_isolation import LENGTHS, SEGMENTS, isolated, poisoned

attend = functools.partial(jax_fmha.attention, implementation="sm90")


class Skip(Exception):
    """A check that this machine cannot run; the message says what it lacks."""


def normal(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def qkv(B: int, T: int, N: int, K: int, H: int) -> tuple[jax.Array, ...]:
    return normal(0, B, T, N, H), normal(1, B, T, K, H), normal(2, B, T, K, H)


@functools.partial(jax.jit, static_argnames=("deterministic",))
def forward_and_gradients(
    q: Any, k: Any, v: Any, dout: Any, deterministic: bool = False, **options: Any
) -> Any:
    f = functools.partial(attend, is_causal=True, return_lse=True, deterministic=deterministic, **options)
    (out, lse), pullback = jax.vjp(f, q, k, v)
    return out, lse, pullback((dout, jnp.zeros_like(lse)))


# Isolation ------------------------------------------------------------------------------------------------------------


def in_16_bits(inputs: Inputs) -> Inputs:
    def cast(name: str, x: Any) -> Any:
        return x.astype(jnp.bfloat16) if name in ("query", "key", "value", "bias") else x

    operands = {name: cast(name, x) for name, x in inputs.operands.items()}
    return dataclasses.replace(inputs, operands=operands, dout=inputs.dout.astype(jnp.bfloat16))


def check_unused_rows_hold_anything() -> str:
    """NaN in every row without a partner changes nothing. Where only lengths part rows, not one bit; rows of segments
    that a NaN may have reached are computed again, with sums in another order.
    """
    for name in LENGTHS + SEGMENTS:
        inputs = fitted(BY_NAME[name]).make(np.float32)
        pairs = isolated(inputs)
        bad = poisoned(inputs, ~pairs.any(-1), ~pairs.any(-2), np.nan)
        got, want = (run(in_16_bits(x), _attention) for x in (bad, inputs))
        assert np.isfinite(got["out"].astype(np.float32)).all(), name
        for result, x in got.items():
            # Added in the order in which blocks finish, where several share a row of it.
            if name in LENGTHS and result not in ("dquery", "dbias"):
                assert x.tobytes() == want[result].tobytes(), (name, result)
            pair = [y.astype(np.float32) for y in (x, want[result])]
            np.testing.assert_allclose(*pair, rtol=2e-2, atol=2e-2, err_msg=f"{name} {result}")
    return f"{len(LENGTHS + SEGMENTS)} cases"


def _attention(operands: Any, options: Any) -> Any:
    return attend(**operands, **options, return_lse=True)


def check_other_segments_do_not_notice() -> None:
    """One document is all NaN, in query, key, value and dout."""
    for name in ("segments_runs", "segments_shuffled", "segments_negative", "tiles_segments"):
        inputs = fitted(BY_NAME[name]).make(np.float32)
        ids = inputs.operands["segment_ids"]
        rows, keys = ids.q == ids.q[..., 3:4], ids.kv == ids.q[..., 3:4]
        bad = poisoned(inputs, rows, keys, np.nan)
        got, want = (run(in_16_bits(x), _attention) for x in (bad, inputs))
        for result, where in (("out", rows), ("dquery", rows), ("dkey", keys), ("dvalue", keys)):
            good = got[result].astype(np.float32)[~where]
            assert np.isfinite(good).all(), (name, result)
            np.testing.assert_allclose(good, want[result].astype(np.float32)[~where], rtol=2e-2, atol=2e-2)


# Closed forms ---------------------------------------------------------------------------------------------------------


def check_ones() -> None:
    for T, H in ((1000, 64), (4096, 128)):
        ones = jnp.ones((1, T, 4, H), jnp.bfloat16)
        f = functools.partial(attend, return_lse=True)
        (out, lse), pullback = jax.vjp(f, ones, ones, ones)
        dq, dk, dv = pullback((jnp.ones_like(out), jnp.zeros_like(lse)))
        np.testing.assert_array_equal(np.asarray(out, np.float32), 1)
        np.testing.assert_allclose(lse, np.sqrt(H) + np.log(T), rtol=1e-5)
        np.testing.assert_allclose(np.asarray(dv, np.float32), 1, rtol=1e-2)
        np.testing.assert_allclose(np.asarray(dq, np.float32), 0, atol=1e-2)
        np.testing.assert_allclose(np.asarray(dk, np.float32), 0, atol=1e-2)


def check_large_logits_are_ordinary() -> None:
    q = jnp.zeros((1, 3, 1, 8), jnp.bfloat16).at[..., 0].set(1)
    k = (
        jnp.zeros((1, 4, 1, 8), jnp.bfloat16)
        .at[0, :, 0, 0]
        .set(jnp.array([-1e6, -2e6, -1e30, 5], jnp.bfloat16))
    )
    v = jnp.broadcast_to(jnp.array([1.0, 2, 3, 4], jnp.bfloat16)[None, :, None, None], (1, 4, 1, 8))
    mask = jnp.array([[1, 1, 0, 0], [0, 0, 1, 0], [0, 1, 1, 0]], bool)

    def f(v: jax.Array) -> Any:
        return attend(q, k, v, mask=mask, scale=1.0, return_lse=True)

    (out, lse), pullback = jax.vjp(f, v)
    np.testing.assert_array_equal(np.asarray(out[0, :, 0, 0], np.float32), [1, 3, 2])
    np.testing.assert_allclose(lse[0, 0], np.asarray(k[0, jnp.array([0, 2, 1]), 0, 0], np.float32), rtol=1e-6)
    (dv,) = pullback((jnp.ones_like(out), jnp.zeros_like(lse)))
    np.testing.assert_array_equal(np.asarray(dv[0, :, 0, 0], np.float32), [1, 1, 1, 0])


def check_large_logits_over_many_tiles() -> None:
    """A maximum that stays rescales nothing, from the first tile of keys to the last."""
    S = 4096
    k = jnp.zeros((1, S, 1, 128), jnp.bfloat16).at[..., 0].set(-1003520)
    q = jnp.zeros((1, 64, 1, 128), jnp.bfloat16).at[..., 0].set(1)
    for first in (True, False):
        seen = (jnp.arange(S) < S // 2) == first
        v = jnp.broadcast_to(seen.astype(jnp.bfloat16)[None, :, None, None], (1, S, 1, 128))
        for scale in (1.0, 1e-5, 1.1e-4, 1.3e-2):
            out = attend(q, k, v, scale=scale)
            np.testing.assert_array_equal(np.asarray(out, np.float32), 0.5, err_msg=str((first, scale)))


def check_dead_rows_do_not_notice_nan() -> None:
    """Rows past their length have gradient 0 beside a key that is NaN to the others."""
    q, k, v = normal(0, 2, 300, 4, 64), normal(1, 2, 300, 4, 64), normal(2, 2, 300, 4, 64)
    lengths = jnp.array([200, 300], jnp.int32)
    for at in ((k.at[0, 7].set(jnp.nan), v), (k, v.at[0, 7].set(jnp.nan))):
        out, pullback = jax.vjp(lambda q, k, v: attend(q, k, v, query_seq_lengths=lengths), q, *at)
        dq = np.asarray(pullback(jnp.ones_like(out))[0], np.float32)
        assert np.isnan(dq[0, :200]).any()
        np.testing.assert_array_equal(dq[0, 200:], 0)
        assert np.isfinite(dq[1]).all()


# Programs -------------------------------------------------------------------------------------------------------------


def _decode(q: jax.Array, k: jax.Array, v: jax.Array, length: jax.Array) -> jax.Array:
    return attend(q, k, v, is_causal=True, query_offset=length - 1, key_value_seq_lengths=length)


def check_scan_of_changing_lengths() -> None:
    """Captured once as a command buffer, replayed with other lengths."""
    qs, k, v = normal(0, 40, 1, 8, 128), normal(1, 512, 2, 128), normal(2, 512, 2, 128)
    lengths = jnp.arange(40, dtype=jnp.int32) * 13 + 1
    step = jax.jit(_decode)
    want = np.stack([np.asarray(step(q, k, v, n)) for q, n in zip(qs, lengths, strict=True)])
    scan = jax.jit(
        lambda qs, k, v, n: jax.lax.scan(lambda c, x: (c, _decode(x[0], k, v, x[1])), 0, (qs, n))[1]
    )
    for _ in range(3):
        check_equal(np.asarray(scan(qs, k, v, lengths)), want)
        lengths, want = lengths[::-1], None
        want = np.stack([np.asarray(step(q, k, v, n)) for q, n in zip(qs, lengths, strict=True)])


def check_while_that_feeds_itself() -> None:
    """A loop of unknown length whose result is the next query, as generation has it."""
    q, k, v = normal(0, 1, 8, 128), normal(1, 512, 2, 128), normal(2, 512, 2, 128)

    @jax.jit
    def loop(q: Any, k: Any, v: Any, stop: Any) -> Any:
        return jax.lax.while_loop(
            lambda s: s[0] < stop, lambda s: (s[0] + 1, _decode(s[1], k, v, s[0])), (jnp.int32(1), q)
        )[1]

    step = jax.jit(_decode)
    for stop in (3, 20, 7):
        want = q
        for n in range(1, stop):
            want = step(want, k, v, jnp.int32(n))
        check_equal(np.asarray(loop(q, k, v, jnp.int32(stop))), np.asarray(want))


def check_scan_of_training_steps() -> None:
    q, k, v = qkv(2, 640, 4, 2, 128)

    def step(carry: Any, _: Any) -> Any:
        _, _, (dq, dk, dv) = forward_and_gradients(*carry, carry[0], deterministic=True)
        return tuple(x + 0.01 * d for x, d in zip(carry, (dq, dk, dv), strict=True)), None

    got, _ = jax.jit(lambda c: jax.lax.scan(step, c, length=5))((q, k, v))
    want = (q, k, v)
    for _ in range(5):
        want, _ = jax.jit(step)(want, None)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), atol=2e-2)


def check_first_call_of_a_process_inside_a_graph() -> None:
    """The library is loaded while XLA captures."""
    program = (
        "import behaviour as b, numpy as np, jax, jax.numpy as jnp\n"
        "q = b.normal(0, 6, 1, 8, 128); k = b.normal(1, 512, 2, 128)\n"
        "f = jax.jit(lambda q, k, n: jax.lax.scan(lambda c, x: (c, b._decode(x[0], k, k, x[1])), 0, (q, n))[1])\n"
        "out = f(q, k, jnp.arange(1, 7))\n"
        "assert np.isfinite(np.asarray(out, np.float32)).all()\n"
    )
    _fresh(
        program,
        XLA_FLAGS="--xla_gpu_graph_min_graph_size=1 --xla_gpu_enable_command_buffer=+WHILE,+CUSTOM_CALL",
    )


def _fresh(program: str, *args: str, **environment: str) -> None:
    env = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.02"} | environment
    done = subprocess.run(
        [sys.executable, "-c", program, *args], env=env, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr[-2000:]


def check_exported_program_in_another_process() -> None:
    """Where nothing of ours is lowered, only imported."""
    q, k, v = qkv(2, 320, 4, 2, 128)
    f = jax.jit(functools.partial(attend, is_causal=True))
    exported = jax.export.export(
        f, disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(f"jax_fmha_{p}") for p in ("forward",)]
    )(q, k, v)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "program").write_bytes(exported.serialize())
        np.save(Path(folder, "want"), np.asarray(f(q, k, v), np.float32))
        program = (
            "import sys, pathlib, jax, numpy as np, jax_fmha, behaviour as b\n"
            "folder = pathlib.Path(sys.argv[1])\n"
            "call = jax.export.deserialize(bytearray((folder / 'program').read_bytes())).call\n"
            "got = np.asarray(call(*b.qkv(2, 320, 4, 2, 128)), np.float32)\n"
            "np.testing.assert_array_equal(got, np.load(folder / 'want.npy'))\n"
        )
        _fresh(program, folder)


def check_vmap() -> None:
    q, k, v = normal(0, 3, 2, 200, 4, 64), normal(1, 2, 200, 2, 64), normal(2, 3, 2, 200, 2, 64)
    f = functools.partial(attend, is_causal=True)
    got = jax.jit(jax.vmap(f, in_axes=(0, None, 0)))(q, k, v)
    want = jnp.stack([jax.jit(f)(q[i], k, v[i]) for i in range(3)])
    check_equal(np.asarray(got), np.asarray(want))
    loss = lambda q, k, v: f(q, k, v).astype(jnp.float32).sum()  # noqa: E731
    grads = jax.jit(jax.vmap(jax.grad(loss, (0, 1, 2)), in_axes=(0, None, 0)))(q, k, v)
    for i in range(3):
        for got, want in zip(grads, jax.jit(jax.grad(loss, (0, 1, 2)))(q[i], k, v[i]), strict=True):
            np.testing.assert_allclose(
                np.asarray(got[i], np.float32), np.asarray(want, np.float32), atol=3e-2
            )


def check_donation() -> None:
    q, k, v = qkv(2, 512, 4, 4, 64)
    want = np.asarray(jax.jit(functools.partial(attend, is_causal=True))(q, k, v))
    f = jax.jit(functools.partial(attend, is_causal=True), donate_argnums=0)
    check_equal(np.asarray(f(q + 0, k, v)), want)
    f = jax.jit(lambda q, k, v: attend(q, k, v, is_causal=True), donate_argnums=(0, 1, 2))
    check_equal(np.asarray(f(q + 0, k + 0, v + 0)), want)


def check_threads() -> None:
    """Programs enqueued by several threads at once."""
    inputs = [(*qkv(1, T, 4, 2, 128), normal(3, 1, T, 4, 128)) for T in (300, 1000, 1500, 2000)]
    want = [jax.tree.map(np.asarray, forward_and_gradients(*x, deterministic=True)) for x in inputs]

    def work(i: int) -> None:
        got = jax.tree.map(np.asarray, forward_and_gradients(*inputs[i % 4], deterministic=True))
        check_equal(got, want[i % 4])

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(64)))


def check_determinism() -> str:
    """Also where key tiles skip query tiles, so that turns are passed on by those with nothing to add."""
    runs, T = 100, 1500
    random = np.random.RandomState(0)
    packed = jnp.asarray(np.sort(random.randint(0, 9, (2, T))), jnp.int32)
    blocks = (np.kron(random.rand(12, 12) < 0.4, np.ones((125, 125), bool)) | np.eye(T, dtype=bool))[None]
    options: dict[str, dict[str, Any]] = {
        "causal": {},
        "packed": {"segment_ids": packed},
        "shuffled segments": {"segment_ids": jnp.asarray(random.randint(0, 5, (2, T)), jnp.int32)},
        "blocks": {"mask": jnp.asarray(blocks)},
        "tiles": {"mask": jax_fmha.TileMask.from_array(blocks), "segment_ids": packed},
    }
    for H in (64, 128, 256):
        x = (*qkv(2, T, 8, 2, H), normal(3, 2, T, 8, H))
        for name, more in options.items():
            want = jax.tree.map(np.asarray, forward_and_gradients(*x, deterministic=True, **more))
            for _ in range(runs):
                got = jax.tree.map(np.asarray, forward_and_gradients(*x, deterministic=True, **more))
                check_equal(got, want)
            free = forward_and_gradients(*x, **more)[2]
            for a, b in zip(free, want[2], strict=True):
                a, b = (np.asarray(x, np.float32) for x in (a, b))
                np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2, err_msg=f"{name} {H}")
    return f"{runs} runs of {len(options)} masks, head_dim 64, 128 and 256"


# Masks ----------------------------------------------------------------------------------------------------------------


def check_tile_mask_is_its_dense_mask() -> str:
    """Tiles of any size, shared or of each head and entry. lse tells every pair; out and gradients may be rounded on
    another way, since a tile of the kernel that is whole may lie in tiles of the mask that are not.
    """
    T, S, N = 700, 900, 4
    random = np.random.RandomState(1)
    ran = 0
    for H in (64, 128, 192):
        x = (normal(0, 2, T, N, H), normal(1, 2, S, 2, H), normal(2, 2, S, 2, H), normal(3, 2, T, N, H))
        for shape, tile in (((1,), (128, 128)), ((N,), (48, 24)), ((2, 1), (256, 512)), ((2, N), (64, 128))):
            keep = np.kron(random.rand(*shape, 14, 15) < 0.3, np.ones((50, 60), bool))
            keep |= random.rand(*shape, 14, 15).repeat(50, -2).repeat(60, -1) * random.rand(T, S) > 0.7
            mask, tiles = jnp.asarray(keep), jax_fmha.TileMask.from_array(keep, tile)
            got, want = (forward_and_gradients(*x, deterministic=True, mask=m) for m in (tiles, mask))
            check_close(got[1], want[1])
            check_close(got, want, float(jnp.finfo(jnp.bfloat16).eps))
            ran += 1
    return f"{ran} masks"


def check_splash_masks() -> str:
    """Masks of splash attention that reach the kernels as tiles, and some that do as structure."""
    import test_tpu_splash as splash

    splash.T = 640  # several tiles of the kernels
    names = {*splash.MASKS} - splash.STRUCTURED | {"alternating", "unevenly_grouped", "reordered_chunks"}
    arrays = {name: x.astype(jnp.bfloat16) for name, x in splash.operands(sinks=False).items()}
    single = {name: x.astype(jnp.float32) for name, x in arrays.items()}
    for name in sorted(names):
        f = splash.ours(splash.MASKS[name](splash.our_mask))
        assert calls(jax.jit(lambda a, f=f: f(**a)).lower(arrays).compile())["forward"] >= 1, name
        with jax.default_matmul_precision("highest"):
            want = splash.results(splash.reference(splash.MASKS[name](splash.original_mask)), single)
        got = splash.results(f, arrays)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            a, b = (np.asarray(x, np.float32) for x in (a, b))
            np.testing.assert_allclose(a, b, rtol=3e-2, atol=3e-2 * np.abs(b).max(), err_msg=name)
    return ", ".join(sorted(names))


def check_remat_saves_by_name() -> None:
    q, k, v = qkv(1, 512, 4, 2, 128)
    policy = jax.checkpoint_policies.save_only_these_names(*jax_fmha.CHECKPOINT_NAMES)
    loss = lambda f: lambda q: f(q, k, v).astype(jnp.float32).sum()  # noqa: E731
    f = functools.partial(attend, is_causal=True, deterministic=True)
    got = jax.jit(jax.grad(loss(jax.checkpoint(f, policy=policy))))(q)
    check_equal(np.asarray(got), np.asarray(jax.jit(jax.grad(loss(f)))(q)))


# Refusals -------------------------------------------------------------------------------------------------------------


def check_refusals_name_the_kernel() -> None:
    q = jnp.ones((1, 64, 2, 64), jnp.float32)
    for implementation in (None, "sm90"):
        with pytest.raises(
            NotImplementedError, match=r'(?s)sm90_forward: dtype float32.*implementation="xla"'
        ):
            jax_fmha.attention(q, q, q, implementation=implementation)


# Sizes ----------------------------------------------------------------------------------------------------------------


def check_70000_batch_entries_and_heads() -> None:
    for shape in ((70_000, 16, 1, 64), (1, 16, 70_000, 64)):
        q, k, v = (normal(i, *shape) for i in range(3))
        x = forward_and_gradients(q, k, v, q)
        take = (slice(-2, None),) if shape[0] > 1 else (slice(None), slice(None), slice(-2, None))
        last = forward_and_gradients(*(y[take] for y in (q, k, v, q)))
        check_equal(np.asarray(x[0][take]), np.asarray(last[0]))
        np.testing.assert_allclose(
            np.asarray(x[2][1][take], np.float32), np.asarray(last[2][1], np.float32), atol=2e-2
        )


def check_more_than_2_31_elements() -> None:
    """A window keeps it short; rows at the end equal those of a small call."""
    T, N = 2**19 + 64, 32
    if jax.local_devices()[0].memory_stats()["bytes_limit"] < 40 * 2**30:
        raise Skip("40 GiB of memory")
    q, k, v = normal(0, 1, T, N, 128), normal(1, 1, T, 8, 128), normal(2, 1, T, 8, 128)
    assert q.size > 2**31
    f = jax.jit(functools.partial(attend, is_causal=True, local_window_size=(255, 0)))
    out = f(q, k, v)
    end = f(*(x[:, -1024:] for x in (q, k, v)))
    np.testing.assert_allclose(
        np.asarray(out[:, -512:], np.float32), np.asarray(end[:, -512:], np.float32), atol=2e-2
    )


def check_100000_documents() -> None:
    """Of one token each: out is value."""
    T = 100_000
    q, k, v = qkv(1, T, 2, 1, 64)
    ids = jnp.arange(T, dtype=jnp.int32)[::-1][None]
    out = jax.jit(lambda *x: attend(*x, segment_ids=ids, is_causal=True))(q, k, v)
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.repeat(np.asarray(v, np.float32), 2, 2))


# Cost and devices -----------------------------------------------------------------------------------------------------


def check_host_time() -> str:
    """Time to enqueue a call that the device finishes at once, next to that of an addition."""
    q, k, v = qkv(1, 128, 1, 1, 64)
    times = {}
    for name, f in (("attention", attend), ("addition", lambda q, k, v: q + k)):
        f = jax.jit(f)
        f(q, k, v).block_until_ready()
        samples = []
        for _ in range(30):
            begin = time.perf_counter()
            for _ in range(20):
                out = f(q, k, v)
            samples.append((time.perf_counter() - begin) / 20)
            out.block_until_ready()
        times[name] = 1e6 * float(np.median(samples))
    return ", ".join(f"{name} {t:.1f} us" for name, t in times.items())


def check_every_device_alone() -> str:
    devices = jax.local_devices()
    want = None
    for device in devices[::-1]:
        x = [jax.device_put(y, device) for y in (*qkv(2, 700, 8, 2, 128), normal(3, 2, 700, 8, 128))]
        got = jax.tree.map(np.asarray, forward_and_gradients(*x, deterministic=True))
        want = want or got
        check_equal(got, want)
    return f"{len(devices)} devices"


def check_sharded_equals_one_device() -> None:
    if len(jax.local_devices()) < 2:
        raise Skip("two GPUs")
    x = (*qkv(2, 700, 8, 2, 128), normal(3, 2, 700, 8, 128))
    want = jax.tree.map(np.asarray, forward_and_gradients(*x, deterministic=True))
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    for spec in (jax.P("x"), jax.P(None, None, "x")):
        sharded = [jax.device_put(y, jax.NamedSharding(mesh, spec)) for y in x]
        compiled = forward_and_gradients.lower(*sharded, deterministic=True).compile()
        assert "all-gather" not in compiled.as_text()
        check_equal(jax.tree.map(np.asarray, compiled(*sharded)), want)


def main() -> None:
    wanted = sys.argv[1:]
    for name, check in list(globals().items()):
        # Those of this file, not the comparisons that it imports.
        if not name.startswith("check_") or check.__module__ != __name__:
            continue
        if wanted and name not in wanted:
            continue
        begin = time.perf_counter()
        result: dict[str, Any] = {"check": name.removeprefix("check_"), "error": None, "note": ""}
        try:
            result["note"] = check() or ""
        except Skip as missing:
            result["note"] = f"not run, needs {missing}"
        except Exception:
            result["error"] = traceback.format_exc()[-2500:]
        result["seconds"] = round(time.perf_counter() - begin, 2)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
