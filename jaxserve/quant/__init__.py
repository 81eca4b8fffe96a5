"""Quantised weights: `QuantArray`, and one file per format in `formats/`.

Importing this package imports no jax: the API process and the command line read formats' names from it.
"""
