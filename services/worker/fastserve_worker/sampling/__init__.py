"""Drawing tokens on the last stage. Only `sampler` needs torch."""
