"""LoRA files: the layouts of other tools, and what is done with them beside training."""
