"""What jaxlib says of its devices is no part of what toast says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_writing_a_file_of_jax_export_logs_nothing(tmp_path: Path) -> None:
    written = tmp_path / "out.jax_export"
    command = ["partition", "sample_models/mlp_tiny.mlir", "--mesh", "v4-32", "--iterations", "1", "-o", str(written)]
    done = subprocess.run([sys.executable, "-m", "toast_cli", *command], capture_output=True, text=True, check=True)
    assert written.stat().st_size
    assert "pjrt_client" not in done.stderr
