"""MIOpen's Fusion API: declarations of its functions, its objects, and the work of each function."""
