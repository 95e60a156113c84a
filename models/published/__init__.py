"""Published checkpoints: reading their layouts, saying what fits, keeping what was read."""
