"""MIOpen's Fusion API: declarations of its functions, its objects, and what each function does with them."""
