"""Data sets and encoders from raw files; encodings made once."""
