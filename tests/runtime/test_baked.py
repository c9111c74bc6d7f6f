"""Two HLO texts that differ in a value, and the words for it."""

from tpu_experiments.runtime.xla.programs import changed_values

PROGRAM = """HloModule IrToHlo.9, entry_computation_layout={(f32[8]{0})->(f32[8]{0})}

ENTRY %IrToHlo.9 (p0.1: f32[8]) -> (f32[8]) {
  %p0.1 = f32[8]{0} parameter(0), metadata={op_type="xla__device_data" op_name="xla__device_data"}
  %constant.2 = f32[] constant(POWER), metadata={op_type="c" source_file="/me/my_lab/t.py" source_line=14}
  %broadcast.3 = f32[8]{0} broadcast(f32[] %constant.2), dimensions={}
  %power.4 = f32[8]{0} power(f32[8]{0} %p0.1, f32[8]{0} %broadcast.3)
  %slice.5 = f32[4]{0} slice(f32[8]{0} %power.4), slice={[START:8]}, metadata={source_file="FILE" source_line=3}
  ROOT %tuple.6 = (f32[4]{0}) tuple(f32[4]{0} %slice.5)
}
"""


def program(*, power: str = "2", start: str = "4", file: str = "/home/me/cut.py") -> str:
    return PROGRAM.replace("POWER", power).replace("START", start).replace("FILE", file)


def test_a_constant_is_named_with_both_values_and_its_place():
    said = changed_values(program(), program(power="2.5"))
    assert said == "f32[] constant(2) became f32[] constant(2.5) (my_lab/t.py:14)"


def test_an_attribute_is_named():
    said = changed_values(program(), program(start="3"))
    assert said == (
        "f32[4]{0} slice(f32[8]{0}), slice={[4:8]} became f32[4]{0} slice(f32[8]{0}), slice={[3:8]} (me/cut.py:3)"
    )


def test_a_place_inside_an_installed_package_is_left_out():
    said = changed_values(program(), program(start="3", file="/v/site-packages/torch/nn/functional.py"))
    assert said.endswith("slice={[3:8]}")


def test_constants_come_first():
    said = changed_values(program(), program(start="3", power="7"))
    assert said.startswith("f32[] constant(2) became f32[] constant(7)")
    assert "slice={[3:8]}" in said


def test_names_and_numbers_of_instructions_do_not_count():
    renamed = program().replace("constant.2", "constant.77").replace("IrToHlo.9", "IrToHlo.80")
    assert changed_values(program(), renamed) == ""


def test_a_constant_that_became_an_input_is_reported():
    lines = program().splitlines()
    outside = "\n".join("  %p1.2 = f32[] parameter(1)" if "constant(2)" in line else line for line in lines)
    assert changed_values(program(), outside) == "f32[] constant(2) is gone; an input f32[] is new"


def test_what_a_type_drags_along_is_not_shown():
    longer = program().replace("(f32[4]{0}) tuple", "(f32[4]{0}, f32[1]{0}) tuple")
    assert changed_values(program(), longer) == ""
