"""Options of other trainers of FLUX.1 as fields of ``spec.run``, and the file that they give; no torch."""
