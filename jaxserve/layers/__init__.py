"""The pieces a decoder is made of: parameters with logical axes, and pure forward functions."""
