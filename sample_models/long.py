"""Long: a training step on one very long sequence, with fewer heads than devices: the sequence wants splitting."""

from __future__ import annotations

from sample_models.common import main
from sample_models.decoder import Config, training

LONG = Config(
    layers=4, model=1024, heads=4, kv_heads=4, head=256, ff=4096, vocab=32000, batch=1, seq=32768, remat=True
)  # fmt: skip
TINY = Config(layers=2, model=32, heads=4, kv_heads=4, head=24, ff=64, vocab=160, batch=1, seq=128, remat=True)

SAMPLES = (
    training("long_train", "decoder of 4 layers with remat on one sequence of 32,768 tokens: training step", LONG),
    training("long_tiny", "its twin of 2 layers and 128 tokens", TINY),
)

if __name__ == "__main__":
    main(SAMPLES)
