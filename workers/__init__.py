"""What runs on a device: model, weights, KV cache, sampler, and the worker that carries out step plans."""
