"""Pages that are made from code: the reference, the tables of support, and the stub of MIOpen's names."""
