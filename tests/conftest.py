"""What holds for all tests: no test looks at the clock, and which ones `make quick` leaves out."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import in_this_process
import pytest
from hypothesis import HealthCheck, settings

from toast_cli import pipeline, xla
from toast_cli.ask_xla import compile, numbers
from toast_cli.frontend import loading, normalise
from toast_cli.plan.decisions import Plan
from toast_cli.price.evaluator import Evaluator
from toast_cli.search import run
from toast_cli.xla import running

os.environ.setdefault("JAX_PLATFORMS", "cpu")
from jax._src.interpreters import mlir

# How long an example takes says how busy the machine is, and nothing about toast. The examples are the same in every
# run: a commit passes wherever it is tested, or nowhere. `make check-all` draws new ones.
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("same", settings.get_profile("random"), derandomize=True)
settings.load_profile("same")

# XLA:CPU and its children spend most of their time on machine code that runs once. What toast checks is done before.
_FLAGS = ["--xla_backend_optimization_level=0"]
if version("jaxlib").startswith("0.10."):  # Later versions abort at some of these flags, which halve compilations.
    _FLAGS += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
os.environ.setdefault("XLA_FLAGS", " ".join(_FLAGS))

# JAX makes a context of MLIR for each program, which is half of the time to lower a small one.
mlir.make_ir_context = cache(mlir.make_ir_context)

# Of warnings and errors alone, as in children of `toast_cli.ask_xla.child`.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")

# What a test finds out is not kept for the next.
os.environ.setdefault("TOAST_CACHE", "off")

# A compiler is asked where a test says so.
os.environ.setdefault("TOAST_CONFIRM", "0")

# Files, and single tests of others, that compile with XLA, start processes, read all samples or search: four fifths of
# the time that all tests take.
SLOW = {
    "test_alternatives",
    "test_api",
    "test_architecture",
    "test_assignments",
    "test_branch_collectives",
    "test_brute_force",
    "test_calibration",
    "test_cases",
    "test_child",
    "test_compare",
    "test_composite",
    "test_confirm",
    "test_cost_calibration",
    "test_decoding_memory",
    "test_emit",
    "test_emit_reductions",
    "test_explain",
    "test_fused_products",
    "test_fuzz",
    "test_gathered",
    "test_goals",
    "test_gpu_benchmark",
    "test_halo",
    "test_hand_written",
    "test_inspect_and_diff",
    "test_loop_moves",
    "test_loop_sums",
    "test_manual_regions",
    "test_microbatches",
    "test_moves",
    "test_naming",
    "test_one_meaning",
    "test_page",
    "test_pipeline",
    "test_plan_laws",
    "test_preferred",
    "test_ragged_dots",
    "test_regions_in_hlo",
    "test_runnable",
    "test_sample_models",
    "test_saved_plans",
    "test_search",
    "test_staged",
    "test_streams",
    "test_sweep",
    "test_three_forms",
    "test_tight_memory",
    "test_verify",
    "test_written",
    "test_check::test_bad_commands",
    "test_check::test_check",
    "test_cli::test_bad_commands",
    "test_cli::test_every_option_has_a_line_of_help",
    "test_cli::test_partitioning_loads_nothing_that_asks_compilers",
    "test_cli::test_shells_are_offered",
    "test_collectives::test_more_bytes_are_never_faster",
    "test_constraints_needed::test_few_constraints_suffice",
    "test_cost::test_a_faster_link_never_makes_a_plan_slower",
    "test_cost::test_memory_is_looked_at_wherever_a_search_would_not",
    "test_cost::test_plans_cost_the_same_after_any_other_plans",
    "test_cost::test_the_evaluator_agrees_with_a_plain_one",
    "test_cost::test_the_parts_add_up",
    "test_dimensions::test_renaming_values_changes_no_class_group_or_side",
    "test_dimensions::test_reordering_independent_ops_changes_no_class",
    "test_docs::test_python_on_the_pages_runs",
    "test_docs::test_the_how_to_pages_run",
    "test_docs::test_the_tutorial_runs",
    "test_emit_constraints::test_the_order_of_propagation_does_not_matter",
    "test_features::test_compiled",
    "test_features::test_numbers",
    "test_features::test_the_way_between_shardings_is_the_planned_one",
    "test_folding::test_every_entry_is_in_one_row_with_its_like",
    "test_hardware::test_mesh_show_of_another_shape_and_of_every_ready_spec",
    "test_kernel_bodies::test_bodies_with_more_integers_than_fit_into_memory",
    "test_kernel_bodies::test_masks_that_a_loop_carries_are_known",
    "test_kernel_plans::test_a_block_takes_as_long_as_around_an_op_that_shardy_splits",
    "test_left_out::test_what_needs_no_numbers_is_answered",
    "test_memory_space_assignment::test_the_evaluator_agrees_with_a_plain_one",
    "test_merged_dimensions::test_groups_that_shards_cross_are_made_whole",
    "test_merged_dimensions::test_what_is_written_is_equal_on_eight_devices",
    "test_offload::test_it_is_chosen_where_nothing_else_fits",
    "test_offload::test_numbers_are_the_same",
    "test_offload::test_parts_of_a_batch_are_offloaded_one_by_one",
    "test_offload::test_saved_plans_and_reports_say_it",
    "test_offload::test_what_is_moved_is_written",
    "test_one_device::test_results_of_host_callbacks",
    "test_overlap::test_the_search_takes_communication_that_overlaps",
    "test_passes::test_without_a_pass_the_prediction_is_another",
    "test_recompute::test_a_batch_in_parts_recomputes_too",
    "test_recompute::test_a_bound_on_time_that_no_variant_keeps_is_said",
    "test_recompute::test_a_search_that_the_user_ends_is_followed_by_no_other",
    "test_recompute::test_a_variant_that_the_compiler_refuses_is_followed_by_another_of_the_program_as_written",
    "test_recompute::test_it_is_chosen_where_a_bound_on_memory_does_not_hold",
    "test_recompute::test_it_is_chosen_where_the_compiler_refuses_and_asked_about",
    "test_recompute::test_numbers_are_the_same_and_less_is_saved",
    "test_recompute::test_parts_are_tried_without_recomputing_where_both_do_not_go_together",
    "test_recompute::test_products_are_kept_where_that_is_faster",
    "test_recompute::test_saved_plans_and_reports_say_it",
    "test_recompute::test_the_program_is_the_same_each_time",
    "test_recompute::test_what_a_program_recomputes_is_kept",
    "test_recompute::test_where_the_compiler_refuses_all_variants_the_report_says_what_was_tried",
    "test_report_files::test_slices_nest_and_add_up",
    "test_rules::test_every_op_of_the_sample_models_has_a_rule",
    "test_rules::test_the_table_above_lists_nothing_else",
    "test_tactics::test_a_faster_plan_that_keeps_weights_whole_does_not_take_back_what_fsdp_splits",
    "test_tactics::test_a_tactic_applies_where_it_makes_sense_and_says_why_not_elsewhere",
    "test_tactics::test_an_idle_axis_is_remarked_on_with_the_reason",
    "test_tactics::test_every_strategy_is_a_plan_or_says_why_not",
    "test_tactics::test_search_names_the_only_axes_left_to_the_search",
    "test_tactics::test_shapes_on_which_a_tactic_does_not_apply_are_left_out",
    "test_tactics::test_the_report_says_which_decisions_come_from_tactics",
    "test_tactics::test_what_a_tactic_decides_stays_and_the_search_completes_it",
    "test_unmirror::test_a_plan_means_the_same_for_a_problem_taken_apart",
    "test_unmirror::test_strategies_are_the_same_for_a_problem_taken_apart",
    "test_verify_numbers::test_a_wrong_gradient_is_caught",
    "test_verify_numbers::test_another_order_of_summing_is_no_error",
    "test_versions::test_a_name_that_is_missing_is_an_error_and_no_traceback",
    "test_widened::test_the_same_program_on_wide_numbers",
}


# What tests have instead, unless they are marked `children`. The processes would take longer to start than to do it.
HERE: list[tuple[Any, str, Any]] = [
    *((module, "ask", in_this_process.ask) for module in (compile, numbers)),
    *((module, "in_child", in_this_process.in_child) for module in (loading, normalise)),
    (pipeline, "load", in_this_process.load),
    *(
        (module, name, getattr(in_this_process, name))
        for module in (xla, running)
        for name in ("cpu_devices", "compile_program")
    ),
]
ELSEWHERE = [(module, name, getattr(module, name)) for module, name, _ in HERE]
for module, name, stand_in in HERE:
    setattr(module, name, stand_in)

# A search for which a test states no budget looks at a tenth of the plans that it looks at for users.
for effort in run.PLANS:
    run.PLANS[effort] //= 10

# What a test does that `make quick` runs; one that does more is in SLOW.
MOST_COMPILATIONS, MOST_EVALUATIONS = 4, 1000
evaluate = Evaluator._evaluate


def counted(evaluator: Evaluator, plan: Plan) -> Any:
    in_this_process.evaluations += 1
    return evaluate(evaluator, plan)


Evaluator._evaluate = counted  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def as_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests about children, and those that may abort the compiler, have children. Those of `make quick` do little."""
    if "children" in request.keywords:
        for module, name, original in ELSEWHERE:
            request.getfixturevalue("monkeypatch").setattr(module, name, original)
    compiled, evaluated = in_this_process.compilations, in_this_process.evaluations
    yield
    if not {"slow", "thorough"} & set(request.keywords):
        compiled, evaluated = in_this_process.compilations - compiled, in_this_process.evaluations - evaluated
        few = compiled <= MOST_COMPILATIONS and evaluated <= MOST_EVALUATIONS
        assert few, f"it compiles {compiled} programs and evaluates {evaluated} plans: add it to SLOW"


def pytest_collection_finish() -> None:
    """What stays for all tests is not looked through again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make quick` does not even import the files in `SLOW`, which takes as long as a tenth of its tests."""
    return True if "not slow" in config.option.markexpr and collection_path.stem in SLOW else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests in `SLOW`."""
    for item in items:
        file, test = item.path.stem, getattr(item, "originalname", item.name)
        if file in SLOW or f"{file}::{test}" in SLOW:
            item.add_marker("slow")
