"""Who owns which page of the KV pool. Pure Python, no jax: the pages themselves live in `runner`."""
