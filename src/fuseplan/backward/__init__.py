"""The gradients of a whole plan, as a graph of plans.

- factors: what a gradient is multiplied by, as operators of plans
- walk: the operators of a plan, last to first; operators: the gradients of contractions, attention, norms and
  softmax
- value: the graph with the bytes of each choice; run: its plans compiled
"""
