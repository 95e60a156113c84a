"""State-space mixers: selective scan (S6), Mamba-2 (SSD), Mamba-3, and residual streams around them."""
