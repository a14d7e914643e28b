"""Functions as graphs of allowed operations: the form that laptop and box share.

Read `schema` first: the JSON, validated as `wire_form` says. `allow_list` are the names that may
stand in a graph; `check` refuses a graph that must not run, and has the arguments with a rule of
their own. None of these knows torch: the service uses them. `targets` (from a name to
torch's function and back) and `call_signature` (which arguments a function takes) do.
docs/graphs.md states the form.
"""
