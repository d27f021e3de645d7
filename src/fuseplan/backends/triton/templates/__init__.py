"""The templates for GPUs, the best first."""
