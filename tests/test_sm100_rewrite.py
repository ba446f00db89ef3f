"""The rewriting of Blackwell's PTX for Hopper, as text. What it computes is shown on a GPU: docs/sm100-on-sm90.md."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).with_name("sm100")))
import prove
import rewrite

HEADER = ".version 9.0\n.target sm_100a\n.address_size 64\n"


def rewritten(body: str, **options: bool) -> rewrite.Rewriting:
    module = (
        f'{HEADER}.file 1 "kernel.cuh"\n.visible .entry kernel()\n{{\n.reg .b32 %r<9>;\n{body}\nret;\n}}\n'
    )
    return rewrite.rewrite(module, ".visible .func emulator() { ret; }", **options)


def test_other_code_stays():
    body = "add.s32 %r1, %r2, %r3;\n@%p1 bra $L__BB0_1;\n$L__BB0_1:\nmax.f32 %f1, %f2, %f3;"
    result = rewritten(body)
    assert body.split("\n")[0] in result.text
    assert result.sites == []
    assert ".target sm_90a" in result.text
    assert "sm100_enter" not in result.text


@pytest.mark.parametrize(
    "instruction",
    [
        "tcgen05.shift.cta_group::1.down [%r1];",
        "tcgen05.mma.ws.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, %p1;",
        "tcgen05.mma.cta_group::1.kind::i8 [%r1], %rd1, %rd2, %r2, %p1;",
        "tcgen05.mma.sp.cta_group::1.kind::f16 [%r1], %rd1, %rd2, [%r3], %r2, %p1;",
        "tcgen05.ld.sync.aligned.32x32b.x1.pack::16b.b32 {%r1}, [%r2];",
        "tcgen05.cp.cta_group::1.128x256b.b8x16.b6x16_p32 [%r1], %rd1;",
        "tcgen05.something.new [%r1];",
        "mbarrier.try_wait.shared::cta.b64 %p1, [%r1], %rd1;",
    ],
)
def test_unknown_instructions_are_errors(instruction: str):
    with pytest.raises(rewrite.Unknown):
        rewritten(instruction)


def test_packed_arithmetic_is_two_roundings():
    text = rewritten("fma.rn.f32x2 %rd1, %rd2, %rd3, %rd4;\nmul.f32x2 %rd1, %rd2, %rd3;").text
    assert len(re.findall(r"fma\.rn\.f32 ", text)) == 2
    assert len(re.findall(r"mul\.rn\.f32 ", text)) == 2
    assert "f32x2 " not in text


def test_extremum_of_three_is_two():
    assert len(re.findall(r"max\.f32 ", rewritten("max.f32 %f1, %f2, %f3, %f4;").text)) == 2


def test_predicated_work_is_skipped():
    text = rewritten(
        "@!%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1];"
    ).text
    assert re.search(r"@%p1 bra (SM100_\d+);.*call sm100_commit.*\1:", text, re.DOTALL)


LOAD = "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1, %r2}, [%r3];\n"
WAIT = "tcgen05.wait::ld.sync.aligned;\n"


def test_loads_are_done_at_their_wait():
    """Not before, so that what overwrites tensor memory in between shows."""
    text = rewritten(f"{LOAD}add.s32 %r5, %r6, %r7;\n{WAIT}").text
    assert text.index("add.s32 %r5") < text.index("ld.relaxed.gpu.global.b32 %r1")


def test_copies_of_a_load_wait_with_it():
    text = rewritten(f"{LOAD}mov.b32 %f1, %r1;\nadd.s32 %r5, %r6, %r7;\n{WAIT}").text
    assert (
        text.index("add.s32 %r5")
        < text.index("ld.relaxed.gpu.global.b32 %r1")
        < text.index("mov.b32 %f1, %r1")
    )


def test_copies_behind_the_wait_are_made_in_any_case():
    """Also where the wait was not dropped, so that the load is not done again."""
    text = rewritten(f"{LOAD}{WAIT}mov.b64 %rd1, {{%r1, %r2}};\nadd.s64 %rd2, %rd1, %rd1;").text
    again = re.search(
        r"@%skq bra (SM100_\d+);\n}\nld\.relaxed\.gpu\.global\.b32 %r1.*?\n\1:", text, re.DOTALL
    )
    assert again is not None
    assert text.index("mov.b64 %rd1") >= again.end()


def test_use_of_a_register_completes_its_load():
    text = rewritten(f"{LOAD}add.s32 %r5, %r1, %r7;\n{WAIT}").text
    assert text.index("ld.relaxed.gpu.global.b32 %r1") < text.index("add.s32 %r5")


STORE = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r3], {%r1};\n"
ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [%r4];\n"


def test_stores_leave_a_nan_until_their_wait():
    text = rewritten(f"{STORE}tcgen05.wait::st.sync.aligned;\n{ARRIVE}").text
    pending = text.index(f"], {rewrite.PENDING};")
    stored = text.index("], %sm100_c0;")
    assert pending < stored < text.index("mbarrier.arrive")


@pytest.mark.parametrize("strict", [True, False])
def test_stores_that_nobody_waits_for_are_listed(strict: bool):
    result = rewritten(f"{STORE}{ARRIVE}", keeps_unwaited_stores_pending=strict)
    assert [result.sites[n - 1].op for n in result.unwaited] == ["tcgen05.st.sync.aligned.32x32b.x1.b32"]
    assert (f"], {rewrite.PENDING};" in result.text) == strict


def test_sites_name_the_line_that_asks():
    result = rewritten(
        ".loc 1 80 1\n.loc 1 7 3, function_name $L__info, inlined_at 1 80 1\n"
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1];"
    )
    assert result.sites[0].place == "kernel.cuh:7 < kernel.cuh:80"


def test_every_planted_fault_has_a_name_of_its_own():
    names = [fault.what for fault in prove.FAULTS]
    assert len(names) == len(set(names)) >= 20
    assert set(names) >= prove.HARMLESS
