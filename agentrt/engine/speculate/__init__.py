"""Speculative decoding: propose ids, verify several in one step, keep what the policy itself would have sampled."""
