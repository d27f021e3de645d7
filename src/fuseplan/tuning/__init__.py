"""Measured decisions: which candidate is fastest, and whether fusing paid.

- `tune`: candidates checked, then timed, within a budget.
- `verdict`: the fused kernel beside the unfused runs.
"""
