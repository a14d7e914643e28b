"""From a Python function to a graph, on the laptop.

Read `trace` first. It runs the function once on `symbols` (torch.fx proxies), which know by their
`node_facts` how many pieces a tensor was cut into, and by `bytecode` whether a truth value is asked
for by a check that raises. `recording` holds the graph while it grows and decides which nodes may
enter it, methods in their `plain_method` form and no dropout that drops nothing (`dropouts`);
`module_state` has the parameters and buffers of an nn.Module behind the function.

`interception` is what surrounds the function, for the `current` thread: it puts `stand_ins` in
place of what Python offers no hook for (`len`, `math.sqrt`, `isinstance`: `type_tests`), and by
`replacing` puts all back. `torch_modules` has what is recorded of torch's own modules.

`encode` writes the graph as JSON. What cannot be recorded is refused with the user's own line:
`source_location`, `refusals`, `default_dtype`; so is a write that the box would show elsewhere than
here: `writes`.
"""
