"""Step times read off schedules: what is hidden, what the cores wait for. Collectives take 10 us each, a cycle 1 us."""

from __future__ import annotations

import pytest

from toast_cli.ask_xla.schedule import ScheduledTime, scheduled_time

GROUPS = "replica_groups={{0,1,2,3}}, use_global_device_ids=true"
SENT = 10e-6


def cycles(count: int) -> str:
    return f'backend_config={{"estimated_cycles":"{count}"}}'


def module(*lines: str, more: str = "") -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule m, is_scheduled=true\n\n{more}ENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"


def compute(name: str, count: int) -> str:
    return f"%{name} = f32[8]{{0}} negate(%p), {cycles(count)}"


START = f"%s = (f32[2]{{0}}, f32[8]{{0}}) all-gather-start(%p), channel_id=1, {GROUPS}, dimensions={{0}}"
DONE = "%d = f32[8]{0} all-gather-done(%s)"
LATER = f"%t = f32[8]{{0}} all-reduce-start(%p), channel_id=2, {GROUPS}, to_apply=%add"
LATER_DONE = "%e = f32[8]{0} all-reduce-done(%t)"

SENT_OUT = (
    "%r = (f32[8]{0}, u32[], token[]) recv(%after), channel_id=1, is_host_transfer=true, frontend_attributes={"
    '_xla_megascale_reduce_operation="SUM",_xla_megascale_target="{1,2,3,4}x{0:0}",_xla_megascale_transfer_type="ALL_REDUCE"}'
)

LOOP = f"""%body (b: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %b = (s32[], f32[8]{{0}}) parameter(0)
  %x = f32[8]{{0}} get-tuple-element(%b), index=1
  %cs = (f32[8]{{0}}, f32[8]{{0}}) collective-permute-start(%x), channel_id=3, source_target_pairs={{{{0,1}},{{1,2}},{{2,3}},{{3,0}}}}
  %dot = f32[8]{{0}} negate(%x), {cycles(4)}
  %cd = f32[8]{{0}} collective-permute-done(%cs)
  ROOT %r = (s32[], f32[8]{{0}}) tuple(%i, %cd)
}}

%cond (c: (s32[], f32[8])) -> pred[] {{
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}}

"""  # noqa: E501

PIECE = """%async_collective_fusion.{0} (q: f32[2]) -> f32[8] {{
  %q = f32[2]{{0}} parameter(0)
  ROOT %g{0} = f32[8]{{0}} all-gather(%q), channel_id=7, {1}, dimensions={{0}}
}}

"""


def fused(number: int, count: int) -> str:
    return (
        f"%f{number} = f32[8]{{0}} fusion(%p), kind=kCustom, calls=%async_collective_fusion.{number}, {cycles(count)}"
    )


BESIDE = f"""%beside (b: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %p = f32[8]{{0}} get-tuple-element(%b), index=1
  {fused(2, 2)}
  ROOT %r = (s32[], f32[8]{{0}}) tuple(%i, %f2)
}}

%cond (c: (s32[], f32[8])) -> pred[] {{
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}}

"""

# A byte of device memory takes 1 us.
FETCH = "%c = (f32[8]{0:T(128)S(1)}, f32[8]{0:T(128)}, u32[]{:S(2)}) copy-start(%p)"
FETCHED = "%cd = f32[8]{0:T(128)S(1)} copy-done(%c)"
ON_CHIP = f"%n = f32[8]{{0:T(128)S(1)}} negate(%m), {cycles(4)}"
SLICED = f"%n = f32[2]{{0:T(128)S(1)}} fusion(%p), kind=kLoop, calls=%slice, {cycles(40)}"
SLICE = """%slice (a: f32[8]) -> f32[2] {
  %a = f32[8]{0} parameter(0)
  ROOT %s = f32[2]{0} dynamic-slice(%a, %i), dynamic_slice_sizes={2}
}

"""

# what is tried, lines, computations before it -> seconds of computing, communication, and of it what is exposed, in us
CASES = {
    "synchronous": ([compute("a", 5), START.replace("-start", "").replace("(f32[2]{0}, f32[8]{0})", "f32[8]{0}")], "",
                    5, 10, 10),
    "hidden in part": ([START, compute("a", 4), DONE], "", 4, 10, 6),
    "hidden": ([START, compute("a", 40), DONE], "", 40, 10, 0),
    "nothing between": ([compute("a", 40), START, DONE], "", 40, 10, 10),
    "two share the links": ([START, LATER, compute("a", 12), DONE, LATER_DONE], "", 12, 20, 8),
    "a loop's permutes": (
        ['%w = (s32[], f32[8]{0}) while(%p), condition=%cond, body=%body, '
         'backend_config={"known_trip_count":{"n":"3"}}'],
        LOOP, 12, 30, 18,
    ),
    "one gather spread over three fusions": (
        [fused(1, 2), fused(2, 5), fused(3, 1)], "".join(PIECE.format(k, GROUPS) for k in (1, 2, 3)), 8, 10, 2,
    ),
    "one gather spread over a fusion before a loop, the loop's and one behind it": (
        [fused(1, 2),
         '%w = (s32[], f32[8]{0}) while(%p), condition=%cond, body=%beside, '
         'backend_config={"known_trip_count":{"n":"3"}}',
         fused(3, 1)],
        "".join(PIECE.format(k, GROUPS) for k in (1, 2, 3)) + BESIDE, 9, 10, 1,
    ),
    "a sum over slices, through the host": ([SENT_OUT, compute("a", 4), "%d = f32[8]{0} recv-done(%r)"], "", 4, 10, 6),
    "a fetch behind a kernel on the chip": ([FETCH, ON_CHIP, FETCHED], "", 32, 0, 0),
    "a fetch beside a kernel that reads memory for 4 us": ([FETCH, ON_CHIP, compute("a", 4), FETCHED], "", 36, 0, 0),
    "a fetch beside a collective": ([FETCH, START, DONE, FETCHED], "", 22, 10, 10),
    "one fetch behind another": ([FETCH, FETCH.replace("%c", "%l"), FETCHED.replace("%c", "%l")], "", 64, 0, 0),
    "a fetch beside a kernel that reads 8 of 32 bytes":
        ([FETCH, "%p = f32[8]{0} parameter(0)", SLICED, FETCHED], SLICE, 40, 0, 0),
    "a gather in one fusion": ([fused(1, 2)], PIECE.format(1, GROUPS), 2, 10, 8),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_hidden(name: str) -> None:
    lines, more, busy, sent, exposed = CASES[name]
    found = read(module(*lines, more=more))
    got = [found.compute_seconds, found.communication_seconds, found.exposed_seconds]
    assert [round(1e6 * seconds, 6) for seconds in got] == [busy, sent, exposed]


def test_an_idle_clock_estimates_nothing() -> None:
    text = module(START, compute("a", 4), DONE, LATER, LATER_DONE)
    assert read(text, clock=0.0).compute_seconds == 0.0


def read(text: str, clock: float = 1e6) -> ScheduledTime:
    return scheduled_time(
        text, ("data",), (4,), clock, 1e6, lambda kind, size, axes: SENT if axes == ("data",) else 1.0
    )
