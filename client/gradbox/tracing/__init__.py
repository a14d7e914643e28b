"""From a Python function to a graph, on the laptop.

Read `trace` first. It runs the function once on `symbols` (torch.fx proxies); `recording` holds the
graph while it grows and decides which nodes may enter it, methods in their `plain_method` form and
no dropout that drops nothing (`dropouts`); `module_state` has the parameters and buffers of an
nn.Module behind the function; `interception` replaces what Python offers no hook for,
`math.sqrt`, `len` and `isinstance` (`type_tests`) among it, for the `current` thread, and puts it
back; `bytecode` tells whether a truth value is asked for by a check that raises; `encode` writes
the graph as JSON. What cannot be recorded is refused with the user's own line: `source_location`,
`refusals`, `default_dtype`; so is a write that the box would show elsewhere than here: `writes`.
"""
