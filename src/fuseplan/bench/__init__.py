"""Measures plans beside the libraries that people would use instead.

- `suite`: reads data/suites/*.toml: plans by their text, in groups, with aims.
- `peers`: the other libraries, each in its best form, and ourselves.
- `command`: what a benchmark takes, shows and keeps; `special`: benchmarks that only a checkout has.
- `setting`: how a suite is run, and its rows.
- `runner`: on a CPU, each peer in a process of its own (`worker`, `processes`, `lines`), so that their thread
  pools do not disturb one another; every result is checked against float64, then all peers take turns.
- `gpu`: the same on a GPU, all peers in one process; `gpu_command`: without the command line's packages.
- `results`: what was measured, one JSON object a line, in benchmarks/results.
- `table`, `markdown`: the tables, made from those lines.
- `tuning`, `tune_worker`, `tune_command`: tunes the cases of suites.
"""
