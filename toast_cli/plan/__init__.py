"""Plans: ordered decisions, and their lowering to what each op computes on and which collectives it needs.

A worked example: a perceptron of two layers on two devices, stage by stage. The tests run every line.

>>> from toast_cli.dimensions import analyse
>>> from toast_cli.price.evaluator import Evaluator
>>> from toast_cli.frontend import load
>>> from toast_cli.hardware import load_spec
>>> from toast_cli.plan.decisions import Shard
>>> from toast_cli.plan.lower import lower
>>> from toast_cli.plan.problem import make_problem

>>> text = '''
... func.func @main(%x: tensor<8x4xf32>, %up: tensor<4x16xf32>, %down: tensor<16x4xf32>) -> tensor<8x4xf32> {
...   %0 = stablehlo.dot_general %x, %up, contracting_dims = [1] x [0]
...     : (tensor<8x4xf32>, tensor<4x16xf32>) -> tensor<8x16xf32>
...   %1 = stablehlo.tanh %0 : tensor<8x16xf32>
...   %2 = stablehlo.dot_general %1, %down, contracting_dims = [1] x [0]
...     : (tensor<8x16xf32>, tensor<16x4xf32>) -> tensor<8x4xf32>
...   return %2 : tensor<8x4xf32>
... }'''
>>> program = load("perceptron.mlir", content=text.encode()).program
>>> [op.name for op in program.ops[3:6]]  # the first three are the arguments, the last is the result
['stablehlo.dot_general', 'stablehlo.tanh', 'stablehlo.dot_general']

Dimensions. Dimensions that must be split alike form a class, classes that look alike a group. The 16 hidden units are
one: dimension 1 of `up` and dimension 0 of `down`.

>>> dimensions = analyse(program)
>>> [(group.name, group.size) for group in dimensions.groups]
[('batch', 8), ('features_4', 4), ('ff', 16), ('features_4_2', 4)]

Patterns (`plan/problem.py`). An op has a *factor* for each dimension that it runs over. The second product runs over
the batch, what it makes, and the hidden units, which it sums over. Ops with equal factors and groups share a pattern.

>>> problem = make_problem(program, dimensions, load_spec("h100:2").mesh({"x": 2}))
>>> second = problem.op_pattern[5]
>>> [
...     (dimensions.groups[group].name, kind.name)
...     for group, kind in zip(problem.patterns[second].groups, problem.patterns[second].form.kinds)
... ]
[('batch', 'PARALLEL'), ('features_4_2', 'PARALLEL'), ('ff', 'REDUCTION')]

A plan. Hidden units are split over the mesh axis `x`, which is axis 0. An *op sharding* says what an op computes on:
per array and dimension, the axes that split it. The second product reads both operands split along the hidden units,
and adds up half of them: its result is partial over axis 0.

>>> megatron = (Shard(group=2, axis=0, sides=()),)
>>> op_sharding = problem.op_sharding(second, megatron)
>>> op_sharding.operands, op_sharding.computed, op_sharding.reduced
((((), (0,)), ((0,), ())), (((), ()),), (0,))

Partial sums (`plan/partials.py`). An all-reduce completes the result. If a later decision splits the batch over the
same axis, the batch finds the axis taken inside the products and gets it outside: the sum is reduce-scattered, and `x`
is gathered at its use. That is sequence parallelism between Megatron's blocks.

>>> [(one.kind, one.reason, one.local_bytes) for one in lower(problem, megatron).collectives]
[('all-reduce', 'partial', 128.0)]
>>> between = (*megatron, Shard(group=0, axis=0, sides=()))
>>> [(one.kind, one.reason, one.local_bytes) for one in lower(problem, between).collectives]
[('all-gather', 'reshard', 128.0), ('reduce-scatter', 'partial', 64.0)]

Cost (`price/evaluator.py`). The evaluator prices patterns and arrays, not ops, and looks again only at what a
plan changes. Each device holds all of `x` (128 bytes) and half of both weights, or half of everything.

>>> evaluator = Evaluator(problem)
>>> [evaluator.cost(plan).argument_bytes for plan in ((), megatron, between)]
[640.0, 384.0, 320.0]
"""
