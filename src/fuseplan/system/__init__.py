"""The process and its files: limits, locks, child processes, and files that others may have written."""
