"""From a Python function to a graph, on the laptop.

Read `trace` first. It runs the function once on `symbols` (torch.fx proxies): that page says what
Python asks of one, and what it is told. `recording` holds the graph while it grows and decides
which nodes may enter it, each in the one form of its kind of `calls`; `module_state` has the
parameters and buffers of an nn.Module behind the function.

`interception` is what surrounds the function, for the `current` thread: it puts stand-ins in place
of what Python offers no hook for (`len`, `math.sqrt`, `isinstance`), and puts all back.
`torch_modules` has what is recorded of torch's own modules.

`encode` writes the graph as JSON. What cannot be recorded is refused with the user's own line:
`source_location`, `refusals`; so is a write that the box would show elsewhere than here: `writes`.
"""
