"""The gradients of a whole plan, as a graph of plans.

- factors: what a gradient is multiplied by, as operators of plans
- walk: the operators of a plan, last to first; contractions: gradients of products and convolutions;
  attention; statistics: of norms and softmax
- value: the graph with the bytes of each choice; run: its plans compiled
"""
