"""Any XLA on an unmeasured chip: the passes that XLA has on every platform, and the chip's peak rates."""

from __future__ import annotations

from toast_cli.price.profile import CompilerProfile, FusionLimits

RELEASE = (0,)

PASSES = frozenset(
    {
        "fusion", "output-fusion", "recomputation", "polynomials", "shared-exponentials", "narrow-stores",
        "multi-output-fusion", "reduction-fusion", "early-results", "loops-first", "in-place-updates", "loop-copies",
        "scan-unification", "overlap", "reduction-combining", "common-subexpressions",
    }
)  # fmt: skip

# erf and erfc as libtpu 0.0.42.1 estimates arrays of 4096^2 on v4 (15, 52) and v6e (15, 48); the others are taken for
# as long as erfc.
POLYNOMIALS = {"chlo.erf": 15.0} | {
    f"chlo.{name}": 50.0 for name in ("erfc", "erf_inv", "lgamma", "digamma", "polygamma", "zeta", "bessel_i1e")
}
FUSION = FusionLimits(polynomials=POLYNOMIALS)

PROFILES = {
    "": CompilerProfile(
        "XLA", "any", "", PASSES, fusion=FUSION, sources={
            "passes": "what XLA:TPU and XLA:GPU have in common",
            "attained": "the peak rates",
            "memory_tile": "unknown, arrays are not padded",
            "fusion": "polynomials: `python benchmarks/calibrate_ops.py --compile`, libtpu 0.0.42.1",
            "temporary_growth": "1: nothing is known",
        },
    )
}  # fmt: skip
