"""One set-loss job over several devices: each runs a contiguous range of the shards.

    Z = cat(Z₁ … Z_k),   dL/dθ = Σᵣ Σ_{i in range r} z̄ᵢᵀ ∂f(xᵢ; θ)/∂θ

Read `protocol` for what passes between the coordinator and a device, `set_gradient` for the
coordinator, and `held_job` for a device: replay/ does the work in both.
"""
