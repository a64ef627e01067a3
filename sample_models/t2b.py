"""T2B: a training step of a decoder shaped like Gemma-2B, layers unrolled."""

from __future__ import annotations

from dataclasses import replace

from sample_models.common import Sample, main
from sample_models.decoder import Config, training

T2B = Config(layers=18, model=2048, heads=8, kv_heads=1, head=256, ff=16384, vocab=256128, batch=32, seq=1024)
TINY = Config(layers=2, model=64, heads=8, kv_heads=1, head=48, ff=128, vocab=256, batch=16, seq=32)


def of_layers(layers: int) -> Sample:
    """T2B with another number of layers, for measuring how run time grows with the program."""
    return training(f"t2b_{layers}_layers", f"T2B with {layers} layers", replace(T2B, layers=layers))


SAMPLES = (
    training("t2b_train", "Gemma-2B-like decoder, 18 layers unrolled, batch 32 x 1024: training step", T2B),
    training("t2b_tiny", "its twin of 2 layers", TINY),
)

if __name__ == "__main__":
    main(SAMPLES)
