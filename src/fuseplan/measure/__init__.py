"""How fuseplan measures: one clock and one protocol for everything that it says about time.

- `spaces`: NumPy's arrays and torch's tensors, and all that differs between them.
- `data`: fresh random tensors for a plan, and how far a result is from float64.
- `clock`: times callables against each other, interleaved, in blocks of calls: the host's clock, a GPU's.
- `stats`: what is kept of the samples: how many, least, median, p90, p99.
- `machine`: what a measurement was made on and with: processor, GPU, cores, versions, commit.
- `quiet`: whether other programs ran meanwhile.
- `peaks`, `peak_kernels`: the most this machine can do, measured; a kernel's floor is taken from it.
- `ground`: where a plan is tried: tensors in the target's memory, the right answer, the clock that fits.
"""
