"""How fuseplan measures: one clock and one protocol for everything that it says about time.

- `clock`: times callables against each other, interleaved, in blocks of calls.
- `stats`: what is kept of the samples: how many, least, median, p90, p99, and geometric means of ratios.
- `data`: fresh random arrays for a plan.
- `machine`: what a measurement was made on: processor, cores, versions, commit.
- `peaks`, `peak_kernels`: the most this machine can do, measured; a kernel's floor is taken from it.
- `kept`: where such measurements are stored.
- `gpu_clock`, `gpu_data`, `gpu_machine`, `gpu_peaks`: the same on a GPU, with torch.
- `ground`: where a plan is tried: tensors in the target's memory, the right answer, the clock that fits.
"""
