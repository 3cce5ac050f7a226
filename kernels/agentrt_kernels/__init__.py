"""The operations of a decoder and its sampler, one folder each.

`<op>/reference.py` is the definition: torch on any device, or numpy in float64 for `sample`. `<op>/cpu.py` is the
same functions compiled by numba for float32 on the CPU. There a row's bits depend on that row alone: not on how many
rows there are, where it stands, how a prompt was cut into chunks, or how many threads run.
"""
