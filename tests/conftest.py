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

# Files, and single tests of others, that compile with XLA, start processes, read all samples or search with the default
# budget: two thirds of the time that all tests take.
SLOW = {
    "test_api",
    "test_calibration",
    "test_certify",
    "test_child",
    "test_cases",
    "test_cluster",
    "test_compare",
    "test_composite",
    "test_convolution_memory",
    "test_displacement::test_it_is_priced_as_if_it_were_pinned",
    "test_cost_calibration",
    "test_explain",
    "test_golden",
    "test_halo",
    "test_hostile",
    "test_partition_verify",
    "test_sample_models",
    "test_saved_plans",
    "test_loop_sums::test_what_is_written_is_promised",
    "test_loop_moves::test_what_is_written_is_promised",
    "test_split_ops",
    "test_streams",
    "test_three_forms",
    "test_verify",
    "test_verify_lapack",
    "test_verify_numbers",
    "test_widened",
    "test_written",
    "test_check_project::test_a_project_for_real",
    "test_cli::test_every_option_has_a_line_of_help",
    "test_cli::test_shells_are_offered",
    "test_confirm::test_from_the_command_line",
    "test_alternatives::test_the_best_are_compiled",
    "test_alternatives::test_xla_partitions_them_differently",
    "test_docs::test_python_on_the_pages_runs",
    "test_docs::test_the_how_to_pages_run",
    "test_docs::test_the_tutorial_runs",
    "test_emit::test_a_loop_communicates_as_planned",
    "test_emit::test_a_training_step_communicates_as_planned",
    "test_emit::test_numbers_stay",
    "test_features::test_compiled",
    "test_features::test_numbers",
    "test_features::test_the_way_between_shardings_is_the_planned_one",
    "test_formats::test_damaged_files_are_errors_and_nothing_else",
    "test_formats::test_unparsable_programs",
    "test_naming::test_sample_models_have_the_roles_they_should",
    "test_one_meaning::test_evaluator_lowering_and_report_say_the_same",
    "test_pipeline::test_a_memory_limit_is_respected",
    "test_pipeline::test_the_mesh_shape_can_be_left_to_the_search",
    "test_search::test_every_seed_reaches_the_proven_optimum",
    "test_search::test_the_best_mesh_shape_wins",
    "test_spmd::test_numbers_of_training_steps",
    "test_sweep::test_a_killed_sweep_goes_on",
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
