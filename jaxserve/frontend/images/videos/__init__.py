"""Videos as the models take them: frames, sizes and times."""
