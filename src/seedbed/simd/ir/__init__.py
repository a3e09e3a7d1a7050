"""Programs as scalar graphs, and what every stage must know of them. This stage knows nothing of JAX."""
