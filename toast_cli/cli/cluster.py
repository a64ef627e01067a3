"""Points of a sweep on a Dask or Ray cluster, through joblib's backends: points and an address go in, rows or failures
come out.

Programs and specifications travel with the points, so the workers need toast and no shared files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from toast_cli.cli.sweep_points import SweepPoint, run_point
from toast_cli.cli.workers import PointFailure, run_alone
from toast_cli.errors import InputError, MissingExtraError, UsageError
from toast_cli.inputs import PROGRAM_BYTES, read_file

if TYPE_CHECKING:
    from toast_cli.report.sweep_table import SweepRow

OPTION = "--cluster"
ENGINES = ("dask", "ray")


@dataclass(frozen=True)
class Shipped:
    """A point with the content of the files it names; None for names that are not files of this machine."""

    number: int
    point: SweepPoint
    program: bytes | None
    mesh: bytes | None


def parse_address(text: str) -> tuple[str, str]:
    """(engine, address) of `dask://HOST:PORT`, `ray://HOST:PORT` or `ray://auto`. Raises UsageError."""
    engine, separator, address = text.partition("://")
    if engine not in ENGINES or not separator or not address:
        hint = "write dask://HOST:PORT (of its scheduler), ray://HOST:PORT or ray://auto"
        raise UsageError(f'"{text}" is not the address of a cluster', where=OPTION, hint=hint)
    return engine, address


def run_on_cluster(
    points: Sequence[SweepPoint], address: str, jobs: int | None
) -> Iterator[tuple[int, SweepRow | PointFailure]]:
    """(number of the point, its row or the reason of its failure) as each is done. `jobs`: points at a time (None: as
    many as the cluster has room for).

    Raises MissingExtraError if joblib or the engine is not installed, UsageError if the cluster cannot be reached.
    """
    engine, place = parse_address(address)
    try:
        import joblib
    except ImportError:
        raise _missing(engine) from None
    with _connected(engine, place) as options, joblib.parallel_config(backend=engine, **options):
        backend, _ = joblib.parallel.get_active_backend()
        workers = jobs or -1
        if getattr(backend, "supports_return_generator", False):
            rounds = [range(len(points))]
            parallel = joblib.Parallel(n_jobs=workers, return_as="generator_unordered", batch_size=1)
        else:  # Ray returns everything at the end: submit as many points at a time as there is room for
            room = max(1, joblib.effective_n_jobs(workers))
            rounds = [range(start, min(start + room, len(points))) for start in range(0, len(points), room)]
            parallel = joblib.Parallel(n_jobs=workers, batch_size=1)
        for numbers in rounds:
            yield from parallel(joblib.delayed(run_shipped)(_ship(number, points[number])) for number in numbers)


def run_shipped(shipped: Shipped) -> tuple[int, SweepRow | PointFailure]:
    """On a worker: runs the point in its own process, which may crash, with its files in a temporary folder."""
    with TemporaryDirectory(prefix="toast-") as folder:
        request = shipped.point.request
        program = _unpacked(Path(folder, "program"), request.program, shipped.program)
        mesh = _unpacked(Path(folder, "mesh"), request.mesh, shipped.mesh)
        local = replace(shipped.point, request=replace(request, program=program, mesh=mesh))
        result = run_alone(local, run_point)
    if isinstance(result, PointFailure):
        return shipped.number, replace(result, reason=result.reason.replace(program, request.program))
    return shipped.number, replace(result, program=request.program, mesh=request.mesh)


def _ship(number: int, point: SweepPoint) -> Shipped:
    return Shipped(number, point, _content(point.request.program), _content(point.request.mesh))


def _content(path: str) -> bytes | None:
    """The file's content; None for a file that is too large, which makes its point fail on the worker."""
    try:
        return read_file(path, PROGRAM_BYTES) if Path(path).is_file() else None
    except (InputError, OSError, ValueError):
        return None


def _unpacked(folder: Path, name: str, content: bytes | None) -> str:
    """The path of the content once unpacked; the name itself if there is none."""
    if content is None:
        return name
    folder.mkdir()
    path = folder / Path(name).name
    path.write_bytes(content)
    return str(path)


@contextmanager
def _connected(engine: str, address: str) -> Iterator[dict[str, Any]]:
    """Connects to the cluster; yields the arguments of joblib's backend."""
    connect = {"dask": _dask, "ray": _ray}[engine]
    try:
        close, options = connect(address)
    except ImportError:
        raise _missing(engine) from None
    except (OSError, TimeoutError, ConnectionError, RuntimeError, ValueError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        hint = "is it running, and of the same version as here?"
        raise UsageError(f"cannot reach {engine}://{address}: {why}", where=OPTION, hint=hint) from None
    try:
        yield options
    finally:
        close()


def _dask(address: str) -> tuple[Any, dict[str, Any]]:
    from distributed import Client

    client = Client(f"tcp://{address}", timeout=CONNECT_SECONDS, set_as_default=False)
    return client.close, {"client": client}


def _ray(address: str) -> tuple[Any, dict[str, Any]]:
    import ray
    from ray.util.joblib import register_ray

    ray.init(address=address if address == "auto" else f"ray://{address}", log_to_driver=False)
    register_ray()
    return ray.shutdown, {}


def _missing(engine: str) -> MissingExtraError:
    return MissingExtraError(
        f"joblib or {engine} is not installed", where=OPTION, hint=f"pip install '.[{engine}]' in a clone of toast"
    )


CONNECT_SECONDS = 10
