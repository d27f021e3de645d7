"""Measures plans beside the libraries that people would use instead.

- `suite`: reads data/suites/*.toml: plans by their text, in groups, with aims.
- `peers`: the other libraries, each in its best form, and ourselves.
- `worker`: one process a peer, so that their thread pools do not disturb one another.
- `runner`: checks every result against float64, then times all peers in interleaved rounds.
- `results`: what was measured, one JSON object a line, in benchmarks/results.
- `table`: the tables, made from those lines.
- `compile_time`, `overhead`, `footprint`, `accuracy`: what else a user pays for or relies on.
- `gpu`, `gpu_host`, `gpu_command`: the same on a GPU, all peers in one process.
"""
