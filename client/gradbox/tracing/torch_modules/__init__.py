"""Modules of torch's own, recorded without what a symbol cannot answer.

A symbol has no rank and no value. Some modules of `torch.nn` ask for a rank to check their argument
or to choose between two layouts; others call functions that no graph may hold, whose formula is
made of functions that it may. Those that losses are made of (losses, normalisation, attention,
convolution) are recorded by a function of their own here, the few others are refused by name; all
else is traced through as it is. What is recorded is what a module computes with gradients: value,
gradients and buffers are its own.

Read `table` first: which method of which class is recorded by what. `formulas` has what is recorded
by kind, `distributions` those of `torch.distributions`; `refused` are those that no graph holds.
"""
