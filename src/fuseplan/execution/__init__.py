"""A plan becomes a program: the best template is selected, built, run, saved and loaded."""
