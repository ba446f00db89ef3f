"""Trains a small byte-level language model on the source code of Python's standard library; then it writes.

    python examples/train_packed_lm.py            # under three minutes on two CPU cores
    python examples/train_packed_lm.py --compare  # also with plain XLA einsums; both curves in one picture

Documents of any length are packed into rows. `segment_ids` and `is_causal`, two arguments of
`jax_fmha.attention`, keep them apart and in order: no mask is built, and a row of short documents costs what the
documents do.
Generation calls the same function on a key/value cache, with `query_offset` and `key_value_seq_lengths`.

Writes parameters.npz, loss.csv and loss.png to --out. Exit code: 0, 2 for bad input, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import functools
import io
import os
import re
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

try:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx
    from matplotlib.figure import Figure

    from jax_fmha import attention
except ImportError as error:
    sys.exit(f"train_packed_lm: {error}. Install what this example needs with: pip install '.[examples]'")

VOCABULARY = 256  # bytes
EDGE = 0  # the byte that opens and closes every document; text has no NUL
PADDING = -1  # segment id of the unused end of a row


class BadInput(Exception):
    """The user's mistake; the message says what to do."""


# Corpus ----------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """Documents packed into rows; every array is int32 `[rows, row_length]`."""

    tokens: np.ndarray
    positions: np.ndarray  # inside the document
    segment_ids: np.ndarray  # number of the document in its row, or PADDING

    def take(self, index: np.ndarray | slice) -> Rows:
        return Rows(*(x[index] for x in self))


def source_files(paths: list[Path]) -> list[Path]:
    """The files named and the *.py files below the directories named; by default, of the standard library."""
    skip: set[str] = set()
    if not paths:
        paths = [Path(sysconfig.get_path("stdlib"))]
        # Other people's packages, tests (some with invalid source on purpose), and tables rather than code.
        skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
    files = []
    for path in paths:
        below = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        files += [file for file in below if not skip.intersection(file.relative_to(path).parts)]
    return files


def read_documents(paths: list[Path]) -> list[bytes]:
    """The top-level definitions of all files: what two blank lines separate is a document of its own."""
    documents = []
    for file in source_files(paths):
        try:
            text = file.read_bytes()
        except OSError as error:
            raise BadInput(f"cannot read {file}: {error.strerror}") from error
        text = text.replace(b"\0", b"").replace(b"\r\n", b"\n")
        documents += [part.strip(b"\n") + b"\n" for part in re.split(rb"\n{3,}", text) if part.strip()]
    if not documents:
        where = ", ".join(map(str, paths)) or sysconfig.get_path("stdlib")
        raise BadInput(f"no text in {where}; name files or directories of *.py files with --corpus")
    return documents


def pack(documents: list[bytes], row_length: int) -> Rows:
    """First fit, longest document first; documents longer than a row are cut."""
    edge = bytes([EDGE])
    pieces = []
    for document in documents:
        whole = edge + document + edge
        pieces += [whole[start : start + row_length] for start in range(0, len(whole), row_length)]
    pieces.sort(key=len, reverse=True)

    rows = Rows(*(np.full((len(pieces), row_length), fill, np.int32) for fill in (EDGE, 0, PADDING)))
    used = np.zeros(len(pieces), np.int64)
    count = np.zeros(len(pieces), np.int64)
    for piece in pieces:
        row = np.argmax(used + len(piece) <= row_length)
        place = slice(used[row], used[row] + len(piece))
        rows.tokens[row, place] = np.frombuffer(piece, np.uint8)
        rows.positions[row, place] = np.arange(len(piece))
        rows.segment_ids[row, place] = count[row]
        used[row] += len(piece)
        count[row] += 1
    return rows.take(slice(np.count_nonzero(used)))


def batches(rows: Rows, batch: int, seed: int) -> Iterator[Rows]:
    """Batches of `batch` rows for ever, reshuffled in every epoch."""
    random = np.random.default_rng(seed)
    order = np.zeros(0, np.int64)
    while True:
        while len(order) < batch:
            order = np.concatenate([order, random.permutation(len(rows.tokens))])
        yield rows.take(order[:batch])
        order = order[batch:]


