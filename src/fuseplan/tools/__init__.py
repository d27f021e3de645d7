"""Tools of a checkout, which the installed package does not have.

- `benchmarks`: what `fuseplan bench` measures besides suites; `accuracy`, `compile_time`, `footprint` and
  `gpu_host` are what else a user pays for or relies on.
- `demo`: the main job in one command.
- `crossbuild`: compiles all GPU templates for any GPU, and judges the result.
- `commands`: the commands `demo` and `crossbuild`.
- `report`: charts, and the pages that are made from code and results.
"""
