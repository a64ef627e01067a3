"""What holds for all tests: no test looks at the clock, and which ones `make quick` leaves out."""

from __future__ import annotations

import os
from importlib.metadata import version

import in_this_process
import pytest
from hypothesis import HealthCheck, settings

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

# Of warnings and errors alone, as in children of `toast_cli.verify.child`.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")

# What a test finds out is not kept for the next.
os.environ.setdefault("TOAST_CACHE", "off")

# A compiler is asked where a test says so.
os.environ.setdefault("TOAST_ASK", "never")

# Files, and single tests of others, that compile with XLA, start processes, read all samples or search: four fifths of
# the time that all tests take.
SLOW = {
    "test_alternatives",
    "test_api",
    "test_assignments",
    "test_axis_assignment",
    "test_branch_collectives",
    "test_brute_force",
    "test_calibration",
    "test_cases",
    "test_certify",
    "test_check_project",
    "test_child",
    "test_cluster",
    "test_compare",
    "test_composite",
    "test_confirm",
    "test_convolution_memory",
    "test_cost_calibration",
    "test_decoding_memory",
    "test_emit",
    "test_emit_reductions",
    "test_explain",
    "test_faults",
    "test_features",
    "test_fused_products",
    "test_fuzz",
    "test_gathered",
    "test_goals",
    "test_golden",
    "test_gpu_benchmark",
    "test_gpu_times",
    "test_halo",
    "test_hand_written",
    "test_hostile",
    "test_inspect_and_diff",
    "test_items",
    "test_known_checks",
    "test_loop_moves",
    "test_loop_sums",
    "test_manual_regions",
    "test_microbatches",
    "test_moves",
    "test_naming",
    "test_one_meaning",
    "test_op_sharding_memo",
    "test_page",
    "test_partition_verify",
    "test_pipeline",
    "test_plan_laws",
    "test_preferred",
    "test_published",
    "test_ragged_dots",
    "test_regions_in_hlo",
    "test_runnable",
    "test_sample_models",
    "test_saved_plans",
    "test_search",
    "test_split_ops",
    "test_spmd",
    "test_streams",
    "test_sweep",
    "test_three_forms",
    "test_tight_memory",
    "test_ulysses",
    "test_verify",
    "test_verify_lapack",
    "test_written",
    "test_architecture::test_no_files_import_each_other",
    "test_check::test_bad_commands",
    "test_check::test_check",
    "test_cli::test_bad_commands",
    "test_cli::test_every_option_has_a_line_of_help",
    "test_cli::test_partitioning_loads_nothing_that_asks_compilers",
    "test_cli::test_shells_are_offered",
    "test_constraints_needed::test_few_constraints_suffice",
    "test_contested::test_the_order_of_propagation_does_not_matter",
    "test_cost::test_a_faster_link_never_makes_a_plan_slower",
    "test_cost::test_plans_cost_the_same_after_any_other_plans",
    "test_cost::test_the_parts_add_up",
    "test_dimensions::test_renaming_values_changes_no_class_group_or_side",
    "test_dimensions::test_reordering_independent_ops_changes_no_class",
    "test_docs::test_python_on_the_pages_runs",
    "test_docs::test_the_how_to_pages_run",
    "test_docs::test_the_tutorial_runs",
    "test_folding::test_every_entry_is_in_one_row_with_its_like",
    "test_hardware::test_mesh_show_of_another_shape_and_of_every_ready_spec",
    "test_memory_space_assignment::test_the_evaluator_agrees_with_a_plain_one",
    "test_passes::test_without_a_pass_the_prediction_is_another",
    "test_reduce_scatter::test_gradients_of_a_tied_table",
    "test_reference_cost::test_the_evaluator_agrees_with_a_plain_one",
    "test_rules::test_every_op_of_the_sample_models_has_a_rule",
    "test_tactics::test_an_idle_axis_is_remarked_on_with_the_reason",
    "test_tactics::test_every_strategy_is_a_plan_or_says_why_not",
    "test_tactics::test_shapes_on_which_a_tactic_does_not_apply_are_left_out",
    "test_tactics::test_the_report_says_which_decisions_come_from_tactics",
    "test_tactics::test_what_a_tactic_decides_stays_and_the_search_completes_it",
    "test_verify_numbers::test_a_wrong_gradient_is_caught",
    "test_verify_numbers::test_another_order_of_summing_is_no_error",
    "test_versions::test_a_name_that_is_missing_is_an_error_and_no_traceback",
    "test_widened::test_the_same_program_on_wide_numbers",
}


@pytest.fixture(autouse=True)
def compiled_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA:CPU compiles in this process what `toast_cli.verify` compiles in children, which takes them longer to start
    than to do. Tests about children, and those that may abort the compiler, are marked `children`."""
    if "children" not in request.keywords:
        monkeypatch.setattr("toast_cli.verify.child.subprocess", in_this_process)
        monkeypatch.setattr("toast_cli.xla.cpu_devices", in_this_process.cpu_devices)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests in `SLOW`."""
    for item in items:
        file, test = item.path.stem, getattr(item, "originalname", item.name)
        if file in SLOW or f"{file}::{test}" in SLOW:
            item.add_marker("slow")
