"""Converts programs of every binary format, and HLO, to MLIR bytecode.

Enters: bytes of a known kind. Leaves: MLIR bytecode, or whatever jaxlib's readers raise. They may also end the process,
so this runs in a child (see `handover`).
"""

from __future__ import annotations

from collections.abc import Callable

from toast_cli import xla
from toast_cli.frontend.donation import mark_donations, mark_host_memory
from toast_cli.frontend.left_out import take_markers, with_markers


def from_bytecode(data: bytes) -> bytes:
    """Returns bytecode as it is; the parser checks it later."""
    return data


def from_portable(data: bytes) -> bytes:
    """Converts a StableHLO portable artifact."""
    return xla.write_bytecode(xla.parse_portable_artifact(xla.make_context(), data))


def from_hlo_text(data: bytes) -> bytes:
    """Converts HLO text as XLA prints it, in UTF-8."""
    return from_hlo_proto(xla.hlo_text_to_proto(with_markers(data.decode("utf-8"))))


def from_hlo_proto(proto: bytes) -> bytes:
    """Converts a serialized HloModuleProto; donated buffers and host memory become attributes of the arguments and
    results."""
    module = xla.parse_module(xla.make_context(), xla.hlo_proto_to_stablehlo(proto))
    mark_donations(module, proto)
    mark_host_memory(module, *xla.hlo_on_host(proto))
    take_markers(module)
    return xla.write_bytecode(module)


CONVERSIONS: dict[str, Callable[[bytes], bytes]] = {
    "bytecode": from_bytecode,
    "portable": from_portable,
    "hlo-text": from_hlo_text,
    "hlo-proto": from_hlo_proto,
}
