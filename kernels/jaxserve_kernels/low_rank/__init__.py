"""Low-rank additions to a matmul: each row with the ranks of its own adapter."""
