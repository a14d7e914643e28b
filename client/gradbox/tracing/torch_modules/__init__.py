"""Modules of torch's own, recorded without what a symbol cannot answer.

A symbol has no rank and no value. Some modules of `torch.nn` ask for a rank to check their argument
or to choose between two layouts; others call functions that no graph may hold, whose formula is
made of functions that it may. Each of these is recorded by a function of its own here; all others
are traced through as they are. What is recorded is what a module computes with gradients: value,
gradients and buffers are its own.

Read `table` first: which method of which class is recorded by what, and how it is put in place.
`assertions` records what the box checks instead. Then by kind: `normalisation`, `spectral` (also
weight norm), `recurrent`, `attention`, `lookup` (bags of embeddings, adaptive softmax), `pooling`,
`convolution`, `losses` (and the functions behind them), `distributions` (those of
`torch.distributions`). `refused` are those that no graph can hold.
"""
