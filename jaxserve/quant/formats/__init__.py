"""One module per quantisation format, found by `quant.registry`. Modules that begin with `_` are shared by several."""
