"""The decoder: config, weights, linear layers, the forward pass."""
