"""Programs of published packages: models, optimisers and training steps that nobody wrote for toast.

`python -m benchmarks.real.lower` lowers them from abstract shapes into `build/real` (the packages are the extra
`corpus`; neither their code nor their programs are stored in this repository). `python -m benchmarks.real.quick`
compares what toast predicts of them with what XLA compiles. Programs are split by family into `fit`, which may be
looked into, and `judge`, which are only measured.
"""
