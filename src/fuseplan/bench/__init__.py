"""Measures plans beside the libraries that people would use instead.

- `peers`: the other libraries, each in its best form, and ourselves.
- `options`, `command`: the options of a benchmark; its progress, table and results.
- `runner`: on a CPU, each peer in a process of its own (`worker`), so that their thread pools do
  not disturb one another; every result is checked against float64, then all peers take turns.
- `gpu`: the same on a GPU, all peers in one process.
- `results`: the measurements, one JSON object a line.
- `table`, `markdown`: the table, made from those lines.
"""
