"""Sizes of images, patches and tokens, as the preprocessing of each kind of checkpoint says."""
