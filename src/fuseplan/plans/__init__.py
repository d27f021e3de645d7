"""Plans: an input and its operators as a value, a text and a graph."""
