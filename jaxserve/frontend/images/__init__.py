"""From decoded images to the patches that an engine encodes, and to their places in a prompt. numpy and Pillow only."""
