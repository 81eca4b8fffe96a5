"""Choice of the next token: `params` declares the options without jax; each stage of the sampler is a module."""