# Model -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config:
    width: int
    layers: int
    heads: int  # query heads
    kv_heads: int  # key/value heads, each shared by heads // kv_heads query heads
    head_dim: int
    implementation: str | None  # None is the native kernel
    dtype: str = "float32"  # of query, key and value; all else is float32


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary position embedding (Su et al., arXiv 2104.09864) of x `[B, T, N, H]` by positions `[B, T]`."""
    half = x.shape[-1] // 2
    angle = positions[..., None, None] * 10_000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def linear(inputs: int, outputs: int, rngs: nnx.Rngs, *, zeros: bool = False) -> nnx.Linear:
    """Without bias. What adds to the residual stream starts from zeros, so that a fresh block is the identity."""
    init = nnx.initializers.zeros if zeros else nnx.initializers.lecun_normal()
    return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=init, rngs=rngs)


class Attention(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.config = config
        heads = config.heads + 2 * config.kv_heads
        self.qkv = linear(config.width, heads * config.head_dim, rngs)
        self.out = linear(config.heads * config.head_dim, config.width, rngs, zeros=True)

    def __call__(self, x, positions, segment_ids=None, cache=None):
        """x `[B, T, width]` -> (the same, cache).

        A cache is (k, v), each `[B, capacity, kv_heads, head_dim]`. Its one document goes on with x.
        """
        c = self.config
        qkv = self.qkv(x).reshape(*x.shape[:2], -1, c.head_dim)
        q, k, v = jnp.split(qkv, [c.heads, c.heads + c.kv_heads], axis=2)
        q, k = rotate(q, positions), rotate(k, positions)
        q, k, v = (part.astype(c.dtype) for part in (q, k, v))
        attend = functools.partial(attention, is_causal=True, implementation=c.implementation)
        if cache is None:
            out = attend(q, k, v, segment_ids=segment_ids)
        else:
            start = positions[0, 0]
            k, v = cache = tuple(
                jax.lax.dynamic_update_slice_in_dim(old, new, start, axis=1)
                for old, new in zip(cache, (k, v), strict=True)
            )
            out = attend(q, k, v, query_offset=start, key_value_seq_lengths=start + x.shape[1])
        return self.out(out.reshape(*x.shape[:2], -1).astype(x.dtype)), cache


class Block(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.up = linear(config.width, 4 * config.width, rngs)
        self.down = linear(4 * config.width, config.width, rngs, zeros=True)

    def __call__(self, x, positions, segment_ids=None, cache=None):
        attended, cache = self.attention(self.attention_norm(x), positions, segment_ids, cache)
        x = x + attended
        return x + self.down(jnp.square(nnx.relu(self.up(self.mlp_norm(x))))), cache


class Transformer(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.config = config
        self.embed = nnx.Embed(VOCABULARY, config.width, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.logits = linear(config.width, VOCABULARY, rngs)

    def __call__(self, rows: Rows) -> jax.Array:
        """Packed rows -> logits of the next byte, `[B, T, VOCABULARY]`."""
        x = self.embed(rows.tokens)
        for block in self.blocks:
            x, _ = block(x, rows.positions, rows.segment_ids)
        return self.logits(self.norm(x))

    def empty_cache(self, batch: int, capacity: int):
        """(k, v) of every layer, zeros; 2 * layers buffers, because `extend` donates each of them."""
        shape = (batch, capacity, self.config.kv_heads, self.config.head_dim)
        return [
            (jnp.zeros(shape, self.config.dtype), jnp.zeros(shape, self.config.dtype)) for _ in self.blocks
        ]

    def extend(self, tokens: jax.Array, start: jax.Array, cache):
        """Tokens `[B, T]` after the `start` ones in the cache -> (last logits `[B, VOCABULARY]`, cache)."""
        positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1]), tokens.shape)
        x = self.embed(tokens)
        longer = []
        for block, layer in zip(self.blocks, cache, strict=True):
            x, layer = block(x, positions, cache=layer)
            longer.append(layer)
        return self.logits(self.norm(x[:, -1])), longer


def parameters(model: Transformer) -> dict[str, np.ndarray]:
    """{path/of/the/parameter: values}."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x) for path, x in leaves}


