"""From a graph to a function, on the box. A graph is a stranger's: nothing here trusts it.

Read `build` first, the function, and then `program`, its steps. `bounded_arithmetic` holds Python
arithmetic to sizes that a tensor could have, `kernel_arguments` checks arguments that a kernel does
not check, `crashing_kernels` keeps kernels from the calls on which they crash, `in_place_copies`
keeps the caller's tensors from being written to, and `memory_meter` refuses a call before it
allocates more than a budget.
"""
