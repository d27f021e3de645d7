"""Measured decisions: which candidate is fastest, and whether fusing paid.

- `search`: candidates checked, then timed, within a budget.
- `verdict`: the fused kernel beside the unfused runs.
"""