# Training --------------------------------------------------------------------------------------------------


def mean_loss(model: Transformer, rows: Rows) -> jax.Array:
    """Cross entropy in nats per byte, over all bytes that follow another one of the same document."""
    losses = optax.softmax_cross_entropy_with_integer_labels(model(rows)[:, :-1], rows.tokens[:, 1:])
    ids, following = rows.segment_ids[:, :-1], rows.segment_ids[:, 1:]
    counted = (ids == following) & (ids != PADDING)
    return jnp.sum(losses, where=counted) / jnp.sum(counted)


@nnx.jit
def train_step(model: Transformer, optimizer: nnx.Optimizer, rows: Rows) -> jax.Array:
    loss, grads = nnx.value_and_grad(mean_loss)(model, rows)
    optimizer.update(model, grads)
    return loss


evaluate = nnx.jit(mean_loss)


class Run(NamedTuple):
    model: Transformer
    losses: list[float]  # in nats per byte, of every training step
    tokens_per_second: float  # without the first step, which compiles
    held_out_loss: float


@contextlib.contextmanager
def interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Ctrl-C waits until what this yields is called; a second one does not.

    KeyboardInterrupt may leave JAX as another error when it is raised inside.
    """
    asked = []

    def check() -> None:
        if asked:
            raise KeyboardInterrupt

    def note(*_: Any) -> None:
        check()
        asked.append(True)

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored, or somebody else's
        yield check
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


def train(label: str, args: argparse.Namespace, training: Rows, held_out: Rows) -> Run:
    """Trains a fresh model; the same seed gives the same initial parameters and the same batches."""
    implementation = None if label == "native" else label
    config = Config(
        args.width, args.layers, args.heads, args.kv_heads, args.head_dim, implementation, args.dtype
    )
    model = Transformer(config, nnx.Rngs(args.seed))
    warmup = max(1, args.steps // 10)
    schedule = optax.warmup_cosine_decay_schedule(
        args.learning_rate / warmup, args.learning_rate, warmup, args.steps
    )
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=0.1)
    optimizer = nnx.Optimizer(model, optax.chain(optax.clip_by_global_norm(1.0), adamw), wrt=nnx.Param)

    progress = Progress(label, args.steps)
    losses: list[float] = []
    with interrupts_between_steps() as check_interrupt:
        for rows in batches(training, args.batch, args.seed):
            losses.append(float(train_step(model, optimizer, rows)))
            progress.step(losses[-1], tokens=np.count_nonzero(rows.segment_ids != PADDING))
            check_interrupt()
            if len(losses) == args.steps:
                break
    tokens_per_second = progress.tokens_per_second()
    parts = range(0, len(held_out.tokens), args.batch)
    held_out_loss = np.mean([float(evaluate(model, held_out.take(slice(i, i + args.batch)))) for i in parts])
    return Run(model, losses, tokens_per_second, float(held_out_loss))


class Progress:
    """One line that redraws itself on a terminal; twenty plain lines elsewhere."""

    def __init__(self, label: str, steps: int):
        self.label, self.steps, self.done, self.tokens = label, steps, 0, 0
        self.begin = time.perf_counter()
        self.terminal = sys.stdout.isatty()

    def tokens_per_second(self) -> float:
        return self.tokens / (time.perf_counter() - self.begin)

    def step(self, loss: float, tokens: int) -> None:
        self.done += 1
        if self.done == 1:
            self.begin = time.perf_counter()
            speed = "compiled"
        else:
            self.tokens += tokens
            speed = f"{self.tokens_per_second():,.0f} tokens/s"
        filled = 24 * self.done // self.steps
        bar = "█" * filled + "░" * (24 - filled)
        line = f"{self.label:>6} {bar} {self.done:>4}/{self.steps}  loss {loss:6.4f}  {speed}"
        last = self.done == self.steps
        if self.terminal:
            print(f"\r{line:<90}", end="\n" if last else "", flush=True)
        elif last or self.done == 1 or self.done % max(1, self.steps // 20) == 0:
            print(line, flush=True)


# Generation ------------------------------------------------------------------------------------------------


@functools.partial(nnx.jit, donate_argnames="cache")
def extend(model: Transformer, tokens: jax.Array, start: jax.Array, cache):
    return model.extend(tokens, start, cache)


def generate(model: Transformer, prompt: bytes, length: int, temperature: float, seed: int) -> bytes:
    """Continues the prompt by at most `length` bytes, each one sampled (temperature 0: the likeliest)."""
    tokens = np.frombuffer(bytes([EDGE]) + prompt, np.uint8).astype(np.int32)
    cache = model.empty_cache(batch=1, capacity=len(tokens) + length)
    random = np.random.default_rng(seed)
    written = bytearray()
    start = 0
    while len(written) < length:
        logits, cache = extend(model, tokens[None], jnp.int32(start), cache)
        start += len(tokens)
        logits = np.asarray(logits[0], np.float64)
        if temperature > 0:
            logits = logits / temperature + random.gumbel(size=VOCABULARY)  # the Gumbel-max trick
        token = int(np.argmax(logits))
        if token == EDGE:
            break
        written.append(token)
        tokens = np.array([token], np.int32)
    return bytes(written)


# Results ---------------------------------------------------------------------------------------------------


def draw(runs: dict[str, Run]) -> Figure:
    """Loss curves on the left; with several runs, their speed on the right."""
    colours = {"native": "#1b6ca8", "xla": "#f2a65a"}
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    if len(runs) > 1:
        curves, speeds = figure.subplots(1, 2, width_ratios=(3, 1))
        heights = [run.tokens_per_second for run in runs.values()]
        bars = speeds.bar(list(runs), heights, color=[colours[label] for label in runs])
        speeds.bar_label(bars, fmt="{:,.0f}")
        speeds.set(title="tokens/s")
    else:
        curves = figure.subplots()
    # Equal curves hide each other, so the one below is drawn wider.
    for width, (label, run) in zip((1.2, 4.0), runs.items(), strict=False):
        steps = np.arange(1, len(run.losses) + 1)
        text = f"{label}: held-out loss {run.held_out_loss:.3f}, {run.tokens_per_second:,.0f} tokens/s"
        curves.plot(steps, run.losses, lw=width, color=colours[label], label=text, zorder=3 - width / 4)
    curves.set(xlabel="step", ylabel="loss, nats per byte", title="Packed language model")
    curves.grid(alpha=0.3)
    curves.legend()
    return figure


def save(out: Path, runs: dict[str, Run]) -> None:
    """Writes each file under another name first: a file in `out` is complete or absent."""
    arrays, table, picture = io.BytesIO(), io.StringIO(), io.BytesIO()
    np.savez(arrays, **parameters(next(iter(runs.values())).model))
    losses = zip(*(run.losses for run in runs.values()), strict=True)
    csv.writer(table).writerows([["step", *runs], *([i, *row] for i, row in enumerate(losses, 1))])
    draw(runs).savefig(picture, dpi=150, format="png")
    contents = {
        "parameters.npz": arrays.getvalue(),
        "loss.csv": table.getvalue().encode(),
        "loss.png": picture.getvalue(),
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            partial = out / f".{name}.partial"
            try:
                partial.write_bytes(content)
                os.replace(partial, out / name)
            finally:
                partial.unlink(missing_ok=True)
    except OSError as error:
        raise BadInput(f"cannot write to --out {out}: {error.strerror}") from error


def check_writable(out: Path) -> None:
    """Says before the training, not after it, that the results cannot be written."""
    existing = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise BadInput(f"--out {out}: {existing} is not a directory")
    if not os.access(existing, os.W_OK):
        raise BadInput(f"--out {out}: no permission to write in {existing}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    option = parser.add_argument
    option("--out", type=Path, default=Path("runs/packed_lm"), help="directory for the results (%(default)s)")
    option("--corpus", type=Path, nargs="+", default=[], help="files or directories (the standard library)")
    option("--implementation", choices=("native", "xla"), default="native", help="of attention (%(default)s)")
    option("--compare", action="store_true", help="train with both implementations")
    option("--steps", type=int, default=300)
    option("--batch", type=int, default=1, help="rows per step (%(default)s)")
    option("--row-length", type=int, default=2048, help="bytes per row (%(default)s)")
    option("--width", type=int, default=128)
    option("--layers", type=int, default=4)
    option("--heads", type=int, default=4, help="query heads (%(default)s)")
    option("--kv-heads", type=int, default=2, help="key/value heads (%(default)s)")
    option("--head-dim", type=int, default=32)
    option(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32" if jax.default_backend() == "cpu" else "bfloat16",
        help="of query, key and value; the GPU kernels take 16 bits (%(default)s)",
    )
    option("--learning-rate", type=float, default=1e-2)
    option("--seed", type=int, default=0)
    option("--prompt", default="def read_file(path):\n", help="what generation continues")
    option("--length", type=int, default=400, help="bytes to generate (%(default)s)")
    option("--temperature", type=float, default=0.5, help="0 takes the likeliest byte (%(default)s)")
    args = parser.parse_args()
    for name in ("steps", "batch", "row_length", "width", "layers", "heads", "kv_heads", "head_dim"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.heads % args.kv_heads:
        parser.error(f"--heads {args.heads} must be a multiple of --kv-heads {args.kv_heads}")
    if args.head_dim % 2:
        parser.error("--head-dim must be even: rotary embeddings turn pairs")
    return args


def load_rows(args: argparse.Namespace) -> tuple[Rows, Rows]:
    """(training rows, held-out rows) of the corpus, both at least a batch."""
    documents = read_documents(args.corpus)
    rows = pack(documents, args.row_length)
    count = len(rows.tokens)
    if count < 2 * args.batch:
        raise BadInput(
            f"the corpus fills {count} rows of {args.row_length} bytes, but training and evaluation need "
            f"{args.batch} each; give more text, or lower --row-length or --batch"
        )
    size = sum(map(len, documents))
    print(f"{len(documents):,} documents, {size:,} bytes, packed into {count:,} rows of {args.row_length:,}")
    rows = rows.take(np.random.default_rng(args.seed).permutation(count))
    held_out = args.batch * min(8, max(1, count // (20 * args.batch)))
    return rows.take(slice(held_out, None)), rows.take(slice(held_out))


def main() -> int:
    args = arguments()
    saved = False
    try:
        check_writable(args.out)
        training, held_out = load_rows(args)
        runs = {}
        for label in ("native", "xla") if args.compare else (args.implementation,):
            run = runs[label] = train(label, args, training, held_out)
            print(
                f"{label}: held-out loss {run.held_out_loss:.3f} nats per byte, "
                f"{run.tokens_per_second:,.0f} tokens/s"
            )
        if args.compare:
            apart = np.max(np.abs(np.subtract(*(run.losses for run in runs.values()))))
            print(f"largest difference between the two curves: {apart:.1e}")
        save(args.out, runs)
        saved = True
        print(f"parameters.npz, loss.csv and loss.png are in {args.out}\n")

        prompt = args.prompt.encode()
        model = next(iter(runs.values())).model
        text = prompt + generate(model, prompt, args.length, args.temperature, args.seed)
        print(text.decode(errors="replace"))
    except BadInput as error:
        print(f"train_packed_lm: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        what = f"the files in {args.out} are complete" if saved else "nothing was written"
        print(f"\ntrain_packed_lm: interrupted; {what}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
