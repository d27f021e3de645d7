"""Other programs' interfaces to fusion plans, which the rest of the package does not need.

- `miopen`: MIOpen's Fusion API; `fuseplan.miopen` has its names
- `miopen_driver`: MIOpenDriver's lines, and the command `fuseplan driver`
"""
