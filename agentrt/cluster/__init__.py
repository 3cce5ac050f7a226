"""One run over many machines: one dispatcher and one record stream here, engines and episodes in Ray's actors."""
