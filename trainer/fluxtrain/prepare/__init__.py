"""Makes data sets from raw ones."""
