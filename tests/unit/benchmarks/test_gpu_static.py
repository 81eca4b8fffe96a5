"""Reading what a compiler printed."""

from __future__ import annotations

from benchmarks.gpu.static import Launch, launches, outside_graphs

PROGRAM = """HloModule jit_step

%fused (p: f32[9]) -> f32[9] {
  ROOT %inside = f32[9]{0} add(%p, %p)
}

ENTRY %main (x: bf16[4,8], pool: bf16[1000]) -> bf16[4,8] {
  %x = bf16[4,8]{1,0} parameter(0), metadata={op_name="x"}
  %pool = bf16[1000]{0} parameter(1)
  %pair = (f32[4]{0}, /*index=1*/s32[2,2]{1,0}) fusion(%x, %x, %pool), kind=kLoop, metadata={op_name="jit(step)/layer_0/mlp/mul"}
  %first = f32[4]{0} get-tuple-element(%pair), index=0
  %written = bf16[1000]{0} fusion(%pool, %first), kind=kLoop, calls=%fused
  ROOT %y = bf16[4,8]{1,0} custom-call(%first, %x), custom_call_target="f", metadata={op_name="jit(step)/sample/head"}
}
"""


def test_launches_are_read_with_their_bytes_and_without_the_pool() -> None:
    assert launches(PROGRAM, 2000) == [
        Launch("pair", "layer_0/mlp/mul", 64, 32),
        Launch("written", "layer_0/mlp/mul", 16, 0),
        Launch("y", "sample/head", 80, 64),
    ]


def test_what_is_in_a_graph_is_not_outside_of_graphs() -> None:
    sequence = "000: kCommandBuffer [source]\n    001: kCustomKernel\n146: kConditional [sink]\n  false_branch:\n"
    assert outside_graphs(sequence) == ["Conditional"]
