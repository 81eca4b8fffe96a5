"""Files that sentence-transformers saves beside a model: its modules after the transformer, their weights, and prompts."""
