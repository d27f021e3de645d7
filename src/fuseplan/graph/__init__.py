"""A model as a graph of operators, above plans: read from a framework, cut into plans, run.

- type: the shape, dtype and axes of a value
- op: what an operator of a graph is; ops: the operators; layer: plans' operators in a graph
- graph: nodes, constants, inputs and outputs, checked; text: its text and JSON
- evaluate: its meaning in float64
"""
