"""From a checkpoint's tensors to placed device arrays, one tensor at a time."""
