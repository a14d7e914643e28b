"""A set loss over pairs of samples: tasks, models, and who else computes its gradient.

pairs, encoders      the samples and the models: MiniLM, a CNN, an LSTM
workloads            what every peer is asked for
peers, public_peers  who computes it, and the reference for each
shard_cost, memory   what one shard takes; the peak of one step, in a fresh process
"""
