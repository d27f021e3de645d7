"""MIOpenDriver's fusion problems: letters on a line, and the plan that they say.

- `letters`: the table of letters, modes and activations, and how a value is read
- `problem`: from letters to a plan, and from a plan to the line that reproduces it
- `sweep`: the lines of a file and of every combination, and a line's words
- `cli`: the command `fuseplan driver`; `run`: one line, run; `report`: the report on many
"""

from fuseplan.compat.miopen_driver.problem import command_of as command_of
