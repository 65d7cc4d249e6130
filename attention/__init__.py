"""Attention over a paged KV cache: the metadata of a mixed batch and the backends that compute it."""
