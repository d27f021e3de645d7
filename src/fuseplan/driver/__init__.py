"""MIOpenDriver's fusion problems: letters on a line, and the plan that they say.

- `letters`: the table of letters, modes and activations, and how a value is read.
- `problem`: from letters to a plan.
- `command`: from a plan to the line that reproduces it.
"""
