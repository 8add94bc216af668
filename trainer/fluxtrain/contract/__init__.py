"""What operator and trainer agree on; pydantic, PyYAML and the standard library only."""
