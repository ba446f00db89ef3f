"""The examples run as a reader runs them, and the training script fails as it promises."""

from __future__ import annotations

import csv
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import jax_fmha

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
TRAIN = EXAMPLES / "train_packed_lm.py"
MAX_LINES = {
    "self_attention.py": 15,
    "packed_segments.py": 60,
    "grouped_query.py": 60,
    "sliding_window.py": 60,
    "merge_by_lse.py": 60,
    "sharded.py": 60,
    "flax_linen.py": 90,
    "flax_nnx.py": 100,
    "port_tpu_model.py": 200,
}
RESULTS = ["loss.csv", "loss.png", "parameters.npz"]
TINY = [
    *("--steps=40", "--batch=2", "--row-length=192", "--width=32", "--layers=2", "--learning-rate=0.01"),
    *("--heads=4", "--kv-heads=2", "--head-dim=8", "--length=20", "--prompt=def"),
]

pytest.importorskip("flax")
pytest.importorskip("optax")
pytest.importorskip("matplotlib")


def environment(*first: Path) -> dict[str, str]:
    """Lets a subprocess import the jax_fmha under test, and modules in `first` before all others."""
    paths = [*map(str, first), str(Path(jax_fmha.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def run(script: Path, *args: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script), *map(str, args)]
    return subprocess.run(
        command, env=env or environment(), capture_output=True, text=True, encoding="utf-8", timeout=600
    )


@pytest.fixture(scope="module")
def script():
    """The training script as a module."""
    spec = importlib.util.spec_from_file_location("train_packed_lm", TRAIN)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """A directory with source files of definitions of different lengths."""
    directory = tmp_path_factory.mktemp("corpus")
    for number in range(4):
        parts = [f"def f{i}(x):\n" + f"    x = x + {i}\n" * (i % 7) + "    return x\n" for i in range(40)]
        (directory / f"module_{number}.py").write_text("\n\n".join(parts))
    return directory


def read_losses(out: Path) -> dict[str, np.ndarray]:
    header, *rows = csv.reader((out / "loss.csv").read_text().splitlines())
    return dict(zip(header, np.array(rows, float).T, strict=True))


# The short examples assert what they claim.


def test_every_example_is_tested():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*MAX_LINES, TRAIN.name}


@pytest.mark.parametrize("name", MAX_LINES)
def test_short_example(name):
    assert len((EXAMPLES / name).read_text().splitlines()) <= MAX_LINES[name]
    result = run(EXAMPLES / name)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


# Training.


@pytest.fixture(scope="module")
def comparison(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("results") / "made" / "by the script"
    return run(TRAIN, "--corpus", corpus, "--out", out, "--compare", *TINY), out


def test_training_writes_complete_results(comparison):
    result, out = comparison
    assert result.returncode == 0, result.stderr
    assert sorted(path.name for path in out.iterdir()) == RESULTS
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    with np.load(out / "parameters.npz") as parameters:
        assert parameters["blocks/1/attention/qkv/kernel"].shape == (32, (4 + 2 * 2) * 8)
        assert all(np.isfinite(parameters[name]).all() for name in parameters.files)


def test_loss_falls_and_is_reported(comparison):
    result, out = comparison
    losses = read_losses(out)["native"]
    assert losses[0] == pytest.approx(np.log(256), abs=1.5)
    assert losses[-5:].mean() < losses[0] / 2
    assert "40/40" in result.stdout
    assert f"loss {losses[-1]:.4f}" in result.stdout
    assert "native: held-out loss" in result.stdout
    assert "tokens/s" in result.stdout
    assert "\ndef" in result.stdout.split("loss.png are in")[1]


def test_both_implementations_give_the_same_curve(comparison):
    losses = read_losses(comparison[1])
    assert not np.array_equal(losses["native"], losses["xla"])  # two ways to compute, not one
    np.testing.assert_allclose(losses["native"], losses["xla"], atol=2e-3)
    np.testing.assert_allclose(losses["native"][:5], losses["xla"][:5], atol=1e-5)


def test_one_implementation_by_name(comparison, corpus, tmp_path):
    result = run(TRAIN, "--corpus", corpus, "--out", tmp_path, "--implementation", "xla", *TINY)
    assert result.returncode == 0, result.stderr
    losses = read_losses(tmp_path)
    assert list(losses) == ["step", "xla"]
    np.testing.assert_allclose(losses["xla"], read_losses(comparison[1])["xla"], atol=1e-6)


def test_packing_keeps_every_document(script):
    random = np.random.default_rng(0)
    documents = [bytes(random.integers(1, 256, n, np.uint8)) for n in random.integers(1, 90, 50)]
    rows = script.pack(documents, row_length=64)
    pieces = []
    for tokens, positions, ids in zip(*rows, strict=True):
        for number in set(ids.tolist()) - {script.PADDING}:
            here = ids == number
            assert positions[here].tolist() == list(range(here.sum()))
            pieces.append(bytes(tokens[here].astype(np.uint8)))
    whole = [b"\0" + document + b"\0" for document in documents]
    assert sorted(pieces) == sorted(w[i : i + 64] for w in whole for i in range(0, len(w), 64))


def test_cached_decoding_equals_the_whole_forward(script):
    model = script.Transformer(script.Config(32, 2, 4, 2, 8, None), script.nnx.Rngs(0))
    for block in model.blocks:  # which start as the identity
        block.attention.out.kernel[...] = script.jax.random.normal(script.jax.random.key(1), (32, 32))
    prompt = b"def f"
    written = script.generate(model, prompt, length=12, temperature=0, seed=0)
    text = np.frombuffer(b"\0" + prompt + written, np.uint8).astype(np.int32)[None]
    rows = script.Rows(text, np.arange(text.size)[None], np.zeros_like(text))
    following = np.argmax(script.nnx.jit(lambda model, rows: model(rows))(model, rows)[0], axis=-1)
    assert len(written) == 12
    np.testing.assert_array_equal(following[len(prompt) : -1], list(written))


# Failures: a clear message, an exit code, and nothing half-written.


def bad_inputs(directory: Path) -> dict[str, tuple[list[str], str]]:
    """{case: (arguments, what the message says)}."""
    empty, blank, file = directory / "empty", directory / "blank.py", directory / "file.py"
    empty.mkdir()
    blank.write_text("\n \n")
    file.write_text("x = 1\n")
    loop = directory / "unreadable" / "loop.py"
    loop.parent.mkdir()
    loop.symlink_to(loop)  # unreadable for every user, also for root
    missing = directory / "missing.py"
    return {
        "missing file": ([f"--corpus={missing}"], f"cannot read {missing}: No such file"),
        "unreadable file": ([f"--corpus={loop.parent}"], f"cannot read {loop}: "),
        "directory without source": ([f"--corpus={empty}"], f"no text in {empty}"),
        "blank file": ([f"--corpus={blank}"], f"no text in {blank}"),
        "too little text": ([f"--corpus={file}"], "the corpus fills 1 rows of 192 bytes"),
        "out is a file": ([f"--corpus={file}", f"--out={file}"], f"{file} is not a directory"),
        "out is below a file": ([f"--corpus={file}", f"--out={file / 'out'}"], f"{file} is not a directory"),
        "uneven groups": (["--heads=3"], "--heads 3 must be a multiple of --kv-heads 2"),
        "no steps": (["--steps=0"], "--steps must be at least 1"),
    }


CASES = [
    "missing file",
    "unreadable file",
    "directory without source",
    "blank file",
    "too little text",
    "out is a file",
    "out is below a file",
    "uneven groups",
    "no steps",
]


@pytest.mark.parametrize("case", CASES)
def test_bad_input(case, script, tmp_path, monkeypatch, capsys):
    args, message = bad_inputs(tmp_path)[case]
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(sys, "argv", [TRAIN.name, f"--out={tmp_path / 'out'}", *TINY, *args])
    try:
        code = script.main()
    except SystemExit as stop:  # argparse
        code = stop.code
    assert code == 2
    assert message in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_bad_input_exits_without_traceback(tmp_path):
    result = run(TRAIN, "--corpus", tmp_path / "missing.py", "--out", tmp_path / "out")
    assert result.returncode == 2
    assert (
        result.stderr
        == f"train_packed_lm: cannot read {tmp_path / 'missing.py'}: No such file or directory\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_missing_package_names_the_remedy(tmp_path):
    (tmp_path / "optax.py").write_text("raise ModuleNotFoundError(\"No module named 'optax'\")\n")
    result = run(TRAIN, env=environment(tmp_path))
    assert result.returncode == 1
    assert result.stderr.startswith("train_packed_lm: No module named 'optax'")
    assert "pip install '.[examples]'" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT")
def test_interrupted_training_writes_nothing(corpus, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "parameters.npz").write_bytes(b"of an earlier run")
    args = [TRAIN, "--corpus", corpus, "--out", out, *TINY, "--steps=1000000"]
    with subprocess.Popen(
        [sys.executable, *map(str, args)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        # What runs in the background of a shell ignores it, and so do its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        try:
            for line in process.stdout:
                if "1/1000000" in line:
                    break
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 130
    assert errors.strip() == "train_packed_lm: interrupted; nothing was written"
    assert [path.name for path in out.iterdir()] == ["parameters.npz"]
    assert (out / "parameters.npz").read_bytes() == b"of an earlier run"


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(28, "No space left on device")])
@pytest.mark.parametrize("call", ["write", "rename"])
def test_interrupted_writing_leaves_whole_files(failure, call, script, tmp_path, monkeypatch):
    model = script.Transformer(script.Config(8, 1, 1, 1, 8, None), script.nnx.Rngs(0))
    runs = {"native": script.Run(model, [3.0, 2.0], 1000.0, 2.0)}
    script.save(tmp_path, runs)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(before) == RESULTS

    write = Path.write_bytes

    def fail_halfway(path: Path, content: bytes) -> None:
        write(path, content[: len(content) // 2])
        raise failure

    def fail(source: Path, target: Path) -> None:
        raise failure

    if call == "write":
        monkeypatch.setattr(Path, "write_bytes", fail_halfway)
    else:
        monkeypatch.setattr(script.os, "replace", fail)
    expected = KeyboardInterrupt if isinstance(failure, KeyboardInterrupt) else script.BadInput
    with pytest.raises(expected):
        script.save(tmp_path, runs)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
