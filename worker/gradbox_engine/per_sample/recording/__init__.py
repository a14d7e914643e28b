"""Recording: which function calls use a parameter, and the gradients wanted at their outputs.

Read `function_calls` (the function mode, the run by a plan), `use_log` (what a probe run uses, also
where no function call shows it), `steps` (how a planned use runs); `decompositions` and
`index_selections` say what is known of single functions, `shared_numbers` whether samples may
decide something for each other, `batch_axis` which dim of a tensor holds the samples.
"""
