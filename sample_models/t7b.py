"""T7B: a training step of a decoder shaped like Gemma-7B, layers unrolled."""

from __future__ import annotations

from sample_models.common import main
from sample_models.decoder import Config, training

T7B = Config(layers=28, model=3072, heads=16, kv_heads=16, head=256, ff=24576, vocab=256128, batch=16, seq=1024)
TINY = Config(layers=3, model=96, heads=16, kv_heads=16, head=24, ff=192, vocab=512, batch=8, seq=32)

SAMPLES = (
    training("t7b_train", "Gemma-7B-like decoder, 28 layers unrolled, batch 16 x 1024: training step", T7B),
    training("t7b_tiny", "its twin of 3 layers", TINY),
)

if __name__ == "__main__":
    main(SAMPLES)
