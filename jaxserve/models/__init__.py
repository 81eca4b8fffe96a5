"""Model families as data over one decoder. `config` and `families` import no jax."""
