"""Results that outlast a process: compiled kernels and measured choices."""
