"""Preprocessing of images and videos as data."""
