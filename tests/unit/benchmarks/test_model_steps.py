"""Counting the bytes of a compiled program: parts of arrays, updates in place, loops, branches and VMEM."""

from __future__ import annotations

import pytest

from benchmarks.model_steps.newer_shapes import HY_V4, NEWER_MODELS
from benchmarks.model_steps.shapes import MODELS
from benchmarks.model_steps.traffic import Course, Partial, launches

PROGRAM = """HloModule jit_step

%body (p: (f32[8], f32[100])) -> (f32[8], f32[100]) {
  %p = (f32[8]{0}, f32[100]{0}) parameter(0)
  %a = f32[8]{0} get-tuple-element(%p), index=0
  %b = f32[8]{0} fusion(%a), kind=kLoop
  ROOT %t = (f32[8]{0}, f32[100]{0}) tuple(%b, %a)
}

%branch_0 (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %q = f32[8]{0} negate(%p)
}

%branch_1 (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %q = f32[64]{0} broadcast(%p)
  %r = f32[64]{0} negate(%q)
  ROOT %s = f32[8]{0} slice(%r)
}

ENTRY %main (x: f32[8], pool: f32[1,100], w: bf16[16,4,4]) -> f32[8] {
  %x = f32[8]{0:T(8)} parameter(0)
  %pool = f32[1,100]{1,0} parameter(1)
  %w = bf16[16,4,4]{2,1,0} parameter(2)
  %flat = f32[100]{0} bitcast(%pool)
  %set = f32[100]{0} fusion(%flat, %x), kind=kLoop, metadata={op_name="jit(step)/layer_0/states/scatter"}
  %fast = f32[8]{0:T(8)S(1)} fusion(%w, %x), kind=kLoop
  %start = ((bf16[16,4,4]{2,1,0}), bf16[4,4,4]{2,1,0:S(1)}, s32[]) slice-start(%w), slice={[0:4]}
  %done = bf16[4,4,4]{2,1,0:S(1)} slice-done(%start)
  %use = f32[8]{0} fusion(%done, %fast), kind=kLoop
  %kernel = (f32[8]{0}, f32[100]{0}) custom-call(%use, %set), output_to_operand_aliasing={{1}: (1, {})}
  %updated = f32[100]{0} get-tuple-element(%kernel), index=1
  %pair = (f32[8]{0}, f32[100]{0}) tuple(%use, %updated)
  %while = (f32[8]{0}, f32[100]{0}) while(%pair), condition=%c, body=%body, metadata={op_name="jit(step)/layer_0/attention/while"}
  %y = f32[8]{0} get-tuple-element(%while), index=0
  ROOT %z = f32[8]{0} conditional(%n, %y, %y), branch_computations={%branch_0, %branch_1}, metadata={op_name="jit(step)/layer_0/cond"}
}
"""


def test_launches_count_parts_of_arrays_loops_and_branches() -> None:
    partial = Partial({(100,): 12.0, (16, 4, 4): 100.0})
    course = Course({"attention": [5]}, {"layer_0/cond": 1})
    found = {each.name: (each.read_bytes, each.written_bytes) for each in launches(PROGRAM, partial, course)}
    assert found == {
        "set": (32.0, 12.0),  # the pool is updated in place
        "fast": (132.0, 0.0),
        "start": (128.0, 0.0),
        "use": (0.0, 32.0),
        "kernel": (32.0 + 12.0, 32.0 + 12.0),  # it reads what it updates
        "while": (5 * 32.0, 5 * 32.0),
        "z": (256.0 + 256.0, 256.0 + 32.0),
    }


def test_a_loop_goes_round_once_and_a_branch_costs_nothing_if_nothing_is_said() -> None:
    found = {each.name: each.moved_bytes for each in launches(PROGRAM, Partial({}), Course())}
    assert found["while"] == 64.0
    assert found["z"] == 0.0


@pytest.mark.parametrize("name", [*MODELS, *NEWER_MODELS])
def test_a_model_is_read_and_has_the_layers_that_stand_for_all(name: str) -> None:
    model = (MODELS | NEWER_MODELS)[name]
    assert model.decoder(1).num_layers == len(model.layers)


def test_a_layer_takes_the_choice_of_the_layer_before_it() -> None:
    assert [layer.index_source for layer in HY_V4.decoder(1).layers] == [None, 0]
