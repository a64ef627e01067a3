"""Programs of every binary format, and HLO, as MLIR bytecode.

Enters: bytes of a known kind. Leaves: MLIR bytecode, or whatever jaxlib's readers raise. They may also end the process,
so this runs in a child (see `handover`).
"""

from __future__ import annotations

from collections.abc import Callable

from toast_cli import xla
from toast_cli.frontend.donation import mark_donations, mark_host_memory
from toast_cli.frontend.left_out import take_markers, with_markers


def from_bytecode(data: bytes) -> bytes:
    """Bytecode is what is wanted. Whether it is intact shows when it is parsed."""
    return data


def from_portable(data: bytes) -> bytes:
    """A StableHLO portable artifact."""
    return xla.write_bytecode(xla.parse_portable_artifact(xla.make_context(), data))


def from_hlo_text(data: bytes) -> bytes:
    """HLO as XLA prints it, in UTF-8."""
    return from_hlo_proto(xla.hlo_text_to_proto(with_markers(data.decode("utf-8"))))


def from_hlo_proto(proto: bytes) -> bytes:
    """A serialized HloModuleProto; which buffers it donates, and what lies in the host's memory, become attributes of
    the arguments and results.
    """
    module = xla.parse_module(xla.make_context(), xla.hlo_proto_to_stablehlo(proto))
    mark_donations(module, proto)
    mark_host_memory(module, proto)
    take_markers(module)
    return xla.write_bytecode(module)


CONVERSIONS: dict[str, Callable[[bytes], bytes]] = {
    "bytecode": from_bytecode,
    "portable": from_portable,
    "hlo-text": from_hlo_text,
    "hlo-proto": from_hlo_proto,
}
