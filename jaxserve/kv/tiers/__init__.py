"""Tiers below the device's prefix cache: pages in host memory, on disk and at other engines, found by their hashes."""
