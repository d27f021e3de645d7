"""A model as a graph of operators, above plans: read from a framework, cut into plans, run.

- type: the shape, dtype and axes of a value
- op: what an operator of a graph is; ops: the operators; layer: plans' operators in a graph
- graph: nodes, constants, inputs and outputs, checked; text: its text and JSON
- evaluate: its meaning in float64
- find: the graph cut into plans; region: formulas that become one plan; formulas: an element's formula
- pads: padding in front of a window; flattened: products of rows between views; rules: those of users
- write: a formula as operators of plans; why: the catalogue of reasons
- session: a graph that runs; schedule: the order; place: where values lie, and copies; memory: the arena
"""
