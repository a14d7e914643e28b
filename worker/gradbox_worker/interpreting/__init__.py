"""From a graph to a function, on the box. A graph is a stranger's: nothing here trusts it.

Read `build` first, the function, and then `program`, its steps. `bounded_arithmetic` holds Python
arithmetic to sizes that a tensor could have, `kernel_arguments` checks arguments that a kernel does
not check, `crashing_kernels` keeps kernels from the calls on which they crash, and
`in_place_copies` keeps the caller's tensors from being written to. What a graph allocates is
limited with all else that its job does, see `computations.memory_limit`.
"""
