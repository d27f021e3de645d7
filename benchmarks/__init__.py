"""Tools of a checkout, which the installed package does not have.

- `command`: what `fuseplan bench` measures besides a plan: suites, by `suite` and `standings`, and the
  benchmarks of `special`: `accuracy`, `compile_time`, `footprint` and `gpu_host`.
- `peers`: further libraries, and further forms of the installed package's peers.
- `recorded`: results, read again; `shapes`: MIOpen's published figures.
- `demo`: the main job in one command.
- `crossbuild`: compiles all GPU templates for any GPU, and judges the result.
- `filled`: fills the caches of compilers for suites on a GPU.
- `commands`: the commands `demo` and `crossbuild`.
- `report`: charts, and the pages that are made from results.
"""
