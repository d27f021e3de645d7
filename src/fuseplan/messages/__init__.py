"""Texts for readers: reasons of refusals, marked excerpts, other libraries' names."""
